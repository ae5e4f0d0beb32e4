"""Holds hvdkit.run.loop on real ranks: what a run promises when something is unusual."""

import dataclasses
import json
import re
import time
from functools import partial
from types import SimpleNamespace
from unittest import mock

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from small_models import Step, weight
from small_runs import (
    CLASSES,
    FEATURES,
    USUAL,
    Small,
    acting,
    classifier,
    fit,
    folder,
    numbers,
    same,
    task_with,
)

import train
from hvdkit.data.sampler import Sampler
from hvdkit.ranks import fingerprint as fingerprints
from hvdkit.ranks import world as world_lib
from hvdkit.run import loop, modes
from hvdkit.settings import project
from hvdkit.settings.fields import Epochs
from hvdkit.stop import BUG, DIVERGED, DONE, PREEMPTED, WRONG_USE


class AddsLosses(Small):
    """Regularizers of every kind, and a layer that adds a loss of its own."""

    def build_model(self):
        def centred(layer, x, training):
            layer.add_loss(0.3 * tf.reduce_mean(tf.square(x)))
            return x

        body = keras.layers.Dense(
            5,
            activation="tanh",
            kernel_regularizer=keras.regularizers.L2(0.1),
            bias_regularizer=keras.regularizers.L2(0.2),
            activity_regularizer=keras.regularizers.L2(0.05),
        )
        return classifier(body, Step(centred))


def batch_ids(step: int, size: int = 60) -> list[int]:
    """The samples of the global batch of a step, which is counted from 0."""
    order = Sampler(
        size, USUAL["global_batch_size"], micro_batches=1, seed=1, rank=0, size=1
    )
    return order.local_samples(tf.constant(step, tf.int64))[0].numpy().tolist()


def plain_sgd(
    weights, steps, *, size: int = 60, adds: bool = False
) -> tuple[list, list[tuple]]:
    """Steps in one process on Small, or AddsLosses (`adds`): the weights, and each step's figures.

    Figures are the task's loss, the loss that the model adds, and the gradient's norm.
    """
    source = numbers(1, size)
    model = [tf.Variable(array) for array in weights]
    kernel, bias, head_kernel, head_bias = model
    figures = []
    for step in steps:
        batch = [source.read(tf.constant(number)) for number in batch_ids(step, size)]
        x = tf.stack([sample["x"] for sample in batch])
        y = tf.stack([sample["y"] for sample in batch])
        with tf.GradientTape() as tape:
            hidden = tf.tanh(tf.cast(x, tf.float64) @ kernel + bias)
            logits = hidden @ head_kernel + head_bias
            task = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            )
            added = 0.1 * tf.reduce_sum(kernel**2) + 0.2 * tf.reduce_sum(bias**2)
            added += 0.05 * tf.reduce_sum(hidden**2) / len(batch)
            added += 0.3 * tf.reduce_mean(hidden**2)
            loss = task + added if adds else task
        gradients = tape.gradient(loss, model)
        figures.append(
            (float(task), float(added), float(tf.linalg.global_norm(gradients)))
        )
        for variable, gradient in zip(model, gradients):
            variable.assign_sub(PLAIN_SGD["base_lr"] * gradient)
    return model, figures


PLAIN_SGD = {
    "precision": "float64",
    "momentum": 0.0,
    "lr_policy": "constant",
    "base_lr": 0.05,
}


def check_losses_that_the_model_adds_count_once(world):
    start = fit(world, AddsLosses, **PLAIN_SGD | {"base_lr": 1e-300, "num_steps": 1})
    model, figures = plain_sgd(start.weights(), range(4), adds=True)
    for micro_batches in (1, 3):
        ended = fit(
            world,
            AddsLosses,
            **PLAIN_SGD,
            num_steps=4,
            accumulation_steps=micro_batches,
        )
        # Keras makes the regularizers' numbers float32.
        same(ended.weights(), model, 1e-7, 1e-8)
        if world.is_chief:
            logged = []
            for record in ended.records:
                if "loss" in record:
                    logged.append(
                        [record["loss"], record["keras_loss"], record["grad_norm"]]
                    )
            np.testing.assert_allclose(logged, figures, rtol=1e-7)


