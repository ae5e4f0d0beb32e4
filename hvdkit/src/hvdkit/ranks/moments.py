"""When a tensor was computed, read inside a traced step."""

from __future__ import annotations

import time

import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled


def moment(after: tf.Tensor) -> tf.Tensor:
    """When a tensor was there, also one that a GPU computes: seconds since 1970, float64."""
    if is_op_determinism_enabled():  # TensorFlow then runs no clock of its own
        return tf.ensure_shape(tf.numpy_function(lambda _: time.time(), [after], tf.float64), [])
    with tf.device("CPU:0"):
        # By its value: a control dependency would not wait for a GPU.
        there = tf.reduce_all(tf.equal(after, after))
        return tf.cond(there, tf.timestamp, tf.timestamp)
