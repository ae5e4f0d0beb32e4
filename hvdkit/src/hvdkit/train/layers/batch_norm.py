"""Batch norm across ranks: moving statistics averaged, or batch statistics shared.

By default each rank normalizes with its own batch and keeps its own moving mean and variance.
They are averaged over ranks before they are read (evaluation, checkpoint, export). In `mean` mode
that equals averaging at every step, because a moving average is linear.

With `SyncBatchNormalization` every rank normalizes with the global batch's statistics, so that
N ranks compute what one would.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdkit.logs import join
from hvdkit.ranks.world import raw
from hvdkit.train.layers import saved_layers
from hvdkit.train.step import across

_FUSED = (tf.float16, tf.bfloat16, tf.float32)  # types that cuDNN's kernel takes


def moving_statistics(
    model: keras.Model,
) -> tuple[list[tf.Variable], list[tf.Variable]]:
    """The moving means and the moving variances of every batch norm, in one order."""
    layers = [layer for layer in _batch_norms(model) if layer.moving_mean is not None]
    return [raw(n.moving_mean) for n in layers], [
        raw(n.moving_variance) for n in layers
    ]


def moving_ids(model: keras.Model) -> set[int]:
    means, variances = moving_statistics(model)
    return {id(variable) for variable in [*means, *variances]}


def normalizing(model: keras.Model) -> list[str]:
    """Names of the batch norms that normalize with a rank's own batch in training."""
    layers = [layer for layer in _batch_norms(model) if layer.trainable]
    return [_name(x) for x in layers if not isinstance(x, SyncBatchNormalization)]


def make_sync(
    model: keras.Model, mode: str, *, weight: float, virtual_ranks: int = 0
) -> Callable:
    """Returns the function that makes moving statistics alike; all ranks must call it.

    One allreduce carries the statistics of all layers.

    Args:
      mode: mean: mean over ranks of the moving means and of the moving variances.
        moments: means weighted by share of the batch; the variance between the ranks' means is
        added to the variances (law of total variance). none: rank 0's. full: nothing to do.
      weight: this rank's share of the global batch; the shares sum to 1 (moments mode).
      virtual_ranks: with any, the step itself averages them.
    """
    for layer in _batch_norms(model):
        if mode != "full" and layer.synchronized and hvd.size() > 1:
            raise ValueError(
                f"{_name(layer)} has synchronized=True, which Keras does over tf.distribute and "
                "not over these ranks: use --bn_sync=full"
            )
    means, variances = moving_statistics(model)
    if mode == "full" or not means or hvd.size() == 1 or virtual_ranks:
        return lambda: None
    if mode == "mean":
        weight = 1.0 / hvd.size()
    elif mode == "none":
        weight = 1.0 if hvd.rank() == 0 else 0.0
    sizes = [m.shape.num_elements() for m in means]

    def joined(variables: Sequence[tf.Variable]) -> tf.Tensor:
        return tf.concat([tf.cast(v, tf.float64) for v in variables], axis=0)

    @tf.function(autograph=False)
    def sync(share: tf.Tensor) -> None:
        # float64, because E[x^2] - E[x]^2 loses too many digits in float32.
        mean = joined(means)
        second = joined(variances)
        if mode == "moments":
            second += tf.square(mean)
        # 0 times NaN is 0.
        both = tf.math.multiply_no_nan(tf.stack([mean, second]), share)
        mean, second = tf.unstack(
            hvd.allreduce(both, op=hvd.Sum, name="batch_norm.moving")
        )
        if mode == "moments":
            second = tf.maximum(second - tf.square(mean), 0.0)
        for variables, values in ((means, mean), (variances, second)):
            for variable, value in zip(variables, tf.split(values, sizes)):
                variable.assign(tf.cast(value, variable.dtype))

    # It is an argument: with a constant TensorFlow's optimizer would run Horovod's operation.
    share = tf.constant(weight, tf.float64)
    return lambda: sync(share)


