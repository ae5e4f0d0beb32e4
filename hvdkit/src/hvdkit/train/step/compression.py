"""Gradients as float16 on the wire, with a scale of its own for each.

Horovod's Compression.fp16 casts what the backward pass gives. That is the gradient of a mean times
what is divided out after the sum over ranks: the share of positions that count, weights, the loss
scale. So its small values became zeros and its large ones infinite, whatever the mean's were.
"""

import math

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdkit.train.step.losses import at_least_float32

# Prefix of the names of exchanged exponents; graph_checks.py knows it.
NAME = "compression."
_HIGHEST = 15  # float16 holds values below 2**16
_LARGEST_EXPONENT = 100  # 2**100 and 2**-100 are in range of float32


class ScaledFloat16:
    """What hvd.DistributedGradientTape takes as `compression`.

    Ranks agree on the largest exponent of a gradient, one number. The power of two by which each of
    them then multiplies its part lets the sum over ranks use float16's range: it cannot overflow,
    and a value keeps all 11 bits down to 2**-29 / ranks of the largest one.
    """

    def __init__(self, device: str) -> None:
        """`device`: where Horovod reduces; "": where the tensor is."""
        self._device = device
        self._used = 0  # number of names in use

    def compress(
        self, tensor: tf.Tensor
    ) -> tuple[tf.Tensor, tuple[tf.DType, tf.Tensor] | None]:
        """The tensor as float16, and what `decompress` needs; others than floats as they are."""
        if not tensor.dtype.is_floating:
            return tensor, None
        wide = at_least_float32(tensor)
        exponent = hvd.allreduce(
            _exponent(wide),
            op=hvd.Max,
            name=f"{NAME}{self._used}",
            device_dense=self._device,
            # The name is the same on all ranks, whatever each traced before.
            ignore_name_scope=True,
        )
        self._used += 1
        room = _HIGHEST - math.ceil(math.log2(hvd.size()))
        power = tf.clip_by_value(room - exponent, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
        scale = tf.cast(tf.pow(2.0, power), wide.dtype)
        return tf.cast(wide * scale, tf.float16), (tensor.dtype, scale)

    def decompress(
        self, tensor: tf.Tensor, context: tuple[tf.DType, tf.Tensor] | None
    ) -> tf.Tensor:
        if context is None:
            return tensor
        dtype, scale = context
        return tf.cast(tf.cast(tensor, scale.dtype) / scale, dtype)


def _exponent(tensor: tf.Tensor) -> tf.Tensor:
    """The least e with all magnitudes at most 2**e, a float32 scalar.

    It is at least -_LARGEST_EXPONENT, and this where a value is no number, which stays one
    whatever the scale.
    """
    largest = tf.cast(tf.reduce_max(tf.abs(tensor)), tf.float64)
    sound = tf.math.is_finite(largest) & (largest > 0)  # an empty tensor has -inf
    exponent = tf.math.ceil(tf.math.log(tf.where(sound, largest, 1.0)) / math.log(2.0))
    exponent = tf.where(sound, exponent, -float(_LARGEST_EXPONENT))
    return tf.cast(tf.maximum(exponent, -float(_LARGEST_EXPONENT)), tf.float32)
