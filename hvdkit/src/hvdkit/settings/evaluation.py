"""Settings of evaluations: how often, and how a picture is scored."""

from __future__ import annotations

import math

from hvdkit.settings.fields import Room, setting

_LARGEST_SCALE = 8  # 64 times the pixels


class EvaluationSettings(Room):
    """Evaluation"""

    eval_every: int = setting(200, "steps between evaluations; 0: only at the end", low=0)
    eval_batch_size: int = setting(
        16, "samples a batch in evaluation, on each rank; 1 where picture sizes may differ", low=1
    )
    early_stop_evals: int = setting(
        0, "end after this many evaluations without a better score; 0: never", low=0
    )
    eval_crop: int = setting(
        0,
        "score only a centre of this many pixels, in batches; 0: whole pictures at their own size "
        "(segmentation)",
        low=0,
    )
    eval_window: int = setting(
        0,
        "sliding windows of this many pixels, overlapping by a third, for larger pictures; 0: no "
        "windows (segmentation)",
        low=0,
    )
    eval_scales: str = setting(
        "1", "average the probabilities at these scales, comma-separated (segmentation)"
    )
    eval_flip: bool = setting(
        False, "also average the probabilities of the mirror image (segmentation)"
    )

    def check(self) -> None:
        if self.early_stop_evals and not self.eval_every:
            raise ValueError(
                f"--early_stop_evals={self.early_stop_evals} counts evaluations, and "
                "--eval_every=0 makes none: set --eval_every"
            )
        _ = self.eval_scale_list
        if self.eval_crop and self.eval_window:
            raise ValueError(
                f"--eval_crop={self.eval_crop} scores the centre of a picture, "
                f"--eval_window={self.eval_window} all of it in parts: choose one"
            )

    @property
    def eval_scale_list(self) -> list[float]:
        """Factors on a picture's size at which it is evaluated."""
        try:
            scales = [float(part) for part in self.eval_scales.split(",")]
        except ValueError:
            scales = [math.nan]
        if not all(0 < s <= _LARGEST_SCALE for s in scales) or len(set(scales)) != len(scales):
            raise ValueError(
                f"--eval_scales={self.eval_scales!r} must be different numbers above 0, "
                f"{_LARGEST_SCALE} at most, with commas between them: 0.5,1,1.5"
            )
        return scales
