"""Holds hvdkit.train.step.reduction: gradients reduced on real ranks, against plain references."""

import dataclasses
from unittest import mock

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from small_models import Called

from hvdkit.ranks import agreement
from hvdkit.ranks.world import raw
from hvdkit.settings import Settings
from hvdkit.train.step import gradients, reduction

PLAIN = Settings(global_batch_size=12, num_steps=100, base_lr=0.1, momentum=0.0)


def summing(config, loss, variables):
    """A function that returns what a run's step gets with these settings: all ranks' gradients."""

    @tf.function
    def step():
        raws = [raw(v) for v in variables]
        with tf.GradientTape() as tape:
            value = loss()
        if reduction.needs_own_step(config, variables):
            sums = reduction.rank_sums(tape.gradient(value, raws), config, variables)
        else:
            tape = hvd.DistributedGradientTape(
                tape, op=hvd.Sum, **reduction.arguments(config, variables)
            )
            sums = tape.gradient(value, raws, use_generic_names=True)
        return gradients.unscale(sums, tf.constant(1.0))

    return step


def towers(world, loss, variables):
    """The gradients of each rank's loss."""
    gradients_of_ranks = []
    for rank in range(world.size):
        with tf.GradientTape() as tape:
            value = loss(rank)
        gradients_of_ranks.append(tape.gradient(value, [raw(v) for v in variables]))
    return gradients_of_ranks


def equal_shares(world):
    """A model, and this rank's mean loss over an equal share."""
    keras.utils.set_random_seed(7)
    parts = [keras.Input((5,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)]
    model = keras.Sequential(parts)
    x, y = (
        np.random.default_rng(0).normal(size=(2, 4 * world.size, 5)).astype(np.float32)
    )
    y = y[:, :3]

    def loss(rank=world.rank):
        rows = slice(4 * rank, 4 * rank + 4)
        return tf.reduce_mean(tf.square(model(x[rows]) - y[rows]))

    return model, loss


def collectives(config, model, loss):
    """Names, types and shapes of what a step with these settings sends."""
    graph = (
        summing(config, loss, model.trainable_variables).get_concrete_function().graph
    )
    return list(agreement.collectives(graph.as_graph_def(add_shapes=True)))


def through_all(model, ids, training):
    x = model.table(ids)
    model.unused(x)
    for block in model.blocks:
        x = tf.tanh(block(x))
    return x


def repeated(world):
    """A model of names that repeat and weights of two types, of which Horovod groups one only.

    Its loss here, the gradients' sums over ranks by plain towers.
    """
    keras.utils.set_random_seed(7)
    kinds = ("float32", "float64", "float32")
    blocks = [
        keras.Sequential([keras.layers.Dense(4, name="sub", dtype=t)]) for t in kinds
    ]
    model = Called(
        through_all,
        blocks=blocks,
        unused=keras.layers.Dense(4, name="sub"),
        table=keras.layers.Embedding(9, 4, name="sub"),
    )
    model(tf.zeros([1, 2], tf.int32))
    names = [raw(v).name for v in model.trainable_variables]
    assert len(names) == 9 and len(set(names)) < 7, names

    def loss(rank=world.rank):
        return tf.reduce_sum(tf.square(model(tf.constant([[1, 1, 2 + rank]])) - 1))

    sums = []
    for of_ranks in zip(*towers(world, loss, model.trainable_variables)):
        if of_ranks[0] is None:
            sums.append(None)
        else:
            dense = [tf.convert_to_tensor(gradient) for gradient in of_ranks]
            sums.append(tf.add_n(dense))
    return model, loss, sums


GROUPINGS = (
    {},
    {"gradient_groups": 3},
    {"gradient_groups": 100},
    {"pack_bytes": 1000, "pack_count": 2},
    {"pack_bytes": 20, "pack_count": 100},
    {"deterministic": True},
    {"compression": "bf16"},
)


def check_names_that_repeat_lose_no_gradient_in_any_grouping(world):
    """Nor do more groups than gradients, packs of variables without one, sparse ones.

    Of these, rows are named by several ranks, and twice by one.
    """
    model, loss, sums = repeated(world)
    assert sum(g is None for g in sums) == 2
    for setting in GROUPINGS:
        config = dataclasses.replace(PLAIN, **setting)
        grads = summing(config, loss, model.trainable_variables)()
        tolerance = 2e-2 if config.compression == "bf16" else 1e-5
        for variable, ours, theirs in zip(model.trainable_variables, grads, sums):
            assert (ours is None) == (theirs is None), (setting, variable.path)
            if ours is not None:
                np.testing.assert_allclose(
                    ours, theirs, tolerance, tolerance, err_msg=f"{setting}"
                )
        # No gradient at all: with --deterministic the tape is Horovod's own, and takes no such.
        if not config.deterministic:
            nothing = summing(
                config, lambda: tf.constant(1.0), model.trainable_variables
            )
            assert nothing() == [None] * 9, setting


def check_compression_halves_what_travels_and_stays_close(world):
    model, loss = equal_shares(world)
    exact = [
        tf.add_n(parts)
        for parts in zip(*towers(world, loss, model.trainable_variables))
    ]
    for compression, digits in (("fp16", 2e-3), ("bf16", 2e-2)):
        config = dataclasses.replace(PLAIN, compression=compression)
        grads = summing(config, loss, model.trainable_variables)()
        worst = 0.0
        for ours, theirs in zip(grads, exact):
            difference = np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs))
            worst = max(worst, difference)
        assert 1e-6 < worst < digits, (compression, worst)

        wires = collectives(config, model, loss)
        kind = {"fp16": "float16", "bf16": "int16"}[compression]
        exponents = [wire for wire in wires if "/compression." in wire]
        assert len(exponents) == (len(grads) if compression == "fp16" else 0)
        assert all("float32 []" in wire for wire in exponents), (
            "one number ahead of a gradient"
        )
        wires = [wire for wire in wires if wire not in exponents]
        assert wires and all(kind in wire for wire in wires), wires
        if compression == "bf16":  # to all and back, whatever the number of gradients
            assert len(wires) == 2 < len(grads), wires


