"""Batch norm on real ranks against plain references; run by test_numbers.py."""

from __future__ import annotations

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from shared_checks import gathered, rng

from hvdkit.ranks import agreement
from hvdkit.ranks.world import raw
from hvdkit.train import batch_norm

SHARES = (5, 3, 2)  # rows of each rank, uneven


def uneven(world, seed=0, channels=3):
    """The whole batch [10, 4, 4, channels], and this rank's rows of it."""
    sizes = SHARES[: world.size] if world.size <= 3 else [1] * world.size
    whole = rng(seed).normal(2.0, 3.0, size=(sum(sizes), 4, 4, channels)).astype(np.float32)
    start = sum(sizes[: world.rank])
    return whole, slice(start, start + sizes[world.rank])


def forward_backward(layer, x, upstream):
    """Outputs, and gradients of sum(outputs * upstream) with respect to x, gamma and beta."""

    @tf.function
    def run(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            value = tf.reduce_sum(tf.cast(y, tf.float32) * upstream)
        return y, tape.gradient(value, [x, raw(layer.gamma), raw(layer.beta)])

    return run(tf.constant(x), tf.constant(upstream)), run


def check_sync_batch_norm_equals_one_process_with_the_whole_batch(world):
    whole, rows = uneven(world)
    upstream = rng(9).normal(size=whole.shape).astype(np.float32)
    layers = [
        keras.layers.BatchNormalization(name="a"),
        batch_norm.SyncBatchNormalization(name="b"),
    ]
    for layer in layers:
        layer.build((None, 4, 4, 3))
        layer.gamma.assign([0.5, 1.0, 2.0])
    (y, (dx, dgamma, dbeta)), _ = forward_backward(layers[0], whole, upstream)
    (sy, (sdx, sdgamma, sdbeta)), run = forward_backward(layers[1], whole[rows], upstream[rows])
    np.testing.assert_allclose(sy, y[rows], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sdx, dx[rows], rtol=1e-5, atol=1e-6)
    summed = [
        hvd.allreduce(g, op=hvd.Sum, name=f"check.{i}") for i, g in enumerate((sdgamma, sdbeta))
    ]
    np.testing.assert_allclose(summed[0], dgamma, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(summed[1], dbeta, rtol=1e-5, atol=1e-5)
    for name in ("moving_mean", "moving_variance"):
        np.testing.assert_allclose(getattr(layers[1], name), getattr(layers[0], name), rtol=1e-6)
    # One collective forward, one backward.
    graph = run.get_concrete_function(tf.constant(whole[rows]), tf.constant(upstream[rows])).graph
    collectives = list(agreement._collectives(graph.as_graph_def(add_shapes=True)))
    assert len(collectives) == (2 if world.size > 1 else 0), collectives


def check_sync_batch_norm_far_from_zero_does_not_cancel(world):
    """Mean 1000, deviation 0.1: E[x^2] - E[x]^2 in float32 would have no digit left."""
    whole, rows = uneven(world)
    whole = (1000 + 0.1 * (whole - 2) / 3).astype(np.float32)
    layer = batch_norm.SyncBatchNormalization(name="far", momentum=0.0, epsilon=1e-6)
    layer(tf.constant(whole[rows]), training=True)
    variance = np.var(whole.astype(np.float64), axis=(0, 1, 2))
    np.testing.assert_allclose(layer.moving_variance, variance, rtol=1e-3)


def check_sync_batch_norm_in_mixed_precision_keeps_float32_statistics(world):
    whole, rows = uneven(world)
    for policy in ("mixed_bfloat16", "mixed_float16"):
        layer = batch_norm.SyncBatchNormalization(name=policy, dtype=policy, momentum=0.0)
        y = layer(tf.cast(whole[rows], layer.compute_dtype), training=True)
        assert y.dtype.name == layer.compute_dtype and layer.moving_mean.dtype == "float32"
        cast = tf.cast(tf.cast(whole, layer.compute_dtype), tf.float64).numpy()
        np.testing.assert_allclose(layer.moving_mean, cast.mean((0, 1, 2)), rtol=1e-6)
        np.testing.assert_allclose(layer.moving_variance, cast.var((0, 1, 2)), rtol=1e-6)


def check_sync_batch_norm_leaves_masked_positions_out(world):
    whole, rows = uneven(world)
    mask = rng(4).random(whole.shape[:3]) < 0.6
    layer = batch_norm.SyncBatchNormalization(name="masked", momentum=0.0)
    layer(tf.constant(whole[rows]), training=True, mask=tf.constant(mask[rows]))
    np.testing.assert_allclose(layer.moving_mean, whole[mask].mean(0), rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance, whole[mask].var(0), rtol=1e-5)


def moving(world, mode, every_step, steps=6, weight=None):
    """Moving mean and variance after `steps` local batches, synced each step or at the end."""
    layer = keras.layers.BatchNormalization(momentum=0.7)
    model = keras.Sequential([keras.Input((4, 4, 3)), layer])
    sync = batch_norm.make_sync(model, mode, weight=weight)
    for step in range(steps):
        whole, rows = uneven(world, seed=step)
        model(whole[rows], training=True)
        if every_step:
            sync()
    if not every_step:
        sync()
    return layer.moving_mean.numpy(), layer.moving_variance.numpy()


def check_mean_sync_when_read_gives_what_every_step_gives(world):
    late, always, never = (moving(world, m, e) for m, e in (("mean", 0), ("mean", 1), ("none", 0)))
    for place in (0, 1):
        np.testing.assert_allclose(late[place], always[place], rtol=1e-6)
        everyone = gathered(world, never[place], f"never{place}")
        np.testing.assert_allclose(late[place], np.mean(everyone, axis=0), rtol=1e-6)
        assert all(
            np.array_equal(late[place], x) for x in gathered(world, late[place], f"l{place}")
        )
        assert world.size == 1 or not np.array_equal(everyone[0], everyone[1])


def check_moments_sync_is_the_law_of_total_variance(world):
    whole, rows = uneven(world)
    weight = (rows.stop - rows.start) / len(whole)
    mean, variance = moving(world, "none", False, steps=4)
    means = np.array(gathered(world, mean, "m"), np.float64)
    variances = np.array(gathered(world, variance, "v"), np.float64)
    weights = np.array(gathered(world, weight, "w"))[:, None]
    expected = (weights * means).sum(0)
    total = (weights * (variances + means**2)).sum(0) - expected**2
    mean, variance = moving(world, "moments", False, steps=4, weight=weight)
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    np.testing.assert_allclose(variance, total, rtol=1e-6)
