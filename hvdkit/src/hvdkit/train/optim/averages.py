"""Moving averages of weights: of --ema_decay, or of `use_ema` in a task's optimizer.

The run keeps them, not Keras, so that they work with every optimizer and with groups; and Keras
averages weights before their constraint acts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from hvdkit.ranks.world import raw
from hvdkit.train.step.gradients import overwritten

# An average of weights that fulfil one of these fulfils it too.
_CONVEX = (keras.constraints.NonNeg, keras.constraints.MaxNorm)


class Request(NamedTuple):
    """What is asked for the weights of one optimizer."""

    decay: float
    overwrite_every: int = 0  # number of updates; 0: never


class Average:
    """The moving averages of the weights of one optimizer (Polyak and Juditsky 1992).

    After each of its updates an average becomes decay * average + (1 - decay) * weight; the first
    update gives the weights themselves.

    Attributes:
      updates: number of updates; until the first one the averages are zeros.
      pairs: each weight and its average. A weight that its gradient overwrites (float8) has none.
    """

    def __init__(self, weights: Sequence[keras.Variable], request: Request) -> None:
        """Raises ValueError: a weight has a constraint that its average would not fulfil."""
        for weight in weights:
            if weight.constraint is not None and type(weight.constraint) not in _CONVEX:
                raise ValueError(
                    f"--ema_decay={request.decay}: an average of weights need not fulfil "
                    f"{type(weight.constraint).__name__}, the constraint of {weight.path}: leave "
                    "out one of the two"
                )
        self._request = request
        self._owned = {id(weight) for weight in weights}
        self.updates = tf.Variable(0, dtype=tf.int64, trainable=False, name="updates")
        self.pairs: list[tuple[keras.Variable, tf.Variable]] = []
        for weight in weights:
            if not overwritten(weight):
                zeros = tf.zeros(weight.shape, weight.dtype)
                average = tf.Variable(zeros, trainable=False, name="average")
                self.pairs.append((weight, average))

    def follow(self, updated: Sequence[keras.Variable]) -> None:
        """After an update of the weights `updated`; nothing where none of them is its own."""
        if not any(id(weight) in self._owned for weight in updated):
            return
        is_first = self.updates.read_value() == 0
        self.updates.assign_add(1)
        for weight, average in self.pairs:
            decay = tf.constant(self._request.decay, average.dtype)
            decay = tf.where(is_first, tf.zeros_like(decay), decay)
            average.assign(decay * average + (1 - decay) * raw(weight))
            if self._request.overwrite_every:
                is_due = self.updates % self._request.overwrite_every == 0
                raw(weight).assign(tf.where(is_due, average, raw(weight)))


def requested(
    optimizer: keras.optimizers.Optimizer, ema_decay: float
) -> Request | None:
    """What --ema_decay or the optimizer's `use_ema`, which is switched off, asks for, if anything.

    Raises ValueError: the two differ.
    """
    if not optimizer.use_ema:
        return Request(ema_decay) if ema_decay else None
    decay = float(optimizer.ema_momentum)
    if ema_decay and ema_decay != decay:
        raise ValueError(
            f"--ema_decay={ema_decay} and the task's optimizer, with ema_momentum={decay}, both "
            "average the weights: leave out one of the two"
        )
    # Otherwise Keras would make averages of its own when the optimizer is built.
    optimizer.use_ema = False
    return Request(decay, optimizer.ema_overwrite_frequency or 0)
