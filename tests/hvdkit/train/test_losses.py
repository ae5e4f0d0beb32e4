"""The loss by hand, in NumPy; weights that enter as weights."""

import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from refusals import refused
from scipy.special import log_softmax

from hvdkit.train.step import objective
from hvdkit.train.step.losses import cross_entropy, mixed_cross_entropy

LOGITS = np.array([[2.0, 0.0, -1.0], [0.5, 0.5, 0.5], [-3.0, 1.0, 4.0], [0.0, 9.0, 0.0]])
LABELS = np.array([0, 1, 1, 2])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("class_weights", [(), (1.0, 2.0, 0.0, 5.0)])
def test_losses_are_cross_entropy_to_the_smoothed_target(smoothing, class_weights):
    """Of one class, or of two by share; weights are the classes', and leave the losses alone."""
    draw, of_class = np.random.default_rng(0), np.array(class_weights or [1.0] * 4)
    logits, (first, second) = draw.normal(size=(50, 4)), draw.integers(0, 4, (2, 50))
    logs, smooth = log_softmax(logits, -1), (1 - smoothing) * np.eye(4) + smoothing / 4
    how = {"smoothing": smoothing, "class_weights": class_weights}
    losses, weights = cross_entropy(logits, first, **how)
    np.testing.assert_allclose(losses, -(smooth[first] * logs).sum(-1), rtol=1e-12)
    np.testing.assert_array_equal(weights, of_class[first])
    share = draw.uniform(size=50)
    parts = share * of_class[first], (1 - share) * of_class[second]
    target = parts[0][:, None] * smooth[first] + parts[1][:, None] * smooth[second]
    targets = {"label": first, "other": second, "share": share}
    losses, weights = mixed_cross_entropy(logits, targets, **how)
    np.testing.assert_allclose(losses * weights, -(target * logs).sum(-1), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(weights, sum(parts), rtol=1e-6)


def test_an_ignored_position_has_no_weight_whatever_its_label():
    labels, valid = np.array([0, 255, 1, 2], np.uint8), np.array([True, False, True, True])
    losses, weights = cross_entropy(LOGITS, labels, valid=valid, class_weights=[3.0, 1.0, 1.0])
    assert np.isfinite(losses).all()
    np.testing.assert_array_equal(weights, [3.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("units", "activation", "labels", "words"),
    [
        (3, "softmax", LABELS, "ends with a softmax"),
        (3, "sigmoid", LABELS, "a sigmoid"),
        (1, None, LABELS, "one"),
        (3, None, np.array([1.9, 0, 0, 0]), "labels are float64"),
    ],
)
def test_what_is_no_logits_and_no_labels_is_refused(units, activation, labels, words):
    """In a graph, where a run traces its loss."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units, activation)])
    traced = tf.function(lambda x: cross_entropy(model(x), labels), autograph=False)
    with pytest.raises(ValueError, match=words):
        traced(np.ones((4, 2), np.float32))


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_class_weight_that_is_negative_or_no_number_is_refused(weight):
    with pytest.raises(ValueError, match=f"class_weights has {weight}"):
        cross_entropy(LOGITS, LABELS, class_weights=[1.0, weight, 1.0])


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
    # Of several outputs: the one mask there is, or that of the term's own output.
    bare, other = tf.identity(outputs), tf.identity(outputs)
    other._keras_mask = tf.constant(words > 2)
    first = lambda outputs, targets: cross_entropy(outputs["a"], targets)  # noqa: E731
    weighted = {"a": outputs, "b": bare}, {"b": bare, "a": outputs, "c": outputs}
    for several in weighted:
        found = objective.loss(SimpleNamespace(loss=first), several, words % 3)[""]
        np.testing.assert_array_equal(found[1], words > 0)
    several = {"a": outputs, "b": other, "c": bare}
    refused(lambda: objective.loss(SimpleNamespace(loss=first), several, words % 3), "2 masks")
    each = lambda outputs, y: {n: cross_entropy(x, y) for n, x in outputs.items()}  # noqa: E731
    found = objective.loss(SimpleNamespace(loss=each), several, words % 3)
    for name, known in (("a", words > 0), ("b", words > 2), ("c", words >= 0)):
        np.testing.assert_array_equal(found[name][1], known)


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

    task = SimpleNamespace(loss=loss)
    assert objective.gradient(task, outputs, None) == pytest.approx(size)
