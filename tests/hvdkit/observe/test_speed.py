"""Windows of a benchmark and what is made of them; the operations of a model."""

import types

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from keras import layers
from small_checkpoints import ALONE

from hvdkit.observe import speed
from hvdkit.run import benchmark
from hvdkit.settings import Settings
from tasks import classification


@pytest.mark.parametrize(
    ("first", "last", "warm_up", "window"),
    [(0, 15, 5, 1), (0, 25, 5, 2), (7, 107, 10, 9), (0, 100_000, 100, 9990)],
)
def test_ten_windows_of_equally_many_steps_end_with_the_run(
    first, last, warm_up, window
):
    ends = speed.window_ends(first, last)
    assert list(np.diff(ends)) == [window] * 10
    assert (ends[0] - first, ends[-1]) == (warm_up, last)
    assert not speed.window_ends(first, first + 14)  # these are too few


def test_spread_of_rates():
    rates = np.random.default_rng(1).lognormal(5, 0.3, speed.WINDOWS)
    spread = speed.spread(rates)
    error = scipy.stats.sem(rates)
    low, high = scipy.stats.t.interval(
        0.95, len(rates) - 1, loc=rates.mean(), scale=error
    )
    assert spread["mean"] == pytest.approx(rates.mean(), rel=1e-12)
    assert spread["interval_95"] == pytest.approx([low, high], rel=1e-6)
    assert spread["median"] == np.median(rates)
    # SciPy's "normal" divides by a quantile; 1.4826 are the first digits of its inverse.
    scale = scipy.stats.median_abs_deviation(rates, scale="normal")
    assert spread["jitter"] == pytest.approx(scale, rel=1e-4)


def test_resnet50_is_counted_as_published():
    """GFLOPS, of multiply-adds, in the file of torchvision's weights."""
    model = classification.MODELS["resnet50"](224, 1000, 0.0)
    counted = speed.forward_flops(model, {"image": tf.TensorSpec([2, 224, 224, 3])})
    assert counted / 2 / 2e9 == pytest.approx(4.089, rel=0.02)


X = (2, 16, 12, 8)  # the shape of a batch
LAYERS = {
    "strided": (layers.Conv2D(5, 3, 2, "same"), 2 * 8 * 6 * 5 * 9 * 8),
    # Sizes that 5 does not divide: TensorFlow computes more, which does not count.
    "dilated": (
        layers.DepthwiseConv2D(3, 1, "same", dilation_rate=5),
        2 * 16 * 12 * 8 * 9,
    ),
    "grouped": (
        layers.Conv2D(16, 3, padding="same", groups=4),
        2 * 16 * 12 * 16 * 9 * 2,
    ),
    "transposed": (layers.Conv2DTranspose(5, 3, 2, "same"), 2 * 16 * 12 * 8 * 9 * 5),
    "separable": (
        layers.SeparableConv2D(5, 3, padding="same"),
        2 * 16 * 12 * 8 * (9 + 5),
    ),
    "einsum": (
        layers.Lambda(lambda x: tf.einsum("...ij,jk->...ik", x, tf.ones([8, 5]))),
        15360,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_products_of_layers(name):
    layer, products = LAYERS[name]
    model = keras.Sequential([keras.Input(X[1:]), layer])
    assert speed.forward_flops(model, tf.TensorSpec(X)) == 2 * products


def test_attention_and_functions_are_counted_and_loops_are_not():
    x = keras.Input((16, 8))
    model = keras.Model(x, layers.MultiHeadAttention(2, 4)(x, x))
    projections = 4 * 16 * 8 * 8
    scores = 2 * 2 * 16 * 16 * 4
    assert speed.forward_flops(model, tf.TensorSpec([3, 16, 8])) == 2 * 3 * (
        projections + scores
    )
    product = tf.function(lambda x: x @ x)
    twice = tf.function(lambda x: product(x) + product(x))
    graph = twice.get_concrete_function(tf.TensorSpec([7, 7])).graph
    assert speed.graph_flops(graph) == 2 * 2 * 7**3
    with pytest.raises(speed.NotCounted, match="While"):
        speed.forward_flops(
            keras.Model(x, layers.LSTM(4)(x)), tf.TensorSpec([3, 16, 8])
        )


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "float32", (156e12, "TF32")),
        ("NVIDIA H100 80GB HBM3", "float16", (989.5e12, "float16")),
        ("Tesla V100-SXM2-16GB", "float32", (15.7e12, "float32")),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("NVIDIA A10G", "float16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "float32", None),
        ("NVIDIA A100-SXM4-80GB", "float64", None),
        ("CPU", "float32", None),
    ],
)
def test_peaks_of_devices(device, precision, expected, monkeypatch):
    assert speed.peak(device, precision) == expected
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert speed.peak("NVIDIA A100-SXM4-80GB", "float32") == (19.5e12, "float32")


def test_operations_of_a_model_with_frozen_layers_are_not_counted():
    """Its backward pass takes less than two passes; how much less depends on the layers."""
    x = keras.Input((6,))
    body = layers.Dense(5, name="body")
    model = keras.Model(x, layers.Dense(3)(body(x)))
    run = types.SimpleNamespace(
        config=Settings(global_batch_size=4), model=model, world=ALONE
    )
    spec = {"inputs": tf.TensorSpec([1, 4, 6])}
    assert benchmark.count_operations(run, spec)["training_a_sample"] == 3 * 2 * (
        6 * 5 + 5 * 3
    )
    body.trainable = False
    assert set(benchmark.count_operations(run, spec)) == {"not_counted"}
