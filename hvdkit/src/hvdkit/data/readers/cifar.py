"""CIFAR-10 and CIFAR-100, binary versions (https://www.cs.toronto.edu/~kriz/cifar.html).

The folder is what the archive unpacks to, or the one that holds it. A record is a byte for each
label (in CIFAR-100 the coarse one first), then 32 x 32 red, green and blue values.
"""

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from hvdkit.data import source

_PIXELS = 3 * 32 * 32  # bytes


class _Layout(NamedTuple):
    folder: str  # what the archive unpacks to
    splits: dict[str, list[str]]
    before: int  # bytes of labels before the pixels of a record, the label last
    classes: int
    names: str  # file


_CIFAR10 = _Layout(
    "cifar-10-batches-bin",
    {"train": [f"data_batch_{n}.bin" for n in range(1, 6)], "val": ["test_batch.bin"]},
    before=1,
    classes=10,
    names="batches.meta.txt",
)
_CIFAR100 = _Layout(
    "cifar-100-binary",
    {"train": ["train.bin"], "val": ["test.bin"]},
    before=2,
    classes=100,
    names="fine_label_names.txt",
)


class Cifar:
    """One split, as a `source.Source`.

    Reads to {"image": uint8 [32, 32, 3], "label": int32 scalar}. The files are read once, here,
    and kept in memory: 154 MB for train, 31 MB for val. So reading cannot fail later.

    Raises ValueError, naming the file, when one is missing, cut, or holds a label that is no class.
    """

    def __init__(self, root: Path, split: str, layout: _Layout):
        if split not in layout.splits:
            raise ValueError(f"{layout.folder} has no split {split!r}, only {[*layout.splits]}")
        root = Path(root, layout.folder) if Path(root, layout.folder).is_dir() else Path(root)
        for name in (*layout.splits["train"], *layout.splits["val"], layout.names):
            if not (root / name).is_file():
                raise ValueError(f"{root / name} is missing: unpack the archive again")
        whole = (root / layout.splits["val"][0]).stat().st_size * 5 // len(layout.splits["train"])
        for path in (root / name for name in layout.splits["train"]):
            # The archives have five times as many records to train on.
            if path.stat().st_size != whole or whole % (layout.before + _PIXELS) or not whole:
                raise ValueError(f"{path} or the val split was cut: unpack the archive again")
        self.num_classes = layout.classes
        self.class_names = (root / layout.names).read_text().split()
        parts = {name: _load(root / name, layout) for name in layout.splits[split]}
        self._listing = [(name, zlib.crc32(part)) for name, part in parts.items()]
        with tf.device("CPU:0"):  # where it is read; it must not take GPU memory
            self._records = tf.constant(np.concatenate([*parts.values()]))

    def __len__(self) -> int:
        return int(self._records.shape[0])

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        record = self._records[index]
        planes, label = tf.reshape(record[-_PIXELS:], [3, 32, 32]), record[-_PIXELS - 1]
        return {"image": tf.transpose(planes, [1, 2, 0]), "label": tf.cast(label, tf.int32)}

    def explain(self, index: int) -> str | None:
        """None: all faults are found when the files are opened."""

    def fingerprint(self) -> str:
        """SHA-256 over names and checksums of the split's files."""
        return source.digest(self._listing)


def cifar10(root: Path, split: str, _: int = 0) -> Cifar:
    return Cifar(root, split, _CIFAR10)


def cifar100(root: Path, split: str, _: int = 0) -> Cifar:
    """With the 100 fine labels."""
    return Cifar(root, split, _CIFAR100)


def _load(path: Path, layout: _Layout) -> np.ndarray:
    """The file's records, uint8 [n, bytes of a record]."""
    records = np.fromfile(path, np.uint8).reshape(-1, layout.before + _PIXELS)
    if len(wrong := np.flatnonzero(records[:, layout.before - 1] >= layout.classes)):
        raise ValueError(f"{path}, record {wrong[0]}: its label is above {layout.classes - 1}")
    return records
