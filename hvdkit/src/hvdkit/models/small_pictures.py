"""Residual networks for small pictures, [B, size, size, 3] in [0, 255] -> logits [B, classes].

Inputs are a dict: "image", and with dropout "key" (int32 [B, 2], see hvdkit.train.dropout).
"""

import keras
from keras import layers

from hvdkit.models.resnet import classified
from hvdkit.train.layers.preprocessing import scaled


def resnet18(size: int, num_classes: int, dropout: float) -> keras.Model:
    """ResNet-18 of He et al. 2015 (arXiv:1512.03385, table 1), with a stem for small pictures.

    The stem is one 3x3 convolution without pooling, so that pictures of 28 or 32 pixels keep their
    size for the first stage. 11.2 million weights.
    """
    image = keras.Input((size, size, 3), name="image")
    x = layers.ReLU()(_batch_norm(_conv(scaled(image), 64, 3)))
    for filters, first_strides in ((64, 1), (128, 2), (256, 2), (512, 2)):
        x = _basic_block(x, filters, strides=first_strides)
        x = _basic_block(x, filters, strides=1)
    return classified(image, x, num_classes, dropout=dropout, name="resnet18")


def wide_resnet28_10(size: int, num_classes: int, dropout: float) -> keras.Model:
    """WRN-28-10 of Zagoruyko and Komodakis 2016 (arXiv:1605.07146, table 1): 36.5 million weights.

    Three groups of four blocks with 160, 320 and 640 filters; batch norm and ReLU come before each
    convolution. Dropout stands before the logits here, not within the blocks.
    """
    image = keras.Input((size, size, 3), name="image")
    x = _conv(scaled(image), 16, 3)
    for filters, first_strides in ((160, 1), (320, 2), (640, 2)):
        x = _wide_block(x, filters, strides=first_strides)
        for _ in range(3):
            x = _wide_block(x, filters, strides=1)
    x = layers.ReLU()(_batch_norm(x))
    return classified(image, x, num_classes, dropout=dropout, name="wide_resnet28_10")


def _basic_block(x, filters: int, *, strides: int):
    """Two 3x3 convolutions and a shortcut, which has a 1x1 convolution where shapes change."""
    shortcut = x
    if strides > 1 or x.shape[-1] != filters:
        shortcut = _batch_norm(_conv(x, filters, 1, strides=strides))
    y = layers.ReLU()(_batch_norm(_conv(x, filters, 3, strides=strides)))
    y = _batch_norm(_conv(y, filters, 3))
    return layers.ReLU()(layers.Add()([shortcut, y]))


def _wide_block(x, filters: int, *, strides: int):
    """Pre-activation block (He et al. 2016, arXiv:1603.05027)."""
    y = layers.ReLU()(_batch_norm(x))
    shortcut = x
    if strides > 1 or x.shape[-1] != filters:
        shortcut = _conv(y, filters, 1, strides=strides)
    y = _conv(y, filters, 3, strides=strides)
    y = _conv(layers.ReLU()(_batch_norm(y)), filters, 3)
    return layers.Add()([shortcut, y])


def _conv(x, filters: int, kernel: int, *, strides: int = 1):
    return layers.Conv2D(
        filters, kernel, strides, "same", use_bias=False, kernel_initializer="he_normal"
    )(x)


def _batch_norm(x):
    # Keras's 0.99 would follow too slowly for short runs, which read the statistics early.
    return layers.BatchNormalization(momentum=0.9)(x)
