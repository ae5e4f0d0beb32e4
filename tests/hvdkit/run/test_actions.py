"""At which steps what happens after a step happens."""

import contextlib
import dataclasses
from types import SimpleNamespace

import keras
import pytest

from hvdkit.ranks.world import World
from hvdkit.run.actions import CheckDrift, Evaluate, Log, Save, Sync, evaluation_due
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


@pytest.mark.parametrize(
    ("score", "save", "scored", "saved"),
    [(0, 0, [10], [10]), (5, 0, [5, 10], [5, 10]), (4, 3, [4, 8, 10], [3, 4, 6, 8, 9, 10])],
)
def test_evaluations_and_checkpoints_come_as_asked_and_at_the_end(score, save, scored, saved):
    settings = config(eval_every=score, checkpoint_every=save)
    assert [step for step in range(1, 11) if evaluation_due(settings, step)] == scored
    context = SimpleNamespace(config=settings)
    start = SimpleNamespace(step=0, source="new")
    run = SimpleNamespace(context=context, saver=None, sync=None, telemetry=None, start=start)
    assert due(Save(run)) == saved  # one with each evaluation


def test_what_looks_at_weights_waits_until_the_step_was_judged():
    """A checkpoint, an evaluation or a copy of a step that is then taken back would be wrong."""
    assert Save.settles and Evaluate.settles and Log.settles
    # They hold of any weights, and a GPU need not wait for them.
    assert not Sync.settles and not CheckDrift.settles


def test_one_step_is_saved_once():
    saved, waited = [], []
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    state = SimpleNamespace(variables={}, untrained=[])
    context = SimpleNamespace(config=config(), model=model, state=state, world=World(0, 1, 0, 1))
    saver = SimpleNamespace(
        save=lambda step, *rest: saved.append(step), last=lambda step, *rest: waited.append(step)
    )
    telemetry = SimpleNamespace(not_training=contextlib.nullcontext)
    parts = {"saver": saver, "sync": lambda: None, "telemetry": telemetry}
    start = SimpleNamespace(step=4, source="own")
    save = Save(SimpleNamespace(context=context, start=start, **parts))
    for step in (4, 5, 5, 6):
        save(step)
    assert saved == [5, 6]
    save.last(6)  # there already; whether it could be written is still to be learnt
    save.last(7)
    assert saved == [5, 6, 7] and waited == [6, 7]
