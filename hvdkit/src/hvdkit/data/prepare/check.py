"""Reads all of a data set and lists what is wrong with it.

Every sample goes through the reader that training uses. Each fault is a line that names the file;
then come sizes, how often each class occurs, and --class_weights that balance the classes. Exit
code 0: all is well; 1: faults found; 2: wrong flags.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from hvdkit import logs
from hvdkit.data import contents, pipeline
from hvdkit.data.classes import doubt, numbered, relabelled
from hvdkit.data.classes import of as names_of
from hvdkit.data.labels import IGNORE, one_class
from hvdkit.data.open import check_ids, check_once, kind_of, reader_of
from hvdkit.data.readers import listing, pictures, records
from hvdkit.data.readers.pairs import ImageLabelFolder
from hvdkit.data.source import Source, is_listed
from hvdkit.settings import of_project, typed
from hvdkit.settings.data import READERS, label_values
from hvdkit.settings.typed import path_argument

# Files by which a format is recognized without --data_format.
_SIGNS = {
    "records": (f"[!.]*/{records.META}",),
    "folders": ("splits/*.txt",),
    "voc": ("ImageSets/Segmentation", "VOC20??/ImageSets/Segmentation"),
    "cityscapes": ("leftImg8bit",),
    "cifar10": ("data_batch_1.bin", "cifar-10-batches-bin/data_batch_1.bin"),
    "cifar100": ("train.bin", "cifar-100-binary/train.bin"),
    "idx": ("train-images-idx3-ubyte*",),
    "class_folders": ("train/*/*",),
}
_VALUES = 256  # a label picture may hold so many values
_SHOWN = 40  # at most so many classes are listed


class Checker:
    """Reads the splits of one data set, and remembers what a later split is compared with.

    Attributes:
      root: the data set's folder.
      layout: how its files lie, a key of READERS.
      tell: gets each fault, in a sentence.
      classes: how many there are; 0: as the reader says.
      values: what values of label pictures mean, as --label_map.
      hashes: whether hashes of the contents are written.
    """

    def __init__(
        self,
        root: Path,
        layout: str,
        *,
        tell: Callable[[str], None],
        classes: int = 0,
        values: Mapping[int, int | None] | None = None,
        hashes: bool = False,
    ) -> None:
        self.root = root
        self.layout = layout
        self.tell = tell
        self.classes = classes
        self.values = values
        self.hashes = hashes
        # Names of the first split's classes, and the splits so far.
        self._names: list[str] = []
        self._opened: list[Source] = []

    def check(self, split: str, *, has_same_classes: bool = True) -> "Counts":
        """Reads one split and prints its counts; they are empty where it cannot be read.

        `has_same_classes`: whether the split has the classes of those before.
        """
        try:
            source = self._open(split)
        except (ValueError, OSError) as error:
            self.tell(str(error))
            return Counts()
        check_ids(kind_of(source), self.classes)
        source = self._as_first_numbered(source, split, has_same_classes)
        unhashed = contents.why_not(source, split) if self.hashes else ""
        if unhashed:
            self.tell(unhashed)
        if self.layout == "class_folders" and getattr(source, "num_classes", 0) == 1:
            self.tell(one_class(self.root / split))

        counts = self._count(source, split)
        for line in counts.lines(names_of(source)):
            _print(split, line)
        if self.hashes and not unhashed and is_listed(source):
            try:
                _print(split, contents.write(source, split))
            except OSError as error:
                self.tell(str(error))
        return counts

    def _open(self, split: str) -> Source:
        # Values that are mapped need not be classes.
        classes = 0 if self.values else self.classes
        source = reader_of(self.layout)(self.root, split, classes)
        self._opened.append(source)
        check_once(*self._opened)
        if self.values:
            source = relabelled(source, self.values, self.classes or IGNORE)
        return source

    def _as_first_numbered(
        self, source: Source, split: str, has_same_classes: bool
    ) -> Source:
        """The split with the class numbers of the first one."""
        if not has_same_classes:
            self._names = []
        try:
            source = numbered(source, self.root / split, self._names)
        except ValueError as error:
            self.tell(str(error))
        if not self._names:
            self._names = names_of(source)
        return source

    def _count(self, source: Source, split: str) -> "Counts":
        classes = self.classes or getattr(source, "num_classes", 0)
        counts = _counted(source, self.root / split, classes, self.tell)
        # A folder of label pictures does not say how many classes there are.
        is_unsaid = self.values or isinstance(source, ImageLabelFolder)
        if not self.classes and is_unsaid:
            counts.classes = counts.highest + 1
        if not self.values and counts.unit == "pixels":
            fault = doubt(source, counts.of)
            if fault:
                self.tell(fault)
        return counts


def _counted(
    source: Source, folder: Path, classes: int, tell: Callable[[str], None]
) -> "Counts":
    """Counts the sound samples; `tell` gets what is wrong with the others."""
    if not classes:
        raise ValueError(
            "--num_classes: this reader does not say how many classes there are"
        )
    counts = Counts(classes, kind_of(source))
    where = getattr(source, "where", f"sample {{}} of {folder}".format)
    for index, sample in enumerate(_samples(source)):
        if isinstance(sample, str):
            tell(sample)
            continue
        counts.highest = max(counts.highest, sample.high)
        fault = sample.fault(classes)
        if fault:
            tell(f"{where(index)}{fault}")
        else:
            counts.add(sample)
    labels = (
        f"labels 0 to {counts.highest}"
        if counts.highest >= 0
        else "no label could be read"
    )
    counts.words = f"{len(source):,} samples, {labels}"
    return counts


def _print(split: str, text: str) -> None:
    print(f"{logs.printable(split)}: {logs.printable(text)}", flush=True)


class _Sample(NamedTuple):
    """A sample that could be read: labels without ignored pixels, sizes as height and width."""

    low: int
    high: int
    # Pixels of each value, int64 [256]; empty where the label is one class.
    values: np.ndarray
    size: tuple[int, int]
    label_size: tuple[int, int]  # the picture's size, where the label is no picture

    def fault(self, classes: int) -> str:
        """What is wrong with its label, or ""."""
        if self.size != self.label_size:
            size = _in_words(self.label_size)
            return f" is {size} pixels (height x width), its picture {_in_words(self.size)}"
        for label in (self.low, self.high):
            if not 0 <= label < classes:
                return f": label {label} is no class; classes are 0 to {classes - 1}"
        return ""


def _in_words(size: tuple[int, int]) -> str:
    height, width = size
    return f"{height} x {width}"


def _samples(source: Source) -> Iterator[_Sample | str]:
    """Each sample, or what is wrong with it."""

    @pipeline.as_written
    def look(index: tf.Tensor) -> tuple[tf.Tensor, ...]:
        sample = source.read(index)
        if not {"image", "label"} <= sample.keys():
            raise ValueError(
                f"samples need an image and a label to be checked: {[*sample]}"
            )
        label = tf.cast(sample["label"], tf.int64)
        values = tf.zeros([0], tf.int64)
        # The picture's size is returned so that the picture is decoded: unused outputs are not.
        size = tf.shape(sample["image"])[:2]
        label_size = size
        if label.shape.rank:  # the label is a picture
            label_size = tf.shape(label)[:2]
            flat = tf.cast(tf.reshape(label, [-1]), tf.int32)
            values = tf.math.bincount(
                flat, minlength=_VALUES, maxlength=_VALUES, dtype=tf.int64
            )
            label = tf.where(label == IGNORE, tf.zeros_like(label), label)
        return tf.reduce_min(label), tf.reduce_max(label), values, size, label_size

    faults = _faults_of_files(source)
    indices = np.array([n for n in range(len(source)) if n not in faults], np.int64)
    # After a sample fails, the iterator continues with the next one.
    samples = tf.data.Dataset.from_tensor_slices(indices).map(look, tf.data.AUTOTUNE)
    samples = samples.prefetch(64).as_numpy_iterator()
    for index in range(len(source)):
        if index in faults:
            yield faults[index]
            continue
        try:
            low, high, values, size, label_size = next(samples)
            yield _Sample(
                low=int(low),
                high=int(high),
                values=values,
                size=tuple(size.tolist()),
                label_size=tuple(label_size.tolist()),
            )
        except tf.errors.OpError as error:
            reason = pipeline.reason_of(error)
            fault = source.explain(index)
            yield fault or f"sample {index} could be read a second time: {reason}"
        logs.progress("samples", index + 1, len(source))


def _faults_of_files(source: Source) -> dict[int, str]:
    """What is wrong with samples whose files are not to be read, by index."""
    if not is_listed(source):
        return {}
    # These are pictures, or pictures and then their labels.
    files = [source.root / os.fsdecode(name) for name in source.files()]
    faults = listing.unreadable(files, pictures.MOST_BYTES)
    return {place % len(source): fault for place, fault in faults.items()}


class Counts:
    """Counts over the sound samples of a split.

    `of`: samples, or pixels, of each class; `highest`: the highest label, -1: none could be read;
    `words`: what was read.
    """

    words = "not read"
    highest = -1

    def __init__(self, classes: int = 0, kind: str = "") -> None:
        self.classes = classes
        self.kind = kind
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
        lines = [self._sizes_in_words()]
        counts = self.of[:classes]
        if len(names) != classes:
            names = [str(number) for number in range(classes)]
        order = np.flatnonzero(counts)
        if len(order) > _SHOWN:
            rarest = np.argsort(counts[order], kind="stable")[:_SHOWN]
            order = order[rarest]
            lines.append(f"the {_SHOWN} rarest of {classes} classes:")
        for number in order.tolist():
            name = names[number]
            shown = name if name == str(number) else f"{number} {name}"
            share = counts[number] / max(counts.sum(), 1)
            lines.append(
                f"  {shown:<24.24} {counts[number]:>16,} {self.unit}  {share:8.3%}"
            )
        if self.unit == "pixels" and self.of[IGNORE]:
            lines.append(f"  {'ignored':<24} {self.of[IGNORE]:>16,} pixels")
        missing = [names[number] for number in np.flatnonzero(counts == 0).tolist()]
        if missing:
            lines.append(
                f"warning: {len(missing)} class(es) never occur: {logs.join(missing)}"
            )
        return lines

    def _sizes_in_words(self) -> str:
        sizes = sorted(self.sizes, key=lambda size: size[0] * size[1])
        least = _in_words(sizes[0])
        most = _in_words(sizes[-1])
        if least == most:
            return f"pictures: all {least} (height x width)"
        median = _in_words(sizes[(len(sizes) - 1) // 2])
        return f"pictures: {least} to {most}, median {median} (height x width)"

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
    for layout, signs in _SIGNS.items():
        for sign in signs:
            if any(root.glob(sign)):
                return layout
    return ""


def _arguments(argv: list[str]) -> Namespace:
    """The command's flags; `data_format` is the layout, given or recognized.

    Exits with 2 where --data_dir is a URL, is missing, or shows no layout and none is given.
    """
    parser = logs.parser(__doc__)
    parser.add_argument(
        "--data_dir", type=path_argument, required=True, help="folder of the data set"
    )
    parser.add_argument(
        "--data_format", choices=READERS, help="its layout, if it does not show"
    )
    parser.add_argument(
        "--split", action="append", help="train and val, or all that is packed"
    )
    parser.add_argument(
        "--num_classes", type=int, default=0, help="labels are below it"
    )
    parser.add_argument(
        "--label_map", default="", help="as of train.py: 255:1,0:ignore"
    )
    parser.add_argument(
        "--hash", action="store_true", help="keep the SHA-256 of each file"
    )
    parser.add_argument("--max_pixels", type=int, default=pictures.most_pixels)
    args = parser.parse_args(argv[1:])
    if not args.data_dir.exists():
        parser.error(f"--data_dir={args.data_dir} does not exist")
    args.data_format = args.data_format or layout_of(args.data_dir)
    if not args.data_format:
        parser.error(
            f"--data_dir={args.data_dir} does not show its layout: is that the folder? Then give "
            f"--data_format ({', '.join(READERS)})"
        )
    return args


@logs.explained
def main(argv: list[str]) -> int:
    """Returns the exit code: 0 all is well, 1 faults were found, 2 wrong use."""
    of_project()  # the project may add readers
    args = _arguments(argv)
    pictures.limit(args.max_pixels)
    layout = args.data_format
    split_of_fault: list[str] = []

    def tell(fault: str) -> None:
        """Prints and counts a fault of `split`, the split that the loop below has come to."""
        split_of_fault.append(split)
        if sys.stderr.isatty():  # the fault goes below the progress bar, not behind it
            print(file=sys.stderr, flush=True)
        _print(split, fault)

    values = label_values(typed.path(args.label_map))
    packed = args.data_dir.glob(*_SIGNS["records"]) if layout == "records" else ()
    splits = (
        args.split or sorted(path.parent.name for path in packed) or ["train", "val"]
    )
    checker = Checker(
        args.data_dir,
        layout,
        tell=tell,
        classes=args.num_classes,
        values=values,
        hashes=args.hash,
    )
    trained = "train" if "train" in splits else splits[0]
    for split in sorted(splits, key=lambda name: name != trained):
        # Of two splits the second has the classes of the first; of more this is not known.
        counts = checker.check(split, has_same_classes=len(splits) == 2)
        wrong = split_of_fault.count(split)
        verdict = f"{wrong:,} fault(s), listed above" if wrong else "all is well"
        _print(split, f"{counts.words} ({layout}): {verdict}")
        weights = counts.weights()
        if weights and not wrong and split == trained:
            _print(split, f"to balance classes: {weights}")
    return 1 if split_of_fault else 0
