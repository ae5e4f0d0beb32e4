"""How often each class occurs in a split, how large its pictures are, and weights from it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvdkit.data.labels import IGNORE

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

    def add(self, label: int, values: np.ndarray, height: int, width: int) -> None:
        """A sample's class, or its pixels of each value (`of_label`), and its picture's size."""
        self.samples += 1
        self._sizes.append((height, width))
        if len(values):
            self._pixels = True
            self._of[:_VALUES] += values
        elif 0 <= label < len(self._of):
            self._of[label] += 1

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
