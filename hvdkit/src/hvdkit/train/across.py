"""Rows of all ranks in a task's loss: `from hvdkit.train import across`."""

from hvdkit.train.step.across import gather, places

__all__ = ["gather", "places"]
