"""Run on real ranks by test_small_runs.py: what a run promises when something is unusual."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from small_runs import CLASSES, FEATURES, Small, fit, numbers

import train
from hvdkit.checkpoint import files
from hvdkit.data.sampler import Sampler
from hvdkit.ranks import fingerprint as fingerprints
from hvdkit.ranks import world as world_lib
from hvdkit.run import loop
from hvdkit.settings import project
from hvdkit.stop import BUG, DIVERGED, DONE, WRONG_USE


def state(ended, step):
    """Variables of a checkpoint by name."""
    with np.load(ended.folder / "checkpoints" / f"step-{step:08d}" / "state.npz") as file:
        return {name: file[name] for name in file.files}


def assert_equal(one, other, but=()):
    assert one.keys() == other.keys()
    for name in one:
        if not any(part in name for part in but):
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


# ---- Losses that the model adds ----------------------------------------------------------------


class AddsLosses(Small):
    """Regularizers of every kind, and a layer that adds a loss of its own."""

    def build_model(self):
        class Centred(keras.layers.Layer):
            def call(self, x):
                self.add_loss(0.3 * tf.reduce_mean(tf.square(x)))
                return x

        x = keras.Input((FEATURES,))
        y = keras.layers.Dense(
            5,
            activation="tanh",
            kernel_regularizer=keras.regularizers.L2(0.1),
            bias_regularizer=keras.regularizers.L2(0.2),
            activity_regularizer=keras.regularizers.L2(0.05),
        )(x)
        y = keras.layers.Dense(CLASSES)(Centred()(y))
        return keras.Model(x, y)


def reference(world, ended, steps, lr):
    """Plain steps on the whole global batch, in one process: the task's loss and the model's."""
    source = numbers(1, 60)
    order = Sampler(60, 12, 1, 1, 0, 1)
    model, figures = ended, []
    for step in range(steps):
        ids = order.local_samples(tf.constant(step))[0].numpy().tolist()
        batch = [source.read(tf.constant(i)) for i in ids]
        x, y = (tf.stack([b[name] for b in batch]) for name in ("x", "y"))
        with tf.GradientTape() as tape:
            hidden = tf.tanh(tf.cast(x, tf.float64) @ model[0] + model[1])
            logits = hidden @ model[2] + model[3]
            task = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            added = 0.1 * tf.reduce_sum(model[0] ** 2) + 0.2 * tf.reduce_sum(model[1] ** 2)
            added += 0.05 * tf.reduce_sum(hidden**2) / 12
            added += 0.3 * tf.reduce_mean(hidden**2)
            loss = tf.reduce_mean(task) + added
        figures.append((float(tf.reduce_mean(task)), float(added)))
        for variable, gradient in zip(model, tape.gradient(loss, model)):
            variable.assign_sub(lr * gradient)
    return figures


def check_losses_that_the_model_adds_count_once(world):
    settings = {"precision": "float64", "momentum": 0.0, "lr_policy": "constant", "num_steps": 4}
    start = fit(world, AddsLosses, **settings | {"base_lr": 1e-300, "num_steps": 1})
    model = [tf.Variable(v) for v in start.weights()]
    figures = reference(world, model, 4, 0.05)
    for micro_batches in (1, 3):
        ended = fit(world, AddsLosses, **settings, accumulation_steps=micro_batches)
        assert ended.code == DONE, ended.message
        for ours, theirs in zip(ended.weights(), model):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)
        if world.is_chief:
            logged = [(r["loss"], r["keras_loss"]) for r in ended.records if "loss" in r]
            np.testing.assert_allclose(logged, figures, rtol=1e-10)


def check_a_run_without_such_losses_logs_none(world):
    ended = fit(world)
    assert not world.is_chief or "keras_loss" not in ended.records[0]


# ---- A step that is not applied leaves no trace ------------------------------------------------


class Normalized(Small):
    """Batch norm and Keras's dropout: a forward pass moves statistics and a seed."""

    def build_model(self):
        x = keras.Input((FEATURES,))
        y = keras.layers.BatchNormalization()(keras.layers.Dense(5, activation="tanh")(x))
        y = keras.layers.Dropout(0.3)(y)
        return keras.Model(x, keras.layers.Dense(CLASSES, dtype="float32")(y))


