"""Whole runs in this process, by the run's own `fit`, which every rank calls alike."""

import contextlib
import dataclasses
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from small_models import functional

import train
from hvdkit.data.source import Arrays
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.world import World
from hvdkit.run import context as run_lib
from hvdkit.run import loop
from hvdkit.run.main import run_on
from hvdkit.settings import Settings
from hvdkit.stop import DONE, Stop
from hvdkit.train.step import losses, reduction
from ranks import json_lines

# Small graphs run a few times: to optimize them takes longer than to run them as they are.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

FEATURES = 6
CLASSES = 3

USUAL = {
    "task": "small",
    "num_classes": CLASSES,
    "global_batch_size": 12,
    "eval_batch_size": 8,
    "num_steps": 3,
    "base_lr": 0.05,
    "log_every": 1,
    "eval_every": 0,
    "checkpoint_every": 0,
    "trackers": "",
}


class Small:
    """A task of 60 + 20 samples; tests change one part of it."""

    main_metric = "accuracy"

    def __init__(self, config: Settings) -> None:
        self.config = config

    def sources(self):
        return numbers(1, 60), numbers(2, 20)

    def training_example(self, sample, key):
        return {"inputs": sample["x"], "targets": sample["y"]}

    def evaluation_example(self, sample):
        return {"inputs": sample["x"], "targets": sample["y"]}

    def build_model(self):
        return classifier(keras.layers.Dense(5, activation="tanh"))

    def loss(self, outputs, targets):
        return losses.cross_entropy(outputs, targets)

    def sums(self, outputs, targets):
        hits = tf.argmax(outputs, -1) == tf.cast(targets, tf.int64)
        return {"hits": tf.math.count_nonzero(hits), "samples": tf.size(targets)}

    def metrics(self, sums):
        return {"accuracy": float(sums["hits"] / sums["samples"])}


def numbers(seed: int, size: int) -> Arrays:
    x = np.random.default_rng(seed).normal(size=(size, FEATURES)).astype(np.float32)
    y = np.argmax(x[:, :CLASSES], -1).astype(np.int32)
    return Arrays(x=x, y=y, id=np.arange(size))


def classifier(*parts, units: int = CLASSES, **head) -> keras.Model:
    """These layers one after the other, and a dense one, of settings `head`."""
    return functional(*parts, keras.layers.Dense(units, **head), shape=(FEATURES,))


def task_with(make: Callable | None = None, **methods) -> type:
    """A task with the model that `make` makes, or with other methods."""
    if make:
        methods["build_model"] = lambda task: make()
    return type("Task", (Small,), methods)


def acting(act: Callable, *steps: int, settles: bool = True) -> type:
    """A task with one action, `act(run, step, result)`, at these steps; without steps, at all."""

    class Acts:
        def __init__(self, run):
            self.run = run
            self.settles = settles

        def due(self, step):
            return not steps or step in steps

        def __call__(self, step, result):
            return act(self.run, step, result)

    class Acting(Small):
        def actions(self, run):
            return [Acts(run)]

    return Acting


@dataclasses.dataclass
class Outcome:
    code: int
    message: str  # of the Stop; empty when it ended well
    printed: str  # the output of this rank
    folder: Path
    model: keras.Model | None  # None where the run was refused before it had a model

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def records(self) -> list[dict[str, Any]]:
        return json_lines(self.folder / "metrics.jsonl")

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records if "loss" in record]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(
            path.name for path in (self.folder / "checkpoints").glob("step-*")
        )

    @property
    def evaluated(self) -> list[int]:
        return [record["step"] for record in self.records if "eval_loss" in record]

    def weights(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self.model.variables]

    def state(self, step: int) -> dict[str, np.ndarray]:
        with np.load(
            self.folder / "checkpoints" / f"step-{step:08d}" / "state.npz"
        ) as file:
            return {name: file[name] for name in file.files}


def same(
    ours: Iterable, theirs: Iterable, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Weights, or figures, must be equal within these tolerances."""
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol, atol)


def folder(world: World) -> Path:
    """A new folder, the same one on every rank, which goes with the launch of checks."""
    # Threads are chosen before TensorFlow's first operation, which the exchange below may be.
    world_lib.set_up(world, Settings())
    path = None
    if world.is_chief:
        path = tempfile.mkdtemp(
            prefix="small-run-", dir=os.environ.get("CHECKS_FOLDER")
        )
    return Path(world.broadcast_object(path, "small_runs.folder"))


def on_chief(world: World, act: Callable[[], object]) -> None:
    """Rank 0 does it, while the others wait."""
    if world.is_chief:
        act()
    world.gather_objects(None, "small_runs.on_chief")


def fit(
    world: World,
    task: type = Small,
    *words: str,
    code: int | None = DONE,
    stop_signal: Any = None,
    own_train: Any = None,
    run_dir: Path | str = "",
    **settings,
) -> Outcome:
    """Trains `task` with USUAL and `settings`, as `fit_config` does."""
    run_dir = str(run_dir or folder(world) / "run")
    config = dataclasses.replace(Settings(), **USUAL | settings, run_dir=run_dir)
    return fit_config(
        config,
        world,
        task,
        *words,
        code=code,
        stop_signal=stop_signal,
        own_train=own_train,
    )


def fit_config(
    config: Settings,
    world: World,
    task: type,
    *words: str,
    code: int | None = DONE,
    stop_signal: Any = None,
    own_train: Any = None,
) -> Outcome:
    """Trains on every rank; it must end with this code (None: any), and these words in one line."""
    built: list[keras.Model] = []

    def watched(config: Settings) -> task:
        watched_task = task(config)
        build = watched_task.build_model

        def build_model() -> keras.Model:
            built.append(build())
            return built[-1]

        watched_task.build_model = build_model
        return watched_task

    its_code = DONE
    message = ""
    stop_signal = stop_signal or SimpleNamespace(asked=False)
    # Half a second each; test_report.py reads some.
    no_report = mock.patch.object(loop, "_report")
    # Eight a run, a tenth of its time.
    no_sync = mock.patch.object(os, "fsync", lambda file: None)
    loads = mock.patch.object(run_lib.tasks, "load_task", watched)
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        no_report,
        no_sync,
        loads,
    ):
        try:
            world_lib.set_up(world, config)  # as hvdkit.main does
            with world.fail_together("choosing what carries gradients"):
                reduction.check_backend(config)
            run_on(world, config, own_train or train.train, stop_signal=stop_signal)
        except Stop as stop:
            its_code = stop.code
            message = str(stop)
    output = printed.getvalue()
    if code is not None:
        is_one_line = "\n" not in message
        has_words = all(word in message for word in words)
        is_as_expected = its_code == code and has_words and is_one_line
        assert is_as_expected, (
            f"exit code {its_code}: {message!r}, not {code} {words}\n{output}"
        )
    return Outcome(
        code=its_code,
        message=message,
        printed=output,
        folder=Path(config.run_dir),
        model=built[-1] if built else None,
    )
