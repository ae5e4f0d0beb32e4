"""Runs by their command lines, many in one process, for checks_flags.py and checks_flag_facts.py.

Each run's flags are typed, and Horovod starts anew for it, as in a process of its own.
"""

from __future__ import annotations

import functools
import importlib
import os
import traceback
from collections.abc import Callable, Iterable

import flag_values
import horovod.tensorflow as hvd
import keras
import numpy as np
from flag_values import words
from small_runs import CLASSES, FEATURES, Outcome, Small, fit_config, folder
from tensorflow.python.framework import config as tf_config

from hvdkit import settings as settings_lib
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.world import World
from hvdkit.settings import Settings
from hvdkit.stop import DONE
from hvdkit.train import losses, reduction
from hvdkit.train.dropout import SampleDropout


class Varied(Small):
    """Every flag means something to it: batch norm, dropout, a regularizer, the loss's flags."""

    def training_example(self, sample, key):
        return {"inputs": self._inputs(sample["x"], key), "targets": sample["y"]}

    def evaluation_example(self, sample):
        return self.training_example(sample, np.zeros(2, np.int32))

    def _inputs(self, x, key):
        return {"x": x, "key": key} if self.config.dropout else {"x": x}

    def build_model(self):
        inputs = {"x": keras.Input((FEATURES,), name="x")}
        l2 = keras.regularizers.L2(0.01)
        body = keras.layers.Dense(5, activation="tanh", kernel_regularizer=l2, name="body")
        y = keras.layers.BatchNormalization(name="norm")(body(inputs["x"]))
        if self.config.dropout:
            inputs["key"] = keras.Input((2,), dtype="int32", name="key")
            y = SampleDropout(self.config.dropout)([y, inputs["key"]])
        return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(y), name="varied")

    def loss(self, outputs, targets):
        return losses.cross_entropy(
            outputs,
            targets,
            smoothing=self.config.label_smoothing,
            class_weights=self.config.class_weight_list,
        )


class Sweep:
    """Runs by their command lines, and what the values' braces stand for."""

    def __init__(self, world: World) -> None:
        world_lib.set_up(world, Settings())  # before anything is exchanged, as in a run
        self.world, self.folder, self.runs = world, folder(world), 0
        self._knobs: dict[str, str] = {}
        self._weights: dict[str, str] = {}
        carriers = ("mpi", "gloo") if hvd.mpi_enabled() else ("gloo", "mpi")
        self.names = dict(zip(("carrier", "other_carrier"), carriers))
        self.names["threads"] = str(tf_config.get_intra_op_parallelism_threads())
        self.names |= {n: str(self.folder / n) for n in ("run", "plain", "keras", "first")}
        self.names["keras"] += ".keras"
        if world.is_chief:
            (self.folder / "usual.cfg").write_text(flag_values.USUAL)
        world.gather_objects(None, "flags.usual")
        self.run([f"--run_dir={self.names['plain']} --num_steps=1"])
        made = self.run([f"--run_dir={self.names['run']} --ema_decay=0.5 --seed=3"])
        if world.is_chief:
            made.model.save(self.names["keras"])
        world.gather_objects(None, "flags.keras")

    def parse(self, values: Iterable[str]) -> Settings:
        flags = [word.format(**self.names) for word in words(values)]
        return settings_lib.parse(["train.py", f"--flagfile={self.folder}/usual.cfg", *flags])

    def accepts(self, values: Iterable[str]) -> bool:
        try:
            self.parse(values).for_ranks(self.world.size)
        except ValueError:
            return False
        return True

    def run(self, values: Iterable[str], stop_signal: object = None) -> Outcome:
        config = self.start(values)
        own = config.task == "varied"
        task = Varied if own else importlib.import_module(f"tasks.{config.task}").Task
        return fit_config(config, self.world, task, stop_signal)

    def start(self, values: Iterable[str]) -> Settings:
        """As a new process would: settings, Horovod with the knobs that they turn."""
        self.runs += 1
        config = self.parse([f"--run_dir={self.folder}/{self.runs}", *values])
        hvd.shutdown()
        for name in self._knobs:
            del os.environ[name]
        # Horovod 0.28.1 crashes when it starts again in a process that has had both of them.
        unset = "HOROVOD_CYCLE_TIME" if self.world.size == 1 else "HOROVOD_FUSION_THRESHOLD"
        knobs = reduction.environment(config).items()
        self._knobs = {name: value for name, value in knobs if name != unset}
        world_lib.connect(self._knobs)
        tf_config.disable_op_determinism()
        return config

    def weights(self, *values: str) -> str:
        """Fingerprint of a run's weights on this rank; what has no number is a fault."""
        line = " ".join(values)
        if line not in self._weights:
            ended = self.run(["--eval_every=0", *values])
            judge_weights(ended)
            self._weights[line] = world_lib.weights_sha256(ended.model.variables)
        return self._weights[line]


@functools.cache
def sweep(world: World) -> Sweep:
    return Sweep(world)


def count(world: World, text: str) -> None:
    """A line for the test to print."""
    if world.is_chief:
        with open(os.environ["FLAGS_COUNTS"], "a") as file:
            file.write(f"{world.size} rank(s): {text}\n")


def all_pass(world: World, attempt: Callable[..., None], cases: Iterable[tuple]) -> None:
    """Calls attempt(*case) for all, then raises AssertionError, on every rank, if any failed."""
    failures = []
    for case in cases:
        try:
            attempt(*case)
        except Exception:
            failures.append(f"{case}\n{traceback.format_exc(limit=-3, chain=False)}")
            print(f"FAILED {failures[-1]}", flush=True)  # at once: what comes next may hang
    # Only rank 0 judges records: the others must not go on without it.
    failures = [f for theirs in world.gather_objects(failures, "flags.failures") for f in theirs]
    assert not failures, f"{len(failures)} failed:\n" + "\n".join(failures)


def judge_weights(ended: Outcome) -> None:
    assert ended.code == DONE, f"exit code {ended.code}: {ended.message}"
    broken = [v.path for v in ended.model.variables if not np.isfinite(v.numpy()).all()]
    assert not broken, f"not finite: {broken}"
