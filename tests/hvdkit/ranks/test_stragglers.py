"""Which ranks are called slow."""

import numpy as np
import pytest

from hvdkit.ranks.stragglers import Pace
from hvdkit.ranks.world import World


@pytest.fixture
def pace():
    pace = Pace(World(0, 1, 0, 1), 4)
    pace._hosts = ["a", "a", "b", "b"]
    pace._slow = np.zeros(4, int)
    return pace


def interval(seconds, samples=(1, 1, 1, 1), step=0.5):
    """Means of an interval, by rank: its own seconds a step, and a sample; and the whole step's."""
    seconds = np.asarray(seconds, float)
    return np.stack([seconds, 0 * seconds, seconds / samples, 0 * seconds + step], 1)


def test_a_rank_is_slow_after_three_intervals_in_a_row_and_reported_once(pace):
    slow = interval([0.10, 0.10, 0.16, 0.10])
    good = interval([0.1] * 4)
    shown = [pace._sentence(x) for x in (slow, slow, good, slow, slow, slow, slow)]
    assert [bool(s) for s in shown] == [False] * 5 + [True, False]
    assert (
        "rank 2 on b takes 160 ms" in shown[5] and "the median rank 100 ms" in shown[5]
    )


def test_one_rank_alone_keeps_no_times_of_steps_that_were_logged(pace):
    for step in range(5):
        pace.add([step + 0.4], [step + 1.0])
    assert len(pace._times) == 4
    assert pace.interval(0.0) == ({}, "") and not pace._times


@pytest.mark.parametrize(
    "means",
    [
        interval([0.10, 0.10, 0.14, 0.10]),  # it is not half as long again
        # It has twice as many samples.
        interval([0.10, 0.10, 0.20, 0.10], samples=(1, 1, 2, 1)),
        interval([0.01, 0.01, 0.02, 0.01]),  # little of a step of half a second
    ],
)
def test_these_are_not_slow(pace, means):
    assert not any(pace._sentence(means) for _ in range(5))
