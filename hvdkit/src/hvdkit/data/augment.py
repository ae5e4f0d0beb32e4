"""Random scale, crop, mirror and colour of pictures, and their evaluation form.

Every draw comes from a key (int32 [2], of seed and position in the run): equal keys make equal
samples on any machine, in any thread and order. A sample has an "image", uint8 [H, W, 3]; if it was
read from a file, it also has the "file", and only the crop is decoded.

For segmentation: `training_pair` and `evaluation_pair`; the "label" is uint8 [H, W, 1]. For
classification: `shifted`, `random_resized` and `centred`, uint8 [size, size, 3]; a model's first
layer scales them (hvdkit/train/preprocessing.py).
"""

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from hvdkit.data import image_ops
from hvdkit.data.labels import IGNORE
from hvdkit.data.readers import pictures

Pair = tuple[tf.Tensor, tf.Tensor]  # image, label
_TRIES = 10  # of random_resized; as in torchvision's RandomResizedCrop and fb.resnet.torch
_WIDEST = 4.0 / 3.0  # width over height of its part; its inverse at least


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What may happen to a training pair; the flags that it is made of have limits of their own."""

    size: tuple[int, int]  # pixels, height and width of what comes out
    scale: tuple[float, float] = (0.5, 2.0)  # factor on the pixels, drawn log-uniformly
    mirror: bool = True  # left-right, half of the time; not for digits, letters, signs
    brightness: float = 0.1  # shift of up to this share of the full range
    contrast: float = 0.2  # factor of 1 +- this, about the crop's mean
    saturation: float = 0.2  # factor of 1 +- this, about the pixel's grey
    fill: int = 128  # grey outside the image, 0..255
    ignore_label: int = IGNORE  # label outside the image


class Cut(NamedTuple):
    """Where a window's inside lies on the image, and where in what comes out."""

    box: tf.Tensor  # int32 [4], top, left, height, width on the image
    size: tf.Tensor  # int32 [2], height and width in what comes out
    beside: tf.Tensor  # int32 [3, 2], padding on each side
    mirrored: tf.Tensor  # bool scalar: flip it left-right


def training_pair(sample: dict[str, tf.Tensor], key: tf.Tensor, how: Augmentation) -> Pair:
    """Augments a sample's image and label: uint8 [*how.size, 3] and uint8 [*how.size, 1]."""
    of_window, of_colour = tf.split(image_ops.uniform(key, 7), [4, 3])
    where = _drawn(tf.shape(sample["label"])[:2], of_window, how)
    image = image_ops.resize_float(image_ops.cut(sample, where.box), where.size)
    image = image_ops.mirrored(jitter(image, of_colour, how), where.mirrored)
    image = tf.pad(image, where.beside, constant_values=how.fill)
    # Image and label both put pixel centres at one half, so they stay aligned. Classes cannot be
    # averaged: each pixel takes the nearest one's class, however small the label gets.
    top, left, height, width = tf.unstack(where.box)
    rows = top + image_ops.at_centres(height, where.size[0])
    columns = left + image_ops.at_centres(width, where.size[1])
    columns = tf.where(where.mirrored, columns[::-1], columns)
    label = image_ops.pick(sample["label"], rows, columns)
    label = tf.pad(label, where.beside, constant_values=how.ignore_label)
    return tf.ensure_shape(image, [*how.size, 3]), tf.ensure_shape(label, [*how.size, 1])


