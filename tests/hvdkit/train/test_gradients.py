"""What is applied, from means over the global batch: L2, then clipping, worked out by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdkit.train import gradients


def variables() -> list[keras.Variable]:
    """A kernel of 3 and 0, a gamma of 5."""
    return [
        keras.Variable(np.array([3.0, 0.0], np.float32), name="kernel"),
        keras.Variable(np.array([5.0], np.float32), name="gamma"),
    ]


def finished(l2: float, clip_norm: float) -> tuple[list[list[float]], float]:
    """Of gradients (0, 4) of the kernel and (0) of gamma."""
    grads = [tf.constant([0.0, 4.0]), tf.constant([0.0])]
    grads, norm = gradients.finish(grads, variables(), l2=l2, clip_norm=clip_norm)
    return [g.numpy().tolist() for g in grads], float(norm)


def test_l2_adds_the_kernel_times_its_weight_and_leaves_gamma_alone():
    assert finished(1.0, 0.0) == ([[3.0, 4.0], [0.0]], 5.0)


def test_what_is_clipped_and_logged_is_the_norm_with_l2():
    """Without L2 the norm is 4, and nothing would be clipped to 4.5; with it 5, scaled by 0.9."""
    clipped, norm = finished(1.0, 4.5)
    assert norm == 5.0
    np.testing.assert_allclose(clipped[0], [2.7, 3.6], rtol=1e-6)


@pytest.mark.parametrize("clip_norm", [0.0, 4.0, 100.0])
def test_what_is_small_enough_is_not_scaled(clip_norm):
    assert finished(0.0, clip_norm) == ([[0.0, 4.0], [0.0]], 4.0)


def test_sparse_gradients_name_a_row_twice_and_are_divided():
    rows = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([2, 0, 2]), [3, 1])
    dense, none = gradients.unscale([tf.convert_to_tensor(rows), None], tf.constant(0.5))
    assert none is None and dense.numpy().tolist() == [[1.0], [0.0], [2.5]]


def test_figures_of_a_layer_are_sum_norm_and_the_share_that_is_no_number():
    found = gradients.layer_figures([tf.constant([3.0, -4.0]), None, tf.constant([np.nan, 1.0])])
    np.testing.assert_array_equal(found[:2], [[-1.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    assert np.isnan(found[2, 0]) and np.isnan(found[2, 1]) and found[2, 2] == 0.5
