"""Batch norm across ranks: moving statistics brought together, or batch statistics shared.

By default each rank normalizes with its own batch and keeps its own moving mean and variance.
Before they are read (evaluation, checkpoint, export) they are brought together. In `mean` mode
that gives the same values as doing it every step, because a moving average is linear in what it
averages: the mean over ranks of moving averages is the moving average of the means over ranks.

With `SyncBatchNormalization` every rank normalizes with the global batch's statistics, so that
N ranks compute what one would.
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

    @tf.function(autograph=False)
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


@keras.saving.register_keras_serializable(package="engine")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch norm over the global batch: forward, backward and moving statistics.

    Equal to one process that holds the whole global batch, also when the ranks' shares differ in
    size; on one rank it is Keras's layer. One small allreduce forward and one backward. Every
    rank must run it in training at the same time, on inputs of any batch size but zero.
    """

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Mean and biased variance over all ranks, each [channels], in float32 or float64.

        The ranks' own moments are taken in two passes, then joined in float64: E[x^2] - E[x]^2
        of the raw inputs in float32 would cancel.
        """
        mean, variance = super()._moments(inputs, mask)
        if hvd.size() == 1:
            return mean, variance
        if mask is None:
            count = tf.size(inputs, tf.int64) // tf.size(mean, tf.int64)
        else:
            count = tf.math.count_nonzero(mask)
        count = tf.cast(count, tf.float64)[None]
        mean64, variance64 = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
        sums = [count, count * mean64, count * (variance64 + tf.square(mean64))]
        name = f"{self.moving_mean.path}.batch"
        sums = sum_over_ranks(tf.concat(sums, axis=0), name)
        count, mean64, square = tf.split(sums, [1, mean.shape[0], mean.shape[0]])
        mean64, square = mean64 / count, square / count
        variance64 = tf.maximum(square - tf.square(mean64), 0.0)
        return tf.cast(mean64, mean.dtype), tf.cast(variance64, variance.dtype)


def sum_over_ranks(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Sum of `tensor` over ranks; its gradient is the sum over ranks of the gradients.

    Horovod's own gradient would take its collective's name from the graph; a name that is said
    here cannot differ between ranks.
    """

    @tf.custom_gradient
    def summed(x: tf.Tensor):
        def backward(upstream: tf.Tensor) -> tf.Tensor:
            return hvd.allreduce(upstream, op=hvd.Sum, name=f"{name}.gradient")

        return hvd.allreduce(x, op=hvd.Sum, name=name), backward

    return summed(tensor)


def synchronize(model: keras.Model) -> keras.Model:
    """A copy of a functional or sequential model, its batch norms synchronized, weights copied.

    Raises:
      ValueError: the model is subclassed, so its layers cannot be exchanged from outside.
    """

    def exchange(layer: keras.layers.Layer) -> keras.layers.Layer:
        if type(layer) is keras.layers.BatchNormalization:
            return SyncBatchNormalization.from_config(layer.get_config())
        return layer.__class__.from_config(layer.get_config())

    try:
        copy = keras.models.clone_model(model, clone_function=exchange, recursive=True)
    except ValueError:
        raise ValueError(
            f"--bn_sync=full cannot exchange the layers of {type(model).__name__}, a subclassed "
            "model: use engine.batch_norm.SyncBatchNormalization in it"
        ) from None
    copy.set_weights(model.get_weights())
    return copy
