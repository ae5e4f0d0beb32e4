"""Classification networks: image [B, size, size, 3] in [-1, 1] -> logits [B, classes].

Inputs are a dict: "image", and with dropout "key" (int32 [B, 2], see engine/dropout.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import keras
from keras import layers

from engine.dropout import SampleDropout
from engine.preprocessing import Preprocess


def small(size: int, num_classes: int, dropout: float) -> keras.Model:
    """Five convolutions, 0.1 million parameters: trains on a CPU, for pictures of a few pixels."""
    image = keras.Input((size, size, 3), name="image")
    x = _conv(_conv(image, 32), 32)
    x = _conv(_conv(layers.MaxPooling2D(2)(x), 64), 64)
    return _model(image, _conv(x, 64, kernel=1), num_classes, dropout, "small")


def cifar_resnet(depth: int, size: int, num_classes: int, dropout: float) -> keras.Model:
    """ResNet of He et al. 2015 (arXiv:1512.03385, section 4.2) for pictures of 32 pixels.

    Depth is 6n + 2: three stages of n blocks with 16, 32 and 64 filters; shortcuts have no
    parameters (option A: every second pixel, missing channels zero).
    """
    image = keras.Input((size, size, 3), name="image")
    x = _conv(image, 16)
    for stage, filters in enumerate((16, 32, 64)):
        for block in range((depth - 2) // 6):
            x = _block(x, filters, strides=2 if stage and not block else 1)
    return _model(image, x, num_classes, dropout, f"resnet{depth}")


def resnet50(size: int, num_classes: int, dropout: float) -> keras.Model:
    """keras.applications' ResNet-50, from random weights, for pictures of about 224 pixels."""
    if size < 32:
        raise ValueError(f"--image_size={size}: resnet50 needs at least 32")
    image = keras.Input((size, size, 3), name="image")
    pixels = Preprocess(name="preprocess")(image)
    body = keras.applications.ResNet50(include_top=False, weights=None, input_tensor=pixels)
    return _model(image, body.output, num_classes, dropout, "resnet50")


MODELS: dict[str, Callable[[int, int, float], keras.Model]] = {
    "small": small,
    "resnet20": partial(cifar_resnet, 20),
    "resnet56": partial(cifar_resnet, 56),
    "resnet50": resnet50,
}


@keras.saving.register_keras_serializable(package="tasks")
class PadChannels(layers.Layer):
    """Zeros for the channels that are missing: [..., n] -> [..., channels]."""

    def __init__(self, channels: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.channels = channels

    def call(self, x):
        missing = self.channels - x.shape[-1]
        return keras.ops.pad(x, [[0, 0]] * (len(x.shape) - 1) + [[0, missing]])

    def get_config(self) -> dict:
        return super().get_config() | {"channels": self.channels}


def _conv(x, filters: int, kernel: int = 3, strides: int = 1, relu: bool = True):
    """Convolution, batch norm and, unless told, ReLU."""
    x = layers.Conv2D(
        filters, kernel, strides, "same", use_bias=False, kernel_initializer="he_normal"
    )(x)
    # Keras's 0.99 would follow too slowly for short runs, which read the statistics early.
    x = layers.BatchNormalization(momentum=0.9)(x)
    return layers.ReLU()(x) if relu else x


def _block(x, filters: int, strides: int):
    y = _conv(_conv(x, filters, strides=strides), filters, relu=False)
    return layers.ReLU()(layers.Add()([_shortcut(x, filters, strides), y]))


def _shortcut(x, filters: int, strides: int):
    if strides > 1:
        x = layers.MaxPooling2D(1, strides, "same")(x)
    return x if x.shape[-1] == filters else PadChannels(filters)(x)


def _model(image, x, num_classes: int, dropout: float, name: str) -> keras.Model:
    """Global mean, dropout and logits; the logits in float32 at least, whatever came before."""
    inputs = {"image": image}
    x = layers.GlobalAveragePooling2D()(x)
    if dropout:
        inputs["key"] = keras.Input((2,), dtype="int32", name="key")
        x = SampleDropout(dropout, name="dropout")([x, inputs["key"]])
    dtype = "float64" if keras.config.floatx() == "float64" else "float32"
    x = layers.Dense(num_classes, dtype=dtype, name="logits")(x)
    return keras.Model(inputs, x, name=name)
