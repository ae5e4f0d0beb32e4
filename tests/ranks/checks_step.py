"""Holds hvdkit.train.step.step and hvdkit.ranks.agreement on real ranks, by plain references."""

import dataclasses
import math
from unittest import mock

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from checks_reduction import PLAIN
from programs import programs_and_others
from refusals import differ
from small_models import Called

import train
from hvdkit.data.sampler import share
from hvdkit.ranks import agreement
from hvdkit.ranks.world import raw
from hvdkit.run import health
from hvdkit.train.layers.dropout import SampleDropout
from hvdkit.train.optim import optimizer
from hvdkit.train.step import graph_checks, reduction
from hvdkit.train.step.state import State
from hvdkit.train.step.step import Step


class Regression:
    """The smallest task: a dense layer, squared errors, weight 0 for rows of NaN targets."""

    main_metric = "none"

    def loss(self, outputs, targets):
        valid = tf.cast(targets > -100, outputs.dtype)
        return tf.square(outputs - tf.where(targets > -100, targets, 0)), valid


class FewPlaces(Regression):
    """Squared errors at 4,096 places, of which one in two samples counts: the mean is tiny beside
    what is divided out after the sum over ranks.
    """

    def __init__(self, *, factor, weight, terms):
        self.factor, self.weight, self.terms = factor, weight, terms

    def loss(self, outputs, targets):
        places = tf.repeat(self.factor * tf.square(outputs - targets), 4096, axis=1)
        first = tf.one_hot(0, 4096) * tf.cast(targets > 1.0, tf.float32)
        term = (places, self.weight * first)
        return term if self.terms == 1 else {"one": term, "two": (*term, 0.5)}


def regression_step(world, config, model=None, *, task=None):
    """A function of a batch that does one step, train.py's own or the engine's; and its state."""
    keras.utils.set_random_seed(3)
    if model is None:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    state = State(model, optimizer.build(config, model), config.precision)
    micro = config.global_batch_size // config.accumulation_steps
    first, last = share(micro, world.rank, world.size)
    shape = [config.accumulation_steps, last - first]
    spec = {
        "inputs": tf.TensorSpec([*shape, 4], tf.float32),
        "targets": tf.TensorSpec([*shape, 1], tf.float32),
    }
    run = Step(config, world, task or Regression(), state=state, spec=spec)
    run.function = run.trace  # all else that train.py calls has the same name in a run
    own = run.own_step()
    step = run.trace(own) if own else train.make_step(run)

    def do(x, y):
        parts = []
        for whole in (x, y):
            whole = whole.reshape(config.accumulation_steps, micro, -1)
            parts.append(tf.constant(whole[:, first:last], tf.float32))
        return step(dict(zip(("inputs", "targets"), parts)), agreement.votes())

    do.step = step
    do.run = run
    return do, state


def batch(seed=0):
    x = np.random.default_rng(seed).normal(size=(12, 4)).astype(np.float32)
    return x, (x.sum(1, keepdims=True) + 1).astype(np.float32)


def check_what_a_step_exchanges_besides_gradients_does_not_grow_with_the_ranks(world):
    """The loss's sums and the votes, however many ranks; each rank's own loss stays with it."""
    do, _ = regression_step(world, PLAIN)
    graph = do.step.graph.as_graph_def(add_shapes=True)
    (totals,) = [c for c in agreement.collectives(graph) if c.startswith("step.totals")]
    assert f"float32 [2, {6 + agreement.NUM_VOTES}]" in totals, totals
    result = do(*batch())
    by_rank = health.losses(world, 0, result)
    assert by_rank.shape == (world.size,) and by_rank[world.rank] == result["losses"][0]
    # Equal shares.
    np.testing.assert_allclose(np.mean(by_rank), float(result["loss"]), rtol=1e-5)


