"""MNIST and the sets in its files: Fashion-MNIST, KMNIST.

An IDX file (http://yann.lecun.com/exdb/mnist/) begins with big-endian uint32: 0x800 and the number
of dimensions, then the size of each. The values follow, one byte each.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvdkit.data.source import Arrays, Parts

_PREFIXES = {"train": "train", "val": "t10k"}  # of the files' names, by split
_MOST_VALUES = 2**30  # a header that promises more is damaged


class Idx(Arrays):
    """One split, as a `source.Source`.

    Reads to {"image": uint8 [H, W, 3], "label": int64 scalar}; the three channels are equal.

    Raises ValueError, naming the file, when one is missing, damaged, or does not fit the other.
    """

    # Nothing says whether a mirrored picture is still one of its class.
    asks_mirror = True

    def __init__(self, root: Path, split: str, _: int = 0) -> None:
        if split not in _PREFIXES:
            raise ValueError(
                f"MNIST's files have no split {split!r}, only train and val"
            )
        images = _values(root, f"{_PREFIXES[split]}-images-idx3-ubyte", dimensions=3)
        labels = _values(root, f"{_PREFIXES[split]}-labels-idx1-ubyte", dimensions=1)
        if len(images) != len(labels):
            raise ValueError(
                f"{root}, split {split}: {len(images)} pictures and {len(labels)} labels: "
                "download the files again"
            )
        self.num_classes = max(_classes(labels), _classes_of_other(root, split))
        super().__init__(image=images, label=labels.astype(np.int64))

    def read(self, index: tf.Tensor) -> Parts:
        sample = super().read(index)
        grey = sample["image"]
        return sample | {"image": tf.stack([grey, grey, grey], axis=-1)}


def _classes(labels: np.ndarray) -> int:
    return int(labels.max(initial=0)) + 1


def _classes_of_other(root: Path, split: str) -> int:
    """The number of classes of the other split, 0 where it is not there.

    A split may lack the last class.
    """
    [prefix] = [_PREFIXES[other] for other in _PREFIXES if other != split]
    name = f"{prefix}-labels-idx1-ubyte"
    if not (Path(root, name).is_file() or Path(root, f"{name}.gz").is_file()):
        return 0
    return _classes(_values(root, name, dimensions=1))


def _values(root: Path, name: str, *, dimensions: int) -> np.ndarray:
    """The values of a file, packed with gzip or not, uint8 of the sizes in its header."""
    file = Path(root, name)
    if not file.is_file():
        file = Path(root, f"{name}.gz")
    if not file.is_file():
        raise ValueError(f"{file} is missing, and so is {name}")
    try:
        with gzip.open(file) if file.suffix else file.open("rb") as stream:
            magic, *sizes = struct.unpack(
                f">{1 + dimensions}I", stream.read(4 + 4 * dimensions)
            )
            count = math.prod(sizes)
            is_sound = magic == 0x800 + dimensions and 0 < count < _MOST_VALUES
            # One byte more shows whether the file ends there.
            content = stream.read(count + 1) if is_sound else b""
    except (EOFError, gzip.BadGzipFile, struct.error, zlib.error):
        is_sound = False
    if not is_sound or len(content) != count:
        raise ValueError(
            f"{file} is damaged, or no IDX file of bytes in {dimensions} dimension(s): "
            "download it again"
        )
    return np.frombuffer(content, np.uint8).reshape(sizes)
