"""The orientation of a picture's file, found in a graph where Pillow finds it.

Cameras store what the sensor saw and note how to turn it (Exif 2.32, tag 0x0112). The note is a
directory of entries, in any segment of a JPEG before its pixels, any chunk of a PNG (eXIf, or the
text "Raw profile type exif") or of a WebP (EXIF). Where it says nothing, Adobe's XMP may. Anything
invalid counts as no orientation.
"""

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

# Files that begin otherwise are refused: decoders pass over chunks before the header.
PNG_START = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"
_NAMES = r"Exif\x00\x00|eXIf|EXIF|Raw profile type exif\x00|tiff:Orientation"
_XMP = r"(?:http://ns\.adobe\.com/xap/1\.0/\x00|XML:com\.adobe\.xmp\x00|XMP \C{4})"
_XMP = rf'\C*?{_XMP}\C*?tiff:Orientation(?:="|>)([0-9])\C*'
_HEX = rb"0123456789abcdef"
_TAG = 0x0112
# Bytes of a value by its type (TIFF 6.0, section 2), 0 where there is no such type.
_UNITS = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4)
_WHOLE = (3, 4, 6, 8, 9, 13)  # types of whole numbers, without the type of bytes
# Zeros appended to a file, so that reading its last bytes needs no special case.
_TAIL = 16

# A function for what few pictures need, traced once a process. Inlined in each reader's graph, its
# ops would cost time for every picture, even in a branch that is not taken.
seldom = functools.partial(
    tf.function, autograph=False, experimental_attributes={"_noinline": True}
)


def orientation(data: tf.Tensor) -> tf.Tensor:
    """1 (as stored) to 8 of a file's bytes, int32 scalar."""
    return tf.cond(_is_bare(data), lambda: tf.constant(1), lambda: _searched(data))


def is_webp(data: tf.Tensor) -> tf.Tensor:
    """Whether a file's bytes begin as a WebP does, bool scalar."""
    return tf.strings.regex_full_match(
        tf.strings.substr(data, 0, 15), r"RIFF\C{4}WEBPVP8"
    )


def _is_bare(data: tf.Tensor) -> tf.Tensor:
    """Whether this is a JPEG whose first table follows its JFIF segment, or a PNG whose only chunk
    between header and end is its pixels: there is no place for an orientation, as in nearly all
    pictures of published data sets.

    A shortcut: it takes a tenth of the time of the search.
    """
    # Bytes are appended, because substr fails beyond the end.
    head = tf.strings.join([tf.strings.substr(data, 0, 2**11), bytes(41)])
    jpeg = tf.strings.substr(head, 0, 6) == b"\xff\xd8\xff\xe0\x00\x10"
    jpeg &= tf.strings.substr(head, 20, 2) == b"\xff\xdb"
    # A name may also follow the tables.
    jpeg &= ~tf.strings.regex_full_match(head, rf"\C*(?:{_NAMES})\C*")
    # After the 33 bytes of signature and header: length of the chunk, its name, the pixels, a
    # checksum, and 12 bytes of IEND.
    length = tf.io.decode_raw(
        tf.strings.substr(head, 33, 4), tf.int32, little_endian=False
    )[0]
    png = (tf.strings.substr(head, 0, 16) == PNG_START) & (
        length == tf.strings.length(data) - 57
    )
    return jpeg | (png & (tf.strings.substr(head, 37, 4) == b"IDAT"))


@seldom(input_signature=[tf.TensorSpec([], tf.string)])
def _searched(data: tf.Tensor) -> tf.Tensor:
    """`orientation`, where its shortcut does not hold."""
    has_name = tf.strings.regex_full_match(data, rf"\C*(?:{_NAMES})\C*")
    return tf.cond(has_name, lambda: _of_metadata(data), lambda: tf.constant(1))


def _of_metadata(data: tf.Tensor) -> tf.Tensor:
    """The orientation, 1 to 8, of a file that holds one of _NAMES, maybe only among its pixels.

    Exif says it; where Exif says nothing (0), XMP may, in the part of the file that was searched.
    """
    cases = [
        (tf.io.is_jpeg(data), lambda: _exif_block(data, 2, _jpeg_step)),
        (is_webp(data), lambda: _exif_block(data, 12, _webp_step)),
    ]
    block, end = tf.case(cases, default=lambda: _exif_block(data, 8, _png_step))
    value = _of_exif(block)
    head = _part(data, 0, end)
    has_xmp = (value == 0) & tf.strings.regex_full_match(
        head, r"\C*tiff:Orientation\C*"
    )
    value = tf.cond(has_xmp, lambda: _of_xmp(head), lambda: value)
    return tf.where((value >= 1) & (value <= 8), value, 1)


