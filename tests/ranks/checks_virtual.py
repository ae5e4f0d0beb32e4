"""Holds hvdkit.train.virtual: runs with virtual ranks, on several numbers of real ranks.

test_virtual.py starts them and compares the $VIRTUAL_RUNS/LAUNCH.json that each launch writes.
"""

import json
import math
import os
from functools import partial
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from checks_evaluation import StopsAt
from small_models import Step
from small_runs import CLASSES, FEATURES, Small, classifier, fit, task_with

from hvdkit.evaluate import metrics
from hvdkit.observe.records import TIMES
from hvdkit.ranks import world as world_lib
from hvdkit.settings import Settings
from hvdkit.stop import DIVERGED, PREEMPTED, WRONG_USE
from hvdkit.train.step import across

FOLDER = Path(os.environ.get("VIRTUAL_RUNS", "."))
LAUNCH = os.environ.get("VIRTUAL_LAUNCH", "")
# Checks that need more than one rank, and no third one, run in this launch only.
TWO = LAUNCH == "2-mpirun"

VIRTUAL = {
    "virtual_ranks": 4,
    "deterministic": True,
    "cpu_threads": 1,
    "global_batch_size": 10,  # shares of 2, 3, 2 and 3
    "num_steps": 4,
    "weight_decay": 1e-3,
}


class Always(keras.layers.Layer):
    """Draws in evaluation too, as the middle of a variational autoencoder does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.generator = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + 0.1 * keras.random.normal(
            tf.shape(x), dtype=x.dtype, seed=self.generator
        )


class Ordinary(Small):
    """Batch norm, dropout twice, noise, a regularizer, an embedding, and weights that differ."""

    def build_model(self):
        x = keras.Input((FEATURES,))
        l2 = keras.regularizers.L2(0.01)
        y = keras.layers.Dense(32, activation="relu", kernel_regularizer=l2)(x)
        y = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(y))
        ids = keras.layers.Lambda(lambda t: tf.cast(t > 0, tf.int32))(x)
        more = keras.layers.Flatten()(keras.layers.Embedding(2, 4)(ids))
        y = keras.layers.Concatenate()([y, keras.layers.GaussianNoise(0.1)(more)])
        y = keras.layers.BatchNormalization()(
            keras.layers.Dense(32, activation="relu")(y)
        )
        y = Always()(keras.layers.Dropout(0.2)(y))
        return keras.Model(x, keras.layers.Dense(CLASSES, dtype="float32")(y))

    def loss(self, outputs, targets):
        losses, weights = super().loss(outputs, targets)
        return losses, weights * tf.gather([1.0, 0.0, 2.5], targets)

    def sums(self, outputs, targets):
        # A float: its sum over batches depends on their order, if it is rounded.
        return super().sums(outputs, targets) | {
            "logits": tf.reduce_sum(tf.sin(outputs))
        }

    def metrics(self, sums):
        return super().metrics(sums) | {"logits": float(sums["logits"])}


class Gathers(Ordinary):
    """Its loss compares each sample with all of the global batch."""

    def loss(self, outputs, targets):
        losses, weights = super().loss(outputs, targets)
        logits = outputs @ tf.transpose(
            across.gather(tf.math.l2_normalize(outputs, -1))
        )
        alike = tf.cast(targets[:, None] == across.gather(targets)[None], logits.dtype)
        labels = alike / tf.reduce_sum(alike, -1, keepdims=True)
        apart = tf.nn.softmax_cross_entropy_with_logits(labels, logits)
        wide = across.gather(tf.cast(outputs, tf.float64))  # of another type
        apart += 0.1 * tf.cast(tf.reduce_mean(tf.square(wide)), apart.dtype)
        return {"own": (losses, weights), "apart": (apart, tf.ones_like(apart))}


RUNS = {
    "gathers": {"precision": "float16", "optimizer": "adam", "num_steps": 3},
    "sgd": {
        "global_batch_size": 20,
        "accumulation_steps": 2,
        "clip_norm": 0.5,
        "ema_decay": 0.5,
    },
    "adam": {"optimizer": "adam", "eval_every": 2},
    "bfloat16": {"precision": "bfloat16", "optimizer": "lamb", "global_batch_size": 8},
    "float16": {"precision": "float16", "optimizer": "adam", "global_batch_size": 8},
    "jit": {
        "jit": True,
        "accumulation_steps": 2,
        "global_batch_size": 18,
        "num_steps": 2,
    },
}


def begin(world):
    """Threads are chosen before the first operation; other modules' helpers would choose theirs."""
    world_lib.set_up(world, Settings(cpu_threads=1))


