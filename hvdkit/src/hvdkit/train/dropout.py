"""Dropout for a model: `from hvdkit.train.dropout import SampleDropout`."""

from hvdkit.train.layers.dropout import SampleDropout

__all__ = ["SampleDropout"]
