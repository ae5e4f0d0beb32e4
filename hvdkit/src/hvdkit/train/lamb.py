"""LAMB as its paper has it: the decay is part of the update whose size the trust ratio sets."""

from __future__ import annotations

import keras
import tensorflow as tf

from hvdkit.ranks.world import raw


@keras.saving.register_keras_serializable(package="engine")
class Lamb(keras.optimizers.Lamb):
    """LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2). For a weight w with gradient g:

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g ** 2
        u = m / (1 - beta_1 ** t) / (sqrt(v / (1 - beta_2 ** t)) + epsilon) + weight_decay * w
        w = w - learning_rate * norm(w) / norm(u) * u

    with t = 1 at the first update; the ratio of norms is 1 where one of them is 0 (the paper's phi
    is the identity). Weights named to `exclude_from_weight_decay` have no decay and a ratio of 1,
    as in the first author's code (github.com/fastalgo/imagenet_resnet50_lamb): a bias near 0 would
    otherwise hardly move.

    Keras's Lamb decays before the update and outside the ratio, and gives every weight a ratio.
    """

    def _apply_weight_decay(self, variables: list) -> None:
        """Keras's decay apart from the update: none, as `update_step` has it."""

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: keras.Variable
    ) -> None:
        dtype = variable.dtype
        gradient, rate = tf.cast(gradient, dtype), tf.cast(raw(learning_rate), dtype)
        index = self._get_variable_index(variable)
        m, v = raw(self._momentums[index]), raw(self._velocities[index])
        m.assign(self.beta_1 * m + (1 - self.beta_1) * gradient)
        v.assign(self.beta_2 * v + (1 - self.beta_2) * tf.square(gradient))
        update = self._corrected(m, self.beta_1)
        update /= tf.sqrt(self._corrected(v, self.beta_2)) + self.epsilon
        if self._use_weight_decay(variable):
            update += (self.weight_decay or 0.0) * variable
            size, step_size = tf.norm(variable), tf.norm(update)
            usable = (size > 0) & (step_size > 0)
            # The inner where keeps 0 out of the division.
            update *= tf.where(usable, size / tf.where(usable, step_size, 1.0), 1.0)
        variable.assign_sub(rate * update)

    def _corrected(self, average: tf.Variable, beta: float) -> tf.Tensor:
        """An average that started at 0, over the weights it has seen so far."""
        # In float64: in float32, 1 - 0.999 ** 1 is off by 5e-5.
        seen = 1 - tf.pow(
            tf.constant(beta, tf.float64), tf.cast(raw(self.iterations) + 1, tf.float64)
        )
        return average / tf.cast(seen, average.dtype)
