"""Opens data_dir with the reader that --data_format names, or with the task's default."""

from pathlib import Path

import tensorflow as tf

from hvdkit.data.labels import IGNORE, one_class
from hvdkit.data.readers.cifar import Cifar
from hvdkit.data.readers.cityscapes import Cityscapes
from hvdkit.data.readers.class_folders import ClassFolders
from hvdkit.data.readers.pairs import ImageLabelFolder, PicturePairs
from hvdkit.data.readers.records import Records
from hvdkit.data.readers.voc import Voc
from hvdkit.data.source import Source, Synthetic, unshared_classes
from hvdkit.logs import join
from hvdkit.settings import Settings

# What a label is: a class for each pixel (map), or one for the picture (class).
KINDS = {
    "folders": "map",
    "voc": "map",
    "cityscapes": "map",
    "class_folders": "class",
    "cifar10": "class",
    "cifar100": "class",
    "digits": "class",
}


def open_sources(config: Settings, default: str) -> tuple[Source, Source]:
    """The splits of config.data_dir to train on and to score.

    Args:
      default: the format where config.data_format is empty; any other must have its kind of label.

    Raises ValueError, naming flag, folder or file: the format has another kind of label than the
      task takes, the data do not have that format, the splits' classes differ or are not
      config.num_classes, or a class of pixels would have the number that means ignored.
    """
    splits = (config.train_split, config.val_split)
    train, val = (_opened(config, split, default) for split in splits)
    # Checked before their number: if the splits differ, no --num_classes is right for both.
    if differ := unshared_classes(train, val):
        raise ValueError(
            f"--train_split={splits[0]} and --val_split={splits[1]} of {config.data_dir} hold "
            f"different classes: only one of the two has {join(differ)}; make them the same"
        )
    _check_number(config, train, splits[0], default)
    _check_number(config, val, splits[1], default)
    return train, val


def trained_on_too(train: Source, val: Source) -> int:
    """How many validation pictures are also trained on; known for listed files only."""
    pairs = isinstance(train, PicturePairs) and isinstance(val, PicturePairs)
    return train.shared_with(val) if pairs else 0


def _opened(config: Settings, split: str, default: str) -> Source:
    if KINDS[default] == "map" and config.num_classes > IGNORE:
        raise ValueError(
            f"--num_classes={config.num_classes}: {IGNORE} in a label picture means ignored, which "
            f"leaves at most {IGNORE} classes, 0 to {IGNORE - 1}; leave one out or merge two"
        )
    if config.synthetic_data:
        return _synthetic(config, KINDS[default])
    name = config.data_format or default
    source = _open(name, config, split)
    kind = source.kind if isinstance(source, Records) else KINDS[name]
    if kind != KINDS[default]:
        words = {"map": "a class for each pixel", "class": "one class for a picture"}
        raise ValueError(
            f"--data_format={name}: {config.data_dir} has {words[kind]}, --task={config.task} "
            f"takes {words[KINDS[default]]}; choose other data or another task"
        )
    return source


def _check_number(config: Settings, source: Source, split: str, default: str) -> None:
    name = config.data_format or default
    known = getattr(source, "num_classes", config.num_classes)
    if known == 1 and name == "class_folders":
        raise ValueError(f"--data_format={name}: {one_class(Path(config.data_dir, split))}")
    # A packed split knows only the classes that occur in it; the whole set may have more.
    if known > config.num_classes or (known < config.num_classes and name != "records"):
        raise ValueError(
            f"--num_classes={config.num_classes}: {config.data_dir} ({name}, split {split}) has "
            f"{known} classes; give --num_classes={known}"
        )


def _synthetic(config: Settings, kind: str) -> Source:
    size = config.image_size
    label = ((size, size, 1), tf.uint8) if kind == "map" else ((), tf.int32)
    form = {"image": ((size, size, 3), tf.uint8, 256), "label": (*label, config.num_classes)}
    return Synthetic(1024, form)


def _open(name: str, config: Settings, split: str) -> Source:
    root = Path(config.data_dir)
    if name == "folders":
        return ImageLabelFolder(root, split, config.num_classes)
    if name == "digits":
        from hvdkit.data.shipped import (
            Digits,  # here: a fork without that task goes without it
        )

        return Digits(split, config.num_classes)
    if name in ("cifar10", "cifar100"):
        classes = {"cifar10": 10, "cifar100": 20 if config.num_classes == 20 else 100}[name]
        return Cifar(root, split, classes)
    readers = {"voc": Voc, "cityscapes": Cityscapes, "class_folders": ClassFolders}
    readers["records"] = Records
    return readers[name](root, split)