def position_of(step):
    """The sample at the first position of a step (counted from 1)."""
    order = Sampler(60, 12, 1, 1, 0, 1)
    return int(order.local_samples(tf.constant(step - 1, tf.int64))[0][0])


def check_a_batch_that_cannot_be_read_leaves_no_trace(world):
    bad = position_of(4)

    class Unreadable(Normalized):
        def training_example(self, sample, key):
            example = super().training_example(sample, key)
            fine = tf.debugging.Assert(sample["id"] != bad, ["sample", sample["id"], "is torn"])
            with tf.control_dependencies([fine]):
                return tf.nest.map_structure(tf.identity, example)

        def sources(self):
            train, val = super().sources()
            train._arrays["id"] = np.arange(60)
            return train, val

    settings = {"num_steps": 9, "checkpoint_every": 3, "deterministic": False}
    ended = fit(world, Unreadable, **settings)
    assert ended.code == WRONG_USE and f"sample {bad} is torn" in ended.message, ended.message
    good = fit(world, Normalized, **settings)
    assert good.code == DONE
    if world.is_chief:
        assert ended.checkpoints == ["step-00000003"]
        assert_equal(state(ended, 3), state(good, 3))
    # What the model holds is what was saved: nothing moved in the step that was not applied.
    names = [n for n in state(ended, 3) if n.startswith("model/")]
    for name, value in zip(names, ended.weights()):
        np.testing.assert_array_equal(value, state(ended, 3)[name], err_msg=name)


def check_a_gradient_that_is_not_finite_leaves_no_trace(world):
    bad = position_of(2)

    class Huge(Normalized):
        def training_example(self, sample, key):
            example = super().training_example(sample, key)
            factor = tf.where(sample["id"] == bad, 1e5, 1.0)  # beyond float16
            return {"inputs": example["inputs"] * factor, "targets": example["targets"]}

        def sources(self):
            train, val = super().sources()
            train._arrays["id"] = np.arange(60)
            return train, val

        def build_model(self):
            x = keras.Input((FEATURES,))
            y = keras.layers.BatchNormalization()(keras.layers.Dense(5)(x))
            y = keras.layers.Dropout(0.3)(y)
            return keras.Model(x, keras.layers.Dense(CLASSES, dtype="float32")(y))

    ended = fit(world, Huge, num_steps=5, precision="float16", base_lr=0.01)
    assert ended.code == DONE, ended.message
    assert all(np.isfinite(w).all() for w in ended.weights())
    if world.is_chief:
        assert ended.summary["skipped_steps"] >= 1
        one, two = (r for r in ended.records if r["step"] in (1, 2))
        assert two["skipped"] == one["skipped"] + 1

    # In float32 such steps end the run; statistics stay those of the step before.
    class Broken(Huge):
        def training_example(self, sample, key):
            example = super(Huge, self).training_example(sample, key)
            factor = tf.where(sample["id"] == bad, np.inf, 1.0)
            return {
                "inputs": example["inputs"] * tf.cast(factor, tf.float32),
                "targets": example["targets"],
            }

    ended = fit(world, Broken, num_steps=2, max_bad_steps=1)
    assert ended.code == DIVERGED and "diverged at step 2" in ended.message, ended.message
    assert all(np.isfinite(w).all() for w in ended.weights())


# ---- float16 that does not train ---------------------------------------------------------------


def check_float16_that_only_skips_ends_as_diverged(world):
    class Half(Small):
        def build_model(self):
            x = keras.Input((FEATURES,))
            y = keras.layers.Dense(CLASSES, dtype="float32")(keras.layers.Dense(5)(x))
            return keras.Model(x, y)

    ended = fit(world, Half, precision="float16", base_lr=1e30, num_steps=10)
    assert ended.code == DIVERGED, ended.code
    words = ("steps in a row skipped", "loss scale", "learning rate")
    assert all(word in ended.message for word in words), ended.message
    if world.is_chief:
        assert ended.summary["exit_reason"] == "diverged"
    ended = fit(world, Half, precision="float16", num_steps=10)
    assert ended.code == DONE, ended.message


def check_a_loss_of_bfloat16_is_added_up_in_float32(world):
    """Logits of bfloat16, as a model without a float32 head gives them."""
    exact = fit(world, num_steps=2)
    ended = fit(world, precision="bfloat16", num_steps=2)
    assert ended.code == DONE, ended.message
    if world.is_chief:
        np.testing.assert_allclose(ended.losses, exact.losses, rtol=2e-2)
        # A sum in bfloat16 has two or three digits: float32's mean of 12 losses has more.
        assert all(np.float32(x).view(np.uint32) & 0xFFFF for x in ended.losses), ended.losses


