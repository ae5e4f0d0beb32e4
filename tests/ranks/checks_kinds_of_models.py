"""Holds hvdkit.train.step.step: trains each of $KINDS on 1 and on 2 ranks.

The outcome is written to $KINDS_OF_MODELS/NAME.npz, which test_kinds_of_models.py compares.
"""

import dataclasses
import gc
import json
import os
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import tensorflow as tf
from kinds_of_models import KINDS, Kind
from small_runs import USUAL, Small, fit, folder, same

from hvdkit.data.pipeline import EvaluationFeed
from hvdkit.data.source import Arrays
from hvdkit.evaluate.evaluator import Evaluator
from hvdkit.ranks import world as world_lib
from hvdkit.run import load_run
from hvdkit.settings import Settings
from hvdkit.stop import DONE
from hvdkit.train.task import checks as task_checks

gc.freeze()  # the collector does not look through imported objects again and again

SETTINGS = USUAL | {
    "precision": "float64",
    "bn_sync": "full",
    "global_batch_size": 7,  # shares of 4 and 3
    "weight_decay": 1e-3,
    "clip_norm": 0.5,
}
del SETTINGS["task"]  # a model that is made anew has a task that is given to it


def task_of(kind: Kind, first: dict[str, np.ndarray]) -> type:
    """The task of a kind; `first` gets the variables as they are before step 1."""

    class Task(Small):
        main_metric = "mean"

        def sources(self):
            return samples(kind.shape, 1, 60), samples(kind.shape, 2, 20)

        def training_example(self, sample, key):
            return {"inputs": kind.inputs(sample["x"], key), "targets": sample["y"]}

        def evaluation_example(self, sample):
            return self.training_example(sample, tf.zeros([2], tf.int32))

        def build_model(self):
            return kind.make()

        def loss(self, outputs, targets):
            """Squared distances, weighted by output and by sample, so that every weight counts."""
            losses = tf.zeros_like(targets)
            for output in tf.nest.flatten(outputs):
                flat = tf.reshape(output, [tf.shape(targets)[0], -1])
                flat = tf.cast(flat, targets.dtype)
                places = tf.cast(tf.range(tf.shape(flat)[1]) + 1, flat.dtype)
                far = tf.square(flat - targets[:, None])
                losses += tf.reduce_sum(far * places, 1) / tf.reduce_sum(places)
            return losses, 1.0 + 0.5 * tf.square(targets)

        def sums(self, outputs, targets):
            sums = []
            for output in tf.nest.flatten(outputs):
                sums.append(tf.reduce_sum(tf.sin(tf.cast(output, tf.float64))))
            return {"sum": tf.add_n(sums)}

        def metrics(self, sums):
            return {"mean": float(sums["sum"] / 20)}

        def actions(self, run):
            first.update(model_arrays(run))
            return []

    return Task


def samples(shape: tuple[int, ...], seed: int, size: int) -> Arrays:
    draws = np.random.default_rng(seed)
    return Arrays(x=draws.normal(size=(size, *shape)), y=draws.normal(size=size))


def model_arrays(run) -> dict[str, np.ndarray]:
    """Copies of the model's variables, by name."""
    arrays = {}
    for name, variable in run.state.variables.items():
        if name.startswith("model/"):
            arrays[name] = variable.numpy().copy()
    return arrays


def evaluated_anew(world, task, settings) -> tuple[dict, dict]:
    """Figures, and variables, of a model made anew with the run's newest checkpoint."""
    config = dataclasses.replace(Settings(), **settings)
    with mock.patch.object(load_run.tasks, "load_task", task):
        run, _ = load_run.restored(config, world, "last")
    reader = task_checks.reader(run.task, run.val_source, False)
    feed = EvaluationFeed(
        reader, config.eval_batch_size, rank=world.rank, size=world.size
    )
    tf.config.run_functions_eagerly(True)  # a trace costs more than three batches
    try:
        figures = Evaluator(run, feed).run(lambda: False).figures
    finally:
        tf.config.run_functions_eagerly(False)
    return figures, model_arrays(run)


def train(world, name: str, kind: Kind) -> None:
    world_lib.set_up(world, Settings())
    first: dict[str, np.ndarray] = {}
    settings = SETTINGS | kind.settings | {"run_dir": str(folder(world) / "run")}
    task = task_of(kind, first)
    ended = fit(world, task, code=None, **settings)
    outcome = {"message": ended.message, "code": ended.code, "printed": ended.printed}
    for variable, value in first.items():
        outcome[f"first/{variable}"] = value
    if ended.code == DONE and world.size == 1:
        figures, variables = evaluated_anew(world, task, settings)
        for figure, value in figures.items():
            outcome[f"anew/{figure}"] = value
        same(ended.weights(), variables.values())
    if world.is_chief:
        if ended.code == DONE:
            outcome["figure/loss"] = ended.summary["eval_loss"]
            outcome["figure/mean"] = ended.summary["eval_mean"]
            for variable, value in zip(first, ended.weights(), strict=True):
                outcome[f"last/{variable}"] = value
        np.savez(Path(os.environ["KINDS_OF_MODELS"]) / f"{name}.npz", **outcome)


# ranks.run_checks runs functions named check_*: here is one for each kind.
for _name in json.loads(os.environ["KINDS"]):
    globals()[f"check_{_name}"] = partial(train, name=_name, kind=KINDS[_name])


def check_ranks_draw_differently(world):
    """At one place of their shares; rank 0 draws what it would draw alone."""
    masks = []

    class Drops(task_of(KINDS["dropout, subclassed"], first={})):
        def actions(self, run):
            masks.append(np.asarray(run.model.parts[1](tf.ones([4, 8]), training=True)))
            return []

    fit(world, Drops, **SETTINGS)
    everyone = world.gather_objects(masks[0] > 0, "masks")
    assert 0 < everyone[0].mean() < 1
    assert all(not np.array_equal(everyone[0], other) for other in everyone[1:])
