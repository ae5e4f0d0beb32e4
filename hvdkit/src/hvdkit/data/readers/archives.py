"""Pictures with a class in WebDataset tars and TFRecords of other tools, for `hvdkit pack`.

ROOT/SPLIT-000000.tar ...           of each sample NAME.jpg (or .jpeg, .png, .webp) and NAME.cls,
                                    one after the other (WebDataset)
ROOT/SPLIT-00000-of-01024 ...       tf.train.Example records, with or without .tfrecord in the name,
                                    of "image/encoded" and "image/class/label", which begins at 1
                                    (ImageNet, by TensorFlow's models), or "image", "label" (TFDS)

SPLIT may stand anywhere in the name, between two of . - and _; or the files lie in ROOT/SPLIT. What
else a sample has is left out. They are read from first to last; to train, pack them.
"""

import functools
import os
import re
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from hvdkit.data import source
from hvdkit.data.pipeline import reason_of
from hvdkit.data.readers import pictures
from hvdkit.data.readers.records import AFTER, BEFORE
from hvdkit.logs import join

_THREADS = 16  # they wait for the disk
# Examples hold a picture and a class under two of these keys, counted from the third on.
_EXAMPLES = (("image/encoded", "image/class/label", 1), ("image", "label", 0))


class _Archives(source.ReadAhead):
    """The files of a split one after the other, as a `source.Source` of pictures with a class.

    ValueError, naming the file, if none is there, one is missing by its name, or cannot be read.
    """

    kind = "class"
    asks_mirror = True  # of digits as of photographs: nothing here says which
    names = ""  # a regular expression that the names of files fit

    def __init__(self, root: Path, split: str, _: int = 0) -> None:
        self.form = {
            "file": tf.TensorSpec([], tf.string),
            "fault": tf.TensorSpec([], tf.string),
            "label": tf.TensorSpec([], tf.int64),
        }
        self._files = _files_of(Path(root), split, self.names)
        with ThreadPoolExecutor(_THREADS) as threads:
            places = list(threads.map(self._listed, self._files))
        self._ends = np.cumsum([len(part) for part in places])
        if not len(self):
            raise ValueError(
                f"{self._files[0].parent}: the files of split {split} hold no sample"
            )
        self._places = np.concatenate(places)
        self.bytes_each = float(self._places[:, 1].mean())

    def __len__(self) -> int:
        return int(self._ends[-1])

    def fetch(self, indices: np.ndarray) -> list[np.ndarray]:
        files, faults, labels = zip(*(self._one(index) for index in indices.tolist()))
        return [
            np.array(files, object),
            np.array(faults, object),
            np.array(labels, np.int64),
        ]

    def decode(self, parts: source.Parts) -> source.Parts:
        file = source.sound(parts, "file")
        label = tf.cast(parts["label"], tf.int32)
        return {"image": pictures.decode_image(file), "label": label, "file": file}

    def explain(self, index: int) -> str | None:
        data, fault, _ = self._one(index)
        try:
            fault = fault or pictures.refused(data)
            pictures.decode_image(tf.constant(data))
        except tf.errors.OpError as error:
            fault = fault or f"cannot be decoded: {reason_of(error)}"
        if not fault:
            return None
        return f"{self._file(index)}, sample {index} (at byte {self._places[index, 0]}) {fault}"

    def fingerprint(self) -> str:
        return source.digest((path.name, path.stat().st_size) for path in self._files)

    def _file(self, index: int) -> Path:
        return self._files[int(np.searchsorted(self._ends, index, "right"))]

    def _one(self, index: int) -> tuple[bytes, str, int]:
        """The picture's file, what is wrong with the sample, or "", and its class."""
        path = self._file(index)
        offset, length, label = self._places[index].tolist()
        try:
            with path.open("rb") as file:
                data = os.pread(file.fileno(), length, offset)
            if len(data) < length:
                raise ValueError("is cut off")
            data, label = self._sample(path, data, label)
        except (ValueError, OSError) as error:
            return b"", str(error), -1
        return data, "", label

    def _listed(self, path: Path) -> np.ndarray:
        """Place, length and class of each sample of a file, int64 [n, 3]."""
        try:
            return np.array(list(self._samples(path)), np.int64).reshape(-1, 3)
        except (tarfile.TarError, tf.errors.OpError, EOFError) as error:
            raise ValueError(f"{path} cannot be read: {error}; copy it again") from None

    def _samples(self, path: Path) -> Iterator[tuple[int, int, int]]:
        raise NotImplementedError

    def _sample(self, path: Path, data: bytes, label: int) -> tuple[bytes, int]:
        """The picture's file and its class, from the bytes and the class that were listed."""
        return data, label


