"""Reads all of a data set and lists what is wrong with it.

Every sample goes through the reader that training uses. Each fault is a line that names the file;
then come sizes, how often each class occurs, and --class_weights that balance the classes. Exit
code 0: all is well; 1: faults found; 2: wrong flags.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from hvdkit import logs
from hvdkit.data import contents, pipeline, remote
from hvdkit.data.classes import doubt, numbered, relabelled
from hvdkit.data.classes import of as names_of
from hvdkit.data.labels import IGNORE, one_class
from hvdkit.data.open import check_ids, check_once, kind_of, reader_of
from hvdkit.data.readers import listing, pictures, records
from hvdkit.data.readers.pairs import ImageLabelFolder
from hvdkit.data.source import Source
from hvdkit.settings import of_project, typed
from hvdkit.settings.data import READERS, DataSettings
from hvdkit.settings.typed import path_argument

# Files by which a format is recognized without --data_format.
_SIGNS = {
    "records": (f"[!.]*/{records.META}",),
    "folders": ("splits/*.txt",),
    "voc": ("ImageSets/Segmentation", "VOC20??/ImageSets/Segmentation"),
    "cityscapes": ("leftImg8bit",),
    "cifar10": ("data_batch_1.bin", "cifar-10-batches-bin/data_batch_1.bin"),
    "cifar100": ("train.bin", "cifar-100-binary/train.bin"),
    "class_folders": ("train/*/*",),
}
_VALUES = 256  # of a label picture
_SHOWN = 40  # classes


def check(
    root: Path,
    split: str,
    layout: str,
    *,
    classes: int,
    tell: Callable[[str], None],
    names: list[str],
    read: list[Source],
    values: Mapping[int, int | None] | None = None,
    hashes: bool = False,
) -> "Counts":
    """Reads one split, prints its counts; `tell` gets each fault, in a sentence.

    `layout`: a key of READERS; `classes`: their number, 0: as the reader says; `names` of the
    training split's classes, filled by the first split that is read; `read`: the splits so far, to
    which this is added; `values`: as --label_map; `hashes`: whether contents are written.
    """
    try:
        source = _opened(reader_of(layout)(root, split, 0 if values else classes), read)
        source = relabelled(source, values, classes or IGNORE) if values else source
    except (ValueError, OSError) as error:
        tell(str(error))
        return Counts()
    check_ids(kind_of(source), classes)
    try:
        source = numbered(source, root / split, names)
    except ValueError as error:
        tell(str(error))
    if hashes and (reason := contents.why_not(source, split)):
        tell(reason)
        hashes = False
    names[:] = names or names_of(source)
    if layout == "class_folders" and source.num_classes == 1:
        tell(one_class(root / split))
    if not (known := classes or getattr(source, "num_classes", 0)):
        raise ValueError("--num_classes: this reader does not say how many classes there are")
    where = getattr(source, "where", f"sample {{}} of {root / split}".format)
    highest, counted = -1, Counts(known, kind_of(source))
    for index, found in enumerate(_samples(source)):
        if isinstance(found, str):
            tell(found)
            continue
        highest = max(highest, found.high)
        if fault := found.fault(known):
            tell(f"{where(index)}{fault}")
        else:
            counted.add(found)
    # A folder of label pictures does not say how many classes there are.
    if not classes and (values or isinstance(source, ImageLabelFolder)):
        counted.classes = highest + 1
    if not values and counted.unit == "pixels" and (fault := doubt(source, counted.of)):
        tell(fault)
    for line in counted.lines(names_of(source)):
        print(f"{logs.printable(split)}: {logs.printable(line)}", flush=True)
    labels = f"labels 0 to {highest}" if highest >= 0 else "no label could be read"
    if hashes:
        _hash(source, split, tell)
    counted.words = f"{len(source):,} samples, {labels}"
    return counted


def _opened(source: Source, read: list[Source]) -> Source:
    """The source, added to those that are read; ValueError where they share a file."""
    read.append(source)
    check_once(*read)
    return source


def _hash(source: Source, split: str, tell: Callable[[str], None]) -> None:
    try:
        print(logs.printable(f"{split}: {contents.write(source, split)}"), flush=True)
    except OSError as error:
        tell(str(error))


class _Sample(NamedTuple):
    """Labels are without ignored pixels; sizes are height and width."""

    low: int
    high: int
    values: np.ndarray  # pixels of each value, int64 [256]; [0] where the label is one class
    size: tuple[int, int]
    label_size: tuple[int, int]  # the picture's, where the label is no picture

    def fault(self, classes: int) -> str:
        """What is wrong with its label, or ""."""
        if self.size != self.label_size:
            picture, label = (f"{h} x {w}" for h, w in (self.size, self.label_size))
            return f" is {label} pixels (height x width), its picture {picture}"
        wrong = [label for label in (self.low, self.high) if not 0 <= label < classes]
        return f": label {wrong[0]} is no class; classes are 0 to {classes - 1}" if wrong else ""


def _samples(source: Source) -> Iterator[_Sample | str]:
    """Each sample, or what is wrong with it."""

    @pipeline.as_written
    def look(index: tf.Tensor) -> tuple[tf.Tensor, ...]:
        sample = source.read(index)
        if not {"image", "label"} <= sample.keys():
            raise ValueError(f"samples need an image and a label to be checked: {[*sample]}")
        label, values = tf.cast(sample["label"], tf.int64), tf.zeros([0], tf.int64)
        # The picture's size is returned so that the picture is decoded: unused outputs are not.
        size = label_size = tf.shape(sample["image"])[:2]
        if label.shape.rank:  # one for each pixel
            flat, label_size = tf.cast(tf.reshape(label, [-1]), tf.int32), tf.shape(label)[:2]
            values = tf.math.bincount(flat, minlength=_VALUES, maxlength=_VALUES, dtype=tf.int64)
            label = tf.where(label == IGNORE, tf.zeros_like(label), label)
        return tf.reduce_min(label), tf.reduce_max(label), values, size, label_size

    # A list of pictures, or of pictures and then their labels.
    names = source.files() if hasattr(source, "files") else ()
    files = [source.root / os.fsdecode(name) for name in names]
    faults = listing.unreadable(files, pictures.MOST_BYTES)
    unread = {place % len(source): why for place, why in faults.items()}
    indices = np.array([n for n in range(len(source)) if n not in unread], np.int64)
    # After a sample fails, the iterator continues with the next one.
    samples = tf.data.Dataset.from_tensor_slices(indices).map(look, tf.data.AUTOTUNE)
    samples = iter(samples.prefetch(64))
    for index in range(len(source)):
        if index in unread:
            yield unread[index]
            continue
        try:
            low, high, values, *sizes = (part.numpy() for part in next(samples))
            yield _Sample(int(low), int(high), values, *(tuple(size.tolist()) for size in sizes))
        except tf.errors.OpError as error:
            again = f"sample {index} could be read a second time: {pipeline.reason_of(error)}"
            yield source.explain(index) or again
        logs.progress("samples", index + 1, len(source))


class Counts:
    """Counts over the good samples of a split; `words`: what was read."""

    words = "not read"

    def __init__(self, classes: int = 0, kind: str = "") -> None:
        self.classes, self.kind = classes, kind
        self.of = np.zeros(max(classes, _VALUES), np.int64)
        self.sizes: list[tuple[int, int]] = []
        self.unit = "samples"

    def add(self, sample: _Sample) -> None:
        self.sizes.append(sample.size)
        if len(sample.values):
            self.unit = "pixels"
            self.of[:_VALUES] += sample.values
        else:
            self.of[sample.high] += 1

    def lines(self, names: Sequence[str]) -> list[str]:
        """Sizes, classes and their shares, as text."""
        classes = self.classes
        if not self.sizes:
            return []
        sizes = sorted(self.sizes, key=lambda size: size[0] * size[1])
        sizes = sizes[0], sizes[-1], sizes[(len(sizes) - 1) // 2]
        least, most, median = (f"{height} x {width}" for height, width in sizes)
        shown = f"all {least}" if least == most else f"{least} to {most}, median {median}"
        lines, counts = [f"pictures: {shown} (height x width)"], self.of[:classes]
        names = names if len(names) == classes else [str(number) for number in range(classes)]
        order = np.flatnonzero(counts)
        if len(order) > _SHOWN:
            rarest = np.argsort(counts[order], kind="stable")[:_SHOWN]
            order = order[rarest]
            lines.append(f"the {_SHOWN} rarest of {classes} classes:")
        for number in order:
            name = names[number]
            shown = name if name == str(number) else f"{number} {name}"
            share = counts[number] / max(counts.sum(), 1)
            lines.append(f"  {shown:<24.24} {counts[number]:>16,} {self.unit}  {share:8.3%}")
        if self.unit == "pixels" and (ignored := self.of[IGNORE]):
            lines.append(f"  {'ignored':<24} {ignored:>16,} pixels")
        if missing := [names[number] for number in np.flatnonzero(counts == 0)]:
            lines.append(f"warning: {len(missing)} class(es) never occur: {logs.join(missing)}")
        return lines

    def weights(self) -> str:
        """The flag that gives all classes the same total weight: n / (classes * count of each).

        King and Zeng 2001 ("Logistic Regression in Rare Events Data"), as scikit-learn's
        "balanced". Their mean over samples, or pixels, is 1. A class that never occurs gets 1.
        """
        counts = self.of[: self.classes]
        if not self.sizes:
            return ""
        every = counts.sum() / max(np.count_nonzero(counts), 1)
        weights = np.where(counts > 0, every / np.maximum(counts, 1), 1.0)
        return "--class_weights=" + ",".join(f"{weight:.4g}" for weight in weights)


def layout_of(root: Path) -> str:
    """The layout that the folder shows, a key of READERS; "" where it shows none."""
    signs = ((layout, sign) for layout, found in _SIGNS.items() for sign in found)
    return next((layout for layout, sign in signs if any(root.glob(sign))), "")


@logs.explained
def main(argv: list[str]) -> int:
    """Returns the exit code: 0 all is well, 1 faults were found, 2 wrong use."""
    of_project()  # it may add readers
    parser = logs.parser(__doc__)
    parser.add_argument(
        "--data_dir", type=path_argument, required=True, help="folder of the data set"
    )
    parser.add_argument("--data_format", choices=READERS, help="its layout, if it does not show")
    parser.add_argument("--split", action="append", help="train and val, or all that is packed")
    parser.add_argument("--num_classes", type=int, default=0, help="labels are below it")
    parser.add_argument("--label_map", default="", help="as of train.py: 255:1,0:ignore")
    parser.add_argument("--hash", action="store_true", help="keep the SHA-256 of each file")
    parser.add_argument("--max_pixels", type=int, default=pictures.most_pixels)
    args = parser.parse_args(argv[1:])
    pictures.limit(args.max_pixels)
    faults: list[str] = []

    def tell(fault: str) -> None:
        faults.append(split)
        if sys.stderr.isatty():  # below the bar, not behind it
            print(file=sys.stderr, flush=True)
        print(f"{logs.printable(split)}: {logs.printable(fault)}", flush=True)

    if url := remote.url_of(args.data_dir):
        parser.error(f"--data_dir={url} is a URL: check the folder before it is copied there")
    if not args.data_dir.exists():
        parser.error(f"--data_dir={args.data_dir} does not exist")
    if not (layout := args.data_format or layout_of(args.data_dir)):
        asks = f"is that the folder? Then give --data_format ({', '.join(READERS)})"
        parser.error(f"--data_dir={args.data_dir} does not show its layout: {asks}")
    values = DataSettings(label_map=typed.path(args.label_map)).label_values
    packed = args.data_dir.glob(*_SIGNS["records"]) if layout == "records" else ()
    splits = args.split or sorted(path.parent.name for path in packed) or ["train", "val"]
    names: list[str] = []
    opened: list[Source] = []
    trained = "train" if "train" in splits else splits[0]
    for split in sorted(splits, key=lambda name: name != trained):
        if len(splits) != 2:  # two splits: training and validation; more: unknown purpose
            names = []
        how = {"classes": args.num_classes, "tell": tell, "names": names, "values": values}
        how |= {"hashes": args.hash, "read": opened}
        read = check(args.data_dir, split, layout, **how)
        wrong = faults.count(split)
        verdict = f"{wrong:,} fault(s), listed above" if wrong else "all is well"
        print(f"{logs.printable(split)}: {read.words} ({layout}): {verdict}", flush=True)
        if (weights := read.weights()) and not wrong and split == trained:
            print(f"{logs.printable(split)}: to balance classes: {weights}", flush=True)
    return 1 if faults else 0
