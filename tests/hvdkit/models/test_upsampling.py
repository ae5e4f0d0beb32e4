"""Bilinear upsampling equals Keras's, also where only the graph knows the sizes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdkit.models.upsampling import BilinearUpsampling
from hvdkit.train.task import checks as task_checks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_keras_own_at_known_sizes(dtype: str):
    pixels = np.random.default_rng(0).random((2, 5, 7, 3), np.float32)
    ours = BilinearUpsampling(3, dtype=dtype)(pixels)
    theirs = keras.layers.UpSampling2D(3, interpolation="bilinear", dtype=dtype)(pixels)
    assert ours.dtype == theirs.dtype and ours.shape == (2, 15, 21, 3)
    np.testing.assert_array_equal(
        tf.cast(ours, tf.float32), tf.cast(theirs, tf.float32)
    )


def test_a_graph_may_learn_the_size_when_it_runs(tmp_path):
    picture = keras.Input((None, None, 3))
    model = keras.Model(picture, BilinearUpsampling(2)(picture))
    assert model.output_shape == (None, None, None, 3)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    traced = tf.function(again, input_signature=[tf.TensorSpec([None, None, None, 3])])
    pixels = np.random.default_rng(0).random((1, 4, 6, 3), np.float32)
    np.testing.assert_array_equal(traced(pixels), model(pixels))


@pytest.mark.parametrize("size", [None, 8])
def test_keras_own_is_refused_where_it_would_fail(size: int | None):
    picture = keras.Input((size, size, 3))
    x = keras.layers.UpSampling2D(2, interpolation="bilinear", name="larger")(picture)
    model = keras.Model(picture, keras.layers.Conv2D(1, 1)(x))
    example = {"inputs": tf.TensorSpec([1, 8, 8, 3]), "targets": tf.TensorSpec([1])}
    if size:
        task_checks.build_variables(model, example)
        return
    with pytest.raises(
        ValueError, match=r"larger: Keras's UpSampling2D .*BilinearUpsampling"
    ):
        task_checks.build_variables(model, example)
