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
    labels: dict[int, str]  # number of classes of each label byte, and the file of their names


_CIFAR10 = _Layout(
    "cifar-10-batches-bin",
    {"train": [f"data_batch_{n}.bin" for n in range(1, 6)], "val": ["test_batch.bin"]},
    {10: "batches.meta.txt"},
)
_CIFAR100 = _Layout(
    "cifar-100-binary",
    {"train": ["train.bin"], "val": ["test.bin"]},
    {20: "coarse_label_names.txt", 100: "fine_label_names.txt"},
)


class Cifar:
    """One split, as a `source.Source`, of CIFAR-10 (10 `classes`) or CIFAR-100 (20 or 100).

    Reads to {"image": uint8 [32, 32, 3], "label": int32 scalar}. The files are read once, here,
    and kept in memory: 154 MB for train, 31 MB for val. So reading cannot fail later.

    Raises ValueError, naming the file, when one is missing, cut, or holds a label that is no class.
    """

    def __init__(self, root: Path, split: str, classes: int):
        layout = _CIFAR10 if classes in _CIFAR10.labels else _CIFAR100
        if split not in layout.splits:
            raise ValueError(f"{layout.folder} has no split {split!r}, only {[*layout.splits]}")
        root = Path(root, layout.folder) if Path(root, layout.folder).is_dir() else Path(root)
        for name in (*layout.splits["train"], *layout.splits["val"], *layout.labels.values()):
            if not (root / name).is_file():
                raise ValueError(f"{root / name} is missing: unpack the archive again")
        whole = (root / layout.splits["val"][0]).stat().st_size * 5 // len(layout.splits["train"])
        for path in (root / name for name in layout.splits["train"]):
            # The archives have five times as many records to train on.
            if path.stat().st_size != whole or whole % (len(layout.labels) + _PIXELS) or not whole:
                raise ValueError(f"{path} or the val split was cut: unpack the archive again")
        self.num_classes, self._label = classes, [*layout.labels].index(classes)
        self.class_names = (root / layout.labels[classes]).read_text().split()
        parts = {name: _load(root / name, layout) for name in layout.splits[split]}
        self._listing = [(name, zlib.crc32(part)) for name, part in parts.items()]
        with tf.device("CPU:0"):  # where it is read; it must not take GPU memory
            self._records = tf.constant(np.concatenate([*parts.values()]))

    def __len__(self) -> int:
        return int(self._records.shape[0])

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        record = self._records[index]
        planes, label = tf.reshape(record[-_PIXELS:], [3, 32, 32]), record[self._label]
        return {"image": tf.transpose(planes, [1, 2, 0]), "label": tf.cast(label, tf.int32)}

    def explain(self, index: int) -> str | None:
        """None: all faults are found when the files are opened."""

    def fingerprint(self) -> str:
        """SHA-256 over names and checksums of the split's files."""
        return source.digest([*self._listing, ("label", self._label)])


def cifar10(root: Path, split: str, _: int = 0) -> Cifar:
    return Cifar(root, split, 10)


def cifar100(root: Path, split: str, num_classes: int = 0) -> Cifar:
    """With the 100 fine labels, or the 20 coarse ones where that many are asked for."""
    return Cifar(root, split, 20 if num_classes == 20 else 100)


def _load(path: Path, layout: _Layout) -> np.ndarray:
    """The file's records, uint8 [n, bytes of a record]."""
    records = np.fromfile(path, np.uint8).reshape(-1, len(layout.labels) + _PIXELS)
    for place, classes in enumerate(layout.labels):
        if len(wrong := np.flatnonzero(records[:, place] >= classes)):
            raise ValueError(f"{path}, record {wrong[0]}: its label is above {classes - 1}")
    return records
