"""A layer that enlarges pictures whose sizes only the graph knows."""

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="hvdkit")
class BilinearUpsampling(keras.layers.Layer):
    """[B, H, W, C] -> [B, factor * H, factor * W, C], bilinear, pixel centres at one half.

    It stands for keras.layers.UpSampling2D(factor, interpolation="bilinear"), which since Keras
    3.14 fails in a graph where H or W is not known before it runs.
    """

    def __init__(self, factor: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        size = self.factor * tf.shape(x)[1:3]
        return tf.cast(tf.image.resize(x, size, "bilinear"), x.dtype)

    def compute_output_shape(self, input_shape):
        batch, height, width, channels = input_shape
        taller = None if height is None else self.factor * height
        wider = None if width is None else self.factor * width
        return batch, taller, wider, channels

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}