class Normalized(Small):
    """Batch norm and Keras's dropout: a forward pass moves statistics and a seed."""

    def build_model(self):
        return classifier(
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            dtype="float32",
        )


def check_a_batch_that_cannot_be_read_leaves_no_trace(world):
    bad = batch_ids(3)[0]

    class Unreadable(Normalized):
        def training_example(self, sample, key):
            example = super().training_example(sample, key)
            fine = tf.debugging.Assert(
                sample["id"] != bad, ["sample", sample["id"], "is torn"]
            )
            with tf.control_dependencies([fine]):
                return tf.nest.map_structure(tf.identity, example)

    train_five = partial(
        fit, world, num_steps=5, checkpoint_every=3, deterministic=False
    )
    ended = train_five(Unreadable, f"sample {bad} is torn", code=WRONG_USE)
    good = train_five(Normalized)
    saved = ended.state(3)
    if world.is_chief:
        assert ended.checkpoints == ["step-00000003"]
        assert saved.keys() == good.state(3).keys()
        same(saved.values(), good.state(3).values())
    # The model holds what was saved: nothing moved in the step that was not applied.
    model = [value for name, value in saved.items() if name.startswith("model/")]
    same(model, ended.weights())


def slow_check_float16_that_only_skips_ends_as_diverged(world):
    class Half(Small):
        def build_model(self):
            return classifier(keras.layers.Dense(5), dtype="float32")

    train_half = partial(fit, world, Half, precision="float16", num_steps=10)
    ended = train_half(
        "steps in a row skipped",
        "loss scale",
        "learning rate",
        code=DIVERGED,
        base_lr=1e30,
    )
    assert not world.is_chief or ended.summary["exit_reason"] == "diverged"
    train_half()


def slow_check_a_loss_of_bfloat16_is_added_up_in_float32(world):
    """Logits are of bfloat16, as a model without a float32 head gives them."""
    exact = fit(world, num_steps=2, precision="float32")
    ended = fit(world, num_steps=2, precision="bfloat16")
    if world.is_chief:
        np.testing.assert_allclose(ended.losses, exact.losses, rtol=2e-2)
        # A sum in bfloat16 has two or three digits: float32's mean of 12 losses has more.
        for loss in ended.losses:
            assert np.float32(loss).view(np.uint32) & 0xFFFF, ended.losses


def check_state_that_drifts_apart_is_named_at_the_first_save(world):
    """A statistic of each rank's own share, from the third step on: the trial does not see it."""

    def later(layer, x, training):
        if training:
            layer.steps.assign_add(1.0)
            layer.seen.assign(tf.where(layer.steps > 3, tf.reduce_mean(x), 0.0))
        return x

    class Task(Small):
        def build_model(self):
            def make(layer):
                weight("seen", trainable=False)(layer)
                weight("steps", trainable=False)(layer)

            return classifier(Step(later, make, name="memory"))

    train_six = partial(fit, world, Task, checkpoint_every=2, num_steps=6)
    if world.size == 1:
        train_six()
    else:
        ended = train_six("memory/seen", code=BUG)
        assert ended.checkpoints == ["step-00000002"], ended.checkpoints


def check_moving_statistics_are_alike_after_a_run(world):
    # Others end by the run's own check of the final weights.
    for mode in ("none", "moments"):
        ended = fit(world, Normalized, bn_sync=mode)
        everyone = world.gather_objects(
            world_lib.weights_sha256(ended.model.variables), "hashes"
        )
        assert len({*everyone}) == 1, mode
        is_noted = "normalize with each rank's own batch" in ended.printed
        assert is_noted == (world.size > 1 and world.is_chief), ended.printed


def check_ranks_whose_weights_differ_in_the_end_are_named(world):
    """The run's own check, seen to fail: one rank's weights are changed after the last step."""

    def summarize_drifted(run, ending):
        if run.world.rank == 1:
            run.weights[0].assign_add(tf.ones_like(run.weights[0]))
        summarize(run, None)

    summarize = loop.Run._summarize
    if world.size > 1:
        with mock.patch.object(loop.Run, "_summarize", summarize_drifted):
            fit(world, Small, "final weights on rank 1", code=BUG)


