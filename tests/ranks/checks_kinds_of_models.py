"""Trains each of $KINDS on 1 and on 2 ranks; what came of it is kept in $KINDS_OF_MODELS/NAME.npz."""

import dataclasses
import gc
import json
import os
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

gc.freeze()  # what was imported is not looked through again and again

SETTINGS = {n: v for n, v in USUAL.items() if n != "task"} | {
    "precision": "float64",
    "bn_sync": "full",
    "global_batch_size": 7,  # shares of 4 and 3
    "weight_decay": 1e-3,
    "clip_norm": 0.5,
}


def task_of(kind: Kind, first: dict[str, np.ndarray]) -> type:
    """The task of a kind; `first` gets the variables as they are before step 1."""

    class Task(Small):
        main_metric = "mean"

        def sources(self):
            return tuple(samples(kind.shape, seed, size) for seed, size in ((1, 60), (2, 20)))

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
            flat = [tf.cast(t, tf.float64) for t in tf.nest.flatten(outputs)]
            return {"sum": tf.add_n([tf.reduce_sum(tf.sin(t)) for t in flat])}

        def metrics(self, sums):
            return {"mean": float(sums["sum"] / 20)}

        def actions(self, run):
            first.update({n: v.numpy().copy() for n, v in of_model(run)})
            return []

    return Task


def samples(shape: tuple[int, ...], seed: int, size: int) -> Arrays:
    draws = np.random.default_rng(seed)
    return Arrays(x=draws.normal(size=(size, *shape)), y=draws.normal(size=size))


def of_model(run):
    return [(n, v) for n, v in run.state.variables.items() if n.startswith("model/")]


def evaluated_anew(world, task, settings) -> tuple[dict, dict]:
    """Figures, and variables, of a model made anew with the run's newest checkpoint."""
    config = dataclasses.replace(Settings(), **settings)
    with mock.patch.object(load_run.tasks, "load_task", task):
        run, _ = load_run.restored(config, world, "last")
    reader, size = task_checks.reader(run.task, run.val_source, False), config.eval_batch_size
    feed = EvaluationFeed(reader, size, rank=world.rank, size=world.size)
    tf.config.run_functions_eagerly(True)  # a trace costs more than three batches
    figures = Evaluator(run, feed).run(lambda: False).figures
    tf.config.run_functions_eagerly(False)
    return figures, {n: v.numpy() for n, v in of_model(run)}


def train(world, name: str, kind: Kind) -> None:
    world_lib.set_up(world, Settings())
    first: dict[str, np.ndarray] = {}
    settings = SETTINGS | kind.settings | {"run_dir": str(folder(world) / "run")}
    task = task_of(kind, first)
    ended = fit(world, task, code=None, **settings)
    kept = {"message": ended.message, "code": ended.code, "printed": ended.printed}
    kept |= {f"first/{n}": value for n, value in first.items()}
    if ended.code == DONE and world.size == 1:
        figures, variables = evaluated_anew(world, task, settings)
        kept |= {f"anew/{n}": value for n, value in figures.items()}
        same(ended.weights(), variables.values())
    if world.is_chief:
        if ended.code == DONE:
            kept |= {f"figure/{n}": ended.summary[f"eval_{n}"] for n in ("loss", "mean")}
            kept |= {f"last/{n}": v for n, v in zip(first, ended.weights(), strict=True)}
        np.savez(Path(os.environ["KINDS_OF_MODELS"]) / f"{name}.npz", **kept)


def _check(name):
    return lambda world: train(world, name, KINDS[name])


# ranks.run_checks runs what is named check_*: one for each kind.
globals().update({f"check_{name}": _check(name) for name in json.loads(os.environ["KINDS"])})


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
