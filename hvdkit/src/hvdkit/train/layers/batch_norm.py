"""Batch norm across ranks: moving statistics averaged, or batch statistics shared.

By default each rank normalizes with its own batch and keeps its own moving mean and variance.
They are averaged over ranks before they are read (evaluation, checkpoint, export). In `mean` mode
that equals averaging at every step, because a moving average is linear.

With `SyncBatchNormalization` every rank normalizes with the global batch's statistics, so that
N ranks compute what one would.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from tensorflow.python.util import _pywrap_determinism

from hvdkit.logs import join
from hvdkit.ranks import exchange
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


def no_sync() -> None:
    """A sync where there is nothing to bring together."""


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
    is_divided = hvd.size() > 1 or bool(virtual_ranks)
    for layer in _batch_norms(model):
        if mode != "full" and layer.renorm and layer.trainable and is_divided:
            raise ValueError(
                f"{_name(layer)} has renorm=True, and each rank would correct its batch by "
                "statistics of its own: use --bn_sync=full"
            )
        if mode != "full" and layer.synchronized and hvd.size() > 1:
            raise ValueError(
                f"{_name(layer)} has synchronized=True, which Keras does over tf.distribute and "
                "not over these ranks: use --bn_sync=full"
            )
    means, variances = moving_statistics(model)
    if mode == "full" or not means or hvd.size() == 1 or virtual_ranks:
        return no_sync
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
    synchronize_layers(model._flatten_layers())
    return model


def synchronize_layers(layers: Sequence[keras.Layer]) -> None:
    """`synchronize` of the batch norms among the layers."""
    plain = []
    derived = []
    for layer in layers:
        if not isinstance(layer, keras.layers.BatchNormalization):
            continue
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


def _resting(layer: Any, *inputs: Any, **others: Any) -> tf.Tensor:
    """Its `call` as in evaluation. A subclass may take more inputs, in an order of its own."""
    call = type(layer).call
    given = inspect.signature(call).bind(layer, *inputs, **others)
    given.arguments["training"] = False
    return call(*given.args, **given.kwargs)


def _fused(
    layer: Any, inputs: tf.Tensor, training: Any = None, mask: Any = None
) -> tf.Tensor:
    """A batch norm's `call`; Keras's where cuDNN has no kernel or none is needed."""
    if not (training and _fits(layer, inputs, mask)):
        return type(layer).call(layer, inputs, training=training, mask=mask)
    channels = inputs.shape[-1]
    scale, offset = _scale_and_offset(layer, channels)
    normed = tf.raw_ops.FusedBatchNormV3(
        x=inputs,
        scale=scale,
        offset=offset,
        mean=[],
        variance=[],
        epsilon=layer.epsilon,
        is_training=True,
    )
    _follow(layer.moving_mean, normed.batch_mean, layer.momentum)
    _follow(layer.moving_variance, _biased(normed, inputs), layer.momentum)
    return tf.cast(normed.y, layer.compute_dtype)


def _biased(normed: Any, inputs: tf.Tensor) -> tf.Tensor:
    """The variance as Keras has it; that of the fused kernel is the unbiased one."""
    count = tf.cast(tf.size(inputs) // inputs.shape[-1], tf.float32)
    return tf.math.multiply_no_nan(normed.batch_variance, (count - 1) / count)


def _own_moments(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and biased variance of a rank's pictures, each [channels], in float32.

    For 16 bits by the fused kernel, although its result is not used: operations would need a copy
    in float32 and read it twice.
    """
    channels = x.shape[-1]
    if x.dtype == tf.float32:
        return tf.nn.moments(x, [0, 1, 2])
    normed = tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=tf.ones([channels]),
        offset=tf.zeros([channels]),
        mean=[],
        variance=[],
        is_training=True,
    )
    return normed.batch_mean, _biased(normed, x)