class Ragged(Small):
    """Position k of a row counts k + 1 times its loss, for k up to the row's label."""

    def loss(self, outputs, targets):
        losses, _ = super().loss(outputs, targets)
        place = tf.range(CLASSES)
        losses = losses[:, None] * tf.cast(place + 1, losses.dtype)
        return losses, tf.cast(place <= targets[:, None], losses.dtype)


class Dropped(Ragged):
    def loss(self, outputs, targets):
        losses, weights = super().loss(outputs, targets)
        return losses[weights > 0], weights[weights > 0]


def slow_check_positions_that_a_loss_leaves_out_by_shape_count_as_those_of_weight_0(
    world,
):
    train_four = partial(
        fit,
        world,
        precision="float64",
        momentum=0.0,
        global_batch_size=8,
        num_steps=4,
        accumulation_steps=2,
    )
    whole = train_four(Ragged)
    same(train_four(Dropped).weights(), whole.weights(), 1e-12, 1e-15)


class ActivityLoss(Small):
    def build_model(self):
        self.model = classifier(activity_regularizer=keras.regularizers.L2(0.1))
        return self.model


class CalledTwice(ActivityLoss):
    def loss(self, outputs, targets):
        losses, weights = super().loss(outputs, targets)
        again = self.model(tf.ones([1, FEATURES], outputs.dtype), training=True)
        return losses + 0 * tf.reduce_sum(again), weights


def slow_check_a_loss_that_calls_the_model_again_keeps_what_the_model_added(world):
    once = fit(world, ActivityLoss, precision="float64")
    twice = fit(world, CalledTwice, precision="float64")
    same(twice.weights(), once.weights(), 1e-12)


def check_a_learning_rate_that_is_no_number_or_negative_leaves_no_trace(world):
    for rate, words in (
        (float("nan"), "learning rate nan"),
        (-0.1, "learning rate -0.1"),
    ):

        class Task(Small):
            def schedule(self, config, rate=rate):
                def rate_at(step):
                    # Only in a step: a schedule that is wrong when it is looked at is refused.
                    at_step_1 = rate if tf.inside_function() else 0.1
                    return tf.where(step == 1, at_step_1, 0.1)

                return rate_at

        ended = fit(world, Task, "at step 2", words, code=DIVERGED, checkpoint_every=1)
        assert ended.checkpoints == ["step-00000001"]
        assert all(np.isfinite(value).all() for value in ended.weights())


def measured(world, task=Small, **settings):
    ended = fit(world, task, benchmark=True, num_steps=15, log_every=100, **settings)
    file = ended.folder / "benchmark.json"
    return json.loads(file.read_text()) if world.is_chief else None


def check_a_benchmark_tells_where_the_time_goes(world):
    record = measured(world, acting(lambda *of: time.sleep(0.1), settles=False))
    if not world.is_chief:
        return
    shares = record["shares_of_a_step"]
    assert shares["bookkeeping"] * record["seconds_a_step"] >= 0.1
    assert shares["bookkeeping"] + shares["input"] < 1
    assert (shares["reduction_alone"] is None) == (world.size == 1)
    rates = [rank["samples_per_second"] for rank in record["by_rank"]]
    assert len(rates) == record["ranks"] == world.size
    mean = record["samples_per_second"]["mean"]
    np.testing.assert_allclose(mean, np.mean(np.sum(rates, 0)), rtol=1e-12)
    assert record["warm_up_steps"] == 5
    assert record["steps_a_window"] == 1
    assert record["trained_parameters"] == (FEATURES + 1) * 5 + (5 + 1) * CLASSES
    products = FEATURES * 5 + 5 * CLASSES
    assert record["model_flops"]["training_a_sample"] == 3 * 2 * products
    assert "utilization" not in record["model_flops"]  # it is not known for CPUs
    assert all(rank["host_peak_bytes"] > 2**27 for rank in record["by_rank"])


def slow_check_a_benchmark_sums_as_the_step_does(world):
    if world.size == 1:
        return
    virtual = measured(world, virtual_ranks=2, deterministic=True, cpu_threads=1)
    compressed = measured(world, compression="bf16", accumulation_steps=2)
    if world.is_chief:
        assert 0 < virtual["seconds_of_reduction_alone"] < 60
        assert 0 < compressed["seconds_of_reduction_alone"] < 60


