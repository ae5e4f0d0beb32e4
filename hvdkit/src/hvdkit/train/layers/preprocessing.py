"""First layers of models: from pictures' bytes, 0 to 255, to the numbers that are computed with."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdkit.train.layers import saved_layers

# Of keras.applications.imagenet_utils.preprocess_input; a checkpoint holds a mode's place here.
MODES = ("tf", "caffe", "torch")
MEANING = {
    "tf": "RGB in [-1, 1]",
    "caffe": "BGR in [0, 255] less ImageNet's mean",
    "torch": "RGB in [0, 1] less ImageNet's mean, over its deviation",
}
_ORDERS = np.array([[0, 1, 2], [2, 1, 0], [0, 1, 2]])
_MEAN, _DEVIATION = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])
_SCALES = np.array([[1.0 / 127.5] * 3, [1.0] * 3, 1.0 / (255.0 * _DEVIATION)])
_OFFSETS = np.array([[-1.0] * 3, [-103.939, -116.779, -123.68], -_MEAN / _DEVIATION])


def wide() -> str:
    """Float64 where that is Keras's default, else float32, whatever the precision of a run."""
    return "float64" if keras.config.floatx() == "float64" else "float32"


def scaled(image):
    """A model's pictures, 0 to 255, as [-1, 1]; computed on the device."""
    # In float16 a pixel of 150 would be rounded by up to 0.06.
    return keras.layers.Rescaling(1.0 / 127.5, -1.0, dtype=wide(), name="scaled")(image)


@saved_layers.register
class Preprocess(keras.layers.Layer):
    """RGB in [0, 255], [..., 3] -> what the layers behind it were trained on, float32 at least.

    The mode is a variable, saved with the weights. At first it is tf, which is what `scaled` does.
    """

    def __init__(self, **kwargs) -> None:
        super().__init__(**{"dtype": wide()} | kwargs)

    def build(self, input_shape: tuple) -> None:
        self.mode = self.add_weight((), "zeros", "int64", trainable=False, name="mode")

    def call(self, image):
        def of_mode(table: np.ndarray, dtype: str):
            return keras.ops.take(
                keras.ops.convert_to_tensor(table, dtype), self.mode, axis=0
            )

        dtype = self.compute_dtype
        image = keras.ops.cast(image, dtype)  # Keras casts no whole numbers
        image = keras.ops.take(image, of_mode(_ORDERS, "int64"), axis=-1)
        return image * of_mode(_SCALES, dtype) + of_mode(_OFFSETS, dtype)


def find(model: keras.Model) -> Preprocess | None:
    """The model's first such layer, at any depth."""
    return next((x for x in model._flatten_layers() if isinstance(x, Preprocess)), None)


def leaves_unscaled(model: keras.Model, inputs: Any) -> bool:
    """Whether no known layer scales pictures of 0 to 255 (nested uint8 [batch, h, w, 3])."""
    scaling = (keras.layers.Rescaling, keras.layers.Normalization, Preprocess)
    if any(isinstance(layer, scaling) for layer in model._flatten_layers()):
        return False
    return any(_is_pictures(part) for part in tf.nest.flatten(inputs))


def _is_pictures(x: tf.Tensor) -> bool:
    return x.dtype == tf.uint8 and x.shape.rank == 4 and x.shape[-1] == 3
