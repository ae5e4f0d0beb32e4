"""Run on real ranks by test_small_runs.py: which steps --timeline records, however a run ends."""

from __future__ import annotations

import contextlib
import io
import json
import os

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from hvdkit import settings as settings_lib
from hvdkit.ranks import world as world_lib
from hvdkit.stop import DIVERGED, DONE, PREEMPTED
from hvdkit.train import reduction

from shared_checks import differ
from small_runs import Small, fit, folder


@contextlib.contextmanager
def recording():
    """Horovod as a run with --timeline starts it."""
    hvd.shutdown()
    knobs = reduction.environment(settings_lib.Settings(timeline="1:1", stall_shutdown_s=0))
    world_lib.connect(knobs)
    try:
        yield
    finally:
        hvd.shutdown()
        for name in knobs:
            del os.environ[name]
        world_lib.connect()


def said(world, *args, **settings):
    """A run, and what it said on rank 0."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        ended = fit(world, *args, **settings)
    return ended, world.broadcast_object(text.getvalue(), "timeline.said")


def steps_of(ended):
    """By the file's name: its steps, counted by what is reduced once a step; rank 0's answer."""
    found = {}
    for path in sorted((ended.folder / "timeline").iterdir()):
        events = json.loads(path.read_text())
        names = {e["pid"]: e["args"].get("name") for e in events if e.get("name") == "process_name"}
        reduced = [names[e["pid"]] for e in events if e.get("name") == "ALLREDUCE"]
        found[path.stem] = reduced.count("step.totals")
    profiles = ended.folder / "tensorboard" / "plugins" / "profile"
    assert sorted(p.parent.name for p in profiles.glob("*/*.xplane.pb")) == sorted(found)
    return found


class Stopped:
    """Asks for a stop once so many steps have begun."""

    def __init__(self, after):
        self._left = after

    @property
    def asked(self):
        self._left -= 1
        return self._left < 0


def check_a_timeline_holds_the_steps_that_were_asked_for(world):
    plain = fit(world, num_steps=6, deterministic=True)
    with recording():
        ended, text = said(world, num_steps=6, deterministic=True, timeline="3:5")
    assert ended.code == DONE, ended.message
    for one, other in zip(plain.weights(), ended.weights()):
        np.testing.assert_array_equal(one, other)
    if world.is_chief:
        assert steps_of(ended) == {"step-00000003": 3}
        assert "timeline of steps 3 to 5: " in text and "cannot be written" not in text, text


def check_a_timeline_is_whole_where_the_run_ends_within_it(world):
    """Told to stop at step 3, it goes on from there; the files of both parts stay."""
    run_dir = folder(world) / "run"
    usual = {"num_steps": 8, "timeline": "2:6", "run_dir": str(run_dir)}
    with recording():
        ended = fit(world, stop_signal=Stopped(2), **usual)
        assert ended.code == PREEMPTED, ended.message
        again, text = said(world, **usual)
        last, nothing = said(world, **usual | {"num_steps": 9})
    assert again.code == last.code == DONE
    assert "records steps from 4 on: step 3 is done" in text, text
    assert "records nothing: step 8 is done" in nothing, nothing
    if world.is_chief:
        assert steps_of(ended) == {"step-00000002": 2, "step-00000004": 3}


def check_a_timeline_is_whole_where_the_run_diverges(world):
    class Diverges(Small):
        def schedule(self, config):
            return lambda step: tf.where(step == 1, float("nan"), 0.1)

    with recording():
        ended = fit(world, Diverges, num_steps=6, timeline="1:6")
    assert ended.code == DIVERGED, ended.message
    if world.is_chief:
        assert steps_of(ended) == {"step-00000001": 2}


def check_a_timeline_that_cannot_be_written_does_not_end_the_run(world):
    run_dir = folder(world) / "run"
    if world.is_chief:
        run_dir.mkdir()
        (run_dir / "timeline").write_text("no folder")
    with recording():
        ended, text = said(world, timeline="1:2", run_dir=str(run_dir))
    assert ended.code == DONE, ended.message
    for what in ("Horovod's timeline", "TensorFlow's profile"):
        assert text.count(f"note: {what} cannot be written; training continues") == 1, text


def check_two_timelines_are_refused(world):
    os.environ["HOROVOD_TIMELINE"] = "other.json"
    config = settings_lib.Settings(timeline="1:1")
    differ(lambda: reduction.environment(config), "HOROVOD_TIMELINE=other.json", "leave one out")
    del os.environ["HOROVOD_TIMELINE"]
