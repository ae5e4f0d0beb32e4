"""Holds hvdkit.ranks.stragglers on two real ranks: which rank the others wait for."""

import time

import tensorflow as tf
from small_models import Step
from small_runs import Small, classifier, fit, task_with

from hvdkit.ranks import world as world_lib


def work(layer, x, training):
    """Takes long on rank 1, however busy the cores are, and returns its input."""
    if world_lib.hvd.rank() != 1:
        return x
    nothing = 0.0 * tf.stop_gradient(x[0, 0])
    late = tf.numpy_function(slowly(0.1), [nothing], tf.float32)
    return x + tf.ensure_shape(late, [])


def slowly(seconds):
    def wait(x):
        time.sleep(seconds)
        return x

    return wait


def notes_of(world, task, **settings):
    ended = fit(world, task, num_steps=20, log_every=4, **settings)
    return ended, [line for line in ended.printed.splitlines() if "note: slow" in line]


def check_a_slow_rank_is_named_once(world):
    slow = task_with(lambda: classifier(Step(work)))
    for settings in ({}, {"virtual_ranks": 4}):
        ended, notes = notes_of(world, slow, **settings)
        if world.is_chief:
            assert len(notes) == 1 and "rank 1 on " in notes[0], notes
            last = ended.records[-2]
            assert last["own_seconds_slowest_rank"] == 1, last
            assert last["own_seconds_most"] > 1.5 * last["own_seconds_median"], last


def slow_check_a_rank_whose_input_is_slow_is_named_with_its_wait(world):
    class Waits(Small):
        def training_example(self, sample, key):
            x = (
                tf.numpy_function(slowly(0.03), [sample["x"]], tf.float32)
                if world.rank
                else sample["x"]
            )
            return {
                "inputs": tf.ensure_shape(x, sample["x"].shape),
                "targets": sample["y"],
            }

    ended, notes = notes_of(world, Waits)
    if world.is_chief:
        assert len(notes) == 1 and "rank 1 on " in notes[0], notes
        lines = [line for line in ended.records if "input_wait_most" in line]
        # Of most intervals: in one of a few steps what was read ahead may be enough.
        named = [line for line in lines if line["input_wait_slowest_rank"] == 1]
        assert 2 * len(named) > len(lines), lines
        assert max(line["input_wait_most"] for line in named) > 1e-3, lines
