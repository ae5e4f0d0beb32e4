"""Holds hvdkit.train.step.state on real ranks: state beside the gradient, against plain Keras."""

import dataclasses
from functools import partial
from typing import ClassVar
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from checks_tasks import refused
from small_runs import (
    CLASSES,
    FEATURES,
    Small,
    acting,
    classifier,
    fit,
    folder,
    numbers,
    same,
)

from hvdkit.data.sampler import Sampler
from hvdkit.ranks.world import set_precision
from hvdkit.run import load_run
from hvdkit.settings import Settings
from hvdkit.stop import DIVERGED, WRONG_USE

SIZE = 13  # samples, all in every batch: shares of 7 and 6
WHOLE = {
    "global_batch_size": SIZE,
    "lr_policy": "constant",
    "momentum": 0.0,
    "base_lr": 0.1,
    "precision": "float64",
    "checkpoint_every": 1,
    "warmup_steps": 0,
}


def arrays(seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and the labels of small_runs.numbers."""
    samples = numbers(seed, size)._arrays
    return np.float64(samples["x"]), samples["y"]


X, Y = arrays(1, SIZE)


class Whole(Small):
    """Every step takes all samples, so that plain Keras needs no order of them."""

    size = SIZE

    def sources(self):
        return numbers(1, self.size), numbers(2, 5)

    def training_example(self, sample, key):
        return {"inputs": tf.cast(sample["x"], tf.float64), "targets": sample["y"]}

    def evaluation_example(self, sample):
        return self.training_example(sample, None)


def plain(model: keras.Model, batches=((X, Y),) * 3) -> list[np.ndarray]:
    """The same steps by Keras alone, on this process."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    for x, y in batches:
        model.train_on_batch(tf.constant(x), y)
    return [v.numpy() for v in model.trainable_variables]


def slow_check_layers_compute_with_the_constants_of_restored_and_broadcast_variables(
    world,
):
    """Adapted on rank 0 only, and not at all when it resumes or is evaluated."""
    adapted = [True]

    class Task(Whole):
        def build_model(self):
            first = keras.layers.Normalization()
            if adapted[0]:
                first.adapt(1000 * X)
            rescaled = keras.layers.Rescaling(1000.0)
            return classifier(rescaled, first, keras.layers.Dense(5, activation="tanh"))

    keras.utils.set_random_seed(1)
    train = partial(
        fit, world, Task, seed=1, run_dir=str(folder(world) / "run"), **WHOLE
    )
    adapted[0] = world.is_chief
    train(num_steps=1)
    adapted[0] = False
    ended = train(num_steps=3)
    adapted[0] = True
    set_precision("float64")
    keras.utils.set_random_seed(1)
    model = Task(None).build_model()
    same([v.numpy() for v in ended.model.trainable_variables], plain(model), 1e-9)
    if world.is_chief:
        x, y = arrays(2, 5)
        expected = model.evaluate(x, y, verbose=0)
        np.testing.assert_allclose(ended.summary["eval_loss"], expected, 1e-6)


def slow_check_vocabularies_that_differ_are_refused(world):
    def task(vocabulary):
        class Task(Small):
            def build_model(self):
                x = keras.Input((FEATURES,))
                lookup = keras.layers.IntegerLookup(vocabulary=vocabulary)
                ids = lookup(keras.ops.cast(x, "int64"))
                return keras.Model(
                    x, keras.layers.Dense(CLASSES)(keras.ops.cast(ids, "float32"))
                )

        return Task

    run_dir = folder(world) / "run"
    fit(world, task([1, 2, 3]), run_dir=run_dir)
    fit(
        world,
        task([1, 2, 4]),
        "integer_lookup",
        "vocabulary",
        code=WRONG_USE,
        run_dir=run_dir,
        num_steps=4,
    )
    if world.size > 1:
        refused(world, task([1, 2, 3 + world.rank]), "integer_lookup", "vocabulary")


def check_trainable_changed_in_mid_run_is_refused_at_that_step(world):
    def unfreeze(run, step, result):
        run.model.layers[1].trainable = False

    ended = fit(
        world,
        acting(unfreeze, 2),
        "`trainable` changed",
        "/kernel",
        "--init_from",
        code=WRONG_USE,
        num_steps=5,
    )
    if world.is_chief:
        assert ended.summary["step"] == 2 and ended.checkpoints == ["step-00000002"]


def slow_check_weights_of_16_bits_are_refused(world):
    class Half(Small):
        def build_model(self):
            return classifier(
                keras.layers.Dense(5, dtype=keras.DTypePolicy("bfloat16"))
            )

    refused(world, Half, "with --precision=float32 dense", "in bfloat16")


class Teacher(Whole):
    """Evaluates by a mean teacher, which an action moves."""

    def __init__(self, config):
        super().__init__(config)
        keras.utils.set_random_seed(5)
        self.parts = {"teacher": Whole(None).build_model()}

    def predict(self, model, inputs):
        return self.parts["teacher"](inputs, training=False)

    def move(run, step, result):
        for slow, fast in zip(run.task.parts["teacher"].variables, run.model.variables):
            slow.assign(0.5 * slow + 0.5 * fast)

    actions = acting(move).actions


def check_what_the_task_holds_is_broadcast_saved_and_restored(world):
    run_dir = str(folder(world) / "run")
    whole = fit(world, Teacher, num_steps=4, **WHOLE)
    fit(world, Teacher, num_steps=2, run_dir=run_dir, **WHOLE)

    class Other(Teacher):
        """Another process starts with other values, and each rank with its own."""

        def __init__(self, config):
            super().__init__(config)
            for variable in self.parts["teacher"].variables:
                variable.assign(variable + 1.0 + world.rank)

    ended = fit(world, Other, num_steps=4, run_dir=run_dir, **WHOLE)
    if world.is_chief:
        assert ended.summary["eval_loss"] == whole.summary["eval_loss"]
        names = [name for name in ended.state(4) if name.startswith("task/")]
        assert names[0] == "task/parts/teacher/0000/dense/kernel", names
    config = dataclasses.replace(Settings(), **WHOLE, run_dir=run_dir, task="small")
    with mock.patch.object(load_run.tasks, "load_task", Other):
        run, _ = load_run.restored(config, world, "last")
    assert run.config.train_split == "train", (
        "a task may learn from it how to scale its inputs"
    )
    if world.is_chief:
        restored = [
            variable.numpy() for variable in run.task.parts["teacher"].variables
        ]
        saved = [ended.state(4)[name] for name in names]
        same(restored, saved)


def check_what_evaluation_reads_and_nobody_holds_is_refused(world):
    hidden = tf.Variable(1.0, trainable=False, name="hidden")

    class Scaled(Small):
        def predict(self, model, inputs):
            return model(inputs) * hidden

    refused(world, Scaled, "the evaluation uses", "hidden", "attribute")


class Keeps(keras.layers.Layer):
    """MoCo's queue and slow copy, the counts of VQ-VAE's codebook, a range, counters."""

    combines: ClassVar = {
        "queue": "concatenate",
        "counts": ("sum", 0.9),
        "count": "sum",
        "mean": "mean",
        "updates": "mean",
        "slow": "same",
        "highest": "max",
        "lowest": "min",
    }

    def build(self, shape):
        shapes = {
            "queue": (20, 6),
            "counts": (6,),
            "mean": (6,),
            "highest": (),
            "lowest": (),
        }
        for name, size in shapes.items():
            setattr(self, name, self.add_weight(shape=size, name=name, trainable=False))
        self.fast = self.add_weight(shape=(6,), name="fast", initializer="ones")
        self.slow = self.add_weight(shape=(6,), name="slow", trainable=False)
        for name in ("count", "updates"):
            counter = self.add_weight(
                shape=(), dtype="int64", name=name, trainable=False
            )
            setattr(self, name, counter)

    def call(self, x, training=False):
        pulled = (
            x * self.fast
            + 0.1 * tf.reduce_mean(self.queue.value, 0)
            + 0.1 * self.counts
        )
        pulled += 0.1 * self.slow
        if training:
            self.slow.assign(0.9 * self.slow + 0.1 * self.fast)
            self.queue.assign(tf.concat([self.queue.value, x], 0)[-20:])
            self.counts.assign(0.9 * self.counts + 0.1 * tf.reduce_sum(x, 0))
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))
            self.highest.assign(tf.maximum(self.highest, tf.reduce_max(x)))
            self.lowest.assign(tf.minimum(self.lowest, tf.reduce_min(x)))
            self.count.assign_add(tf.shape(x, tf.int64)[0])
            self.updates.assign_add(1)
        return pulled


