"""Metrics: sums that are exact over ranks, and figures from the sums.

A task adds up tensors (counts as int64, losses as float64); the sums are added over the ranks in
one collective; figures come from the totals. A mean of per-rank means would be wrong where ranks
have different numbers of samples. What is no sum (an exact AUC) needs `Rows`.
"""

import csv
import io
import itertools
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
from hvdkit.train.step.losses import required

Arrays = dict[str, np.ndarray]  # by name
# Their thresholds go from 0 to 1, and Keras clips predictions to these.
_OF_PROBABILITIES = (
    keras.metrics.AUC,
    keras.metrics.PrecisionAtRecall,
    keras.metrics.RecallAtPrecision,
    keras.metrics.SensitivityAtSpecificity,
    keras.metrics.SpecificityAtSensitivity,
)
_ROUNDING = 0.01  # Probabilities of bfloat16 may be so much above 1.


class Sums:
    """Sums of named tensors over this rank's batches, then over ranks; floats up to rounding.

    With `exact` they are added without rounding, as fractions: the same bits in any order.
    """

    def __init__(self, world: World, zeros: Arrays, *, exact: bool = False) -> None:
        self._world = world
        self._sums = zeros
        self._exact = exact
        self._fractions: dict[str, list[Fraction]] = {}
        if exact:
            for name, sums in zeros.items():
                if sums.dtype.kind == "f":
                    self._fractions[name] = _fractions(sums)

    def add(self, batch_sums: Arrays) -> None:
        self._sums = {
            name: total + batch_sums[name] for name, total in self._sums.items()
        }
        for name, totals in self._fractions.items():
            pairs = zip(totals, _fractions(batch_sums[name]))
            self._fractions[name] = [total + value for total, value in pairs]

    def over_ranks(self) -> Arrays:
        """Totals, on every rank, which all must call; integers are exact below 2**53."""
        names = sorted(self._sums)
        sent = [tf.constant(self._sums[name].astype(np.float64)) for name in names]
        received = hvd.grouped_allreduce(sent, op=hvd.Sum, name="metrics.sums")
        totals = {}
        for name, total in zip(names, received):
            totals[name] = total.numpy().astype(self._sums[name].dtype)
        if self._exact:
            totals |= self._exact_over_ranks(totals)
        return totals

    def _exact_over_ranks(self, totals: Arrays) -> Arrays:
        """The float totals, computed from the fractions of all ranks and rounded once."""
        texts = {
            name: [str(part) for part in parts]
            for name, parts in self._fractions.items()
        }
        texts_by_rank = self._world.gather_objects(texts, "metrics.exact")
        exact_totals = {}
        for name in texts:
            total = totals[name]
            by_value = zip(*(rank_texts[name] for rank_texts in texts_by_rank))
            values = []
            for value, parts in zip(np.ravel(total).tolist(), by_value):
                if math.isfinite(value):  # NaN and infinity stay, in any order
                    value = float(sum(Fraction(part) for part in parts))
                values.append(value)
            exact_totals[name] = np.reshape(values, total.shape).astype(total.dtype)
        return exact_totals


def _fractions(values: np.ndarray) -> list[Fraction]:
    """The values in a row; 0 for NaN and infinity."""
    return [Fraction(x if math.isfinite(x) else 0) for x in np.ravel(values).tolist()]


class Rows:
    """What a task keeps of each sample (`per_sample`): first of this rank, then of all."""

    MOST_BYTES = 2**30  # limit of the rows of all samples, which every rank holds

    def __init__(self, empty: Arrays) -> None:
        self._batches = {name: [rows] for name, rows in empty.items()}
        self._ids: list[int] = []

    def add(self, batch_rows: Arrays, ids: list[int]) -> None:
        for name, rows in batch_rows.items():
            if len(rows) != len(ids):
                raise ValueError(
                    f"the task's per_sample has {len(rows)} {name} of {len(ids)}"
                )
            self._batches[name].append(rows)
        self._ids += ids

    def of_all_ranks(self) -> Arrays:
        """[samples, ...] by name, in the order of the samples; every rank must call it."""
        if not self._batches:
            return {}
        ids = hvd.allgather(
            tf.constant(self._ids, tf.int64), name="metrics.ids"
        ).numpy()
        order = np.argsort(ids)
        rows = {}
        for name in sorted(self._batches):
            local_rows = tf.constant(np.concatenate(self._batches[name]))
            gathered = hvd.allgather(local_rows, name=f"metrics.per_sample.{name}")
            rows[name] = gathered.numpy()[order]
        return rows


