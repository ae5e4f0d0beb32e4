"""At which steps what happens after a step happens."""

from types import SimpleNamespace

import pytest

from hvdkit.run.actions import CheckDrift, Evaluate, Log, Save, Sync
from hvdkit.settings import Settings


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
    sync = Sync(SimpleNamespace(config=Settings(**settings)), lambda: done.append(1))
    assert [step for step in range(1, 11) if sync.due(step)] == steps
    sync(4, {})
    assert done == [1]


def test_what_looks_at_weights_waits_until_the_step_was_judged():
    """A checkpoint, an evaluation or a copy of a step that is then taken back would be wrong."""
    assert Save.settles and Evaluate.settles and Log.settles
    # They hold of any weights, and a GPU need not wait for them.
    assert not Sync.settles and not CheckDrift.settles
