"""(seed, step) -> the global batch's samples -> this rank's share; no state, no shuffle buffer.

Sample i of step k is `permutation(seed, epoch)[position]` with position counted over the whole
run, so the global batch at a step is the same for any number of ranks, and a run that resumes
at step k needs nothing but k.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf


def share(total: int, rank: int, size: int) -> tuple[int, int]:
    """First and one-past-last position of `rank`'s part of `total` things: as even as can be."""
    return total * rank // size, total * (rank + 1) // size


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Order of `num_samples` samples, in global batches of `global_batch_size`.

    A batch is split first into `micro_batches` equal parts, then each part over the ranks, so
    that a micro-batch too is the same set of samples for any number of ranks.
    """

    num_samples: int
    global_batch_size: int
    micro_batches: int
    seed: int
    rank: int
    size: int

    def __post_init__(self) -> None:
        micro = self.global_batch_size // self.micro_batches
        if micro < self.size:
            per = f" / --accumulation_steps={self.micro_batches}" if self.micro_batches > 1 else ""
            raise ValueError(
                f"--global_batch_size={self.global_batch_size}{per} is smaller than the number of "
                f"ranks, {self.size}: every rank needs a sample a step"
            )
        if self.num_samples < self.size:
            raise ValueError(
                f"{self.num_samples} training samples are fewer than the {self.size} ranks"
            )

    @property
    def local_micro_size(self) -> int:
        """Samples of this rank in one micro-batch."""
        first, last = share(self.global_batch_size // self.micro_batches, self.rank, self.size)
        return last - first

    @property
    def weight(self) -> float:
        """This rank's share of the global batch; the shares of all ranks sum to 1."""
        return self.local_micro_size * self.micro_batches / self.global_batch_size

    def local_positions(self, step: tf.Tensor) -> tf.Tensor:
        """Positions, counted over the whole run, of this rank's samples at `step`.

        Returns int64 [micro_batches * local_micro_size], one micro-batch after the other.
        """
        micro = self.global_batch_size // self.micro_batches
        first, last = share(micro, self.rank, self.size)
        starts = tf.cast(step, tf.int64) * self.global_batch_size
        starts += tf.range(self.micro_batches, dtype=tf.int64) * micro
        return tf.reshape(starts[:, None] + tf.range(first, last, dtype=tf.int64), [-1])

    def sample(self, position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sample id and random key of a position (both from the same position on any rank).

        Returns:
          int64 scalar in [0, num_samples): each value once an epoch.
          int32 [2]: a key for tf.random.stateless_* functions, unique to (seed, epoch, sample).
        """
        epoch, offset = position // self.num_samples, position % self.num_samples
        index = tf.random.experimental.index_shuffle(
            offset,
            seed=tf.stack([tf.constant(self.seed, tf.int64), epoch]),
            max_index=tf.constant(self.num_samples - 1, tf.int64),
        )
        key = tf.constant([self.seed, 0x5EED], tf.int32)
        key = tf.random.experimental.stateless_fold_in(key, epoch, alg="philox")
        key = tf.random.experimental.stateless_fold_in(key, index, alg="philox")
        return index, key
