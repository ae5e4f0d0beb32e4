"""A folder a class, as ImageNet is usually laid out (arXiv:1409.0575).

ROOT/train/CLASS/*.jpg          .jpeg, .png and .webp too, in any case; splits may have other names
ROOT/val/CLASS/*.jpg            the same classes

Labels are the places of the classes in their sorted order. A class is a folder's name.
"""

import filecmp
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvdkit.data import contents, shared_listing, source
from hvdkit.data.readers import listing, pictures
from hvdkit.data.readers.listing import Names, Packed, packed
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES, OTHER_SUFFIXES
from hvdkit.logs import join

_NOTES = (".txt", ".md", ".csv", ".json", ".xml", ".html", ".pdf")  # which may lie beside pictures


class ClassFolders:
    """One split, as a `source.Source`: samples in the order of classes, then of file names.

    Reads to {"image": uint8 [H, W, 3], "label": int32 scalar, "file": the picture's bytes}. The
    folders are listed once, here; no file is opened. The caller compares the classes of two
    splits.

    Raises ValueError, naming the folder, if a split is missing, a class is empty, something in it
    would be left out, or a file has another size on this host.
    """

    def __init__(self, root: Path, split: str, _: int = 0):
        self.root, self._split = Path(root), split
        key = ("class_folders", str(root), split)
        listed = shared_listing.found(key, lambda: _list(self.root, split))
        self.class_names, counts, *names = listed
        self._files, self._starts = Names(*names), np.cumsum([0, *counts], dtype=np.int64)
        self.num_classes = len(self.class_names)
        self._folders = [self.root / split / name for name in self.class_names]
        self._sizes = listing.sizes(key, self._looked_at)
        self.contents = contents.known(self.root, split)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        # The class is the last one that starts at or before the sample.
        label = tf.searchsorted(self._starts, index[None], side="right")[0] - 1
        folder = tf.gather([os.fsencode(folder) for folder in self._folders], label)
        path = tf.strings.join([folder, "/", self._files.at(index)])
        file = tf.io.read_file(path)
        return {"image": pictures.decode_image(file), "label": label, "file": file}

    def explain(self, index: int) -> str | None:
        return pictures.explained(self.read, index, self.picture_file(index))

    def picture_file(self, index: int) -> Path:
        return self._folder(index) / self._files[index]

    def sample_names(self) -> Iterator[bytes]:
        """Each picture's path in its split."""
        folders = np.repeat([os.fsencode(name) for name in self.class_names], self.class_counts())
        return (b"%s/%s" % pair for pair in zip(folders.tolist(), self._files))

    def files(self) -> Iterator[bytes]:
        """Each file's path."""
        return (os.fsencode(Path(self._split) / os.fsdecode(name)) for name in self.sample_names())

    def shared_with(self, other: "ClassFolders") -> int:
        """How many pictures, of the first 100 of one name and class, are equal byte by byte."""
        names = sorted({*self.sample_names()}.intersection(other.sample_names()))
        paths = [[s.root / s._split / os.fsdecode(n) for s in (self, other)] for n in names[:100]]
        return sum(filecmp.cmp(one, two, shallow=False) for one, two in paths)

    def class_counts(self) -> np.ndarray:
        """Samples of each class, integer [classes]."""
        return np.diff(self._starts)

    def fingerprint(self) -> str:
        """SHA-256 over the files' names, and the sizes of at most 1,000 spread over them."""
        numbers = [self._starts.tolist(), self._sizes.tolist()]
        parts = [self._split, *self.class_names, self._files.digest(), *map(str, numbers)]
        return source.digest((part, 0) for part in parts)

    def _folder(self, index: int) -> Path:
        return self._folders[np.searchsorted(self._starts, index, side="right") - 1]

    def _looked_at(self) -> list[Path]:
        indices = source.sampled(len(self))
        return [self._folder(i) / name for i, name in zip(indices, self._files.pick(indices))]


def _list(root: Path, split: str) -> tuple[list[str], np.ndarray, *Packed]:
    """Classes, how many pictures each has, and the pictures without their folders."""
    if not (root / split).is_dir():
        raise ValueError(f"{root / split} is missing; put a folder for each class there")
    classes = listing.folder_names(root / split)
    loose = listing.contents(root / split, IMAGE_SUFFIXES + OTHER_SUFFIXES)[0]
    if loose or not classes:
        rule = "must hold a folder for each class, and no picture beside them"
        how = "sort pictures in, ImageNet's val by synsets"
        raise ValueError(f"{root / split} {rule} ({join(loose) or 'it has no folder'}): {how}")
    folders = [root / split / name for name in classes]
    with ThreadPoolExecutor(listing.THREADS) as pool:
        parts = [*pool.map(_pictures, folders)]
    counts = np.array([len(lengths) for _, lengths in parts], np.int64)
    return classes, counts, *map(np.concatenate, zip(*parts))


def _pictures(folder: Path) -> Packed:
    """The `packed` names of a class's pictures; ValueError if something would be left out."""

    def has_pictures(entry: os.DirEntry) -> bool:
        if entry.is_dir():
            return any(listing.contents(folder / entry.name, ()))
        return not entry.name.lower().endswith(_NOTES)

    found, rest = listing.contents(folder, IMAGE_SUFFIXES)
    if others := [entry.name for entry in rest if has_pictures(entry)]:
        how = f"make others {' or '.join(IMAGE_SUFFIXES)}, and remove the rest"
        what = f"{join(others)}, which would be left out: move pictures of folders up"
        raise ValueError(f"{folder} holds {what}, {how}")
    if not found:
        what = f"no picture ({', '.join(IMAGE_SUFFIXES)})"
        raise ValueError(f"{folder} holds {what}; add some, or remove the class from every split")
    return packed(found)
