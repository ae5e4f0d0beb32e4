"""Meanings of outputs, for a task's `decode`: `from hvdkit.train import outputs`."""

from hvdkit.train.task.outputs import (
    Decoded,
    check_softmax,
    one_logit,
    sigmoid,
    softmax,
)

__all__ = ["Decoded", "check_softmax", "one_logit", "sigmoid", "softmax"]
