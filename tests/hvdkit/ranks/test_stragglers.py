"""Which ranks are called slow."""

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.ranks.stragglers import Pace
from hvdkit.ranks.world import World


@pytest.fixture
def pace():
    made = Pace(World(0, 1, 0, 1), 4)
    made._hosts, made._slow = ["a", "a", "b", "b"], np.zeros(4, int)
    return made


def interval(own, samples=(1, 1, 1, 1), step=0.5):
    own = np.asarray(own, float)
    return np.stack([own, 0 * own, own / samples, 0 * own + step], 1)


def test_a_rank_is_slow_after_three_intervals_in_a_row_and_reported_once(pace):
    slow, good = interval([0.10, 0.10, 0.16, 0.10]), interval([0.1] * 4)
    shown = [pace._sentence(x) for x in (slow, slow, good, slow, slow, slow, slow)]
    assert [bool(s) for s in shown] == [False] * 5 + [True, False]
    assert "rank 2 on b takes 160 ms" in shown[5] and "the median rank 100 ms" in shown[5]


def test_one_rank_alone_keeps_no_times_of_steps_that_were_logged(pace):
    for step in range(5):
        pace.add(tf.constant([step + 0.4, step + 1.0], tf.float64))
    assert len(pace._times) == 4
    assert pace.interval(0.0) == ({}, "") and not pace._times


@pytest.mark.parametrize(
    "found",
    [
        interval([0.10, 0.10, 0.14, 0.10]),  # not half as long again
        interval([0.10, 0.10, 0.20, 0.10], samples=(1, 1, 2, 1)),  # it has twice as many samples
        interval([0.01, 0.01, 0.02, 0.01]),  # of a step of half a second
    ],
)
def test_these_are_not_slow(pace, found):
    assert not any(pace._sentence(found) for _ in range(5))
