"""Opens data_dir with the reader that --data_format names, or with the task's default."""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvdkit.data import classes, remote, shared_listing
from hvdkit.data.labels import IGNORE, one_class
from hvdkit.data.pipeline import as_written
from hvdkit.data.readers import listing, pictures
from hvdkit.data.source import Source, Synthetic
from hvdkit.settings import Settings
from hvdkit.settings.data import PACK_ONLY, READERS

_LOOKED_AT = 32  # label pictures, at the start of a run
_KINDS = {"map": "a class for each pixel", "class": "one class for a picture"}  # of labels


_one_split = False


@contextlib.contextmanager
def one_split() -> Iterator[None]:
    """Inside, `open_sources` opens the split to score alone: there may be no other."""
    global _one_split
    _one_split = True
    try:
        yield
    finally:
        _one_split = False


def reader_of(name: str) -> Callable[[Path, str, int], Source]:
    """The reader of a --data_format, to call with folder, split and number of classes (or 0).

    Raises ValueError if it cannot be imported, or called.
    """
    reader = (PACK_ONLY | READERS)[name]
    module, _, attribute = reader.rpartition(".")
    where = f"--data_format={name}: its reader {reader}"
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where} cannot be imported: {error}") from None
    if not callable(found):
        raise ValueError(f"{where} is neither a class nor a function")
    return found


def kind_of(reader: object) -> str:
    """What the label of a reader, or of a source, is: "class", or "map", a class for each pixel."""
    return getattr(reader, "kind", "class")


def check_ids(kind: str, classes: int) -> None:
    """Raises ValueError for more classes than label pictures can hold."""
    if kind == "map" and classes > IGNORE:
        most = f"at most {IGNORE} classes, 0 to {IGNORE - 1}; leave one out or merge two"
        why = f"{IGNORE} in a label picture means ignored"
        raise ValueError(f"--num_classes={classes}: {why}, which leaves {most}")


def open_sources(config: Settings, default: str) -> tuple[Source, Source]:
    """The splits to train on and to score; `default`: the format where --data_format is empty.

    Raises ValueError, naming flag, folder or file, where they do not fit task or settings.
    """
    pictures.limit(config.max_pixels)
    remote.limit(config.cache_dir, config.cache_gb)
    splits = (config.val_split if _one_split else config.train_split, config.val_split)
    train, val = (_opened(config, split, default) for split in splits)
    remote.check_fits(config.shuffle_shards, train, val)
    # Before their number is checked: if names differ, no --num_classes is right for both.
    where = [f"split {split} of {config.data_dir}" for split in splits]
    shared_listing.found(("once", *where), lambda: check_once(train, val))
    train = classes.numbered(train, where[0])
    val = classes.numbered(val, where[1], classes.of(train))
    for split, source in zip(splits, (train, val)):
        _check_number(config, source, split=split, name=config.data_format or default)
    return train, val


def check_once(*sources: Source) -> None:
    """Raises ValueError where listed pictures of these sources are one file under two names."""
    paths: list[bytes] = []
    for source in sources:
        if listed := getattr(source, "picture_files", None):
            paths += [os.path.join(os.fsencode(source.root), name) for name in listed()]
    listing.check_once(paths)


def trained_on_too(train: Source, val: Source) -> int:
    """How many validation pictures are also trained on; known for listed files only."""
    shared = getattr(train, "shared_with", None)
    return shared(val) if shared and type(train) is type(val) else 0


def doubt(source: Source) -> str:
    """What is wrong with the values of some label pictures spread over all; "" for others."""

    def counted(index: tf.Tensor) -> tf.Tensor:
        flat = tf.cast(tf.reshape(source.read(index)["label"], [-1]), tf.int32)
        return tf.math.bincount(flat, minlength=256, maxlength=256, dtype=tf.int64)

    sizes = getattr(source, "shard_sizes", [])
    total = next(filter(None, sizes)) if getattr(source, "is_remote", False) else len(source)
    looked_at = tf.data.Dataset.range(0, total, max(1, total // _LOOKED_AT))
    counts = looked_at.map(as_written(counted), 8).ignore_errors()  # training tells of bad ones
    return classes.doubt(source, sum(counts.as_numpy_iterator(), np.zeros(256, np.int64)))


def _opened(config: Settings, split: str, default: str) -> Source:
    kind = kind_of(reader_of(default))
    check_ids(kind, config.num_classes)
    if config.synthetic_data:
        size = config.image_size
        label = ((size, size, 1), tf.uint8) if kind == "map" else ((), tf.int32)
        form = {"image": ((size, size, 3), tf.uint8, 256), "label": (*label, config.num_classes)}
        return Synthetic(1024, form)
    name, root = config.data_format or default, remote.url_of(config.data_dir)
    if root and name != "records":
        what = "a URL, from which only sets that hvdkit pack wrote are read"
        ways = "give --data_format=records, or copy the data to a disk"
        raise ValueError(f"--data_dir={root} is {what}: {ways}")
    values = config.label_values
    # Values that are mapped need not be classes.
    number = 0 if values else config.num_classes
    folder = root or Path(config.data_dir)
    try:
        source = reader_of(name)(folder, split, number)
    except (ValueError, OSError):
        if not root and not folder.exists():  # some readers need none
            raise ValueError(f"--data_dir={folder} does not exist") from None
        raise
    if kind_of(source) != kind:
        has, takes = (_KINDS.get(found, found) for found in (kind_of(source), kind))
        both = f"{config.data_dir} has {has}, --task={config.task} takes {takes}"
        raise ValueError(f"--data_format={name}: {both}; choose other data or another task")
    if values:
        return classes.relabelled(source, values, config.num_classes)
    key = ("values", name, config.data_dir, split)
    if kind == "map" and (fault := shared_listing.found(key, lambda: doubt(source))):
        raise ValueError(f"{config.data_dir}, split {split}: {fault}")
    return source


def _check_number(config: Settings, source: Source, *, split: str, name: str) -> None:
    known = getattr(source, "num_classes", config.num_classes)
    if known == 1 and name == "class_folders":
        raise ValueError(f"--data_format={name}: {one_class(Path(config.data_dir, split))}")
    # A packed split knows only the classes that occur in it; the whole set may have more.
    if known > config.num_classes or (known < config.num_classes and name != "records"):
        has = f"{config.data_dir} ({name}, split {split}) has {known} classes"
        raise ValueError(f"--num_classes={config.num_classes}: {has}; give --num_classes={known}")
