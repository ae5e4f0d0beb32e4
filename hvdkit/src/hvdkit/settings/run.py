"""Settings of a run: its folder and kind, checkpoints, logging, ranks."""

from __future__ import annotations

import re

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


class CheckpointSettings(Room):
    """Checkpoints, resuming, first weights"""

    checkpoint_every: int = setting(200, "steps between checkpoints; 0: only at the end", low=0)
    keep: int = setting(
        3, "number of newest checkpoints to keep, besides the best (by each measure)", low=1
    )
    resume: str = setting(
        "auto",
        "auto: from the newest sound checkpoint of run_dir; never: start anew; or the path of a "
        "checkpoint or of a run's folder",
        path=True,
        words=("auto", "never"),
    )
    init_from: str = setting(
        "",
        "start a new run from these weights: a run's folder, a checkpoint's, or a .keras file",
        path=True,
    )
    init_ema: bool = setting(
        False, "with --init_from: take the averaged weights of a run with --ema_decay"
    )
    init_skip_mismatched: bool = setting(
        False,
        "with --init_from: keep the initial values of variables that do not fit, and list them",
    )
    backbone_weights: str = setting(
        "", "fill a new model's backbone from a .h5 file of keras.applications", path=True
    )
    backbone_preprocessing: str = setting(
        "",
        "preprocessing that --backbone_weights was trained with (its ResNet-50: caffe)",
        choices=("", "tf", "caffe", "torch"),
    )

    def check(self) -> None:
        for name in ("init_ema", "init_skip_mismatched"):
            if getattr(self, name) and not self.init_from:
                raise ValueError(f"--{name} says what to take from --init_from: name one")
        if bool(self.backbone_weights) != bool(self.backbone_preprocessing):
            raise ValueError(
                f"--backbone_weights={self.backbone_weights} and --backbone_preprocessing="
                f"{self.backbone_preprocessing} (what these weights were trained on) need each "
                "other"
            )
        if self.backbone_weights and self.init_from:
            raise ValueError(
                "--init_from and --backbone_weights are two starts of a new run: leave one out"
            )
        if not self.resume:
            raise ValueError("--resume= is empty: write auto, never or a path")

    def without_effect(self) -> dict[str, str]:
        if self.resume in ("auto", "never"):
            return {}
        return dict.fromkeys(("init_from", "backbone_weights"), f"--resume={self.resume}")


class ObserveSettings(Room):
    """Logging"""

    log_every: int = setting(20, "steps between log lines", low=1)
    log_gradients: bool = setting(
        False, "log sum and norm of each layer's gradient to gradients.jsonl"
    )
    trackers: str = setting(
        "tensorboard",
        "where figures go besides metrics.jsonl, comma-separated: tensorboard, or MODULE:CLASS of "
        "your own (docs/trackers.md); empty: nowhere",
    )

    def check(self) -> None:
        _ = self.tracker_names

    @property
    def tracker_names(self) -> list[str]:
        """Of --trackers, in order. Raises ValueError for one that cannot be a name."""
        names = [name.strip() for name in self.trackers.split(",") if name.strip()]
        for name in names:
            if name != "tensorboard" and not re.fullmatch(r"[\w.]+:\w+", name):
                raise ValueError(
                    f"--trackers={name} is neither tensorboard nor MODULE:CLASS of yours"
                )
        return names


class RanksSettings(Room):
    """Ranks and devices"""

    device: str = setting(
        "auto",
        "auto: one GPU for each rank, or CPUs if the host has no GPU",
        choices=("auto", "gpu", "cpu"),
    )
    cpu_threads: int = setting(
        0, "CPU threads of a rank; 0: its share of the cores, 1 with --virtual_ranks", low=0
    )
    stall_shutdown_s: int = setting(
        1800, "end the run after waiting this many seconds for a rank that hangs; 0: never", low=0
    )
