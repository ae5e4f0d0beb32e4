"""Holds SyncBatchNormalization of hvdkit.train.layers.batch_norm to Keras's of the whole batch."""

import os
from unittest import mock

import numpy as np
import tensorflow as tf
from keras import layers

from hvdkit.ranks import exchange
from hvdkit.ranks.world import raw
from hvdkit.train.layers import batch_norm

SHARES = (5, 3, 2)  # rows of each rank, uneven


def batch(world, shape):
    """The whole batch of samples of a shape, and this rank's rows of it."""
    sizes = SHARES[: world.size]
    whole = np.random.default_rng(len(shape)).normal(2, 3, size=(sum(sizes), *shape))
    start = sum(sizes[: world.rank])
    return whole, slice(start, start + sizes[world.rank])


# Settings of the layer, shape of a sample, policy, what it may differ by, whether it is fused.
SYNCHRONIZED = [
    ({}, (4, 4, 3), "float64", 1e-12, False),
    ({}, (4, 4, 3), "float32", 1e-5, True),
    ({"scale": False}, (4, 4, 3), "float32", 1e-5, True),
    ({"center": False, "axis": 3}, (4, 4, 3), "float32", 1e-5, True),
    ({}, (4, 4, 3), "mixed_bfloat16", 2e-2, True),
    ({"scale": False, "center": False}, (1, 1, 3), "mixed_float16", 3e-3, True),
    ({}, (4, 4, 3), "mixed_float16", 3e-3, True),
    ({"axis": 1}, (3, 4, 4), "float32", 1e-5, False),
    ({"renorm": True}, (4, 4, 3), "float32", 1e-5, False),
    ({"trainable": False}, (4, 4, 3), "float32", 1e-5, False),
    ({}, (3,), "float32", 1e-5, False),
]


def check_a_synchronized_batch_norm_is_keras_s_of_the_global_batch(world):
    """By sums of Horovod's, and by those of our own operation."""
    for carrier in ("horovod", ""):
        with mock.patch.dict(os.environ, HVDKIT_EXCHANGE=carrier):
            exchange.start(world, 60)
        assert bool(exchange.in_use) == (carrier == "" and world.size > 1)
        like_keras_s(world)


def like_keras_s(world):
    """Values, gradients and moving statistics; the layer is called twice in a step."""
    for settings, shape, policy, near, can_be_fused in SYNCHRONIZED:
        whole, rows = batch(world, shape)
        weights = np.cos(7 * whole)
        plain = layers.BatchNormalization(dtype=policy, momentum=0.7, **settings)
        synchronized = batch_norm.SyncBatchNormalization(
            dtype=policy, momentum=0.7, **settings
        )
        for layer in (plain, synchronized):
            layer.build(whole.shape)
        expected = called_twice(plain, whole, weights)
        step = tf.function(called_twice, autograph=False)
        results = step(synchronized, whole[rows], weights[rows])
        graph = step.get_concrete_function(
            synchronized, whole[rows], weights[rows]
        ).graph
        kernels = [op.type for op in graph.get_operations()]
        fused = kernels.count("FusedBatchNormGradV3")
        assert fused == 2 * (can_be_fused and world.size > 1), (settings, policy)
        for name in ("y", "by x"):
            expected[name] = expected[name][rows]
        for name in results:
            if name in ("gamma", "beta") and plain.trainable:
                everyone = world.gather_objects(results[name].numpy(), name)
                results[name] = np.sum(everyone, axis=0)
            wanted = tf.cast(expected[name], tf.float64)
            scale = float(tf.reduce_max(tf.abs(wanted))) + 1e-3
            np.testing.assert_allclose(
                tf.cast(results[name], tf.float64),
                wanted,
                rtol=0,
                atol=near * scale,
                err_msg=f"{name} of {policy}, {settings}",
            )


def called_twice(layer, x, weights):
    """What a loss of two calls of the layer gives, by name."""
    x = tf.cast(x, layer.compute_dtype)
    with tf.GradientTape() as tape:
        tape.watch(x)
        first = layer(x, training=True)
        second = layer(tf.sin(x) + 0.5 * first, training=True)
        value = tf.reduce_sum(weights * tf.cast(first + 2 * tf.sin(second), tf.float64))
    trained = {v.name: raw(v) for v in layer.trainable_variables}
    by_x, by_trained = tape.gradient(value, [x, trained])
    statistics = {v.name: tf.identity(raw(v)) for v in layer.non_trainable_variables}
    return {"y": second, "by x": by_x} | by_trained | statistics


class Formula:
    """Batch norm as it is written: tf.nn.moments, which Keras uses, has wrong second gradients."""

    def __init__(self):
        self.gamma = tf.Variable(tf.ones(3))

    def __call__(self, x, training):
        mean = tf.reduce_mean(x, [0, 1, 2])
        variance = tf.reduce_mean(tf.square(x - mean), [0, 1, 2])
        return self.gamma * (x - mean) * tf.math.rsqrt(variance + 1e-3)


def check_a_synchronized_batch_norm_has_right_gradients_of_gradients(world):
    """Of a gradient penalty, and of a layer within tf.recompute_grad."""
    exchange.start(world, 60)
    whole, rows = batch(world, (4, 4, 3))
    whole = whole.astype(np.float32)

    def penalty(layer, x):
        """Of each sample's slope, which depends on all others of the batch."""
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = layer(x, training=True)
                value = tf.reduce_sum(tf.sin(2 * y) * tf.cos(x))
            slope = inner.gradient(value, x)
            penalty = tf.reduce_sum(slope**3)
        return outer.gradient(penalty, [x, raw(layer.gamma)])

    def recomputed(layer, x):
        @tf.recompute_grad
        def forward(x):
            return layer(x, training=True)

        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(tf.sin(2 * forward(x)) * tf.cos(x))
        return tape.gradient(value, [x, raw(layer.gamma)])

    for function in (penalty, recomputed):
        synchronized = batch_norm.SyncBatchNormalization(
            name=function.__name__, dtype="float32"
        )
        synchronized.build(whole.shape)
        by_x, by_gamma = tf.function(function)(Formula(), tf.constant(whole))
        results = tf.function(function)(synchronized, tf.constant(whole[rows]))
        everyone = world.gather_objects(results[1].numpy(), function.__name__)
        np.testing.assert_allclose(results[0], by_x[rows], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(np.sum(everyone, axis=0), by_gamma, rtol=1e-4)
