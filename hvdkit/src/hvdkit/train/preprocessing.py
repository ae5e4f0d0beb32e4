"""First layers for a model: `from hvdkit.train.preprocessing import scaled`."""

from hvdkit.train.layers.preprocessing import Preprocess, scaled, wide

__all__ = ["Preprocess", "scaled", "wide"]
