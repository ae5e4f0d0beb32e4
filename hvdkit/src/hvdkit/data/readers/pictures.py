"""Decodes picture files and label PNGs in a graph, and explains those that fail.

Pictures are turned by their EXIF orientation (exif.py): viewers turn them, TensorFlow's
decoders do not.
"""

import io
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf
from PIL import Image

from hvdkit import whole_files
from hvdkit.data.pipeline import reason_of
from hvdkit.data.readers.exif import PNG_START, is_webp, orientation, seldom

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
# Endings of pictures that are not read; they are reported, not skipped silently.
OTHER_SUFFIXES = (".gif", ".bmp", ".tif", ".tiff", ".jfif", ".jpe", ".jp2", ".jxl")
OTHER_SUFFIXES += (".avif", ".heic", ".heif", ".ppm", ".pgm", ".tga")
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_SCANS = 100  # of a JPEG: each is decoded over the whole picture
MOST_BYTES = 2**30  # of a file
_GREY, _PALETTE = 0, 3  # PNG colour types (PNG specification, 11.2.2)
_MOVES = 2  # in a WebP's byte 20, after VP8X: it is an animation
_DEEP = r"\CPNG\r\n\x1a\n\C{16}\x10"  # a header whose bit depth, byte 24, is 16
_ADOBE = r"\C*\x00\x0eAdobe\x00\C*"  # segment APP14, after its marker
most_pixels = 64_000_000

# By orientation, 0 to 8: how stored rows and columns become the displayed ones.
_TRANSPOSED = (False, False, False, False, False, True, True, True, True)
_UPSIDE_DOWN = (False, False, False, True, True, False, False, True, True)
_MIRRORED = (False, False, True, True, False, False, True, True, False)


def swaps(orientation: tf.Tensor | int) -> tf.Tensor:
    """Whether the orientation swaps height and width, bool scalar."""
    return tf.gather(_TRANSPOSED, orientation)


def _upright(image: tf.Tensor, data: tf.Tensor) -> tf.Tensor:
    """The image [H, W, C] as viewers show it, from how `data` (string scalar, a file) stores it."""
    found = orientation(data)
    turned = tf.cond(found > 1, lambda: _turned(image, found), lambda: image)
    return tf.ensure_shape(turned, [None, None, image.shape[-1]])  # a turn hides it


