"""Folders of images and labels: the layout that most segmentation sets can be brought into.

ROOT/images/NAME.png            8-bit colour or grey pictures; .jpg and .jpeg too
ROOT/labels/NAME.png            class ids: 8-bit grey PNG, or palette PNG (the indices)
ROOT/splits/SPLIT.txt           one NAME a line; a NAME may have folders in it
"""

import io
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tensorflow as tf
from PIL import Image

from data import source

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _PALETTE = 0, 3  # PNG colour types (PNG specification, 11.2.2)


class ImageLabelFolder:
    """One split of a folder, as a `source.Source`.

    Reads to {"image": uint8 [H, W, 3], "label": uint8 [H, W, 1]}. Label values are below
    `num_classes`, or `ignore_label`. The files are listed once, here; none is opened.

    Raises ValueError, naming folder, file or line, when a part of the layout is missing or empty,
    a listed name lacks its image or label, or a name is listed twice.
    """

    def __init__(self, root: Path, split: str, num_classes: int, ignore_label: int = 255):
        if not (1 <= num_classes <= 256 and 0 <= ignore_label <= 255):
            raise ValueError(
                f"num_classes={num_classes} and ignore_label={ignore_label}: labels have 8 bits, "
                "so give 1 to 256 classes and a label to ignore from 0 to 255"
            )
        self.root = Path(root)
        self.num_classes = num_classes
        self.ignore_label = ignore_label
        _check_layout(self.root)
        names = _read_split(self.root, split)
        self._images = _find(self.root / "images", names, IMAGE_SUFFIXES)
        self._labels = _find(self.root / "labels", names, (".png",))
        self._image_paths = tf.constant([str(self.root / path) for path in self._images])
        self._label_paths = tf.constant([str(self.root / path) for path in self._labels])

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads {"image": uint8 [H, W, 3], "label": uint8 [H, W, 1]}; index: int64 scalar.

        Raises tf.errors.InvalidArgumentError (when it runs) for a file that cannot be decoded,
        sizes that differ, and label values that are no class; `explain` tells which and why.
        """
        image_path, label_path = self._image_paths[index], self._label_paths[index]
        image = tf.io.decode_image(tf.io.read_file(image_path), channels=3, expand_animations=False)
        label = _decode_label(tf.io.read_file(label_path), label_path)
        sizes = tf.shape(image)[:2], tf.shape(label)[:2]
        _require(tf.reduce_all(sizes[0] == sizes[1]), "sizes differ", image_path, *sizes)
        if self.num_classes < 256:
            known = (label < self.num_classes) | (label == self.ignore_label)
            _require(tf.reduce_all(known), "a label value is no class", label_path)
        return {
            "image": tf.ensure_shape(image, [None, None, 3]),
            "label": tf.ensure_shape(label, [None, None, 1]),
        }

    def explain(self, index: int) -> str | None:
        """What is wrong with sample `index` (0 .. len - 1), or None when it reads well."""
        image_path, label_path = self.root / self._images[index], self.root / self._labels[index]
        try:
            image = _load(image_path)
            label = _load(label_path)
            _check_label_kind(label_path, label)
            if image.size != label.size:
                raise ValueError(
                    f"{image_path} is {_size(image)} and {label_path} is {_size(label)} (width x "
                    "height); make them one size (labels without interpolation)"
                )
            self._check_values(label_path, np.asarray(label))
            self.read(tf.constant(index, tf.int64))
        except ValueError as problem:
            return str(problem)
        except tf.errors.OpError as error:  # no check above knows it, so in TensorFlow's words
            return f"{image_path} or {label_path} cannot be read: {error.message}; replace it"
        return None

    def fingerprint(self) -> str:
        """SHA-256 over names and sizes of the split's files, the same on every host.

        It asks for each file's size, so it takes a while on a network file system.
        Raises OSError when a file has gone since the folder was listed.
        """
        paths = self._images + self._labels
        with ThreadPoolExecutor(16) as pool:  # waiting for a file server, not computing
            sizes = pool.map(os.path.getsize, [self.root / path for path in paths])
            return source.digest(zip(paths, sizes, strict=True))

    def _check_values(self, path: Path, label: np.ndarray) -> None:
        wrong = (label >= self.num_classes) & (label != self.ignore_label)
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            values = np.unique(label[wrong]).tolist()
            raise ValueError(
                f"{path}: label value {label[row, column]} at row {row}, column {column} is no "
                f"class ({np.count_nonzero(wrong)} such pixels, values {_some(values)}); classes "
                f"are 0..{self.num_classes - 1} and {self.ignore_label} is ignored: map the "
                "values, or raise num_classes"
            )


def _require(condition: tf.Tensor, *facts: str | tf.Tensor) -> None:
    """Fails the sample at run time; in the functions of `tf.data` nothing has to wait for it."""
    tf.debugging.Assert(condition, [*facts, "explain() tells more"])


def _decode_label(data: tf.Tensor, path: tf.Tensor) -> tf.Tensor:
    """Class ids, uint8 [H, W, 1], from the bytes of a grey or palette PNG.

    A decoder turns other kinds into something that only looks like ids (averaged colours, the
    high byte of 16 bits), so the header decides what is decoded.
    """
    depth, colour = tf.unstack(tf.io.decode_raw(tf.strings.substr(data, 24, 2), tf.uint8), 2)
    is_palette = colour == _PALETTE
    fine = is_palette | ((colour == _GREY) & (depth == 8))
    fine &= tf.strings.substr(data, 0, 8) == _PNG_SIGNATURE
    _require(fine, "a label must be an 8-bit grey or a palette PNG", path)
    return tf.cond(
        is_palette,
        lambda: _decode_palette(data, depth),
        lambda: tf.io.decode_png(data, channels=1),
    )


def _decode_palette(data: tf.Tensor, depth: tf.Tensor) -> tf.Tensor:
    """Palette indices, uint8 [H, W, 1].

    `tf.io.decode_png` gives the palette's colours. The same file declared grey gives the indices:
    the colour type is byte 25, and bytes 29 to 32 are the header's CRC. A CRC is linear over
    GF(2), so that one change flips the same bits of every header's CRC.
    """
    flips = (_header_crc(_GREY) ^ _header_crc(_PALETTE)).to_bytes(4, "big")
    flips = np.frombuffer(bytes([_GREY ^ _PALETTE, 0, 0, 0]) + flips, np.uint8)
    header = tf.bitwise.bitwise_xor(
        tf.io.decode_raw(tf.strings.substr(data, 25, 8), tf.uint8), flips
    )
    every_byte = tf.constant([bytes([value]) for value in range(256)])
    header = tf.strings.reduce_join(tf.gather(every_byte, tf.cast(header, tf.int32)))
    rest = tf.strings.substr(data, 33, tf.int32.max)
    as_grey = tf.io.decode_png(tf.strings.join([tf.strings.substr(data, 0, 25), header, rest]), 1)
    # Grey of 1, 2 and 4 bits is stretched to 0..255 on decoding; indices are not brightnesses.
    largest = tf.bitwise.left_shift(1, tf.cast(depth, tf.int32)) - 1
    return as_grey // tf.cast(255 // largest, tf.uint8)


def _header_crc(colour_type: int) -> int:
    return zlib.crc32(b"IHDR" + bytes(9) + bytes([colour_type, 0, 0, 0]))


def _check_layout(root: Path) -> None:
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; give the one that holds images/ and labels/")
    for name, content in (("images", "pictures"), ("labels", "label PNGs"), ("splits", "lists")):
        folder = root / name
        if not folder.is_dir():
            raise ValueError(f"{folder} is missing; put the {content} there")
        if not any(os.scandir(folder)):
            raise ValueError(f"{folder} is empty; put the {content} there")


def _read_split(root: Path, split: str) -> dict[str, int]:
    """Names of the split in the order of its list, each with the line it stands on."""
    path = root / "splits" / f"{split}.txt"
    if not path.is_file():
        there = sorted(found.stem for found in path.parent.glob("*.txt"))
        raise ValueError(
            f"{path} is missing; write the split's names there, one a line, or choose "
            f"another split (there are: {_some(there) or 'none'})"
        )
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from None
    names: dict[str, int] = {}
    for number, name in enumerate(map(str.strip, lines), start=1):
        if name in names:
            raise ValueError(
                f"{path}, line {number}: {name} stands on line {names[name]} already; "
                "take one of the two out"
            )
        if name:
            names[name] = number
    if not names:
        raise ValueError(f"{path} lists no name; write one a line")
    return names


def _find(folder: Path, names: dict[str, int], suffixes: tuple[str, ...]) -> list[str]:
    """Paths relative to the folder's parent, in the order of the names.

    Folders are listed, not files looked up one by one: on a network file system that is one
    answer for thousands of files.
    """
    found: dict[str, str] = {}
    for parent in sorted({os.path.dirname(name) for name in names}):
        if not (folder / parent).is_dir():
            continue
        for entry in sorted(os.listdir(folder / parent)):
            stem, suffix = os.path.splitext(os.path.join(parent, entry))
            if suffix.lower() not in suffixes or stem not in names:
                continue
            if stem in found:
                raise ValueError(
                    f"{folder}: {found[stem]} and {stem + suffix} have one name; keep one of them"
                )
            found[stem] = stem + suffix
    missing = [name for name in names if name not in found]
    if missing:
        endings = " or ".join(suffixes)
        raise ValueError(
            f"{folder} has no file {endings} for {_some(missing)} (the first is on line "
            f"{names[missing[0]]} of the split's list; names there have no ending); add the "
            "files, or take the names out of the list"
        )
    return [f"{folder.name}/{found[name]}" for name in names]


def _load(path: Path) -> Image.Image:
    """The decoded picture; ValueError says why there is none."""
    try:
        data = path.read_bytes()
        picture = Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
        picture.load()
    except Image.UnidentifiedImageError:
        what = f"starts with {data[:8]!r}" if data else "has zero bytes"
        raise ValueError(
            f"{path} is neither PNG nor JPEG (it {what}); convert it, or copy it again"
        ) from None
    except (OSError, SyntaxError, ValueError, zlib.error, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be decoded ({error}); copy or make it again") from None
    return picture


def _check_label_kind(path: Path, label: Image.Image) -> None:
    depth, colour = path.read_bytes()[24:26]
    if label.format == "PNG" and (colour == _PALETTE or (colour == _GREY and depth == 8)):
        return
    kind = f"{label.format}, {len(label.getbands())} channels"
    if label.format == "PNG":
        kind += f" of {depth} bits"
    raise ValueError(
        f"{path} is {kind}; a label holds class ids in one 8-bit channel: map its colours or "
        "values to ids and save it as 8-bit grey PNG (Pillow: Image.fromarray(ids_uint8).save)"
    )


def _size(picture: Image.Image) -> str:
    return f"{picture.width}x{picture.height}"


def _some(items: Iterable[object], most: int = 5) -> str:
    items = list(items)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