def _of_xmp(head: tf.Tensor) -> tf.Tensor:
    """The orientation that Adobe's XMP in a file's bytes says, or 0."""
    # Where nothing matches, this is all of `head`.
    digit = tf.strings.regex_replace(head, _XMP, r"\1")
    valid = tf.strings.regex_full_match(digit, "[1-8]")
    return tf.strings.to_number(tf.where(valid, digit, "0"), tf.int32)


# From a padded file, the place of one of its parts and the Exif block so far: the place of the next
# part, whether this part was the last, and the block with what this part adds.
_Step = Callable[..., tuple[tf.Tensor, tf.Tensor, tf.Tensor]]


def _exif_block(
    data: tf.Tensor, start: int, step: _Step
) -> tuple[tf.Tensor, tf.Tensor]:
    """The bytes of a file's Exif block, b"" where it has none, and where the search for it ended.

    `step` looks at the file's parts one by one, from byte `start` on.
    """
    length = tf.cast(tf.strings.length(data), tf.int64)
    padded = tf.strings.join([data, bytes(_TAIL)])

    def once(place: tf.Tensor, _: tf.Tensor, block: tf.Tensor) -> list[tf.Tensor]:
        after, done, block = step(padded, place, block)
        return [tf.minimum(after, length), done, block]

    def goes_on(place: tf.Tensor, done: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return (place < length) & ~done

    state = [tf.constant(start, tf.int64), tf.constant(False), tf.constant(b"")]
    place, _, block = tf.while_loop(goes_on, once, state)
    # At most two names may stand before the directory.
    block = tf.strings.regex_replace(block, r"^(?:Exif\x00\x00){1,2}", "")
    return block, place


def _jpeg_step(
    data: tf.Tensor, place: tf.Tensor, block: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """A segment: 0xFF, its kind, its length (2 bytes, itself included); several may be joined."""
    head = numbers(data, place, 4)
    first = head[0]
    kind = head[1]
    size = tf.maximum(head[2] * 2**8 + head[3], 2)
    without_length = (kind == 0) | (kind == 0xC8) | ((kind >= 0xD0) & (kind <= 0xD9))
    without_length |= (kind >= 0xF0) & (kind <= 0xFD)
    after = tf.where(without_length, place + 2, place + 2 + size)
    after = tf.where((first != 0xFF) | (kind == 0xFF), place + 1, after)
    content = _part(data, place + 4, size - 2)
    is_exif = (first == 0xFF) & (kind == 0xE1)
    is_exif &= tf.strings.substr(_part(data, place + 4, _TAIL), 0, 6) == b"Exif\0\0"
    more = tf.strings.regex_replace(content, r"^Exif\x00\x00", "")
    block = tf.cond(is_exif, lambda: tf.strings.join([block, more]), lambda: block)
    return after, (first == 0xFF) & (kind == 0xDA), block


def _png_step(
    data: tf.Tensor, place: tf.Tensor, block: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """A chunk: its length (4 bytes), its name, its content, a checksum; the last one counts."""
    size = joined(numbers(data, place, 4), big=True)
    name = _part(data, place + 4, 4)
    content = _part(data, place + 8, size)
    is_exif = (name == b"eXIf") & (size > 0)
    is_text = (name == b"tEXt") | (name == b"zTXt")
    is_text &= tf.strings.regex_full_match(content, r"Raw profile type exif\x00\C*")
    is_text &= block == b""
    cases = [(is_exif, lambda: content), (is_text, lambda: _of_text(name, content))]
    block = tf.case(cases, default=lambda: block)
    return place + 12 + size, name == b"IEND", block


def _of_text(name: tf.Tensor, content: tf.Tensor) -> tf.Tensor:
    """The bytes that the text of a chunk spells in hexadecimal digits, behind three lines."""
    start = len("Raw profile type exif\0")
    text = tf.cond(
        name == b"zTXt",  # its compressed text follows a byte that names the method
        lambda: tf.io.decode_compressed(
            tf.strings.substr(content, start + 1, 2**30), "ZLIB"
        ),
        lambda: tf.strings.substr(content, start, 2**30),
    )
    text = tf.strings.regex_replace(text, r"^[^\n]*\n[^\n]*\n[^\n]*\n", "")
    text = tf.strings.lower(tf.strings.regex_replace(text, r"\s", ""))
    text = tf.where(tf.strings.regex_full_match(text, r"(?:[0-9a-f]{2})*"), text, "")
    digits = np.zeros(256, np.int32)
    digits[list(_HEX)] = np.arange(16)
    nibbles = tf.gather(digits, tf.cast(tf.io.decode_raw(text, tf.uint8), tf.int32))
    return to_bytes(nibbles[::2] * 16 + nibbles[1::2])


def to_bytes(numbers: tf.Tensor) -> tf.Tensor:
    """The bytes with these values, string scalar; numbers: int32 [n], 0 to 255."""
    every_byte = tf.constant([bytes([value]) for value in range(256)])
    return tf.strings.reduce_join(tf.gather(every_byte, numbers))


def _webp_step(
    data: tf.Tensor, place: tf.Tensor, block: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """A chunk (RFC 9649, 2.3): its name, its length (4 bytes), its content, even in all."""
    size = joined(numbers(data, place + 4, 4), big=False)
    is_exif = (_part(data, place, 4) == b"EXIF") & (block == b"")
    # A bit of the file's header says whether it counts.
    is_exif &= (_part(data, 15, 1) == b"X") & (numbers(data, 20, 1)[0] & 8 > 0)
    block = tf.cond(is_exif, lambda: _part(data, place + 8, size), lambda: block)
    return place + 8 + size + size % 2, tf.constant(False), block


def _part(data: tf.Tensor, place: tf.Tensor | int, size: tf.Tensor | int) -> tf.Tensor:
    """Bytes of a padded file; where it ends before them, those that it has."""
    place = tf.minimum(
        tf.cast(place, tf.int64), tf.cast(tf.strings.length(data), tf.int64)
    )
    size = tf.minimum(tf.cast(size, tf.int64), tf.int32.max)
    return tf.strings.substr(data, place, tf.maximum(size, 0))


def numbers(data: tf.Tensor, place: tf.Tensor | int, count: int) -> tf.Tensor:
    """Bytes of a padded file as numbers, int64 [count]."""
    part = tf.io.decode_raw(_part(data, place, count), tf.uint8, fixed_length=count)
    return tf.cast(part, tf.int64)


def joined(parts: tf.Tensor, *, big: tf.Tensor | bool) -> tf.Tensor:
    """Numbers of bytes [..., count] in this order, the highest first if `big`: int64 [...]."""
    powers = 2 ** (8 * tf.range(parts.shape[-1], dtype=tf.int64))
    return tf.reduce_sum(parts * tf.where(big, powers[::-1], powers), axis=-1)


def _of_exif(block: tf.Tensor) -> tf.Tensor:
    """The orientation that the first directory of an Exif block says.

    It is 0 if the directory says none or the block is empty, and 1 if the block is broken.

    A block is the order of bytes (II: lowest first, or MM), 42, and the directory's place. This is
    the number of entries, and entries of 12 bytes: tag, type, number of values, and the value, or,
    if it takes more than 4 bytes, its place (TIFF 6.0, section 2).
    """
    length = tf.cast(tf.strings.length(block), tf.int64)
    is_known = tf.strings.regex_full_match(block, r"(?:II|MM)(?:\*\x00|\x00\*)\C{4,}")
    big = tf.strings.regex_full_match(block, r"M\C*")
    block = tf.strings.join([block, bytes(_TAIL)])
    start = joined(numbers(block, 4, 4), big=big)
    start = tf.where(is_known, tf.minimum(start, length), length)

    # The entries: tag, type, number of values, and a value or its place.
    count = joined(numbers(block, start, 2), big=big)
    count = tf.minimum(count, tf.maximum(length - start - 2, 0) // 12)
    entries = tf.io.decode_raw(_part(block, start + 2, 12 * count), tf.uint8)
    entries = tf.cast(tf.reshape(entries, [-1, 12]), tf.int64)
    unit_of = tf.constant([*_UNITS, 0], tf.int64)
    kinds = joined(entries[:, 2:4], big=big)
    units = tf.gather(unit_of, tf.minimum(kinds, len(_UNITS)))
    sizes = units * joined(entries[:, 4:8], big=big)
    inside = start + 10 + 12 * tf.range(count)
    places = tf.where(sizes > 4, joined(entries[:, 8:12], big=big), inside)
    valid = (
        (joined(entries[:, :2], big=big) == _TAG)
        & (sizes > 0)
        & (places + sizes <= length)
    )

    def value() -> tf.Tensor:
        entry = tf.argmax(tf.cast(valid, tf.int32))
        wide = numbers(block, places[entry], 4)
        values = [joined(wide[:size], big=big) for size in (1, 2, 4)]
        number = tf.gather(tf.stack(values), tf.minimum(units[entry] // 2, 2))
        whole = tf.reduce_any(kinds[entry] == tf.constant(_WHOLE, tf.int64))
        return tf.cast(
            tf.where(whole & (number >= 1) & (number <= 8), number, 1), tf.int32
        )

    broken = tf.cast(~is_known & (length > 0), tf.int32)
    return tf.cond(tf.reduce_any(valid), value, lambda: broken)
