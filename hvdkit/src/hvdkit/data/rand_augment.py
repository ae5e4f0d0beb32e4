"""RandAugment, for a task: `from hvdkit.data import rand_augment`."""

from hvdkit.data.augment.rand_augment import OPERATIONS, STRONGEST, applied

__all__ = ["OPERATIONS", "STRONGEST", "applied"]