def train(world, name, task=Ordinary, *words, **settings):
    """One of RUNS by `name`, or a part of one (""); others do without the slow graph optimizer."""
    begin(world)
    without_optimizer = name not in ("", *RUNS)
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": without_optimizer}
    )
    run_dir = FOLDER / f"{LAUNCH}-{name}"
    return fit(world, task, *words, **{"run_dir": run_dir} | VIRTUAL | settings)


def leave(world, name, ended):
    """Writes what must be equal: fingerprint of all variables, and the records without times."""
    if world.is_chief:
        path = FOLDER / f"{LAUNCH}.json"
        runs = json.loads(path.read_text()) if path.exists() else {}
        records = [without_times(record) for record in ended.records]
        runs[name] = [ended.summary["weights_sha256"], records]
        path.write_text(json.dumps(runs))


def without_times(record: dict) -> dict:
    return {name: value for name, value in record.items() if not name.startswith(TIMES)}


def check_runs_of_every_kind(world):
    for name in json.loads(os.environ["VIRTUAL_NAMES"]):
        task = Gathers if name == "gathers" else Ordinary
        ended = train(world, name, task, **RUNS[name])
        assert all(np.isfinite(array).all() for array in ended.weights())
        leave(world, name, ended)


def check_a_run_goes_on_with_another_number_of_ranks(world):
    """2 ranks begin it, 3 end it; the test compares it with the run "adam"."""
    train_on = partial(train, world, "", run_dir=FOLDER / "handed-on", **RUNS["adam"])
    if TWO:
        train_on(stop_signal=StopsAt(world, 2), code=PREEMPTED)
    if LAUNCH == "3-gloo":
        leave(world, "handed on", train_on())


def check_sums_of_an_evaluation_are_rounded_once(world):
    begin(world)
    values = np.random.default_rng(2).normal(size=30) * 10.0 ** np.arange(-15, 15)
    values[3] = -values[20]
    zeros = {
        "x": np.zeros(()),
        "none": np.zeros(()),
        "huge": np.zeros(()),
        "bad": np.zeros(2),
        "n": np.zeros((), np.int64),
    }
    sums = metrics.Sums(world, zeros, exact=True)
    for place in range(world.rank, len(values), world.size):
        batch = {
            "x": np.asarray(values[place]),
            "none": np.asarray(0.0),
            "huge": np.asarray(1.7e308 if place < 2 else 0.0),
            "bad": np.where(np.arange(1, 3) == place, [np.nan, np.inf], 1.0),
            "n": np.asarray(place, np.int64),
        }
        sums.add(batch)
    totals = sums.over_ranks()
    assert totals["x"] == math.fsum(values)
    assert totals["none"] == 0.0 and np.isposinf(totals["huge"])
    assert np.isnan(totals["bad"][0]) and np.isposinf(totals["bad"][1])
    assert totals["n"] == sum(range(30)) and totals["n"].dtype == np.int64


class Draws(keras.layers.Layer):
    """Remembers what it drew and its square: their means tell whether the draws were alike."""

    combines = "mean"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.generator = keras.random.SeedGenerator(1)

    def build(self, shape):
        self.drawn = self.add_weight(shape=(2,), trainable=False, name="drawn")

    def call(self, x, training=False):
        if training:
            draw = keras.random.uniform((), seed=self.generator)
            self.drawn.assign(tf.stack([draw, draw**2]))
        return x


HELD = (1e-25, 3e-15, np.inf)


class Holds(keras.layers.Layer):
    """State that nothing changes, of sizes that the grids do not hold."""

    def build(self, shape):
        for value in HELD:
            start = keras.initializers.Constant(value)
            self.add_weight((), start, trainable=False, name="held")

    def call(self, x):
        return x + 0.0 * sum(self.weights[:2])