def zeros(
    eval_step: tf.types.experimental.PolymorphicFunction,
) -> tuple[Arrays, Arrays]:
    """Zero sums and no rows of evaluator.py's `make_step`, before any batch."""
    *_, sums, rows = eval_step.get_concrete_function().structured_outputs
    zero_sums = {
        name: np.zeros(t.shape, t.dtype.as_numpy_dtype) for name, t in sums.items()
    }
    no_rows = {}
    for name, row in rows.items():
        no_rows[name] = np.zeros([0, *row.shape[1:]], row.dtype.as_numpy_dtype)
    return zero_sums, no_rows


class KerasMetrics:
    """Keras metrics as they are: the state of each batch, added over batches and ranks.

        self.scores = KerasMetrics(auc=keras.metrics.AUC(), f1=keras.metrics.F1Score())
        sums(...):     return self.scores.sums(targets, probabilities)
        metrics(sums): return self.scores.figures(sums)

    A metric whose state is no sum (a maximum, a moving mean) is refused with a ValueError, and so
    are predictions that are no probabilities for an AUC without from_logits=True.
    """

    def __init__(self, **named: keras.metrics.Metric) -> None:
        self._named = {name: _precise(metric) for name, metric in named.items()}

    def sums(self, *batch: tf.Tensor) -> dict[str, tf.Tensor]:
        """What a task's `sums` returns; `batch`: what update_state takes, labels first."""
        sums = {}
        for name, metric in self._named.items():
            if len(batch) == 2 and _counts_padding(metric, batch[1]):
                raise ValueError(
                    f"{name}: {type(metric).__name__} counts padding: give the weights of samples "
                    "as third argument, as tf.cast(mask, tf.float32), or weights of 1 where it "
                    "leaves padding out by itself"
                )
            with tf.init_scope():
                _require_sums(name, metric, batch)
            parts = list(batch)
            # A subclass may make its own probabilities of what it is given.
            if type(metric) in _OF_PROBABILITIES:
                parts[1] = _require_probabilities(name, metric, batch)
            empty = [tf.zeros(v.shape, v.dtype) for v in metric.variables]
            state = metric.stateless_update_state(empty, *parts)
            for place, value in enumerate(state):
                sums[f"{name}/{place}"] = value
        return sums

    def figures(self, sums: Arrays) -> dict[str, float]:
        """What a task's `metrics` returns: NAME, or NAME_0, NAME_1 ... for several values."""
        figures = {}
        for name, metric in self._named.items():
            state = []
            for place, variable in enumerate(metric.variables):
                state.append(tf.cast(sums[f"{name}/{place}"], variable.dtype))
            result = np.asarray(metric.stateless_result(state))
            if result.ndim:
                for place, value in enumerate(np.ravel(result)):
                    figures[f"{name}_{place}"] = float(value)
            else:
                figures[name] = float(result)
        return figures


class _R2Score(keras.metrics.R2Score):
    """In float64: it takes one sum of squares off another, and targets may have a large mean."""

    def add_variable(self, shape: Any, initializer: Any, **options: Any) -> Any:
        return super().add_variable(
            shape, initializer, **options | {"dtype": "float64"}
        )


def _precise(metric: keras.metrics.Metric) -> keras.metrics.Metric:
    """The metric, or one that does the same with more digits."""
    if type(metric) is not keras.metrics.R2Score:
        return metric
    return _R2Score.from_config(metric.get_config() | {"dtype": "float64"})


