"""Models that compute in another type than --precision says are refused by name."""

import keras
import pytest
from keras import layers

from hvdkit.ranks.world import set_precision
from hvdkit.train.layers import compute_types

PRECISIONS = ("float32", "float64", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def usual_precision():
    yield
    set_precision("float32")


def network(**head) -> keras.Model:
    x = keras.Input((6,))
    y = layers.Rescaling(2.0, dtype="float64")(x)
    y = layers.BatchNormalization()(layers.Dense(5, name="first")(y))
    return keras.Model(x, layers.Dense(3, name="logits", **head)(layers.Dense(4)(y)))


def text() -> keras.Model:
    ids = layers.StringLookup(vocabulary=["a", "b"])
    return keras.Sequential(
        [keras.Input((3,), dtype="string"), ids, layers.Embedding(3, 2)]
    )


def quantized() -> keras.Model:
    model = network()
    model.quantize("float8")
    return model


def loaded() -> keras.Model:
    """As load_model, clone_model and from_config make it of a model of float32."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    config = network().get_config()
    keras.config.set_dtype_policy(policy)
    return keras.Model.from_config(config)


def loaded_and_set() -> keras.Model:
    model = loaded()
    for layer in model.layers:
        layer.dtype_policy = keras.config.dtype_policy()
    return model


@pytest.mark.filterwarnings("ignore:.*does not have a `quantize` method")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", [network, text, quantized, loaded_and_set])
def test_a_model_of_the_runs_type_passes(make, precision):
    set_precision(precision)
    assert compute_types.check_types(make(), precision) == []


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_wide_layers_pass_and_others_than_the_logits_are_noted(precision):
    set_precision(precision)
    assert compute_types.check_types(network(dtype="float32"), precision) == []
    wide = [layers.Dense(4, dtype="float32", name=name) for name in ("wide", "logits")]
    (note,) = compute_types.check_types(keras.Sequential([network(), *wide]), precision)
    assert f"with --precision={precision} " in note and "wide, " in note


def cleared() -> keras.Model:
    keras.backend.clear_session()
    return network()


def own_policy(name: str):
    def make() -> keras.Model:
        keras.config.set_dtype_policy(name)
        return network()

    return make


def of_half() -> keras.Model:
    return network(dtype=keras.config.dtype_policy().compute_dtype)


def with_backbone() -> keras.Model:
    return keras.Sequential([loaded(), layers.Dense(2, name="head")])


@pytest.mark.parametrize(
    ("precision", "make", "words"),
    [
        (
            "bfloat16",
            loaded,
            ("first", "in float32, most of the model", "set dtype_policy"),
        ),
        (
            "float16",
            loaded,
            ("first", "in float32, most of the model", "set dtype_policy"),
        ),
        ("float64", loaded, ("first", "compute in float32", "set dtype_policy")),
        ("bfloat16", with_backbone, ("first", "in float32, most of the model")),
        (
            "bfloat16",
            cleared,
            ("first", "in float32", "policy became float32", "clear_session"),
        ),
        ("float32", own_policy("mixed_float16"), ("first", "in float16", "loss scale")),
        (
            "float32",
            own_policy("mixed_bfloat16"),
            ("first", "in bfloat16", "policy became"),
        ),
        (
            "bfloat16",
            own_policy("mixed_float16"),
            ("first", "in float16", "loss scale"),
        ),
        ("float16", own_policy("mixed_bfloat16"), ("first", "in bfloat16")),
        ("float32", lambda: network(dtype="float16"), ("logits computes in float16",)),
        ("float64", lambda: network(dtype="float32"), ("logits computes in float32",)),
        ("bfloat16", of_half, ("the weights logits/kernel, logits/bias have 16 bits",)),
        ("float16", of_half, ("the weights logits/kernel, logits/bias have 16 bits",)),
    ],
)
def test_a_model_of_another_type_is_refused_by_name(precision, make, words):
    set_precision(precision)
    with pytest.raises(ValueError) as refused:
        compute_types.check_types(make(), precision)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_policy_that_only_later_layers_would_have_is_refused():
    set_precision("bfloat16")
    model = network()
    keras.config.set_floatx("float16")
    with pytest.raises(ValueError, match="floatx float16"):
        compute_types.check_types(model, "bfloat16")