def _fits(layer: Any, inputs: tf.Tensor, mask: tf.Tensor | None) -> bool:
    """Whether TensorFlow's fused kernels compute what this layer does in training."""
    is_picture = len(inputs.shape) == 4 and layer.axis in (-1, 3)
    has_kernel = is_picture and inputs.dtype in _FUSED
    return has_kernel and mask is None and layer.trainable and not layer.renorm


def _scale_and_offset(layer: Any, channels: int) -> tuple[tf.Tensor, tf.Tensor]:
    gamma = raw(layer.gamma) if layer.scale else tf.ones([channels])
    beta = raw(layer.beta) if layer.center else tf.zeros([channels])
    return tf.cast(gamma, tf.float32), tf.cast(beta, tf.float32)


def _follow(average: keras.Variable, value: tf.Tensor, momentum: float) -> None:
    old = tf.cast(raw(average), tf.float32)
    average.assign(old * momentum + value * (1.0 - momentum))


class _Statistics(NamedTuple):
    """Of the global batch, each [channels]."""

    count: tf.Tensor  # float64
    mean: tf.Tensor
    variance: tf.Tensor  # the biased one


@saved_layers.register
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch norm over the global batch: forward, backward and moving statistics.

    Equal to one process that holds the whole global batch, also when the ranks' shares differ in
    size; on one rank it is Keras's layer. One small allreduce forward and one backward for each
    call. Every rank must make the same calls in training, with at least one sample.
    """

    def call(
        self, inputs: tf.Tensor, training: Any = None, mask: Any = None
    ) -> tf.Tensor:
        """Keras's formula, for pictures on several ranks by TensorFlow's fused kernels.

        Those have no deterministic gradient on a GPU, so with op determinism it is Keras's own.
        """
        has_own_moments = type(self)._moments is not SyncBatchNormalization._moments
        by_operations = has_own_moments or _pywrap_determinism.is_enabled()
        fits = training and _fits(self, inputs, mask)
        # Where a saved model is only asked, Horovod has not begun.
        if by_operations or not fits or hvd.size() == 1:
            return super().call(inputs, training=training, mask=mask)
        name = self._collective()
        statistics = self._joined(_own_moments(inputs), inputs, None, name)
        scale, offset = _scale_and_offset(self, inputs.shape[-1])
        batch_norm = _FusedBatchNorm(self, statistics, name)
        _follow(self.moving_mean, statistics.mean, self.momentum)
        _follow(self.moving_variance, statistics.variance, self.momentum)
        return tf.cast(batch_norm(inputs, scale, offset), self.compute_dtype)

    def _moments(
        self, inputs: tf.Tensor, mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Mean and biased variance over all ranks, each [channels], in float32 or float64."""
        moments = super()._moments(inputs, mask)
        if hvd.size() == 1:
            return moments
        statistics = self._joined(moments, inputs, mask, self._collective())
        return statistics.mean, statistics.variance

    def _joined(
        self,
        moments: tuple[tf.Tensor, tf.Tensor],
        inputs: tf.Tensor,
        mask: tf.Tensor | None,
        name: str,
    ) -> _Statistics:
        """Of the ranks' own moments, which are taken in two passes; joined in float64.

        E[x^2] - E[x]^2 of the raw inputs in float32 would cancel.
        """
        mean, variance = moments
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
        sums = sum_over_ranks(tf.stack([count, total, square]), name)
        count, total, square = tf.unstack(sums)
        mean = total / (count + extra)
        distance = square - 2 * mean * total + count * tf.square(mean)
        variance = tf.maximum(distance / (count + extra), 0.0)
        return _Statistics(count, tf.cast(mean, dtype), tf.cast(variance, dtype))

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


