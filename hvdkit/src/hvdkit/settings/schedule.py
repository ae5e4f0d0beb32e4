"""Settings of the learning rate: poly and the other policies, warm-up, scaling by ranks."""

from __future__ import annotations

import math

from hvdkit.settings.fields import Room, setting


class ScheduleSettings(Room):
    """Steps and learning rate: base * (1 - step/N) ** power by default"""

    # Below 10**8: checkpoints are named by eight digits of the step.
    num_steps: int = setting(1000, "steps of the run (N of the schedule)", low=1, below=10**8)
    base_lr: float = setting(0.01, "learning rate after warm-up", above=0)
    lr_policy: str = setting(
        "poly", "learning-rate schedule", choices=("poly", "cosine", "step", "constant")
    )
    power: float = setting(0.9, "power of the poly policy", low=0)
    end_lr: float = setting(0.0, "learning rate at the last step (poly, cosine)", low=0)
    warmup_steps: int = setting(0, "steps of linear warm-up", low=0)
    warmup_from: float = setting(0.0, "learning rate at the start of warm-up", low=0)
    lr_boundaries: str = setting("0.5,0.75", "step policy: fractions of num_steps, comma-separated")
    lr_gamma: float = setting(0.1, "step policy: factor at each boundary", above=0)
    lr_scaling: str = setting(
        "none",
        "multiply base_lr by the number of ranks or its root",
        choices=("none", "linear", "sqrt"),
    )

    def check(self) -> None:
        if self.lr_policy in ("poly", "cosine") and self.end_lr > self.base_lr:
            raise ValueError(f"--end_lr={self.end_lr} is greater than --base_lr={self.base_lr}")
        if self.lr_scaling == "none":
            self.check_warmup(1)
        if self.lr_policy == "step":
            _ = self.boundary_steps

    def check_warmup(self, size: int) -> None:
        """Raises ValueError where warm-up on `size` ranks would not rise."""
        peak = self.base_lr * self.lr_factor(size)
        if self.warmup_from > peak:
            scaled = f", which is {peak:g} on {size} rank(s)" if self.lr_scaling != "none" else ""
            raise ValueError(
                f"--warmup_from={self.warmup_from} is greater than --base_lr={self.base_lr}"
                f"{scaled}: warm-up must rise"
            )

    def lr_factor(self, size: int) -> float:
        """What base_lr is multiplied by on `size` ranks.

        linear: Goyal et al. 2017 (arXiv:1706.02677); sqrt: Krizhevsky 2014 (arXiv:1404.5997). Both
        are for a batch that grows with the number of ranks; with a fixed global batch use none.
        """
        return {"none": 1.0, "linear": float(size), "sqrt": math.sqrt(size)}[self.lr_scaling]

    @property
    def boundary_steps(self) -> list[int]:
        """Steps at which the step policy lowers the rate, from fractions of num_steps."""
        try:
            fractions = [float(part) for part in self.lr_boundaries.split(",")]
        except ValueError:
            fractions = [math.nan]
        if not all(0 < f < 1 for f in fractions) or fractions != sorted(set(fractions)):
            raise ValueError(
                f"--lr_boundaries={self.lr_boundaries!r} must be rising fractions between 0 and 1, "
                "with commas between them: 0.5,0.75"
            )
        return [round(f * self.num_steps) for f in fractions]

    def notes(self) -> list[str]:
        if self.warmup_steps <= self.num_steps:
            return []
        return [
            f"--warmup_steps={self.warmup_steps} is more than --num_steps={self.num_steps}: "
            "the learning rate does not reach --base_lr"
        ]

    def without_effect(self) -> dict[str, str]:
        read = {"poly": ["power", "end_lr"], "cosine": ["end_lr"]}
        read["step"] = ["lr_boundaries", "lr_gamma"]
        unread = {"power", "end_lr", "lr_boundaries", "lr_gamma"} - {*read.get(self.lr_policy, [])}
        found = dict.fromkeys(sorted(unread), f"--lr_policy={self.lr_policy}")
        return found | ({} if self.warmup_steps else {"warmup_from": "--warmup_steps=0"})
