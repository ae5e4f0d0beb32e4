"""Reads all of a data set and lists what is wrong with it.

    hvdkit check --data_dir=VOCdevkit/VOC2012 --data_format=voc
    hvdkit check --data_dir=datasets/voc                             a packed one

Every sample goes through the reader that training uses. Its label must be a class, and a label
picture must have the size of its picture. A packed set is read twice: first the SHA-256 of its
shards are compared. Each fault is one line that names the file. Then it prints how often each class
occurs and how large the pictures are; for the training split, if it has no faults, also
--class_weights that balance the classes. Exit code 0: all is well; 1: faults found; 2: wrong flags.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from hvdkit import logs, whole_files
from hvdkit.data import pipeline
from hvdkit.data.labels import IGNORE, one_class
from hvdkit.data.open import reader_of
from hvdkit.data.readers import records
from hvdkit.data.readers.pairs import ImageLabelFolder
from hvdkit.data.source import Source, unshared_classes
from hvdkit.logs import join
from hvdkit.settings import of_project
from hvdkit.settings.data import READERS

# Files by which a format is recognized without --data_format.
_SIGNS = {
    "records": (f"[!.]*/{records.META}",),
    "folders": ("splits/*.txt",),
    "voc": ("ImageSets/Segmentation", "VOC2012/ImageSets/Segmentation"),
    "cityscapes": ("leftImg8bit",),
    "cifar10": ("data_batch_1.bin", "cifar-10-batches-bin/data_batch_1.bin"),
    "cifar100": ("train.bin", "cifar-100-binary/train.bin"),
    "class_folders": ("train/*/*",),
}


def check(
    root: Path,
    split: str,
    layout: str,
    *,
    classes: int,
    tell: Callable[[str], None],
    others: dict[str, Source],
) -> tuple[str, Counts | None]:
    """Reads one split; `tell` gets each fault, in a sentence.

    Args:
      layout: a key of READERS.
      classes: number of classes; 0: as the reader says.
      others: splits read before, by name; this one is added. Their classes must be the same.

    Returns what was read, in words, and counts over the good samples.
    """
    try:
        if layout == "records" and not _is_whole(root / split, tell):
            return "not read", None
        source = reader_of(layout)(root, split, classes)
    except (ValueError, OSError) as error:
        tell(str(error))
        return "not read", None
    for name, other in others.items():
        if differ := unshared_classes(source, other):
            tell(
                f"{root / split} and {root / name} hold different classes: only one of the two "
                f"has {join(differ)}; labels would not agree, so make them the same"
            )
    others[split] = source
    if layout == "class_folders" and source.num_classes == 1:
        tell(one_class(root / split))
    # A folder of label pictures does not say how many classes there are.
    open_end = not classes and isinstance(source, ImageLabelFolder)
    where = getattr(source, "where", lambda index: _place(source, root / split, index))
    if not (known := classes or getattr(source, "num_classes", 0)):
        raise ValueError("--num_classes: this reader does not say how many classes there are")
    highest, counted = read_all(source, known, where=where, tell=tell)
    counted.classes = highest + 1 if open_end else known
    for line in counted.told(list(map(str, getattr(source, "class_names", ())))):
        print(f"{split}: {line}", flush=True)
    labels = f"labels 0 to {highest}" if highest >= 0 else "no label could be read"
    return f"{len(source):,} samples, {labels}", counted


def read_all(
    source: Source, classes: int, *, where: Callable[[int], str], tell: Callable[[str], None]
) -> tuple[int, Counts]:
    """The highest label of all samples, and counts over the good ones."""
    highest, counted = -1, Counts(classes)
    for index, found in enumerate(_samples(source)):
        if isinstance(found, str):
            tell(found)
            continue
        highest = max(highest, found.high)
        wrong = [label for label in (found.low, found.high) if not 0 <= label < classes]
        if found.size != found.label_size:
            picture, label = (f"{h} x {w}" for h, w in (found.size, found.label_size))
            tell(f"{where(index)} is {label} pixels (height x width), its picture {picture}")
        elif wrong:
            tell(f"{where(index)}: label {wrong[0]} is no class; classes are 0 to {classes - 1}")
        else:
            counted.add(found)
    return highest, counted


def _is_whole(folder: Path, tell: Callable[[str], None]) -> bool:
    """Looks at a packed split's shards; False when their sizes or marks are wrong already."""
    listed = records.shards(folder)
    problems = [problem for shard in listed if (problem := shard.problem())]
    for problem in problems:
        tell(problem)
    hashed = [] if problems else listed
    with ThreadPoolExecutor(4) as pool:
        sums = pool.map(whole_files.sha256, [shard.path for shard in hashed])
        for number, (shard, sha256) in enumerate(zip(hashed, sums)):
            logs.progress("shards", number + 1, len(hashed))
            if sha256 != shard.sha256:
                tell(f"{shard.path} does not match its SHA-256 in {records.META}; copy it again")
    return not problems


