"""Metrics: sums that are exact over ranks, and figures from the sums.

A task adds up tensors (counts as int64, losses as float64); the sums are added over the ranks in
one collective; figures come from the totals. A mean of per-rank means would be wrong where ranks
have different numbers of samples. What is no sum (an exact AUC) needs `Rows`.
"""

import csv
import io
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdkit import whole_files
from hvdkit.data import classes
from hvdkit.ranks.world import World

Arrays = dict[str, np.ndarray]  # by name


class Sums:
    """Sums of named tensors over this rank's batches, then over ranks; floats up to rounding.

    With `exact` they are added without rounding, as fractions: the same bits in any order.
    """

    def __init__(self, world: World, zeros: Arrays, *, exact: bool = False) -> None:
        self._world = world
        self._sums = zeros
        self._exact = exact
        floats = {n: sums for n, sums in zeros.items() if exact and sums.dtype.kind == "f"}
        self._fractions = {name: _fractions(sums) for name, sums in floats.items()}

    def add(self, more: Arrays) -> None:
        self._sums = {name: own + more[name] for name, own in self._sums.items()}
        for name, own in self._fractions.items():
            self._fractions[name] = [a + b for a, b in zip(own, _fractions(more[name]))]

    def over_ranks(self) -> Arrays:
        """Totals, on every rank, which all must call; integers are exact below 2**53."""
        own = {name: self._sums[name] for name in sorted(self._sums)}
        sent = [tf.constant(part.astype(np.float64)) for part in own.values()]
        found = hvd.grouped_allreduce(sent, op=hvd.Sum, name="metrics.sums")
        totals = {name: total.numpy().astype(own[name].dtype) for name, total in zip(own, found)}
        if self._exact:
            texts = {name: list(map(str, parts)) for name, parts in self._fractions.items()}
            everyone = self._world.gather_objects(texts, "metrics.exact")
            for name in texts:
                rounded = totals[name]
                columns = zip(*(theirs[name] for theirs in everyone))
                exact = []
                for total, parts in zip(np.ravel(rounded).tolist(), columns):
                    if math.isfinite(total):  # NaN and infinity stay, in any order
                        total = float(sum(map(Fraction, parts)))
                    exact.append(total)
                totals[name] = np.reshape(exact, rounded.shape).astype(rounded.dtype)
        return totals


def _fractions(values: np.ndarray) -> list[Fraction]:
    """The values in a row; 0 for NaN and infinity."""
    return [Fraction(x if math.isfinite(x) else 0) for x in np.ravel(values).tolist()]


class Rows:
    """What a task keeps of each sample (`per_sample`): first of this rank, then of all."""

    MOST_BYTES = 2**30  # of all samples, on each rank

    def __init__(self, empty: Arrays) -> None:
        self._found = {name: [rows] for name, rows in empty.items()}
        self._ids: list[int] = []

    def add(self, more: Arrays, ids: list[int]) -> None:
        for name, rows in more.items():
            if len(rows) != len(ids):
                raise ValueError(f"the task's per_sample has {len(rows)} {name} of {len(ids)}")
            self._found[name].append(rows)
        self._ids += ids

    def of_all_ranks(self) -> Arrays:
        """[samples, ...] by name, in the order of the samples; every rank must call it."""
        if not self._found:
            return {}
        ids = hvd.allgather(tf.constant(self._ids, tf.int64), name="metrics.ids").numpy()
        together = {}
        for name in sorted(self._found):
            own = tf.constant(np.concatenate(self._found[name]))
            together[name] = hvd.allgather(own, name=f"metrics.per_sample.{name}").numpy()
        return {name: rows[np.argsort(ids)] for name, rows in together.items()}


def zeros(eval_step: tf.types.experimental.PolymorphicFunction) -> tuple[Arrays, Arrays]:
    """Zero sums and no rows of evaluator.py's `make_step`, before any batch."""
    *_, sums, rows = eval_step.get_concrete_function().structured_outputs
    zero = {name: np.zeros(t.shape, t.dtype.as_numpy_dtype) for name, t in sums.items()}
    none = {n: np.zeros([0, *t.shape[1:]], t.dtype.as_numpy_dtype) for n, t in rows.items()}
    return zero, none


