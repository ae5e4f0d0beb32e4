"""Which rank the others wait for: each rank's own time a step, gathered at each logged step.

A step ends on all ranks at once, with its reduction. What differs is when each has its own part
ready. So a rank's own time counts from the end of one reduction to its sums of the next step:
update, input, Python and forward pass. Where layers exchange numbers in the forward pass
(--bn_sync=full), ranks wait for each other in it, and only the time before it differs.
"""

import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled

from hvdkit.logs import join
from hvdkit.ranks.messages import heartbeat
from hvdkit.ranks.world import World, hostname

SLOW = 1.5  # times the median of all ranks
_IN_A_ROW = 3  # logged intervals
_SHARE, _LEAST = 0.1, 0.005  # of a step's time, and seconds: less is not reported


def own_part(after: tf.Tensor) -> tf.Tensor:
    """`moment` of what this rank computes before it waits for others; its heartbeat tells peers."""
    done = tf.numpy_function(lambda _: heartbeat.own_part_done(), [after], tf.float64)
    return tf.ensure_shape(done, [])


def moment(after: tf.Tensor) -> tf.Tensor:
    """When a tensor was computed, also on a GPU: seconds since 1970, float64."""
    if is_op_determinism_enabled():  # TensorFlow then runs no clock of its own
        return tf.ensure_shape(
            tf.numpy_function(lambda _: np.float64(time.time()), [after], tf.float64), []
        )
    with tf.device("CPU:0"):
        # By its value: a control dependency would not wait for a GPU.
        there = tf.reduce_all(tf.equal(after, after))
        return tf.cond(there, tf.timestamp, tf.timestamp)


class Pace:
    """This rank's own times, and the ranks that are slow. Every rank makes one and calls alike."""

    def __init__(self, world: World, samples: int) -> None:
        """`samples` of this rank in a step: a rank with more may take longer."""
        self._world = world
        self._samples = max(samples, 1)
        self._hosts = world.gather_objects(hostname(), "pace.hosts")
        self._reduced: float | None = None
        self._times: list[tuple[float, float]] = []  # seconds of each step: own, whole
        self._slow = np.zeros(world.size, int)  # for how many intervals in a row

    def add(self, moments: tf.Tensor) -> None:
        """After each step, with its `moments`: float64 [2], own sums ready, and all reduced."""
        ready, reduced = moments.numpy().tolist()
        if self._reduced is not None and reduced != self._reduced:  # a step may come twice
            self._times.append((ready - self._reduced, reduced - self._reduced))
        self._reduced = reduced

    def interval(self, waited: float) -> tuple[dict[str, float], str]:
        """All ranks' figures since the last call, and a note; `waited`: this one's for input."""
        times = np.array(self._times or [(0.0, 0.0)])
        self._times = []
        if self._world.size == 1:
            return {}, ""
        own, step = np.median(times, axis=0)  # one of the steps may hold an evaluation
        numbers = [own, waited / len(times), own / self._samples, step]
        found = self._world.gather_numbers(numbers, "pace.interval")
        figures = {f"own_seconds_{name}": value for name, value in _spread(found[:, 0]).items()}
        figures |= {f"input_wait_{name}": value for name, value in _spread(found[:, 1]).items()}
        return figures, self._sentence(found)

    def _sentence(self, found: np.ndarray) -> str:
        """Names ranks that have been slow for long enough, each once until it recovers."""
        own = found[:, 0]
        a_sample = found[:, 2]
        step = found[0, 3]
        # Also per sample: the larger of uneven shares takes longer.
        slow = (own >= SLOW * _middle(own)) & (a_sample >= SLOW * _middle(a_sample))
        slow &= own - _middle(own) > max(_SHARE * step, _LEAST)
        self._slow = np.where(slow, self._slow + 1, 0)
        named = [
            f"rank {rank} on {self._hosts[rank]} takes {own[rank] * 1e3:.0f} ms "
            f"({found[rank, 1] * 1e3:.0f} ms of it for input)"
            for rank in np.flatnonzero(self._slow == _IN_A_ROW)
        ]
        if not named:
            return ""
        return (
            f"note: slow: {join(named, 4)} for its own part of a step, the median rank "
            f"{_middle(own) * 1e3:.0f} ms; all others wait"
        )


def _middle(values: Sequence[float] | np.ndarray) -> float:
    """The median; of two ranks the faster one's."""
    return statistics.median_low(np.asarray(values).tolist())


def _spread(values: np.ndarray) -> Mapping[str, float]:
    found = {"least": values.min(), "median": _middle(values), "most": values.max()}
    rounded = {name: round(float(value), 6) for name, value in found.items()}
    return rounded | {"slowest_rank": int(values.argmax())}