def slow_check_a_rate_is_not_suggested_from_too_few_steps(world):
    printed = fit(world, find_lr=True, num_steps=9).printed
    assert (
        not world.is_chief or "--num_steps=9 is too few: give 10 or more" in printed
    ), printed


def check_other_code_on_another_host_is_refused_by_name(world):
    code = dict(fingerprints.code(project.folder(), project.ENGINE))
    assert {"train.py", "hvdkit/ranks/world.py"} <= code.keys()
    assert not any(name.startswith("tests/") for name in code)
    if world.size == 1:
        return
    if world.rank == 1:
        code |= {"step.py": "other", "tasks/mine.py": "more"}
    with mock.patch.object(fingerprints, "code", lambda *folders: code):
        ended = fit(
            dataclasses.replace(world, local_rank=0),
            Small,
            "step.py, tasks/mine.py on ",
            "(rank 1)",
            code=WRONG_USE,
        )
    assert ended.model is None


def slow_check_other_packages_are_refused_and_other_devices_told(world):
    for name, is_refused in (("keras", True), ("device", False)):
        here = dict(fingerprints.here())
        if world.rank == 1:
            here[name] = "another"
        with mock.patch.object(fingerprints, "here", lambda here=here: here):
            code = WRONG_USE if is_refused and world.size > 1 else DONE
            ended = fit(world, num_steps=1, code=code)
        text = ended.message if is_refused else ended.printed
        if world.size > 1 and (is_refused or world.is_chief):
            assert (
                f"rank 0 and rank 1 on {world_lib.hostname()} differ in {name} ("
                in text
            ), text


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


usual_loop = loop_of(plain, usual)


def check_a_lora_run_starts_a_plain_one_with_merged_kernels(world):
    def tuned():
        model = classifier(keras.layers.Dense(5, activation="tanh"))
        model.layers[1].enable_lora(2, lora_alpha=6.0)
        return model

    first = fit(world, task_with(tuned), num_steps=5, base_lr=0.5)
    kernel, bias, a, b, *head = (v.numpy() for v in first.model.weights)
    assert abs(b).max() > 1e-3
    train_from_it = partial(
        fit, world, num_steps=1, base_lr=1e-12, init_from=str(first.folder)
    )
    plain = train_from_it(Small)
    same(plain.weights(), [kernel + 3.0 * a @ b, bias, *head], 1e-6, 1e-6)
    # And the other way: new factors change nothing.
    again = train_from_it(task_with(tuned), init_from=str(plain.folder))
    kernel, bias, a, b, *head = again.weights()
    same([kernel, bias, *head], plain.weights(), 1e-6, 1e-6)
    assert a.any() and abs(b).max() < 1e-6
    # A model with variables that do not fit is refused.
    train_from_it(
        task_with(classifier),
        "of the model's 2 variables do not fit",
        "dense/kernel ([6, 5] there, [6, 3] here)",
        code=WRONG_USE,
    )


class Numbered(Small):
    """Its first input is the sample's number."""

    def training_example(self, sample, key):
        number = tf.cast(sample["id"], tf.float32)[None]
        return {
            "inputs": tf.concat([number, sample["x"][1:]], 0),
            "targets": sample["y"],
        }


def check_another_global_batch_goes_on_where_the_data_were_left(world):
    """Of 60 samples twice, each is read twice, in steps of 12, 6 and 13 a rank; --epochs=2 ends."""
    read = []

    def until(last):
        def note(run, step, batch):
            read.extend(batch["inputs"][..., 0].numpy().astype(int).ravel().tolist())
            run.after_step(step(batch))
            return run.step == last

        return loop_of(plain, note)

    train_on = partial(
        fit,
        world,
        Numbered,
        base_lr=1e-3,
        num_steps=Epochs(2),
        run_dir=folder(world) / "run",
    )
    first = train_on(own_train=until(2))
    second = train_on(own_train=until(5), global_batch_size=6, accumulation_steps=3)
    third = train_on(own_train=until(None), batch_per_rank=13)
    everyone = []
    for read_by_rank in world.gather_objects(read, "read"):
        everyone += read_by_rank
    assert sorted(everyone) == sorted([*range(60), *range(60)])
    last = 5 + (120 - 24 - 18) // (13 * world.size)
    if world.is_chief:
        note = "steps had 12 samples and have 6: the data go on after the 24 samples so far, the"
        assert note in second.printed and "at step 2 of 18" in second.printed
        assert re.search(r"step 3/18 .* epoch 0.5\n", second.printed), second.printed
        assert re.search(rf"step {last}/{last} .* epoch 2.0\n", third.printed)
        for part in (first, second, third):
            assert "(2 epochs)" in part.printed
        assert third.summary["step"] == last and "steps had" not in first.printed
    message = f"is of step {last}, past --num_steps=1"
    train_on(message, "--resume=never", code=WRONG_USE, num_steps=1)


