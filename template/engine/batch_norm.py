"""Batch norm across ranks: moving statistics brought together.

Each rank normalizes with its own batch and keeps its own moving mean and variance. Before they
are read (evaluation, checkpoint, export) they are brought together. In `mean` mode that gives
the same values as doing it every step, because a moving average is linear in what it averages:
the mean over ranks of moving averages is the moving average of the means over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from engine.world import raw


def moving_statistics(model: keras.Model) -> tuple[list[tf.Variable], list[tf.Variable]]:
    """The moving means and the moving variances of every batch norm, in one order."""
    found = {"moving_mean": [], "moving_variance": []}
    for variable in model.non_trainable_variables:
        if variable.name in found:
            found[variable.name].append(raw(variable))
    return found["moving_mean"], found["moving_variance"]


def make_sync(model: keras.Model, mode: str, weight: float) -> Callable[[], None]:
    """Returns the function that brings the moving statistics together; all ranks must call it.

    One allreduce carries the statistics of all layers.

    Args:
      mode: mean: mean over ranks of the moving means and of the moving variances.
        moments: means weighted by share of the batch; to the variances the variance between
        the ranks' means is added (law of total variance). full and none: nothing to do.
      weight: this rank's share of the global batch; the shares sum to 1 (moments mode).
    """
    means, variances = moving_statistics(model)
    if mode in ("full", "none") or not means or hvd.size() == 1:
        return lambda: None
    if mode == "mean":
        weight = 1.0 / hvd.size()

    @tf.function
    def sync() -> None:
        second = variances
        if mode == "moments":
            second = [v + tf.square(m) for m, v in zip(means, variances)]
        mean, second = _weighted_sum([means, second], weight)
        if mode == "moments":
            second = [s - tf.square(m) for m, s in zip(mean, second)]
        for variable, value in zip([*means, *variances], [*mean, *second]):
            variable.assign(value)

    return sync


def _weighted_sum(groups: Sequence[Sequence[tf.Tensor]], weight: float) -> list[list[tf.Tensor]]:
    """Sum over ranks of weight * tensor, of all tensors in one collective; same nesting."""
    flat = [tf.convert_to_tensor(t) for group in groups for t in group]
    # float64 on the way: E[x^2] - E[x]^2 loses the digits it needs in float32.
    joined = tf.concat([tf.reshape(tf.cast(t, tf.float64), [-1]) for t in flat], axis=0)
    summed = hvd.allreduce(joined * weight, op=hvd.Sum, name="batch_norm.moving")
    parts = tf.split(summed, [t.shape.num_elements() for t in flat])
    parts = [tf.cast(tf.reshape(p, t.shape), t.dtype) for p, t in zip(parts, flat)]
    size = len(groups[0])
    return [parts[:size], parts[size:]]
