"""At which steps what happens after a step happens."""

import dataclasses
from types import SimpleNamespace

import pytest

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
