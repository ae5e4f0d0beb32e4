"""Random crops for classification, and centre crops for evaluation.

Every draw comes from a key (int32 [2]); equal keys make equal crops anywhere. A sample has an
"image", uint8 [H, W, 3]; if it was read from a file, it also has the "file", and only the crop is
decoded. Crops are uint8 [size, size, 3], a quarter of the bytes of floats; a model's first layer
scales them (hvdkit/train/preprocessing.py).
"""

from __future__ import annotations

import tensorflow as tf

from hvdkit.data import image_ops

_TRIES = 10  # as in torchvision's RandomResizedCrop and fb.resnet.torch
_WIDEST = 4.0 / 3.0  # width over height of a part; its inverse at least

Sample = dict[str, tf.Tensor]


def shifted(sample: Sample, key: tf.Tensor, size: int, mirror: bool) -> tf.Tensor:
    """Shifted by up to an eighth of its size, and mirrored half of the time.

    At size 32 this is the 4-pixel padding and random crop of He et al. 2015 (arXiv:1512.03385,
    section 4.2). Pictures of another size are resized first.
    """
    draws = image_ops.uniform(key, 3)
    pad = size // 8
    offset = tf.cast(tf.floor(draws[:2] * (2 * pad + 1)), tf.int32)
    # Padded with black, the border that most small data sets have.
    image = tf.pad(centred(sample, size, share=1.0), [[pad] * 2, [pad] * 2, [0, 0]])
    crop = tf.slice(image, tf.concat([offset, [0]], 0), [size, size, 3])
    return image_ops.mirrored(crop, draws[2] < 0.5) if mirror else crop


def random_resized(
    sample: Sample, key: tf.Tensor, size: int, mirror: bool, smallest: float = 0.08
) -> tf.Tensor:
    """A part of random area and aspect ratio (3/4 to 4/3), scaled to size; mirrored half the time.

    Szegedy et al. 2015 (arXiv:1409.4842, section 6), as is usual for ImageNet.

    Args:
      smallest: least share of the image's area.
    """
    draws = image_ops.uniform(key, _TRIES * 4 + 1)
    tries = tf.reshape(draws[:-1], [_TRIES, 4])
    box = random_part(image_ops.size(sample), tries, smallest)
    crop = image_ops.resize(image_ops.cut(sample, box), [size, size])
    return image_ops.mirrored(crop, draws[-1] < 0.5) if mirror else crop


def random_part(shape: tf.Tensor, draws: tf.Tensor, smallest: float) -> tf.Tensor:
    """The first of ten random parts that fits into an image, or else its middle.

    The area is uniform from `smallest` to 1 of the image's, the logarithm of the ratio is uniform.
    If the part would cross an edge, both are drawn again. The middle is the whole image, cut to
    3/4 or 4/3 if it is narrower or wider. This is the rule of torchvision's
    RandomResizedCrop; fb.resnet.torch, whose augmentation Goyal et al. 2017 use, draws the ratio
    uniformly and falls back to the middle square.

    Args:
      shape: int32 [2], height and width.
      draws: float32 [10, 4] in [0, 1): places (row, column), area and ratio of each try.

    Returns: int32 [4]: top, left, height, width.
    """
    image = tf.cast(shape, tf.float32)
    place, area, ratio = tf.split(draws, [2, 1, 1], axis=1)
    # Sides, in units of a square of the image's area: sqrt(area / ratio), sqrt(area * ratio).
    half = tf.math.log(_WIDEST) * ratio - 0.5 * tf.math.log(_WIDEST)
    sides = tf.sqrt(smallest + (1.0 - smallest) * area) * tf.exp(half * [-1.0, 1.0])
    drawn = tf.round(sides * tf.sqrt(tf.reduce_prod(image)))
    # The middle as one more try: height at most width / (3/4), width at most height * 4/3.
    middle = tf.minimum(image, tf.round(image[::-1] * _WIDEST))
    sizes = tf.concat([drawn, middle[None]], 0)
    places = tf.concat([place, [[0.5, 0.5]]], 0)
    fits = tf.reduce_all((sizes >= 1.0) & (sizes <= image), axis=1)
    first = tf.argmax(fits)  # the first that is true
    size = sizes[first]
    # Rounding may give draw * n == n for draws just below one.
    corner = tf.minimum(tf.floor(places[first] * (image - size + 1.0)), image - size)
    return tf.cast(tf.concat([corner, size], 0), tf.int32)


def centred(sample: Sample, size: int, share: float = 0.875) -> tf.Tensor:
    """The middle square, `share` of the shorter side, scaled to size; nothing is random.

    0.875 is 224 of 256, the usual evaluation on ImageNet.
    """
    shape = image_ops.size(sample)
    side = tf.cast(tf.round(tf.cast(tf.reduce_min(shape), tf.float32) * share), tf.int32)
    side = tf.maximum(side, 1)
    box = tf.concat([(shape - side) // 2, [side, side]], 0)
    return image_ops.resize(image_ops.cut(sample, box), [size, size])
