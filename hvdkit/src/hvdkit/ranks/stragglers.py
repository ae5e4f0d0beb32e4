"""Which rank the others wait for: each rank's own time a step, gathered at each logged step.

A step ends on all ranks at once, with its reduction. What differs is when each has its own part
ready. So a rank's own time counts from the end of one step's call, which waits for Horovod, to its
sums of the next step: input, Python and forward pass. Where layers exchange numbers in the forward
pass (--bn_sync=full), ranks wait for each other in it, and only the time before it differs.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hvdkit.logs import join
from hvdkit.ranks.messages import heartbeat
from hvdkit.ranks.world import World, hostname

SLOW = 1.5  # A slow rank takes so many times the median of all ranks.
_IN_A_ROW = 3  # It is named after so many logged intervals.
# Less than this share of a step's time, or than so many seconds, is not reported.
_SHARE = 0.1
_LEAST = 0.005


def own_part(after: tf.Tensor) -> tf.Tensor:
    """When this rank has computed its own part of a step, `after`: seconds since 1970, float64.

    Its heartbeat tells peers. The host waits for the value beside what the device does next.
    """
    return _moment(after, heartbeat.own_part_done)


def whole_step(after: tf.Tensor) -> tf.Tensor:
    """When a step has computed `after`, its last result: seconds since 1970, float64."""
    return _moment(after, time.time)


def _moment(after: tf.Tensor, clock: Callable[[], float]) -> tf.Tensor:
    # TensorFlow refuses its own clock where operations are deterministic.
    done = tf.numpy_function(lambda _: clock(), [after], tf.float64)
    return tf.ensure_shape(done, [])


class Pace:
    """This rank's own times, and the ranks that are slow. Every rank makes one and calls alike."""

    def __init__(self, world: World, samples: int) -> None:
        """`samples` of this rank in a step: a rank with more may take longer."""
        self._world = world
        self._samples = max(samples, 1)
        self._hosts = world.gather_objects(hostname(), "pace.hosts")
        self._ended: float | None = None  # When the newest step did.
        self._steps = 0  # So many are in the times.
        # Of each call, for a step: seconds of this rank's own part, and of the whole.
        self._times: list[tuple[float, float]] = []
        # For how many intervals in a row each rank was slow.
        self._slow = np.zeros(world.size, int)

    def add(self, ready: Sequence[float], ended: Sequence[float]) -> None:
        """With the times at which own sums were ready, and at which steps ended, of a call's steps.

        Its steps share their input, which comes before the first, so a call counts by its mean.
        """
        if self._ended is not None:
            began = [self._ended, *ended[:-1]]
            own = sum(ready) - sum(began)
            self._times.append((own / len(ready), (ended[-1] - began[0]) / len(ended)))
            self._steps += len(ended)
        self._ended = ended[-1]

    def interval(self, waited: float) -> tuple[dict[str, float], str]:
        """All ranks' figures since the last call, and a note; `waited`: this one's for input."""
        times = np.array(self._times or [(0.0, 0.0)])
        steps = max(self._steps, 1)
        self._times = []
        self._steps = 0
        if self._world.size == 1:
            return {}, ""
        # Medians, as one of the steps may hold an evaluation.
        own_part, step = np.median(times, axis=0)
        numbers = [own_part, waited / steps, own_part / self._samples, step]
        by_rank = self._world.gather_numbers(numbers, "pace.interval")
        figures = {}
        for name, value in _spread(by_rank[:, 0]).items():
            figures[f"own_seconds_{name}"] = value
        for name, value in _spread(by_rank[:, 1]).items():
            figures[f"input_wait_{name}"] = value
        return figures, self._sentence(by_rank)

    def _sentence(self, by_rank: np.ndarray) -> str:
        """Names ranks that have been slow for long enough, each once until it recovers.

        `by_rank` [ranks, 4]: seconds of the own part, of input, a sample, and of a whole step.
        """
        own_part, for_input, a_sample, step = by_rank.T
        middle = _middle(own_part)
        # A rank must be slow for each sample too: the larger of uneven shares takes longer.
        slow = (own_part >= SLOW * middle) & (a_sample >= SLOW * _middle(a_sample))
        slow &= own_part - middle > max(_SHARE * step[0], _LEAST)
        self._slow = np.where(slow, self._slow + 1, 0)
        texts = []
        for rank in np.flatnonzero(self._slow == _IN_A_ROW):
            texts.append(
                f"rank {rank} on {self._hosts[rank]} takes {own_part[rank] * 1e3:.0f} ms "
                f"({for_input[rank] * 1e3:.0f} ms of it for input)"
            )
        if not texts:
            return ""
        return (
            f"note: slow: {join(texts, 4)} for its own part of a step, the median rank "
            f"{middle * 1e3:.0f} ms; all others wait"
        )


def _middle(values: Sequence[float] | np.ndarray) -> float:
    """The median; of two ranks the faster one's."""
    return statistics.median_low(np.asarray(values).tolist())


def _spread(values: np.ndarray) -> Mapping[str, float]:
    return {
        "least": round(float(values.min()), 6),
        "median": round(_middle(values), 6),
        "most": round(float(values.max()), 6),
        "slowest_rank": int(values.argmax()),
    }
