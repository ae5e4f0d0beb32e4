"""Holds hvdkit.checkpoint.saver on real ranks: a run whose disk, memory or devices fail."""

import errno
import gc
import os
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from small_runs import (
    FEATURES,
    Outcome,
    Small,
    acting,
    classifier,
    fit,
    folder,
    same,
    task_with,
)
from tensorflow.python.data.ops import iterator_ops

from hvdkit.checkpoint import files
from hvdkit.checkpoint.checkpoints import Checkpoints
from hvdkit.ranks.world import World, raw
from hvdkit.run import actions
from hvdkit.run.health import Ending
from hvdkit.stop import BUG, DONE, NOT_NOW, PREEMPTED


def blocked(*steps: int) -> type:
    """A task in whose run a file is in the way of the checkpoints of `steps`."""

    def block(run, step, result):
        if run.world.is_chief:
            for step in steps:
                (run.checkpoints.folder / f"step-{step:08d}").touch()

    return acting(block, 1, settles=False)


def trained(world: World, task: type, *words: str, **settings) -> Outcome:
    return fit(world, task, *words, checkpoint_every=1, keep=9, **settings)


def check_a_save_that_fails_ends_nothing(world):
    clean = fit(world, num_steps=5)
    ended = trained(world, blocked(2, 3), num_steps=5)
    same(clean.weights(), ended.weights())
    if world.is_chief:
        notes = [
            line for line in ended.printed.splitlines() if "was not written" in line
        ]
        assert len(notes) == 2 and "checkpoint of step 2" in notes[0], notes
        assert "step-00000002 is in the way" in notes[0] and "Kept in" in notes[0]
        sound = [
            name
            for name in ended.checkpoints
            if (ended.folder / "checkpoints" / name).is_dir()
        ]
        assert sound == ["step-00000001", "step-00000004", "step-00000005"]
        assert ended.summary["eval_accuracy"] is not None


def check_too_many_saves_that_fail_in_a_row_end_the_run_and_a_rerun_goes_on(world):
    ended = trained(
        world,
        blocked(2, 4, 5, 6, 7, 8, 9),
        "saves in a row were not written",
        " is in the way",
        code=BUG,
        num_steps=9,
    )
    # The third is known when the fourth begins at the latest, which may fail too before the end.
    assert ended.message.startswith(("3 ", "4 ")), ended.message
    if world.is_chief:
        assert (
            ended.summary["step"] in (7, 8)
            and ended.summary["exit_reason"] == "saves failed"
        )
    again = trained(world, Small, num_steps=9, run_dir=ended.folder)
    assert "at step 3" in again.printed or not world.is_chief, again.printed


def check_a_last_save_that_fails_is_no_success(world):
    message = "the last checkpoint, of step 3, was not"
    trained(world, blocked(3), message, "step-00000002", code=BUG)  # step 2 is kept
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a full disk may pass
    with mock.patch.object(Checkpoints, "write", side_effect=full):
        trained(world, Small, "No space left on device", code=NOT_NOW)


def check_an_ending_that_wants_no_checkpoint_gets_none(world):
    enough = Ending(DONE, "enough", "the budget is used up", save=False)
    assert fit(world, acting(lambda *of: enough, 2)).checkpoints == []


def flip(run, step, result):
    """Flips a bit of the momentum on rank 1."""
    if run.world.rank == 1:
        names = [
            name for name in run.state.variables if "dense/kernel/momentum" in name
        ]
        (name,) = names
        momentum = raw(run.state.variables[name])
        bits = momentum.numpy().copy()
        # The last bit might be rounded away.
        bits.reshape(-1).view(np.uint32)[3] ^= 1 << 20
        momentum.assign(bits)


def check_a_bit_that_flips_on_one_rank_is_found_and_named(world):
    train = partial(fit, world, acting(flip, 2), num_steps=4)
    with mock.patch.object(actions, "DRIFT_EVERY", 3):
        if world.size == 1:
            train(code=DONE)
        else:
            train("at step 3", "dense/kernel/momentum", "on rank 1 (", code=BUG)


def check_nothing_reads_ahead_when_a_run_has_ended(world):
    """TensorFlow crashes where its threads still read as the process ends: exit code 139 for 75."""
    held = []

    class Keeps(Small):
        def sources(self):
            # A module may hold the error of an import that it does without, and frames with it.
            held.append(sys._getframe())
            return super().sources()

    def iterators():
        kind = iterator_ops.OwnedIterator
        return [each for each in gc.get_objects() if isinstance(each, kind)]

    # An earlier check may hold the error of a run, and with it what that read.
    before = iterators()
    fit(
        world,
        Keeps,
        stop_signal=SimpleNamespace(asked=True),
        code=PREEMPTED,
        num_steps=50,
    )
    assert held
    known = {id(iterator) for iterator in before}
    assert not [iterator for iterator in iterators() if id(iterator) not in known]


def check_a_model_with_an_output_in_training_only_is_saved_and_resumes(world):
    class WithAuxiliary(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(3)
            self.auxiliary = keras.layers.Dense(3)

        def call(self, x, training=False):
            return {
                "main": self.head(x),
                "auxiliary": self.auxiliary(x) if training else None,
            }

    def loss(task, outputs, targets):
        terms = {}
        for name, logits in outputs.items():
            if logits is not None:
                terms[name] = Small.loss(task, logits, targets)
        return terms

    def sums(task, outputs, targets):
        return Small.sums(task, outputs["main"], targets)

    def build_model(task):
        model = WithAuxiliary()
        model(tf.zeros([1, FEATURES]), training=True)
        return model

    Trained = task_with(build_model=build_model, loss=loss, sums=sums)
    run_dir = folder(world) / "run"
    fit(world, Trained, run_dir=run_dir, num_steps=2)
    resumed = fit(world, Trained, run_dir=run_dir, num_steps=4)
    if world.is_chief:
        assert resumed.checkpoints[-1] == "step-00000004"
        manifest = files.read_manifest(resumed.folder / "checkpoints/step-00000004")
        assert any("outputs" in name for name in manifest.figures["samples"])


def check_a_model_that_is_another_after_a_restart_is_told(world):
    """As where its code draws numbers without a seed, or orders a Python set."""
    seed = 0

    class Features(keras.layers.Layer):
        def call(self, x):
            draws = np.random.default_rng(seed).normal(size=(FEATURES, 8))
            return tf.sin(x @ tf.constant(draws, x.dtype))

    class Table(keras.layers.Layer):
        """Each holds other numbers in a function of its own, whose name TensorFlow counts."""

        def __init__(self, number):
            super().__init__()
            draws = np.random.default_rng(number).normal(size=(8, 8))
            self.add = tf.function(lambda x: x + x @ tf.constant(draws, x.dtype))

        def call(self, x):
            return self.add(x)

    Random = task_with(
        lambda: classifier(Features(), *[Table(number) for number in range(4)])
    )
    run_dir = folder(world) / "run"
    fit(world, Random, run_dir=run_dir)
    words = "its outputs, of mean"
    resumed = fit(world, Random, run_dir=run_dir, num_steps=4)
    assert words not in resumed.printed
    seed = 1
    resumed = fit(world, Random, run_dir=run_dir, num_steps=5)
    if world.is_chief:
        (note,) = [line for line in resumed.printed.splitlines() if words in line]
        assert note.startswith("note: validation sample 0"), note
        assert "step-00000004 was saved" in note, note