def check_counts_that_float32_has_not_are_summed_exactly(world):
    """Beside gradients of float32 a step's totals travel in two parts of float32."""
    weights = [keras.Variable(np.zeros(1, np.float32))]
    own = [2**24 + 1 + world.rank, 2**34 + 5, -3, 0.25, math.inf, 1e30, -1e-4]
    ranks = world.size * (world.size - 1) / 2
    for config in (PLAIN, dataclasses.replace(PLAIN, deterministic=True)):
        sent = reduction.split(tf.constant(own, tf.float64), config, weights)
        received = hvd.allreduce(sent, op=hvd.Sum, name="exact")
        found = reduction.join(received).numpy().tolist()
        expected = [number * world.size for number in [2**24 + 1, *own[1:]]]
        assert found[:5] == [expected[0] + ranks, *expected[1:5]]
        np.testing.assert_allclose(found[5:], expected[5:], rtol=1e-6)


def check_accumulation_reduces_once_a_step(world):
    """Two gradients and the sums, none of them inside of the loop over micro-batches."""
    do, _ = regression_step(world, dataclasses.replace(PLAIN, accumulation_steps=3))
    graph = do.step.graph.as_graph_def(add_shapes=True)
    assert len(list(agreement.collectives(graph))) == 3
    called = {f.signature.name: f.node_def for f in graph.library.function}
    every = [*graph.node, *(node for nodes in called.values() for node in nodes)]
    bodies = [
        called[node.attr["body"].func.name] for node in every if "While" in node.op
    ]
    sends = [
        n
        for n, nodes in called.items()
        if any(x.op.startswith("Horovod") for x in nodes)
    ]
    assert bodies and not [
        body for body in bodies for name in sends if name in str(body)
    ]
    assert not [
        node for body in bodies for node in body if node.op.startswith("Horovod")
    ]


def check_loss_and_gradient_are_means_over_valid_positions_and_the_rate_is_the_schedules(
    world,
):
    """Ignored positions all on one rank; the first of 4 steps of warm-up: w - 0.1 / 4 *
    gradient."""
    config = dataclasses.replace(PLAIN, lr_policy="constant", warmup_steps=4)
    x, y = batch()
    y[:3] = -1000.0
    do, state = regression_step(world, config)
    kernel, bias = state.model.get_weights()
    result = do(x, y)
    errors = (x @ kernel + bias - y)[3:]
    np.testing.assert_allclose(result["loss"], np.mean(errors**2), rtol=1e-5)
    np.testing.assert_allclose(float(result["lr"]), 0.025)
    slopes = 2 * x[3:].T @ errors / 9, 2 * errors.mean(0)
    for after, before, slope in zip(state.model.get_weights(), (kernel, bias), slopes):
        np.testing.assert_allclose(after, before - 0.025 * slope, rtol=1e-5, atol=1e-6)


def check_compressed_gradients_are_those_of_the_mean(world):
    """Whatever the share of places that count, their weights, the loss's size and the step's way.

    From means of 1e-7 to 5e4; the compressed ones are within 1e-3.
    """
    ways = ({}, {"accumulation_steps": 2}, {"jit": True}, {"deterministic": True})
    cases = [({"factor": 1e-8, "weight": 1.0, "terms": 1}, way) for way in ways]
    cases += [({"factor": 4e3, "weight": 1e-4, "terms": 2}, way) for way in ways]
    cases.append(({"factor": 1.0, "weight": 1e-4, "terms": 1}, {"gradient_groups": 1}))
    cases.append(({"factor": 1.0, "weight": 1e4, "terms": 1}, {"precision": "float16"}))
    for of_loss, way in cases:
        found = []
        for compression in ("none", "fp16"):
            rate = 0.1 / of_loss["factor"]
            config = dataclasses.replace(
                PLAIN, compression=compression, base_lr=rate, **way
            )
            do, state = regression_step(world, config, task=FewPlaces(**of_loss))
            before = state.model.get_weights()
            norm = float(do(*batch())["grad_norm"])
            moves = [a - b for a, b in zip(before, state.model.get_weights())]
            found.append((norm, np.concatenate([move.ravel() for move in moves])))
        (norm, moves), (compressed_norm, compressed_moves) = found
        assert 1 < norm / of_loss["factor"] < 20
        np.testing.assert_allclose(
            compressed_norm, norm, rtol=1e-3, err_msg=f"{of_loss} {way}"
        )
        apart = np.linalg.norm(moves - compressed_moves) / np.linalg.norm(moves)
        assert 0 < apart < 1e-3, (apart, of_loss, way)