def check_small_gradients_travel_in_packs_and_all_in_groups(world):
    """Packs of at most 72 bytes, two at a time, in their order; larger ones alone."""
    model, loss = equal_shares(world)  # of 120, 24, 72 and 12 bytes
    for flags, expected in (
        ({"pack_bytes": 72, "pack_count": 2}, ["[3])", "[5, 6])", "[6] [6, 3])"]),
        ({"gradient_groups": 2}, ["[5, 6] [6])", "[6, 3] [3])"]),
    ):
        config = dataclasses.replace(PLAIN, **flags)
        shapes = [
            wire.split("float32 ")[1] for wire in collectives(config, model, loss)
        ]
        assert sorted(shapes) == expected, shapes


def check_parts_of_16_bits_are_added_in_32(world):
    """256 and then 1 of each rank: bfloat16's next number after 256 is 258."""
    factor = 256.0 if world.is_chief else 1.0
    variable = keras.Variable(np.ones(5, np.float32), name="kernel")
    config = dataclasses.replace(PLAIN, compression="bf16")
    (grad,) = summing(
        config, lambda: factor * tf.reduce_sum(raw(variable)), [variable]
    )()
    exact = tf.cast(tf.cast(256.0 + world.size - 1, tf.bfloat16), tf.float32)
    np.testing.assert_array_equal(grad, np.full(5, exact))


def check_sparse_gradients_become_dense_on_gpus_before_they_are_summed(world):
    """Ranks would add gathered rows by themselves, each in an order of its own."""
    model, loss, sums = repeated(world)
    variables = model.trainable_variables
    # With fewer weights the tape sums by itself; with groups of one, the engine does.
    for groups in (0, 100):
        config = dataclasses.replace(PLAIN, gradient_groups=groups)
        with mock.patch.object(reduction, "gpu", lambda: "/GPU:0"):
            assert reduction.arguments(config, variables)["sparse_as_dense"]
            wires = collectives(config, model, loss)
        assert not any("HorovodAllgather" in wire for wire in wires), wires
    with mock.patch.object(reduction, "gpu", lambda: "/GPU:0"):
        raws = [raw(variable) for variable in variables]
        with tf.GradientTape() as tape:
            value = loss()
        sums_here = reduction._sums_in_groups(
            tape.gradient(value, raws), PLAIN, variables
        )
    for ours, theirs in zip(sums_here, sums):
        assert not isinstance(ours, tf.IndexedSlices)
        if ours is not None:
            np.testing.assert_allclose(ours, theirs, 1e-5, 1e-5)


def check_bfloat16_travels_where_the_backend_sums(world):
    model, loss = equal_shares(world)
    launched = "mpi" if hvd.mpi_enabled() else "gloo"
    config = dataclasses.replace(PLAIN, compression="bf16", reduce_backend=launched)
    function = summing(config, loss, model.trainable_variables)
    operations = function.get_concrete_function().graph.get_operations()
    carriers = [
        operation for operation in operations if operation.type.startswith("Horovod")
    ]
    assert len(carriers) == 2
    assert all(operation.device.endswith("CPU:0") for operation in carriers)
