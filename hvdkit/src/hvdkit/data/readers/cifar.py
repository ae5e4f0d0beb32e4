"""CIFAR-10 and CIFAR-100, binary versions (https://www.cs.toronto.edu/~kriz/cifar.html).

The folder is what the archive unpacks to, or the one that holds it. A record is a byte for each
label (in CIFAR-100 the coarse one first), then 32 x 32 red, green and blue values.
"""

import zlib
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvdkit.data import source

_PIXELS = 3 * 32 * 32  # bytes of a picture


class Cifar:
    """One split, as a `source.Source`.

    Reads to {"image": uint8 [32, 32, 3], "label": int32 scalar}. The files are read once, here,
    and kept in memory: 154 MB for train, 31 MB for val. So reading cannot fail later.

    Raises ValueError, naming the file, when one is missing, cut, or holds a label that is no class.
    """

    folder: str  # the archive unpacks to it
    train: tuple[str, ...]  # the files of the training split
    val: str
    names: str  # the file of the classes' names
    num_classes: int
    labels: int  # bytes before the pixels of a record; the last of them is read

    def __init__(self, root: Path, split: str, _: int = 0):
        splits = {"train": self.train, "val": (self.val,)}
        if split not in splits:
            raise ValueError(
                f"{self.folder} has no split {split!r}, only train and val"
            )
        root = Path(root)
        if (root / self.folder).is_dir():
            root = root / self.folder
        for name in (*self.train, self.val, self.names):
            if not (root / name).is_file():
                raise ValueError(f"{root / name} is missing: unpack the archive again")
        # The archives have five times as many records to train on as to validate on.
        whole = (root / self.val).stat().st_size * 5 // len(self.train)
        for name in self.train:
            size = (root / name).stat().st_size
            if size != whole or whole % (self.labels + _PIXELS) or not whole:
                raise ValueError(
                    f"{root / name} or the val split was cut: unpack the archive again"
                )
        self.class_names = (root / self.names).read_text().split()
        parts = {name: self._load(root / name) for name in splits[split]}
        self._listing = [
            (name, zlib.crc32(part.tobytes())) for name, part in parts.items()
        ]
        # The input pipeline reads the table on the CPU; it must not take GPU memory.
        with tf.device("CPU:0"):
            self._records = tf.constant(np.concatenate([*parts.values()]))

    def _load(self, path: Path) -> np.ndarray:
        """The file's records, uint8 [n, bytes of a record]."""
        records = np.fromfile(path, np.uint8).reshape(-1, self.labels + _PIXELS)
        wrong = np.flatnonzero(records[:, self.labels - 1] >= self.num_classes)
        if len(wrong):
            highest = self.num_classes - 1
            raise ValueError(f"{path}, record {wrong[0]}: its label is above {highest}")
        return records

    def __len__(self) -> int:
        return int(self._records.shape[0])

    def read(self, index: tf.Tensor) -> source.Parts:
        record = self._records[index]
        planes = tf.reshape(record[-_PIXELS:], [3, 32, 32])
        label = record[-_PIXELS - 1]
        return {
            "image": tf.transpose(planes, [1, 2, 0]),
            "label": tf.cast(label, tf.int32),
        }

    def explain(self, index: int) -> str | None:
        """None: all faults are found when the files are opened."""

    def fingerprint(self) -> str:
        """SHA-256 over names and checksums of the split's files."""
        return source.digest([*self._listing, ("label", self.labels - 1)])


class Cifar10(Cifar):
    folder = "cifar-10-batches-bin"
    train = tuple(f"data_batch_{n}.bin" for n in range(1, 6))
    val = "test_batch.bin"
    names = "batches.meta.txt"
    num_classes = 10
    labels = 1


class Cifar100(Cifar):
    """With the 100 fine labels."""

    folder = "cifar-100-binary"
    train = ("train.bin",)
    val = "test.bin"
    names = "fine_label_names.txt"
    num_classes = 100
    labels = 2
