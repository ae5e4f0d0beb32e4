"""A copy of the repository to be broken, and tests run in it; for breaks.py and mutate.py.

Each run of pytest is a fork of this process, which has imported TensorFlow and used none of it:
no thread runs yet, and two seconds of import are paid once. Ranks that a test starts are processes
of their own, with imports of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[1]
_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl(2)


class Ended(NamedTuple):
    """What came of some tests."""

    passed: bool
    by: str  # the test that failed, or why there is none
    seconds: float
    output: str


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A copy of the files that git knows or would add, as they are now."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="broken-") as folder:
        root = Path(folder) / "repository"
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
        (root / ".venv").symlink_to((ROOT / ".venv").resolve())
        yield root


def warm_up() -> None:
    """Imports what tests import most; processes that lose their parent come to this one."""
    # A broken file may have the size and, in the same second, the time of the one before it.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    _prctl(_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no scratch copy is left
    sys.path.insert(0, str(ROOT / "template"))
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    import horovod.tensorflow  # noqa: F401

    sys.path.pop(0)
    for name in [n for n in sys.modules if n.split(".")[0] == "engine"]:
        del sys.modules[name]


def run_tests(
    root: Path, tests: Sequence[str], timeout: float, plugin: object = None, first: bool = True
) -> Ended:
    """pytest of `tests` (ids, relative to root), to the `first` that fails; a hang is a failure.

    Nothing that it started runs on afterwards, also where it was killed.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        child = os.fork()
        if child == 0:
            _test(root, [*["-x"] * first, *tests], log.fileno(), plugin)
        try:
            code = _wait(child, start + timeout)
        finally:
            _end_all()
        log.seek(0)
        output = log.read()
    by = "hang" if code is None else f"exit code {code}"
    for line in output.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            by = line.split(" ", 1)[1].split(" - ")[0]
            break
    return Ended(code == 0, by, time.monotonic() - start, output)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _test(root: Path, words: Sequence[str], log: int, plugin: object) -> None:
    """In the fork; does not return."""
    code = 70
    try:
        os.setsid()
        _prctl(_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(root)
        # A test finds the copy's modules, not those here.
        here = (f"{ROOT}/tests", f"{ROOT}/template")
        sys.path[:] = [path for path in sys.path if path and not path.startswith(here)]
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(here):
                del sys.modules[name]
        import pytest

        flags = ["-q", f"--config-file={root}/pyproject.toml", "-p", "no:cacheprovider"]
        code = int(pytest.main([*flags, *words], plugins=[plugin] if plugin else []))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(child: int, end: float) -> int | None:
    """Its exit code, negative for a signal; None where it takes too long."""
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return None


def _end_all() -> None:
    """Ranks and launchers too: who lost its parent is a child of this process."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
