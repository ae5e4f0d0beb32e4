"""CIFAR-10's binary version (https://www.cs.toronto.edu/~kriz/cifar.html, "binary version").

ROOT/data_batch_1.bin ... data_batch_5.bin      split train: 5 x 10,000 pictures
ROOT/test_batch.bin                             split val: 10,000 pictures

A record has 3,073 bytes: the label (0 to 9), then 32 x 32 red, green and blue values.
"""

from pathlib import Path

from hvdkit.data.readers.cifar import Cifar, Layout

NUM_CLASSES = 10
CLASS_NAMES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_FILES = {"train": tuple(f"data_batch_{n}.bin" for n in range(1, 6)), "val": ("test_batch.bin",)}
LAYOUT = Layout(
    name="CIFAR-10",
    archive="cifar-10-binary.tar.gz",
    folder="cifar-10-batches-bin",
    files=_FILES,
    classes=(NUM_CLASSES,),
    shares={name: 1 for names in _FILES.values() for name in names},
)


class Cifar10(Cifar):
    """One split; see `Cifar` for what is read."""

    num_classes, class_names = NUM_CLASSES, CLASS_NAMES

    def __init__(self, root: Path, split: str):
        super().__init__(root, split, LAYOUT, label=0)
