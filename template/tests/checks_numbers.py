"""Run on real ranks by test_numbers.py: reductions and batch norm against plain references."""

from __future__ import annotations

import dataclasses

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from config import Config
from engine import agreement, batch_norm, gradients, health, optimizer, reduction
from engine.sampler import share
from engine.state import State
from engine.stop import Stop
from engine.world import raw
from step import make_train_step

PLAIN = dataclasses.replace(
    Config(), global_batch_size=12, num_steps=100, base_lr=0.1, momentum=0.0
)


def rng(*seed):
    return np.random.default_rng(seed)


def gathered(world, value, name):
    return world.gather_objects(np.asarray(value), name)


def differ(call, *words):
    """`call` must raise Stop with these words in its message."""
    try:
        call()
    except Stop as stop:
        assert all(word in str(stop) for word in words), str(stop)
    else:
        raise AssertionError("no Stop was raised")


# ---- Reduced gradients -------------------------------------------------------------------------


def reduced(world, config, loss, variables):
    """Sums over ranks of the gradients of loss(), by the run's own tape settings."""

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            value = loss()
        tape = reduction.distribute(tape, config, variables)
        grads = tape.gradient(value, [raw(v) for v in variables], use_generic_names=True)
        return gradients.unscale(grads, tf.constant(1.0))

    return step()


def tower_gradients(world, seed=0):
    """A model, this rank's mean loss over an equal share, and every tower's gradients."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)]
    )
    x, y = rng(seed).normal(size=(2, 4 * world.size, 5)).astype(np.float32)[:2]
    y = y[:, :3]

    def loss(rank):
        rows = slice(4 * rank, 4 * rank + 4)
        return tf.reduce_mean(tf.square(model(x[rows]) - y[rows]))

    towers = []
    for rank in range(world.size):
        with tf.GradientTape() as tape:
            value = loss(rank)
        towers.append(tape.gradient(value, [raw(v) for v in model.trainable_variables]))
    return model, loss, towers


def check_reduced_gradients_equal_the_towers_recipe(world):
    """Stack the towers' gradients, reduce_mean: the single-machine recipe."""
    model, loss, towers = tower_gradients(world)
    grads = reduced(world, PLAIN, lambda: loss(world.rank), model.trainable_variables)
    for ours, *theirs in zip(grads, *towers):
        recipe = tf.reduce_mean(tf.stack(theirs), axis=0)
        np.testing.assert_allclose(ours / world.size, recipe, rtol=2e-6, atol=1e-7)


def check_every_grouping_gives_the_same_gradients(world):
    model, loss, towers = tower_gradients(world)
    settings = [
        {"gradient_groups": 2},
        {"pack_bytes": 100, "pack_count": 2},
        {"deterministic": True},
    ]
    for setting in settings:
        config = dataclasses.replace(PLAIN, **setting)
        grads = reduced(world, config, lambda: loss(world.rank), model.trainable_variables)
        for ours, *theirs in zip(grads, *towers):
            np.testing.assert_allclose(ours, tf.add_n(theirs), rtol=2e-6, atol=1e-7)


def check_packs_hold_small_gradients_only_and_no_more_than_asked(world):
    variables = [
        keras.Variable(np.zeros(n, np.float32), name=f"v{n}") for n in (1, 2, 300, 3, 4, 5)
    ]
    packs = reduction.pack(variables, max_bytes=100, max_count=2)
    sizes = [[int(tf.size(v)) for v in p] for p in packs]
    assert sizes == [[1, 2], [3, 4], [5]], sizes


def check_compression_halves_what_travels_and_stays_close(world):
    model, loss, towers = tower_gradients(world)
    exact = [tf.add_n(list(parts)) for parts in zip(*towers)]
    for compression, digits in (("fp16", 2e-3), ("bf16", 2e-2)):
        config = dataclasses.replace(PLAIN, compression=compression)
        grads = reduced(world, config, lambda: loss(world.rank), model.trainable_variables)
        worst = max(np.max(np.abs(a - b)) / np.max(np.abs(b)) for a, b in zip(grads, exact))
        assert 1e-6 < worst < digits, (compression, worst)

        @tf.function
        def step(config=config):
            with tf.GradientTape() as tape:
                value = loss(world.rank)
            tape = reduction.distribute(tape, config, model.trainable_variables)
            return tape.gradient(value, [raw(model.trainable_variables[0])], use_generic_names=True)

        graph = step.get_concrete_function().graph.as_graph_def(add_shapes=True)
        wires = list(agreement._collectives(graph))
        kind = {"fp16": "float16", "bf16": "int16"}[compression]
        assert wires and all(kind in wire for wire in wires), wires


