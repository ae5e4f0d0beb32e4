"""Decodes picture files and label PNGs in a graph, and explains those that fail.

Pictures are turned by their EXIF orientation (exif.py): viewers turn them, TensorFlow's
decoders do not.
"""

import io
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import tensorflow as tf
from PIL import Image

from hvdkit import whole_files
from hvdkit.data.labels import IGNORE
from hvdkit.data.pipeline import reason_of
from hvdkit.data.readers.exif import (
    PNG_START,
    is_webp,
    joined,
    numbers,
    orientation,
    seldom,
    to_bytes,
)

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
# Endings of pictures that are not read; they are reported, not skipped silently.
OTHER_SUFFIXES = (
    ".gif", ".bmp", ".tif", ".tiff", ".jfif", ".jpe", ".jp2", ".jxl", ".avif", ".heic", ".heif",
    ".ppm", ".pgm", ".tga",
)  # fmt: skip
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_SCANS = 100  # a JPEG's scans are each decoded over the whole picture
MOST_BYTES = 2**30  # the largest file that is read
# PNG colour types (PNG specification, 11.2.2)
_GREY = 0
_PALETTE = 3
_JPEG_MARKER = re.compile(rb"\xff+([^\x00\xff])")
_START_OF_SCAN = 0xDA
_END_OF_IMAGE = 0xD9
_WITHOUT_CONTENT = {0x01, *range(0xD0, 0xD9)}
_ANIMATION = 2  # this bit of a WebP's byte 20, after VP8X, says that it is an animation
_DEEP = r"\CPNG\r\n\x1a\n\C{16}\x10"  # a PNG's header whose bit depth, byte 24, is 16
_ADOBE = r"\C*\x00\x0eAdobe\x00\C*"  # a JPEG with segment APP14, after its marker
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
    number = orientation(data)
    turned = tf.cond(number > 1, lambda: _turned(image, number), lambda: image)
    # _turned does not know the number of channels.
    return tf.ensure_shape(turned, [None, None, image.shape[-1]])


