"""The loss by hand, in NumPy; weights that enter as weights; scaled pictures."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdkit.train import objective, preprocessing
from hvdkit.train.losses import cross_entropy

LOGITS = np.array([[2.0, 0.0, -1.0], [0.5, 0.5, 0.5], [-3.0, 1.0, 4.0], [0.0, 9.0, 0.0]])
LABELS = np.array([0, 1, 1, 2])


def by_hand(smoothing: float) -> np.ndarray:
    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    target = (1 - smoothing) * np.eye(3)[LABELS] + smoothing / 3
    return -(target * np.log(probabilities)).sum(-1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_losses_are_cross_entropy_to_the_smoothed_target(smoothing):
    losses, weights = cross_entropy(LOGITS, LABELS, smoothing=smoothing)
    np.testing.assert_allclose(losses, by_hand(smoothing), rtol=1e-12)
    np.testing.assert_array_equal(weights, 1)


def test_class_weights_are_the_labels_class_and_leave_the_losses_alone():
    losses, weights = cross_entropy(LOGITS, LABELS, class_weights=[1.0, 2.5, 0.0])
    np.testing.assert_allclose(losses, by_hand(0.0), rtol=1e-12)
    np.testing.assert_array_equal(weights, [1.0, 2.5, 2.5, 0.0])


def test_an_ignored_position_has_no_weight_whatever_its_label():
    labels, valid = np.array([0, 255, 1, 2], np.uint8), np.array([True, False, True, True])
    losses, weights = cross_entropy(LOGITS, labels, valid=valid, class_weights=[3.0, 1.0, 1.0])
    assert np.isfinite(losses).all()
    np.testing.assert_array_equal(weights, [3.0, 0.0, 1.0, 1.0])


def test_scaled_pictures_are_from_minus_1_to_1():
    image = keras.Input((None, None, 3))
    model = keras.Model(image, preprocessing.scaled(image))
    found = model(tf.constant([[[[0.0, 127.5, 255.0]]]]))
    np.testing.assert_allclose(found[0, 0, 0], [-1.0, 0.0, 1.0], atol=1e-7)


@pytest.mark.parametrize(
    ("units", "activation", "words"),
    [
        (3, "softmax", "ends with a softmax"),
        (3, "sigmoid", "ends with a sigmoid"),
        (1, None, "one"),
    ],
)
def test_what_is_no_logits_is_refused(units, activation, words):
    """In a graph, where a run traces its loss."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units, activation)])
    traced = tf.function(lambda x: cross_entropy(model(x), LABELS), autograph=False)
    with pytest.raises(ValueError, match=words):
        traced(np.ones((4, 2), np.float32))


def test_padding_that_keras_masks_has_no_weight():
    """The mean is that of Keras's own loss."""
    layers = [keras.layers.Embedding(5, 3, mask_zero=True)]
    layers += [keras.layers.LSTM(4, return_sequences=True), keras.layers.Dense(3)]
    words = np.random.default_rng(1).integers(0, 5, [8, 6])
    outputs = keras.Sequential([keras.Input((6,)), *layers])(words)
    losses, weights = objective.loss(SimpleNamespace(loss=cross_entropy), outputs, words % 3)[""]
    np.testing.assert_array_equal(weights, words > 0)
    mean = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
    wanted = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(words % 3, outputs)
    np.testing.assert_allclose(mean, wanted, rtol=1e-6)


X = tf.constant([[1.0, 2.0, 3.0], [0.5, 0.2, 0.1]])
MORE = {"x": X, "name": "text", "count": tf.constant(3)}


@pytest.mark.parametrize(
    ("outputs", "score", "size"),
    [
        (X, tf.square, 2 * 6.8),
        (MORE, lambda outputs: tf.square(outputs["x"]), 2 * 6.8),
        (MORE["count"], lambda count: tf.cast([count], tf.float32), 0.0),
        # An operation that has no gradient.
        (X, lambda x: tf.image.adjust_hue(x[:, None, None], 0.1), 0.0),
    ],
)
def test_the_proof_takes_outputs_that_are_not_all_of_floats(outputs, score, size):
    def loss(outputs, targets):
        found = tf.reshape(score(outputs), [-1])
        return found, tf.ones_like(found)

    gradient = objective.gradient(SimpleNamespace(loss=loss))
    assert gradient(outputs, None) == pytest.approx(size)
