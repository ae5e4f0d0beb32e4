"""Metrics as sums that are exact over ranks, and what is computed from the sums.

A task adds up tensors (counts as int64, losses as float64); the sums are added over the ranks in
one collective; figures come from the totals. A mean of per-rank means would be wrong as soon as
the ranks' shares differ.
"""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf


def zeros(eval_step: tf.types.experimental.PolymorphicFunction) -> dict[str, np.ndarray]:
    """Sums of no batch at all, for `eval_step(batch) -> (outputs, sums)`: a rank may have none."""
    _, sums = eval_step.get_concrete_function().structured_outputs
    return {n: np.zeros(t.shape, t.dtype.as_numpy_dtype) for n, t in sums.items()}


def add_over_ranks(sums: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Totals over all ranks, in one collective; integers stay exact below 2 ** 53."""
    names = sorted(sums)
    flat = np.concatenate([np.ravel(sums[n]).astype(np.float64) for n in names])
    total = hvd.allreduce(tf.constant(flat), op=hvd.Sum, name="metrics.sums").numpy()
    ends = np.cumsum([np.size(sums[n]) for n in names])
    parts = np.split(total, ends[:-1])
    return {
        n: p.reshape(np.shape(sums[n])).astype(np.asarray(sums[n]).dtype)
        for n, p in zip(names, parts)
    }


def confusion_matrix(
    labels: tf.Tensor, predictions: tf.Tensor, counted: tf.Tensor, num_classes: int
) -> tf.Tensor:
    """Counts [num_classes, num_classes] int64, row: label, column: prediction.

    Args:
      labels, predictions: integers of one shape; a label outside [0, num_classes) is allowed
        where it is not counted.
      counted: bool of the same shape: which positions to count.
    """
    counted = tf.reshape(counted, [-1])
    labels = tf.boolean_mask(tf.reshape(tf.cast(labels, tf.int64), [-1]), counted)
    predictions = tf.boolean_mask(tf.reshape(tf.cast(predictions, tf.int64), [-1]), counted)
    cells = tf.math.bincount(
        tf.cast(labels * num_classes + predictions, tf.int32),
        minlength=num_classes**2,
        maxlength=num_classes**2,
        dtype=tf.int64,
    )
    return tf.reshape(cells, [num_classes, num_classes])


def intersection_over_union(confusion: np.ndarray) -> np.ndarray:
    """IoU of each class, float64 [num_classes]; NaN for one in neither labels nor predictions."""
    hits = np.diag(confusion).astype(np.float64)
    union = confusion.sum(0) + confusion.sum(1) - hits
    return np.divide(hits, union, out=np.full_like(hits, np.nan), where=union > 0)


def accuracy(confusion: np.ndarray) -> float:
    """Share of positions whose prediction is the label."""
    return float(np.trace(confusion) / max(confusion.sum(), 1))