@seldom(
    input_signature=[
        tf.TensorSpec([None, None, None], tf.uint8),
        tf.TensorSpec([], tf.int32),
    ]
)
def _turned(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    height, width, channels = tf.unstack(tf.shape(image))
    swapped = swaps(orientation)
    # Rows and columns of the picture as it is shown.
    rows = tf.range(tf.where(swapped, width, height))[:, None]
    columns = tf.range(tf.where(swapped, height, width))[None]
    rows = tf.where(tf.gather(_UPSIDE_DOWN, orientation), rows[::-1], rows)
    columns = tf.where(tf.gather(_MIRRORED, orientation), columns[:, ::-1], columns)
    # oneDNN prints an error about tf.transpose on CPUs without AVX-512.
    stored = tf.where(swapped, columns * width + rows, rows * width + columns)
    return tf.gather(tf.reshape(image, [-1, channels]), stored)


def limit(pixels: int) -> None:
    """Sets --max_pixels for all graphs that are made from now on, and for Pillow."""
    global most_pixels
    most_pixels = Image.MAX_IMAGE_PIXELS = pixels


def _stored_shape(data: tf.Tensor) -> tf.Tensor:
    """Height and width by the header of a PNG, JPEG or WebP, and a JPEG's number of colours.

    int32 [3]; zeros for other files, and for the number of colours of other pictures.
    """

    def shape_of_png() -> tf.Tensor:
        # Width and height follow signature, length and name of the first chunk, big-endian.
        part = tf.strings.substr(data, 16, 8)
        width_and_height = tf.io.decode_raw(
            part, tf.int32, little_endian=False, fixed_length=8
        )
        return tf.pad(width_and_height[::-1], [[0, 1]])

    is_png = tf.strings.substr(data, 0, 16) == PNG_START
    cases = [
        (tf.io.is_jpeg(data), lambda: tf.io.extract_jpeg_shape(data)),
        (is_png, shape_of_png),
        (is_webp(data), lambda: tf.pad(_size_of_webp(data), [[0, 1]])),
    ]
    return tf.case(cases, default=lambda: tf.zeros([3], tf.int32))


@seldom(input_signature=[tf.TensorSpec([], tf.string)])
def _size_of_webp(data: tf.Tensor) -> tf.Tensor:
    """Height and width, int32 [2], from the first chunk: VP8, VP8L or VP8X (RFC 9649).

    Zeros for an animation: TensorFlow 2.21 would write all its frames into the memory of one.
    """
    kind = tf.strings.substr(data, 15, 1)
    # VP8: width and height in 14 bits each, in two bytes.
    lossy = joined(tf.reshape(numbers(data, 26, 4), [2, 2]), big=False)[::-1] % 2**14
    # VP8L: both, less 1, in 28 bits.
    both = joined(numbers(data, 21, 4), big=False) % 2**28
    lossless = 1 + tf.stack([both // 2**14, both % 2**14])
    # VP8X: both, less 1, in three bytes each.
    extended = 1 + joined(tf.reshape(numbers(data, 24, 6), [2, 3]), big=False)[::-1]
    is_still = numbers(data, 20, 1) & _ANIMATION == 0
    extended *= tf.cast(is_still, tf.int64)
    size = tf.where(kind == b" ", lossy, tf.where(kind == b"L", lossless, extended))
    return tf.cast(size, tf.int32)


@seldom(input_signature=[tf.TensorSpec([], tf.string)])
def _of_adobe(data: tf.Tensor) -> tf.Tensor:
    """Whether a JPEG of four colours says whether they are inverted: else decoders disagree."""
    return tf.strings.regex_full_match(data, _ADOBE)


def fit(data: tf.Tensor) -> tf.Tensor:
    """The data, or b"" where it is not to be decoded: this fails to decode.

    An assertion might run after the decoder.
    """
    shape = _stored_shape(data)
    size = tf.cast(shape[:2], tf.int64)
    fits = tf.reduce_all(size > 0) & (tf.reduce_prod(size) <= most_pixels)
    is_deep = tf.strings.regex_full_match(tf.strings.substr(data, 0, 25), _DEEP)
    # Four are those of printing.
    has_known_colours = tf.cond(shape[2] == 4, lambda: _of_adobe(data), lambda: True)
    return tf.where(fits & ~is_deep & has_known_colours, data, b"")


def require(condition: tf.Tensor, *facts: str | tf.Tensor) -> None:
    """Fails the sample at run time; inside `tf.data` it needs no control dependency."""
    # tf.debugging.Assert has other words in eager mode.
    tf.raw_ops.Assert(condition=condition, data=facts)


def require_classes(label: tf.Tensor, classes: int) -> None:
    """Fails the sample whose label picture holds a value that is neither a class nor IGNORE."""
    highest = tf.reduce_max(tf.where(label == IGNORE, tf.zeros_like(label), label))
    way_out = f"is no class of 0 to {classes - 1} or {IGNORE}: map it by --label_map"
    require(highest < classes, "label value", highest, way_out)


def decode_image(data: tf.Tensor) -> tf.Tensor:
    """Colours, uint8 [H, W, 3], from the bytes of a JPEG or WebP, or a PNG of at most 8 bits.

    Turned by its EXIF orientation, as viewers show it. Decoding 16 bits would keep the high byte
    only, which loses nearly all of a 12-bit camera's picture: such a PNG fails the sample, as do
    pictures of more than --max_pixels and other kinds of files. Of several pictures the first.
    """
    fitting = fit(data)
    image = tf.cond(
        is_webp(data),
        # The decoder of WebP gives the number of channels that the file has, and no other.
        lambda: tf.io.decode_image(fitting, expand_animations=False)[..., :3],
        lambda: tf.io.decode_image(fitting, channels=3, expand_animations=False),
    )
    return _upright(tf.ensure_shape(image, [None, None, 3]), data)


def size(data: tf.Tensor) -> tf.Tensor:
    """Height and width, int32 [2], of `decode_image`'s result, from the header."""
    stored = _stored_shape(data)[:2]
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
    depth, colour = tf.unstack(
        tf.io.decode_raw(tf.strings.substr(data, 24, 2), tf.uint8), 2
    )
    is_palette = colour == _PALETTE
    holds_ids = is_palette | ((colour == _GREY) & (depth == 8))
    holds_ids &= tf.strings.substr(data, 0, 16) == PNG_START
    require(
        holds_ids,
        "a label must be an 8-bit grey or a palette PNG of class ids: map its values",
    )
    data = fit(data)
    label = tf.cond(
        is_palette,
        lambda: _decode_palette(data, depth),
        lambda: tf.io.decode_png(data, channels=1),
    )
    return _upright(tf.ensure_shape(label, [None, None, 1]), data)


def _decode_palette(data: tf.Tensor, depth: tf.Tensor) -> tf.Tensor:
    """Palette indices, uint8 [H, W, 1].

    `tf.io.decode_png` returns the palette's colours; declared grey, the same file gives the
    indices. The colour type is byte 25, the header's CRC is bytes 29 to 32. A CRC is linear over
    GF(2), so this change flips the same bits of every header's CRC.
    """
    grey_crc = zlib.crc32(b"IHDR" + bytes([*bytes(9), _GREY, 0, 0, 0]))
    palette_crc = zlib.crc32(b"IHDR" + bytes([*bytes(9), _PALETTE, 0, 0, 0]))
    crc_flips = (grey_crc ^ palette_crc).to_bytes(4, "big")
    flips = np.frombuffer(bytes([_GREY ^ _PALETTE, 0, 0, 0]) + crc_flips, np.uint8)
    stored = tf.io.decode_raw(tf.strings.substr(data, 25, 8), tf.uint8)
    start = tf.strings.substr(data, 0, 25)
    header = to_bytes(tf.cast(tf.bitwise.bitwise_xor(stored, flips), tf.int32))
    rest = tf.strings.substr(data, 33, tf.int32.max)
    as_grey = tf.io.decode_png(tf.strings.join([start, header, rest]), 1)
    # Grey of 1, 2 and 4 bits is stretched to 0..255 on decoding; indices are not brightnesses.
    largest = tf.bitwise.left_shift(1, tf.cast(depth, tf.int32)) - 1
    return as_grey // tf.cast(255 // largest, tf.uint8)


def doubt_of_palettes(files: Iterable[Path]) -> str:
    """Where palette PNGs give one index several colours: indices are no class ids. Else "".

    Files are decoded only where palettes differ.
    """
    tables = {file: table for file in files if (table := _palette(file))}
    if len({*tables.values()}) < 2:
        return ""
    seen: dict[int, tuple[bytes, Path]] = {}
    for file, table in tables.items():
        for index in _indices(file):
            colour = table[3 * index : 3 * index + 3]
            before, first_file = seen.setdefault(index, (colour, file))
            if before != colour:
                return (
                    f"index {index} is the colour {tuple(before)} in {first_file} and "
                    f"{tuple(colour)} in {file} ; each file has a palette of its own, so indices "
                    "are no class ids: save masks as grey PNGs of class ids (in training, "
                    "--label_map=0:0 where they are ids all the same)"
                )
    return ""


def _palette(file: Path) -> bytes:
    """The colours of a palette PNG, from its header; b"" of other and of damaged files."""
    try:
        with Image.open(file, formats=["PNG"]) as picture:
            is_read = picture.mode == "P" and not too_large(*picture.size)
            return (
                bytes(picture.palette.palette) if is_read and picture.palette else b""
            )
    # Pillow raises anything at damaged bytes; whoever trains on them is told.
    except Exception:
        return b""


def _indices(file: Path) -> list[int]:
    try:
        with Image.open(file, formats=["PNG"]) as picture:
            return np.flatnonzero(picture.histogram()).tolist()
    except Exception:
        return []


def explained(
    read: Callable[[tf.Tensor], object], index: int, *paths: Path
) -> str | None:
    """What is wrong with a sample that `read` makes of these files; None if it is fine."""
    try:
        for path in paths:
            check_decodes(path)
        read(tf.constant(index, tf.int64))
    except ValueError as problem:
        return str(problem)
    except tf.errors.OpError as error:
        files = " or ".join(str(path) for path in paths)
        return f"{files} cannot be read: {reason_of(error)}"
    return None


def check_decodes(path: Path) -> None:
    """Decodes a picture with Pillow; ValueError names the file and what is wrong."""
    try:
        data = whole_files.read(path, MOST_BYTES, links=True)
        fault = refused(data)
        if not fault:
            Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")).load()
    except Image.UnidentifiedImageError:
        start = f"starts with {data[:8]!r}" if data else "has zero bytes"
        raise ValueError(
            f"{path} is no PNG, JPEG or WebP (it {start}); convert it, or copy it again"
        ) from None
    except (
        OSError,
        SyntaxError,
        ValueError,
        zlib.error,
        Image.DecompressionBombError,
    ) as error:
        raise ValueError(
            f"{path} cannot be decoded ({error}); copy or make it again"
        ) from None
    if fault:
        raise ValueError(f"{path} {fault}")


def refused(data: bytes) -> str:
    """Why a PNG, JPEG or WebP is not decoded, without its name; "" where its header is fine."""
    is_png = data[:8] == _PNG_SIGNATURE
    if is_png and data[24:25] == b"\x10":
        return (
            "has 16 bits a channel, but only the high 8 would be read: convert it to 8 bits, with "
            "the range of values that matters"
        )
    if is_png and data[:16] != PNG_START:
        return "does not begin with its header: make it again"
    is_extended_webp = (
        data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8X" and len(data) > 20
    )
    if is_extended_webp and data[20] & _ANIMATION:
        return "is an animation: save one picture of it"
    if data[:2] == b"\xff\xd8" and _num_scans(data) > _MOST_SCANS:
        return f"has more than {_MOST_SCANS} scans, which take hours: save it again"
    try:
        height, width, colours = _stored_shape(tf.constant(data)).numpy().tolist()
        if colours == 4 and not _of_adobe(tf.constant(data)):
            return (
                "is a JPEG of four colours without Adobe's segment, which says how to read them: "
                "save it as RGB"
            )
    except (tf.errors.OpError, UnicodeDecodeError):
        # An OpError's text may hold bytes of the file.
        return ""
    return too_large(width, height)


def _num_scans(data: bytes) -> int:
    """How many scans a JPEG has until its end, behind which a phone may keep a film.

    A marker is 0xff and a byte; all but those without content are followed by their length.
    Source: ITU-T T.81, B.1.1.
    """
    scans = 0
    place = 2
    while match := _JPEG_MARKER.search(data, place):
        kind = match[1][0]
        place = match.end()
        if kind == _END_OF_IMAGE:
            break
        if kind not in _WITHOUT_CONTENT:
            scans += kind == _START_OF_SCAN
            place += int.from_bytes(data[place : place + 2], "big")
    return scans


def too_large(width: int, height: int) -> str:
    """A message about a picture of more than --max_pixels, without its name; "" for others."""
    if width * height <= most_pixels:
        return ""
    return (
        f"has {width:,} x {height:,} pixels, more than --max_pixels={most_pixels}: make it "
        "smaller, or raise the limit if you trust it"
    )
