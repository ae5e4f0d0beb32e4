"""SGD with momentum as Keras has it, each weight updated in one pass over memory."""

from __future__ import annotations

import keras
import tensorflow as tf

from hvdkit.ranks.world import raw


@keras.saving.register_keras_serializable(package="engine")
class SGD(keras.optimizers.SGD):
    """u = momentum * u - rate * g; w += u, to the bit what Keras computes (Polyak 1964).

    Keras composes it of five operations, each a pass of its own over weights or gradients; here it
    is one of TensorFlow's.
    """

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: keras.Variable
    ) -> None:
        if not self.momentum or self.nesterov:
            super().update_step(gradient, variable, learning_rate)
            return
        dtype = variable.dtype
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=raw(self.momentums[self._get_variable_index(variable)]).handle,
            lr=tf.cast(raw(learning_rate), dtype),
            grad=tf.cast(gradient, dtype),
            momentum=tf.cast(self.momentum, dtype),
        )
