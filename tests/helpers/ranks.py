"""Where things are; launches; checks_*.py files on real ranks, in one launch for many checks."""

import ast
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
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
_OTHERS_COME = 60.0
_LONGEST = 900.0  # A check that takes longer hangs; of a short launch, one that takes half of it.
_LAUNCHES = 4  # Where so many ended in a check, the rest is not run.

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

    A check that ends its launch, that hangs, or for which a rank waits in vain, has failed; another
    launch runs those after it.

    Returns, by the check's name, None or the first failing rank's traceback.
    """
    outcomes: dict[str, str | None] = {}
    left: Sequence[str] = names
    end = time.monotonic() + timeout
    launches = 0
    while launches == 0 or (launches < _LAUNCHES and time.monotonic() < end - 60):
        seconds = end - time.monotonic()
        newer, left = _launch_checks(files, ranks, backend, left, seconds, env or {})
        launches += 1
        outcomes |= newer
        if not left:
            return outcomes
    ended = f"not run: {launches} launch(es) ended in checks before it"
    return outcomes | dict.fromkeys(left, ended)


def _launch_checks(
    files: Sequence[Path],
    ranks: int,
    backend: str,
    names: Sequence[str],
    timeout: float,
    env: dict[str, str],
) -> tuple[dict[str, str | None], list[str]]:
    """The outcomes of the first checks, and the names of those after the one that ended it."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        longest = min(_LONGEST, timeout / 2)
        variables = {
            "CHECKS": json.dumps(list(names)),
            "CHECKS_FOLDER": folder,
            "CHECKS_LONGEST": str(longest),
        }
        command = [Path(__file__), results, *files]
        try:
            ended = launch(
                ranks, command, backend, timeout=timeout, env=env | variables
            )
            why = f"exit code {ended.code}\n{last_lines(ended.output)}"
        except AssertionError as hung:
            why = str(hung)
        if not results.exists():
            raise AssertionError(why)
        outcomes, left = json.loads(results.read_text())
        if not left:
            return outcomes, []
        failure = results.with_name("failure")
        if failure.exists():
            why = failure.read_text()
        return outcomes | {left[0]: why}, left[1:]


class _Watch:
    """Ends the launch in a check that hangs, or that has failed on one rank while others go on."""

    def __init__(self, folder: Path) -> None:
        """The file `failure` of the folder will say why."""
        self._folder = folder
        self._timer = threading.Timer(0, print)

    def expect_end(self) -> None:
        """Of a check that begins."""
        self._set(float(os.environ["CHECKS_LONGEST"]), "")

    def expect_others(self, failure: str) -> None:
        """At the end of the check that has failed here."""
        self._set(_OTHERS_COME, failure)

    def _set(self, seconds: float, failure: str) -> None:
        self.stop()
        self._timer = threading.Timer(seconds, self._end, [seconds, failure])
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()

    def _end(self, seconds: float, failure: str) -> None:
        if not failure:
            frame = sys._current_frames()[threading.main_thread().ident]
            place = "".join(traceback.format_stack(frame))
            failure = f"not done after {seconds:g} s:\n{place}"
        self.end(failure)

    def end(self, failure: str) -> None:
        """The word of the first rank counts."""
        own = self._folder / f"failure.{os.getpid()}"
        own.write_text(failure)
        with contextlib.suppress(FileExistsError):
            (self._folder / "failure").hardlink_to(own)
        os._exit(1)


def _main(results: str, *files: str) -> None:
    import importlib

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
    chosen = json.loads(os.environ["CHECKS"]) or list(checks)
    left = [name for name in checks if name in chosen]
    outcomes = {}
    if world.is_chief:
        _write(Path(results), outcomes, left)
    cores = os.sched_getaffinity(0)
    start = time.monotonic()
    watch = _Watch(Path(results).parent)
    while left:
        name = left[0]
        # A check that plays two hosts may have bound both ranks to the first core.
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setaffinity(int(thread), cores)
        watch.expect_end()
        try:
            # What a check sets, as float64 for all of Keras, is not the next one's.
            with world_lib.kept_numbers():
                checks[name](world)
            failure = None
        except (Exception, SystemExit):
            failure = f"rank {world.rank}:\n{traceback.format_exc()}"
            watch.expect_others(failure)
        try:
            everyone = world.gather_objects(failure, f"outcome.{name}")
        except Exception:
            # The rank whose check failed has the first word.
            time.sleep(0 if failure else 10)
            watch.end(failure or traceback.format_exc())
        watch.stop()
        outcomes[name] = next((failure for failure in everyone if failure), None)
        left.remove(name)
        if world.is_chief:
            _write(Path(results), outcomes, left)
        print(f"{name}: {time.monotonic() - start:.0f} s since the start", flush=True)
    world_lib.finish(world)


def _write(results: Path, outcomes: dict[str, str | None], left: list[str]) -> None:
    newer = results.with_suffix(".newer")
    newer.write_text(json.dumps([outcomes, left]))
    newer.replace(results)


if __name__ == "__main__":
    _main(*sys.argv[1:])