class Keeping(Whole):
    def build_model(self):
        return classifier(
            keras.layers.Dense(FEATURES, activation="tanh"),
            Keeps(),
            keras.layers.Dense(5, activation="tanh"),
        )


class Keeping12(Keeping):
    size = 12


def check_state_combines_as_one_process_has_it(world):
    """Resumed once on real ranks; virtual ones weigh shares alike."""
    train = partial(fit, world, seed=1, **WHOLE)
    run_dir = str(folder(world) / "real")
    train(Keeping, num_steps=2, run_dir=run_dir)
    real = train(Keeping, num_steps=3, run_dir=run_dir)
    virtual = train(Keeping12, num_steps=3, virtual_ranks=3, global_batch_size=12)
    for ended, task in ((real, Keeping), (virtual, Keeping12)):
        set_precision("float64")
        keras.utils.set_random_seed(1)
        model = task(None).build_model()
        x, y = arrays(1, task.size)
        sampler = Sampler(task.size, task.size, micro_batches=1, seed=1, rank=0, size=1)
        batches = []
        for step in range(3):
            ids = sampler.local_samples(tf.constant(step, tf.int64))[0].numpy().ravel()
            batches.append((x[ids], y[ids]))
        plain(model, batches)
        same(ended.weights(), [v.numpy() for v in model.variables], 1e-9, 1e-12)