def check_sparse_gradients_alone_and_mixed_with_dense_ones(world):
    """Rows named by several ranks, and twice by one, are added."""
    table = keras.Variable(rng(1).normal(size=(10, 4)).astype(np.float32), name="table")
    kernel = keras.Variable(rng(2).normal(size=(4, 2)).astype(np.float32), name="kernel")
    ids = [[0, 3, 3, 3 + rank] for rank in range(world.size)]

    def loss(rank, mixed):
        rows = tf.gather(raw(table), ids[rank])
        return tf.reduce_sum(tf.square(rows @ raw(kernel) if mixed else rows))

    for mixed in (False, True):
        variables = [table, kernel] if mixed else [table]
        expected = None
        for rank in range(world.size):
            with tf.GradientTape() as tape:
                value = loss(rank, mixed)
            grads = tape.gradient(value, [raw(v) for v in variables])
            assert isinstance(grads[0], tf.IndexedSlices)
            whole = [tf.convert_to_tensor(g) for g in grads]
            expected = whole if expected is None else [a + b for a, b in zip(expected, whole)]
        for config in (PLAIN, dataclasses.replace(PLAIN, deterministic=True)):
            grads = reduced(world, config, lambda m=mixed: loss(world.rank, m), variables)
            for ours, theirs in zip(grads, expected):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5)


# ---- The step ----------------------------------------------------------------------------------


class Regression:
    """The smallest task: a dense layer, squared errors, weight 0 for rows of NaN targets."""

    main_metric = "none"

    def loss(self, outputs, targets):
        valid = tf.cast(targets > -100, outputs.dtype)
        return tf.square(outputs - tf.where(targets > -100, targets, 0)), valid


def regression_step(world, config, model=None, features=4):
    keras.utils.set_random_seed(3)
    if model is None:
        model = keras.Sequential([keras.Input((features,)), keras.layers.Dense(1)])
    state = State(model, optimizer.build(config, model), config.precision)
    micro = config.global_batch_size // config.accumulation_steps
    first, last = share(micro, world.rank, world.size)
    shape = [config.accumulation_steps, last - first]
    spec = {
        "inputs": tf.TensorSpec([*shape, features], tf.float32),
        "targets": tf.TensorSpec([*shape, 1], tf.float32),
    }
    step = make_train_step(config, world, Regression(), state, spec)

    def do(x, y):
        """One step on the global batch x, y."""
        parts = []
        for whole in (x, y):
            whole = whole.reshape(config.accumulation_steps, micro, -1)
            parts.append(tf.constant(whole[:, first:last], tf.float32))
        return step(dict(zip(("inputs", "targets"), parts)), health.votes(False, False))

    do.step = step
    return do, state


def batch(seed=0, features=4, size=12):
    x = rng(seed).normal(size=(size, features)).astype(np.float32)
    return x, (x.sum(1, keepdims=True) + 1).astype(np.float32)


def check_loss_and_gradient_are_means_over_valid_positions_of_all_ranks(world):
    """Ignored positions all on one rank: a mean of the ranks' means would be wrong."""
    x, y = batch()
    y[:3] = -1000.0
    do, state = regression_step(world, PLAIN)
    before = state.model.get_weights()
    result = do(x, y)
    errors = (x @ before[0] + before[1] - y)[3:]
    np.testing.assert_allclose(result["loss"], np.mean(errors**2), rtol=1e-5)
    kernel = before[0] - 0.1 * 2 * x[3:].T @ errors / 9
    np.testing.assert_allclose(state.model.get_weights()[0], kernel, rtol=1e-5, atol=1e-6)


def check_accumulation_equals_the_large_batch(world):
    results = []
    for steps in (1, 2):
        config = dataclasses.replace(PLAIN, accumulation_steps=steps)
        do, state = regression_step(world, config)
        for seed in range(3):
            result = do(*batch(seed))
        results.append((state.model.get_weights(), float(result["grad_norm"])))
    for a, b in zip(results[0][0], results[1][0]):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-5)


