"""Random scale, crop, mirror and colour of pictures, and their evaluation form.

Every draw comes from a key (int32 [2], of seed and position in the run): equal keys make equal
samples on any machine, in any thread and order. A sample has an "image", uint8 [H, W, 3]; if it was
read from a file, it also has the "file", and only the crop is decoded.

For segmentation: `training_pair` and `evaluation_pair`; the "label" is uint8 [H, W, 1]. For
classification: `shifted`, `random_resized` and `centred`, uint8 [size, size, 3]; a model's first
layer scales them (hvdkit/train/layers/preprocessing.py).
"""

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from hvdkit.data.augment import image_ops
from hvdkit.data.labels import IGNORE
from hvdkit.data.readers import pictures

Pair = tuple[tf.Tensor, tf.Tensor]  # image, label
Limits = tuple[float, float, float]  # of brightness, contrast and saturation
_TRIES = 10  # parts that random_resized tries, as torchvision and fb.resnet.torch do
_WIDEST = 4.0 / 3.0  # most width over height of such a part; the least is its inverse


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What may happen to a training pair; the limits of its values are those of the flags."""

    size: tuple[int, int]  # pixels, height and width of the output
    scale: tuple[float, float] = (0.5, 2.0)  # factor on the pixels, drawn log-uniformly
    mirror: bool = True  # left-right, half of the time; not for digits, letters, signs
    brightness: float = 0.1  # shift of up to this share of the full range
    contrast: float = 0.2  # factor of 1 +- this, about the crop's mean
    saturation: float = 0.2  # factor of 1 +- this, about the pixel's grey
    fill: int = 128  # grey outside the image, 0..255
    ignore_label: int = IGNORE  # label outside the image


class Window(NamedTuple):
    """Where the part of a window that is on the image lies, there and in the output."""

    box: tf.Tensor  # int32 [4], top, left, height, width on the image
    size: tf.Tensor  # int32 [2], height and width in the output
    padding: tf.Tensor  # int32 [3, 2], pixels around it in the output
    mirrored: tf.Tensor  # bool scalar: flip it left-right


def training_pair(
    sample: dict[str, tf.Tensor], key: tf.Tensor, options: Augmentation
) -> Pair:
    """Augments a sample; returns image, uint8 [*size, 3], and label, uint8 [*size, 1]."""
    _require_one_size(sample)
    window_draws, colour_draws = tf.split(image_ops.uniform(key, 7), [4, 3])
    window = _drawn_window(tf.shape(sample["label"])[:2], window_draws, options)

    image = image_ops.resize_float(image_ops.cut(sample, window.box), window.size)
    limits = (options.brightness, options.contrast, options.saturation)
    image = image_ops.mirrored(jitter(image, colour_draws, limits), window.mirrored)

    # Image and label both put pixel centres at one half, so they stay aligned. Classes cannot be
    # averaged: each pixel takes the nearest one's class, however small the label gets.
    top, left, height, width = tf.unstack(window.box)
    rows = top + image_ops.at_centres(height, window.size[0])
    columns = left + image_ops.at_centres(width, window.size[1])
    columns = tf.where(window.mirrored, columns[::-1], columns)
    label = image_ops.pick(sample["label"], rows, columns)
    return _padded(image, label, window, options)


def evaluation_pair(sample: dict[str, tf.Tensor], options: Augmentation) -> Pair:
    """The centre of a pair, cropped or padded to `options.size`, with no draws."""
    _require_one_size(sample)
    shape = tf.shape(sample["label"])[:2]
    size = tf.constant(options.size)
    corner = (shape - size) // 2
    window = _window(
        corner, size, tf.constant(False), shape=shape, out_size=options.size
    )
    image = image_ops.cut(sample, window.box)
    label = pictures.slice_part(sample["label"], window.box)
    return _padded(image, label, window, options)


def _require_one_size(sample: dict[str, tf.Tensor]) -> None:
    size = image_ops.size(sample)
    label_size = tf.shape(sample["label"])[:2]
    pictures.require(
        tf.reduce_all(size == label_size),
        "the label must be as large as its picture, height, width",
        size,
        "and not",
        label_size,
    )


def _padded(
    image: tf.Tensor, label: tf.Tensor, window: Window, options: Augmentation
) -> Pair:
    """The parts of image and label in the window, with what lies outside the image."""
    image = tf.pad(image, window.padding, constant_values=options.fill)
    label = tf.pad(label, window.padding, constant_values=options.ignore_label)
    return tf.ensure_shape(image, [*options.size, 3]), tf.ensure_shape(
        label, [*options.size, 1]
    )


def _drawn_window(shape: tf.Tensor, draws: tf.Tensor, options: Augmentation) -> Window:
    """A window on an image (shape int32 [2]) that fills the output at a random scale.

    It is cut before it is scaled, at a cost that does not depend on the image's size.
    """
    low, high = options.scale
    scale = low * (high / low) ** draws[0]
    size = tf.maximum(
        tf.cast(tf.round(tf.constant(options.size, tf.float32) / scale), tf.int32), 1
    )

    # The corner is from 0 to slack, or from slack to 0 where the image is smaller than the window.
    slack = shape - size
    most = tf.abs(slack)
    # Rounding may give draw * n == n for draws just below one.
    steps = tf.minimum(
        tf.cast(draws[1:3] * tf.cast(most + 1, tf.float32), tf.int32), most
    )
    mirrored = draws[3] < 0.5 if options.mirror else tf.constant(False)
    return _window(
        steps * tf.sign(slack), size, mirrored, shape=shape, out_size=options.size
    )


def _window(
    corner: tf.Tensor,
    size: tf.Tensor,
    mirrored: tf.Tensor,
    *,
    shape: tf.Tensor,
    out_size: tuple[int, int],
) -> Window:
    """The window with this corner and size (int32 [2]) on an image of this shape.

    It may reach over the image's edges, and has at least one pixel on the image.
    """
    first = tf.maximum(corner, 0)
    end = tf.minimum(corner + size, shape)

    # Edges are scaled, so that a window inside the image fills the output, and rounded.
    edges = tf.stack([first - corner, end - corner]) * out_size
    before, after = tf.unstack((2 * edges + size) // (2 * size))
    inside_size = tf.maximum(after - before, 1)
    before = tf.minimum(before, out_size - inside_size)
    after = out_size - inside_size - before

    padding = tf.concat([tf.stack([before, after], 1), [[0, 0]]], 0)
    left_for_right = tf.gather(padding, [1, 0], axis=1)
    padding = tf.where(mirrored & [[False], [True], [False]], left_for_right, padding)
    return Window(tf.concat([first, end - first], 0), inside_size, padding, mirrored)


def jitter(image: tf.Tensor, draws: tf.Tensor, limits: Limits) -> tf.Tensor:
    """Random brightness, contrast and saturation of a float32 [H, W, 3] in [0, 255], as uint8.

    Each channel of a pixel x becomes mean + contrast * (grey + saturation * (x - grey) - mean) +
    shift; grey is the pixel's mean, `mean` the image's. `limits` are as in an Augmentation.
    """
    if not any(limits):
        return tf.cast(image + 0.5, tf.uint8)
    brightness_draw, contrast_draw, saturation_draw = tf.unstack(2.0 * draws - 1.0)
    most_brightness, most_contrast, most_saturation = limits
    shift = 255.0 * most_brightness * brightness_draw
    contrast = 1.0 + most_contrast * contrast_draw
    saturation = 1.0 + most_saturation * saturation_draw
    offset = (1.0 - contrast) * tf.reduce_mean(image) + shift
    # A 1x1 convolution mixes the channels of each pixel, three times as fast as channel by channel.
    mix = contrast * (saturation * tf.eye(3) + (1.0 - saturation) / 3.0)
    mixed = tf.nn.conv2d(image[None], mix[None, None], 1, "VALID")[0]
    # The half makes the conversion to whole numbers round.
    return tf.cast(tf.clip_by_value(mixed + (offset + 0.5), 0.0, 255.5), tf.uint8)


def coloured(image: tf.Tensor, key: tf.Tensor, limits: Limits) -> tf.Tensor:
    """`jitter` of a uint8 picture [H, W, 3], with other draws than a crop's with the same key."""
    if not any(limits):
        return image
    draws = image_ops.uniform(tf.bitwise.invert(key), 3)
    return jitter(tf.cast(image, tf.float32), draws, limits)


