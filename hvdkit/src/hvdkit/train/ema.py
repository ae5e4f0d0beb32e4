"""Moving average of the weights, for evaluation and export (Polyak and Juditsky 1992).

The average itself is Keras's: an optimizer with `use_ema=True, ema_momentum=decay` updates it at
every step that it applies (a skipped step leaves it as it is), keeps it among its variables (so it
is saved, restored and broadcast with them) and starts it at the weights after the first step. What
is here puts it to use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from hvdkit.ranks.world import raw
from hvdkit.train.optimizer import check_trainable


def average_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The averages, one a trainable variable of the model, in their order; empty without EMA.

    They are zeros until the first applied step.
    """
    return list(optimizer._model_variables_moving_average) if optimizer.use_ema else []


@contextlib.contextmanager
def averaged(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Inside, the model's trainable weights are their averages; afterwards its own again.

    It takes the memory of a second copy of the weights. Batch norm's moving statistics are those
    of the weights as trained. Nothing happens where the optimizer keeps no average, or has not
    made a step.

    Raises:
      ValueError: `trainable` of a layer changed since the optimizer was built.
    """
    if not optimizer.use_ema or not int(optimizer.iterations):
        yield
        return
    check_trainable(optimizer, model)
    variables = model.trainable_variables
    own = [tf.identity(raw(v)) for v in variables]
    try:
        for variable, average in zip(variables, average_variables(optimizer), strict=True):
            raw(variable).assign(raw(average))
        yield
    finally:
        for variable, value in zip(variables, own):
            raw(variable).assign(value)
