"""Losses that a model adds by itself: regularizers and `add_loss`.

They count in training beside the task's loss. A term is a mean over the samples it was computed
from, so a micro-batch's term has the weight of its share of the global batch: a term of the
weights then counts once, and a term of activities is the mean over the global batch, on any
number of ranks and micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf


@contextlib.contextmanager
def means(model: keras.Model, samples: int) -> Iterator[None]:
    """Calls of the model inside: activity regularizers give means over the batch's `samples`.

    Keras documents that their value is divided by the batch's size; Keras 3.12 adds up the whole
    batch. The exchange is undone at the end, so that a saved model is as it was made.
    """
    layers = [x for x in model._flatten_layers() if getattr(x, "activity_regularizer", None)]
    own = [layer.activity_regularizer for layer in layers]

    def mean(regularizer):
        # In float32 at least: a sum over activities soon leaves float16.
        return lambda x: regularizer(at_least_float32(x)) / samples

    try:
        for layer, regularizer in zip(layers, own):
            layer.activity_regularizer = mean(regularizer)
        yield
    finally:
        for layer, regularizer in zip(layers, own):
            layer.activity_regularizer = regularizer


def total(model: keras.Model) -> tf.Tensor | None:
    """The sum of the losses of the model's newest call, a scalar; None where it adds none."""
    terms = [tf.reduce_mean(at_least_float32(tf.convert_to_tensor(term))) for term in model.losses]
    widest = max((term.dtype for term in terms), key=lambda dtype: dtype.size, default=None)
    return tf.add_n([tf.cast(term, widest) for term in terms]) if terms else None


def at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    """float16 and bfloat16 become float32: sums over a batch need its range and its digits."""
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