# ---- State that is not trained -----------------------------------------------------------------


def check_state_that_drifts_apart_is_named_at_the_first_save(world):
    class Remembers(keras.layers.Layer):
        """Keeps a mean of what it saw, each rank of its own share: nothing brings it together."""

        def build(self, shape):
            self.seen = self.add_weight(shape=(), trainable=False, name="seen")

        def call(self, x, training=False):
            if training:
                self.seen.assign(tf.reduce_mean(x))
            return x

    class Task(Small):
        def build_model(self):
            x = keras.Input((FEATURES,))
            y = keras.layers.Dense(CLASSES)(Remembers(name="memory")(x))
            return keras.Model(x, y)

    ended = fit(world, Task, checkpoint_every=2, num_steps=6)
    if world.size == 1:
        assert ended.code == DONE, ended.message
    else:
        assert ended.code not in (DONE, DIVERGED) and "memory/seen" in ended.message
        assert ended.checkpoints == []


def check_moving_statistics_are_alike_after_a_run_unless_they_are_not_synced(world):
    for mode, alike in (("none", world.size == 1), ("mean", True), ("moments", True)):
        ended = fit(world, Normalized, bn_sync=mode)
        assert ended.code == DONE, ended.message
        everyone = world.gather_objects(world_lib.weights_sha256(ended.model.variables), "hashes")
        assert (len({*everyone}) == 1) == alike, mode


def check_ranks_whose_weights_differ_in_the_end_are_named(world):
    """The run's own check, seen to fail: one rank's weights are changed after the last step."""

    def drifted(run):
        if run.world.rank == 1:
            run.weights[0].assign_add(tf.ones_like(run.weights[0]))
        summarize(run, None)

    summarize = loop.Run._summarize
    with mock.patch.object(loop.Run, "_summarize", lambda run, ending: drifted(run)):
        ended = fit(world)
    assert ended.code == (DONE if world.size == 1 else BUG)
    assert world.size == 1 or "final weights on rank 1" in ended.message, ended.message


def check_a_run_that_diverges_keeps_its_checkpoints(world):
    settings = {"optimizer": "sgd", "lr_policy": "constant", "checkpoint_every": 1}
    good = fit(world, num_steps=2, **settings)
    again = {"run_dir": str(good.folder), "resume": "auto", "base_lr": 1e38, "num_steps": 40}
    ended = fit(world, **settings | again)
    assert ended.code == DIVERGED and "diverged at step" in ended.message, ended.message
    if world.is_chief:
        assert ended.summary["exit_reason"] == "diverged" and "step-00000002" in ended.checkpoints
        assert not any(map(files.fault, (ended.folder / "checkpoints").iterdir()))


class Ragged(Small):
    """Position k of a row counts k + 1 times its loss, for k up to the row's label."""

    def length(self, targets):
        return CLASSES

    def loss(self, outputs, targets):
        losses, _ = super().loss(outputs, targets)
        place = tf.range(self.length(targets))
        losses = losses[:, None] * tf.cast(place + 1, losses.dtype)
        return losses, tf.cast(place <= targets[:, None], losses.dtype)


class Longest(Ragged):
    """As long as the longest row of the rank's own part."""

    def length(self, targets):
        return tf.reduce_max(targets) + 1


class Dropped(Ragged):
    """Only the positions that count."""

    def loss(self, outputs, targets):
        losses, weights = super().loss(outputs, targets)
        return losses[weights > 0], weights[weights > 0]


def check_positions_that_a_loss_leaves_out_by_shape_count_as_those_of_weight_0(world):
    settings = {"precision": "float64", "momentum": 0.0, "global_batch_size": 8, "num_steps": 4}
    settings |= {"accumulation_steps": 2}
    whole = fit(world, Ragged, **settings)
    for task in (Longest, Dropped):
        ended = fit(world, task, **settings)
        assert ended.code == DONE, ended.message
        for one, other in zip(whole.weights(), ended.weights()):
            np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-15)