def check_compressed_gradients_that_are_no_number_are_skipped_by_all(world):
    do, state = regression_step(world, dataclasses.replace(PLAIN, compression="fp16"))
    before = state.model.get_weights()
    for bad in (np.nan, np.inf):
        x, y = batch()
        x[-1] = bad  # the last rank's
        assert not bool(do(x, y)["finite"])
    for one, other in zip(before, state.model.get_weights()):
        np.testing.assert_array_equal(one, other)


def check_clipping_is_by_the_global_norm_and_equal_on_all_ranks(world):
    config = dataclasses.replace(PLAIN, clip_norm=0.25, base_lr=1.0, log_gradients=True)
    do, state = regression_step(world, config)
    before = state.model.get_weights()
    result = do(*batch())
    moved = np.sqrt(
        sum(np.sum((a - b) ** 2) for a, b in zip(before, state.model.get_weights()))
    )
    assert float(result["grad_norm"]) > 0.25
    np.testing.assert_allclose(moved, 0.25, rtol=1e-5)
    # The figures of each layer are of the gradients before clipping.
    x, y = batch()
    errors = x @ before[0] + before[1] - y
    kernel, bias = 2 * x.T @ errors / 12, 2 * errors.mean()
    expected = [[kernel.sum(), np.linalg.norm(kernel), 0], [bias, abs(bias), 0]]
    np.testing.assert_allclose(result["layers"], expected, rtol=1e-4, atol=1e-6)
    norms = np.linalg.norm(result["layers"][:, 1])
    np.testing.assert_allclose(result["grad_norm"], norms, rtol=1e-6)
    assert len(set(world.gather_objects(float(result["grad_norm"]), "norms"))) == 1


def check_an_overflow_on_one_rank_makes_all_skip_the_same_step(world):
    config = dataclasses.replace(PLAIN, precision="float16")
    keras.utils.set_random_seed(3)
    layer = keras.layers.Dense(1, dtype="mixed_float16")
    head = keras.layers.Activation("linear", dtype="float32")
    do, state = regression_step(
        world, config, keras.Sequential([keras.Input((4,)), layer, head])
    )
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
    # Of step 2, counting the skipped one: one step variable.
    lr = 0.1 * (1 - 2 / 100) ** 0.9
    np.testing.assert_allclose(result["lr"], lr, rtol=1e-6)
    assert not np.array_equal(before[0], state.model.get_weights()[0])


def check_float16_gradients_equal_float32_ones_nearly(world):
    changes = []
    for precision in ("float32", "float16", "bfloat16"):
        policy = "float32" if precision == "float32" else f"mixed_{precision}"
        layer = keras.layers.Dense(1, dtype=policy, kernel_initializer="ones")
        head = keras.layers.Activation("linear", dtype="float32")
        model = keras.Sequential([keras.Input((4,)), layer, head])
        do, state = regression_step(
            world, dataclasses.replace(PLAIN, precision=precision), model
        )
        do(*batch())
        changes.append(1 - state.model.get_weights()[0])
        assert state.model.get_weights()[0].dtype == np.float32
    np.testing.assert_allclose(changes[1], changes[0], rtol=0.02, atol=2e-3)
    np.testing.assert_allclose(changes[2], changes[0], rtol=0.1, atol=2e-2)


