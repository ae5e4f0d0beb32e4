"""At which steps what happens after a step happens."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from actions import Save, Sync, evaluation_due
from config import Config


def due(action) -> list[int]:
    return [step for step in range(1, 11) if action.due(step)]


def config(**settings) -> Config:
    return dataclasses.replace(Config(), num_steps=10, **settings)


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