def _counts_padding(metric: keras.metrics.Metric, predictions: tf.Tensor) -> bool:
    """Whether a mask of Keras hides predictions that the metric counts.

    Keras hides padding from means of a function alone, if the mask is on the very predictions; an
    operation on a model's outputs, as a sigmoid, leaves the mask behind. A metric with an
    `ignore_class` leaves out padding by the labels.
    """
    if getattr(metric, "ignore_class", None) is not None:
        return False
    if getattr(predictions, "_keras_mask", None) is not None:
        return not isinstance(metric, keras.metrics.MeanMetricWrapper)
    if not tf.is_symbolic_tensor(predictions) or (predictions.shape.rank or 0) < 2:
        return False
    # [batch, time]; other tensors are not of the same positions, as those before a pooling.
    positions = predictions.shape[:2].as_list()
    tensors = [predictions]
    seen = {id(predictions)}
    for tensor in tensors:  # The list grows meanwhile.
        mask = getattr(tensor, "_keras_mask", None)
        if mask is not None and mask.shape.as_list() == positions:
            return True
        for source in tensor.op.inputs:
            has_rank = source.shape.rank is not None and id(source) not in seen
            if has_rank and source.shape[:2].as_list() == positions:
                seen.add(id(source))
                tensors.append(source)
    return False


def _require_probabilities(
    name: str, metric: keras.metrics.Metric, batch: Sequence[tf.Tensor]
) -> tf.Tensor:
    """The predictions; when it runs, InvalidArgumentError names one that is no probability.

    Not NaN, which has a sentence of its own, nor where weights of samples, [batch], are 0.
    """
    predictions = batch[1]
    if metric.get_config().get("from_logits"):
        return predictions
    values = tf.cast(predictions, tf.float32)
    is_outside = (values < -_ROUNDING) | (values > 1 + _ROUNDING)
    if len(batch) > 2:
        # Weights have the first axes of the predictions.
        counts = batch[2] != 0
        for _ in range(values.shape.rank - counts.shape.rank):
            counts = counts[..., tf.newaxis]
        is_outside &= counts
    kind = type(metric).__name__
    instead = "tf.sigmoid(outputs)"
    if isinstance(metric, keras.metrics.AUC):
        instead += " or AUC(from_logits=True)"
    text = f"{name}: {kind} takes probabilities, and {{}} is none: give it {instead}"
    return required(predictions, text, values=values, sound=~is_outside)


def _require_sums(
    name: str, metric: keras.metrics.Metric, batch: Sequence[tf.Tensor]
) -> None:
    """Makes the metric's variables; ValueError unless states of batches add up.

    It is tried with a batch twice, and with two that differ, one after the other and as one.
    """
    probe = []
    for part in batch:
        probe.append(tf.ones([size or 2 for size in part.shape], part.dtype))
    if len(probe) > 1 and probe[1].dtype.is_floating:
        # The outputs differ from the labels: a maximum of errors must not be 0.
        probe[1] *= 0.25
    other = [_varied(part) for part in probe]
    if len(probe) > 1:
        other[0] = tf.zeros_like(other[0])  # other labels, which are classes too
    states = _states(metric, probe, other)
    if any(np.isnan(value).any() for value in itertools.chain(*states)):
        # A correlation of rows of one number is none.
        probe = [_varied(part) for part in probe]
        states = _states(metric, probe, [part * part for part in probe])
    start, one, another, twice, both, as_one = states
    doubled = [2 * value for value in one]
    added = [value + other_value for value, other_value in zip(one, another)]
    starts_at_zero = not any(np.any(value) for value in start)
    if not (
        starts_at_zero
        and _are_close(twice, doubled)
        and _are_close(both, added)
        and _are_close(as_one, added)
    ):
        raise ValueError(
            f"{name}: the state of {type(metric).__name__} is no sum over samples: use per_sample"
        )


def _states(
    metric: keras.metrics.Metric,
    probe: Sequence[tf.Tensor],
    other: Sequence[tf.Tensor],
) -> list[list[np.ndarray]]:
    """The metric's state at its start and after batches.

    After `probe`, after `other`, after `probe` twice, after `probe` and `other`, and after these
    two as one batch.
    """
    as_one = []
    for part, other_part in zip(probe, other, strict=True):
        as_one.append(tf.concat([part, other_part], 0) if part.shape.rank else part)
    states = []
    for batches in ([], [probe], [other], [probe, probe], [probe, other], [as_one]):
        metric.reset_state()
        for parts in batches:
            metric.update_state(*parts)
        states.append([v.numpy() for v in metric.variables])
    metric.reset_state()
    return states