def synchronize(model: keras.Model) -> keras.Model:
    """Makes every batch norm of a built model, at any depth, a `SyncBatchNormalization`, in place.

    Subclassed models, wrappers and shared layers thus keep their layers. Raises ValueError for a
    class derived from Keras's batch norm, naming it.
    """
    plain = []
    derived = []
    for layer in _batch_norms(model):
        if type(layer) is keras.layers.BatchNormalization:
            plain.append(layer)
        # Frozen layers normalize with moving statistics, which are the same on all ranks.
        elif layer.trainable and not isinstance(layer, SyncBatchNormalization):
            derived.append(f"{_name(layer)} ({type(layer).__name__})")
    if derived:
        raise ValueError(
            f"--bn_sync=full cannot synchronize {join(derived)}, which may compute batch "
            "statistics in its own way: derive it from "
            "hvdkit.train.batch_norm.SyncBatchNormalization or use another --bn_sync"
        )
    for layer in plain:
        # Keras's own __setattr__ would track the class as if it were a part of the layer.
        object.__setattr__(layer, "__class__", SyncBatchNormalization)
    return model


def fuse(model: keras.Model) -> None:
    """For a GPU: Keras's batch norms of pictures in training as one kernel of cuDNN each, in place.

    Keras's formula is a dozen operations, each of which reads and writes the whole layer in
    float32: most of a step of ResNet-50. Same formula, statistics in float32 too.
    Layers keep their class, so that saved models are Keras's.
    """
    for layer in _batch_norms(model):
        if type(layer) is keras.layers.BatchNormalization and not layer.synchronized:
            # Keras's own __setattr__ would track the function.
            object.__setattr__(layer, "call", partial(_fused, layer))


@contextlib.contextmanager
def at_rest(layers: Sequence[keras.Layer]) -> Iterator[None]:
    """Inside, batch norms among them normalize with their moving statistics, also in training."""
    norms = [
        layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)
    ]
    calls = [vars(layer).get("call") for layer in norms]
    for layer in norms:
        object.__setattr__(layer, "call", partial(_resting, layer))
    try:
        yield
    finally:
        for layer, call in zip(norms, calls):
            if call is None:
                object.__delattr__(layer, "call")
            else:
                object.__setattr__(layer, "call", call)


def _resting(
    layer: Any, inputs: tf.Tensor, training: Any = None, mask: Any = None
) -> tf.Tensor:
    return type(layer).call(layer, inputs, training=False, mask=mask)


