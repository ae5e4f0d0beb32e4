"""Keras's masks of padding: a note where one is lost, and none where all get it."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from small_models import Called, Step
from small_runs import same

from hvdkit.settings import project
from hvdkit.train.layers import dropout, masks
from hvdkit.train.layers.dropout import SampleDropout

IDS = tf.zeros([1, 7], tf.int32)


def embedding() -> layers.Layer:
    return layers.Embedding(9, 4, mask_zero=True, name="words")


def recurrent(**named) -> layers.Layer:
    return layers.LSTM(3, name="recurrent", **named)


def stack(*parts) -> keras.Model:
    x = y = keras.Input((7,), dtype="int32")
    for part in parts:
        y = part(y)
    return keras.Model(x, y)


def doubled(**named) -> layers.Layer:
    layer = Step(lambda layer, x, training: 2.0 * x)
    layer.supports_masking = bool(named)
    return layer


def attention(change=lambda y: y) -> keras.Model:
    x = keras.Input((7,), dtype="int32")
    y = change(embedding()(x))
    y = layers.Add()([y, layers.MultiHeadAttention(2, 2, name="attention")(y, y)])
    return keras.Model(x, layers.GlobalAveragePooling1D(name="pooled")(y))


def two_inputs() -> keras.Model:
    x = keras.Input((7,), dtype="int32")
    other = keras.Input((7,), dtype="int32")
    read = layers.LSTM(3)(layers.Embedding(9, 4)(other))
    return keras.Model(
        (x, other), layers.Concatenate()([recurrent()(embedding()(x)), read])
    )


GOOD = [
    lambda: stack(embedding(), recurrent(), layers.Dense(2)),
    lambda: stack(embedding(), layers.Dense(4), layers.Dropout(0.1), recurrent()),
    lambda: stack(embedding(), recurrent(return_sequences=True), layers.Dense(2)),
    lambda: stack(embedding(), layers.GlobalAveragePooling1D(), layers.Dense(2)),
    lambda: stack(embedding(), layers.Bidirectional(recurrent())),
    lambda: stack(embedding(), doubled(supports=True), recurrent()),
    lambda: stack(layers.Embedding(9, 4), layers.Flatten(), layers.Dense(2)),
    attention,
]


@pytest.mark.parametrize("make", GOOD)
def test_a_mask_that_all_get_needs_no_note(make):
    model = make()
    assert masks.notes_on_lost_masks(model, IDS) == []
    assert not [layer for layer in model._flatten_layers() if "call" in vars(layer)]


def test_an_input_without_a_mask_beside_one_with_needs_no_note():
    assert masks.notes_on_lost_masks(two_inputs(), (IDS, IDS)) == []


def tagger(model, x, training):
    return model.head(tf.tanh(model.body(model.table(x))))


def averaging(model, x, training):
    return model.head(tf.reduce_mean(model.table(x), 1))


BAD = [
    (lambda: stack(embedding(), lambda y: 2.0 * y, recurrent()), "reach recurrent,"),
    (lambda: attention(lambda y: y + 1.0), "reach attention, pooled,"),
    (
        lambda: Called(
            tagger,
            table=embedding(),
            body=recurrent(return_sequences=True),
            head=layers.Dense(2),
        ),
        "reach the outputs,",
    ),
    (
        lambda: Called(
            tagger,
            table=embedding(),
            body=recurrent(return_sequences=True),
            head=layers.LSTM(2),
        ),
        "lstm",
    ),
    (
        lambda: Called(averaging, table=embedding(), head=layers.Dense(2)),
        "any layer that uses it",
    ),
]


@pytest.mark.parametrize(("make", "words"), BAD)
def test_a_mask_that_is_lost_is_noted(make, words):
    (note,) = masks.notes_on_lost_masks(make(), IDS)
    assert "words makes does not" in note and words in note, note


@pytest.mark.filterwarnings("ignore:.*does not support masking")
def test_a_layer_that_supports_no_mask_is_noted():
    (note,) = masks.notes_on_lost_masks(stack(embedding(), doubled(), recurrent()), IDS)
    assert "reach recurrent," in note


def with_dropout(drop: layers.Layer) -> keras.Model:
    words = keras.Input((7,), dtype="int32")
    keys = keras.Input((2,), dtype="int32")
    return keras.Model((words, keys), recurrent()(drop([embedding()(words), keys])))


@pytest.mark.filterwarnings("ignore:.*does not support masking")
def test_a_mask_that_is_lost_in_training_alone_is_noted():
    inputs = (IDS, tf.zeros([1, 2], tf.int32))
    assert masks.notes_on_lost_masks(with_dropout(SampleDropout(0.5)), inputs) == []
    drop = Step(lambda layer, x, training: 2.0 * x if training else x)
    (note,) = masks.notes_on_lost_masks(stack(embedding(), drop, recurrent()), IDS)
    assert "reach recurrent," in note and "counts in training" in note, note


def test_dropouts_of_one_name_are_noted():
    parts = [SampleDropout(0.5, name="dropout") for _ in range(2)]
    (note,) = dropout.notes_on_equal_draws(parts)
    assert "are named dropout" in note
    assert not dropout.notes_on_equal_draws([SampleDropout(0.5), SampleDropout(0.5)])


def test_layers_that_are_computed_again_give_the_same_gradients():
    """The class of docs/speed.md."""
    page = (Path(project.ENGINE).parents[2] / "docs/speed.md").read_text()
    (code,) = re.findall(
        r"```python\n(class Recomputed.*?\n)\nblock =", page, re.DOTALL
    )
    names = {"keras": keras, "tf": tf}
    exec(code, names)
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)

    def gradients(wrap) -> list[tf.Tensor]:
        keras.utils.set_random_seed(1)
        block = keras.Sequential([layers.Dense(16, "tanh"), layers.Dense(16, "tanh")])
        model = keras.Sequential([keras.Input((6,)), wrap(block), layers.Dense(3)])

        @tf.function(autograph=False)
        def traced():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(model(x, training=True)))
            return tape.gradient(loss, [v.value for v in model.trainable_variables])

        return traced()

    same(gradients(names["Recomputed"]), gradients(lambda block: block), 1e-5, 1e-6)
