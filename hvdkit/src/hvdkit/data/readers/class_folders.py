"""A folder a class, as ImageNet is usually laid out (arXiv:1409.0575).

ROOT/train/CLASS/*.jpg          .jpeg, .png and .webp too, in any case; splits may have other names
ROOT/val/CLASS/*.jpg            the same classes

Where ROOT/SPLIT is not there, layout.py finds what means it: training, valid, CLASS/train.

Labels are the places of the classes in their sorted order. A class is a folder's name.
"""

import filecmp
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvdkit.data import contents, shared_listing, source, spelling
from hvdkit.data.readers import layout, listing, pictures
from hvdkit.data.readers.layout import Place
from hvdkit.data.readers.listing import Names, Packed
from hvdkit.data.readers.pictures import OTHER_SUFFIXES
from hvdkit.logs import join


class ClassFolders:
    """One split, as a `source.Source`: samples in the order of classes, then of file names.

    Reads to {"image": uint8 [H, W, 3], "label": int32 scalar, "file": the picture's bytes}. The
    folders are listed once, here; no file is opened. The caller compares the classes of two
    splits.

    Raises ValueError, naming the folder, if a split is missing, a class is empty, something in it
    would be left out, or a file has another size on this host.
    """

    def __init__(self, root: Path, split: str, _: int = 0):
        self.root = Path(root)
        self._split = split
        key = ("class_folders", str(root), split)
        listed = shared_listing.found(key, lambda: _list(self.root, split))
        self.class_names, folders, counts, text, lengths = listed
        self.num_classes = len(self.class_names)
        self._files = Names(text, lengths)
        # The place of each class's first sample, and the number of samples.
        self._starts = np.cumsum([0, *counts], dtype=np.int64)
        self._folders = [self.root / folder for folder in folders]
        self._sizes = listing.sizes(key, self._sampled_files)
        self.contents = contents.known(self.root, split)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: tf.Tensor) -> source.Parts:
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
        return self._paths(self.class_names)

    def files(self) -> Iterator[bytes]:
        """Each file's path."""
        return self._paths([folder.relative_to(self.root) for folder in self._folders])

    picture_files = files

    def _paths(self, folders: Sequence[str | Path]) -> Iterator[bytes]:
        """The path of each picture; `folders`: that of each class."""
        names = [os.fsencode(folder) for folder in folders]
        folder_of_each = np.repeat(names, self.class_counts()).tolist()
        return (b"%s/%s" % pair for pair in zip(folder_of_each, self._files))

    def shared_with(self, other: "ClassFolders") -> int:
        """How many pictures, of the first 100 of one name and class, are equal byte by byte."""
        own_files = dict(zip(self.sample_names(), self.files()))
        other_files = dict(zip(other.sample_names(), other.files()))
        names = sorted(own_files.keys() & other_files.keys())
        count = 0
        for name in names[:100]:
            own_path = self.root / os.fsdecode(own_files[name])
            other_path = other.root / os.fsdecode(other_files[name])
            count += filecmp.cmp(own_path, other_path, shallow=False)
        return count

    def class_counts(self) -> np.ndarray:
        """Samples of each class, integer [classes]."""
        return np.diff(self._starts)

    def fingerprint(self) -> str:
        """SHA-256 over the files' names, and the sizes of at most 1,000 spread over them."""
        names = [self._split, *self.class_names, self._files.digest()]
        numbers = [str(self._starts.tolist()), str(self._sizes.tolist())]
        return source.digest((part, 0) for part in names + numbers)

    def _folder(self, index: int) -> Path:
        return self._folders[np.searchsorted(self._starts, index, side="right") - 1]

    def _sampled_files(self) -> list[Path]:
        indices = source.sampled(len(self))
        return [
            self._folder(i) / name
            for i, name in zip(indices, self._files.pick(indices))
        ]


def _list(root: Path, split: str) -> tuple[list[str], list[str], np.ndarray, *Packed]:
    """Classes, the folder of each in `root`, how many pictures each has, and these."""
    places, left_out = layout.arranged(root, split=split)
    for folder in left_out if split else ():
        for below in sorted(folder.iterdir()):
            words = {below.name, layout.split_of(below.name)} - {""}
            is_of_split = bool(words & {split, layout.split_of(split)})
            if is_of_split and below.is_dir() and not any(listing.files(below)):
                raise ValueError(
                    f"{below} has no picture: add some, or move {folder.name} away"
                )
    for place in places:
        if place.kind:
            raise ValueError(
                f"{place.folder} and others beside it are pictures and masks, no classes: hvdkit "
                "start finds out how to read them; if they are classes, rename them"
            )
    classes = {}
    for (_, label), folders in sorted(layout.by_class(places).items()):
        classes[label] = folders[0]
    for place in places:
        if not place.label and _pictures(place):
            raise _not_sorted(place.folder, join(_pictures(place)))
    if not classes:
        raise _not_sorted(root / split, "it has no folder")
    spelling.check_classes(classes, places[0].folder)

    folder_names = [str(place.folder.relative_to(root)) for place in classes.values()]
    counts = np.array([place.picture_count for place in classes.values()], np.int64)
    text = np.concatenate([place.files[0] for place in classes.values()])
    lengths = np.concatenate([place.files[1] for place in classes.values()])
    return list(classes), folder_names, counts, text, lengths


def _not_sorted(folder: Path, holds: str) -> ValueError:
    return ValueError(
        f"{folder} must hold a folder for each class, and no picture beside them ({holds}): sort "
        "pictures in, ImageNet's val by synsets"
    )


def _pictures(place: Place) -> list[str]:
    """Its pictures, and its files of other formats."""
    others = [name for name in place.others if name.lower().endswith(OTHER_SUFFIXES)]
    return listing.unpacked(place.files) + others
