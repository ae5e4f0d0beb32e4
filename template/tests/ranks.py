"""Starts real ranks for the tests, and never waits for ever: what hangs is killed and shown."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
_LAST_LINES = 25  # of each rank, shown when a launch times out or fails unexpectedly

ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(PROJECT.parent / "hvdkit/src"),  # until it is installed
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


_HORUN = (
    "from horovod.runner import launch; launch.gloo_built = lambda verbose=False: True; "
    "launch.run_commandline()"
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a launch ended: the launcher's exit code, and everything that was printed."""

    code: int
    output: str
    seconds: float

    def errors(self) -> list[str]:
        """The lines that start with `error:`, whatever rank they come from."""
        return re.findall(r"^(?:\[[\d,]+\]<\w+>:)?error: (.*)$", self.output, re.MULTILINE)


def launch(
    ranks: int,
    command: list[str],
    backend: str = "",
    timeout: float = 400,
    env: dict[str, str] | None = None,
    launcher_flags: list[str] | None = None,
    kill_when: Callable[[], bool] | None = None,
    python: str = sys.executable,
) -> Launch:
    """Runs `python COMMAND` in the project on `ranks` ranks and waits for its end.

    Args:
      backend: gloo, horovodrun (over Gloo) or mpi (through horovodrun), mpirun, or alone (no
        launcher, one rank). gloo is horovodrun without its import of TensorFlow, which only asks
        whether there is Gloo. By default what starts soonest: MPI's ranks get in each other's way
        where they are more than cores.
      kill_when: SIGKILL everything as soon as this is true; the code is then -9.
    Raises:
      AssertionError: it did not end in `timeout` seconds; it was killed, and the message holds
        each rank's last lines.
    """
    backend = backend or {1: "alone", 2: "mpirun"}.get(ranks, "gloo")
    prefix = {
        "alone": [],
        "mpirun": ["mpirun", "-np", str(ranks), "--bind-to", "none", "--tag-output"],
        "gloo": [sys.executable, "-c", _HORUN, "--gloo", "--disable-cache", "-np", str(ranks)],
        "horovodrun": ["horovodrun", "--gloo", "--disable-cache", "-np", str(ranks)],
        "mpi": ["horovodrun", "--mpi", "--disable-cache", "-np", str(ranks)],
    }[backend]
    words = [*prefix, *(launcher_flags or []), python, *map(str, command)]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            words,
            cwd=PROJECT,
            env=os.environ | ENVIRONMENT | (env or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = _wait(process, timeout, kill_when)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_session(process.pid)
        log.seek(0)
        output = log.read()
    if code is None:
        raise AssertionError(f"{words} hung: killed after {timeout} s\n{last_lines(output)}")
    return Launch(code, output, time.monotonic() - start)


def train(ranks: int, *flags: str, **how) -> Launch:
    """Runs train.py with the demo's settings and `flags`."""
    return launch(ranks, ["train.py", "--flagfile=configs/demo.cfg", *flags], **how)


def names_of_checks(*files: Path) -> list[str]:
    """Names of all `check_*` functions that are written in the files."""
    return [
        node.name
        for file in files
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    ]


def run_checks(
    files: Sequence[Path], ranks: int, backend: str = "", **how
) -> dict[str, str | None]:
    """Runs every `check_*` function of the files on `ranks` ranks, in one launch.

    Returns:
      By name: None where it passed on every rank, else the first failing rank's traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        ended = launch(ranks, [Path(__file__), results, *files], backend, **how)
        if not results.exists():
            raise AssertionError(f"exit code {ended.code}\n{last_lines(ended.output)}")
        return json.loads(results.read_text())


def last_lines(output: str) -> str:
    """The last lines of each rank, by the tags that the launchers put before them."""
    by_rank: dict[str, list[str]] = {}
    for line in output.splitlines():
        tag = re.match(r"\[(?:\d+,)?(\d+)\]<", line)
        by_rank.setdefault(f"rank {tag[1]}" if tag else "launcher", []).append(line)
    parts = [f"--- {who}\n" + "\n".join(ls[-_LAST_LINES:]) for who, ls in sorted(by_rank.items())]
    return "\n".join(parts)


def _wait(process: subprocess.Popen, timeout: float, kill_when: Callable[[], bool] | None) -> int:
    if kill_when is None:
        return process.wait(timeout)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if process.poll() is not None:
            return process.returncode
        if kill_when():
            _kill_session(process.pid)
            return process.wait()
        time.sleep(0.05)
    raise subprocess.TimeoutExpired(process.args, timeout)


def _kill_session(session: int) -> None:
    """Kills whatever is left of a launch, also ranks that have process groups of their own."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session:
                os.kill(int(entry.parent.name), signal.SIGKILL)
        except (OSError, ProcessLookupError):
            continue  # it ended by itself


def _main(results: str, *files: str) -> None:
    """On each rank: run the checks, tell rank 0 what failed."""
    import importlib
    import traceback

    sys.path[:0] = [str(PROJECT), *dict.fromkeys(str(Path(file).parent) for file in files)]
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    from hvdkit.ranks import world as world_lib

    world = world_lib.connect()
    checks = {}
    for file in files:
        found = vars(importlib.import_module(Path(file).stem))
        checks |= {name: check for name, check in found.items() if name.startswith("check_")}
    outcomes = {}
    for name, check in checks.items():
        try:
            check(world)
            failure = None
        except Exception:
            failure = f"rank {world.rank}:\n{traceback.format_exc()}"
        everyone = world.gather_objects(failure, f"outcome.{name}")
        outcomes[name] = next((f for f in everyone if f), None)
    if world.is_chief:
        Path(results).write_text(json.dumps(outcomes))
    world_lib.finish(world)


if __name__ == "__main__":
    _main(*sys.argv[1:])