@seldom(input_signature=[tf.TensorSpec([None, None, None], tf.uint8), tf.TensorSpec([], tf.int32)])
def _turned(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    height, width, channels = tf.unstack(tf.shape(image))
    swapped = swaps(orientation)
    rows = tf.range(tf.where(swapped, width, height))[:, None]  # of the displayed picture
    columns = tf.range(tf.where(swapped, height, width))[None]
    rows = tf.where(tf.gather(_UPSIDE_DOWN, orientation), rows[::-1], rows)
    columns = tf.where(tf.gather(_MIRRORED, orientation), columns[:, ::-1], columns)
    # Not tf.transpose: oneDNN prints an error about it on CPUs without AVX-512.
    stored = tf.where(swapped, columns * width + rows, rows * width + columns)
    return tf.gather(tf.reshape(image, [-1, channels]), stored)


def limit(pixels: int) -> None:
    """Sets --max_pixels for all graphs that are made from now on, and for Pillow."""
    global most_pixels
    most_pixels = Image.MAX_IMAGE_PIXELS = pixels


def _stored_size(data: tf.Tensor) -> tf.Tensor:
    """Height and width by the header of a PNG, JPEG or WebP, int32 [2]; zeros for other files."""

    def of_png() -> tf.Tensor:  # big-endian after signature, length and name of the first chunk
        numbers = tf.strings.substr(data, 16, 8)
        return tf.io.decode_raw(numbers, tf.int32, little_endian=False, fixed_length=8)[::-1]

    is_png = tf.strings.substr(data, 0, 16) == PNG_START
    kinds = [(tf.io.is_jpeg(data), lambda: tf.io.extract_jpeg_shape(data)[:2]), (is_png, of_png)]
    kinds.append((is_webp(data), lambda: _size_of_webp(data)))
    return tf.case(kinds, default=lambda: tf.zeros([2], tf.int32))


@seldom(input_signature=[tf.TensorSpec([], tf.string)])
def _size_of_webp(data: tf.Tensor) -> tf.Tensor:
    """Height and width, int32 [2], from the first chunk: VP8, VP8L or VP8X (RFC 9649).

    Zeros for an animation: TensorFlow 2.21 would write all its frames into the memory of one.
    """
    head = tf.io.decode_raw(tf.strings.substr(data, 0, 30), tf.uint8, fixed_length=30)
    byte, kind = tf.cast(head, tf.int32), tf.strings.substr(data, 15, 1)
    lossy = tf.stack([byte[28] + 2**8 * byte[29], byte[26] + 2**8 * byte[27]]) % 2**14
    both = byte[21] + 2**8 * byte[22] + 2**16 * byte[23] + 2**24 * (byte[24] % 16)
    lossless = 1 + tf.stack([both // 2**14, both % 2**14])
    width, height = (byte[n] + 2**8 * byte[n + 1] + 2**16 * byte[n + 2] for n in (24, 27))
    extended = (1 + tf.stack([height, width])) * tf.cast(byte[20] & _MOVES == 0, tf.int32)
    return tf.where(kind == b" ", lossy, tf.where(kind == b"L", lossless, extended))


@seldom(input_signature=[tf.TensorSpec([], tf.string)])
def _of_adobe(data: tf.Tensor) -> tf.Tensor:
    """Whether a JPEG of four colours says how: decoders take it for inverted, or not, without."""
    return tf.strings.regex_full_match(data, _ADOBE)


def fit(data: tf.Tensor) -> tf.Tensor:
    """The data, or nothing, which fails to decode (an assertion would not come before that)."""
    size = tf.cast(_stored_size(data), tf.int64)
    fine = tf.reduce_all(size > 0) & (tf.reduce_prod(size) <= most_pixels)
    deep = tf.strings.regex_full_match(tf.strings.substr(data, 0, 25), _DEEP)
    kind = tf.cond(_has_four(data), lambda: _of_adobe(data), lambda: True)
    return tf.where(fine & ~deep & kind, data, b"")


def _has_four(data: tf.Tensor) -> tf.Tensor:
    """Whether this is a JPEG of four colours, as for printing, bool scalar."""
    shape = tf.cond(
        tf.io.is_jpeg(data), lambda: tf.io.extract_jpeg_shape(data), lambda: tf.zeros([3], tf.int32)
    )
    return shape[2] == 4


def require(condition: tf.Tensor, *facts: str | tf.Tensor) -> None:
    """Fails the sample at run time; inside `tf.data` it needs no control dependency."""
    tf.raw_ops.Assert(condition=condition, data=facts)  # tf.debugging's has other words if eager


def decode_image(data: tf.Tensor) -> tf.Tensor:
    """Colours, uint8 [H, W, 3], from the bytes of a JPEG or WebP, or a PNG of at most 8 bits.

    Turned by its EXIF orientation, as viewers show it. Decoding 16 bits would keep the high byte
    only, which loses nearly all of a 12-bit camera's picture: such a PNG fails the sample, as do
    pictures of more than --max_pixels and other kinds of files. Of several pictures the first.
    """
    image = tf.cond(
        is_webp(data),
        # Its decoder gives the number of channels that the file has, and no other.
        lambda: tf.io.decode_image(fit(data), expand_animations=False)[..., :3],
        lambda: tf.io.decode_image(fit(data), channels=3, expand_animations=False),
    )
    return _upright(tf.ensure_shape(image, [None, None, 3]), data)


def size(data: tf.Tensor) -> tf.Tensor:
    """Height and width, int32 [2], of `decode_image`'s result, from the header."""
    stored = _stored_size(data)
    return tf.where(swaps(orientation(data)), stored[::-1], stored)


def decode_part(data: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
    """A part of `decode_image`'s result, uint8 [h, w, 3]; box: int32 [4], top, left, h, w.

    Of a JPEG that need not be turned, only this part is decoded, so damage below it goes unnoticed.
    The colours (not the brightness) of its first and last column may differ by some shades: JPEG
    stores colours for every second pixel and interpolates, and here the neighbours are missing.
    Decoding them too, and cutting them off, would take longer.
    """
    part = tf.cond(
        tf.io.is_jpeg(data) & (orientation(data) == 1),
        lambda: tf.image.decode_and_crop_jpeg(fit(data), box, channels=3),
        lambda: _part_of_whole(data, box),
    )
    return tf.ensure_shape(part, [None, None, 3])


@seldom(input_signature=[tf.TensorSpec([], tf.string), tf.TensorSpec([4], tf.int32)])
def _part_of_whole(data: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
    return slice_part(decode_image(data), box)


def slice_part(image: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
    """The part of an image [H, W, C]; box: int32 [4], top, left, height, width."""
    top, left, height, width = tf.unstack(box)
    return image[top : top + height, left : left + width]


def decode_label(data: tf.Tensor) -> tf.Tensor:
    """Class ids, uint8 [H, W, 1], from the bytes of a grey or palette PNG, turned as viewers do.

    Of other kinds of PNG, a decoder makes values that only look like ids (averaged colours, the
    high byte of 16 bits), so the header is checked first.
    """
    depth, colour = tf.unstack(tf.io.decode_raw(tf.strings.substr(data, 24, 2), tf.uint8), 2)
    is_palette = colour == _PALETTE
    fine = is_palette | ((colour == _GREY) & (depth == 8))
    fine &= tf.strings.substr(data, 0, 16) == PNG_START
    require(fine, "a label must be an 8-bit grey or a palette PNG of class ids: map its values")
    data = fit(data)
    label = tf.cond(
        is_palette, lambda: _decode_palette(data, depth), lambda: tf.io.decode_png(data, channels=1)
    )
    return _upright(tf.ensure_shape(label, [None, None, 1]), data)


def _decode_palette(data: tf.Tensor, depth: tf.Tensor) -> tf.Tensor:
    """Palette indices, uint8 [H, W, 1].

    `tf.io.decode_png` returns the palette's colours; declared grey, the same file gives the
    indices. The colour type is byte 25, the header's CRC is bytes 29 to 32. A CRC is linear over
    GF(2), so this change flips the same bits of every header's CRC.
    """
    crcs = [zlib.crc32(b"IHDR" + bytes([*bytes(9), kind, 0, 0, 0])) for kind in (_GREY, _PALETTE)]
    flips = (crcs[0] ^ crcs[1]).to_bytes(4, "big")
    flips = np.frombuffer(bytes([_GREY ^ _PALETTE, 0, 0, 0]) + flips, np.uint8)
    stored = tf.io.decode_raw(tf.strings.substr(data, 25, 8), tf.uint8)
    header = tf.bitwise.bitwise_xor(stored, flips)
    every_byte = tf.constant([bytes([value]) for value in range(256)])
    header = tf.strings.reduce_join(tf.gather(every_byte, tf.cast(header, tf.int32)))
    rest = tf.strings.substr(data, 33, tf.int32.max)
    as_grey = tf.io.decode_png(tf.strings.join([tf.strings.substr(data, 0, 25), header, rest]), 1)
    # Grey of 1, 2 and 4 bits is stretched to 0..255 on decoding; indices are not brightnesses.
    largest = tf.bitwise.left_shift(1, tf.cast(depth, tf.int32)) - 1
    return as_grey // tf.cast(255 // largest, tf.uint8)


def explained(read: Callable[[tf.Tensor], object], index: int, *paths: Path) -> str | None:
    """What is wrong with a sample that `read` makes of these files; None if it is fine."""
    try:
        for path in paths:
            check_decodes(path)
        read(tf.constant(index, tf.int64))
    except ValueError as problem:
        return str(problem)
    except tf.errors.OpError as error:
        return f"{' or '.join(map(str, paths))} cannot be read: {reason_of(error)}"
    return None


def check_decodes(path: Path) -> None:
    """Decodes a picture with Pillow; ValueError names the file and what is wrong."""
    try:
        data = whole_files.read(path, MOST_BYTES, links=True)
        if not (fault := refused(data)):
            Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")).load()
    except Image.UnidentifiedImageError:
        what = f"starts with {data[:8]!r}" if data else "has zero bytes"
        what = f"{path} is no PNG, JPEG or WebP (it {what})"
        raise ValueError(f"{what}; convert it, or copy it again") from None
    except (OSError, SyntaxError, ValueError, zlib.error, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be decoded ({error}); copy or make it again") from None
    if fault:
        raise ValueError(f"{path} {fault}")


def refused(data: bytes) -> str:
    """Why a PNG, JPEG or WebP is not decoded, without its name; "" where its header is fine."""
    if data[:8] == _PNG_SIGNATURE and data[24:25] == b"\x10":
        what = "convert it to 8 bits, with the range of values that matters"
        return f"has 16 bits a channel, but only the high 8 would be read: {what}"
    if data[:8] == _PNG_SIGNATURE and data[:16] != PNG_START:
        return "does not begin with its header: make it again"
    if data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8X" and data[20:21] and data[20] & _MOVES:
        return "is an animation: save one picture of it"
    if data[:2] == b"\xff\xd8" and data.count(b"\xff\xda") > _MOST_SCANS:
        return f"has more than {_MOST_SCANS} scans, which take hours: save it again"
    try:
        if _has_four(tf.constant(data)) and not _of_adobe(tf.constant(data)):
            what = "is a JPEG of four colours without Adobe's segment, which says how to read them"
            return f"{what}: save it as RGB"
        height, width = _stored_size(tf.constant(data)).numpy().tolist()
    except (tf.errors.OpError, UnicodeDecodeError):  # its message may hold bytes of the file
        return ""
    return too_large(width, height)


def too_large(width: int, height: int) -> str:
    """A message about a picture of more than --max_pixels, without its name; "" for others."""
    if width * height <= most_pixels:
        return ""
    what = f"has {width:,} x {height:,} pixels, more than --max_pixels={most_pixels}"
    return f"{what}: make it smaller, or raise the limit if you trust it"
