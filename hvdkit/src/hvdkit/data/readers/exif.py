"""Reads and applies the EXIF orientation of pictures with TensorFlow ops.

Cameras store what the sensor saw and note how to turn it (Exif 2.32, tag 0x0112); viewers turn it,
TensorFlow's decoders do not. Read are the first Exif segment at the start of a JPEG, and the eXIf
chunk before the pixels of a PNG, if they begin in the first 16 KiB. Anything invalid counts as no
orientation.
"""

from __future__ import annotations

import functools

import tensorflow as tf

_TAG, _SHORT = 0x0112, 3
# Most pictures hold none of these names. Searching for them takes a small part of the decoding
# time; walking the segments would double that.
_BEGINNING = 2**14
_NAMES = r"\C*(?:Exif\x00\x00|eXIf)\C*"
# By orientation, 0 to 8: how stored rows and columns become the displayed ones.
_TRANSPOSED = (False, False, False, False, False, True, True, True, True)
_UPSIDE_DOWN = (False, False, False, True, True, False, False, True, True)
_MIRRORED = (False, False, True, True, False, False, True, True, False)


# A function for what few pictures need, traced once a process. Inlined in each reader's graph, its
# ops would cost time for every picture, even in a branch that is not taken.
seldom = functools.partial(
    tf.function, autograph=False, experimental_attributes={"_noinline": True}
)


def upright(image: tf.Tensor, data: tf.Tensor) -> tf.Tensor:
    """The image [H, W, C] as viewers show it, from how `data` (string scalar, a file) stores it."""
    found = orientation(data)
    turned = tf.cond(found > 1, lambda: _turned(image, found), lambda: image)
    return tf.ensure_shape(turned, [None, None, image.shape[-1]])  # a turn hides it


def orientation(data: tf.Tensor) -> tf.Tensor:
    """1 (as stored) to 8 of a file's bytes, int32 scalar."""
    return tf.cond(is_bare_jpeg(data), lambda: tf.constant(1), lambda: _searched(data))


def is_bare_jpeg(data: tf.Tensor) -> tf.Tensor:
    """Whether this is a JPEG whose first table follows its JFIF segment, which leaves no place for
    an orientation: nearly all pictures of published data sets.

    A shortcut: it takes a tenth of the time of the search for names.
    """
    jfif = tf.strings.substr(data, 0, 6) == b"\xff\xd8\xff\xe0\x00\x10"
    return jfif & (tf.strings.substr(data, 20, 2) == b"\xff\xdb")


def swaps(orientation: tf.Tensor | int) -> tf.Tensor:
    """Whether the orientation swaps height and width, bool scalar."""
    return tf.gather(_TRANSPOSED, orientation)


@seldom(input_signature=[tf.TensorSpec([], tf.string)])
def _searched(data: tf.Tensor) -> tf.Tensor:
    """The orientation, int32 scalar."""
    named = tf.strings.regex_full_match(tf.strings.substr(data, 0, _BEGINNING), _NAMES)
    return tf.cond(named, lambda: _found(data), lambda: tf.constant(1))


@seldom(input_signature=[tf.TensorSpec([], tf.string)])
def _found(data: tf.Tensor) -> tf.Tensor:
    """The orientation, int32 scalar."""
    png = tf.strings.substr(data, 0, 4) == b"\x89PNG"
    block = tf.cond(png, lambda: _of_png(data), lambda: _of_jpeg(data))
    return tf.cond(tf.strings.length(block) > 0, lambda: _read(block), lambda: tf.constant(1))


