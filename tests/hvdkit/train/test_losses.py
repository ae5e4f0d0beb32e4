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

LOGITS = np.array(
    [[2.0, 0.0, -1.0], [0.5, 0.5, 0.5], [-3.0, 1.0, 4.0], [0.0, 9.0, 0.0]]
)
LABELS = np.array([0, 1, 1, 2])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("class_weights", [(), (1.0, 2.0, 0.0, 5.0)])
def test_losses_are_cross_entropy_to_the_smoothed_target(smoothing, class_weights):
    """Of one class, or of two by share; weights are the classes', and leave the losses alone."""
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(50, 4))
    first, second = draw.integers(0, 4, (2, 50))
    share = draw.uniform(size=50)
    weight_of = np.array(class_weights or [1.0] * 4)  # one weight a class
    smooth = (1 - smoothing) * np.eye(4) + smoothing / 4
    logs = log_softmax(logits, -1)

    losses, weights = cross_entropy(
        logits, first, smoothing=smoothing, class_weights=class_weights
    )
    np.testing.assert_allclose(losses, -(smooth[first] * logs).sum(-1), rtol=1e-12)
    np.testing.assert_array_equal(weights, weight_of[first])

    losses, weights = mixed_cross_entropy(
        logits,
        {"label": first, "other": second, "share": share},
        smoothing=smoothing,
        class_weights=class_weights,
    )
    first_weight = share * weight_of[first]
    second_weight = (1 - share) * weight_of[second]
    target = (
        first_weight[:, None] * smooth[first] + second_weight[:, None] * smooth[second]
    )
    np.testing.assert_allclose(
        losses * weights, -(target * logs).sum(-1), rtol=1e-6, atol=1e-9
    )
    np.testing.assert_allclose(weights, first_weight + second_weight, rtol=1e-6)


def test_an_ignored_position_has_no_weight_whatever_its_label():
    labels = np.array([0, 255, 1, 2], np.uint8)
    valid = np.array([True, False, True, True])
    losses, weights = cross_entropy(
        LOGITS, labels, valid=valid, class_weights=[3.0, 1.0, 1.0]
    )
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


def squares(outputs, targets):
    return tf.square(outputs - targets), tf.ones_like(outputs)


def test_padding_that_keras_masks_has_no_weight():
    """The mean is that of Keras's own loss."""
    words = np.random.default_rng(1).integers(0, 5, [8, 6])
    outputs = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Embedding(5, 3, mask_zero=True),
            keras.layers.LSTM(4, return_sequences=True),
            keras.layers.Dense(3),
        ]
    )(words)
    losses, weights = objective.loss(
        SimpleNamespace(loss=cross_entropy), outputs, words % 3
    )[""]
    np.testing.assert_array_equal(weights, words > 0)
    # A loss for each feature of a step has one more axis than the mask.
    _, each = objective.loss(SimpleNamespace(loss=squares), outputs, outputs)[""]
    assert each.shape == outputs.shape
    np.testing.assert_array_equal(each, np.repeat((words > 0)[..., None], 3, axis=2))
    mean = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
    wanted = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(
        words % 3, outputs
    )
    np.testing.assert_allclose(mean, wanted, rtol=1e-6)
    _several_outputs(words, outputs)


def test_a_mask_that_fits_no_losses_is_noted():
    """As where losses leave out the first word, or are one for each sequence."""
    words = tf.constant([[1, 2, 0], [3, 0, 0]])
    outputs = tf.ones([2, 3, 4])
    outputs._keras_mask = words > 0

    def note(change, outputs=outputs):
        def loss(outputs, targets):
            values = change(outputs["tags"] if isinstance(outputs, dict) else outputs)
            return {"tags": (values, tf.ones_like(values))}

        terms = objective.loss(SimpleNamespace(loss=loss), outputs, words)
        return objective.note_on_masks(terms, outputs)

    several = {"tags": outputs, "others": tf.ones([2, 5])}
    for each in (outputs, several):
        assert note(lambda x: x[..., 0], each) == note(lambda x: x, each) == ""
        shifted = note(lambda x: x[:, 1:, 0], each)
        assert "mask of padding [2, 3] does not fit the loss 'tags' of" in shifted
        assert "of shape [2]: padding counts" in note(lambda x: x[:, 0, 0], each)
    pooled = tf.ones([2, 4])
    pooled._keras_mask = words > 0
    assert note(lambda x: x[:, 0], pooled) == ""


