"""Settings of a run: its folder, its kind, and how far it repeats."""

from __future__ import annotations

from hvdkit.settings.fields import Room, setting


class RunSettings(Room):
    """The run: folder, repeatability, other kinds of runs"""

    run_dir: str = setting(
        "runs/default", "folder for checkpoints, metrics and the report", path=True
    )
    seed: int = setting(1, "seed of weights, sample order and augmentation", low=0)
    deterministic: bool = setting(
        False, "bit-identical weights on the same number of ranks; slower"
    )
    virtual_ranks: int = setting(
        0, "split each step into this many shares: the same bits on 1 to this many ranks", low=0
    )
    dry_run: bool = setting(
        False, "show what the run would be, try two steps, an evaluation and a save, keep nothing"
    )
    find_lr: bool = setting(
        False,
        "raise the learning rate over at most 200 steps and suggest one; keep only a page, "
        "RUN_DIR-find_lr.html",
    )
    benchmark: bool = setting(
        False,
        "measure the speed and where the time goes, without evaluation and checkpoints; writes "
        "benchmark.json",
    )

    def check(self) -> None:
        if not self.run_dir:
            raise ValueError("--run_dir= is empty: name a folder")
        alone = [name for name in ("dry_run", "find_lr", "benchmark") if getattr(self, name)]
        if len(alone) > 1:
            raise ValueError(f"--{alone[0]} and --{alone[1]} are two kinds of runs: choose one")
