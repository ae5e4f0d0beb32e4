"""Where things are; launches; checks_*.py files on real ranks, in one launch for many checks."""

import ast
import json
import sys
import tempfile
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

    Returns, by the check's name, None or the first failing rank's traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        variables = {"CHECKS": " ".join(names), "CHECKS_FOLDER": folder}
        ended = launch(
            ranks,
            [Path(__file__), results, *files],
            backend,
            timeout=timeout,
            env=(env or {}) | variables,
        )
        if not results.exists():
            raise AssertionError(f"exit code {ended.code}\n{last_lines(ended.output)}")
        return json.loads(results.read_text())


def _main(results: str, *files: str) -> None:
    import contextlib
    import importlib
    import os
    import time
    import traceback

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
    for name, check in checks.items():
        if name not in chosen:
            continue
        # A check that plays two hosts may have bound both ranks to the first core.
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setaffinity(int(thread), cores)
        try:
            # What a check sets, as float64 for all of Keras, is not the next one's.
            with world_lib.kept_numbers():
                check(world)
            failure = None
        except Exception:
            failure = f"rank {world.rank}:\n{traceback.format_exc()}"
        everyone = world.gather_objects(failure, f"outcome.{name}")
        outcomes[name] = next((failure for failure in everyone if failure), None)
        print(f"{name}: {time.monotonic() - start:.0f} s since the start", flush=True)
    if world.is_chief:
        Path(results).write_text(json.dumps(outcomes))
    world_lib.finish(world)


if __name__ == "__main__":
    _main(*sys.argv[1:])
