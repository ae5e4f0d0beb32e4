"""Metrics: sums that are exact over ranks, and figures from the sums.

A task adds up tensors (counts as int64, losses as float64); the sums are added over the ranks in
one collective; figures come from the totals. A mean of per-rank means would be wrong where ranks
have different numbers of samples.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit import whole_files
from hvdkit.ranks.world import World

_FINEST = 1074  # 2**-1074 is the smallest float64; all others are multiples of it


class RankSums:
    """Sums of named tensors over this rank's batches, then over ranks; floats up to rounding."""

    def __init__(self, world: World, zeros: dict[str, np.ndarray]) -> None:
        self._world, self._sums = world, zeros

    def add(self, more: dict[str, np.ndarray]) -> None:
        self._sums = {name: own + more[name] for name, own in self._sums.items()}

    def over_ranks(self) -> dict[str, np.ndarray]:
        """Totals in one collective, which every rank must call; integers are exact below 2**53."""
        own = {name: np.asarray(self._sums[name]) for name in sorted(self._sums)}
        flat = np.concatenate([np.ravel(part).astype(np.float64) for part in own.values()])
        total = hvd.allreduce(tf.constant(flat), op=hvd.Sum, name="metrics.sums").numpy()
        parts = np.split(total, np.cumsum([part.size for part in own.values()])[:-1])
        shaped = {name: part.reshape(own[name].shape) for name, part in zip(own, parts)}
        return {name: part.astype(own[name].dtype) for name, part in shaped.items()}


class ExactSums(RankSums):
    """Adds floats without rounding, as integers: the same bits in any order.

    Every float64 is a multiple of 2**-1074: Python's integers hold the sum, a microsecond each.
    """

    def __init__(self, world: World, zeros: dict[str, np.ndarray]) -> None:
        super().__init__(world, zeros)
        floats = {name: sums for name, sums in zeros.items() if sums.dtype.kind == "f"}
        self._units = {name: _in_units(sums) for name, sums in floats.items()}

    def add(self, more: dict[str, np.ndarray]) -> None:
        super().add(more)
        pairs = {name: zip(own, _in_units(more[name])) for name, own in self._units.items()}
        self._units = {name: [a + b for a, b in both] for name, both in pairs.items()}

    def over_ranks(self) -> dict[str, np.ndarray]:
        totals = super().over_ranks()
        everyone = self._world.gather_objects(self._units, "metrics.exact")
        for name in self._units:
            rounded = totals[name]
            units = map(sum, zip(*(theirs[name] for theirs in everyone)))
            exact = np.reshape([_rounded(number) for number in units], rounded.shape)
            # NaN and infinity stay what they are, in any order.
            totals[name] = np.where(np.isfinite(rounded), exact, rounded).astype(rounded.dtype)
        return totals