class _Sample(NamedTuple):
    """Labels are without ignored pixels; sizes are height and width."""

    low: int
    high: int
    values: np.ndarray  # pixels of each value, see of_label
    size: tuple[int, int]
    label_size: tuple[int, int]  # the picture's, where the label is no picture


def _samples(source: Source) -> Iterator[_Sample | str]:
    """Each sample, or what is wrong with it."""

    @pipeline.as_written
    def look(index: tf.Tensor) -> tuple[tf.Tensor, ...]:
        sample = source.read(index)
        if not {"image", "label"} <= sample.keys():
            raise ValueError(f"samples need an image and a label to be checked: {[*sample]}")
        label = tf.cast(sample["label"], tf.int64)
        values = of_label(label)
        # The picture's size is returned so that the picture is decoded: unused outputs are not.
        size = tf.shape(sample["image"])[:2]
        label_size = tf.shape(label)[:2] if label.shape.rank else size
        if label.shape.rank:  # one for each pixel
            label = tf.where(label == IGNORE, tf.zeros_like(label), label)
        return tf.reduce_min(label), tf.reduce_max(label), values, size, label_size

    # After a sample fails, the iterator continues with the next one.
    samples = iter(tf.data.Dataset.range(len(source)).map(look, tf.data.AUTOTUNE).prefetch(64))
    for index in range(len(source)):
        try:
            low, high, values, *sizes = (part.numpy() for part in next(samples))
            yield _Sample(int(low), int(high), values, *(tuple(size.tolist()) for size in sizes))
        except tf.errors.OpError as error:
            reason = source.explain(index)
            yield (
                reason or f"sample {index} could be read a second time: {pipeline.reason_of(error)}"
            )
        logs.progress("samples", index + 1, len(source))


def _place(source: Source, folder: Path, index: int) -> str:
    file = getattr(source, "picture_file", None)
    return f"the label of {file(index)}" if file else f"sample {index} of {folder}"


def _layout(root: Path) -> str:
    for layout, signs in _SIGNS.items():
        if any(next(root.glob(sign), None) for sign in signs):
            return layout
    raise ValueError(
        f"--data_dir={root} does not show its layout: is that the folder? Then give --data_format "
        f"({', '.join(READERS)})"
    )


def _splits(root: Path, layout: str) -> list[str]:
    packed = root.glob(*_SIGNS["records"]) if layout == "records" else ()
    return sorted(path.parent.name for path in packed) or ["train", "val"]


_VALUES = 256  # of a label picture
_SHOWN = 40  # classes


def of_label(label: tf.Tensor) -> tf.Tensor:
    """Pixels of each value, int64 [256], of a label picture; of a sample's one class: [0]."""
    if not label.shape.rank:
        return tf.zeros([0], tf.int64)
    flat = tf.cast(tf.reshape(label, [-1]), tf.int32)
    return tf.math.bincount(flat, minlength=_VALUES, maxlength=_VALUES, dtype=tf.int64)


