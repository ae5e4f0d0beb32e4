"""DeepLabV3+ on ResNet-50: image [B, H, W, 3] in [0, 255] -> logits [B, H, W, classes].

H and W are multiples of 16, and may differ between training and evaluation. Inputs are a dict:
"image", and with dropout "key" (int32 [B, 2], see hvdkit.train.dropout).
"""

import keras
from keras import layers

from hvdkit.models.upsampling import BilinearUpsampling
from hvdkit.train.layers.dropout import SampleDropout
from hvdkit.train.layers.preprocessing import Preprocess, wide

# Input pixels to one pixel of the encoder's output; sizes are multiples of it.
STRIDE = 16
_GRID = (1, 2, 4)  # multi-grid: factors of the rates of the last block's three units
_RATES = (6, 12, 18)  # rates of the pyramid's 3 x 3 convolutions
# As in keras.applications' ResNet-50, so that all batch norms of the network are alike. The papers'
# momentum of 0.9997 needs some 10,000 steps to forget its initial values.
_BATCH_NORM = {"epsilon": 1.001e-5, "momentum": 0.99}


def deeplabv3plus(size: int, num_classes: int, dropout: float) -> keras.Model:
    """Encoder and decoder of Chen et al. 2018 (arXiv:1802.02611, section 3.1), output stride 16.

    Multi-grid and pyramid are those of Chen et al. 2017 (arXiv:1706.05587, sections 3.2 and 3.3).
    Dropout is where the authors' code has it: after the pyramid. Sizes are even here and upsampling
    takes pixel centres at one half; the papers' sizes are odd (513) and their corners are aligned.
    """
    if size % STRIDE:
        raise ValueError(
            f"--image_size={size}: deeplabv3plus needs a multiple of {STRIDE}"
        )
    backbone = _atrous_resnet50()
    inputs = {"image": backbone.inputs[0]}
    # This layer makes the last features of stride 4.
    low_level = backbone.get_layer("conv2_block3_out").output

    x = _pyramid(backbone.output)
    if dropout:
        inputs["key"] = keras.Input((2,), dtype="int32", name="key")
        x = SampleDropout(dropout, name="dropout")([x, inputs["key"]])

    x = BilinearUpsampling(4)(x)
    x = layers.Concatenate()([x, _conv(low_level, 48, 1, name="decoder_low")])
    x = _conv(x, 256, 3, name="decoder_1")
    x = _conv(x, 256, 3, name="decoder_2")

    # The logits are float32 at least, whatever the precision.
    x = layers.Conv2D(num_classes, 1, dtype=wide(), name="logits")(x)
    x = BilinearUpsampling(4, dtype=wide())(x)
    model = keras.Model(inputs, x, name="deeplabv3plus")
    # This is the last layer that --backbone_weights fills.
    model.backbone = backbone.layers[-1].name
    return model


def _pyramid(x):
    """Atrous spatial pyramid pooling: 1 x 1, three rates, and the picture's mean."""
    branches = [_conv(x, 256, 1, name="aspp_1x1")]
    for rate in _RATES:
        branches.append(_conv(x, 256, 3, name=f"aspp_rate{rate}", rate=rate))
    pooled = layers.GlobalAveragePooling2D(keepdims=True, name="aspp_mean")(x)
    # Adding zeros [B, H, W, 1] spreads the mean [B, 1, 1, C] over all pixels: [B, H, W, C].
    spread = _conv(pooled, 256, 1, name="aspp_picture") + keras.ops.zeros_like(
        x[..., :1]
    )
    return _conv(layers.Concatenate()([*branches, spread]), 256, 1, name="aspp_project")


def _conv(x, filters: int, kernel: int, *, name: str, rate: int = 1):
    """A convolution without bias, batch norm and ReLU; `rate` is the convolution's dilation."""
    x = layers.Conv2D(
        filters,
        kernel,
        padding="same",
        dilation_rate=rate,
        use_bias=False,
        kernel_initializer="he_normal",
        name=f"{name}_conv",
    )(x)
    x = layers.BatchNormalization(**_BATCH_NORM, name=f"{name}_bn")(x)
    return layers.ReLU()(x)


def _atrous_resnet50() -> keras.Model:
    """keras.applications' ResNet-50, its last block with rates 2, 4 and 8 in place of its stride.

    Names and shapes of its layers are unchanged, so its published weights fit. A rate is the
    multi-grid's factor times 2, which replaces the stride.
    """
    rates = {
        f"conv5_block{unit}_2_conv": 2 * factor for unit, factor in enumerate(_GRID, 1)
    }

    def dilated(layer: layers.Layer) -> layers.Layer:
        settings = layer.get_config()
        if layer.name in ("conv5_block1_0_conv", "conv5_block1_1_conv"):
            settings["strides"] = (1, 1)
        elif layer.name in rates:
            rate = rates[layer.name]
            settings["dilation_rate"] = (rate, rate)
        return layer.__class__.from_config(settings)

    pixels = Preprocess(name="preprocess")(keras.Input((None, None, 3), name="image"))
    plain = keras.applications.ResNet50(
        include_top=False, weights=None, input_tensor=pixels
    )
    return keras.models.clone_model(plain, clone_function=dilated)
