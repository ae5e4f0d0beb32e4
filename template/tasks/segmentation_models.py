"""Segmentation networks: image [B, H, W, 3] in [0, 255] -> logits [B, H, W, classes].

`size` is a training crop's; evaluation gives pictures of any height and width that are multiples
of the model's stride (STRIDES).
Inputs are a dict: "image", and with dropout "key" (int32 [B, 2], see hvdkit/train/dropout.py).
"""

from __future__ import annotations

from collections.abc import Callable

import keras
from hvdkit.train.dropout import SampleDropout
from hvdkit.train.preprocessing import scaled, wide
from keras import layers

from tasks.deeplab import deeplabv3plus

# Short runs read the moving statistics early, so they follow faster than Keras's 0.99.
_BN_MOMENTUM = 0.97


def small(size: int, num_classes: int, dropout: float) -> keras.Model:
    """Encoder-decoder of about 0.5 million parameters that trains on a CPU.

    Residual blocks (arXiv:1512.03385) at 1/2, 1/4 and 1/8 of the size; the decoder takes the
    encoder's features of each size back in (U-Net, arXiv:1505.04597) and predicts at 1/2.
    """
    if size % STRIDES["small"]:
        raise ValueError(f"--image_size={size}: the small model needs a multiple of 8")
    image = keras.Input((None, None, 3), name="image")
    x = _conv(scaled(image), 24, 3, strides=2)
    skips = []
    for width in (24, 48, 96):
        if skips:
            x = _conv(x, width, 3, strides=2)
        x = _residual(x, width)
        x = _residual(x, width)
        skips.append(x)
    for width, skip in ((48, skips[1]), (24, skips[0])):
        x = layers.UpSampling2D(2, interpolation="bilinear")(_conv(x, width, 1))
        x = _conv(layers.Concatenate()([x, skip]), width, 3)
    return _model(image, x, num_classes, 2, dropout, "small")


def tiny(size: int, num_classes: int, dropout: float) -> keras.Model:
    """Two convolutions: traced in a moment, for tests and for looking for a mistake.

    Smooth, so that runs on different numbers of ranks differ by rounding alone: a ReLU whose
    input is within rounding of zero would turn a pixel's gradient on or off.
    """
    if size % STRIDES["tiny"]:
        raise ValueError(f"--image_size={size}: the tiny model needs an even number")
    image = keras.Input((None, None, 3), name="image")
    x = _conv(scaled(image), 8, 3, strides=2, activation="swish")
    x = _conv(x, 12, 3, activation="swish")
    return _model(image, x, num_classes, 2, dropout, "tiny")


MODELS: dict[str, Callable[[int, int, float], keras.Model]] = {
    "small": small,
    "tiny": tiny,
    "deeplabv3plus": deeplabv3plus,
}
# Of what the height and the width of the model's input must be multiples.
STRIDES = {"small": 8, "tiny": 2, "deeplabv3plus": 16}


def _conv(x, filters: int, kernel: int, strides=1, activation="relu"):
    """Convolution, batch norm, activation."""
    x = layers.Conv2D(
        filters,
        kernel,
        strides,
        "same",
        use_bias=False,
        kernel_initializer="he_normal",
    )(x)
    x = layers.BatchNormalization(momentum=_BN_MOMENTUM)(x)
    return layers.Activation(activation)(x)


def _residual(x, filters: int):
    y = _conv(x, filters, 3)
    y = layers.Conv2D(filters, 3, padding="same", use_bias=False, kernel_initializer="he_normal")(y)
    y = layers.BatchNormalization(momentum=_BN_MOMENTUM, gamma_initializer="zeros")(y)
    return layers.ReLU()(layers.Add()([x, y]))


def _model(image, x, num_classes: int, scale: int, dropout: float, name: str) -> keras.Model:
    """Dropout, logits and upsampling; in float32 at least, whatever came before."""
    inputs = {"image": image}
    if dropout:
        inputs["key"] = keras.Input((2,), dtype="int32", name="key")
        x = SampleDropout(dropout, name="dropout")([x, inputs["key"]])
    x = layers.Conv2D(num_classes, 1, dtype=wide(), name="logits")(x)
    x = layers.UpSampling2D(scale, interpolation="bilinear", dtype=wide())(x)
    return keras.Model(inputs, x, name=name)
