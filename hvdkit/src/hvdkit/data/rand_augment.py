"""RandAugment (Cubuk et al. 2020, arXiv:1909.13719): a few of 14 operations, all as strong.

Operations on pictures, uint8 [H, W, 3], that compute what Pillow does, but for the last shade.
keras.layers.RandAugment has a state in place of keys, computes all operations for each that it
applies, and has others. Magnitudes are torchvision's, 0 to 30; 30 is the strongest of AutoAugment.
"""

import math
from collections.abc import Callable

import tensorflow as tf

from hvdkit.data import image_ops

STRONGEST = 30
_FILL = 128.0  # beside the picture, as in the paper's code
_LUMA = (19595, 38470, 7471)  # of red, green and blue, over 2**16: Pillow's grey
_SHIFT = 150 / 331  # of the side: 150 pixels of the paper's 331
_STAYS_X, _STAYS_Y = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)

Picture = tf.Tensor
Row = tuple[tf.Tensor | float, ...]  # a, b, c
Operation = Callable[[Picture, tf.Tensor], Picture]  # of a strength, -1 to 1


def applied(image: Picture, key: tf.Tensor, *, count: int, magnitude: float) -> Picture:
    """`count` operations, drawn one by one, each as likely, with a sign for those that have one."""
    draws = tf.reshape(image_ops.uniform(key, 2 * count), [count, 2])
    for which, sign in map(tf.unstack, tf.unstack(draws)):
        strength = tf.where(sign < 0.5, -1.0, 1.0) * (magnitude / STRONGEST)
        branches = [lambda of=of: of(image, strength) for of in OPERATIONS.values()]  # noqa: B023
        # Rounding may give draw * n == n for draws just below one: then it is the last.
        made = tf.switch_case(tf.cast(which * len(branches), tf.int32), branches)
        image = tf.ensure_shape(made, image.shape)
    return image


def _moved(image: Picture, of_x: Row, of_y: Row) -> Picture:
    """Each pixel x, y from a * x + b * y + c for both, the nearest; from edge to edge of pixels."""
    numbers = []
    for a, b, c in (of_x, of_y):
        numbers += [a, b, c + (a + b - 1.0) / 2.0]  # TensorFlow counts from pixels' centres
    transform = tf.stack([*map(tf.convert_to_tensor, numbers), 0.0, 0.0])[None]
    how = {"output_shape": tf.shape(image)[:2], "interpolation": "NEAREST"}
    how |= {"fill_value": _FILL, "fill_mode": "CONSTANT"}
    op = tf.raw_ops.ImageProjectiveTransformV3
    return op(images=image[None], transforms=transform, **how)[0]


def _side(image: Picture, axis: int) -> tf.Tensor:
    return tf.cast(tf.shape(image)[axis], tf.float32)


def _rotate(image: Picture, strength: tf.Tensor) -> Picture:
    """About the centre, up to 30 degrees, counter-clockwise where the strength is positive."""
    cos, sin = tf.cos(math.pi / 6 * strength), tf.sin(math.pi / 6 * strength)
    y, x = _side(image, 0) / 2.0, _side(image, 1) / 2.0
    return _moved(image, (cos, -sin, x - cos * x + sin * y), (sin, cos, y - sin * x - cos * y))


def _from(plain: tf.Tensor, image: Picture, strength: tf.Tensor) -> Picture:
    """The picture, more (or less) different from `plain`, float32, than it is."""
    mixed = plain + (1.0 + 0.9 * strength) * (tf.cast(image, tf.float32) - plain)
    return tf.cast(tf.clip_by_value(mixed, 0.0, 255.0), tf.uint8)


def _grey(image: Picture) -> tf.Tensor:
    """float32 [H, W, 1], whole numbers."""
    sums = tf.reduce_sum(tf.cast(image, tf.int32) * _LUMA, axis=-1, keepdims=True)
    return tf.cast((sums + 2**15) // 2**16, tf.float32)


def _contrast(image: Picture, strength: tf.Tensor) -> Picture:
    return _from(tf.floor(tf.reduce_mean(_grey(image)) + 0.5), image, strength)


def _sharpness(image: Picture, strength: tf.Tensor) -> Picture:
    """From its mean of 3 x 3 pixels, of which the middle one counts 5 times; edges stay."""
    kernel = tf.reshape([1.0, 1, 1, 1, 5, 1, 1, 1, 1], [3, 3, 1, 1]) / 13.0 * tf.eye(3)
    pixels = tf.cast(image, tf.float32)
    smooth = tf.floor(tf.nn.conv2d(pixels[None], kernel, 1, "SAME")[0] + 0.5)
    sides = tf.unstack(tf.shape(image)[:2])
    rows, columns = (tf.range(n) % tf.maximum(n - 1, 1) > 0 for n in sides)
    inside = rows[:, None, None] & columns[None, :, None]
    return _from(tf.where(inside, smooth, pixels), image, strength)


def _posterize(image: Picture, strength: tf.Tensor) -> Picture:
    """Without up to 4 of the lowest bits."""
    bits = tf.cast(tf.round(4.0 * tf.abs(strength)), tf.uint8)
    return tf.bitwise.left_shift(tf.bitwise.right_shift(image, bits), bits)


def _solarize(image: Picture, strength: tf.Tensor) -> Picture:
    """Inverted, from the shade on that is 255 at strength 0 and 0 at 1."""
    limit = tf.cast(255.0 * (1.0 - tf.abs(strength)), image.dtype)
    return tf.where(image >= limit, 255 - image, image)


def _autocontrast(image: Picture, strength: tf.Tensor) -> Picture:
    """Each channel's darkest becomes 0 and its brightest 255."""
    image = tf.cast(image, tf.float32)
    low, high = tf.reduce_min(image, [0, 1]), tf.reduce_max(image, [0, 1])
    scale = 255.0 / tf.maximum(high - low, 1.0)
    stretched = tf.clip_by_value((image - low) * scale + 1e-3, 0.0, 255.0)  # whole ones stay whole
    return tf.cast(tf.where(high > low, stretched, image), tf.uint8)


def _equalize(image: Picture, strength: tf.Tensor) -> Picture:
    """In each channel, all shades as frequent as they can be."""
    places = tf.cast(image, tf.int32) + 256 * tf.range(3)
    counts = tf.reshape(tf.math.bincount(tf.reshape(places, [-1]), minlength=768), [3, 256])
    below = tf.cumsum(counts, axis=1, exclusive=True)
    # All pixels but those of the brightest shade.
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
    "colour": lambda image, strength: _from(_grey(image), image, strength),
    "posterize": _posterize,
    "contrast": _contrast,
    "brightness": lambda image, strength: _from(tf.zeros([]), image, strength),
    "sharpness": _sharpness,
    "shear_x": lambda image, by: _moved(image, (1.0, 0.3 * by, 0.0), _STAYS_Y),
    "shear_y": lambda image, by: _moved(image, _STAYS_X, (0.3 * by, 1.0, 0.0)),
    "shift_x": lambda image, by: _moved(
        image, (1.0, 0.0, tf.round(_SHIFT * by * _side(image, 1))), _STAYS_Y
    ),
    "shift_y": lambda image, by: _moved(
        image, _STAYS_X, (0.0, 1.0, tf.round(_SHIFT * by * _side(image, 0)))
    ),
}
