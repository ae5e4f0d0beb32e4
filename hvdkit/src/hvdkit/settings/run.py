"""Settings of a run: its folder and kind, checkpoints, logging, ranks."""

import re

from hvdkit.settings.fields import Room, setting

_MOST_PROFILED = 100  # steps: a record of more is too large to look at


class RunSettings(Room):
    """The run: folder, repeatability, other kinds of runs"""

    run_dir: str = setting(
        "runs/default", "folder of checkpoints, metrics, report", path=True
    )
    seed: int = setting(1, "seed of weights, sample order and augmentation", low=0)
    deterministic: bool = setting(
        False, "same bits on the same number of ranks; slower"
    )
    virtual_ranks: int = setting(0, "same bits on 1 to this many ranks; 0: off", low=0)
    dry_run: bool = setting(
        False, "try two steps, an evaluation and a save, keep nothing"
    )
    find_lr: bool = setting(
        False, "suggest a learning rate; keep only RUN_DIR-find_lr.html"
    )
    benchmark: bool = setting(
        False, "measure the speed: benchmark.json and records, no checkpoint"
    )

    def check(self) -> None:
        if not self.run_dir:
            raise ValueError("--run_dir= is empty: name a folder")
        alone = [
            name for name in ("dry_run", "find_lr", "benchmark") if getattr(self, name)
        ]
        if len(alone) > 1:
            raise ValueError(
                f"--{alone[0]} and --{alone[1]} are two kinds of runs: choose one"
            )


class CheckpointSettings(Room):
    """Checkpoints, resuming, first weights"""

    checkpoint_every: int = setting(
        200,
        "steps, or 1epoch, between checkpoints; 0: only at the end",
        low=0,
        every=True,
    )
    keep: int = setting(3, "newest checkpoints to keep, besides the best", low=1)
    resume: str = setting(
        "auto",
        "auto: from the newest sound checkpoint of run_dir; never: start anew; or a path",
        path=True,
        words=("auto", "never"),
    )
    init_from: str = setting(
        "", "first weights: a run, a checkpoint, a .keras file", path=True
    )
    init_ema: bool = setting(False, "with --init_from: take the averaged weights")
    init_skip_mismatched: bool = setting(
        False, "with --init_from: skip what does not fit"
    )
    backbone_weights: str = setting(
        "", "backbone from a keras.applications .h5 file", path=True
    )
    backbone_preprocessing: str = setting(
        "", "its preprocessing (ResNet-50: caffe)", choices=("", "tf", "caffe", "torch")
    )

    def check(self) -> None:
        for name in ("init_ema", "init_skip_mismatched"):
            if getattr(self, name) and not self.init_from:
                raise ValueError(
                    f"--{name} says what to take from --init_from: name one"
                )
        if bool(self.backbone_weights) != bool(self.backbone_preprocessing):
            raise ValueError(
                "--backbone_weights and --backbone_preprocessing need each other"
            )
        if self.backbone_weights and self.init_from:
            raise ValueError(
                "--init_from and --backbone_weights both start a run: leave one out"
            )
        if not self.resume:
            raise ValueError("--resume= is empty: write auto, never or a path")
        if self.resume not in ("auto", "never") and getattr(self, "find_lr", False):
            raise ValueError(
                "--find_lr begins at step 0: give --init_from instead of --resume"
            )

    def without_effect(self) -> dict[str, str]:
        names = (
            ()
            if self.resume in ("auto", "never")
            else ("init_from", "backbone_weights")
        )
        return dict.fromkeys(names, f"--resume={self.resume}")


class ObserveSettings(Room):
    """Logging"""

    log_every: int = setting(20, "steps between log lines", low=1, every=True)
    log_gradients: bool = setting(False, "log each layer's gradient to gradients.jsonl")
    profile: str = setting(
        "", "steps FROM:TO to profile on rank 0; FROM:TO:all: on all ranks"
    )
    trackers: str = setting(
        "tensorboard", "with commas: tensorboard, MODULE:CLASS; empty: none"
    )

    def check(self) -> None:
        _ = self.tracker_names
        _ = self.profiled_steps

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The first and the last step of --profile. Raises ValueError where it has no such form."""
        if not self.profile:
            return None
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})(:all)?", self.profile)
        if not match:
            raise ValueError(
                f"--profile={self.profile} is not of the form 20:30 or 20:30:all"
            )
        first = int(match[1])
        last = int(match[2])
        if not 2 <= first <= last < first + _MOST_PROFILED:
            raise ValueError(
                f"--profile={self.profile}: name up to {_MOST_PROFILED} steps, from step 2 on "
                "(step 1 compiles)"
            )
        return first, last

    @property
    def tracker_names(self) -> list[str]:
        """Of --trackers, in order. Raises ValueError for one that cannot be a name."""
        names = [name.strip() for name in self.trackers.split(",") if name.strip()]
        for name in names:
            if name != "tensorboard" and not re.fullmatch(r"[\w.]+:\w+", name):
                raise ValueError(
                    f"--trackers: {name} is neither tensorboard nor MODULE:CLASS"
                )
        return names


class RanksSettings(Room):
    """Ranks and devices"""

    device: str = setting(
        "auto", "auto: GPUs, else CPUs", choices=("auto", "gpu", "cpu")
    )
    bind: bool = setting(True, "run each rank on cores of its own, near its GPU")
    cpu_threads: int = setting(
        0, "CPU threads of a rank; 0: its share of the cores", low=0
    )
    start_limit_s: int = setting(
        600, "seconds to wait for ranks until step 1; 0: for ever", low=0
    )
    stall_shutdown_s: int = setting(
        1800, "seconds to wait for a hanging rank; 0: for ever", low=0
    )
