"""Names of variables in checkpoints do not depend on how often Keras counted."""

import keras
import pytest
import tensorflow as tf
from small_models import Called

from hvdkit.settings import Settings
from hvdkit.train.layers import batch_norm
from hvdkit.train.optim import optimizer
from hvdkit.train.step.state import State, names_of_model


def network():
    """The Keras layers whose variables' paths depend on what was made before."""
    layers = keras.layers
    x = keras.Input((8, 3))
    y = layers.Conv1D(4, 3)(x)
    y = layers.BatchNormalization()(layers.Conv1D(4, 3)(y))
    y = layers.TimeDistributed(layers.Dense(3))(layers.Dropout(0.1)(y))
    y = layers.MultiHeadAttention(2, 2, dropout=0.1)(y, y)
    y = layers.Bidirectional(layers.LSTM(3, dropout=0.1))(y)
    y = keras.Sequential([layers.Dense(4), layers.Dropout(0.2), layers.Dense(4)])(y)
    return keras.Model(x, layers.Dense(2, name="head_7")(y))


def sub():
    """Subclassed: layers in a list, and a model inside."""
    body = [keras.layers.Dense(3) for _ in range(2)]
    inner = keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(3)])
    model = Called(
        lambda m, x, _: m.inner(m.body[1](m.body[0](x))), body=body, inner=inner
    )
    model(tf.zeros((1, 3)))
    return model


def state_names(model, **settings):
    # One of Nadam's variables has no name.
    rule = optimizer.build(
        Settings(**settings), model, lambda model: keras.optimizers.Nadam()
    )
    return list(State(model, rule, "float32").variables)


@pytest.mark.parametrize("make", [network, sub])
def test_names_are_the_same_for_every_model_of_a_structure(make):
    first, second = (state_names(make(), ema_decay=0.5) for _ in range(2))
    assert first == second and len(set(first)) == len(first)
    assert [v.path for v in make().variables] != [v.path for v in make().variables]
    model = make()
    slots = {n.split("/", 3)[3] for n in first if n.startswith("optimizer/")}
    model_names = names_of_model(model)
    trained = {id(v) for v in model.trainable_variables}
    for i, (variable, name) in enumerate(zip(model.variables, model_names)):
        assert f"model/{i:04d}/{name}" in first
        assert (f"ema/0/{i:04d}/{name}" in first) == (id(variable) in trained)
        assert ({f"{name}/momentum", f"{name}/velocity"} <= slots) == (
            id(variable) in trained
        )
    assert not [n for n in first if "average" in n]


def test_names_as_they_read():
    names = names_of_model(network())
    assert names[:2] == ["conv1d/kernel", "conv1d/bias"] and names[-1] == "head_7/bias"
    expected = {
        "conv1d_1/kernel",
        "batch_normalization/moving_mean",
        "dropout/seed_generator_state",
        "time_distributed/dense/kernel",
        "multi_head_attention/query/kernel",
        "dense_1/bias",
        "multi_head_attention/dropout/seed_generator_state",
        "dropout_1/seed_generator_state",
        "bidirectional/backward_lstm/lstm_cell/recurrent_kernel",
    }
    assert expected <= set(names)
    plain = [keras.layers.Dense(2), keras.layers.ReLU(), keras.layers.Dense(2)]
    expected = ["dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"]
    chain = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0), *plain])
    assert names_of_model(chain) == expected
    x = keras.Input((8, 3))
    inside = keras.Model(x, keras.layers.Dense(2)(network()(x)))
    assert names_of_model(inside)[:-2] == names, "the same alone and inside another"
    assert {name.split("/")[0] for name in names_of_model(sub())} == {"called"}


def test_names_stay_when_batch_norm_is_synchronized():
    model = network()
    assert state_names(model) == state_names(batch_norm.synchronize(model))


def test_paths_that_repeat_keep_their_slots_apart():
    shared, other = (keras.layers.Dense(3, name="same") for _ in range(2))
    x = keras.Input((3,))
    model = keras.Model(x, keras.Sequential([other])(shared(shared(x))))
    names = state_names(model)
    assert len(names) == len(set(names))
    assert sum("same/kernel/momentum" in name for name in names) == 2
