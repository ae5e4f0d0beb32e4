"""A layer that turns the project's pictures into those that published weights were trained on."""

from __future__ import annotations

import keras
import numpy as np

# The modes of keras.applications.imagenet_utils.preprocess_input, which its ImageNet means and
# deviations are taken from; a checkpoint holds a mode's place in this row.
MODES = ("tf", "caffe", "torch")
MEANING = {
    "tf": "RGB in [-1, 1]",
    "caffe": "BGR in [0, 255] less ImageNet's mean",
    "torch": "RGB in [0, 1] less ImageNet's mean, over its deviation",
}
_ORDERS = np.array([[0, 1, 2], [2, 1, 0], [0, 1, 2]])
_SCALES = np.array([[1.0] * 3, [127.5] * 3, 0.5 / np.array([0.229, 0.224, 0.225])])
_OFFSETS = np.array(
    [
        [0.0] * 3,
        127.5 - np.array([103.939, 116.779, 123.68]),
        (0.5 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225]),
    ]
)


@keras.saving.register_keras_serializable(package="engine")
class Preprocess(keras.layers.Layer):
    """RGB in [-1, 1], [..., 3] -> what the layers behind it were trained on, float32 at least.

    The mode is a variable, so that it goes wherever the weights go: into checkpoints, into
    .keras files and to the other ranks. As made it is tf, which changes nothing.
    """

    def __init__(self, **kwargs) -> None:
        # In float16 a pixel of 150 would be rounded by up to 0.06.
        wide = "float64" if keras.config.floatx() == "float64" else "float32"
        super().__init__(**{"dtype": wide} | kwargs)

    def build(self, input_shape: tuple) -> None:
        self.mode = self.add_weight(
            name="mode", shape=(), dtype="int64", initializer="zeros", trainable=False
        )

    def call(self, image):
        def chosen(table: np.ndarray, dtype: str):
            return keras.ops.take(keras.ops.convert_to_tensor(table, dtype), self.mode, axis=0)

        image = keras.ops.take(image, chosen(_ORDERS, "int64"), axis=-1)
        scale, offset = (chosen(table, self.compute_dtype) for table in (_SCALES, _OFFSETS))
        return image * scale + offset


def find(model: keras.Model) -> Preprocess | None:
    """The model's first such layer, at any depth."""
    return next((x for x in model._flatten_layers() if isinstance(x, Preprocess)), None)
