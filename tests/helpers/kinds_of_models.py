"""The kinds of models that Keras lets people write, and what a run must make of each.

Trained by checks_kinds_of_models.py on 1 and on 2 ranks; judged by test_kinds_of_models.py.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import small_models as models
import tensorflow as tf
from keras import layers
from keras.src.applications import efficientnet_v2
from small_models import IDS, Block, Called, Cell, Net, Step, between, bn, dense, of_ids, weight

EQUAL = "the same weights on 1 and 2 ranks"
BY_RANK = "finishes; draws by rank, so weights depend on their number"
REFUSED = "refused before the first step, by one sentence on 1 and 2 ranks"
NOT_ON_TWO = "trained on 1 rank, refused on 2"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model and what comes of it.

    Attributes:
      make: builds the model.
      shape: of one sample x, normal numbers.
      inputs: what the model is called with, from one x and the sample's key.
      words: of the refusal.
      still: parts of the names of variables that must stay as they were made, but for rounding.
      settings: in place of checks_kinds_of_models.USUAL.
      near: largest difference between 1 and 2 ranks, relative to the variable.
    """

    make: Callable[[], Any]
    shape: tuple[int, ...] = (6,)
    inputs: Callable[[tf.Tensor, tf.Tensor], Any] = lambda x, key: x
    end: str = EQUAL
    words: tuple[str, ...] = ()
    still: tuple[str, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    near: float = 1e-9


def ids(x, key):
    """int32 in [0, IDS), of x's shape."""
    return tf.cast(tf.abs(x) * 7, tf.int32) % IDS


def halves(x, key):
    return x[:3], x[3:]


def named_halves(x, key):
    return {"left": x[:3], "right": x[3:]}


# Of keras.applications, with fewer blocks than the models that have names.
# Shifts that the next batch norm takes away again: they move by rounding alone.
ZERO_GRADIENT = (
    *(f"block{i}a_project_bn/beta" for i in range(3, 7)),
    *(f"block{i}a_expand_bn/moving_mean" for i in range(4, 7)),
    "top_bn/moving_mean",
)
NO_KERNEL = {"weight_decay": 0.0}
MICRO = {"accumulation_steps": 2, "global_batch_size": 14}

KINDS = {
    "functional": Kind(lambda: between(dense(), bn())),
    "sequential without input": Kind(
        lambda: keras.Sequential([dense(), bn(), dense(2)]), settings=MICRO
    ),
    "subclassed": Kind(lambda: Net(dense(), bn(), dense(2)), settings=MICRO),
    "nested": Kind(
        lambda: between(Net(dense(6), between(bn(), dense(6), Net(bn())))), settings=MICRO
    ),
    "shared layers": Kind(models.shared, inputs=halves, settings=MICRO),
    "layers in lists and dicts": Kind(models.in_lists),
    "layers made in call": Kind(lambda: Called(models.made_in_call, body=dense())),
    "layers made in training": Kind(
        lambda: Called(models.made_in_training, body=dense(), head=layers.Dense(2)),
        end=REFUSED,
        words=("__init__",),
    ),
    "custom layer with batch norm": Kind(
        lambda: between(Block(), Block()),
        still=("block/dense/bias", "block_1/dense/bias"),
        settings=MICRO,
    ),
    "inputs a tuple": Kind(lambda: models.two_inputs(lambda a, b: (a, b)), inputs=halves),
    "inputs a list": Kind(
        lambda: models.two_inputs(lambda a, b: [a, b]),
        inputs=lambda x, key: list(halves(x, key)),
        end=REFUSED,
        words=("tuple",),
    ),
    "inputs a dict": Kind(
        lambda: models.two_inputs(lambda a, b: {"left": a, "right": b}), inputs=named_halves
    ),
    "inputs a dict, subclassed": Kind(
        lambda: Called(
            lambda m, x, t: m.head(m.body(x["left"]) + x["right"]),
            body=dense(3),
            head=layers.Dense(2),
        ),
        inputs=named_halves,
    ),
    "outputs a dict": Kind(
        lambda: models.outputs(lambda a, b: {"one": a, "two": b}), settings=MICRO
    ),
    "outputs nested": Kind(lambda: models.outputs(lambda a, b: {"both": [a, b], "one": a})),
    "another output in training": Kind(
        lambda: Called(models.auxiliary, body=dense(), head=layers.Dense(2), more=layers.Dense(3))
    ),
    "outputs of float16": Kind(models.half_precision),
    "layers of float32": Kind(models.mixed_types, near=1e-5),
    "loaded from a file": Kind(models.loaded),
    # Weights and their gradients
    "embedding alone": Kind(
        lambda: of_ids(layers.Embedding(IDS, 3)), (4,), ids, settings=NO_KERNEL
    ),
    "embedding mixed": Kind(
        lambda: of_ids(layers.Embedding(IDS, 3), dense(), bn()), (4,), ids, settings=MICRO
    ),
    "embedding, masked": Kind(
        lambda: of_ids(layers.Embedding(IDS, 3, mask_zero=True), layers.LSTM(3)), (4,), ids
    ),
    "embedding shared with the output": Kind(models.tied, (4,), ids, settings=MICRO),
    "constraints": Kind(
        lambda: between(
            dense(kernel_constraint=keras.constraints.NonNeg()),
            dense(kernel_constraint=keras.constraints.MaxNorm(0.5)),
        )
    ),
    "scalar weight": Kind(
        lambda: between(
            dense(), Step(lambda s, x, t: x * s.scale, weight("scale", initializer="ones"))
        )
    ),
    "weight without gradient": Kind(
        lambda: between(
            dense(), Step(lambda s, x, t: x, weight("unused", (3,), initializer="ones"))
        ),
        still=("unused",),
    ),
    "frozen model inside": Kind(models.frozen_inside, still=("fixed",)),
    "regularizers": Kind(models.regularized, settings=MICRO),
    "losses added by the model": Kind(
        lambda: Called(models.adds_loss, body=dense(), aside=layers.Dense(2), head=layers.Dense(2)),
        settings=MICRO,
    ),
    "state equal on all ranks": Kind(
        lambda: between(
            dense(),
            Step(
                models.anneal, weight("calls", dtype="int64", trainable=False, initializer="zeros")
            ),
        ),
        settings=MICRO,
    ),
    "standardized by adapt": Kind(models.standardized, still=("normalization",)),
    "lookup": Kind(
        lambda: of_ids(
            layers.IntegerLookup(vocabulary=list(range(8))), layers.Embedding(9, 3), dense()
        ),
        (4,),
        ids,
    ),
    # Layers of Keras
    "convolution of volumes": Kind(
        lambda: between(layers.Conv3D(4, 2, activation="tanh"), bn(), shape=(3, 3, 3, 2)),
        (3, 3, 3, 2),
    ),
    "depthwise and separable": Kind(
        lambda: between(
            layers.DepthwiseConv2D(3, depth_multiplier=2, activation="tanh"),
            bn(),
            layers.SeparableConv2D(4, 2, activation="tanh"),
            bn(),
            layers.Conv2DTranspose(3, 2),
            shape=(5, 5, 3),
        ),
        (5, 5, 3),
    ),
    "batch norm over time": Kind(
        lambda: between(layers.TimeDistributed(bn()), dense(), shape=(5, 3)), (5, 3)
    ),
    "recurrent": Kind(
        lambda: between(
            layers.SimpleRNN(3, return_sequences=True), layers.GRU(3), bn(), shape=(5, 3)
        ),
        (5, 3),
    ),
    "attention": Kind(models.transformer, (4, 4), still=("key/bias",), settings=MICRO),
    "layer norms": Kind(
        lambda: between(
            dense(),
            layers.LayerNormalization(),
            dense(),
            layers.RMSNormalization(),
            layers.UnitNormalization(),
        )
    ),
    "spectral norm": Kind(
        lambda: between(layers.SpectralNormalization(dense()), bn()), settings=MICRO
    ),
    "dropout by sample": Kind(
        models.sample_dropout, inputs=lambda x, key: {"x": x, "key": key}, settings=MICRO
    ),
    "EfficientNetV2": Kind(
        lambda: efficientnet_v2.EfficientNetV2(
            0.25,
            0.1,
            32,
            dropout_rate=0.0,
            drop_connect_rate=0.0,
            include_preprocessing=False,
            name="efficientnetv2-b0",
            weights=None,
            input_shape=(32, 32, 3),
            classes=3,
        ),
        (32, 32, 3),
        still=ZERO_GRADIENT,
        settings={"num_steps": 2},
    ),
    # What draws by rank
    "dropout": Kind(lambda: between(dense(8), layers.Dropout(0.4)), end=BY_RANK),
    "dropout, subclassed": Kind(
        lambda: Net(dense(8), Net(layers.Dropout(0.4)), dense()), end=BY_RANK, settings=MICRO
    ),
    "noise": Kind(
        lambda: between(dense(8), layers.GaussianNoise(0.3), layers.AlphaDropout(0.2)), end=BY_RANK
    ),
    "attention with dropout": Kind(
        lambda: models.transformer(dropout=0.3), (4, 4), end=BY_RANK, still=("key/bias",)
    ),
    "recurrent with dropout": Kind(
        lambda: between(layers.GRU(6, dropout=0.2, recurrent_dropout=0.3), shape=(5, 3)),
        (5, 3),
        end=BY_RANK,
    ),
    "augmentation inside": Kind(
        lambda: between(
            layers.RandomFlip(),
            layers.RandomContrast(0.3),
            layers.Conv2D(3, 2),
            layers.Flatten(),
            shape=(4, 4, 3),
        ),
        (4, 4, 3),
        end=BY_RANK,
    ),
    # What cannot be trained
    "state of the batch": Kind(
        lambda: between(
            dense(), Step(models.remember, weight("seen", trainable=False), name="memory")
        ),
        end=NOT_ON_TWO,
        words=("memory/seen",),
    ),
    "batch norm in a recurrent cell": Kind(
        lambda: between(layers.RNN(Cell()), shape=(5, 3)),
        (5, 3),
        end=NOT_ON_TWO,
        words=("cell_bn", "loop"),
    ),
    "recurrent with state": Kind(
        lambda: Net(layers.LSTM(3, stateful=True)), (5, 3), end=REFUSED, words=("stateful",)
    ),
    "weight as tf.Variable": Kind(
        lambda: models.raw_variable(True), end=REFUSED, words=("Variable", "add_weight")
    ),
    "state as tf.Variable": Kind(
        lambda: models.raw_variable(False), end=REFUSED, words=("Variable", "add_weight")
    ),
    "layer out of sight": Kind(
        models.hidden_layer, end=REFUSED, words=("called", "kernel", "attributes")
    ),
    "draws without a generator": Kind(
        lambda: between(dense(), Step(models.unseeded)), end=REFUSED, words=("SeedGenerator",)
    ),
    "build fails": Kind(
        lambda: Net(dense(), Step(None, models.fail)), end=REFUSED, words=("no such",)
    ),
    "call fails": Kind(lambda: Net(dense(), Step(models.fail)), end=REFUSED, words=("no such",)),
    "call fails in training": Kind(
        lambda: between(dense(), Step(lambda s, x, t: models.fail() if t is True else x)),
        end=REFUSED,
        words=("no such",),
    ),
}
