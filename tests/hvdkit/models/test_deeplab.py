"""DeepLabV3+ is the papers', its backbone keras.applications', and any size of picture fits it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdkit.models import deeplab
from hvdkit.ranks.world import unoptimized
from hvdkit.train.layers import dropout
from hvdkit.train.layers.preprocessing import Preprocess
from tasks.segmentation import MODELS

CLASSES = 5


@pytest.fixture(scope="module", autouse=True)
def not_optimized():
    with unoptimized():
        yield


@pytest.fixture(scope="module")
def model():
    return MODELS["deeplabv3plus"](64, CLASSES, 0.1)


def inputs(height: int, width: int, batch: int = 2) -> dict[str, tf.Tensor]:
    image = tf.random.stateless_uniform(
        [batch, height, width, 3], [1, height], 0.0, 255.0
    )
    return {"image": image, "key": tf.zeros([batch, 2], tf.int32)}


def count(kernel: int, into: int, out: int) -> int:
    """Weights of a convolution without biases and what its batch norm trains."""
    return kernel * kernel * into * out + 2 * out


def test_parameters(model):
    """ResNet-50's 25,557,032 less its last layer's, keras.applications' 26,560 biases, the rest."""
    backbone = 25_557_032 - 2_049_000 + 26_560
    pyramid = count(1, 2048, 256) + 3 * count(3, 2048, 256) + count(1, 2048, 256)
    pyramid += count(1, 5 * 256, 256)
    decoder = count(1, 256, 48) + count(3, 256 + 48, 256) + count(3, 256, 256)
    trained = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert trained == backbone + pyramid + decoder + 256 * CLASSES + CLASSES


def test_rates_are_the_papers(model):
    """Output stride 16 and rates 6, 12 and 18; the backbone's are compared with Keras's below."""
    convolutions = {
        x.name: x for x in model.layers if isinstance(x, keras.layers.Conv2D)
    }
    rates = [
        x.dilation_rate[0] for n, x in convolutions.items() if n.startswith("aspp_rate")
    ]
    assert rates == [6, 12, 18]
    norms = [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
    assert len(norms) == 53 + 9 and len({(x.epsilon, x.momentum) for x in norms}) == 1


def test_dropout_is_after_the_pyramid(model):
    layer = model.get_layer("dropout")
    assert layer.rate == 0.1 and dropout.drawing_layers(model) == []
    relu = layer.input[0]._keras_history.operation
    assert relu.input is model.get_layer("aspp_project_bn").output


def test_sizes_that_are_multiples_of_16(model):
    spec = {
        "image": tf.TensorSpec([None, None, None, 3]),
        "key": tf.TensorSpec([None, 2], "int32"),
    }
    traced = tf.function(model, input_signature=[spec], autograph=False)
    for size in ((48, 112), (16, 16)):
        logits = traced(inputs(*size))
        assert logits.shape == (2, *size, CLASSES) and logits.dtype == tf.float32
    np.testing.assert_allclose(model(inputs(16, 16)), logits, atol=1e-5)


def test_other_sizes_are_refused():
    with pytest.raises(
        ValueError, match="--image_size=72: deeplabv3plus needs a multiple of 16"
    ):
        MODELS["deeplabv3plus"](72, CLASSES, 0.0)


def test_it_can_be_saved(tmp_path):
    """But for its backbone, which is Keras's."""
    image = keras.Input((None, None, 3))
    small = keras.Model(image, deeplab._pyramid(Preprocess()(image)))
    small.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    picture = inputs(4, 6)["image"]
    assert again.output.shape == (None, None, None, 256)
    np.testing.assert_allclose(again(picture), small(picture), atol=1e-6)


def test_the_last_block_is_keras_applications_with_other_rates(model):
    """On the same weights: theirs with the dilation set, and without it theirs as it is."""
    theirs = keras.applications.ResNet50(weights=None, include_top=False)
    for layer in theirs.layers:
        layer.set_weights(
            model.get_layer(layer.name).get_weights() if layer.weights else []
        )
    place = "conv5_block3_out"
    assert model.backbone == place  # --backbone_weights fills layers up to it
    ours = keras.Model(model.inputs[0], model.get_layer(place).output)
    image = inputs(64, 96)["image"]

    def set_rates(network, stride, rates):
        for part in (0, 1):
            network.get_layer(f"conv5_block1_{part}_conv").strides = (stride, stride)
        for unit, rate in enumerate(rates, 1):
            network.get_layer(f"conv5_block{unit}_2_conv").dilation_rate = (rate, rate)

    def near(one: np.ndarray, other: np.ndarray) -> None:
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())

    scaled = image / 127.5 - 1.0
    atrous = ours(image).numpy()
    plain = theirs(scaled).numpy()
    set_rates(theirs, 1, (2, 4, 8))
    set_rates(ours, 2, (1, 1, 1))
    try:
        near(atrous, theirs(scaled).numpy())
        near(ours(image).numpy(), plain)
    finally:
        set_rates(ours, 1, (2, 4, 8))
    assert atrous.shape[1:3] == (4, 6) and plain.shape[1:3] == (2, 3)
