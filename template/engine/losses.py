"""Softmax cross-entropy with ignored positions, label smoothing and class weights."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def cross_entropy(
    logits: tf.Tensor,
    labels: tf.Tensor,
    *,
    valid: tf.Tensor | None = None,
    smoothing: float = 0.0,
    class_weights: Sequence[float] = (),
) -> tuple[tf.Tensor, tf.Tensor]:
    """Losses and weights, both of the labels' shape and the logits' dtype.

    What a task's `loss` returns: the run's loss is sum(losses * weights) / sum(weights), so a
    class of weight 2 counts as if each of its positions were there twice.

    Args:
      logits: float [..., classes].
      labels: integers [...]; outside [0, classes) only where not valid.
      valid: bool [...], positions to count; all of them when None.
      smoothing: the target is (1 - smoothing) on the label and smoothing / classes on every
        class (Szegedy et al. 2016, arXiv:1512.00567, section 7).
      class_weights: weight of each class; empty: 1 for all.
    """
    labels = tf.cast(labels, tf.int32)
    if valid is not None:
        labels = tf.where(valid, labels, 0)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    if smoothing:
        # Cross-entropy to the uniform target, log-softmax being logits - log(sum(exp(logits))).
        uniform = tf.reduce_logsumexp(logits, axis=-1) - tf.reduce_mean(logits, axis=-1)
        losses = (1.0 - smoothing) * losses + smoothing * uniform
    weights = tf.ones_like(losses)
    if class_weights:
        weights = tf.gather(tf.constant(class_weights, losses.dtype), labels)
    if valid is not None:
        weights = tf.where(valid, weights, tf.zeros_like(weights))
    return losses, weights