class Counts:
    """Counts over one split; call `add` for each good sample. `classes` may be set later."""

    def __init__(self, classes: int) -> None:
        self.classes, self.samples = classes, 0
        self._of = np.zeros(max(classes, _VALUES), np.int64)
        self._sizes: list[tuple[int, int]] = []
        self._pixels = False

    def add(self, sample: _Sample) -> None:
        self.samples += 1
        self._sizes.append(sample.size)
        if len(sample.values):
            self._pixels = True
            self._of[:_VALUES] += sample.values
        elif 0 <= sample.high < len(self._of):
            self._of[sample.high] += 1

    def of_classes(self) -> np.ndarray:
        """int64 [classes]; ignored pixels and invalid labels are not counted."""
        found = self._of.copy()
        if self._pixels:
            found[IGNORE] = 0
        return found[: self.classes]

    def told(self, names: Sequence[str]) -> list[str]:
        """Lines of text: sizes, classes and their shares."""
        if not self.samples:
            return []
        lines, counts = [self._sizes_told()], self.of_classes()
        names = names if len(names) == len(counts) else [str(n) for n in range(len(counts))]
        unit, total = ("pixels" if self._pixels else "samples"), max(int(counts.sum()), 1)
        order = range(len(counts))
        if len(counts) > _SHOWN:
            order = np.argsort(counts, kind="stable")[:_SHOWN].tolist()
            lines.append(f"the {_SHOWN} rarest of {len(counts)} classes:")
        for number in order:
            count, name = int(counts[number]), str(names[number])
            shown = name if name == str(number) else f"{number} {name}"
            lines.append(f"  {shown:<24.24} {count:>16,} {unit}  {count / total:8.3%}")
        if self._pixels and self._of[IGNORE]:
            lines.append(f"  {'ignored':<24} {int(self._of[IGNORE]):>16,} {unit}")
        if missing := [str(names[n]) for n in np.flatnonzero(counts == 0)]:
            more = ", ..." if len(missing) > 5 else ""
            lines.append(f"{len(missing)} class(es) never occur: {', '.join(missing[:5])}{more}")
        return lines

    def weights(self) -> str:
        """The flag that gives all classes the same total weight."""
        weights = ",".join(f"{weight:.4g}" for weight in balanced(self.of_classes()))
        return f"--class_weights={weights}"

    def _sizes_told(self) -> str:
        by_area = sorted(self._sizes, key=lambda size: size[0] * size[1])
        middle = statistics.median_low(range(len(by_area)))
        least, median, most = (f"{h} x {w}" for h, w in (by_area[n] for n in (0, middle, -1)))
        if least == most:
            return f"pictures: all {least} (height x width)"
        return f"pictures: {least} to {most}, median {median} (height x width)"


def balanced(counts: np.ndarray) -> list[float]:
    """Weights that give all classes the same total: n / (classes * count of the class).

    King and Zeng 2001 ("Logistic Regression in Rare Events Data"), as scikit-learn's "balanced".
    Their mean over samples, or pixels, is 1. A class that never occurs gets 1.
    """
    present = counts > 0
    every = counts.sum() / max(np.count_nonzero(present), 1)
    return np.where(present, every / np.maximum(counts, 1), 1.0).tolist()


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    of_project()  # it may add readers
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data_dir", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--data_format", choices=READERS, help="its layout, if it does not show")
    parser.add_argument("--split", action="append", help="train and val, or all that is packed")
    parser.add_argument("--num_classes", type=int, default=0, help="labels are below it")
    args = parser.parse_args(argv[1:])
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files may not be text
    faults: list[str] = []

    def tell(fault: str) -> None:
        faults.append(split)
        if sys.stderr.isatty():  # below the bar, not behind it
            print(file=sys.stderr, flush=True)
        print(f"{split}: {fault}", flush=True)

    try:
        layout = args.data_format or _layout(args.data_dir)
    except ValueError as error:
        parser.error(str(error))
    splits, others = args.split or _splits(args.data_dir, layout), {}
    trained = "train" if "train" in splits else splits[0]
    for split in splits:
        if len(splits) != 2:  # two splits: training and validation; more: unknown purpose
            others = {}
        try:
            read, counted = check(
                args.data_dir, split, layout, classes=args.num_classes, tell=tell, others=others
            )
        except ValueError as error:
            parser.error(str(error))
        wrong = faults.count(split)
        verdict = f"{wrong:,} fault(s), listed above" if wrong else "all is well"
        print(f"{split}: {read} ({layout}): {verdict}", flush=True)
        if counted and counted.samples and not wrong and split == trained:
            print(f"{split}: to balance classes: {counted.weights()}", flush=True)
    return 1 if faults else 0
