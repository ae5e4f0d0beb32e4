"""The kinds of models that Keras lets people write, and what a run must make of each."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import small_models as models
import tensorflow as tf
from keras import layers
from small_models import IDS, Called, Net, Step, between, bn, dense, weight

EQUAL = "the same weights on 1 and 2 ranks"
BY_RANK = "finishes; draws by rank, so weights depend on their number"
REFUSED = "refused before the first step, by one sentence on 1 and 2 ranks"
NOT_ON_TWO = "trained on 1 rank, refused on 2"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model and what comes of it."""

    make: Callable[[], Any]
    shape: tuple[int, ...] = (6,)  # of one sample x, normal numbers
    inputs: Callable[[tf.Tensor, tf.Tensor], Any] = lambda x, key: x  # of x and the sample's key
    end: str = EQUAL
    words: tuple[str, ...] = ()  # of the refusal
    still: tuple[str, ...] = ()  # in names of variables that stay as made, but for rounding
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def ids(x, key):
    """int32 in [0, IDS), of x's shape."""
    return tf.cast(tf.abs(x) * 7, tf.int32) % IDS


def halves(x, key):
    return x[:3], x[3:]


MICRO = {"accumulation_steps": 2, "global_batch_size": 14}
micro = functools.partial(Kind, settings=MICRO)
refused = functools.partial(Kind, end=REFUSED)
CALLS = weight("calls", dtype="int64", trainable=False, initializer="zeros")

KINDS = {
    "subclassed": micro(lambda: Net(dense(), bn(), dense(2))),
    "shared layers": micro(models.shared, inputs=halves),
    "layers made in call": Kind(lambda: Called(models.made_in_call, body=dense())),
    "layers made in training": refused(
        lambda: Called(models.made_in_training, body=dense(), head=layers.Dense(2)),
        words=("__init__",),
    ),
    "inputs a list": refused(
        lambda: Net(dense()), inputs=lambda x, key: list(halves(x, key)), words=("tuple",)
    ),
    "outputs a dict": micro(lambda: models.outputs(lambda a, b: {"one": a, "two": b})),
    "embedding shared with the output": micro(models.tied, (4,), ids),
    "frozen model inside": Kind(models.frozen_inside, still=("fixed",)),
    "losses added by the model": micro(
        lambda: Called(models.adds_loss, body=dense(), aside=layers.Dense(2), head=layers.Dense(2))
    ),
    "state equal on all ranks": micro(lambda: between(dense(), Step(models.anneal, CALLS))),
    "batch norm over time": Kind(
        lambda: between(layers.TimeDistributed(bn()), dense(), shape=(5, 3)), (5, 3)
    ),
    "spectral norm": micro(lambda: between(layers.SpectralNormalization(dense()), bn())),
    "dropout by sample": micro(models.sample_dropout, inputs=lambda x, key: {"x": x, "key": key}),
    "dropout, subclassed": micro(
        lambda: Net(dense(8), Net(layers.Dropout(0.4)), dense()), end=BY_RANK
    ),
    "state of the batch": Kind(
        lambda: between(
            dense(), Step(models.remember, weight("seen", trainable=False), name="memory")
        ),
        end=NOT_ON_TWO,
        words=("memory/seen",),
    ),
    "recurrent with state": refused(
        lambda: Net(layers.LSTM(3, stateful=True)), (5, 3), words=("stateful",)
    ),
    "weight as tf.Variable": refused(models.raw_variable, words=("Variable", "add_weight")),
    "layer out of sight": refused(models.hidden_layer, words=("called", "kernel", "attributes")),
    "draws without a generator": refused(
        lambda: between(dense(), Step(models.unseeded)), words=("SeedGenerator",)
    ),
}
