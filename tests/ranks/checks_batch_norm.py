"""Holds hvdkit.train.layers.batch_norm on real ranks, against plain references.

That --bn_sync=full gives the gradients of one process: kinds_of_models.py.
"""

import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from refusals import refused
from small_models import Block, Called, Cell, Net, functional

from hvdkit.ranks import agreement, exchange
from hvdkit.ranks.world import raw
from hvdkit.train.layers import batch_norm

bn = layers.BatchNormalization
SHARES = (5, 3, 2)  # rows of each rank, uneven


def uneven(world, seed=0):
    """The whole batch, and this rank's rows of it."""
    sizes = SHARES[: world.size]
    whole = np.random.default_rng(seed).normal(2.0, 3.0, size=(sum(sizes), 4, 4, 3))
    start = sum(sizes[: world.rank])
    return whole.astype(np.float32), slice(start, start + sizes[world.rank])


def check_sync_batch_norm_takes_one_collective_forward_and_one_backward(world):
    """Also of Keras's operations, which it has with op determinism."""
    exchange.start(world, 60)
    layer = batch_norm.SyncBatchNormalization(name="b")
    layer.build((None, 4, 4, 3))

    @tf.function
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(tf.sin(layer(x, training=True)))
        return tape.gradient(value, [x, raw(layer.gamma), raw(layer.beta)])

    for rows in (2, 4):
        graph = run.get_concrete_function(tf.TensorSpec([rows, 4, 4, 3])).graph
        collectives = list(agreement.collectives(graph.as_graph_def(add_shapes=True)))
        assert len(collectives) == (2 if world.size > 1 else 0), collectives
        kernels = [op.type for op in graph.get_operations()]
        is_fused = "FusedBatchNormGradV3" in kernels
        assert is_fused == (world.size > 1 and rows == 2)
        tf.config.experimental.enable_op_determinism()  # of the second trace


def check_sync_batch_norm_keeps_float32_digits(world):
    """Mean 1000, deviation 0.1: E[x^2] - E[x]^2 in float32 would have no digit left."""
    near, rows = uneven(world)
    far = (1000 + 0.1 * (near - 2) / 3).astype(np.float32)
    for policy, whole in (
        ("float32", far),
        ("mixed_bfloat16", near),
        ("mixed_float16", near),
    ):
        layer = batch_norm.SyncBatchNormalization(
            name=policy, dtype=policy, momentum=0.0
        )
        y = layer(tf.cast(whole[rows], layer.compute_dtype), training=True)
        assert (
            y.dtype.name == layer.compute_dtype and layer.moving_mean.dtype == "float32"
        )
        cast = tf.cast(tf.cast(whole, layer.compute_dtype), tf.float64).numpy()
        np.testing.assert_allclose(layer.moving_mean, cast.mean((0, 1, 2)), rtol=1e-6)
        rtol = 1e-3 if policy == "float32" else 1e-6
        np.testing.assert_allclose(layer.moving_variance, cast.var((0, 1, 2)), rtol)