def check_a_step_compiled_by_xla_is_the_same_step(world):
    """Batch norm, a regularizer, micro-batches; a step that is not applied leaves no trace."""

    def model():
        l2 = keras.regularizers.L2(0.01)
        norm = keras.layers.BatchNormalization(momentum=0.5)
        parts = [
            keras.layers.Dense(3, kernel_regularizer=l2),
            norm,
            keras.layers.Dense(1),
        ]
        return keras.Sequential([keras.Input((4,)), *parts])

    for steps in (1, 2):
        config, found = dataclasses.replace(PLAIN, accumulation_steps=steps), []
        for jit, gpu in ((False, ""), (True, ""), (False, "/GPU:0")):
            keras.utils.set_random_seed(3)
            with mock.patch("hvdkit.ranks.world.gpu", return_value=gpu):
                do, state = regression_step(
                    world, dataclasses.replace(config, jit=jit), model()
                )
            results = [do(*batch(seed)) for seed in range(3)]
            before = state.model.get_weights()
            x, y = batch(3)
            x[-1] = np.inf  # the last rank's
            assert not bool(do(x, y)["finite"])
            for one, other in zip(before, state.model.get_weights()):
                np.testing.assert_array_equal(one, other)
            found.append((before, [float(r["keras_loss"]) for r in results]))
            functions = do.step.graph.as_graph_def().library.function
            assert any("_XlaMustCompile" in f.attr for f in functions) == (
                jit or bool(gpu)
            )
        (plain, added), *others = found
        for weights, also_added in others:
            for one, other in zip([*plain, added], [*weights, also_added]):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


class TwoTerms(Regression):
    def loss(self, outputs, targets):
        losses, weights = super().loss(outputs, tf.cast(targets, outputs.dtype))
        return {"one": (losses, weights), "two": (tf.abs(outputs), weights, 0.5)}


def deep(layers, first="float64", normed=True):
    """Dense layers and one more of float64; the first one's type, and whether norms are between."""
    keras.utils.set_random_seed(3)
    parts = [keras.Input((4,))]
    for layer in range(layers):
        dtype = "float64" if layer else first
        parts.append(keras.layers.Dense(4, "tanh", dtype=dtype))
        if normed:
            parts.append(keras.layers.BatchNormalization(momentum=0.5, dtype=dtype))
    return keras.Sequential([*parts, keras.layers.Dense(1, dtype="float64")])


def after_steps(world, config, model, task):
    """A run's state, by name, after three steps and one that is not finite; its step's `do`."""
    do, state = regression_step(world, config, model, task=task)
    for seed in range(3):
        do(*batch(seed))
    before = {name: np.array(raw(v)) for name, v in state.variables.items()}
    x, y = batch(3)
    x[-1] = np.inf  # the last rank's
    assert not bool(do(x, y)["finite"])
    after = {name: np.array(raw(v)) for name, v in state.variables.items()}
    for name in before:
        if name.startswith(("model", "ema")):
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    return after, do


class Wide(Regression):
    def loss(self, outputs, targets):
        return super().loss(outputs, tf.cast(targets, outputs.dtype))


def check_with_jit_a_step_is_two_programs_with_one_exchange_of_gradients(world):
    """The same state; what runs outside of the programs does not grow with the weights."""
    wide = dataclasses.replace(PLAIN, precision="float64")
    averaged = dataclasses.replace(wide, clip_norm=0.5, ema_decay=0.9, momentum=0.9)
    in_parts = dataclasses.replace(wide, accumulation_steps=3, optimizer="adam")
    counts = []
    for config, task, shape, near in (
        (averaged, Wide(), {}, 1e-13),
        (in_parts, TwoTerms(), {"normed": False}, 1e-13),
        # Weights of two types make no group.
        (averaged, Wide(), {"first": "float32"}, 1e-5),
    ):
        plain, _ = after_steps(world, config, deep(1, **shape), task)
        compiled = dataclasses.replace(config, jit=True)
        state, do = after_steps(world, compiled, deep(1, **shape), task)
        for name, value in state.items():
            np.testing.assert_allclose(
                value, plain[name], rtol=near, atol=near, err_msg=name
            )
        programs, others = programs_and_others(do.step.graph)
        # Two terms need factors from the totals, and a sum of their gradients.
        assert programs == (4 if config is in_parts else 2), programs
        assert do.run.why_branch == ""
        counts.append(others.total())
    do, _ = regression_step(
        world, dataclasses.replace(averaged, jit=True), deep(3), task=Wide()
    )
    assert programs_and_others(do.step.graph)[1].total() == counts[0], counts
    assert max(counts[:2]) <= (16 if world.size == 1 else 32), counts


