"""Mixup and CutMix, for a task: `from hvdkit.data import mixing`."""

from hvdkit.data.augment.mixing import beta, blended, cut, mixed

__all__ = ["beta", "blended", "cut", "mixed"]