def changing(change):
    """The usual loop; `change` is applied to each part of a batch."""
    return loop_of(
        plain,
        lambda run, step, batch: run.after_step(
            step(tf.nest.map_structure(change, batch))
        ),
    )


def own_result(result_of, times=1, op=hvd.Sum, **reduction):
    """A step of `times` losses that returns `result_of(loss, what run.update returned)`."""

    def make_step(run):
        @run.function
        def step(batch):
            with tf.GradientTape() as tape:
                loss = sum(run.loss(batch) for _ in range(times))
            tape = hvd.DistributedGradientTape(tape, op=op, **run.reduction | reduction)
            return result_of(loss, run.update(tape.gradient(loss, run.weights)))

        return step

    return make_step


def own_update(change, of_batch=lambda part: part):
    """A step that updates by `change(this rank's gradients)`, of a batch changed by `of_batch`."""

    def make_step(run):
        @run.function
        def step(batch):
            with tf.GradientTape() as tape:
                loss = run.loss(tf.nest.map_structure(of_batch, batch))
            return run.update(change(tape.gradient(loss, run.weights)))

        return step

    return loop_of(make_step, usual)


def just_the_result(loss, result):
    return result


def check_a_train_function_that_would_be_wrong_in_silence_is_refused(world):
    def steps_only(run, step, batch):
        step(batch)

    def reads_only(run):
        for _ in run.batches():
            pass

    def trains_twice(run):
        usual_loop(run)
        usual_loop(run)

    def steps_twice(run, step, batch):
        step(batch)
        usual(run, step, batch)

    def refused(why, own_train, **settings):
        fit(world, Small, why, code=WRONG_USE, own_train=own_train, **settings)

    plain_step = loop_of(train.make_step, usual)
    refused("--compression=bf16 needs run.make", plain_step, compression="bf16")
    wrapped = loop_of(
        lambda run: run.make_step(lambda run: train.make_step(run)), usual
    )
    refused("make_step in train.py is not", wrapped, pack_bytes=99)
    for why, own_train in (
        ("needs one run", loop_of(plain, steps_only)),
        ("needs one run.after", loop_of(plain, lambda run, step, batch: True)),
        ("make the step", reads_only),
        ("call it once", trains_twice),
        ("leave tf.function out", loop_of(lambda run: tf.function(plain(run)), usual)),
        (
            "step(batch) takes what run.batches() gives",
            changing(lambda part: part[:, 1:]),
        ),
        ("step(batch) takes what", changing(lambda part: tf.cast(part, tf.float16))),
        ("step(batch) takes what", changing(lambda part: {"x": part})),
        (
            "returns what it returns",
            loop_of(own_result(lambda loss, result: loss), usual),
        ),
        (
            "'loss'",
            loop_of(own_result(lambda loss, result: result | {"loss": loss}), usual),
        ),
        ("once a step", loop_of(own_result(just_the_result, times=2), usual)),
        ("step(batch) once", loop_of(plain, steps_twice)),
        ("for each of run.weights", own_update(lambda gradients: gradients[1:])),
        ("for each of run.weights", own_update(lambda gradients: gradients[::-1])),
        ("as many samples", own_update(list, lambda part: tf.concat([part, part], 1))),
    ):
        refused(why, own_train)
    if world.size > 1:
        by_hand = own_update(
            lambda gradients: [hvd.allreduce(each) for each in gradients]
        )
        refused("give it op=hvd.Sum", by_hand)
        for op in (hvd.Average, hvd.Min):
            refused(
                "give it op=hvd.Sum", loop_of(own_result(just_the_result, op=op), usual)
            )
        refused("sums no gradients", own_update(list))
        in_float16 = own_result(just_the_result, compression=hvd.Compression.fp16)
        refused("--compression=fp16", loop_of(in_float16, usual))


