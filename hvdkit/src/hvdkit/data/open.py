"""Opens data_dir with the reader that --data_format names, or with the task's default."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from hvdkit.data.labels import IGNORE, one_class
from hvdkit.data.readers import pictures
from hvdkit.data.readers.pairs import PicturePairs
from hvdkit.data.source import Source, Synthetic, unshared_classes
from hvdkit.logs import join
from hvdkit.settings import Settings
from hvdkit.settings.data import READERS

_KINDS = {"map": "a class for each pixel", "class": "one class for a picture"}  # of labels


def reader_of(name: str) -> Callable[[Path, str, int], Source]:
    """The reader of a --data_format, to call with folder, split and number of classes (or 0).

    Raises ValueError if it cannot be imported, or called.
    """
    module, _, attribute = READERS[name].rpartition(".")
    where = f"--data_format={name}: its reader {READERS[name]}"
    try:
        reader = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where} cannot be imported: {error}") from None
    if not callable(reader):
        raise ValueError(f"{where} is neither a class nor a function")
    return reader


def kind_of(reader: object) -> str:
    """What the label of a reader, or of a source, is: "class", or "map", a class for each pixel."""
    return getattr(reader, "kind", "class")


def check_ids(kind: str, classes: int) -> None:
    """Raises ValueError for more classes than label pictures can hold."""
    if kind == "map" and classes > IGNORE:
        raise ValueError(
            f"--num_classes={classes}: {IGNORE} in a label picture means ignored, which leaves at "
            f"most {IGNORE} classes, 0 to {IGNORE - 1}; leave one out or merge two"
        )


def open_sources(config: Settings, default: str) -> tuple[Source, Source]:
    """The splits to train on and to score; `default`: the format where --data_format is empty.

    Raises ValueError, naming flag, folder or file, where they do not fit task or settings.
    """
    pictures.limit(config.max_pixels)
    splits = (config.train_split, config.val_split)
    train, val = (_opened(config, split, default) for split in splits)
    # Checked before their number: if the splits differ, no --num_classes is right for both.
    if differ := unshared_classes(train, val):
        raise ValueError(
            f"--train_split={splits[0]} and --val_split={splits[1]} of {config.data_dir} hold "
            f"different classes: only one of the two has {join(differ)}; make them the same"
        )
    for split, source in zip(splits, (train, val)):
        _check_number(config, source, split=split, name=config.data_format or default)
    return train, val


def trained_on_too(train: Source, val: Source) -> int:
    """How many validation pictures are also trained on; known for listed files only."""
    pairs = isinstance(train, PicturePairs) and isinstance(val, PicturePairs)
    return train.shared_with(val) if pairs else 0


def _opened(config: Settings, split: str, default: str) -> Source:
    kind = kind_of(reader_of(default))
    check_ids(kind, config.num_classes)
    if config.synthetic_data:
        size, classes = config.image_size, config.num_classes
        label = ((size, size, 1), tf.uint8) if kind == "map" else ((), tf.int32)
        form = {"image": ((size, size, 3), tf.uint8, 256), "label": (*label, classes)}
        return Synthetic(1024, form)
    name = config.data_format or default
    source = reader_of(name)(Path(config.data_dir), split, config.num_classes)
    if kind_of(source) != kind:
        has, takes = (_KINDS.get(found, found) for found in (kind_of(source), kind))
        raise ValueError(
            f"--data_format={name}: {config.data_dir} has {has}, --task={config.task} takes "
            f"{takes}; choose other data or another task"
        )
    return source


def _check_number(config: Settings, source: Source, *, split: str, name: str) -> None:
    known = getattr(source, "num_classes", config.num_classes)
    if known == 1 and name == "class_folders":
        raise ValueError(f"--data_format={name}: {one_class(Path(config.data_dir, split))}")
    # A packed split knows only the classes that occur in it; the whole set may have more.
    if known > config.num_classes or (known < config.num_classes and name != "records"):
        raise ValueError(
            f"--num_classes={config.num_classes}: {config.data_dir} ({name}, split {split}) has "
            f"{known} classes; give --num_classes={known}"
        )