def check_clipping_is_by_the_global_norm_and_equal_on_all_ranks(world):
    config = dataclasses.replace(PLAIN, clip_norm=0.25, base_lr=1.0, log_gradients=True)
    do, state = regression_step(world, config)
    before = state.model.get_weights()
    result = do(*batch())
    moved = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(before, state.model.get_weights())))
    assert float(result["grad_norm"]) > 0.25
    np.testing.assert_allclose(moved, 0.25, rtol=1e-5)
    # The figures of each layer are of the gradients before clipping.
    errors = batch()[0] @ before[0] + before[1] - batch()[1]
    kernel = 2 * batch()[0].T @ errors / 12
    expected = [[kernel.sum(), np.linalg.norm(kernel), 0], [2 * errors.mean()] * 2 + [0]]
    expected[1][1] = abs(expected[1][1])
    np.testing.assert_allclose(result["layers"], expected, rtol=1e-4, atol=1e-6)
    norms = np.linalg.norm(result["layers"][:, 1])
    np.testing.assert_allclose(result["grad_norm"], norms, rtol=1e-6)
    assert len(set(world.gather_objects(float(result["grad_norm"]), "norms"))) == 1


def check_l2_pulls_kernels_only(world):
    config = dataclasses.replace(PLAIN, weight_decay=0.5)
    (do, decayed), (plain_do, plain) = (regression_step(world, c) for c in (config, PLAIN))
    kernel = plain.model.get_weights()[0]
    do(*batch()), plain_do(*batch())
    ours, theirs = decayed.model.get_weights(), plain.model.get_weights()
    np.testing.assert_allclose(ours[0], theirs[0] - 0.1 * 0.5 * kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ours[1], theirs[1])


def check_an_overflow_on_one_rank_makes_all_skip_the_same_step(world):
    config = dataclasses.replace(PLAIN, precision="float16")
    keras.utils.set_random_seed(3)
    layer = keras.layers.Dense(1, dtype="mixed_float16")
    head = keras.layers.Activation("linear", dtype="float32")
    do, state = regression_step(world, config, keras.Sequential([keras.Input((4,)), layer, head]))
    do(*(0.1 * part for part in batch()))
    assert float(state.loss_scale.value) == 2.0**15 and int(state.skipped) == 0
    before = state.model.get_weights()
    x, y = (0.1 * part for part in batch(1))
    x[-1] = 6e4  # the last rank's: its product with the loss scale is beyond float16
    result = do(x, y)
    assert not bool(result["finite"])
    assert int(state.step) == 2 and int(state.skipped) == 1
    assert int(state.optimizer.iterations) == 1
    assert float(state.loss_scale.value) == 2.0**14
    for a, b in zip(before, state.model.get_weights()):
        np.testing.assert_array_equal(a, b)
    result = do(*(0.1 * part for part in batch(2)))
    assert bool(result["finite"]) and int(state.skipped) == 1
    lr = 0.1 * (1 - 2 / 100) ** 0.9  # of step 2, counting the skipped one: one step variable
    np.testing.assert_allclose(result["lr"], lr, rtol=1e-6)
    assert not np.array_equal(before[0], state.model.get_weights()[0])


def check_float16_gradients_equal_float32_ones_nearly(world):
    changes = []
    for precision in ("float32", "float16", "bfloat16"):
        config = dataclasses.replace(PLAIN, precision=precision)
        policy = "float32" if precision == "float32" else f"mixed_{precision}"
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(1, dtype=policy, kernel_initializer="ones"),
                keras.layers.Activation("linear", dtype="float32"),
            ]
        )
        do, state = regression_step(world, config, model)
        do(*batch())
        changes.append(1 - state.model.get_weights()[0])
        assert state.model.get_weights()[0].dtype == np.float32
    np.testing.assert_allclose(changes[1], changes[0], rtol=0.02, atol=2e-3)
    np.testing.assert_allclose(changes[2], changes[0], rtol=0.1, atol=2e-2)


def check_a_vote_of_one_rank_is_seen_by_all_and_unread_data_changes_nothing(world):
    do, state = regression_step(world, PLAIN)
    before = state.model.get_weights()
    x, y = batch()
    first, last = share(12, world.rank, world.size)
    step_batch = {
        "inputs": tf.constant(x[None, first:last]),
        "targets": tf.constant(y[None, first:last]),
    }
    result = do.step(step_batch, health.votes(world.rank == world.size - 1, False))
    assert result["votes"].numpy().tolist() == [1, 0]
    assert int(state.step) == 0
    for a, b in zip(before, state.model.get_weights()):
        np.testing.assert_array_equal(a, b)


# ---- Agreement ---------------------------------------------------------------------------------


