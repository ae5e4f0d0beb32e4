"""What CIFAR-10's and CIFAR-100's binary versions have in common: records of one length.

A record is a label of one byte or two, then 32 x 32 red, green and blue values.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from hvdkit.data import source

SIDE = 32  # pixels, height and width
_PIXELS = 3 * SIDE * SIDE  # bytes


class Layout(NamedTuple):
    """The files of one of the two."""

    name: str
    archive: str
    folder: str  # what the archive unpacks to
    files: Mapping[str, tuple[str, ...]]  # of each split
    classes: tuple[int, ...]  # how many each label byte tells apart
    shares: Mapping[str, int]  # records of each file are to each other as these

    @property
    def record(self) -> int:
        """Bytes of a record."""
        return len(self.classes) + _PIXELS


class Cifar:
    """One split, as a `source.Source`.

    Reads to {"image": uint8 [32, 32, 3], "label": int32 scalar}. The files are read once, here,
    and kept in memory: 154 MB for train, 31 MB for val. So no read fails later.

    Args:
      root: the folder of the .bin files, or one with the archive's folder in it.
      label: which of the label bytes is read.

    Raises ValueError, naming the file, when one is missing, has a size that is no whole number of
    records or does not go with the others', or holds a label that is no class.
    """

    def __init__(self, root: Path, split: str, layout: Layout, label: int):
        root = Path(root)
        if (root / layout.folder).is_dir():
            root = root / layout.folder
        if split not in layout.files:
            raise ValueError(f"{layout.name} has no split {split!r}; there are {[*layout.files]}")
        self.num_classes, self._label, self._record = layout.classes[label], label, layout.record
        counts = _counts(root, layout)
        parts = [_load(root / name, counts[name], layout) for name in layout.files[split]]
        self._listing = [(n, zlib.crc32(p)) for n, p in zip(layout.files[split], parts)]
        with tf.device("CPU:0"):  # where it is read; it must not fill a GPU
            self._records = tf.constant(np.concatenate(parts))

    def __len__(self) -> int:
        return int(self._records.shape[0])

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads {"image": uint8 [32, 32, 3], "label": int32 scalar}; index: int64 scalar."""
        record = self._records[index]
        planes = tf.reshape(record[self._record - _PIXELS :], [3, SIDE, SIDE])
        label = tf.cast(record[self._label], tf.int32)
        return {"image": tf.transpose(planes, [1, 2, 0]), "label": label}

    def explain(self, index: int) -> str | None:
        """None: all that can be wrong is found when the files are opened."""
        return None

    def fingerprint(self) -> str:
        """SHA-256 over names and checksums of the split's files; their sizes tell nothing."""
        return source.digest([*self._listing, ("label", self._label)])


def _counts(root: Path, layout: Layout) -> dict[str, int]:
    """Records of each file, of all splits."""
    counts = {}
    for name in layout.shares:
        if not (root / name).is_file():
            raise ValueError(
                f"{root / name} is missing; unpack {layout.archive} and give the folder of its "
                ".bin files"
            )
        size = (root / name).stat().st_size
        if size == 0 or size % layout.record:
            raise ValueError(
                f"{root / name} has {size} bytes, which is no whole number of records of "
                f"{layout.record} bytes; it was cut or changed, so unpack it again"
            )
        counts[name] = size // layout.record
    usual = max(counts[name] // share for name, share in layout.shares.items())
    for name, share in layout.shares.items():
        if counts[name] != usual * share:
            raise ValueError(
                f"{root / name} has {counts[name]} records, by the other files there should be "
                f"{usual * share}; it was cut, so unpack it again (the original has "
                f"{10000 * share})"
            )
    return counts


def _load(path: Path, count: int, layout: Layout) -> np.ndarray:
    """The file's records, uint8 [n, bytes of a record]."""
    records = np.fromfile(path, np.uint8, count * layout.record).reshape(-1, layout.record)
    for place, classes in enumerate(layout.classes):
        wrong = np.flatnonzero(records[:, place] >= classes)
        if len(wrong):
            raise ValueError(
                f"{path}, record {wrong[0]} (byte {wrong[0] * layout.record + place}): label "
                f"{records[wrong[0], place]} is above {classes - 1} ({len(wrong)} such records); "
                "unpack it again"
            )
    return records