def check_a_batch_norm_fused_for_a_gpu_is_keras_s(world):
    """Values, gradients, moving statistics; also of one sample of one pixel."""
    pictures = (4, 5, 5, 3)
    cases = [
        # Settings of the layer, shape, policy, whether it can be fused.
        ({}, pictures, "float32", True),
        ({}, pictures, "mixed_bfloat16", True),
        ({"scale": False}, (1, 1, 1, 3), "float32", True),
        ({"center": False}, pictures, "float32", True),
        ({}, (2, 3), "float32", False),
        ({"axis": 1}, (4, 3, 5, 5), "float32", False),
        ({"renorm": True}, pictures, "float32", False),
        ({}, pictures, "float64", False),
        ({"trainable": False}, pictures, "float32", False),
    ]
    for settings, shape, policy, can_be_fused in cases:
        results = []
        for fuse in (False, True):
            layer = bn(dtype=policy, name="b", momentum=0.7, **settings)
            model = keras.Sequential([keras.Input(shape[1:]), layer])
            if fuse:
                batch_norm.fuse(model)
            x = tf.cast(
                np.random.default_rng(1).normal(3, 2, shape), layer.compute_dtype
            )
            called = tf.function(model).get_concrete_function(x, training=True)
            is_fused = any(
                op.type == "FusedBatchNormV3" for op in called.graph.get_operations()
            )
            assert is_fused == (fuse and can_be_fused), (settings, shape, policy)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = model(x, training=True)
                value = tf.reduce_sum(tf.sin(tf.cast(y, tf.float64)))
            grads = tape.gradient(
                value, [x, *(raw(v) for v in model.trainable_variables)]
            )
            results.append([y, *grads, *model.get_weights()])
        near = 2e-2 if "bfloat16" in policy else 1e-4
        for plain, fused in zip(*results):
            plain = tf.cast(plain, tf.float64)
            fused = tf.cast(fused, tf.float64)
            np.testing.assert_allclose(plain, fused, near, near)
    of_bytes = keras.Sequential([keras.Input((5, 5, 3), dtype="uint8"), bn()])
    batch_norm.fuse(of_bytes)  # cuDNN has no kernel for them
    assert not of_bytes(tf.ones([2, 5, 5, 3], tf.uint8), training=True).numpy().any()


def moving(world, mode, *, every_step=False, steps=6, weight=None):
    """Moving mean and variance after `steps` local batches, synced each step or at the end."""
    layer = keras.layers.BatchNormalization(momentum=0.7)
    model = keras.Sequential([keras.Input((4, 4, 3)), layer])
    sync = batch_norm.make_sync(model, mode, weight=weight)
    for step in range(steps):
        whole, rows = uneven(world, step)
        model(whole[rows], training=True)
        if every_step or step == steps - 1:
            sync()
    return layer.moving_mean.numpy(), layer.moving_variance.numpy()


def check_mean_sync_when_read_gives_what_every_step_gives(world):
    late = moving(world, "mean")
    always = moving(world, "mean", every_step=True)
    never = moving(world, "full")
    for place in (0, 1):
        np.testing.assert_allclose(late[place], always[place], rtol=1e-6)
        everyone = world.gather_objects(never[place], f"never{place}")
        np.testing.assert_allclose(late[place], np.mean(everyone, axis=0), rtol=1e-6)
        everywhere = world.gather_objects(late[place], f"late{place}")
        assert all(np.array_equal(late[place], other) for other in everywhere)
        assert world.size == 1 or not np.array_equal(everyone[0], everyone[1])


def check_moments_sync_is_the_law_of_total_variance(world):
    """Also of means around 1000 with variances of 0.01: float32's squares would leave no digit."""
    whole, rows = uneven(world)
    weight = (rows.stop - rows.start) / len(whole)
    mean, variance = moving(world, "full", steps=4)  # each rank's own
    means = np.array(world.gather_objects(mean, "m"), np.float64)
    variances = np.array(world.gather_objects(variance, "v"), np.float64)
    weights = np.array(world.gather_objects(weight, "w"))[:, None]
    expected = (weights * means).sum(0)
    total = (weights * (variances + means**2)).sum(0) - expected**2
    mean, variance = moving(world, "moments", steps=4, weight=weight)
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    np.testing.assert_allclose(variance, total, rtol=1e-6)
    model = functional(bn(), shape=(2,))
    layer = model.layers[1]
    layer.moving_mean.assign([1000.0 + 0.125 * world.rank] * 2)
    layer.moving_variance.assign([0.01] * 2)
    batch_norm.make_sync(model, "moments", weight=1.0 / world.size)()
    means = 1000 + 0.125 * np.arange(world.size)
    np.testing.assert_allclose(layer.moving_variance, 0.01 + means.var(), rtol=1e-5)