def shifted(
    sample: dict[str, tf.Tensor],
    key: tf.Tensor,
    *,
    size: int,
    mirror: bool,
    most: int = -1,
) -> tf.Tensor:
    """The middle square, resized, shifted by `most` pixels at most, mirrored half of the time.

    By default an eighth of its size. At size 32: 4 pixels of padding and a random crop (He et al.
    2015, arXiv:1512.03385, 4.2).
    """
    draws = image_ops.uniform(key, 3)
    pad = size // 8 if most < 0 else most
    offset = tf.cast(tf.floor(draws[:2] * (2 * pad + 1)), tf.int32)
    # The padding is black, the border that most small data sets have.
    image = tf.pad(centred(sample, size, share=1.0), [[pad, pad], [pad, pad], [0, 0]])
    crop = tf.slice(image, tf.concat([offset, [0]], 0), [size, size, 3])
    return image_ops.mirrored(crop, draws[2] < 0.5) if mirror else crop


def random_resized(
    sample: dict[str, tf.Tensor],
    key: tf.Tensor,
    *,
    size: int,
    mirror: bool,
    smallest: float = 0.08,
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
    log_ratio_half = tf.math.log(_WIDEST) * ratio - 0.5 * tf.math.log(_WIDEST)
    signs = tf.constant([-1.0, 1.0])
    sides = tf.sqrt(smallest + (1.0 - smallest) * area) * tf.exp(log_ratio_half * signs)
    drawn = tf.round(sides * tf.sqrt(tf.reduce_prod(image)))

    # The middle is one more try: height at most width / (3/4), width at most height * 4/3.
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
    side = tf.cast(
        tf.round(tf.cast(tf.reduce_min(shape), tf.float32) * share), tf.int32
    )
    side = tf.maximum(side, 1)
    box = tf.concat([(shape - side) // 2, [side, side]], 0)
    return image_ops.resize(image_ops.cut(sample, box), [size, size])