def _in_units(values: np.ndarray) -> list[int]:
    """Multiples of 2**-_FINEST; 0 for NaN and infinity."""
    floats = np.ravel(values).astype(np.float64).tolist()
    pairs = [(x if math.isfinite(x) else 0.0).as_integer_ratio() for x in floats]
    return [above * (2**_FINEST // below) for above, below in pairs]


def _rounded(units: int) -> float:
    """Python divides integers with one rounding."""
    try:
        return units / 2**_FINEST
    except OverflowError:  # larger than any float
        return math.inf if units > 0 else -math.inf


def zeros(eval_step: tf.types.experimental.PolymorphicFunction) -> dict[str, np.ndarray]:
    """Zero sums of `eval_step(batch) -> (outputs, sums)`, for a rank without batches."""
    _, sums = eval_step.get_concrete_function().structured_outputs
    return {n: np.zeros(t.shape, t.dtype.as_numpy_dtype) for n, t in sums.items()}


def confusion_matrix(
    labels: tf.Tensor, predictions: tf.Tensor, counted: tf.Tensor, *, num_classes: int
) -> tf.Tensor:
    """Counts [num_classes, num_classes] int64, row: label, column: prediction.

    Labels and predictions are integers of one shape; `counted`, a bool of that shape, says which
    positions count. Elsewhere a label may be outside [0, num_classes).
    """
    counted = tf.reshape(counted, [-1])
    labels, predictions = (
        tf.boolean_mask(tf.reshape(tf.cast(part, tf.int64), [-1]), counted)
        for part in (labels, predictions)
    )
    cells, size = tf.cast(labels * num_classes + predictions, tf.int32), num_classes**2
    counts = tf.math.bincount(cells, minlength=size, maxlength=size, dtype=tf.int64)
    return tf.reshape(counts, [num_classes, num_classes])


def in_top(labels: tf.Tensor, scores: tf.Tensor, k: int) -> tf.Tensor:
    """Whether labels [B] are among the k classes with the highest scores [B, classes]: bool [B].

    Among equal scores the class with the higher number comes first, as in scikit-learn's
    top_k_accuracy_score. A sample with a NaN score is no hit.
    """
    classes = tf.range(scores.shape[-1], dtype=labels.dtype)
    own = tf.gather(scores, labels, axis=-1, batch_dims=1)[:, None]
    before = (scores > own) | ((scores == own) & (classes > labels[:, None]))
    places = tf.math.count_nonzero(before, axis=-1)
    return (places < k) & ~tf.reduce_any(tf.math.is_nan(scores), axis=-1)


def intersection_over_union(confusion: np.ndarray) -> np.ndarray:
    """IoU of each class, float64 [num_classes]; NaN if in neither labels nor predictions."""
    hits = np.diag(confusion).astype(np.float64)
    union = confusion.sum(0) + confusion.sum(1) - hits
    return np.divide(hits, union, out=np.full_like(hits, np.nan), where=union > 0)


def accuracy(confusion: np.ndarray) -> float:
    """Share of positions whose prediction is the label."""
    return float(np.trace(confusion) / max(confusion.sum(), 1))


def class_names(source: Any, count: int) -> list[str]:
    """The data's class names, or the numbers of the classes if their count does not match."""
    names = [str(name) for name in getattr(source, "class_names", None) or []]
    return names if len(names) == count else [str(number) for number in range(count)]


def write_confusion(file: Path, names: Sequence[str], confusion: np.ndarray) -> None:
    """As CSV; confusion: integer [n, n], row: label, column: prediction."""
    rows = ([name, *row] for name, row in zip(names, confusion.tolist()))
    whole_files.write_csv(file, [["label \\ prediction", *names], *rows])


def read_confusion(file: Path) -> tuple[list[str], np.ndarray]:
    """Names, and the matrix, int64 [n, n]; raises ValueError, naming the file."""
    try:
        with whole_files.opened(file, most=whole_files.JSON_BYTES) as content:
            how = {"newline": "", "encoding": "utf-8", "errors": "surrogateescape"}
            table = csv.reader(io.TextIOWrapper(content, **how))
            names = next(table, [])[1:]
            # Row by row: as text a cell takes fifty bytes.
            counts = np.array([np.array([*map(int, row[1:])], np.int64) for row in table])
        if counts.shape != (len(names), len(names)) or (counts < 0).any():
            raise ValueError(f"{len(names)} names, {counts.shape}")
    except (ValueError, OverflowError, csv.Error) as error:
        raise ValueError(f"{file} holds no confusion matrix ({error}): remove the file") from None
    return names, counts


def class_figures(confusion: np.ndarray) -> dict[str, list[float]]:
    """Figures of each class from a confusion matrix (row: label), NaN where undefined."""
    hits = np.diag(confusion).astype(np.float64)
    labels, predictions = confusion.sum(1), confusion.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {"labels": labels, "recall": hits / labels, "precision": hits / predictions}
    found["iou"] = intersection_over_union(confusion)
    return {name: values.tolist() for name, values in found.items()}
