"""What can go wrong in mid-run, turned into votes that all ranks count together.

A rank that cannot read its data, or that was told to stop, must not leave the others waiting in
a collective. It takes part in the step as always and votes; the votes are summed with the loss,
so every rank learns of it at the same step, at no extra cost.
"""

from __future__ import annotations

import signal

import tensorflow as tf

# Positions in the vector of votes.
DATA_FAILED, STOP_ASKED = 0, 1
NUM_VOTES = 2


class StopSignal:
    """Remembers that SIGTERM or SIGUSR1 came: a preemption notice or a time limit."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: object) -> None:
        self.asked = True


def votes(data_failed: bool, stop_asked: bool) -> tf.Tensor:
    """This rank's votes, float64 [NUM_VOTES]."""
    return tf.constant([float(data_failed), float(stop_asked)], tf.float64)
