"""RandAugment (Cubuk et al. 2020, arXiv:1909.13719): a few of 14 operations, all as strong.

Operations on pictures, uint8 [H, W, 3], that compute what Pillow does, but for the last shade.
keras.layers.RandAugment has a state in place of keys, computes all operations for each that it
applies, and has others. Magnitudes are torchvision's, 0 to 30; 30 is the strongest of AutoAugment.
"""

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from hvdkit.data.augment import image_ops

STRONGEST = 30
_FILL = 128.0  # grey beside the picture, as in the paper's code
# Weights of red, green and blue over 2**16, as in Pillow's grey.
_LUMA = (19595, 38470, 7471)
# Largest shift as a share of the side: 150 of the paper's 331 pixels.
_SHIFT = 150 / 331
_SAME_X = (1.0, 0.0, 0.0)
_SAME_Y = (0.0, 1.0, 0.0)

Picture: TypeAlias = tf.Tensor
Row = tuple[tf.Tensor | float, ...]  # a, b and c of a * x + b * y + c
# Takes a picture and a strength, -1 to 1.
Operation = Callable[[Picture, tf.Tensor], Picture]


def applied(image: Picture, key: tf.Tensor, *, count: int, magnitude: float) -> Picture:
    """Applies `count` operations; each is drawn from all, with a sign for those that have one."""
    draws = image_ops.uniform(key, 2 * count)
    for number in range(count):
        choice = draws[2 * number]
        sign = tf.where(draws[2 * number + 1] < 0.5, -1.0, 1.0)
        strength = sign * (magnitude / STRONGEST)
        branches = []
        for operation in OPERATIONS.values():
            branches.append(functools.partial(operation, image, strength))
        # Rounding may give choice * n == n for draws just below one: then it is the last branch.
        changed = tf.switch_case(tf.cast(choice * len(branches), tf.int32), branches)
        image = tf.ensure_shape(changed, image.shape)
    return image


def _transformed(image: Picture, x_from: Row, y_from: Row) -> Picture:
    """Each pixel x, y gets the nearest one to a * x + b * y + c for both, in pixels' edges."""
    numbers = []
    for a, b, c in (x_from, y_from):
        # TensorFlow counts from pixels' centres.
        numbers += [a, b, c + (a + b - 1.0) / 2.0]
    transform = tf.stack([*numbers, 0.0, 0.0])
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None],
        transforms=transform[None],
        output_shape=tf.shape(image)[:2],
        interpolation="NEAREST",
        fill_value=_FILL,
        fill_mode="CONSTANT",
    )[0]


def _side(image: Picture, axis: int) -> tf.Tensor:
    return tf.cast(tf.shape(image)[axis], tf.float32)


def _shift_x(image: Picture, strength: tf.Tensor) -> Picture:
    pixels = tf.round(_SHIFT * strength * _side(image, 1))
    return _transformed(image, (1.0, 0.0, pixels), _SAME_Y)


def _shift_y(image: Picture, strength: tf.Tensor) -> Picture:
    pixels = tf.round(_SHIFT * strength * _side(image, 0))
    return _transformed(image, _SAME_X, (0.0, 1.0, pixels))


def _rotate(image: Picture, strength: tf.Tensor) -> Picture:
    """Turns it about its centre by up to 30 degrees, counter-clockwise at a positive strength."""
    angle = math.pi / 6 * strength
    cos = tf.cos(angle)
    sin = tf.sin(angle)
    y = _side(image, 0) / 2.0
    x = _side(image, 1) / 2.0

    x_from = (cos, -sin, x - cos * x + sin * y)
    y_from = (sin, cos, y - sin * x - cos * y)
    return _transformed(image, x_from, y_from)


def _shear_x(image: Picture, strength: tf.Tensor) -> Picture:
    return _transformed(image, (1.0, 0.3 * strength, 0.0), _SAME_Y)


def _shear_y(image: Picture, strength: tf.Tensor) -> Picture:
    return _transformed(image, _SAME_X, (0.3 * strength, 1.0, 0.0))


def _away_from(plain: tf.Tensor, image: Picture, strength: tf.Tensor) -> Picture:
    """The picture, more (or less) different from `plain`, float32, than it is."""
    mixed = plain + (1.0 + 0.9 * strength) * (tf.cast(image, tf.float32) - plain)
    return tf.cast(tf.clip_by_value(mixed, 0.0, 255.0), tf.uint8)