def _varied(part: tf.Tensor) -> tf.Tensor:
    """Floats that differ along their last axis."""
    if not (part.dtype.is_floating and part.shape.rank):
        return part
    return part * tf.linspace(tf.constant(0.5, part.dtype), 1.0, part.shape[-1])


def _are_close(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return all(
        np.allclose(value, other) for value, other in zip(values, others, strict=True)
    )


def confusion_matrix(
    labels: tf.Tensor, predictions: tf.Tensor, counted: tf.Tensor, *, num_classes: int
) -> tf.Tensor:
    """Counts [num_classes, num_classes] int64, row: label, column: prediction.

    Labels and predictions are integers of one shape; `counted`, a bool of that shape, says which
    positions count. There both are to be in [0, num_classes), which is not checked; elsewhere they
    may be anything.
    """
    labels = tf.reshape(tf.cast(labels, tf.int64), [-1])
    predictions = tf.reshape(tf.cast(predictions, tf.int64), [-1])
    cells = tf.boolean_mask(
        labels * num_classes + predictions, tf.reshape(counted, [-1])
    )
    cells = tf.cast(cells, tf.int32)  # bincount's type
    size = num_classes**2
    counts = tf.math.bincount(cells, minlength=size, maxlength=size, dtype=tf.int64)
    return tf.reshape(counts, [num_classes, num_classes])


def in_top(labels: tf.Tensor, scores: tf.Tensor, k: int) -> tf.Tensor:
    """Whether labels [B] are among the k classes with the highest scores [B, classes]: bool [B].

    Among equal scores the class with the higher number comes first, as in scikit-learn's
    top_k_accuracy_score. A sample with a NaN score is no hit.
    """
    numbers = tf.range(scores.shape[-1], dtype=labels.dtype)
    label_scores = tf.gather(scores, labels, axis=-1, batch_dims=1)[:, None]
    is_later = numbers > labels[:, None]
    before = (scores > label_scores) | ((scores == label_scores) & is_later)
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
    """The names that the first source with names gives its classes; numbers for classes beyond."""
    names: list[str] = []
    for source in sources:
        names = names or classes.of(source)
    return names[:count] + [str(number) for number in range(len(names), count)]


def write_confusion(file: Path, names: Sequence[str], confusion: np.ndarray) -> None:
    """Writes it as CSV; confusion: integer [n, n], row: label, column: prediction."""
    rows = [["label \\ prediction", *names]]
    for name, counts in zip(names, confusion.tolist()):
        rows.append([name, *counts])
    whole_files.write_csv(file, rows)


def read_confusion(file: Path) -> tuple[list[str], np.ndarray]:
    """Names, and the matrix, int64 [n, n]; raises ValueError, naming the file."""
    try:
        with whole_files.opened(file, most=whole_files.JSON_BYTES) as content:
            text = io.TextIOWrapper(content, "utf-8", "surrogateescape", newline="")
            table = csv.reader(text)
            names = next(table, [])[1:]
            # Each row becomes an array at once: as text, a cell takes fifty bytes.
            rows = [
                np.array([int(cell) for cell in row[1:]], np.int64) for row in table
            ]
            counts = np.array(rows)
        if counts.shape != (len(names), len(names)) or (counts < 0).any():
            raise ValueError(f"{len(names)} names, {counts.shape}")
    except (ValueError, OverflowError, csv.Error) as error:
        raise ValueError(
            f"{file} holds no confusion matrix ({error}): remove the file"
        ) from None
    return names, counts


def class_figures(confusion: np.ndarray) -> dict[str, list[float]]:
    """Figures of each class from a confusion matrix (row: label), NaN where undefined."""
    hits = np.diag(confusion).astype(np.float64)
    labels = confusion.sum(1)
    predictions = confusion.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        recall = hits / labels
        precision = hits / predictions
    return {
        "labels": labels.tolist(),
        "recall": recall.tolist(),
        "precision": precision.tolist(),
        "iou": intersection_over_union(confusion).tolist(),
    }
