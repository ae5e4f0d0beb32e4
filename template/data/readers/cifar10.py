"""CIFAR-10's binary version (https://www.cs.toronto.edu/~kriz/cifar.html, "binary version").

ROOT/data_batch_1.bin ... data_batch_5.bin      split train: 5 x 10,000 pictures
ROOT/test_batch.bin                             split val: 10,000 pictures

A record has 3,073 bytes: the label (0 to 9), then 32 x 32 red, green and blue values.
"""

import zlib
from pathlib import Path

import numpy as np
import tensorflow as tf

from data import source

NUM_CLASSES = 10
CLASS_NAMES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
SIDE = 32  # pixels, height and width
RECORD = 1 + 3 * SIDE * SIDE  # bytes
FILES = {"train": tuple(f"data_batch_{n}.bin" for n in range(1, 6)), "val": ("test_batch.bin",)}


class Cifar10:
    """One split, as a `source.Source`.

    Reads to {"image": uint8 [32, 32, 3], "label": int32 scalar}. The files are read once, here,
    and kept in memory: 154 MB for train, 31 MB for val. So no read fails later.

    `root` is the folder of the .bin files, or one with cifar-10-batches-bin in it.
    Raises ValueError, naming the file, when one is missing, has a size that is no whole number of
    records or other than the rest's, or holds a label above 9.
    """

    num_classes = NUM_CLASSES

    def __init__(self, root: Path, split: str):
        root = Path(root)
        if (root / "cifar-10-batches-bin").is_dir():
            root = root / "cifar-10-batches-bin"
        if split not in FILES:
            raise ValueError(f"CIFAR-10 has no split {split!r}; there are {sorted(FILES)}")
        _check_sizes(root)
        records, checksums = _load(root, FILES[split])
        self._listing = list(zip(FILES[split], checksums))
        with tf.device("CPU:0"):  # where it is read; it must not fill a GPU
            self._records = tf.constant(records)

    def __len__(self) -> int:
        return int(self._records.shape[0])

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads {"image": uint8 [32, 32, 3], "label": int32 scalar}; index: int64 scalar."""
        record = self._records[index]
        planes = tf.reshape(record[1:], [3, SIDE, SIDE])
        return {"image": tf.transpose(planes, [1, 2, 0]), "label": tf.cast(record[0], tf.int32)}

    def explain(self, index: int) -> str | None:
        """None: all that can be wrong is found when the files are opened."""
        return None

    def fingerprint(self) -> str:
        """SHA-256 over names and checksums of the split's files; their sizes tell nothing."""
        return source.digest(self._listing)


def _check_sizes(root: Path) -> None:
    sizes = {}
    for name in (*FILES["train"], *FILES["val"]):
        if not (root / name).is_file():
            raise ValueError(
                f"{root / name} is missing; unpack cifar-10-binary.tar.gz and give the folder of "
                "its .bin files"
            )
        sizes[name] = (root / name).stat().st_size
        if sizes[name] == 0 or sizes[name] % RECORD:
            raise ValueError(
                f"{root / name} has {sizes[name]} bytes, which is no whole number of records of "
                f"{RECORD} bytes; it was cut or changed, so unpack it again"
            )
    usual = max(sizes.values())
    for name, size in sizes.items():
        if size != usual:
            raise ValueError(
                f"{root / name} has {size // RECORD} records, other files have {usual // RECORD}; "
                "it was cut, so unpack it again (the original has 10000 in each)"
            )


def _load(root: Path, names: tuple[str, ...]) -> tuple[np.ndarray, list[int]]:
    """Records of all files, uint8 [n, 3073], and the CRC-32 of each file."""
    count = (root / names[0]).stat().st_size // RECORD
    records = np.empty((len(names), count, RECORD), np.uint8)  # at once: it is large
    for name, part in zip(names, records):
        part[:] = np.fromfile(root / name, np.uint8, part.size).reshape(part.shape)
        wrong = np.flatnonzero(part[:, 0] >= NUM_CLASSES)
        if len(wrong):
            raise ValueError(
                f"{root / name}, record {wrong[0]} (byte {wrong[0] * RECORD}): label "
                f"{part[wrong[0], 0]} is above 9 ({len(wrong)} such records); unpack it again"
            )
    return records.reshape(-1, RECORD), [zlib.crc32(part) for part in records]