class Tars(_Archives):
    """WebDataset: sample NAME is all files whose name begins with NAME and a dot."""

    names = r".*\.tar"

    def _samples(self, path: Path) -> Iterator[tuple[int, int, int]]:
        current = ""  # FOLDER/NAME of the sample
        parts: dict[str, tarfile.TarInfo] = {}  # its files, by ending
        with path.open("rb") as file:
            for member in _members(path):
                if member.isdir() or os.path.basename(member.name).startswith("."):
                    continue
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    raise ValueError(
                        f"{path}: {member.name} is a link: tar -h --hard-dereference"
                    )
                folder, name = os.path.split(member.name)
                stem, _, ending = name.partition(".")
                ending = f".{ending.lower()}"
                if f"{folder}/{stem}" != current:
                    yield from _of_parts(
                        file, parts, where=f"{path}, sample {current[1:]}"
                    )
                    current = f"{folder}/{stem}"
                    parts = {}
                if ending in parts:
                    raise ValueError(f"{path}, sample {current[1:]} has {ending} twice")
                parts[ending] = member
            yield from _of_parts(file, parts, where=f"{path}, sample {current[1:]}")


def _members(path: Path) -> Iterator[tarfile.TarInfo]:
    """Raises tarfile.TarError or EOFError where the archive is damaged, cut off or hostile."""
    try:
        with tarfile.open(path, "r:") as tar:
            yield from tar
            end = tar.offset
    except (RecursionError, ValueError, ArithmeticError, LookupError) as error:
        raise tarfile.ReadError(f"a header is damaged: {error}") from None
    # tarfile takes a damaged or missing header for the end, but an archive ends with zeros.
    with path.open("rb") as file:
        file.seek(end)
        block = file.read(2**20)
        ends_with_zeros = bool(block)
        while block and ends_with_zeros:
            ends_with_zeros = not any(block)
            block = file.read(2**20)
    if not ends_with_zeros:
        raise EOFError(f"it is damaged or cut off at byte {end}")


def _of_parts(
    file: BinaryIO, parts: dict[str, tarfile.TarInfo], *, where: str
) -> list[tuple[int, int, int]]:
    """Place, length and class of the sample of these files, by ending; [] where there are none."""
    if not parts:
        return []
    images = [
        part for ending, part in parts.items() if ending in pictures.IMAGE_SUFFIXES
    ]
    if len(images) != 1 or ".cls" not in parts:
        raise ValueError(
            f"{where} has {', '.join(parts)}: one picture and a .cls were expected"
        )
    number = parts[".cls"]
    text = os.pread(file.fileno(), min(number.size, 33), number.offset_data)
    if len(text) > 32 or not re.fullmatch(rb"\s*\d{1,9}\s*", text):
        raise ValueError(f"{where}: its .cls holds {text!r}, not the number of a class")
    return [(images[0].offset_data, images[0].size, int(text))]