class KerasMetrics:
    """Keras metrics as they are: the state of each batch, added over batches and ranks.

        self.scores = KerasMetrics(auc=keras.metrics.AUC(), f1=keras.metrics.F1Score())
        sums(...):     return self.scores.sums(targets, probabilities)
        metrics(sums): return self.scores.figures(sums)

    A metric whose state is no sum (a maximum, a moving mean) is refused with a ValueError.
    """

    def __init__(self, **named: keras.metrics.Metric) -> None:
        self._named = named

    def sums(self, *batch: tf.Tensor) -> dict[str, tf.Tensor]:
        """For a task's `sums`; `batch`: what update_state takes, labels first."""
        found = {}
        for name, metric in self._named.items():
            with tf.init_scope():
                _require_sums(name, metric, batch)
            empty = [tf.zeros(v.shape, v.dtype) for v in metric.variables]
            state = metric.stateless_update_state(empty, *batch)
            found |= {f"{name}/{place}": value for place, value in enumerate(state)}
        return found

    def figures(self, sums: Arrays) -> dict[str, float]:
        """For a task's `metrics`; NAME, or NAME_0, NAME_1 ... of a metric with several values."""
        found = {}
        for name, metric in self._named.items():
            kinds = enumerate(metric.variables)
            state = [tf.cast(sums[f"{name}/{place}"], v.dtype) for place, v in kinds]
            value = np.asarray(metric.stateless_result(state))
            parts = enumerate(np.ravel(value)) if value.ndim else [("", value)]
            found |= {f"{name}_{place}".rstrip("_"): float(part) for place, part in parts}
        return found


def _require_sums(name: str, metric: keras.metrics.Metric, batch: Sequence[tf.Tensor]) -> None:
    """Makes the metric's variables; ValueError unless the same batch twice is twice its state, also
    as one batch."""
    shapes = [[size or 2 for size in part.shape] for part in batch]
    like = [tf.ones(shape, part.dtype) for shape, part in zip(shapes, batch)]
    if len(like) > 1 and like[1].dtype.is_floating:
        like[1] *= 0.25  # not the labels: a maximum of errors must not be 0
    longer = [tf.concat([x, x], 0) if x.shape.rank else x for x in like]
    states = []
    for batches in ([], [like], [like, like], [longer]):
        metric.reset_state()
        for parts in batches:
            metric.update_state(*parts)
        states.append([v.numpy() for v in metric.variables])
    metric.reset_state()
    none, once, *twice = states
    alike = all(np.allclose(x, 2 * y) for two in twice for x, y in zip(two, once, strict=True))
    if any(np.any(x) for x in none) or not alike:
        kind = type(metric).__name__
        raise ValueError(f"{name}: the state of {kind} is no sum over samples: use per_sample")


def confusion_matrix(
    labels: tf.Tensor, predictions: tf.Tensor, counted: tf.Tensor, *, num_classes: int
) -> tf.Tensor:
    """Counts [num_classes, num_classes] int64, row: label, column: prediction.

    Labels and predictions are integers of one shape; `counted`, a bool of that shape, says which
    positions count. Elsewhere a label may be outside [0, num_classes).
    """
    counted = tf.reshape(counted, [-1])
    flat = (tf.reshape(tf.cast(part, tf.int64), [-1]) for part in (labels, predictions))
    labels, predictions = (tf.boolean_mask(part, counted) for part in flat)
    cells = tf.cast(labels * num_classes + predictions, tf.int32)
    size = num_classes**2
    counts = tf.math.bincount(cells, minlength=size, maxlength=size, dtype=tf.int64)
    return tf.reshape(counts, [num_classes, num_classes])


def in_top(labels: tf.Tensor, scores: tf.Tensor, k: int) -> tf.Tensor:
    """Whether labels [B] are among the k classes with the highest scores [B, classes]: bool [B].

    Among equal scores the class with the higher number comes first, as in scikit-learn's
    top_k_accuracy_score. A sample with a NaN score is no hit.
    """
    numbers = tf.range(scores.shape[-1], dtype=labels.dtype)
    own = tf.gather(scores, labels, axis=-1, batch_dims=1)[:, None]
    before = (scores > own) | ((scores == own) & (numbers > labels[:, None]))
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


def class_names(count: int, *sources: Any) -> list[str]:
    """As the first of the sources names its classes that names any; numbers for classes beyond."""
    names = next(filter(None, map(classes.of, sources)), [])
    return names[:count] + [str(number) for number in range(len(names), count)]


def write_confusion(file: Path, names: Sequence[str], confusion: np.ndarray) -> None:
    """As CSV; confusion: integer [n, n], row: label, column: prediction."""
    rows = ([name, *row] for name, row in zip(names, confusion.tolist()))
    whole_files.write_csv(file, [["label \\ prediction", *names], *rows])


def read_confusion(file: Path) -> tuple[list[str], np.ndarray]:
    """Names, and the matrix, int64 [n, n]; raises ValueError, naming the file."""
    try:
        with whole_files.opened(file, most=whole_files.JSON_BYTES) as content:
            text = io.TextIOWrapper(content, "utf-8", "surrogateescape", newline="")
            table = csv.reader(text)
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
    labels = confusion.sum(1)
    predictions = confusion.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {"labels": labels, "recall": hits / labels, "precision": hits / predictions}
    found["iou"] = intersection_over_union(confusion)
    return {name: values.tolist() for name, values in found.items()}
