"""Segments pictures of any size: padding, sliding windows, scales, mirror images.

Pictures of different sizes are not padded to a common size: a network sees the padding, so a
picture's score would depend on its neighbours in the batch.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from hvdkit.train.step.losses import at_least_float32

# Takes float [B, H, W, 3], returns float [B, H, W, classes].
Function = Callable[[tf.Tensor], tf.Tensor]
# Such a function traced for one signature.
TracedFunction: TypeAlias = tf.types.experimental.PolymorphicFunction


@dataclasses.dataclass(frozen=True)
class Passes:
    """The passes that `predict` makes over a picture."""

    stride: int  # the model takes heights and widths that are multiples of it
    window: int = 0  # pixels, a multiple of stride; 0: whole pictures
    scales: tuple[float, ...] = (1.0,)
    mirror: bool = False  # left-right mirror images are predicted too
    fill: int = 128  # grey of the padding, 0 to 255

    @property
    def average(self) -> bool:
        """Whether there are several, whose probabilities are averaged."""
        return bool(self.window) or self.scales != (1.0,) or self.mirror


def predict(model: Function, images: tf.Tensor, passes: Passes) -> tf.Tensor:
    """Logits [B, H, W, classes] for images [B, H, W, 3] of 0 to 255, of the images' own size.

    A picture is padded below and on its right to the model's stride, and its logits are cut back.
    With several passes, softmax probabilities are averaged, and their logarithms are returned, so
    that a softmax gives the averages: first over the windows that contain a pixel, then, resized
    bilinearly to the picture's size, over scales and mirror images
    (Zhao et al. 2017, arXiv:1612.01105, section 5.1; Chen et al. 2017, arXiv:1706.05587, 4.1).
    """
    if not passes.average:
        return _padded(model, images, passes)

    images = tf.cast(images, tf.float32)  # scaled pictures are not integers
    # One trace serves all passes, whatever their sizes.
    traced = tf.function(
        lambda part: at_least_float32(_padded(model, part, passes)),
        input_signature=[tf.TensorSpec([None, None, None, 3], images.dtype)],
        autograph=False,
    )
    if traced.get_concrete_function().structured_outputs.shape[-1] == 1:
        raise ValueError(
            "--eval_window, --eval_scales and --eval_flip average softmax probabilities, "
            "which of one logit are 1: leave them out, or give the task a `predict` of its own"
        )
    mirrorings = (False, True) if passes.mirror else (False,)
    view, *others = itertools.product(passes.scales, mirrorings)
    total = _view(view, traced, images, window=passes.window)
    for view in others:
        # A view waits for the one before: in parallel they would need memory for all.
        with tf.control_dependencies([total]):
            total += _view(view, traced, tf.identity(images), window=passes.window)
    mean = total / (1 + len(others))
    return tf.math.log(tf.maximum(mean, np.finfo(mean.dtype.as_numpy_dtype).tiny))


def _view(
    view: tuple[float, bool], logits: TracedFunction, images: tf.Tensor, *, window: int
) -> tf.Tensor:
    """Probabilities of images, at their size; `view`: at this scale, mirrored or not."""
    scale, mirrored = view
    size = tf.shape(images)[1:3]
    if mirrored:
        images = images[:, :, ::-1]
    if scale != 1.0:
        scaled = tf.cast(tf.round(tf.cast(size, tf.float64) * scale), tf.int32)
        images = _resize(images, tf.maximum(scaled, 1), scale)
    if window:
        probabilities = _over_windows(logits, images, window)
    else:
        probabilities = tf.nn.softmax(logits(images))
    if scale != 1.0:
        probabilities = _resize(probabilities, size, 1.0 / scale)
    return probabilities[:, :, ::-1] if mirrored else probabilities


def _resize(images: tf.Tensor, size: tf.Tensor, factor: float) -> tf.Tensor:
    """Resizes bilinearly; antialiased below one half, where pixels would be skipped otherwise."""
    antialias = factor < 0.5
    return tf.cast(
        tf.image.resize(images, size, "bilinear", antialias=antialias), images.dtype
    )


def _over_windows(logits: TracedFunction, images: tf.Tensor, window: int) -> tf.Tensor:
    """Mean probabilities over all windows that contain a pixel.

    Windows form a grid, so the mean along a row and then down gives each the same weight, and only
    one row of windows is in memory at a time.
    """
    like = logits.get_concrete_function().structured_outputs

    def probabilities(part: tf.Tensor) -> tf.Tensor:
        return tf.nn.softmax(logits(part))

    def row_mean(row: tf.Tensor) -> tf.Tensor:
        return _mean_along(2, row, probabilities, window=window, like=like)

    return _mean_along(1, images, row_mean, window=window, like=like)


def _mean_along(
    axis: int,
    images: tf.Tensor,
    function: Function,
    *,
    window: int,
    like: tf.TensorSpec,
) -> tf.Tensor:
    """Mean of `function` over windows along an axis (1: down), a tensor like `like`.

    They overlap by at least a third. The last one is shifted to end at the edge; images shorter
    than a window are one window.
    """
    shape = tf.shape(images)
    length = shape[axis]
    step = max(2 * window // 3, 1)
    side = tf.minimum(length, window)
    windows = 1 - (side - length) // step
    zeros = tf.zeros(tf.concat([shape[:3], like.shape[-1:]], 0), like.dtype)

    def add(
        number: tf.Tensor, total: tf.Tensor, count: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        start = tf.minimum(number * step, length - side)
        part = function(tf.gather(images, tf.range(start, start + side), axis=axis))
        around = [start, length - side - start]
        padding = [[0, 0], [0, 0], [0, 0], [0, 0]]
        padding[axis] = around
        total += tf.pad(part, padding)
        total.set_shape(zeros.shape)
        count += tf.pad(tf.ones([side], count.dtype), [around])
        return number + 1, total, count

    _, total, count = tf.while_loop(
        lambda number, *_: number < windows,
        add,
        (0, zeros, tf.zeros([length], zeros.dtype)),
        # The activations of one window at a time are in memory.
        parallel_iterations=1,
    )
    # [length] gets the dimensions that follow the axis: [length, 1, 1] or [length, 1].
    return total / (count[:, None, None] if axis == 1 else count[:, None])


def _padded(model: Function, images: tf.Tensor, passes: Passes) -> tf.Tensor:
    """Logits of images: padded to the model's stride, then cut back."""
    height, width = tf.unstack(tf.shape(images)[1:3])
    below = -height % passes.stride
    beside = -width % passes.stride
    padding = [[0, 0], [0, below], [0, beside], [0, 0]]
    padded = tf.pad(images, padding, constant_values=passes.fill)
    return model(padded)[:, :height, :width]