class Examples(_Archives):
    """TFRecord files of tf.train.Example."""

    names = r".*(tfrecord.*|-\d{5}-of-\d{5})"

    def __init__(self, root: Path, split: str, _: int = 0) -> None:
        super().__init__(root, split)
        # Each file is read once, when its damage is asked for.
        self._damage = functools.cache(_damage)

    def _samples(self, path: Path) -> Iterator[tuple[int, int, int]]:
        place = 0
        size = path.stat().st_size
        with path.open("rb") as file:
            while place < size:
                length = int.from_bytes(os.pread(file.fileno(), 8, place), "little")
                if place + BEFORE + length + AFTER > size:
                    raise EOFError("its last record is cut off, or a length is damaged")
                yield place + BEFORE, length, -1
                place += BEFORE + length + AFTER

    def _sample(self, path: Path, data: bytes, label: int) -> tuple[bytes, int]:
        damage = self._damage(path)
        if damage:
            raise ValueError(f"is in a file with damage: {damage}; copy the file again")
        try:
            parts = tf.train.Example.FromString(data).features.feature
        except DecodeError:
            raise ValueError("is no tf.train.Example") from None
        for image, name, first in _EXAMPLES:
            if image in parts and name in parts:
                files = parts[image].bytes_list.value
                labels = parts[name].int64_list.value
                if (
                    len(files) != 1
                    or len(labels) != 1
                    or not first <= labels[0] < 10**9
                ):
                    raise ValueError(
                        f"has {len(files)} {image}, and {[*labels]} as {name}: one number from "
                        f"{first} up was expected"
                    )
                return files[0], labels[0] - first
        keys = ", ".join(sorted(parts)) or "nothing"
        known = " or ".join(f"{image} and {name}" for image, name, _ in _EXAMPLES)
        raise ValueError(f"has {keys}: {known} were expected")


def _damage(path: Path) -> str:
    """What is wrong with a TFRecord file's checksums, or ""."""
    try:
        tf.data.TFRecordDataset(os.fsencode(path)).reduce(
            np.int64(0), lambda n, _: n + 1
        )
    except tf.errors.OpError as error:
        return reason_of(error)
    return ""


def _files_of(root: Path, split: str, names: str) -> list[Path]:
    """A split's files by name; ValueError if there is none, or some are missing."""
    folder = root / split
    if not folder.is_dir():
        folder = root
        names = rf"(?=(.*[-_.])?{re.escape(split)}[-_.]){names}"
    paths = sorted(path for path in folder.iterdir() if re.fullmatch(names, path.name))
    if not paths:
        raise ValueError(
            f"{folder} has no file of split {split} whose name fits {names}"
        )
    if len({_without_numbers(path.name) for path in paths}) > 1:
        raise ValueError(
            f"{folder} has files of several names for split {split}: {join(paths)}"
        )
    for path in paths:
        if not path.stat().st_size:
            raise ValueError(f"{path} has zero bytes: copy it again")
    _check_complete(paths, folder, split)
    return paths


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "0", re.sub(r"-of-\d+", "", name))


def _check_complete(paths: list[Path], folder: Path, split: str) -> None:
    """Raises ValueError where a number is missing: one of 00000-of-00016, or one in between."""
    numbers = set()
    totals = set()
    for path in paths:
        if match := re.search(r"-(\d+)-of-(\d+)", path.name):
            numbers.add(int(match[1]))
            totals.add(match[2])
    if len(totals) > 1:
        raise ValueError(
            f"{folder} has split {split} in {' and in '.join(sorted(totals))} files"
        )
    if totals:
        first = 0
        end = int(min(totals))
    elif len(paths) > 1:  # one file may have no number
        numbers = {int(re.findall(r"\d+", path.name)[-1]) for path in paths}
        first = min(numbers)
        end = max(numbers) + 1
    else:
        return

    count = end - first - sum(first <= number < end for number in numbers)
    # Without totals, where most numbers are missing, they are dates, or the like.
    if count and (totals or count < len(paths)):
        missing = next(number for number in range(first, end) if number not in numbers)
        raise ValueError(
            f"{folder}, split {split}: {count} files are missing, number {missing} first: copy "
            "them, or number them anew"
        )
