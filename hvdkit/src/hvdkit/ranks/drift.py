"""Whether all ranks still hold the same weights, looked at while they train.

Every rank applies the same update to the same weights, so that nothing ever compares them. What
changes them on one rank only, a flipped bit of memory or a fault of a device, is trained on for
weeks, and a checkpoint holds rank 0's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdkit.ranks.world import World, hostname, raw, say
from hvdkit.stop import BUG, Stop
from hvdkit.words import join

Variables = Mapping[str, "keras.Variable | tf.Variable"]

# Odd and random: 64 bits behind the point of the golden ratio, as int64.
_MIX = -7046029254386353131


class Drift:
    """Compares variables over the ranks, in one collective of 16 bytes a variable."""

    def __init__(self, world: World, variables: Variables) -> None:
        """`variables`: by name, the same on every rank, each equal on all ranks between steps."""
        self._world, self._names = world, list(variables)
        self._values = [raw(v) for v in variables.values()]
        self._look = _looking(self._values)

    def check(self, step: int, repair: bool) -> None:
        """Every rank must call it at the same step.

        Args:
          repair: take rank 0's values where they differ, and say so.
        Raises:
          Stop: on all ranks, where they differ and are not repaired; names variables and ranks.
        """
        if self._world.size == 1:
            return
        own, least, most = (part.numpy() for part in self._look())
        differ = np.flatnonzero(least != most)
        if not differ.size:
            return
        mine = (own[differ].tolist(), hostname())
        everyone = self._world.gather_objects(mine, f"drift.{step}")
        ranks = [rank for rank, (sums, _) in enumerate(everyone) if sums != everyone[0][0]]
        hosts = sorted({everyone[rank][1] for rank in ranks})
        what = (
            f"at step {step} {join([self._names[i] for i in differ])} on rank {join(ranks)} "
            f"({join(hosts)}) differ from rank 0's"
        )
        if not repair:
            raise Stop(
                BUG,
                f"{what}: memory or a device may be faulty. Checkpoints hold rank 0's: check "
                "which of them is sound, or continue from rank 0's with --drift=repair",
            )
        self._world.broadcast_variables([self._values[i] for i in differ])
        say(self._world, f"note: {what}: all ranks took rank 0's")


def _looking(values: list[tf.Variable]) -> Callable[[], tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
    """A function that gives each variable's checksum here, and the least and the most of them."""

    @tf.function(autograph=False)
    def look() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        own = tf.stack([_checksum(v.read_value()) for v in values])
        # The most is what the least of the complements is the complement of: one collective.
        both = hvd.allreduce(tf.concat([own, tf.bitwise.invert(own)], 0), op=hvd.Min, name="drift")
        least, most = tf.split(both, 2)
        return own, least, tf.bitwise.invert(most)

    return look


def _checksum(value: tf.Tensor) -> tf.Tensor:
    """int64 []: sum over the elements of their bits times a number of their place, modulo 2^64."""
    if value.dtype.is_bool:
        value = tf.cast(value, tf.uint8)
    # What is wider in parts: the highest of 64 bits, times an odd number, is the same everywhere.
    width = {1: tf.uint8, 2: tf.uint16}.get(value.dtype.size, tf.uint32)
    bits = tf.reshape(value if value.dtype == width else tf.bitcast(value, width), [-1])
    places = tf.range(tf.size(bits, tf.int64), dtype=tf.int64) * _MIX
    # Not in a line any more: what goes up at one place and down at another does not cancel.
    places = tf.bitwise.bitwise_xor(places, tf.bitwise.right_shift(places, 31)) | 1
    return tf.reduce_sum(tf.cast(bits, tf.int64) * places)
