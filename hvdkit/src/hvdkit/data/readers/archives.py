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

_THREADS = 16  # that wait for the disk
# Key of the picture, key of the class, the first class.
_EXAMPLES = (("image/encoded", "image/class/label", 1), ("image", "label", 0))


class _Archives(source.ReadAhead):
    """The files of a split one after the other, as a `source.Source` of pictures with a class.

    ValueError, naming the file, if none is there, one is missing by its name, or cannot be read.
    """

    kind = "class"
    form = dict.fromkeys(("file", "fault"), tf.TensorSpec([], tf.string))
    form["label"] = tf.TensorSpec([], tf.int64)
    names = ""  # of files, a regular expression

    def __init__(self, root: Path, split: str, _: int = 0) -> None:
        self._files = _found(Path(root), split, self.names)
        with ThreadPoolExecutor(_THREADS) as threads:
            places = [*threads.map(self._listed, self._files)]
        self._ends = np.cumsum([len(part) for part in places])
        if not len(self):
            raise ValueError(f"{self._files[0].parent}: the files of split {split} hold no sample")
        self._places = np.concatenate([part for part in places if len(part)])
        self.bytes_each = float(self._places[:, 1].mean())

    def __len__(self) -> int:
        return int(self._ends[-1])

    def fetch(self, indices: np.ndarray) -> list[np.ndarray]:
        found = [self._one(index) for index in indices.tolist()]
        return [*map(np.array, zip(*found), (object, object, np.int64))]

    def decode(self, parts: source.Parts) -> source.Parts:
        file, label = source.sound(parts, "file"), tf.cast(parts["label"], tf.int32)
        return {"image": pictures.decode_image(file), "label": label, "file": file}

    def explain(self, index: int) -> str | None:
        data, fault, _ = self._one(index)
        try:
            fault = fault or pictures.refused(data)
            pictures.decode_image(tf.constant(data))
        except tf.errors.OpError as error:
            fault = fault or f"cannot be decoded: {reason_of(error)}"
        file = self._files[int(np.searchsorted(self._ends, index, "right"))]
        where = f"{file}, sample {index} (at byte {self._places[index, 0]})"
        return f"{where} {fault}" if fault else None

    def fingerprint(self) -> str:
        return source.digest((path.name, path.stat().st_size) for path in self._files)

    def _one(self, index: int) -> tuple[bytes, str, int]:
        """The picture's file, what is wrong with the sample, or "", and its class."""
        file = int(np.searchsorted(self._ends, index, "right"))
        offset, length, label = self._places[index].tolist()
        try:
            with self._files[file].open("rb") as opened:
                data = os.pread(opened.fileno(), length, offset)
            if len(data) < length:
                raise ValueError("is cut off")
            data, label = self._sample(self._files[file], data, label)
        except (ValueError, OSError) as error:
            return b"", str(error), -1
        return data, "", label

    def _listed(self, path: Path) -> np.ndarray:
        """Place, length and class of each sample of a file, int64 [n, 3]."""
        try:
            return np.array([*self._samples(path)], np.int64).reshape(-1, 3)
        except (tarfile.TarError, tf.errors.OpError, EOFError) as error:
            raise ValueError(f"{path} cannot be read: {error}; copy it again") from None

    def _samples(self, path: Path) -> Iterator[tuple[int, int, int]]:
        raise NotImplementedError

    def _sample(self, path: Path, data: bytes, label: int) -> tuple[bytes, int]:
        """The picture's file and class, of what lies in a sample's place and was listed there."""
        return data, label


class Tars(_Archives):
    """WebDataset: sample NAME is all files whose name begins with NAME and a dot."""

    names = r".*\.tar"

    def _samples(self, path: Path) -> Iterator[tuple[int, int, int]]:
        now, parts = "", {}
        with path.open("rb") as file:
            for member in _members(path):
                if member.isdir() or os.path.basename(member.name).startswith("."):
                    continue
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    raise ValueError(f"{path}: {member.name} is a link: tar -h --hard-dereference")
                folder, name = os.path.split(member.name)
                name, _, ending = name.partition(".")
                if (key := f"{folder}/{name}") != now:
                    yield from _of_parts(file, parts, where=f"{path}, sample {now[1:]}")
                    now, parts = key, {}
                if (ending := f".{ending.lower()}") in parts:
                    raise ValueError(f"{path}, sample {now[1:]} has {ending} twice")
                parts[ending] = member
            yield from _of_parts(file, parts, where=f"{path}, sample {now[1:]}")