class ActivityLoss(Small):
    def build_model(self):
        x = keras.Input((FEATURES,))
        y = keras.layers.Dense(CLASSES, activity_regularizer=keras.regularizers.L2(0.1))(x)
        self.model = keras.Model(x, y)
        return self.model


class CalledTwice(ActivityLoss):
    def loss(self, outputs, targets):
        losses, weights = super().loss(outputs, targets)
        again = self.model(tf.ones([1, FEATURES], outputs.dtype), training=True)
        return losses + 0 * tf.reduce_sum(again), weights


def check_a_loss_that_calls_the_model_again_keeps_what_the_model_added(world):
    once = fit(world, ActivityLoss, precision="float64")
    twice = fit(world, CalledTwice, precision="float64")
    assert once.code == twice.code == DONE, twice.message
    for one, other in zip(once.weights(), twice.weights()):
        np.testing.assert_allclose(other, one, rtol=1e-12)


def check_a_learning_rate_that_is_no_number_leaves_no_trace(world):
    class Task(Small):
        def schedule(self, config):
            return lambda step: tf.where(step == 1, float("nan"), 0.1)

    ended = fit(world, Task, num_steps=4, checkpoint_every=1)
    assert ended.code == DIVERGED and "at step 2" in ended.message, ended.message
    assert "learning rate nan" in ended.message
    assert ended.checkpoints == ["step-00000001"]
    assert all(np.isfinite(value).all() for value in ended.weights())


# ---- --benchmark -------------------------------------------------------------------------------


def measured(world, task=Small, **settings):
    """benchmark.json of a run of 15 steps, on rank 0."""
    ended = fit(world, task, benchmark=True, num_steps=15, log_every=100, **settings)
    assert ended.code == DONE, ended.message
    file = ended.folder / "benchmark.json"
    return json.loads(file.read_text()) if world.is_chief else None


def check_a_benchmark_tells_where_the_time_goes(world):
    class Slow:
        settles = False

        def due(self, step):
            return True

        def __call__(self, step, result):
            time.sleep(0.1)

    class Task(Small):
        def actions(self, run):
            return [Slow()]

    record = measured(world, Task)
    if not world.is_chief:
        return
    shares, seconds = record["shares_of_a_step"], record["seconds_a_step"]
    assert shares["bookkeeping"] * seconds >= 0.1 and shares["bookkeeping"] + shares["input"] < 1
    assert (shares["reduction_alone"] is None) == (world.size == 1)
    rates = [own["samples_per_second"] for own in record["by_rank"]]
    assert len(rates) == record["ranks"] == world.size
    mean = record["samples_per_second"]["mean"]
    np.testing.assert_allclose(mean, np.mean(np.sum(rates, 0)), rtol=1e-12)
    assert (record["warm_up_steps"], record["steps_a_window"]) == (5, 1)
    assert record["trained_parameters"] == (FEATURES + 1) * 5 + (5 + 1) * CLASSES
    products = FEATURES * 5 + 5 * CLASSES
    assert record["model_flops"]["training_a_sample"] == 3 * 2 * products
    assert "utilization" not in record["model_flops"]  # of CPUs
    assert all(own["host_peak_bytes"] > 2**27 for own in record["by_rank"])


def check_a_benchmark_sums_as_the_step_does(world):
    if world.size == 1:
        return
    virtual = {"virtual_ranks": 2, "deterministic": True, "cpu_threads": 1}
    for settings in (virtual, {"compression": "bf16", "accumulation_steps": 2}):
        record = measured(world, **settings)
        assert not world.is_chief or 0 < record["seconds_of_reduction_alone"] < 60


def check_a_benchmark_of_too_few_steps_says_so(world):
    ended = fit(world, benchmark=True, num_steps=14)
    assert ended.code == DONE
    assert not (ended.folder / "benchmark.json").exists()


# ---- Hosts that are not alike ------------------------------------------------------------------


def check_other_code_on_another_host_is_refused_by_name(world):
    found = dict(fingerprints.code(project.folder(), project.ENGINE))
    assert {"train.py", "hvdkit/ranks/world.py"} <= found.keys()
    assert not any(name.startswith("tests/") for name in found)
    if world.size == 1:
        return
    other = {0: {}, 1: {"step.py": "other", "tasks/mine.py": "more"}}[world.rank]
    read, fingerprints.code = fingerprints.code, lambda *folders: found | other
    try:
        ended = fit(dataclasses.replace(world, local_rank=0), num_steps=1)
    finally:
        fingerprints.code = read
    assert ended.code == WRONG_USE, ended.message
    assert "step.py, tasks/mine.py on " in ended.message and "(rank 1)" in ended.message
    assert ended.model is None