def evaluation_pair(sample: dict[str, tf.Tensor], how: Augmentation) -> Pair:
    """The centre of a pair, cropped or padded to `how.size`, with no draws."""
    shape, size = tf.shape(sample["label"])[:2], tf.constant(how.size)
    where = _cut((shape - size) // 2, size, tf.constant(False), shape=shape, how=how)
    image = tf.pad(image_ops.cut(sample, where.box), where.beside, constant_values=how.fill)
    label = pictures.slice_part(sample["label"], where.box)
    label = tf.pad(label, where.beside, constant_values=how.ignore_label)
    return tf.ensure_shape(image, [*how.size, 3]), tf.ensure_shape(label, [*how.size, 1])


def _drawn(shape: tf.Tensor, draws: tf.Tensor, how: Augmentation) -> Cut:
    """The part of an image (shape int32 [2]) that fills the output at a random scale.

    Cut before it is scaled, at a cost that does not depend on the image's size.
    """
    low, high = how.scale
    scale = low * (high / low) ** draws[0]
    whole = tf.maximum(tf.cast(tf.round(tf.constant(how.size, tf.float32) / scale), tf.int32), 1)
    # The corner is from 0 to slack, or from slack to 0 where the image is smaller than the window.
    slack = shape - whole
    steps = tf.cast(tf.abs(slack) + 1, tf.float32)
    # Rounding may give draw * steps == steps for draws just below one.
    corner = tf.minimum(tf.cast(draws[1:3] * steps, tf.int32), tf.abs(slack)) * tf.sign(slack)
    mirrored = draws[3] < 0.5 if how.mirror else tf.constant(False)
    return _cut(corner, whole, mirrored, shape=shape, how=how)


def _cut(
    corner: tf.Tensor, whole: tf.Tensor, mirrored: tf.Tensor, *, shape: tf.Tensor, how: Augmentation
) -> Cut:
    """The part of a window (corner and size: int32 [2]) that lies on an image of this shape.

    The window may reach over the image's edges, and has at least one pixel on it.
    """
    first, end = tf.maximum(corner, 0), tf.minimum(corner + whole, shape)
    # Edge to edge, so that a window inside the image fills the output.
    edges = tf.stack([first - corner, end - corner]) * how.size  # over `whole`, as (2e + w) // 2w
    before, after = tf.unstack((2 * edges + whole) // (2 * whole))
    size = tf.maximum(after - before, 1)
    before = tf.minimum(before, how.size - size)
    after = how.size - size - before
    beside = tf.concat([tf.stack([before, after], 1), [[0, 0]]], 0)
    turned = tf.gather(beside, [1, 0], axis=1)
    beside = tf.where(mirrored & [[False], [True], [False]], turned, beside)
    return Cut(tf.concat([first, end - first], 0), size, beside, mirrored)


def jitter(image: tf.Tensor, draws: tf.Tensor, how: Augmentation) -> tf.Tensor:
    """Random brightness, contrast and saturation of a float32 [H, W, 3] in [0, 255], as uint8.

    Each channel of a pixel x becomes mean + contrast * (grey + saturation * (x - grey) - mean) +
    shift; grey is the pixel's mean, `mean` the image's.
    """
    if not (how.brightness or how.contrast or how.saturation):
        return tf.cast(image + 0.5, tf.uint8)
    brighter, more, deeper = tf.unstack(2.0 * draws - 1.0)
    shift = 255.0 * how.brightness * brighter
    contrast, saturation = 1.0 + how.contrast * more, 1.0 + how.saturation * deeper
    offset = (1.0 - contrast) * tf.reduce_mean(image) + shift
    # Mixes the channels of each pixel by a 1x1 convolution: three times as fast as channel by
    # channel.
    mix = contrast * (saturation * tf.eye(3) + (1.0 - saturation) / 3.0)
    mixed = tf.nn.conv2d(image[None], mix[None, None], 1, "VALID")[0]
    return tf.cast(tf.clip_by_value(mixed + (offset + 0.5), 0.0, 255.5), tf.uint8)  # rounded


def coloured(image: tf.Tensor, key: tf.Tensor, limits: tuple[float, float, float]) -> tf.Tensor:
    """`jitter` of a uint8 picture [H, W, 3], with other draws than a crop's with the same key."""
    if not any(limits):
        return image
    how = Augmentation((1, 1), brightness=limits[0], contrast=limits[1], saturation=limits[2])
    draws = image_ops.uniform(tf.bitwise.invert(key), 3)
    return jitter(tf.cast(image, tf.float32), draws, how)


def shifted(sample: dict[str, tf.Tensor], key: tf.Tensor, *, size: int, mirror: bool) -> tf.Tensor:
    """Resized, shifted by up to an eighth of its size, and mirrored half of the time.

    At size 32: 4 pixels of padding and a random crop (He et al. 2015, arXiv:1512.03385, 4.2).
    """
    draws = image_ops.uniform(key, 3)
    pad = size // 8
    offset = tf.cast(tf.floor(draws[:2] * (2 * pad + 1)), tf.int32)
    # Padded with black, the border that most small data sets have.
    image = tf.pad(centred(sample, size, share=1.0), [[pad] * 2, [pad] * 2, [0, 0]])
    crop = tf.slice(image, tf.concat([offset, [0]], 0), [size, size, 3])
    return image_ops.mirrored(crop, draws[2] < 0.5) if mirror else crop


def random_resized(
    sample: dict[str, tf.Tensor], key: tf.Tensor, *, size: int, mirror: bool, smallest: float = 0.08
) -> tf.Tensor:
    """A part of random area and aspect ratio (3/4 to 4/3), scaled to size; mirrored half the time.

    Szegedy et al. 2015 (arXiv:1409.4842, section 6), as is usual for ImageNet. `smallest`: least
    share of the image's area.
    """
    draws = image_ops.uniform(key, _TRIES * 4 + 1)
    tries = tf.reshape(draws[:-1], [_TRIES, 4])
    box = random_part(image_ops.size(sample), tries, smallest)
    crop = image_ops.resize(image_ops.cut(sample, box), [size, size])
    return image_ops.mirrored(crop, draws[-1] < 0.5) if mirror else crop


def random_part(shape: tf.Tensor, draws: tf.Tensor, smallest: float) -> tf.Tensor:
    """The first of ten random parts that fits into an image, or else its middle.

    The area is uniform from `smallest` to 1 of the image's, the logarithm of the ratio is uniform.
    The middle is the whole image, cut to 3/4 or 4/3 if it is narrower or wider. So torchvision's
    RandomResizedCrop; fb.resnet.torch, whose augmentation Goyal et al. 2017 use, draws the ratio
    uniformly and falls back to the middle square.

    `shape`: int32 [2], height and width. `draws`: float32 [10, 4] in [0, 1): places (row, column),
    area and ratio of each try.

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


def centred(sample: dict[str, tf.Tensor], size: int, share: float = 0.875) -> tf.Tensor:
    """The middle square, `share` of the shorter side, scaled to size: on ImageNet 224 of 256."""
    shape = image_ops.size(sample)
    side = tf.cast(tf.round(tf.cast(tf.reduce_min(shape), tf.float32) * share), tf.int32)
    side = tf.maximum(side, 1)
    box = tf.concat([(shape - side) // 2, [side, side]], 0)
    return image_ops.resize(image_ops.cut(sample, box), [size, size])