class Centred(keras.layers.Layer):
    """Inputs without the mean that earlier batches had."""

    combines: ClassVar = {"mean": "mean"}

    def build(self, shape):
        self.mean = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False, name="mean"
        )

    def call(self, x, training=False):
        centred = x - self.mean
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * keras.ops.mean(x, axis=0))
        return centred


def check_a_micro_batch_must_not_read_what_samples_of_another_changed(world):
    """Each rank would read its own; what a pass changes alike on all ranks may be read."""

    class Task(Small):
        def build_model(self):
            return classifier(Centred())

    class Turned(Small):
        def build_model(self):
            dense = keras.layers.Dense(FEATURES)
            return classifier(keras.layers.SpectralNormalization(dense))

    fit(world, Turned, accumulation_steps=2)
    if world.size == 1:
        fit(world, Task, accumulation_steps=2)
        return
    fit(world, Task)
    refused(world, Task, "centred/mean", "--accumulation_steps=1", accumulation_steps=2)


class Codes(keras.layers.Layer):
    """Trained factors that a forward pass moves too, as codes of a vector quantization."""

    def build(self, shape):
        self.codes = self.add_weight(
            shape=(shape[-1],), initializer="ones", name="codes"
        )

    def call(self, x, training=False):
        scaled = x * self.codes
        if training:
            self.codes.assign(0.5 * self.codes + 0.5 * keras.ops.mean(x, axis=0))
        return scaled


def check_a_weight_that_a_forward_pass_sets_is_state(world):
    """It comes together by a rule or is refused, and a step that is skipped leaves it alone."""

    class Task(Small):
        def sources(self):
            training, validation = numbers(1, 60), numbers(2, 20)
            training._arrays["x"][7] = np.nan  # one step of each epoch
            return training, validation

        def build_model(self):
            return classifier(Codes())

    class Ruled(Task):
        combines: ClassVar = {"*/codes": "mean"}

    ended = fit(world, Ruled, num_steps=5, global_batch_size=12)
    if world.is_chief:
        assert ended.summary["skipped_steps"] == 1
    assert all(np.isfinite(weight).all() for weight in ended.weights())
    if world.size > 1:
        refused(world, Task, "codes", "`combines`")


class Counts(keras.layers.Layer):
    """How often each input was positive, which nothing reads."""

    combines = "sum"

    def build(self, shape):
        self.seen = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False, name="seen"
        )

    def call(self, x, training=False):
        if training:
            positive = keras.ops.cast(x > 0, self.seen.dtype)
            self.seen.assign_add(keras.ops.sum(positive, axis=0))
        return x


def check_accumulation_takes_draws_and_counters_beside_state_that_is_read(world):
    """No micro-batch reads the counter; others draw other numbers, and other kernels are used."""

    class Task(Small):
        def build_model(self):
            dense = keras.layers.Dense(FEATURES, activity_regularizer="l2")
            return classifier(
                keras.layers.SpectralNormalization(dense),
                Counts(),
                keras.layers.Dropout(0.5),
            )

    fit(world, Task, accumulation_steps=2)


class Redrawn(keras.layers.Layer):
    """A random projection, drawn anew at each step."""

    def __init__(self, seeds: type):
        super().__init__()
        self.seeds = seeds(3)

    def build(self, shape):
        self.projection = self.add_weight(
            shape=(shape[-1], 5),
            initializer="zeros",
            trainable=False,
            name="projection",
        )

    def call(self, x, training=False):
        if training:
            drawn = keras.random.normal(self.projection.shape, seed=self.seeds)
            self.projection.assign(drawn)
        return x @ self.projection


def check_state_of_random_numbers_is_drawn_alike_on_all_ranks(world):
    class SharedSeeds(keras.random.SeedGenerator):
        pass

    def task(seeds: type) -> type:
        class Task(Small):
            def build_model(self):
                return classifier(Redrawn(seeds))

        return Task

    fit(world, task(SharedSeeds))
    own = task(keras.random.SeedGenerator)
    if world.size > 1:
        refused(world, own, "projection", "SharedSeeds")
    else:
        refused(world, own, "projection", "SharedSeeds", virtual_ranks=2)