class Branching(keras.Model):
    """Uses its second layer where `use` says so."""

    def __init__(self, use):
        super().__init__()
        self.first, self.second = (
            keras.layers.Dense(1, name="first"),
            keras.layers.Dense(1, name="second"),
        )
        self.first.build((None, 4)), self.second.build((None, 4))
        self.use = use

    def call(self, x, training=False):
        return self.first(x) + self.second(x) if self.use else self.first(x)


def check_a_variable_without_gradient_on_every_rank_is_allowed(world):
    do, state = regression_step(world, PLAIN, Branching(False))
    before = [v.numpy() for v in state.model.second.weights]
    do(*batch())
    for a, b in zip(before, state.model.second.weights):
        np.testing.assert_array_equal(a, b)
    for steps in (2, 3):  # the same when micro-batches are accumulated
        config = dataclasses.replace(PLAIN, accumulation_steps=steps)
        do, state = regression_step(world, config, Branching(False))
        assert np.isfinite(float(do(*batch())["loss"]))


def check_a_variable_without_gradient_on_one_rank_is_named(world):
    model = Branching(world.rank != 1)
    differ(lambda: regression_step(world, PLAIN, model), "second/kernel", "rank 1 ")


def check_ranks_at_different_places_are_told(world):
    place = "the end" if world.rank == 1 else "the start"
    differ(lambda: world.gather_objects(1, place), "rank 1", "'the end'", "rank 0", "'the start'")


def check_collectives_that_differ_by_name_or_shape_are_named(world):
    odd = world.rank == world.size - 1

    @tf.function
    def other_name():
        return hvd.allreduce(tf.zeros([3]), name="odd" if odd else "even", op=hvd.Sum)

    @tf.function
    def other_shape():
        return hvd.allreduce(tf.zeros([4 if odd else 3]), name="same", op=hvd.Sum)

    @tf.function
    def hidden():
        return tf.cond(tf.constant(True), other_shape, lambda: tf.zeros([4 if odd else 3]))

    def check(function):
        return lambda: agreement.check_collectives(world, function.get_concrete_function())

    rank = f"rank {world.size - 1} "
    differ(check(other_name), "odd", "even", rank)
    differ(check(other_shape), "same", "[4]", "[3]", rank)
    differ(check(hidden), "same", "[4]", "[3]", rank)


# ---- Batch norm --------------------------------------------------------------------------------

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
    sync = batch_norm.make_sync(model, mode, weight)
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


def check_a_models_batch_norms_are_exchanged_and_it_saves_and_loads(world):
    import tempfile

    model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=4)
    for variable in model.variables:
        variable.assign_add(tf.ones_like(variable) * 0.01)
    copy = batch_norm.synchronize(model)
    kinds = [type(layer) for layer in copy.layers]
    assert keras.layers.BatchNormalization not in kinds
    assert kinds.count(batch_norm.SyncBatchNormalization) == 53
    for a, b in zip(model.get_weights(), copy.get_weights()):
        np.testing.assert_array_equal(a, b)
    x = rng(5).normal(size=(2, 32, 32, 3)).astype(np.float32)
    np.testing.assert_allclose(model(x), copy(x), rtol=1e-4, atol=1e-6)
    if world.rank == 0:
        small = batch_norm.synchronize(
            keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
        )
        with tempfile.TemporaryDirectory() as folder:
            small.save(f"{folder}/m.keras")
            loaded = keras.models.load_model(f"{folder}/m.keras")
        assert isinstance(loaded.layers[0], batch_norm.SyncBatchNormalization)


def check_a_subclassed_model_is_told_what_to_do(world):
    try:
        batch_norm.synchronize(Branching(True))
    except ValueError as error:
        assert "Branching" in str(error) and "SyncBatchNormalization" in str(error)
    else:
        raise AssertionError("no ValueError")


def check_dropout_draws_belong_to_the_sample(world):
    from engine.dropout import SampleDropout

    layer = SampleDropout(0.4, name="d")
    keys = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    x = np.ones((3, 50, 20), np.float32)
    whole = layer([x, keys], training=True).numpy()
    order = np.roll(np.arange(3), world.rank)  # each rank holds them in another order
    ours = layer([x[order], keys[order]], training=True).numpy()
    np.testing.assert_array_equal(ours, whole[order])
    assert abs((whole == 0).mean() - 0.4) < 0.03
    np.testing.assert_allclose(whole[whole > 0], 1 / 0.6, rtol=1e-6)
    assert not np.array_equal(whole[0], whole[1])
    other = SampleDropout(0.4, name="e")([x, keys], training=True).numpy()
    assert not np.array_equal(whole, other)
    np.testing.assert_array_equal(layer([x, keys], training=False), x)
