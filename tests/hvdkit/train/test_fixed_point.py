"""The grid of whole numbers: where it ends, at either end."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.train import fixed_point


def test_limits_are_where_the_grid_ends():
    """Sums stay below 2**62 units of the grid; the smallest gradient keeps 4 bits, 16 units."""
    assert fixed_point.LARGEST_GRADIENT * 2.0**fixed_point.GRADIENT_BITS == 2.0**62
    assert fixed_point.LARGEST_STATE * 2.0 ** fixed_point.STATE_BITS[0] == 2.0**62
    assert fixed_point.SMALLEST_GRADIENT * 2.0**fixed_point.GRADIENT_BITS == 16.0
    assert fixed_point.GRADIENT_BITS == 48 and fixed_point.STATE_BITS == (20, 70)


@pytest.mark.parametrize(
    ("largest", "fits", "kept"),
    [
        (0.0, True, True),
        (2.0**-44, True, True),  # 16 units of 2**-48
        (np.nextafter(2.0**-44, 0), True, False),
        (2.0**12, True, True),  # 2**62 units, of 4 addends
        (np.nextafter(2.0**12, math.inf), False, True),
        (math.nan, False, True),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_gradient_that_leaves_the_grid_is_told(largest, fits, kept, scale):
    """The loss scale stretches the grid with the gradient."""
    flat = tf.constant([0.0, -largest * scale], tf.float64)
    found = [bool(answer) for answer in fixed_point.judge(flat, 4, scale)]
    assert found == [math.isfinite(largest), fits, kept]
