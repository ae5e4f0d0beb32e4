"""What is applied, from means over the global batch: L2, clipping, loss scale."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdkit.train.step import gradients
from hvdkit.train.step.gradients import LossScale


@pytest.mark.parametrize(
    ("l2", "clip_norm", "kernel", "norm"),
    [
        # Without L2 the norm is 4, and nothing would be clipped to 4.5; with it 5, scaled by 0.9.
        (1.0, 4.5, [2.7, 3.6], 5.0),
        (0.0, 4.0, [0.0, 4.0], 4.0),
    ],
)
def test_l2_is_added_and_then_clipped_and_leaves_gamma_alone(
    l2, clip_norm, kernel, norm
):
    variables = [
        keras.Variable(np.array([3.0, 0.0], np.float32), name="kernel"),
        keras.Variable(np.array([5.0], np.float32), name="gamma"),
    ]
    grads = [tf.constant([0.0, 4.0]), tf.constant([0.0])]
    grads, total_norm = gradients.finish(grads, variables, l2=l2, clip_norm=clip_norm)
    assert float(total_norm) == norm and grads[1].numpy().tolist() == [0.0]
    np.testing.assert_allclose(grads[0], kernel, rtol=1e-6)


def test_figures_of_a_layer_are_sum_norm_and_the_share_that_is_no_number():
    figures = gradients.layer_figures(
        [tf.constant([3.0, -4.0]), None, tf.constant([np.nan, 1.0])]
    )
    np.testing.assert_array_equal(figures[:2], [[-1.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    assert np.isnan(figures[2, 0]) and np.isnan(figures[2, 1]) and figures[2, 2] == 0.5


def scale_after(
    scale: LossScale, finite: bool, counted: bool = True
) -> tuple[float, int, int]:
    scale.update(tf.constant(finite), tf.constant(counted))
    return float(scale.value), int(scale.sound_steps), int(scale.skipped_in_a_row)


def test_loss_scale_halves_and_counts_what_is_skipped_in_a_row():
    scale = LossScale("float16")
    assert scale_after(scale, True) == (2.0**15, 1, 0)
    assert scale_after(scale, False) == (2.0**14, 0, 1)
    assert scale_after(scale, False) == (2.0**13, 0, 2)
    for finite in (True, False):  # the data could not be read, so there was no step
        assert scale_after(scale, finite, counted=False) == (2.0**13, 0, 2)
    assert scale_after(scale, True) == (2.0**13, 1, 0)


def test_loss_scale_doubles_after_a_thousand_sound_steps_and_stays_between_its_ends():
    scale = LossScale("float16")
    for power in (16, 17):  # the count starts anew each time
        scale.sound_steps.assign(998)
        assert scale_after(scale, True) == (2.0 ** (power - 1), 999, 0)
        assert scale_after(scale, True) == (2.0**power, 0, 0)
    scale.value.assign(2.0**24)
    scale.sound_steps.assign(999)
    assert scale_after(scale, True) == (2.0**24, 0, 0)
    scale.value.assign(2.0**-10)
    assert scale_after(scale, False) == (2.0**-10, 0, 1)


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_only_float16_is_scaled(precision):
    scale = LossScale(precision)
    # A resume with float16 begins with it.
    assert scale_after(scale, False) == (2.0**15, 0, 1)
    assert scale_after(scale, True) == (2.0**15, 0, 0) and scale.read() == 1.0
