"""Crops, scales and mirrors pictures fast.

A sample is what a source read: "image", uint8 [H, W, 3], and "file" (the bytes it is decoded from)
where there is one. TensorFlow does not compute unused outputs: if only a crop is used, the image
is not decoded.
"""

import tensorflow as tf

from hvdkit.data.readers import pictures
from hvdkit.data.readers.exif import seldom
from hvdkit.data.sampler import WORDS, philox


def uniform(key: tf.Tensor, count: int) -> tf.Tensor:
    """Random numbers in [0, 1) that belong to a key (int32 [2]): float32 [count].

    tf.random.stateless_uniform takes twenty ops to scramble its seed; a key is random already.
    """
    return philox(tf.raw_ops.StatelessRandomUniformV2, key, [0, 0], shape=[count])


def keys(key: tf.Tensor, count: int) -> tf.Tensor:
    """More keys of a key, for draws that `uniform` does not make: int32 [count, 2]."""
    # `uniform` counts from [0, 0], so these numbers are others.
    return philox(WORDS, key, [0, 1], shape=[count, 2], dtype=tf.int32)


def size(sample: dict[str, tf.Tensor]) -> tf.Tensor:
    """Height and width of a sample's image, int32 [2]."""
    return (
        pictures.size(sample["file"])
        if "file" in sample
        else tf.shape(sample["image"])[:2]
    )


def cut(sample: dict[str, tf.Tensor], box: tf.Tensor) -> tf.Tensor:
    """A part of a sample's image, uint8 [h, w, 3]; box: int32 [4], top, left, height, width."""
    if "file" in sample:
        return pictures.decode_part(sample["file"], box)
    return pictures.slice_part(sample["image"], box)


def resize_float(image: tf.Tensor, shape: list[int] | tf.Tensor) -> tf.Tensor:
    """An image uint8 [H, W, 3] scaled bilinearly to `shape`: float32 in [0, 255].

    Bilinear interpolation reads two pixels a side. Where more than four pixels become one, it is
    antialiased, so that fine patterns do not become stripes. Pillow and torchvision always
    antialias, TensorFlow's model garden never does; it costs several times as much.
    """
    shape = tf.convert_to_tensor(shape)
    return tf.cond(
        tf.reduce_prod(tf.shape(image)[:2]) > 4 * tf.reduce_prod(shape),
        lambda: _resize_smoothly(image, shape),
        # Resizing uint8 takes longer than resizing float32.
        lambda: tf.image.resize(tf.cast(image, tf.float32), shape),
    )


@seldom(
    input_signature=[
        tf.TensorSpec([None, None, 3], tf.uint8),
        tf.TensorSpec([2], tf.int32),
    ]
)
def _resize_smoothly(image: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    return tf.image.resize(tf.cast(image, tf.float32), shape, antialias=True)


def resize(image: tf.Tensor, shape: list[int]) -> tf.Tensor:
    """What `resize_float` returns, rounded: uint8 [*shape, 3]."""
    # To truncate after adding a half is faster than tf.round, and the same but for exact halves.
    rounded = tf.cast(resize_float(image, shape) + 0.5, tf.uint8)
    return tf.ensure_shape(rounded, [*shape, 3])


def nearest(label: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """A label [H, W, 1] scaled to `shape`: each output pixel takes the input at its centre."""
    height, width = tf.unstack(tf.shape(label)[:2])
    return pick(label, at_centres(height, shape[0]), at_centres(width, shape[1]))


def at_centres(length: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """For each of `places` output pixels, the one of `length` input pixels at its centre: int32."""
    # Their product may be larger than int32 holds.
    length = tf.cast(length, tf.int64)
    places = tf.cast(places, tf.int64)
    return tf.cast((2 * tf.range(places) + 1) * length // (2 * places), tf.int32)


def pick(label: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """The pixels of a label [H, W, 1] in these rows and columns, int32 [h] and [w]: [h, w, 1]."""
    # One gather over the flat label is ten times as fast as tf.image.resize.
    places = rows[:, None] * tf.shape(label)[1] + columns
    return tf.gather(tf.reshape(label, [-1]), places)[..., None]


def mirrored(image: tf.Tensor, turn: tf.Tensor) -> tf.Tensor:
    """A picture, uint8 [H, W, 3], mirrored left-right if `turn`, a bool scalar."""
    # tf.reverse copies pixels of three channels at once; image[:, ::-1] took thirty times as long.
    return tf.cond(turn, lambda: tf.reverse(image, [1]), lambda: image)
