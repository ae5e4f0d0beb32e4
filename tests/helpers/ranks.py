"""Where things are; launches; checks_*.py files on real ranks, in one launch for many checks."""

import ast
import contextlib
import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from hvdkit.settings import project
from hvdkit.testing import ENVIRONMENT, Launch, last_lines, launch

__all__ = ["ENVIRONMENT", "Launch", "last_lines", "launch"]

HELPERS = Path(__file__).resolve().parent
CHECKS = HELPERS.parent / "ranks"
ROOT = HELPERS.parents[1]
PROJECT = ROOT / "template"
project.use(PROJECT)
_CHECK = ("check_", "slow_check_")
# Where a check has failed on one rank, the others come to its end within so many seconds.
_OTHERS_COME = 90.0
_LONGEST = 900.0  # A check that takes longer hangs.

# A run of a few seconds; flags after these win.
TINY_FLAGS = (
    "--model=tiny",
    "--image_size=32",
    "--eval_crop=32",
    "--global_batch_size=7",
    "--eval_batch_size=4",
    "--num_steps=4",
    "--warmup_steps=0",
    "--log_every=1",
    "--eval_every=0",
    "--checkpoint_every=0",
)


def launch_well(ranks: int, command: list, backend: str = "", **how) -> Launch:
    """As `launch`; raises AssertionError where it ends with another exit code than 0."""
    ended = launch(ranks, command, backend, **how)
    assert ended.code == 0, last_lines(ended.output)
    return ended


def json_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def names_of_checks(*files: Path) -> list[str]:
    """Names of all functions check_* and slow_check_* (not in make test) that the files have."""
    names = []
    for file in files:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith(_CHECK):
                names.append(node.name)
    return names


def run_checks(
    files: Sequence[Path],
    ranks: int,
    backend: str = "",
    *,
    names: Sequence[str] = (),
    timeout: float = 400,
    env: dict[str, str] | None = None,
) -> dict[str, str | None]:
    """Runs the checks of the files, or those of `names`, in one launch.

    A check that fails on a rank while others wait for it ends its launch; the next one runs the
    rest.

    Returns, by the check's name, None or the first failing rank's traceback.
    """
    left = list(names) or names_of_checks(*files)
    outcomes: dict[str, str | None] = {}
    while left:
        newer = _launch_checks(files, ranks, backend, left, timeout, env or {})
        assert newer, f"no check has one of these names: {left}"
        outcomes |= newer
        left = [name for name in left if name not in newer]
    return outcomes


def _launch_checks(
    files: Sequence[Path],
    ranks: int,
    backend: str,
    names: Sequence[str],
    timeout: float,
    env: dict[str, str],
) -> dict[str, str | None]:
    """The outcomes of the first checks, or of all."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        variables = {"CHECKS": " ".join(names), "CHECKS_FOLDER": folder}
        ended = launch(
            ranks,
            [Path(__file__), results, *files],
            backend,
            timeout=timeout,
            env=env | variables,
        )
        if not results.exists():
            raise AssertionError(f"exit code {ended.code}\n{last_lines(ended.output)}")
        return json.loads(results.read_text())


class _Watch:
    """Ends a check, and with it the launch, that has failed on one rank alone, or that hangs."""

    def __init__(self, results: Path, outcomes: dict[str, str | None]) -> None:
        """`outcomes`: of the checks before; what ends is added to them in the file `results`."""
        self._results = results
        self._outcomes = outcomes
        self._timer = threading.Timer(0, print)

    def watch(self, name: str, failure: str | None = None) -> None:
        self._timer.cancel()
        seconds = _OTHERS_COME if failure else _LONGEST
        self._timer = threading.Timer(seconds, self._end, [name, failure])
        self._timer.daemon = True
        self._timer.start()

    def done(self) -> None:
        self._timer.cancel()

    def _end(self, name: str, failure: str | None) -> None:
        if not failure:
            frame = sys._current_frames()[threading.main_thread().ident]
            place = "".join(traceback.format_stack(frame))
            failure = f"not done after {_LONGEST:g} s:\n{place}"
        self.end(name, failure)

    def end(self, name: str, failure: str) -> None:
        """The first rank's word counts."""
        own = self._results.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(self._outcomes | {name: failure}))
        with contextlib.suppress(FileExistsError):
            self._results.hardlink_to(own)
        os._exit(1)


def _main(results: str, *files: str) -> None:
    import importlib
    import time

    folders = dict.fromkeys(str(Path(file).parent) for file in files)
    sys.path[:0] = [str(PROJECT), str(HELPERS), *folders]
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split

    from hvdkit.ranks import world as world_lib

    world = world_lib.connect()
    checks = {}
    for file in files:
        for name, member in vars(importlib.import_module(Path(file).stem)).items():
            if name.startswith(_CHECK):
                checks[name] = member
    chosen = os.environ["CHECKS"].split() or list(checks)
    cores = os.sched_getaffinity(0)
    start = time.monotonic()
    outcomes = {}
    watch = _Watch(Path(results), outcomes)
    for name, check in checks.items():
        if name not in chosen:
            continue
        # A check that plays two hosts may have bound both ranks to the first core.
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setaffinity(int(thread), cores)
        watch.watch(name)
        try:
            # What a check sets, as float64 for all of Keras, is not the next one's.
            with world_lib.kept_numbers():
                check(world)
            failure = None
        except Exception:
            failure = f"rank {world.rank}:\n{traceback.format_exc()}"
        if failure:
            watch.watch(name, failure)
        try:
            everyone = world.gather_objects(failure, f"outcome.{name}")
        except Exception:
            # The rank whose check failed has the first word.
            time.sleep(0 if failure else 10)
            watch.end(name, failure or traceback.format_exc())
        watch.done()
        outcomes[name] = next((failure for failure in everyone if failure), None)
        print(f"{name}: {time.monotonic() - start:.0f} s since the start", flush=True)
    if world.is_chief:
        Path(results).write_text(json.dumps(outcomes))
    world_lib.finish(world)


if __name__ == "__main__":
    _main(*sys.argv[1:])