def check_an_update_that_xla_cannot_compile_is_a_branch_and_a_note_says_so(world):
    with (
        mock.patch.object(
            graph_checks, "xla_fault", lambda function, what: f"fails: {what}"
        ),
        mock.patch.object(graph_checks, "check_compiles"),
        mock.patch("hvdkit.ranks.world.say") as said,
    ):
        do, _ = regression_step(world, dataclasses.replace(PLAIN, jit=True))
    assert do.run.why_branch == "XLA fails: the update"
    (call,) = said.call_args_list
    assert call.args[1] == "note: the update is not compiled: XLA fails: the update"
    assert bool(do(*batch())["finite"])


def branching(use):
    """A model that uses its second layer where `use` says so."""
    first, second = (keras.layers.Dense(1, name=n) for n in ("first", "second"))
    first.build((None, 4)), second.build((None, 4))
    call = lambda model, x, training: first(x) + second(x) if use else first(x)  # noqa: E731
    return Called(call, first=first, second=second)


def check_a_variable_without_gradient_is_allowed_on_every_rank_and_named_on_one(world):
    for micro_batches in (1, 2):
        config = dataclasses.replace(PLAIN, accumulation_steps=micro_batches)
        do, state = regression_step(world, config, branching(False))
        before = [v.numpy() for v in state.model.second.weights]
        assert np.isfinite(float(do(*batch())["loss"]))
        for a, b in zip(before, state.model.second.weights):
            np.testing.assert_array_equal(a, b)
    model = branching(world.rank != 1)
    differ(lambda: regression_step(world, PLAIN, model), "second/kernel", "rank 1 ")


def check_state_that_differs_between_ranks_is_named(world):
    named = {name: tf.Variable([1.0, 2.0]) for name in ("a", "b", "c", "d", "e")}
    agreement.check_same_state(world, named, 1)
    last = world.size - 1
    if world.rank == last:
        named["c"].assign([1.0, np.nextafter(np.float32(2), np.float32(3))])

    def check():
        agreement.check_same_state(world, named, 2)

    differ(check, "at step 2 c on", f"rank {last} ", "memory or a device may be faulty")
    if world.rank == last:
        for variable in named.values():
            variable.assign([3.0, 3.0])
    differ(check, "a, b, c and 2 more", f"rank {last} ")
    named = {"a": tf.Variable(1.0)} | (
        {"new": tf.Variable(1.0)} if world.rank == last else {}
    )
    differ(check, "at step 2 new on", f"rank {last} ")


def check_collectives_that_differ_by_name_or_shape_are_named(world):
    odd = world.rank == world.size - 1

    def check(made):
        traced = tf.function(made, autograph=False).get_concrete_function()
        return lambda: agreement.check_collectives(world, traced)

    def reduced(name, size):
        return hvd.allreduce(tf.zeros([size]), name=name, op=hvd.Sum)

    size, rank = (4 if odd else 3), f"rank {world.size - 1} "
    differ(check(lambda: reduced("odd" if odd else "even", 3)), "odd", "even", rank)
    differ(check(lambda: reduced("same", size)), "same", "[4]", "[3]", rank)
    hidden = lambda: tf.cond(  # noqa: E731
        tf.constant(True), lambda: reduced("same", size), lambda: tf.zeros([size])
    )
    differ(check(hidden), "same", "[4]", "[3]", rank)


def check_dropout_draws_belong_to_the_sample(world):
    layer = SampleDropout(0.4, name="d")
    keys = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    x = np.ones((3, 50, 20), np.float32)
    whole = layer([x, keys], training=True).numpy()
    order = np.roll(np.arange(3), world.rank)  # each rank holds them in another order
    ours = layer([x[order], keys[order]], training=True).numpy()
    np.testing.assert_array_equal(ours, whole[order])
    compiled = tf.function(lambda: layer([x, keys], training=True), jit_compile=True)
    np.testing.assert_array_equal(compiled(), whole)
    assert abs((whole == 0).mean() - 0.4) < 0.03
    np.testing.assert_allclose(whole[whole > 0], 1 / 0.6, rtol=1e-6)
    assert not np.array_equal(whole[0], whole[1])
    other = SampleDropout(0.4, name="e")([x, keys], training=True).numpy()
    assert not np.array_equal(whole, other)
    np.testing.assert_array_equal(layer([x, keys], training=False), x)
