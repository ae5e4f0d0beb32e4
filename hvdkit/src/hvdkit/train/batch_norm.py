"""Batch norm for a model: `from hvdkit.train.batch_norm import SyncBatchNormalization`."""

from hvdkit.train.layers.batch_norm import SyncBatchNormalization, fuse, synchronize

__all__ = ["SyncBatchNormalization", "fuse", "synchronize"]