def _members(path: Path) -> Iterator[tarfile.TarInfo]:
    """Raises tarfile.TarError or EOFError where the archive is damaged, cut off or hostile."""
    try:
        with tarfile.open(path, "r:") as tar:
            yield from tar
            end = tar.offset
    except (RecursionError, ValueError, ArithmeticError, LookupError) as error:
        raise tarfile.ReadError(f"a header is damaged: {error}") from None
    with path.open("rb") as file:  # tarfile takes a damaged or missing header for the end
        file.seek(end)
        rest = [any(block) for block in iter(lambda: file.read(2**20), b"")]
    if any(rest) or not rest:  # an archive ends with zeros
        raise EOFError(f"it is damaged or cut off at byte {end}")


def _of_parts(
    file: BinaryIO, parts: dict[str, tarfile.TarInfo], *, where: str
) -> list[tuple[int, int, int]]:
    """Place, length and class of the sample that these files, by ending, make; none of none."""
    if not parts:
        return []
    images = [part for ending, part in parts.items() if ending in pictures.IMAGE_SUFFIXES]
    if len(images) != 1 or ".cls" not in parts:
        raise ValueError(f"{where} has {', '.join(parts)}: one picture and a .cls were expected")
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
        self._damage = functools.cache(_damage)  # each file once, when it is first read

    def _samples(self, path: Path) -> Iterator[tuple[int, int, int]]:
        place, size = 0, path.stat().st_size
        with path.open("rb") as file:
            while place < size:
                length = int.from_bytes(os.pread(file.fileno(), 8, place), "little")
                if place + BEFORE + length + AFTER > size:
                    raise EOFError("its last record is cut off, or a length is damaged")
                yield place + BEFORE, length, -1
                place += BEFORE + length + AFTER

    def _sample(self, path: Path, data: bytes, label: int) -> tuple[bytes, int]:
        if damage := self._damage(path):
            raise ValueError(f"is in a file with damage: {damage}; copy the file again")
        try:
            parts = tf.train.Example.FromString(data).features.feature
        except DecodeError:
            raise ValueError("is no tf.train.Example") from None
        for image, name, first in _EXAMPLES:
            if image in parts and name in parts:
                files, labels = parts[image].bytes_list.value, parts[name].int64_list.value
                if len(files) != 1 or len(labels) != 1 or not first <= labels[0] < 10**9:
                    what = f"has {len(files)} {image}, and {[*labels]} as {name}"
                    raise ValueError(f"{what}: one number from {first} up was expected")
                return files[0], labels[0] - first
        known = " or ".join(f"{image} and {name}" for image, name, _ in _EXAMPLES)
        raise ValueError(f"has {', '.join(sorted(parts)) or 'nothing'}: {known} were expected")


def _damage(path: Path) -> str:
    """What is wrong with a TFRecord file's checksums, or ""."""
    try:
        tf.data.TFRecordDataset(os.fsencode(path)).reduce(np.int64(0), lambda n, _: n + 1)
    except tf.errors.OpError as error:
        return reason_of(error)
    return ""


def _found(root: Path, split: str, names: str) -> list[Path]:
    """A split's files by name; ValueError if there is none, or some are missing."""
    folder = root / split if (root / split).is_dir() else root
    if folder == root:
        names = rf"(?=(.*[-_.])?{re.escape(split)}[-_.]){names}"
    found = sorted(path for path in folder.iterdir() if re.fullmatch(names, path.name))
    if not found:
        raise ValueError(f"{folder} has no file of split {split} whose name fits {names}")
    if len({re.sub(r"\d+", "0", re.sub(r"-of-\d+", "", path.name)) for path in found}) > 1:
        raise ValueError(f"{folder} has files of several names for split {split}: {join(found)}")
    if empty := [path for path in found if not path.stat().st_size]:
        raise ValueError(f"{empty[0]} has zero bytes: copy it again")
    of = {match[2] for path in found if (match := re.search(r"-(\d+)-of-(\d+)", path.name))}
    if len(of) > 1:
        raise ValueError(f"{folder} has split {split} in {' and in '.join(sorted(of))} files")
    for count in of:
        there = {int(m[1]) for p in found if (m := re.search(rf"-(\d+)-of-{count}", p.name))}
        if missing := [number for number in range(int(count)) if number not in there]:
            what = f"{len(missing)} of {int(count)} files are missing, number {missing[0]} first"
            raise ValueError(f"{folder}, split {split}: {what}")
    numbers = {int(re.findall(r"\d+", path.name)[-1]) for path in found[:-1] and found}
    lacking = max(numbers, default=-1) + 1 - min(numbers, default=0) - len(numbers)
    if 0 < lacking < len(found):  # more than that: dates, or the like
        first = next(n for n in range(min(numbers), max(numbers)) if n not in numbers)
        what = f"{lacking} files between {found[0].name} and {found[-1].name} are missing"
        how = f"number {first} first: copy them, or number them anew"
        raise ValueError(f"{folder}, split {split}: {what}, {how}")
    return found