def check_what_cannot_be_synchronized_is_refused_by_name(world):
    refused(
        lambda: batch_norm.synchronize(Net(Own(name="odd"))),
        "odd (Own)",
        "derive it from",
    )
    batch_norm.synchronize(Net(Own(name="odd", trainable=False)))
    if world.size == 1:
        return
    own = Net(layers.BatchNormalization(name="own", synchronized=True))
    for mode in ("mean", "moments", "none"):
        refused(
            lambda m=mode: batch_norm.make_sync(own, m, weight=1.0),
            "own",
            "--bn_sync=full",
        )

    def branch(model, x, training):
        return tf.cond(
            x[0, 0, 0] > 0, lambda: model.bn(x, training=training), lambda: x
        )

    several = {
        "cell_bn": (Net(layers.RNN(Cell())), [None, 6, 3]),
        "timed": (Net(layers.TimeDistributed(bn(name="timed"))), [None, None, 3]),
        "branched": (Called(branch, bn=bn(name="branched")), [None, 6, 3]),
    }
    for name, (model, shape) in several.items():
        model(tf.zeros([2, 6, 3]))
        step = tf.function(batch_norm.synchronize(model), autograph=False)
        spec = tf.TensorSpec(shape)
        refused(
            lambda s=step, x=spec: s.get_concrete_function(x, training=True),
            name,
            "loop",
        )


def check_a_synchronized_model_is_what_it_was_and_saves_loads_and_clones(world):
    model = keras.applications.MobileNet(
        weights=None, input_shape=(32, 32, 3), classes=4, alpha=0.25
    )
    x = np.random.default_rng(5).normal(size=(2, 32, 32, 3)).astype(np.float32)
    before = model(x)
    names = [variable.path for variable in model.variables]
    batch_norm.synchronize(batch_norm.synchronize(model))
    kinds = [type(layer) for layer in model.layers]
    assert layers.BatchNormalization not in kinds
    assert kinds.count(batch_norm.SyncBatchNormalization) == 27
    np.testing.assert_array_equal(model(x), before)
    assert [variable.path for variable in model.variables] == names
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/m.keras")
        loaded = keras.models.load_model(f"{folder}/m.keras")
    for other in (clone, loaded):
        assert [type(layer) for layer in other.layers] == kinds
        np.testing.assert_allclose(other(x), before, rtol=1e-5, atol=1e-6)
        assert other.layers[2].get_config() == model.layers[2].get_config()


class Own(layers.BatchNormalization):
    """Derived, so --bn_sync=full refuses it; the other modes know it for a batch norm."""


class Decoy(layers.Layer):
    """Not a batch norm, though a variable of it is named like one's."""

    def build(self, shape):
        self.kept = self.add_weight(name="moving_mean", shape=(1,), trainable=False)

    def call(self, x):
        return x


def check_moving_statistics_are_found_by_layer_at_any_depth(world):
    inside = Net(functional(Own(), shape=(5, 4)))
    model = Net(Block(), inside, Decoy(), layers.TimeDistributed(bn()))
    model(tf.zeros([2, 5, 3]))
    norms = [
        layer for layer in model._flatten_layers() if hasattr(layer, "moving_mean")
    ]
    decoy = model.parts[2]
    decoy.kept.assign(tf.fill(decoy.kept.shape, float(world.rank)))
    means, variances = batch_norm.moving_statistics(model)
    assert len(means) == len(variances) == len(norms) == 3
    for mode, expected in (
        ("full", world.rank),
        ("mean", (world.size - 1) / 2),
        ("none", 0),
    ):
        for variable in [*means, *variances]:
            value = np.nan if mode == "none" and world.rank else float(world.rank)
            variable.assign(tf.fill(variable.shape, value))
        batch_norm.make_sync(model, mode, weight=1.0 / world.size)()
        for variable in [*means, *variances]:
            np.testing.assert_allclose(variable, expected, rtol=1e-6)
    np.testing.assert_array_equal(decoy.kept, [world.rank])
