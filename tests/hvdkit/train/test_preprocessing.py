"""What a model's first layer makes of pictures."""

import keras
import numpy as np
import tensorflow as tf

from hvdkit.train import preprocessing


def test_scaled_pictures_are_from_minus_1_to_1():
    image = keras.Input((None, None, 3))
    model = keras.Model(image, preprocessing.scaled(image))
    found = model(tf.constant([[[[0.0, 127.5, 255.0]]]]))
    np.testing.assert_allclose(found[0, 0, 0], [-1.0, 0.0, 1.0], atol=1e-7)
