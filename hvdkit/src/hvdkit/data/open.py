"""Opens data_dir with the reader that --data_format names, or with the task's default."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvdkit.data import classes, shared_listing
from hvdkit.data.labels import IGNORE, one_class
from hvdkit.data.pipeline import as_written
from hvdkit.data.readers import listing, pictures, remote
from hvdkit.data.scoped import Scoped
from hvdkit.data.source import Source, Synthetic, Wrapper, is_listed
from hvdkit.settings import Settings
from hvdkit.settings.data import PACK_ONLY, READERS

_LOOKED_AT = 32  # label pictures that are read at the start of a run
_LABELS = {
    "map": "a class for each pixel",
    "class": "one class for a picture",
}  # by kind of labels

# Whether `open_sources` opens the split to score alone: there may be no other.
one_split = Scoped(False)


def reader_of(name: str) -> Callable[..., Source]:
    """The reader of a --data_format; it takes a folder, a split and the number of classes or 0.

    Raises ValueError if it cannot be imported, or called.
    """
    path = (PACK_ONLY | READERS)[name]
    module, _, attribute = path.rpartition(".")
    try:
        reader = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--data_format={name}: its reader {path} cannot be imported: {error}"
        ) from None
    if not callable(reader):
        raise ValueError(
            f"--data_format={name}: its reader {path} is neither a class nor a function"
        )
    return reader


def kind_of(reader: object) -> str:
    """The kind of a reader's or a source's labels: "class", or "map", a class for each pixel."""
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
    remote.limit(config.cache_dir, config.cache_gb)
    train_split = config.val_split if one_split.value else config.train_split
    val_split = config.val_split
    train = _opened(config, train_split, default)
    val = _opened(config, val_split, default)
    remote.check_fits(config.shuffle_shards, train, val)
    train_name = f"split {train_split} of {config.data_dir}"
    val_name = f"split {val_split} of {config.data_dir}"
    shared_listing.found(("once", train_name, val_name), lambda: check_once(train, val))

    # Names come before numbers: if names differ, no --num_classes is right for both.
    train = classes.numbered(train, train_name)
    val = classes.numbered(val, val_name, classes.of(train))
    data_format = config.data_format or default
    _check_number(config, train, split=train_split, data_format=data_format)
    _check_number(config, val, split=val_split, data_format=data_format)
    return train, val


def check_once(*sources: Source) -> None:
    """Raises ValueError where listed pictures of these sources are one file under two names."""
    paths: list[bytes] = []
    for source in sources:
        listed = getattr(source, "picture_files", None)
        if listed and is_listed(source):
            paths += [os.path.join(os.fsencode(source.root), name) for name in listed()]
    listing.check_once(paths)


def trained_on_too(train: Source, val: Source) -> int:
    """How many validation pictures are also trained on; known for listed files only."""
    train = _listed(train)
    val = _listed(val)
    shared_with = getattr(train, "shared_with", None)
    return shared_with(val) if shared_with and type(train) is type(val) else 0


def _listed(source: Source) -> Source:
    """The source below those that change its numbers, as of classes."""
    while isinstance(source, Wrapper):
        source = source._source
    return source


def some_values(source: Source) -> np.ndarray:
    """Pixels of each value, int64 [256], of some label pictures spread over all."""

    def histogram(index: tf.Tensor) -> tf.Tensor:
        flat = tf.cast(tf.reshape(source.read(index)["label"], [-1]), tf.int32)
        return tf.math.bincount(flat, minlength=256, maxlength=256, dtype=tf.int64)

    total = len(source)
    if remote.is_remote(source):
        # Only the first shard with samples is read.
        total = next(size for size in source.shard_sizes if size)
    indices = tf.data.Dataset.range(0, total, max(1, total // _LOOKED_AT))
    # A picture that cannot be read is reported in training.
    histograms = indices.map(as_written(histogram), 8).ignore_errors()
    counts = np.zeros(256, np.int64)
    for values in histograms.as_numpy_iterator():
        counts += values
    return counts


def doubt(source: Source) -> str:
    """What is wrong with the values of some of its label pictures; "" if nothing is."""
    return classes.doubt(source, some_values(source))


def _opened(config: Settings, split: str, default: str) -> Source:
    kind = kind_of(reader_of(default))
    check_ids(kind, config.num_classes)
    if config.synthetic_data:
        return _synthetic(config, kind)
    data_format = config.data_format or default
    source = _read(config, split, data_format)
    if kind_of(source) != kind:
        raise ValueError(
            f"--data_format={data_format}: {config.data_dir} has {_LABELS.get(kind_of(source))}, "
            f"--task={config.task} takes {_LABELS.get(kind)}; choose other data or another task"
        )
    if config.label_values:
        return classes.relabelled(source, config.label_values, config.num_classes)
    if kind == "map":
        key = ("values", data_format, config.data_dir, split)
        if fault := shared_listing.found(key, lambda: doubt(source)):
            raise ValueError(f"{config.data_dir}, split {split}: {fault}")
    return source


def _synthetic(config: Settings, kind: str) -> Synthetic:
    size = config.image_size
    form: dict[str, tuple[tuple[int, ...], tf.DType, int]]
    form = {"image": ((size, size, 3), tf.uint8, 256)}
    if kind == "map":
        form["label"] = ((size, size, 1), tf.uint8, config.num_classes)
    else:
        form["label"] = ((), tf.int32, config.num_classes)
    return Synthetic(1024, form)


def _read(config: Settings, split: str, data_format: str) -> Source:
    url = remote.url_of(config.data_dir)
    if url and data_format != "records":
        raise ValueError(
            f"--data_dir={url} is a URL, from which only sets that hvdkit pack wrote are read: "
            "give --data_format=records, or copy the data to a disk"
        )
    # Label values that are mapped need not be classes.
    num_classes = 0 if config.label_values else config.num_classes
    folder = Path(config.data_dir)
    try:
        return reader_of(data_format)(url or folder, split, num_classes)
    except (ValueError, OSError):
        if not url and not folder.exists():  # some readers need no folder
            raise ValueError(f"--data_dir={folder} does not exist") from None
        raise


def _check_number(
    config: Settings, source: Source, *, split: str, data_format: str
) -> None:
    named = len(classes.of(source))
    known = getattr(source, "num_classes", named or config.num_classes)
    if known == 1 and data_format == "class_folders":
        raise ValueError(
            f"--data_format={data_format}: {one_class(Path(config.data_dir, split))}"
        )
    most = known
    if data_format == "records":
        # A packed split knows only the classes that occur in it, unless it has their names.
        most = max(known, named or config.num_classes)
    if not known <= config.num_classes <= most:
        known = most
        raise ValueError(
            f"--num_classes={config.num_classes}: {config.data_dir} ({data_format}, split {split}) "
            f"has {known} classes; give --num_classes={known}"
        )