def check_other_packages_are_refused_and_other_devices_told(world):
    read, own = fingerprints.here, fingerprints.here()
    for name, refused in (("keras", True), ("device", False)):
        mine = own | ({name: "another"} if world.rank == 1 else {})
        fingerprints.here = lambda mine=mine: mine
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            ended = fit(world, num_steps=1)
        fingerprints.here = read
        assert ended.code == (WRONG_USE if refused and world.size > 1 else DONE), ended.message
        said = ended.message if refused else printed.getvalue()
        if world.size > 1 and (refused or world.is_chief):
            assert f"rank 0 and rank 1 on {world_lib.hostname()} differ in {name} (" in said, said


# ---- A train.py that somebody wrote otherwise: right, or refused in one sentence ----------------


def loop_of(make, after):
    """A train function with this step, that does `after(run, step, batch)` for each batch."""

    def own_train(run):
        step = make(run)
        for batch in run.batches():
            if after(run, step, batch):
                break

    return own_train


def plain(run):
    return run.make_step(train.make_step)


def usual(run, step, batch):
    run.after_step(step(batch))


def no_step(run):
    for _ in run.batches():
        pass


def check_a_train_function_that_would_be_wrong_in_silence_is_refused(world):
    for own_train, settings, why in (
        (loop_of(train.make_step, usual), {"compression": "bf16"}, "--compression needs run.make"),
        (
            loop_of(lambda run: run.make_step(lambda run: train.make_step(run)), usual),
            {"pack_bytes": 99},
            "make_step in train.py is not",
        ),
        (loop_of(plain, lambda run, step, batch: bool(step(batch)) and None), {}, "needs one run"),
        (loop_of(plain, lambda run, step, batch: True), {}, "needs one run.after"),
        (no_step, {}, "make the step"),
        (lambda run: None, {}, "needs one run.after"),
    ):
        ended = fit(world, own_train=own_train, **settings)
        assert ended.code == WRONG_USE and why in ended.message, ended.message


def check_a_run_that_train_ends_says_so_and_is_saved(world):
    ended = fit(
        world,
        own_train=loop_of(plain, lambda *of: usual(*of) or of[0].step == 2),
        num_steps=6,
    )
    assert ended.code == DONE, ended.message
    if world.is_chief:
        assert (ended.summary["step"], ended.summary["exit_reason"]) == (2, "ended by train.py")
        assert ended.checkpoints == ["step-00000002"]


# ---- What is refused before the first step -----------------------------------------------------


def check_a_loss_of_no_weight_is_refused(world):
    class Constant(Small):
        def loss(self, outputs, targets):
            return super().loss(tf.stop_gradient(outputs), targets)

    for deterministic in (False, True):
        # What it promises of TensorFlow's operations would hold for all checks after this one.
        with mock.patch.object(tf.config.experimental, "enable_op_determinism"):
            ended = fit(world, Constant, deterministic=deterministic)
        assert ended.code == WRONG_USE, ended.message
        assert "the loss depends on none of the model's weights" in ended.message, ended.message
        assert not (ended.folder / "checkpoints").exists()


def check_an_optimizer_that_differs_between_ranks_is_refused(world):
    class Own(Small):
        def optimizer(self, config):
            return keras.optimizers.SGD(config.base_lr, momentum=0.1 * world.rank)

    ended = fit(world, Own)
    if world.size == 1:
        assert ended.code == DONE, ended.message
    else:
        assert ended.code == WRONG_USE, ended.message
        assert "optimizer differs on rank 1 " in ended.message
        assert "momentum is 0.1, not 0.0" in ended.message, ended.message


def check_a_rate_that_an_optimizer_calls_is_refused_by_its_line(world):
    def rate():
        raise KeyError("no rate")

    class Own(Small):
        def optimizer(self, config):
            return keras.optimizers.SGD(rate)

    ended = fit(world, Own)
    assert ended.code == WRONG_USE, ended.message
    line = rate.__code__.co_firstlineno
    assert f"checks_runs.py, line {line}); a task's `schedule`" in ended.message, ended.message
