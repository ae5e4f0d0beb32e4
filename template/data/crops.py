"""Random crops of pictures to be classified, and their evaluation form.

Every draw comes from a key (int32 [2]); equal keys make equal crops anywhere. What comes out is
float32 [size, size, 3] in [-1, 1], as `augment.normalize` says. Scaling is bilinear with
antialias, so that a picture that is much larger than the crop gets no stripes.
"""

from __future__ import annotations

import tensorflow as tf

from data.augment import normalize

_ALG = "philox"  # one generator on every device
_TRIES = 10  # as torchvision's RandomResizedCrop and fb.resnet.torch
_NARROWEST, _WIDEST = 3.0 / 4.0, 4.0 / 3.0  # width over height of a part


def shifted(image: tf.Tensor, key: tf.Tensor, size: int, mirror: bool) -> tf.Tensor:
    """Moved by up to an eighth of its size, and mirrored half of the time.

    At size 32 this is the 4-pixel padding and random crop of He et al. 2015 (arXiv:1512.03385,
    section 4.2). image: uint8 [H, W, 3], resized where it is of another size.
    """
    draws = tf.random.stateless_uniform([5], key, alg=_ALG)
    pad = size // 8
    offset = tf.cast(tf.floor(draws[:2] * (2 * pad + 1)), tf.int32)
    # Padded with the darkest shade, as black borders are what most small sets have.
    image = tf.pad(centred(image, size, share=1.0), [[pad] * 2, [pad] * 2, [0, 0]], "CONSTANT", -1)
    crop = tf.slice(image, tf.concat([offset, [0]], 0), [size, size, 3])
    return _maybe_mirror(crop, draws[4] if mirror else None)


def random_resized(
    image: tf.Tensor, key: tf.Tensor, size: int, mirror: bool, smallest: float = 0.08
) -> tf.Tensor:
    """A part of random area and aspect ratio (3/4 to 4/3), scaled to size; mirrored half the time.

    Szegedy et al. 2015 (arXiv:1409.4842, section 6), as it is usual for ImageNet.

    Args:
      image: uint8 [H, W, 3].
      smallest: least share of the image's area.
    """
    draws = tf.random.stateless_uniform([_TRIES * 4 + 1], key, alg=_ALG)
    tries = tf.reshape(draws[:-1], [_TRIES, 4])
    top, left, height, width = tf.unstack(random_part(tf.shape(image)[:2], tries, smallest))
    crop = normalize(image[top : top + height, left : left + width])
    crop = tf.image.resize(crop, [size, size], "bilinear", antialias=True)
    return _maybe_mirror(tf.ensure_shape(crop, [size, size, 3]), draws[-1] if mirror else None)


def random_part(shape: tf.Tensor, draws: tf.Tensor, smallest: float) -> tf.Tensor:
    """The first of ten random parts that fits into an image, or else its middle.

    An area is drawn evenly from `smallest` to 1 of the image's and a ratio evenly in its
    logarithm; where the part would reach over an edge, both are drawn anew. The middle is the
    whole image, cut to 3/4 or 4/3 where it is narrower or wider. This is the rule of torchvision's
    RandomResizedCrop; fb.resnet.torch, whose augmentation Goyal et al. 2017 use, draws the ratio
    evenly and ends with the middle square.

    Args:
      shape: int32 [2], height and width.
      draws: float32 [10, 4] in [0, 1): places (row, column), area and ratio of each try.

    Returns: int32 [4]: top, left, height, width.
    """
    image = tf.cast(shape, tf.float32)
    area = image[0] * image[1] * (smallest + (1.0 - smallest) * draws[:, 2])
    ratio = _NARROWEST * (_WIDEST / _NARROWEST) ** draws[:, 3]
    sizes = tf.round(tf.sqrt(tf.stack([area / ratio, area * ratio], axis=1)))
    fits = tf.reduce_all((sizes >= 1.0) & (sizes <= image), axis=1)
    # At most as high as wide / (3/4), at most as wide as high * 4/3.
    middle = tf.minimum(image, tf.round(image[::-1] * _WIDEST))
    first = tf.argmax(tf.concat([fits, [True]], 0))  # the first that is true; the middle is last
    size = tf.concat([sizes, middle[None]], 0)[first]
    slack = image - size
    # Rounding may give draw * n == n for draws just below one.
    places = tf.minimum(tf.floor(draws[:, :2] * (slack + 1.0)), slack)
    place = tf.concat([places, tf.floor(slack / 2.0)[None]], 0)[first]
    return tf.cast(tf.concat([place, size], 0), tf.int32)


def centred(image: tf.Tensor, size: int, share: float = 0.875) -> tf.Tensor:
    """The middle square, `share` of the shorter side, scaled to size; nothing is random.

    image: uint8 [H, W, 3]. 0.875 is 224 of 256, the usual evaluation on ImageNet.
    """
    shape = tf.shape(image)[:2]
    side = tf.cast(tf.round(tf.cast(tf.reduce_min(shape), tf.float32) * share), tf.int32)
    side = tf.maximum(side, 1)
    top, left = tf.unstack((shape - side) // 2)
    middle = normalize(image[top : top + side, left : left + side])
    crop = tf.image.resize(middle, [size, size], "bilinear", antialias=True)
    return tf.ensure_shape(crop, [size, size, 3])


def _maybe_mirror(image: tf.Tensor, coin: tf.Tensor | None) -> tf.Tensor:
    return image if coin is None else tf.where(coin < 0.5, image[:, ::-1], image)
