"""The kinds of models that Keras lets people write, and how a run of each must end."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import small_models as models
import tensorflow as tf
from keras import layers
from small_models import IDS, Block, Called, Net, Step, between, bn, dense, weight

EQUAL = "the same weights on 1 and 2 ranks"
BY_RANK = "finishes; draws by rank, so weights depend on their number"
REFUSED = "refused before the first step, by one sentence on 1 and 2 ranks"
NOT_ON_TWO = "trained on 1 rank, refused on 2"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model and how its runs end."""

    make: Callable[[], Any]
    shape: tuple[int, ...] = (6,)  # of one sample x, normal numbers
    # Of x and the sample's key.
    inputs: Callable[[tf.Tensor, tf.Tensor], Any] = lambda x, key: x
    end: str = EQUAL
    words: tuple[str, ...] = ()  # of the refusal
    # Parts of names of variables that change by rounding only.
    still: tuple[str, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Largest difference between 1 and 2 ranks, relative to the variable.
    near: float = 1e-9


def ids(x, key):
    """int32 in [0, IDS), of x's shape."""
    return tf.cast(tf.abs(x) * 7, tf.int32) % IDS


def halves(x, key):
    return x[:3], x[3:]


MICRO = {"accumulation_steps": 2, "global_batch_size": 14}
micro = functools.partial(Kind, settings=MICRO)
refused = functools.partial(Kind, end=REFUSED)
SCALE = weight("scale", initializer="ones")
CALLS = weight("calls", dtype="int64", trainable=False, initializer="zeros")

KINDS = {
    "sequential without input": micro(
        lambda: keras.Sequential([dense(), bn(), dense(2)])
    ),
    "subclassed": micro(lambda: Net(dense(), bn(), dense(2))),
    "nested": micro(lambda: between(Net(dense(6), between(bn(), dense(6), Net(bn()))))),
    "shared layers": micro(models.shared, inputs=halves),
    "layers made in call": Kind(lambda: Called(models.made_in_call, body=dense())),
    "layers made in training": refused(
        lambda: Called(models.made_in_training, body=dense(), head=layers.Dense(2)),
        words=("__init__",),
    ),
    "custom layer with batch norm": micro(
        lambda: between(Block(), Block()),
        still=("block/dense/bias", "block_1/dense/bias"),
    ),
    "inputs a list": refused(
        models.shared, inputs=lambda x, key: list(halves(x, key)), words=("tuple",)
    ),
    "outputs a dict": micro(models.two_outputs),
    "another output in training": Kind(
        lambda: Called(
            models.auxiliary, body=dense(), head=layers.Dense(2), more=layers.Dense(3)
        )
    ),
    "layers of two types": Kind(
        lambda: between(dense(dtype="float64"), bn(dtype="float64"), dense()),
        settings={"precision": "float32"},
        near=1e-5,
    ),
    "embedding shared with the output": micro(models.tied, (4,), ids),
    "constraints": Kind(
        lambda: between(
            dense(kernel_constraint=keras.constraints.NonNeg()),
            dense(kernel_constraint=keras.constraints.MaxNorm(0.5)),
        )
    ),
    "scalar weight": Kind(
        lambda: between(dense(), Step(lambda s, x, t: x * s.scale, SCALE))
    ),
    "frozen model inside": Kind(models.frozen_inside, still=("fixed",)),
    "regularizers": micro(models.regularized),
    "losses added by the model": micro(
        lambda: Called(
            models.adds_loss, body=dense(), aside=layers.Dense(2), head=layers.Dense(2)
        )
    ),
    "state equal on all ranks": micro(
        lambda: between(dense(), Step(models.anneal, CALLS))
    ),
    "batch norm in functions": micro(models.InFunctions, (6, 3)),
    "batch norm unrolled both ways": Kind(
        lambda: Net(
            layers.Bidirectional(layers.RNN(models.Cell(), unroll=True)), dense()
        ),
        (4, 3),
    ),
    "batch norm, channels first": Kind(
        lambda: Net(dense(2), layers.BatchNormalization(axis=1)), (3, 2, 2)
    ),
    "batch norm with Keras's own flag": Kind(
        lambda: Net(dense(), bn(synchronized=True))
    ),
    "batch norm, masked": Kind(
        models.masked, (6, 4), lambda x, key: (x[..., :3], x[..., 3])
    ),
    "batch norm, masked, one channel": Kind(
        lambda: Net(layers.Masking(0.0), dense(1), bn()),
        shape=(6, 1),
        inputs=lambda x, key: x * tf.cast(x < 1, x.dtype),
    ),
    "batch norm over time": Kind(
        lambda: between(layers.TimeDistributed(bn()), dense(), shape=(5, 3)), (5, 3)
    ),
    "recurrent": Kind(
        lambda: between(
            layers.SimpleRNN(3, return_sequences=True),
            layers.GRU(3),
            bn(),
            shape=(5, 3),
        ),
        (5, 3),
    ),
    "attention": micro(models.transformer, (4, 4), still=("key/bias",)),
    "spectral norm": micro(
        lambda: between(layers.SpectralNormalization(dense()), bn())
    ),
    "dropout by sample": micro(
        models.sample_dropout, inputs=lambda x, key: {"x": x, "key": key}
    ),
    "dropout, subclassed": micro(
        lambda: Net(dense(8), Net(layers.Dropout(0.4)), dense()), end=BY_RANK
    ),
    "state of the batch": Kind(
        lambda: between(
            dense(),
            Step(models.remember, weight("seen", trainable=False), name="memory"),
        ),
        end=NOT_ON_TWO,
        words=("memory/seen",),
    ),
    "recurrent with state": refused(
        lambda: Net(layers.LSTM(3, stateful=True)), (5, 3), words=("stateful",)
    ),
    "weight as tf.Variable": refused(
        models.raw_variable, words=("Variable", "add_weight")
    ),
    "layer out of sight": refused(
        models.hidden_layer, words=("called", "kernel", "attributes")
    ),
    "draws without a generator": refused(
        lambda: between(dense(), Step(models.unseeded)), words=("SeedGenerator",)
    ),
    "build fails": refused(
        lambda: Net(dense(), Step(None, models.fail)), words=("no such",)
    ),
    "call fails in training": refused(
        lambda: between(
            dense(), Step(lambda s, x, t: models.fail() if t is True else x)
        ),
        words=("no such",),
    ),
}
