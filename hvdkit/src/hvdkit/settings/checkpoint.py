"""Settings of what a run begins from, and what it saves."""

from __future__ import annotations

from hvdkit.settings.fields import Room, setting


class CheckpointSettings(Room):
    """Checkpoints, resuming, first weights"""

    checkpoint_every: int = setting(200, "steps between checkpoints; 0: only at the end", low=0)
    checkpoint_minutes: float = setting(
        0.0, "also save when the newest checkpoint is older than this; 0: off", low=0
    )
    keep: int = setting(
        3, "number of newest checkpoints to keep, besides the best (by each measure)", low=1
    )
    max_failed_saves: int = setting(3, "end after this many failed saves in a row", low=1)
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
