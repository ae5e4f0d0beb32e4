"""What each rank reports in every step; the votes are summed with the loss.

A rank that cannot read its data, or that received a stop signal, must not leave the others waiting
in a collective. It takes part in the step as always and votes, so that every rank learns of it at
the same step, at no extra cost.
"""

from __future__ import annotations

import tensorflow as tf

# Positions in the vector of votes. FAILED_SAVES is how many in a row, of rank 0; the others are 1
# or 0 of each rank.
DATA_FAILED, STOP_ASKED, FAILED_SAVES = range(3)
NUM_VOTES = 3


def votes(
    *, data_failed: bool = False, stop_asked: bool = False, failed_saves: int = 0
) -> tf.Tensor:
    """One rank's votes, float64 [NUM_VOTES]."""
    found = (data_failed, stop_asked, failed_saves)
    return tf.constant([float(vote) for vote in found], tf.float64)
