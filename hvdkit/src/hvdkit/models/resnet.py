"""Residual networks for classification: image [B, size, size, 3] in [0, 255] -> logits.

Inputs are a dict: "image", and with dropout "key" (int32 [B, 2], see hvdkit.train.dropout).
"""

import keras
from keras import layers

from hvdkit.train.layers.dropout import SampleDropout
from hvdkit.train.layers.preprocessing import Preprocess, scaled, wide


def cifar_resnet(
    size: int, num_classes: int, dropout: float, *, depth: int
) -> keras.Model:
    """ResNet of He et al. 2015 (arXiv:1512.03385, section 4.2) for pictures of 32 pixels.

    Depth is 6n + 2: three stages of n blocks with 16, 32 and 64 filters; shortcuts have no
    parameters (option A: every second pixel, missing channels zero).
    """
    image = keras.Input((size, size, 3), name="image")
    x = _conv(scaled(image), 16)
    for stage, filters in enumerate((16, 32, 64)):
        for block in range((depth - 2) // 6):
            x = _block(x, filters, strides=2 if stage and not block else 1)
    return classified(image, x, num_classes, dropout=dropout, name=f"resnet{depth}")


def resnet50(size: int, num_classes: int, dropout: float) -> keras.Model:
    """ResNet-50 as Goyal et al. 2017 train it (arXiv:1706.02677, section 5.1), for 224 pixels.

    Blocks that halve the size do so in their 3x3 convolution. Convolutions have no biases; their
    weights begin normal with variance 2 / fan-out (He et al. 2015, arXiv:1502.01852, equation 14;
    fan-out as in fb.resnet.torch), the logits' with standard deviation 0.01, the last gamma of
    each block at 0. Padding is the same on all sides, as in Torch.
    """
    if size < 32:
        raise ValueError(f"--image_size={size}: resnet50 needs at least 32")
    image = keras.Input((size, size, 3), name="image")
    x = _torch_conv(scaled(image), 64, 7, name="stem", strides=2)
    # After ReLU nothing is less than the padding.
    x = layers.ZeroPadding2D(1)(layers.ReLU()(x))
    x = layers.MaxPooling2D(3, 2)(x)

    for stage, (filters, blocks) in enumerate(
        ((64, 3), (128, 4), (256, 6), (512, 3)), start=1
    ):
        for block in range(1, blocks + 1):
            strides = 2 if stage > 1 and block == 1 else 1
            x = _bottleneck(x, filters, strides, name=f"stage{stage}_block{block}")

    logits = keras.initializers.RandomNormal(stddev=0.01)
    return classified(
        image, x, num_classes, dropout=dropout, name="resnet50", logits=logits
    )


def resnet50_keras(size: int, num_classes: int, dropout: float) -> keras.Model:
    """keras.applications' ResNet-50, from random weights: He et al. 2015 with biases.

    Blocks that halve the size do so in their first 1x1 convolution; its names differ from
    `resnet50`'s and it has 26,560 more parameters: weights of one do not fit the other.
    """
    if size < 32:
        raise ValueError(f"--image_size={size}: resnet50_keras needs at least 32")
    image = keras.Input((size, size, 3), name="image")
    pixels = Preprocess(name="preprocess")(image)
    body = keras.applications.ResNet50(
        include_top=False, weights=None, input_tensor=pixels
    )
    model = classified(
        image, body.output, num_classes, dropout=dropout, name="resnet50_keras"
    )
    # This is the last layer that --backbone_weights fills.
    model.backbone = body.layers[-1].name
    return model


def _conv(x, filters: int, *, strides: int = 1, relu: bool = True):
    """A 3x3 convolution, batch norm and optionally ReLU."""
    x = layers.Conv2D(
        filters,
        3,
        strides,
        "same",
        use_bias=False,
        kernel_initializer="he_normal",
    )(x)
    # Keras's 0.99 would follow too slowly for short runs, which read the statistics early.
    x = layers.BatchNormalization(momentum=0.9)(x)
    return layers.ReLU()(x) if relu else x


def _block(x, filters: int, strides: int):
    y = _conv(x, filters, strides=strides)
    y = _conv(y, filters, relu=False)
    return layers.ReLU()(layers.Add()([_shortcut(x, filters, strides), y]))


def _shortcut(x, filters: int, strides: int):
    if strides > 1:
        x = layers.MaxPooling2D(1, strides, "same")(x)
    missing = filters - x.shape[-1]
    return keras.ops.pad(x, [[0, 0], [0, 0], [0, 0], [0, missing]]) if missing else x


def _bottleneck(x, filters: int, strides: int, *, name: str):
    """1x1, 3x3 and 1x1 convolutions with a shortcut, which has a 1x1 where shapes change."""
    shortcut = x
    if strides > 1 or x.shape[-1] != 4 * filters:
        shortcut = _torch_conv(
            x, 4 * filters, 1, name=f"{name}_shortcut", strides=strides
        )
    y = layers.ReLU()(_torch_conv(x, filters, 1, name=f"{name}_1"))
    y = layers.ReLU()(_torch_conv(y, filters, 3, name=f"{name}_2", strides=strides))
    y = _torch_conv(y, 4 * filters, 1, name=f"{name}_3", gamma="zeros")
    return layers.ReLU()(layers.Add()([shortcut, y]))


def _torch_conv(x, filters: int, kernel: int, *, name: str, strides=1, gamma="ones"):
    """Convolution and batch norm with Torch's padding and constants (fb.resnet.torch)."""
    if kernel > 1:
        # "same" would pad less on the left with strides.
        x = layers.ZeroPadding2D(kernel // 2)(x)
    x = layers.Conv2D(
        filters,
        kernel,
        strides,
        use_bias=False,
        kernel_initializer=keras.initializers.VarianceScaling(
            2.0, "fan_out", "untruncated_normal"
        ),
        name=f"{name}_conv",
    )(x)
    return layers.BatchNormalization(
        momentum=0.9,
        epsilon=1e-5,
        gamma_initializer=gamma,
        name=f"{name}_bn",
    )(x)


def classified(
    image, x, num_classes: int, *, dropout: float, name: str, logits="glorot_uniform"
) -> keras.Model:
    """Global mean, dropout and logits (initialized by `logits`), these in float32 at least."""
    inputs = {"image": image}
    x = layers.GlobalAveragePooling2D()(x)
    if dropout:
        inputs["key"] = keras.Input((2,), dtype="int32", name="key")
        x = SampleDropout(dropout, name="dropout")([x, inputs["key"]])
    x = layers.Dense(
        num_classes, dtype=wide(), kernel_initializer=logits, name="logits"
    )(x)
    return keras.Model(inputs, x, name=name)
