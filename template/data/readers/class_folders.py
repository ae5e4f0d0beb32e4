"""A folder a class, as ImageNet is usually laid out (arXiv:1409.0575).

ROOT/train/CLASS/*.jpg          .jpeg and .png too, in capitals too
ROOT/val/CLASS/*.jpg            the same classes

Labels are the places of the classes in their sorted order. A class is a folder's name.
"""

import os
from pathlib import Path

import tensorflow as tf

from data import source
from data.readers import listing, pictures
from data.readers.pictures import IMAGE_SUFFIXES
from engine.words import some

SPLITS = ("train", "val")
_SIZES = 10_000  # most files whose sizes go into a fingerprint: each is a question to the server


class ClassFolders:
    """One split, as a `source.Source`: samples in the order of classes, then of file names.

    Reads to {"image": uint8 [H, W, 3], "label": int32 scalar}. The folders are listed once, here;
    no file is opened.

    Raises ValueError, naming the folder, when a split is missing or flat, a class is empty, or
    train and val hold different classes.
    """

    def __init__(self, root: Path, split: str):
        self.root = Path(root)
        self.class_names = _classes(self.root, split)
        self.num_classes = len(self.class_names)
        self._paths: list[str] = []
        labels = []
        for label, name in enumerate(self.class_names):
            found = _pictures(self.root / split / name)
            self._paths += [f"{split}/{name}/{file}" for file in found]
            labels += [label] * len(found)
        with tf.device("CPU:0"):  # where files are read
            self._path_tensor = tf.constant(self._paths)
            self._labels = tf.constant(labels, tf.int32)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads {"image": uint8 [H, W, 3], "label": int32 scalar}; index: int64 scalar.

        Raises tf.errors.OpError (when it runs) for a file that cannot be read or decoded.
        """
        data = tf.io.read_file(tf.strings.join([str(self.root), "/", self._path_tensor[index]]))
        return {"image": pictures.decode_image(data), "label": self._labels[index]}

    def explain(self, index: int) -> str | None:
        """What is wrong with sample `index` (0 .. len - 1), or None when it reads well."""
        path = self.picture_file(index)
        try:
            pictures.load(path)
            self.read(tf.constant(index, tf.int64))
        except ValueError as problem:
            return str(problem)
        except tf.errors.OpError as error:
            return f"{path} cannot be read: {error.message}; replace it"
        return None

    def picture_file(self, index: int) -> Path:
        """The file that sample `index`'s image is decoded from."""
        return self.root / self._paths[index]

    def fingerprint(self) -> str:
        """SHA-256 over the files' names, and the sizes of at most 10,000 spread over them.

        Raises OSError when a file has gone since the folders were listed.
        """
        sampled = self._paths[:: -(-len(self) // _SIZES)]
        sizes = listing.fingerprint(self.root, sampled)
        return source.digest([(sizes, 0), *((path, 0) for path in self._paths)])


def _classes(root: Path, split: str) -> list[str]:
    """Names of the split's classes, sorted; they are those of the other split too."""
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; give the one that holds train/ and val/")
    if not (root / split).is_dir():
        there = some(sorted(entry.name for entry in root.iterdir() if entry.is_dir()))
        raise ValueError(
            f"{root / split} is missing; put a folder for each class there (folders of {root}: "
            f"{there or 'none'})"
        )
    classes = {name: _folders(root / name) for name in {split, *SPLITS} if (root / name).is_dir()}
    if not classes[split]:
        raise ValueError(
            f"{root / split} holds no class folders; sort its pictures into one folder a class"
        )
    for name, others in classes.items():
        if differ := sorted(set(classes[split]) ^ set(others)):
            raise ValueError(
                f"{root / split} and {root / name} hold different classes: only one of the two "
                f"has {some(differ)}; labels would not agree, so make them the same"
            )
    return classes[split]


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def _pictures(folder: Path) -> list[str]:
    names = (name for name in os.listdir(folder) if not name.startswith("."))
    found = sorted(name for name in names if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES)
    if not found:
        raise ValueError(
            f"{folder} holds no picture ({', '.join(IMAGE_SUFFIXES)}); add some, or take the "
            "class out of train and val"
        )
    return found
