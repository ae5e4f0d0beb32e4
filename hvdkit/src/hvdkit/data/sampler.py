"""(seed, step) -> the global batch's samples -> this rank's share; no state, no shuffle buffer.

A sample is `permutation(seed, epoch)[position]` with its position counted over the whole run, so
the global batch at a step is the same for any number of ranks, and a run that resumes needs nothing
but its place: how many samples its steps had, whatever the size of their batches.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdkit.data.place import BEGINNING, Place
from hvdkit.data.source import Source

WORDS = tf.raw_ops.StatelessRandomUniformFullIntV2  # draws words of random bits
# What the words of the run's seed are drawn for.
_ORDERS = 1
_KEYS = 2
_SHARDS = 3
_WINDOWS = 4
# The counter with which a sample's key draws its partner; augmentation uses 0 and 1.
_PARTNERS = 2


class Shards(NamedTuple):
    """Samples that lie in files one after the other, of which few are read at a time."""

    sizes: tuple[int, ...] = ()  # samples of each file
    at_once: int = 1  # most shards of a window

    @property
    def windows(self) -> list[slice]:
        """The parts into which an epoch's order of shards is cut, of nearly equal lengths."""
        count = -(-len(self.sizes) // self.at_once)
        return [
            slice(*share(len(self.sizes), number, count)) for number in range(count)
        ]


NO_SHARDS = Shards()


def shards_of(source: Source, at_once: int) -> Shards:
    """For --shuffle_shards=`at_once`; none where it is 0. ValueError: the source has no shards."""
    if not at_once:
        return NO_SHARDS
    sizes = tuple(getattr(source, "shard_sizes", ()))
    if sum(sizes) != len(source):
        raise ValueError(
            f"--shuffle_shards={at_once} is for training samples in shards, as one set that hvdkit "
            "pack wrote has them, and these are not: leave it out, or pack them"
        )
    return Shards(sizes, at_once)


def philox(
    op: Callable, key: tf.Tensor, counter: Sequence[Any], **arguments: Any
) -> tf.Tensor:
    """What a raw op draws by a key of 64 bits, from a counter of two such numbers on.

    Philox (Salmon et al. 2011) is made for this: even regular keys and counters give words that
    look independent, the same on every device.
    """
    return op(
        key=tf.bitcast(key, tf.uint64)[None],
        counter=tf.cast(tf.stack(counter), tf.uint64),
        alg=tf.random.Algorithm.PHILOX.value,
        **arguments,
    )


def share(total: int, rank: int, size: int) -> tuple[int, int]:
    """First and one-past-last index of `rank`'s part of `total`, split as evenly as possible."""
    return total * rank // size, total * (rank + 1) // size


def partner(index: tf.Tensor, key: tf.Tensor, total: int) -> tf.Tensor:
    """Another of `total` samples, each as likely, that belongs to a sample and its key: int64.

    `index`: int64 scalar; `key`: int32 [2]. A single sample is its own partner.
    """
    word = philox(WORDS, key, [0, _PARTNERS], shape=[], dtype=tf.int64)
    return (index + 1 + word % max(total - 1, 1)) % total


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Order of `num_samples` samples, in global batches of `global_batch_size`.

    A batch is first split into `micro_batches` equal parts, then each part over the ranks, so that
    a micro-batch too holds the same samples on any number of ranks. With `virtual_ranks` it is
    split over those, and a rank holds the samples of its virtual ranks. `seed` is in [0, 2**64).
    `start`: from where on the steps have batches of this size; no earlier step is known. With
    `shards` an epoch goes from one window of them to the next.
    """

    num_samples: int
    global_batch_size: int
    micro_batches: int
    seed: int
    rank: int
    size: int
    virtual_ranks: int = 0
    start: Place = BEGINNING
    shards: Shards = NO_SHARDS

    def __post_init__(self) -> None:
        if self.global_batch_size // self.micro_batches < self.size:
            divisor = ""
            if self.micro_batches > 1:
                divisor = f" / --accumulation_steps={self.micro_batches}"
            raise ValueError(
                f"--global_batch_size={self.global_batch_size}{divisor} is smaller than the number "
                f"of ranks, {self.size}: every rank needs a sample a step"
            )
        if self.num_samples < self.size:
            raise ValueError(
                f"{self.num_samples} training samples are fewer than the {self.size} ranks"
            )

    @property
    def local_micro_size(self) -> int:
        """Samples of this rank in one micro-batch."""
        first, last = self._part()
        return last - first

    @property
    def weight(self) -> float:
        """This rank's share of the global batch; the shares of all ranks sum to 1."""
        return self.local_micro_size * self.micro_batches / self.global_batch_size

    def place(self, step: int) -> Place:
        """Where the run is after `step` steps."""
        return self.start.after(step - self.start.step, self.global_batch_size)

    def _first(self, step: tf.Tensor) -> tf.Tensor:
        """The position of the first sample at `step`."""
        steps = tf.cast(step, tf.int64) - self.start.step
        return self.start.position + steps * self.global_batch_size

    def local_samples(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """This rank's samples at `step` (int64 scalar), one micro-batch after the other.

        Returns, for n = micro_batches * local_micro_size:
          int64 [n]: sample ids in [0, num_samples), each once an epoch.
          int32 [n, 2]: a key of each for tf.random.stateless_* functions, which belongs to (seed,
            position in the run): 64 random bits, so that two are equal only by chance.
        """
        positions = self.local_positions(step)
        first = self._first(step)
        # One op draws the keys of the whole global batch, which takes no longer.
        keys = self._draw(_KEYS, first, self.global_batch_size, words=2, dtype=tf.int32)
        return self.order(positions), tf.gather(keys, positions - first)

    def local_positions(self, step: tf.Tensor) -> tf.Tensor:
        """Positions, counted over the whole run, of this rank's samples at `step`: int64 [n]."""
        micro = self.global_batch_size // self.micro_batches
        first, last = self._part()
        starts = (
            self._first(step) + tf.range(self.micro_batches, dtype=tf.int64) * micro
        )
        return tf.reshape(starts[:, None] + tf.range(first, last, dtype=tf.int64), [-1])

    def ids_of(self, step: int, part: int) -> list[int]:
        """The samples of rank `part` at `step`; with virtual ranks those of that virtual rank."""
        parts = self.virtual_ranks or self.size
        other = dataclasses.replace(self, rank=part, size=parts, virtual_ranks=0)
        return other.local_samples(tf.constant(step, tf.int64))[0].numpy().tolist()

    def _part(self) -> tuple[int, int]:
        """First and one-past-last place of this rank's samples in a micro-batch."""
        micro = self.global_batch_size // self.micro_batches
        if not self.virtual_ranks:
            return share(micro, self.rank, self.size)
        first, last = share(self.virtual_ranks, self.rank, self.size)
        start, _ = share(micro, first, self.virtual_ranks)
        return start, share(micro, last, self.virtual_ranks)[0]

    def order(self, positions: tf.Tensor) -> tf.Tensor:
        """Sample ids at `positions` (int64 [n], ascending); each epoch gives every id once.

        Epochs and seeds have unrelated permutations, drawn at random from at least 2**24: an order
        may repeat by chance after thousands of epochs.
        """
        epochs = positions // self.num_samples
        offsets = positions % self.num_samples
        first = epochs[0]
        count = epochs[-1] - first + 1
        if self.shards.sizes:
            return self._windowed(positions - first * self.num_samples, first, count)

        # The op uses the lowest 8 to 32 bits of each of three words: raw seed and epoch would
        # leave most of the key constant.
        keys = self._draw(_ORDERS, first, count, words=3, dtype=tf.uint32)
        return _permute(offsets, tf.gather(keys, epochs - first), self.num_samples)

    def _windowed(
        self, positions: tf.Tensor, first: tf.Tensor, count: tf.Tensor
    ) -> tf.Tensor:
        """As `order`, by shards; positions count from epoch `first` on, over `count` epochs.

        Each epoch puts the shards in an order, cuts it into windows of nearly as many shards each,
        and puts the samples of each window in an order. All ends below are positions.
        """
        sizes = np.array(self.shards.sizes, np.int64)
        windows = self.shards.windows
        shards = self._shard_order(first, count)
        shard_ends = tf.cumsum(tf.reshape(tf.gather(sizes, shards), [-1]))
        ends_by_epoch = tf.reshape(shard_ends, [-1, len(sizes)])
        last_shards = [window.stop - 1 for window in windows]
        window_ends = tf.reshape(tf.gather(ends_by_epoch, last_shards, axis=1), [-1])
        window_starts = tf.concat([[0], window_ends], 0)
        window_sizes = window_starts[1:] - window_starts[:-1]

        # Each position goes to another one in its window.
        window = tf.searchsorted(window_ends, positions, "right", out_type=tf.int64)
        start = tf.gather(window_starts, window)
        keys = self._draw(
            _WINDOWS,
            first * len(windows),
            count * len(windows),
            words=3,
            dtype=tf.uint32,
        )
        places = start + _permute(
            positions - start,
            tf.gather(keys, window),
            tf.gather(window_sizes, window),
        )

        # Finds the shard of each place, then the sample's id from its place in the shard.
        shard = tf.searchsorted(shard_ends, places, "right", out_type=tf.int64)
        id_ends = tf.gather(
            np.cumsum(sizes), tf.gather(tf.reshape(shards, [-1]), shard)
        )
        return id_ends - tf.gather(shard_ends, shard) + places

    def _shard_order(self, first: tf.Tensor, count: tf.Tensor | int) -> tf.Tensor:
        """The shards in the order of each of `count` epochs: [count, shards]."""
        total = len(self.shards.sizes)
        words = self._draw(
            _SHARDS, first * total, count * total, words=2, dtype=tf.int32
        )
        sort_keys = tf.reshape(tf.bitcast(words, tf.int64), [-1, total])
        return tf.argsort(sort_keys, stable=True)

    def coming_shards(self, step: int) -> list[int]:
        """The shards of the window at `step`, then those of the next; [] without shards: all."""
        if not self.shards.sizes:
            return []
        epoch, offset = divmod(self.place(step).position, self.num_samples)
        order, next_order = self._shard_order(tf.constant(epoch, tf.int64), 2).numpy()
        windows = self.shards.windows
        ends = np.cumsum(np.array(self.shards.sizes)[order])
        current = sum(offset >= ends[window.stop - 1] for window in windows)
        shards = [order[window] for window in windows]
        shards.append(next_order[windows[0]])
        coming = np.concatenate(shards[current : current + 2])
        return list(dict.fromkeys(coming.tolist()))

    def _draw(
        self,
        use: int,
        first: tf.Tensor,
        count: tf.Tensor | int,
        *,
        words: int,
        dtype: tf.DType,
    ) -> tf.Tensor:
        """At most four random 32-bit words for each of `count` numbers from `first` on.

        The seed is the key; the counter goes up by one after four words. Returns [count, words].
        """
        seed = tf.constant(self.seed, tf.uint64)
        drawn = philox(WORDS, seed, [first, use], shape=[4 * count], dtype=dtype)
        return tf.reshape(drawn, [-1, 4])[:, :words]


def permuted(index: tf.Tensor, total: int, seed: int) -> tf.Tensor:
    """The entry `index` (int64 scalar) of the seed's permutation of [0, total)."""
    sampler = Sampler(
        num_samples=total,
        global_batch_size=1,
        micro_batches=1,
        seed=seed,
        rank=0,
        size=1,
    )
    return sampler.order(index[None])[0]


def _permute(index: tf.Tensor, keys: tf.Tensor, total: int | tf.Tensor) -> tf.Tensor:
    """Entries of permutations of [0, total): int64 [n]; keys: uint32 [n, 3], totals: one each."""
    total = tf.broadcast_to(tf.cast(total, tf.int64), tf.shape(index))

    def shuffled(index: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
        # tf.random.experimental.index_shuffle is this op with 4 rounds, too few: orders of two
        # epochs then look alike.
        return tf.raw_ops.RandomIndexShuffle(
            index=index, seed=keys, max_index=last, rounds=8
        )

    # The op computes on ceil(log2(last)) bits: for a power of two that can be one too few to hold
    # `last` itself, and two positions would get one id. So shuffle one more entry, then skip it.
    last = total - 1
    last += tf.cast((last >= 2**16) & (last & (last - 1) == 0), tf.int64)
    ids = shuffled(index, last)
    is_extra = ids == total

    def skipped() -> tf.Tensor:
        return tf.where(is_extra, shuffled(tf.minimum(total, last), last), ids)

    return tf.cond(tf.reduce_any(is_extra), skipped, lambda: ids)
