"""Dropout whose draws belong to the sample, not to the rank that happens to hold it."""

from __future__ import annotations

import zlib

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="engine")
class SampleDropout(keras.layers.Layer):
    """Dropout (Srivastava et al. 2014) with a key for every sample.

    Called as layer([features, keys]) with keys int32 [batch, 2] that name seed, epoch and
    sample: the ones that a task's `training_example` is given. The same sample at the same step
    then loses the same features on any number of ranks. Keras's own Dropout draws by rank.
    """

    def __init__(self, rate: float, **kwargs) -> None:
        super().__init__(**kwargs)
        self.rate = rate
        self.salt = zlib.crc32(self.name.encode()) & 0x7FFFFFFF  # so that layers draw differently

    def call(self, inputs: list[tf.Tensor], training: bool = False) -> tf.Tensor:
        features, keys = inputs
        if not training or not self.rate:
            return features

        def keep(key: tf.Tensor) -> tf.Tensor:
            key = tf.random.experimental.stateless_fold_in(key, self.salt, alg="philox")
            draws = tf.random.stateless_uniform(tf.shape(features)[1:], key, alg="philox")
            return draws >= self.rate

        kept = tf.map_fn(keep, keys, fn_output_signature=tf.TensorSpec(features.shape[1:], tf.bool))
        scaled = features / tf.cast(1.0 - self.rate, features.dtype)
        return tf.where(kept, scaled, tf.zeros_like(features))

    def compute_output_shape(self, input_shape: list[tuple]) -> tuple:
        return input_shape[0]

    def get_config(self) -> dict:
        return super().get_config() | {"rate": self.rate}
