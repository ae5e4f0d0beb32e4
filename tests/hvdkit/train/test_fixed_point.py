"""Fixed point: exact sums in any order, where the grid ends, and what does not fit."""

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.train.virtual import fixed_point


def fixed_sum(parts, order):
    """As a step adds them up and takes them apart again."""
    total = None
    for i in order:
        total = fixed_point.add_gradients(
            total, tf.constant(parts[i]), addends=len(parts), scale=tf.constant(1.0)
        )
    [gradient] = fixed_point.unpack_gradients(
        total, tf.constant(1.0, tf.float64), shapes=[total.shape], dtype=tf.float64
    )
    return gradient.numpy()


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1.0, 100.0])
def test_sums_are_those_of_float64_in_any_order(size):
    parts = (
        np.random.default_rng(1).normal(scale=size, size=(12, 500)).astype(np.float32)
    )
    total = fixed_sum(parts, range(12))
    # Each addend is rounded to the grid, by half a unit at most.
    np.testing.assert_allclose(
        total, parts.astype(np.float64).sum(0), rtol=0, atol=6 * 2.0**-48
    )
    np.testing.assert_array_equal(total, fixed_sum(parts, reversed(range(12))))


def both(values, addends, scale=1.0):
    """By TensorFlow's own operations and by XLA: they must agree to the bit."""
    values = tf.constant(values)
    scale = tf.constant(scale)
    plain = fixed_point.to_fixed(values, 48, addends, scale=scale).numpy()
    np.testing.assert_array_equal(
        fixed_point.add_gradients(None, values, addends=addends, scale=scale).numpy(),
        plain,
    )
    return plain


@pytest.mark.parametrize("addends", [1, 4, 1000])
@pytest.mark.parametrize("scale", [1.0, 2.0**15])
def test_what_cannot_be_added_is_told_and_nothing_wraps(addends, scale):
    """The loss scale stretches the grid with the gradient."""
    largest = 2.0**14 / addends
    fine = np.array([largest, -largest]) * scale
    assert all(fixed_point.judge(tf.constant(fine), addends, scale=scale))
    assert (abs(both(fine, addends, scale).astype(object)) * addends < 2**63).all()
    for bad in (np.nextafter(largest, np.inf), -1e300, np.inf, -np.inf, np.nan):
        values = np.array([1.0, bad, 1.0, 0.5]) * scale
        for turned in (values, values[::-1]):  # its position must not matter
            judged = fixed_point.judge(tf.constant(turned), addends, scale=scale)
            assert [bool(x) for x in judged] == [bool(np.isfinite(bad)), False, True]
        assert both(values, addends, scale).tolist() == [2**48, 0, 2**48, 2**47]
    # 16 units are 4 bits; nothing at all is no loss of them.
    for least, kept in (
        (2.0**-44, True),
        (np.nextafter(2.0**-44, 0), False),
        (0.0, True),
    ):
        judged = fixed_point.judge(
            tf.constant([0.0, -least * scale], tf.float64), 4, scale=scale
        )
        assert [bool(x) for x in judged] == [True, True, kept]


def test_the_loss_scale_is_taken_out_without_rounding():
    g = np.float32([1 / 3, -1e-6])
    for scale in (2.0**-10, 2.0**24):
        np.testing.assert_array_equal(both(g * np.float32(scale), 4, scale), both(g, 4))


def test_xla_rounds_as_numpy_does():
    """To the nearest, halves to even."""
    halves = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.49999999999999994, 2.0**51 + 0.5])
    assert (
        both(halves * 2.0**-48, 4).tolist() == np.rint(halves).astype(np.int64).tolist()
    )


def test_tensors_of_any_kind_are_packed_without_rounding():
    parts = [
        tf.constant([[1 / 3, 2.0]], t) for t in (tf.bfloat16, tf.float16, tf.float32)
    ]
    flat = fixed_point.pack(parts)
    assert flat.dtype == tf.float32 and flat.shape == [6]
    wide = [np.ravel(tf.cast(part, tf.float32)) for part in parts]
    np.testing.assert_array_equal(flat, np.concatenate(wide))
    assert (
        fixed_point.pack([*parts, tf.constant(1 / 3, tf.float64)]).numpy()[-1] == 1 / 3
    )


def test_state_of_any_size_is_averaged_exactly():
    values = np.float32([1e-9, 0.3, 1.0, 65025.3, 3e9, -7e-4]).astype(np.float64)
    whole = fixed_point.state_to_fixed(tf.constant(values), 64)
    mean = fixed_point.state_from_fixed(tf.add_n([whole] * 64)) / 64
    np.testing.assert_array_equal(np.float32(mean), np.float32(values))
    limit = 2.0**42 / 64
    for value, fits in (
        (limit, True),
        (-limit, True),
        (limit * 1.01, False),
        (np.nan, False),
    ):
        state = tf.constant([value], tf.float64)
        judged = fixed_point.judge(state, 64, most=fixed_point.LARGEST_STATE)
        assert bool(judged[1]) == fits