def check_a_dry_run_shows_and_tries_everything_and_leaves_a_used_folder_as_it_is(world):
    ended = fit(world)

    def times() -> dict:
        files = [path for path in ended.folder.parent.rglob("[!.]*") if path.is_file()]
        return {path: path.stat().st_mtime_ns for path in files}

    before = times()
    printed = fit(world, dry_run=True, run_dir=ended.folder).printed
    if world.is_chief:  # which removes files that were kept for a while
        assert times() == before
        shares = re.findall(
            r"rank \d: (\d+) samples a step; the first step's: ([\d, ]+)", printed
        )
        assert len(shares) == world.size
        shown = []
        for count, ids in shares:
            assert int(count) == 12 // world.size
            shown += re.findall(r"\d+", ids)
        assert len(shown) == len(set(shown)) == min(12, 8 * world.size)
        for words in (
            "--global_batch_size=12",
            "gradients: ",
            "learning rate (",
            "evaluated: loss",
        ):
            assert words in printed, words
        assert (
            "a run would resume from" in printed
            and "dry run: it works; nothing was" in printed
        )


def check_a_batch_may_be_of_numpy_arrays_and_of_variables(world):
    for change in (lambda part: part.numpy(), tf.Variable):
        same(fit(world, own_train=changing(change)).weights(), fit(world).weights())


def check_a_run_that_train_ends_says_so_and_is_saved(world):
    def until_step_2(run, step, batch):
        usual(run, step, batch)
        return run.step == 2

    ended = fit(world, own_train=loop_of(plain, until_step_2), num_steps=6)
    if world.is_chief:
        assert ended.summary["step"] == 2
        assert ended.summary["exit_reason"] == "ended by train.py"
        assert ended.checkpoints == ["step-00000002"]


def check_a_loss_of_no_weight_is_refused(world):
    class Constant(Small):
        def loss(self, outputs, targets):
            return super().loss(tf.stop_gradient(outputs), targets)

    for deterministic in (False, True):
        # Determinism would hold for all checks after this one.
        with mock.patch.object(tf.config.experimental, "enable_op_determinism"):
            why = "the loss depends on none of the model's weights"
            ended = fit(
                world, Constant, why, code=WRONG_USE, deterministic=deterministic
            )
        assert not (ended.folder / "checkpoints").exists()


def check_an_optimizer_that_differs_between_ranks_is_refused(world):
    class Own(Small):
        def optimizer(self, model):
            return keras.optimizers.SGD(self.config.base_lr, momentum=0.1 * world.rank)

    if world.size > 1:
        fit(
            world,
            Own,
            "optimizer of rank 1 differ ",
            "momentum (0.0; 0.1)",
            code=WRONG_USE,
        )


def check_a_profile_of_rank_0_gives_every_rank_the_same_actions(world):
    """Steps are judged where an action settles, so ranks must not differ in them."""
    counts = []
    make_actions = modes.actions

    def counted(*arguments, **keywords):
        actions = make_actions(*arguments, **keywords)
        counts.append(len(actions))
        return actions

    with mock.patch.object(modes, "actions", counted):
        ended = fit(world, Small, profile="2:3")
    assert ended.code == DONE
    assert len(set(world.gather_objects(counts[0], "actions"))) == 1
    if world.is_chief:
        recorded = [path.name for path in (ended.folder / "profile").glob("rank-*")]
        assert recorded == ["rank-0"]


def check_a_run_that_ends_within_the_profiled_steps_says_so(world):
    stop = SimpleNamespace(asked=False)

    def ask(run, step, batch):
        usual(run, step, batch)
        stop.asked = run.step == 2

    ended = fit(
        world,
        Small,
        "saved at step",
        code=PREEMPTED,
        stop_signal=stop,
        own_train=loop_of(plain, ask),
        profile="2:5",
        num_steps=6,
    )
    if world.is_chief:
        assert "no profile: the run ended before step 5" in ended.printed