class _FusedBatchNorm:
    """One call of a batch norm by TensorFlow's fused kernels, with the global batch's statistics.

    The kernels take statistics as constants. So the gradient adds what comes through them: for
    normalized x, dx = scale / deviation * (dy - mean(dy) - x * mean(dy * x)), with means over
    the global batch (Ioffe and Szegedy, 2015), which one exchange of two sums gives.
    """

    def __init__(
        self, layer: SyncBatchNormalization, statistics: _Statistics, name: str
    ) -> None:
        self._layer = layer
        self._statistics = statistics
        self._name = name

    def __call__(
        self, inputs: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor
    ) -> tf.Tensor:
        @tf.custom_gradient
        def normalized(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor):
            def backward(upstream: tf.Tensor) -> list[tf.Tensor]:
                return self._gradients(upstream, x, scale)

            return self._affine(x, scale, offset), backward

        return normalized(inputs, scale, offset)

    def _affine(self, x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
        """`offset` + `scale` times the normalized x, in float32, of x's type."""
        return tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=scale,
            offset=offset,
            mean=self._statistics.mean,
            variance=self._statistics.variance,
            epsilon=self._layer.epsilon,
            is_training=False,
        ).y

    def _gradients(
        self, upstream: tf.Tensor, x: tf.Tensor, scale: tf.Tensor
    ) -> list[tf.Tensor]:
        """Of x, scale and offset; they have gradients of their own, as those of operations."""

        @tf.custom_gradient
        def gradients(upstream: tf.Tensor, x: tf.Tensor, scale: tf.Tensor):
            def backward(*second: tf.Tensor) -> list[tf.Tensor]:
                sources = [upstream, x, scale]
                with tf.GradientTape() as tape:
                    tape.watch(sources)
                    first = self._plain_gradients(upstream, x, scale)
                return tape.gradient(first, sources, second)

            return self._fused_gradients(upstream, x, scale), backward

        return gradients(upstream, x, scale)

    def _fused_gradients(
        self, upstream: tf.Tensor, x: tf.Tensor, scale: tf.Tensor
    ) -> list[tf.Tensor]:
        own = tf.raw_ops.FusedBatchNormGradV3(
            y_backprop=upstream,
            x=x,
            scale=scale,
            reserve_space_1=self._statistics.mean,
            reserve_space_2=self._statistics.variance,
            reserve_space_3=0.0,  # of cuDNN's training kernel
            epsilon=self._layer.epsilon,
            is_training=False,
        )
        sums = tf.stack([own.scale_backprop, own.offset_backprop])
        sums = sum_over_ranks(tf.cast(sums, tf.float64), f"{self._name}.gradient")
        means = tf.cast(sums / self._statistics.count, tf.float32)
        factor = scale * tf.math.rsqrt(self._statistics.variance + self._layer.epsilon)
        slope, level = tf.unstack(-factor * means)
        dx = own.x_backprop + self._affine(x, slope, level)
        return [dx, own.scale_backprop, own.offset_backprop]

    def _plain_gradients(
        self, upstream: tf.Tensor, x: tf.Tensor, scale: tf.Tensor
    ) -> list[tf.Tensor]:
        """The same by operations that have gradients of their own."""
        offset = tf.zeros_like(scale)
        with tf.GradientTape() as tape:
            tape.watch([x, scale, offset])
            wide = tf.cast(x, tf.float32)
            # tf.nn.moments takes the mean for a constant, so its second gradients are wrong.
            mean = tf.reduce_mean(wide, [0, 1, 2])
            moments = (mean, tf.reduce_mean(tf.square(wide - mean), [0, 1, 2]))
            name = f"{self._name}.again"
            statistics = self._layer._joined(moments, wide, None, name)
            y = tf.nn.batch_normalization(
                wide,
                statistics.mean,
                statistics.variance,
                offset,
                scale,
                self._layer.epsilon,
            )
            y = tf.cast(y, x.dtype)
        return tape.gradient(y, [x, scale, offset], upstream)


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
            return sum_over_ranks(upstream, f"{name}.gradient")

        return exchange.over_ranks(x, name), backward

    return summed(tensor)


def _batch_norms(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    # Keras has no public list of layers at any depth: model.layers is the first level only.
    layers = model._flatten_layers()
    return [
        layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)
    ]


def _name(layer: keras.layers.Layer) -> str:
    return layer.path or layer.name  # a layer has its path once it is built
