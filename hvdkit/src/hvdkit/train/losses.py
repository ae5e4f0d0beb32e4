"""Losses for a task: `from hvdkit.train import losses`."""

from hvdkit.train.step.losses import cross_entropy, mixed_cross_entropy, require_classes

__all__ = ["cross_entropy", "mixed_cross_entropy", "require_classes"]
