"""At which steps what happens after a step happens."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from types import SimpleNamespace

import keras
import pytest

from hvdkit.ranks.world import World
from hvdkit.run.actions import CheckDrift, Evaluate, Log, Save, Sync, evaluation_due
from hvdkit.run.health import Clock
from hvdkit.settings import Settings


def due(action) -> list[int]:
    return [step for step in range(1, 11) if action.due(step)]


def config(**settings) -> Settings:
    return dataclasses.replace(Settings(), num_steps=10, **settings)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"bn_sync_every": 0}, []),  # only where statistics are read
        ({"bn_sync_every": 4}, [4, 8]),
        ({"bn_sync_every": 4, "deterministic": True}, list(range(1, 11))),
    ],
)
def test_moving_statistics_are_brought_together_as_often_as_asked(settings, steps):
    done = []
    sync = Sync(SimpleNamespace(config=config(**settings)), lambda: done.append(1))
    assert due(sync) == steps
    sync(4, {})
    assert done == [1]


@pytest.mark.parametrize(("every", "steps"), [(0, [10]), (4, [4, 8, 10]), (5, [5, 10])])
def test_an_evaluation_comes_every_so_often_and_at_the_end(every, steps):
    settings = config(eval_every=every)
    assert [step for step in range(1, 11) if evaluation_due(settings, step)] == steps


@pytest.mark.parametrize(("every", "steps"), [(0, [4, 8, 10]), (3, [3, 4, 6, 8, 9, 10])])
def test_a_checkpoint_comes_as_often_as_asked_and_with_each_evaluation(every, steps):
    run = SimpleNamespace(config=config(eval_every=4, checkpoint_every=every))
    clock = SimpleNamespace(asked=False)
    save = Save(run, None, clock, None, None, None)
    assert due(save) == steps
    clock.asked = True  # by --checkpoint_minutes
    assert due(save) == list(range(1, 11))


def test_drift_is_looked_for_as_often_as_asked_and_repaired_where_asked():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    for every, drift, steps in ((0, "stop", []), (3, "stop", [3, 6, 9]), (5, "repair", [5, 10])):
        run = SimpleNamespace(
            config=config(drift_every=every, drift=drift),
            model=model,
            state=SimpleNamespace(variables={v.path: v for v in model.variables}),
            world=World(0, 1, 0, 1),
        )
        look, asked = CheckDrift(run), []
        assert due(look) == steps
        look._drift = SimpleNamespace(check=lambda *how: asked.append(how))  # noqa: B023
        look(5, {})
        assert asked == [(5, drift == "repair")]


def test_a_checkpoint_by_the_clock_is_asked_for_by_votes_since_the_last(monkeypatch):
    """Rank 0's vote of a step that was saved meanwhile is outdated."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock(minutes=2.0)
    assert not clock.due() and not Clock(minutes=0.0).due()
    now[0] += 121.0
    assert clock.due() and not Clock(minutes=0.0).due()
    clock.heard(1)
    assert clock.asked
    clock.saved(4)
    assert not clock.asked and not clock.due()
    clock.heard(4)
    assert not clock.asked
    clock.heard(5)
    assert clock.asked


def test_what_looks_at_weights_waits_until_the_step_was_judged():
    """A checkpoint, an evaluation or a copy of a step that is then taken back would be wrong."""
    assert Save.settles and Evaluate.settles and Log.settles
    # They hold of any weights, and a GPU need not wait for them.
    assert not Sync.settles and not CheckDrift.settles


def test_one_step_is_saved_once():
    saved, clock = [], SimpleNamespace(asked=False, saved=lambda step: None)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    state = SimpleNamespace(variables={})
    run = SimpleNamespace(config=config(), model=model, state=state, world=World(0, 1, 0, 1))
    waited = []
    saver = SimpleNamespace(
        save=lambda step, *rest: saved.append(step), last=lambda step, *rest: waited.append(step)
    )
    telemetry = SimpleNamespace(not_training=contextlib.nullcontext)
    save = Save(run, saver, clock, lambda: None, telemetry, saved_at=4)
    for step in (4, 5, 5, 6):
        save(step)
    assert saved == [5, 6]
    save.last(6)  # there already; whether it could be written is still to be learnt
    save.last(7)
    assert saved == [5, 6, 7] and waited == [6, 7]
