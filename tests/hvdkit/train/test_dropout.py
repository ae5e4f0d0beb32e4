"""SampleDropout (Srivastava et al. 2014): what is lost, what the rest becomes, and for whom."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvdkit.train.dropout import SampleDropout

FEATURES = tf.ones([3, 2000])
KEYS = tf.constant([[1, 2], [1, 3], [1, 2]])


def dropped(name: str = "dropout", training: bool = True, rate: float = 0.2) -> np.ndarray:
    return SampleDropout(rate, name=name)([FEATURES, KEYS], training=training).numpy()


def test_what_is_kept_is_scaled_so_that_the_mean_stays():
    found = dropped()
    np.testing.assert_allclose(np.unique(found), [0.0, 1.25])  # 1 / 0.8
    # Of 2000 a fifth, within 5 standard deviations.
    np.testing.assert_allclose(np.mean(found == 0, axis=1), 0.2, atol=5 * (0.16 / 2000) ** 0.5)


def test_nothing_is_dropped_in_evaluation():
    np.testing.assert_array_equal(dropped(training=False), FEATURES)
    np.testing.assert_array_equal(dropped(rate=0.0), FEATURES)


def test_layers_and_samples_draw_differently():
    found = dropped()
    np.testing.assert_array_equal(found[0], found[2])  # of one key
    assert np.any(found[0] != found[1]) and np.any(found != dropped(name="other"))
    np.testing.assert_array_equal(found, dropped())
