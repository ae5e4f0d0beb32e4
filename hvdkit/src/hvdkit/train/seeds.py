"""Draws that do not depend on the number of ranks: seed generators set anew for each of them."""

from __future__ import annotations

import keras
import tensorflow as tf

from hvdkit.ranks.world import raw


class Seeds:
    """The states of a model's seed generators, drawn anew for every virtual rank and step.

    So draws of two virtual ranks, steps or generators have nothing in common, and are the same
    whoever makes them and however often the run was interrupted.
    """

    def __init__(self, seed: int, model: keras.Model, evaluating: bool = False) -> None:
        layers = model._flatten_layers()
        found = {id(g): g for layer in layers for g in layer._seed_generators}
        self.variables = [raw(generator.state) for generator in found.values()]
        # Samples' keys are philox's words under the key `seed`: these bits make it other keys.
        self._key = seed | 1 << 63 | int(evaluating) << 62

    def assign(self, step: tf.Tensor, number: tf.Tensor) -> None:
        """Args: step and number of the virtual rank (of the batch, evaluating), int64 scalars."""
        if not self.variables:
            return
        # Philox counts on from the counter for every four words: the step stands beside, and
        # 2**32 lie between two virtual ranks.
        counter = tf.cast(tf.stack([number * 2**32, step]), tf.uint64)
        words = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[len(self.variables), 2],
            key=tf.constant([self._key], tf.uint64),
            counter=counter,
            alg=tf.random.Algorithm.PHILOX.value,
            dtype=tf.uint32,
        )
        for variable, state in zip(self.variables, tf.unstack(words)):
            # Keras draws from (a, b + k) in its k-th draw, both modulo 2**31 - 2.
            variable.assign(tf.cast(state % (2**31 - 2), variable.dtype))
