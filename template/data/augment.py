"""Random scale, crop, mirror and colour for image/label pairs, and their evaluation form.

Every draw comes from a key (int32 [2], for example (epoch's seed, sample id)): equal keys make
equal samples on any machine, in any thread and order. Images come out as `normalize` says;
labels are only ever picked from, never interpolated.
"""

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from data.labels import IGNORE

# One generator on every device: the default may differ between CPU and GPU.
_ALG = "philox"


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What may happen to a training pair. Raises ValueError for ranges that mean nothing."""

    size: tuple[int, int]  # pixels, height and width of what comes out
    scale: tuple[float, float] = (0.5, 2.0)  # factor on the pixels, drawn log-uniformly
    mirror: bool = True  # left-right, half of the time; not for digits, letters, signs
    brightness: float = 0.1  # shift of up to this share of the full range
    contrast: float = 0.2  # factor of 1 +- this, about the crop's mean
    saturation: float = 0.2  # factor of 1 +- this, about the pixel's grey
    fill: tuple[float, float, float] = (127.5, 127.5, 127.5)  # colour beside the image, 0..255
    ignore_label: int = IGNORE  # label beside the image

    def __post_init__(self) -> None:
        checks = {
            "size": min(self.size) >= 1,
            "scale": 0 < self.scale[0] <= self.scale[1],
            "brightness": 0 <= self.brightness <= 1,
            "contrast": 0 <= self.contrast <= 1,
            "saturation": 0 <= self.saturation <= 1,
            "fill": len(self.fill) == 3 and all(0 <= part <= 255 for part in self.fill),
            "ignore_label": 0 <= self.ignore_label <= 255,
        }
        for name, fine in checks.items():
            if not fine:
                raise ValueError(
                    f"augmentation: {name}={getattr(self, name)} is out of range: sizes are >= 1, "
                    "scale is 0 < low <= high, shares are 0 to 1, fill and labels 0 to 255"
                )


class Window(NamedTuple):
    """A rectangle of an image's pixels that may reach over the image's edges."""

    top: tf.Tensor  # int32 scalar, negative above the image
    left: tf.Tensor  # int32 scalar, negative left of the image
    height: tf.Tensor  # int32 scalar
    width: tf.Tensor  # int32 scalar
    mirrored: tf.Tensor  # bool scalar: to be turned left-right


def normalize(image: tf.Tensor) -> tf.Tensor:
    """Brings [0, 255] to the [-1, 1] that models are fed with, float32 of the same shape."""
    return tf.cast(image, tf.float32) / 127.5 - 1.0


def denormalize(image: tf.Tensor) -> tf.Tensor:
    """The inverse of `normalize`, for drawing: uint8 of the same shape."""
    return tf.saturate_cast(tf.round((image + 1.0) * 127.5), tf.uint8)


def training_pair(
    image: tf.Tensor, label: tf.Tensor, key: tf.Tensor, how: Augmentation
) -> tuple[tf.Tensor, tf.Tensor]:
    """Augments image (uint8 [H, W, 3]) and label (uint8 [H, W, 1]); key: int32 [2].

    Returns float32 [*how.size, 3] in [-1, 1] and uint8 [*how.size, 1].
    """
    window_key, colour_key = tf.unstack(tf.random.split(key, 2, alg=_ALG))
    window = draw_window(tf.shape(image), window_key, how)
    return cut_image(image, window, colour_key, how), cut_label(label, window, how)


def evaluation_pair(
    image: tf.Tensor, label: tf.Tensor, how: Augmentation
) -> tuple[tf.Tensor, tf.Tensor]:
    """The centre of a pair, cropped or padded to `how.size`, with no draws.

    Shapes, dtypes and ranges as of `training_pair`.
    """
    height, width = how.size
    shape = tf.shape(image)
    top, left = (shape[0] - height) // 2, (shape[1] - width) // 2
    window = Window(top, left, tf.constant(height), tf.constant(width), tf.constant(False))
    fill = normalize(how.fill)
    image = _place(normalize(image) - fill, window, 0.0) + fill
    label = _place(label, window, how.ignore_label)
    return tf.ensure_shape(image, [*how.size, 3]), tf.ensure_shape(label, [*how.size, 1])


def draw_window(shape: tf.Tensor, key: tf.Tensor, how: Augmentation) -> Window:
    """Draws the part of an image (shape int32 [3]) that fills the output at a random scale.

    Cutting first and scaling after gives the pixels of scaling first, at a cost that depends on
    the output's size and not on the image's.
    """
    draws = tf.unstack(tf.random.stateless_uniform([4], key, alg=_ALG))
    low, high = how.scale
    scale = low * (high / low) ** draws[0]
    height = tf.maximum(tf.cast(tf.round(how.size[0] / scale), tf.int32), 1)
    width = tf.maximum(tf.cast(tf.round(how.size[1] / scale), tf.int32), 1)
    mirrored = draws[3] < 0.5 if how.mirror else tf.constant(False)
    return Window(
        _offset(shape[0] - height, draws[1]), _offset(shape[1] - width, draws[2]),
        height, width, mirrored,
    )  # fmt: skip


def cut_image(image: tf.Tensor, window: Window, key: tf.Tensor, how: Augmentation) -> tf.Tensor:
    """The window of an image (uint8 [H, W, 3]), scaled and recoloured: float32 in [-1, 1]."""
    fill = normalize(how.fill)
    image = jitter(normalize(_inside(image, window)), key, how)
    # Around its fill colour, so that padding is with zeros: tf.pad takes one value, not three.
    image = _pad(image - fill, window, 0.0)
    # Bilinear looks at two pixels a side: beyond a factor of 2 it would leave some out.
    return (
        tf.cond(
            window.height > 2 * how.size[0],
            lambda: tf.image.resize(image, how.size, "bilinear", antialias=True),
            lambda: tf.image.resize(image, how.size, "bilinear"),
        )
        + fill
    )


def cut_label(label: tf.Tensor, window: Window, how: Augmentation) -> tf.Tensor:
    """The window of a label (uint8 [H, W, 1]), scaled: uint8 [*how.size, 1].

    Both resizes take pixel centres at one half, so image and label stay on each other. A class is
    not a mean of classes: the nearest pixel's stays, however much smaller the label gets.
    """
    return tf.image.resize(_place(label, window, how.ignore_label), how.size, "nearest")


def jitter(image: tf.Tensor, key: tf.Tensor, how: Augmentation) -> tf.Tensor:
    """Random brightness, contrast and saturation of a float32 [H, W, 3] in [-1, 1]."""
    draws = tf.unstack(tf.random.stateless_uniform([3], key, -1.0, 1.0, alg=_ALG))
    shift = 2.0 * how.brightness * draws[0]
    contrast, saturation = 1.0 + how.contrast * draws[1], 1.0 + how.saturation * draws[2]
    grey = tf.reduce_mean(image, axis=-1, keepdims=True)
    mean = tf.reduce_mean(grey)
    image = grey + saturation * (image - grey)
    return tf.clip_by_value(mean + contrast * (image - mean) + shift, -1.0, 1.0)


def _offset(slack: tf.Tensor, draw: tf.Tensor) -> tf.Tensor:
    """A whole number from 0 to slack, or from slack to 0 where the image is the smaller."""
    steps = tf.cast(tf.abs(slack) + 1, tf.float32)
    # Rounding may give draw * steps == steps for draws just below one.
    step = tf.minimum(tf.cast(draw * steps, tf.int32), tf.abs(slack))
    return step * tf.sign(slack)


def _place(pixels: tf.Tensor, window: Window, fill: float) -> tf.Tensor:
    return _pad(_inside(pixels, window), window, fill)


def _inside(pixels: tf.Tensor, window: Window) -> tf.Tensor:
    """The part of the window that lies on the image; at least one pixel, as `_offset` draws."""
    top, left = tf.maximum(window.top, 0), tf.maximum(window.left, 0)
    return pixels[top : window.top + window.height, left : window.left + window.width]


def _pad(inside: tf.Tensor, window: Window, fill: float) -> tf.Tensor:
    """Fills the window up around its inside, and turns it when it is mirrored."""
    above, before = tf.maximum(-window.top, 0), tf.maximum(-window.left, 0)
    below = window.height - above - tf.shape(inside)[0]
    after = window.width - before - tf.shape(inside)[1]
    padded = tf.pad(inside, [[above, below], [before, after], [0, 0]], constant_values=fill)
    turned = padded[:, :: tf.where(window.mirrored, -1, 1)]  # its step hides its shape
    return tf.ensure_shape(turned, [None, None, inside.shape[-1]])