@seldom(input_signature=[tf.TensorSpec([None, None, None], tf.uint8), tf.TensorSpec([], tf.int32)])
def _turned(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    height, width, channels = tf.unstack(tf.shape(image))
    swapped = tf.gather(_TRANSPOSED, orientation)
    rows = tf.range(tf.where(swapped, width, height))[:, None]  # of the displayed picture
    columns = tf.range(tf.where(swapped, height, width))[None]
    rows = tf.where(tf.gather(_UPSIDE_DOWN, orientation), rows[::-1], rows)
    columns = tf.where(tf.gather(_MIRRORED, orientation), columns[:, ::-1], columns)
    # Not tf.transpose: oneDNN prints an error about it on CPUs without AVX-512.
    stored = tf.where(swapped, columns * width + rows, rows * width + columns)
    return tf.gather(tf.reshape(image, [-1, channels]), stored)


def _of_jpeg(data: tf.Tensor) -> tf.Tensor:
    """The TIFF block of the first Exif segment, or "".

    A segment is 0xFF, its kind, its length without these two (2 bytes), and its content. Those of
    applications (0xE0 to 0xEF) and comments (0xFE) come before the tables and the pixels.
    """

    def begins_exif(place: tf.Tensor, head: tf.Tensor) -> tf.Tensor:
        return (head[1] == 0xE1) & (_cut(data, place + 4, 6) == b"Exif\0\0")

    def goes_on(place: tf.Tensor, head: tf.Tensor) -> tf.Tensor:
        passed = ((head[1] >= 0xE0) & (head[1] <= 0xEF)) | (head[1] == 0xFE)
        return (head[0] == 0xFF) & passed & ~begins_exif(place, head)

    def step(place: tf.Tensor, head: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        place += 2 + _number(head[2:])
        return place, _bytes(data, place, 4)

    first = tf.constant(2, tf.int64)
    place, head = tf.while_loop(goes_on, step, [first, _bytes(data, first, 4)])
    size = tf.where(begins_exif(place, head), _number(head[2:]) - 8, 0)
    return _cut(data, place + 10, size)


def _of_png(data: tf.Tensor) -> tf.Tensor:
    """The content of the eXIf chunk, or "".

    A chunk is its content's length (4 bytes), its name (4 bytes), the content and a CRC (4 bytes).
    """

    def goes_on(place: tf.Tensor, name: tf.Tensor) -> tf.Tensor:
        return tf.reduce_all(name != [b"eXIf", b"IDAT", b""])

    def step(place: tf.Tensor, name: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        place += 12 + _number(_bytes(data, place, 4))
        return place, _cut(data, place + 4, 4)

    first = tf.constant(8, tf.int64)
    place, name = tf.while_loop(goes_on, step, [first, _cut(data, first + 4, 4)])
    size = tf.where(name == b"eXIf", _number(_bytes(data, place, 4)), 0)
    return _cut(data, place + 8, size)


def _read(tiff: tf.Tensor) -> tf.Tensor:
    """The orientation in the first directory of a TIFF block, int32 scalar; 1 where it has none.

    The block begins with the order of its bytes (II or MM), 42, and where the directory is; that
    has a count and entries of 12 bytes: tag, type, count of values, value.
    """
    little = tf.strings.substr(tiff, 0, 1) == b"I"
    directory = _number(_bytes(tiff, 4, 4), little)
    room = (tf.cast(tf.strings.length(tiff), tf.int64) - directory - 2) // 12
    count = tf.clip_by_value(_number(_bytes(tiff, directory, 2), little), 0, tf.maximum(room, 0))
    # One more than there are: TensorFlow cannot decode zero bytes.
    entries = tf.reshape(_bytes(tiff, directory + 2, 12 * count + 12), [-1, 12])[:count]
    tag, kind, value = (_number(entries[:, at : at + 2], little) for at in (0, 2, 8))
    values = tf.where((tag == _TAG) & (kind == _SHORT) & (value <= 8), value, 0)
    return tf.cast(tf.maximum(tf.reduce_max(values), 1), tf.int32)


def _number(digits: tf.Tensor, little: tf.Tensor | bool = False) -> tf.Tensor:
    """The integer, int64 [...], of 2 or 4 bytes [..., n], big-endian or little-endian."""
    weights = [256**n for n in range(digits.shape[-1])]
    weights = tf.where(little, tf.constant(weights, tf.int64), tf.constant(weights[::-1], tf.int64))
    return tf.reduce_sum(digits * weights, axis=-1)


def _bytes(data: tf.Tensor, place: tf.Tensor | int, count: tf.Tensor | int) -> tf.Tensor:
    """int64 [count] from 0 to 255; zeros after the end."""
    length = tf.cast(count, tf.int32)
    part = tf.io.decode_raw(_cut(data, place, count), tf.uint8, fixed_length=length)
    known = count if isinstance(count, int) else None
    return tf.cast(tf.ensure_shape(part, [known]), tf.int64)


def _cut(data: tf.Tensor, place: tf.Tensor | int, count: tf.Tensor | int) -> tf.Tensor:
    """`count` bytes from `place` on, fewer at the end of the data."""
    size = tf.cast(tf.strings.length(data), tf.int64)
    place = tf.clip_by_value(tf.cast(place, tf.int64), 0, size)
    return tf.strings.substr(data, place, tf.maximum(tf.cast(count, tf.int64), 0))