def _grey(image: Picture) -> tf.Tensor:
    """The grey of each pixel: float32 [H, W, 1], whole numbers."""
    sums = tf.reduce_sum(tf.cast(image, tf.int32) * _LUMA, axis=-1, keepdims=True)
    return tf.cast((sums + 2**15) // 2**16, tf.float32)


def _contrast(image: Picture, strength: tf.Tensor) -> Picture:
    mean = tf.floor(tf.reduce_mean(_grey(image)) + 0.5)
    return _away_from(mean, image, strength)


def _sharpness(image: Picture, strength: tf.Tensor) -> Picture:
    """Moves pixels away from the mean of 3 x 3, whose middle one counts 5 times; edges stay."""
    kernel = tf.reshape([1.0, 1, 1, 1, 5, 1, 1, 1, 1], [3, 3, 1, 1]) / 13.0 * tf.eye(3)
    pixels = tf.cast(image, tf.float32)
    smooth = tf.floor(tf.nn.conv2d(pixels[None], kernel, 1, "SAME")[0] + 0.5)

    height, width = tf.unstack(tf.shape(image)[:2])
    rows = _is_inside(height)[:, None, None]
    columns = _is_inside(width)[None, :, None]
    return _away_from(tf.where(rows & columns, smooth, pixels), image, strength)


def _is_inside(length: tf.Tensor) -> tf.Tensor:
    """Whether each of so many pixels in a row is neither the first nor the last: bool [length]."""
    return tf.range(length) % tf.maximum(length - 1, 1) > 0


def _posterize(image: Picture, strength: tf.Tensor) -> Picture:
    """Drops up to 4 of the lowest bits."""
    bits = tf.cast(tf.round(4.0 * tf.abs(strength)), tf.uint8)
    return tf.bitwise.left_shift(tf.bitwise.right_shift(image, bits), bits)


def _solarize(image: Picture, strength: tf.Tensor) -> Picture:
    """Inverts the shades from a limit on, which is 255 at strength 0 and 0 at strength 1."""
    limit = tf.cast(255.0 * (1.0 - tf.abs(strength)), image.dtype)
    return tf.where(image >= limit, 255 - image, image)


def _autocontrast(image: Picture, strength: tf.Tensor) -> Picture:
    """Stretches each channel, at any strength: its darkest shade becomes 0, its brightest 255.

    A channel of one shade stays as it is.
    """
    image = tf.cast(image, tf.float32)
    low = tf.reduce_min(image, [0, 1])
    high = tf.reduce_max(image, [0, 1])
    scale = 255.0 / tf.maximum(high - low, 1.0)

    # The cast to uint8 truncates, and 255 may be computed as 254.99998: 1e-3 mends that.
    stretched = tf.clip_by_value((image - low) * scale + 1e-3, 0.0, 255.0)
    return tf.cast(tf.where(high > low, stretched, image), tf.uint8)


def _equalize(image: Picture, strength: tf.Tensor) -> Picture:
    """Makes all shades of each channel as frequent as they can be."""
    places = tf.cast(image, tf.int32) + 256 * tf.range(3)
    counts = tf.math.bincount(tf.reshape(places, [-1]), minlength=768)
    counts = tf.reshape(counts, [3, 256])
    below = tf.cumsum(counts, axis=1, exclusive=True)
    # A step is a 255th of all pixels but those of the brightest shade.
    step = tf.reduce_max(tf.where(counts > 0, below, 0), axis=1, keepdims=True) // 255
    shades = tf.minimum((below + step // 2) // tf.maximum(step, 1), 255)
    shades = tf.where(step > 0, shades, tf.range(256))
    return tf.cast(tf.gather(tf.reshape(shades, [-1]), places), tf.uint8)


OPERATIONS: dict[str, Operation] = {
    "identity": lambda image, strength: image,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "rotate": _rotate,
    "solarize": _solarize,
    "colour": lambda image, strength: _away_from(_grey(image), image, strength),
    "posterize": _posterize,
    "contrast": _contrast,
    "brightness": lambda image, strength: _away_from(tf.zeros([]), image, strength),
    "sharpness": _sharpness,
    "shear_x": _shear_x,
    "shear_y": _shear_y,
    "shift_x": _shift_x,
    "shift_y": _shift_y,
}