def _several_outputs(words: np.ndarray, outputs: tf.Tensor) -> None:
    """That of the term's own output counts, or the one mask of those that it comes from."""

    def loss_of_a(outputs, targets):
        return cross_entropy(outputs["a"], targets)

    def loss_of_each(outputs, targets):
        return {name: cross_entropy(x, targets) for name, x in outputs.items()}

    def loss_of_others(outputs, targets):
        a, b = (cross_entropy(outputs[name], targets) for name in "ab")
        return {"tags": a, "words": b}

    def loss_of_both(outputs, targets):
        return cross_entropy(outputs["a"] + outputs["b"], targets)

    masks = {"a": words > 0, "b": words >= 0, "c": words > 2, "d": words > 0}

    def weights_of(loss, names="abcd"):
        """As in a step's graph; "b" has no mask, and those of "a" and "d" are one."""

        @tf.function(autograph=False)
        def traced(mask, other):
            several = {name: tf.identity(outputs) for name in names}
            several["a"] = tf.identity(several["b"])  # made of another output
            for name, of_name in (("a", mask), ("c", other), ("d", mask)):
                if name in several:
                    several[name]._keras_mask = of_name
            terms = objective.loss(SimpleNamespace(loss=loss), several, words % 3)
            return {name: weights for name, (_, weights) in terms.items()}

        return traced(tf.constant(masks["a"]), tf.constant(masks["c"]))

    np.testing.assert_array_equal(weights_of(loss_of_a)[""], masks["a"])
    weights = weights_of(loss_of_each)
    for name, shown in masks.items():
        np.testing.assert_array_equal(weights[name], shown)
    # A source's padding does not hide words of its translation.
    weights = weights_of(loss_of_others)
    np.testing.assert_array_equal(weights["tags"], masks["a"])
    np.testing.assert_array_equal(weights["words"], masks["b"])
    words_of_refusal = "1 masks of padding and some have none"
    refused(lambda: weights_of(loss_of_both), words_of_refusal)

    def loss_of_two(outputs, targets):
        return cross_entropy(outputs["a"] + outputs["c"], targets)

    refused(lambda: weights_of(loss_of_two), "2 masks of padding")

    def loss_of_alike(outputs, targets):
        return cross_entropy(outputs["a"] + outputs["d"], targets)

    np.testing.assert_array_equal(weights_of(loss_of_alike)[""], masks["a"])


def class_form(labels, logits):
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=255, reduction="none"
    )
    return loss(labels, logits)


def function_form(labels, logits):
    return keras.losses.sparse_categorical_crossentropy(
        labels, logits, from_logits=True, ignore_class=255
    )


@pytest.mark.parametrize("sizes", [(8, 6), (None, None)])
@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize(
    "scored",
    [
        class_form,
        function_form,
        lambda *parts: tf.cast(2 * class_form(*parts), tf.float16) / 2,
        lambda *parts: tf.expand_dims(function_form(*parts), -1),
    ],
)
def test_labels_that_a_loss_of_keras_ignores_have_no_weight(scored, pads, sizes):
    """The mean is that of Keras's own loss, also with padding, and of sizes not known yet."""
    draw = np.random.default_rng(3)
    labels = draw.integers(0, 3, [8, 6])
    labels[draw.uniform(size=labels.shape) < 0.4] = 255
    logits = draw.normal(size=[8, 6, 3]).astype(np.float32)
    shown = np.arange(6) < draw.integers(1, 6, [8, 1])

    def loss(outputs, targets):
        each = scored(targets, outputs)
        return {"pixels": (each, tf.ones_like(each), 0.5)}

    @tf.function(
        input_signature=[
            tf.TensorSpec([*sizes, 3]),
            tf.TensorSpec(sizes, tf.int64),
            tf.TensorSpec(sizes, tf.bool),
        ],
        autograph=False,
    )
    def mean(outputs, targets, mask):
        if pads:
            outputs._keras_mask = mask
        losses, weights = objective.loss(SimpleNamespace(loss=loss), outputs, targets)[
            "pixels"
        ]
        return tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)

    scores = tf.constant(logits)
    if pads:
        scores._keras_mask = tf.constant(shown)
    wanted = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=255
    )(labels, scores)
    np.testing.assert_allclose(mean(logits, labels, shown), wanted / 2, rtol=2e-3)


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
        scores = tf.reshape(score(outputs), [-1])
        return scores, tf.ones_like(scores)

    task = SimpleNamespace(loss=loss)
    by_sample = [
        len(tensor.shape) > 0
        for tensor in map(tf.convert_to_tensor, tf.nest.flatten(outputs))
    ]
    gradient = objective.gradient(task, outputs, None, by_sample=by_sample)
    assert gradient == pytest.approx(size)


def test_a_label_beyond_the_class_weights_is_no_class():
    losses, _ = cross_entropy(
        tf.zeros([2, 3]), tf.constant([1, 2]), class_weights=(1, 2)
    )
    np.testing.assert_array_equal(np.isnan(losses), [False, True])
