"""Random crops of pictures to be classified, and their evaluation form.

Every draw comes from a key (int32 [2]); equal keys make equal crops anywhere. What comes out is
float32 [size, size, 3] in [-1, 1], as `augment.normalize` says.
"""

from __future__ import annotations

import tensorflow as tf

from data.augment import normalize

_ALG = "philox"  # one generator on every device


def shifted(image: tf.Tensor, key: tf.Tensor, size: int, mirror: bool) -> tf.Tensor:
    """Moved by up to an eighth of its size, and mirrored half of the time.

    At size 32 this is the 4-pixel padding and random crop of He et al. 2015 (arXiv:1512.03385,
    section 4.2). image: uint8 [H, W, 3], resized where it is of another size.
    """
    top_left, mirrored = _draws(key)
    pad = size // 8
    offset = tf.cast(tf.floor(top_left[:2] * (2 * pad + 1)), tf.int32)
    # Padded with the darkest shade, as black borders are what most small sets have.
    image = tf.pad(centred(image, size, share=1.0), [[pad] * 2, [pad] * 2, [0, 0]], "CONSTANT", -1)
    crop = tf.slice(image, tf.concat([offset, [0]], 0), [size, size, 3])
    return _maybe_mirror(crop, mirrored if mirror else None)


def random_resized(
    image: tf.Tensor, key: tf.Tensor, size: int, mirror: bool, smallest: float = 0.08
) -> tf.Tensor:
    """A part of random area and aspect ratio (3/4 to 4/3), scaled to size; mirrored half the time.

    Szegedy et al. 2015 (arXiv:1409.4842, section 6), as it is usual for ImageNet. A part that
    would reach over the edge is cut at it.

    Args:
      image: uint8 [H, W, 3].
      smallest: least share of the image's area.
    """
    draws, mirrored = _draws(key)
    height, width = (tf.cast(n, tf.float32) for n in tf.unstack(tf.shape(image)[:2]))
    area = height * width * (smallest + (1.0 - smallest) * draws[2])
    ratio = (3.0 / 4.0) * (16.0 / 9.0) ** draws[3]
    h = tf.clip_by_value(tf.round(tf.sqrt(area / ratio)), 1.0, height)
    w = tf.clip_by_value(tf.round(tf.sqrt(area * ratio)), 1.0, width)
    top, left = tf.floor(draws[0] * (height - h + 1)), tf.floor(draws[1] * (width - w + 1))
    # Rounding may give draw * n == n for draws just below one.
    top, left = tf.minimum(top, height - h), tf.minimum(left, width - w)
    top, left, h, w = (tf.cast(n, tf.int32) for n in (top, left, h, w))
    crop = normalize(image[top : top + h, left : left + w])
    crop = tf.image.resize(crop, [size, size], "bilinear", antialias=True)
    return _maybe_mirror(tf.ensure_shape(crop, [size, size, 3]), mirrored if mirror else None)


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


def _draws(key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Four numbers in [0, 1) and a coin."""
    draws = tf.random.stateless_uniform([5], key, alg=_ALG)
    return draws[:4], draws[4] < 0.5


def _maybe_mirror(image: tf.Tensor, mirrored: tf.Tensor | None) -> tf.Tensor:
    return image if mirrored is None else tf.where(mirrored, image[:, ::-1], image)