def _fused(
    layer: Any, inputs: tf.Tensor, training: Any = None, mask: Any = None
) -> tf.Tensor:
    """A batch norm's `call`; Keras's where cuDNN has no kernel or none is needed."""
    rank = len(inputs.shape)
    dtype = inputs.dtype
    fits = rank == 4 and layer.axis in (-1, 3) and dtype in _FUSED and mask is None
    if not (fits and training and layer.trainable):
        return type(layer).call(layer, inputs, training=training, mask=mask)
    channels = inputs.shape[-1]
    gamma = raw(layer.gamma) if layer.scale else tf.ones([channels])
    beta = raw(layer.beta) if layer.center else tf.zeros([channels])
    scale = tf.cast(gamma, tf.float32)
    offset = tf.cast(beta, tf.float32)
    normed = tf.raw_ops.FusedBatchNormV3(
        x=inputs,
        scale=scale,
        offset=offset,
        mean=[],
        variance=[],
        epsilon=layer.epsilon,
        is_training=True,
    )
    # cuDNN's variance is the unbiased one, Keras's moving variance follows the biased one.
    count = tf.cast(tf.size(inputs) // channels, tf.float32)
    variance = tf.math.multiply_no_nan(normed.batch_variance, (count - 1) / count)
    _follow(layer.moving_mean, normed.batch_mean, layer.momentum)
    _follow(layer.moving_variance, variance, layer.momentum)
    return tf.cast(normed.y, layer.compute_dtype)


def _follow(average: keras.Variable, value: tf.Tensor, momentum: float) -> None:
    old = tf.cast(raw(average), tf.float32)
    average.assign(old * momentum + value * (1.0 - momentum))


@saved_layers.register
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch norm over the global batch: forward, backward and moving statistics.

    Equal to one process that holds the whole global batch, also when the ranks' shares differ in
    size; on one rank it is Keras's layer. One small allreduce forward and one backward for each
    call. Every rank must make the same calls in training, with at least one sample.
    """

    def _moments(
        self, inputs: tf.Tensor, mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Mean and biased variance over all ranks, each [channels], in float32 or float64.

        The ranks' own moments are taken in two passes, then joined in float64: E[x^2] - E[x]^2
        of the raw inputs in float32 would cancel.
        """
        mean, variance = super()._moments(inputs, mask)
        if hvd.size() == 1:
            return mean, variance
        dtype = mean.dtype
        shape = self.moving_mean.shape
        mean, variance = (
            tf.reshape(tf.cast(t, tf.float64), shape) for t in (mean, variance)
        )
        # Keras's masked moments divide by count + epsilon, so that one without positions is 0.
        extra = 0.0 if mask is None else keras.config.epsilon()
        count = self._count(inputs, mask)
        total = mean * (count + extra)
        # sum x^2 = sum (x - m)^2 + 2 m sum x - n m^2
        square = variance * (count + extra) + 2 * mean * total - count * tf.square(mean)
        sums = sum_over_ranks(tf.stack([count, total, square]), self._collective())
        count, total, square = tf.unstack(sums)
        mean = total / (count + extra)
        distance = square - 2 * mean * total + count * tf.square(mean)
        variance = tf.maximum(distance / (count + extra), 0.0)
        return tf.cast(mean, dtype), tf.cast(variance, dtype)

    def _count(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
        """Positions of each channel that count on this rank, float64 [channels]."""
        if mask is None:
            channels = self.moving_mean.shape[0]
            return tf.fill(
                [channels], tf.cast(tf.size(inputs, tf.int64) // channels, tf.float64)
            )
        weights = tf.broadcast_to(
            tf.cast(mask, tf.float64)[..., None], tf.shape(inputs)
        )
        return tf.reduce_sum(weights, self._reduction_axes)

    def _collective(self) -> str:
        """The name of a call's collective, the same on every rank.

        A layer may be called more than once in a step, and paths repeat in subclassed models:
        TensorFlow numbers equal names in a graph, and prefixes those in a function with its
        caller's name. What runs many times at once under one name is refused.
        """
        if across.in_branch_or_loop():
            raise _BranchError(
                f"--bn_sync=full cannot synchronize {self.path}: it is called in a branch or a "
                "loop of the graph (a recurrent cell, TimeDistributed without a fixed number of "
                "time steps), where ranks may take other turns: use another --bn_sync"
            )
        return f"{self.moving_mean.path}.batch"


class _BranchError(ValueError):
    # Without this Keras adds ten lines of call arguments to the message.
    _keras_call_info_injected = True


def sum_over_ranks(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Sum of `tensor` over ranks; its gradient is the sum over ranks of the gradients.

    Horovod's own gradient would name its collective after a tensor of the backward graph.
    """

    @tf.custom_gradient
    def summed(x: tf.Tensor):
        def backward(upstream: tf.Tensor) -> tf.Tensor:
            return hvd.allreduce(upstream, op=hvd.Sum, name=f"{name}.gradient")

        return hvd.allreduce(x, op=hvd.Sum, name=name), backward

    return summed(tensor)


def _batch_norms(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    # Keras has no public list of layers at any depth: model.layers is the first level only.
    layers = model._flatten_layers()
    return [
        layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)
    ]


def _name(layer: keras.layers.Layer) -> str:
    return layer.path or layer.name  # a layer has its path once it is built