def check_state_is_drawn_and_held(world):
    if not TWO:
        return
    task = task_with(lambda: classifier(Draws(), Draws(), Holds()))
    ended = train(world, "keeps", task, num_steps=3, checkpoint_every=1)
    drawn = []
    seeds = []
    for step in (1, 2, 3):
        for name, array in ended.state(step).items():
            if name.endswith("/drawn"):
                drawn.append(array)
            if "seed_generator" in name:
                seeds.append(array.tolist())
    # Every virtual rank, step and generator draws its own.
    means = [float(mean) for mean, _ in drawn]
    assert len(set(means)) == len(means) == 6, means
    # Of four draws in [0, 1) that have nothing in common the variance is far from 0.
    assert all(square - mean**2 > 1e-3 for mean, square in drawn), drawn
    assert seeds == [[1, 0] for _ in range(6)], seeds
    held = [
        variable.numpy()
        for variable in ended.model.variables
        if variable.name == "held"
    ]
    assert held == np.float32(HELD).tolist()


def adds(layer, x, training):
    layer.add_loss(tf.reduce_mean(tf.square(x - 1.0)))
    return tf.stop_gradient(x)


class OnlyAdds(Small):
    """The task's loss depends on no variable, and its weights are not 1."""

    def build_model(self):
        x = keras.Input((FEATURES,))
        return keras.Model(x, Step(adds)(keras.layers.Dense(CLASSES)(x)))

    def loss(self, outputs, targets):
        losses, weights = super().loss(outputs, targets)
        return losses, weights * tf.gather([1.0, 0.0, 2.5], targets)


def check_a_loss_of_no_variable_counts_as_without_virtual_ranks(world):
    if not TWO:
        return
    figures = {}
    for count in (0, 4):
        ended = train(
            world, f"adds-{count}", OnlyAdds, virtual_ranks=count, num_steps=2
        )
        records = [record for record in ended.records if "loss" in record]
        figures[count] = [
            [record["keras_loss"], record["grad_norm"]] for record in records
        ]
    assert np.allclose(figures[0], figures[4], rtol=1e-5)


def ends(world, task, code, *words, **settings):
    if TWO:
        ended = train(
            world, "ends", task, *words, code=code, resume="never", **settings
        )
        assert all(np.isfinite(array).all() for array in ended.weights())


def scaled(factor: float) -> type:
    class Scaled(Small):
        def loss(self, outputs, targets):
            losses, weights = super().loss(outputs, targets)
            return losses * factor, weights

    return Scaled


def check_a_gradient_beyond_the_grid_ends_the_run_and_is_told(world):
    ends(world, scaled(1e9), DIVERGED, "at step 1", "fixed point", "--base_lr")


def check_a_gradient_that_is_no_number_ends_the_run_as_without_virtual_ranks(world):
    ends(world, scaled(math.inf), DIVERGED, "diverged at step 1", max_bad_steps=1)


def check_gradients_that_round_to_nothing_are_told_once(world):
    if TWO:
        printed = train(world, "flat", scaled(1e-16)).printed
        notes = printed.count("all gradients of a virtual rank are smaller than 6e-14")
        assert notes == world.is_chief, printed


def check_a_forward_pass_that_assigns_what_is_trained_is_refused(world):
    spectral = keras.layers.SpectralNormalization
    task = task_with(lambda: classifier(spectral(keras.layers.Dense(9))))
    ends(world, task, WRONG_USE, "assigns", "/kernel", "SpectralNormalization")


def check_ranks_with_other_kernels_are_refused(world):
    if TWO:
        switch = {"TF_ENABLE_ONEDNN_OPTS": "0"} if world.rank else {}
        with mock.patch.dict(os.environ, switch):
            ended = train(
                world,
                "other kernels",
                Small,
                "differ in switches (none; TF_ENABLE_ONEDNN_OPTS=0)",
                "--virtual_ranks",
                code=WRONG_USE,
            )
        assert not ended.folder.exists()


def check_float16_skips_steps_until_its_scale_fits(world):
    if TWO:
        ended = train(
            world, "steep", scaled(1e3), precision="float16", base_lr=1e-6, num_steps=20
        )
        assert not world.is_chief or 0 < ended.summary["skipped_steps"] <= 10, (
            ended.summary
        )
