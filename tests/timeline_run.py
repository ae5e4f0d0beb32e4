"""A run of small_runs.Small whose rank 1 comes late to every step: `timeline_run.py RUN_DIR`."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "template"), str(ROOT / "template" / "tests")]

LATE = 0.3  # seconds


def main(run_dir: str) -> None:
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    from hvdkit.data.pipeline import TrainingFeed
    from hvdkit.ranks import world as world_lib
    from hvdkit.settings import Settings
    from hvdkit.train import reduction

    from small_runs import USUAL, fit_config

    # No step of these is logged, which would be one more exchange.
    settings = {"timeline": "3:5", "num_steps": 6, "log_every": 6, "run_dir": run_dir}
    config = dataclasses.replace(Settings(), **USUAL | settings)
    world = world_lib.connect(reduction.environment(config))
    read = TrainingFeed.next

    def late(feed: TrainingFeed):
        time.sleep(LATE * world.rank)
        return read(feed)

    TrainingFeed.next = late
    ended = fit_config(config, world)
    world_lib.finish(world)
    sys.exit(ended.code)


if __name__ == "__main__":
    main(*sys.argv[1:])
