"""Small networks to change: picture in [0, 255] -> logits, in float32 at least.

Inputs are a dict: "image", and with dropout "key" (int32 [B, 2], see hvdkit.train.dropout).
hvdkit.models has networks of papers.
"""

import keras
from hvdkit.models.upsampling import BilinearUpsampling
from hvdkit.train.dropout import SampleDropout
from hvdkit.train.preprocessing import scaled, wide
from keras import layers

# Faster than Keras's 0.99, because short runs read the moving statistics early.
_BN_MOMENTUM = 0.97


def small(size: int, num_classes: int, dropout: float) -> keras.Model:
    """Image [B, H, W, 3] -> logits [B, H, W, classes]; 0.5 million parameters, trains on a CPU.

    H and W are multiples of 8. The encoder has residual blocks (arXiv:1512.03385) at 1/2, 1/4 and
    1/8 of the size; the decoder joins the encoder's features of each size (U-Net, arXiv:1505.04597)
    and predicts at 1/2.
    """
    if size % 8:
        raise ValueError(f"--image_size={size}: the small model needs a multiple of 8")
    image = keras.Input((None, None, 3), name="image")
    x = _conv(scaled(image), 24, 3, strides=2)
    skips: list[keras.KerasTensor] = []
    for width in (24, 48, 96):
        if skips:
            x = _conv(x, width, 3, strides=2)
        x = _residual(x, width)
        x = _residual(x, width)
        skips.append(x)
    for width, skip in ((48, skips[1]), (24, skips[0])):
        x = BilinearUpsampling(2)(_conv(x, width, 1))
        x = _conv(layers.Concatenate()([x, skip]), width, 3)
    return _segmenter(image, x, num_classes, dropout=dropout, name="small")


def tiny(size: int, num_classes: int, dropout: float) -> keras.Model:
    """Two convolutions, traced quickly, for tests and debugging.

    It is smooth, so that runs on different numbers of ranks differ by rounding only: rounding near
    zero would switch a ReLU's gradient on or off.
    """
    if size % 2:
        raise ValueError(f"--image_size={size}: the tiny model needs an even number")
    image = keras.Input((None, None, 3), name="image")
    x = _conv(scaled(image), 8, 3, strides=2, activation="swish")
    x = _conv(x, 12, 3, activation="swish")
    return _segmenter(image, x, num_classes, dropout=dropout, name="tiny")


def classifier(size: int, num_classes: int, dropout: float) -> keras.Model:
    """Image [B, size, size, 3] -> logits [B, classes]; five convolutions, 0.1 million weights."""
    image = keras.Input((size, size, 3), name="image")
    x = _conv(_conv(scaled(image), 32, 3, momentum=0.9), 32, 3, momentum=0.9)
    x = layers.MaxPooling2D(2)(x)
    for kernel in (3, 3, 1):
        x = _conv(x, 64, kernel, momentum=0.9)
    inputs, x = _dropped(image, layers.GlobalAveragePooling2D()(x), dropout)
    return keras.Model(
        inputs, layers.Dense(num_classes, dtype=wide(), name="logits")(x), name="small"
    )


def two_convolutions(size: int, num_classes: int, dropout: float) -> keras.Model:
    """Image [B, size, size, 3] -> logits [B, classes]; 0.8 million weights at size 28.

    Convolution, pooling and batch norm twice, then a dense layer, as in many published networks for
    MNIST's files. Batch norm comes after pooling, where it costs a quarter.
    """
    image = keras.Input((size, size, 3), name="image")
    x = scaled(image)
    for filters in (32, 64):
        x = layers.Conv2D(
            filters, 3, padding="same", use_bias=False, kernel_initializer="he_normal"
        )(x)
        x = layers.MaxPooling2D(2)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    x = layers.Dense(256, use_bias=False, kernel_initializer="he_normal")(
        layers.Flatten()(x)
    )
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    inputs, x = _dropped(image, x, dropout)
    logits = layers.Dense(num_classes, dtype=wide(), name="logits")(x)
    return keras.Model(inputs, logits, name="two_convolutions")


def _segmenter(image, x, num_classes: int, *, dropout: float, name: str) -> keras.Model:
    """Features at half the size -> logits [B, H, W, classes]."""
    inputs, x = _dropped(image, x, dropout)
    x = layers.Conv2D(num_classes, 1, dtype=wide(), name="logits")(x)
    x = BilinearUpsampling(2, dtype=wide())(x)
    return keras.Model(inputs, x, name=name)


def _dropped(image, x, dropout: float):
    """The model's inputs, and features after dropout, whose draws are the same on any rank."""
    if not dropout:
        return {"image": image}, x
    key = keras.Input((2,), dtype="int32", name="key")
    return {"image": image, "key": key}, SampleDropout(dropout, name="dropout")(
        [x, key]
    )


def _conv(
    x, filters: int, kernel: int, *, strides=1, activation="relu", momentum=_BN_MOMENTUM
):
    """Convolution, batch norm, activation."""
    x = layers.Conv2D(
        filters, kernel, strides, "same", use_bias=False, kernel_initializer="he_normal"
    )(x)
    x = layers.BatchNormalization(momentum=momentum)(x)
    return layers.Activation(activation)(x)


def _residual(x, filters: int):
    y = _conv(x, filters, 3)
    y = layers.Conv2D(
        filters, 3, padding="same", use_bias=False, kernel_initializer="he_normal"
    )(y)
    y = layers.BatchNormalization(momentum=_BN_MOMENTUM, gamma_initializer="zeros")(y)
    return layers.ReLU()(layers.Add()([x, y]))