def check_frequencies_of_words_are_part_of_a_vocabulary(world):
    """TextVectorization computes with a constant that no variable of a checkpoint holds."""

    def task(frequencies):
        class Task(Small):
            def build_model(self):
                x = keras.Input((FEATURES,))
                lookup = keras.layers.IntegerLookup(
                    vocabulary=[1, 2],
                    idf_weights=frequencies,
                    output_mode="tf_idf",
                    name="words",
                )
                counts = lookup(keras.ops.cast(x, "int64"))
                return keras.Model(x, keras.layers.Dense(CLASSES)(counts))

        return Task

    run_dir = folder(world) / "run"
    fit(world, task([1.0, 2.0]), run_dir=run_dir)
    fit(
        world,
        task([3.0, 2.0]),
        *("words", "vocabulary"),
        code=WRONG_USE,
        run_dir=run_dir,
        num_steps=4,
    )


class Newest(keras.layers.Layer):
    """The newest samples' hashes, which have more digits than a float64."""

    combines = "concatenate"

    def build(self, shape):
        self.hashes = self.add_weight(
            shape=(12,),
            dtype="int64",
            initializer="zeros",
            trainable=False,
            name="hashes",
        )

    def call(self, x, training=False):
        if training:
            hashes = 2**62 + tf.cast(tf.round(1000 * x[:, 0]), tf.int64)
            self.hashes.assign(tf.concat([self.hashes, hashes], 0)[-12:])
        return x


def check_virtual_ranks_keep_whole_numbers_to_the_last_digit(world):
    class Task(Small):
        def build_model(self):
            return classifier(Newest())

    ended = fit(world, Task, num_steps=1, virtual_ranks=3, global_batch_size=12)
    hashes = next(v.numpy() for v in ended.model.variables if v.name == "hashes")
    known = 2**62 + np.round(1000 * numbers(1, 60)._arrays["x"][:, 0]).astype(np.int64)
    assert set(hashes.tolist()) <= set(known.tolist())


def slow_check_state_without_a_rule_is_refused_before_the_first_step(world):
    def keeping(rules: dict) -> type:
        class Ruled(Keeping):
            combines: ClassVar = rules

        return Ruled

    def other(name: str, rule) -> type:
        """All rules are right but the one for `name`."""
        return keeping({Keeps: Keeps.combines | {name: rule}})

    for more in ({}, {"virtual_ranks": 3}):
        refuse = partial(refused, world, **WHOLE | more)
        if world.size > 1 or more:
            refuse(keeping({Keeps: {}}), "queue", "counts", "`combines`", "concatenate")
            refuse(other("mean", "same"), "mean by the samples")
            for name, rule in (
                ("count", "max"),
                ("queue", ("concatenate", 2)),
                ("counts", "sum"),
            ):
                refuse(other(name, rule), f"{name} combines by", "another rule")
        # It is right by its own rule, and depends on the ranks: a note.
        if world.size > 1:
            noted = fit(world, other("count", "mean"), num_steps=1, **WHOLE | more)
            assert (
                "count is no mean of its samples" in noted.printed or not world.is_chief
            )
    refused(world, keeping({"*/nothing": "sum"}), "*/nothing", **WHOLE)
    if world.size > 1:
        refused(world, Keeping, "--accumulation_steps", "queue", accumulation_steps=2)


def slow_check_float8_is_kerass(world):
    """Its scales are overwritten with the largest amax: neither summed, unscaled nor clipped."""

    class Quantized(Whole):
        def build_model(self):
            model = classifier(keras.layers.Dense(8, activation="tanh"))
            model.layers[1].quantize("float8")
            return model

    class Quantized12(Quantized):
        size = 12

    settings = WHOLE | {"precision": "float32", "seed": 1}
    for task, flags in (
        (Quantized, {}),
        (Quantized, {"clip_norm": 1e3}),
        (Quantized12, {"accumulation_steps": 2, "global_batch_size": 12}),
    ):
        train = partial(
            fit, world, task, run_dir=str(folder(world) / "run"), **settings | flags
        )
        train(num_steps=2)
        ended = train(num_steps=3)  # goes on from step 2
        keras.utils.set_random_seed(1)
        model = task(None).build_model()
        x, y = arrays(1, task.size)
        plain(model, [(np.float32(x), y)] * 3)
        same(ended.weights(), [v.numpy() for v in model.variables], 2e-3, 2e-4)


def check_labels_that_are_no_number_at_weight_0_are_named(world):
    """The loss is finite, its gradient 0 * NaN."""

    class Task(Small):
        def loss(self, outputs, targets):
            y = tf.where(targets == 0, np.nan, tf.cast(targets, tf.float32))
            return tf.square(outputs[:, 0] - y), tf.cast(targets > 0, tf.float32)

    fit(world, Task, "gradient norm nan", "weight is 0", "tf.where", code=DIVERGED)
