import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdkit.train.layers import batch_norm
from hvdkit.train.trial import trial

PLAN = trial.Plan(
    samples=4,
    compares=True,
    by_ranks=True,
    by_steps=False,
    near=1e-3,
    whose="the task's loss: ",
)


def outcome(*gradients: np.ndarray) -> trial.Outcome:
    return trial.Outcome(state={}, means=list(gradients), sums=[], terms=())


def test_gradients_that_overflow_are_not_compared():
    """As with float16's first loss scale: no step is made by them."""
    infinite = np.array([1.0, np.inf], np.float16)
    trial._check_gradients(PLAN, outcome(infinite), outcome(infinite))
    with pytest.raises(ValueError, match="gradient of 4 samples together, of norm 1"):
        trial._check_gradients(PLAN, outcome(np.ones(1)), outcome(np.full(1, np.inf)))


def test_samples_are_neighbours_and_far_from_each_other():
    """Of a set in the order of its classes, some are of one class and some of others."""
    assert [trial._spread(n, 4, 100) for n in range(4)] == [0, 1, 50, 51]
    assert [trial._spread(n, 5, 100) for n in range(5)] == [0, 1, 33, 34, 66]
    assert [trial._spread(n, 4, 3) for n in range(4)] == [0, 1, 2, 3]


def test_a_long_sum_may_differ_by_its_own_rounding():
    total = np.float32(250_000)
    step = np.full(1, total + np.float32(4.0))
    rounded = np.nextafter(step, np.float32(np.inf))
    assert trial._is_near(step, rounded, np.full(1, total), near=1e-3)
    assert not trial._is_near(step, step + 1, np.full(1, total), near=1e-3)


class Conditional(keras.layers.BatchNormalization):
    """A scale for each class of sample, which it is called with."""

    def build(self, shape):
        super().build(shape)
        self.scales = self.add_weight(shape=(2, shape[-1]), initializer="ones")

    def call(self, inputs, labels, training=None):
        normed = super().call(inputs, training=training)
        return normed * tf.gather(self.scales, labels)


def test_a_batch_norm_with_more_inputs_rests_too():
    layer = Conditional()
    x = tf.constant([[1.0], [3.0]])
    labels = tf.constant([0, 1])
    in_evaluation = layer(x, labels, training=False)
    with batch_norm.at_rest([layer]):
        np.testing.assert_array_equal(layer(x, labels, training=True), in_evaluation)
    assert np.abs(layer(x, labels, training=True) - in_evaluation).max() > 0.1
