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

WORDS = tf.raw_ops.StatelessRandomUniformFullIntV2  # of random bits
_ORDERS, _KEYS, _SHARDS, _WINDOWS = 1, 2, 3, 4  # uses of the random words
_PARTNERS = 2  # of those of a sample's key


class Shards(NamedTuple):
    """Samples that lie in files one after the other, of which few are read at a time."""

    sizes: tuple[int, ...]  # samples of each
    at_once: int  # shards of a window, at most

    @property
    def windows(self) -> list[slice]:
        """Where an epoch's order of shards is cut: each window has nearly as many as the others."""
        count = -(-len(self.sizes) // self.at_once)
        return [slice(*share(len(self.sizes), number, count)) for number in range(count)]


def shards_of(source: Source, at_once: int) -> Shards | None:
    """For --shuffle_shards=`at_once`; None where it is 0. ValueError: the source has no shards."""
    if not at_once:
        return None
    sizes = tuple(getattr(source, "shard_sizes", ()))
    if sum(sizes) != len(source):
        raise ValueError(
            f"--shuffle_shards={at_once} is for training samples in shards, as one set that hvdkit "
            "pack wrote has them, and these are not: leave it out, or pack them"
        )
    return Shards(sizes, at_once)


def philox(op: Callable, key: tf.Tensor, counter: Sequence[Any], **how: Any) -> tf.Tensor:
    """What a raw op draws by a key of 64 bits from a counter of two such numbers on.

    Philox (Salmon et al. 2011) is made for this: even regular keys and counters give words that
    look independent, the same on every device.
    """
    bits, counter = tf.bitcast(key, tf.uint64), tf.cast(tf.stack(counter), tf.uint64)
    return op(key=bits[None], counter=counter, alg=tf.random.Algorithm.PHILOX.value, **how)


def share(total: int, rank: int, size: int) -> tuple[int, int]:
    """First and one-past-last index of `rank`'s part of `total`, split as evenly as possible."""
    return total * rank // size, total * (rank + 1) // size


def partner(index: tf.Tensor, key: tf.Tensor, total: int) -> tf.Tensor:
    """Another of `total` samples, each as likely, that belongs to a sample and its key: int64.

    `index`: int64 scalar; `key`: int32 [2]. Of a single sample, itself.
    """
    # What augmentation draws counts from [0, 0] and [0, 1].
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
    shards: Shards | None = None

    def __post_init__(self) -> None:
        if self.global_batch_size // self.micro_batches < self.size:
            per = f" / --accumulation_steps={self.micro_batches}" if self.micro_batches > 1 else ""
            than = f"the number of ranks, {self.size}: every rank needs a sample a step"
            batch = f"--global_batch_size={self.global_batch_size}{per}"
            raise ValueError(f"{batch} is smaller than {than}")
        if self.num_samples < self.size:
            samples = f"{self.num_samples} training samples"
            raise ValueError(f"{samples} are fewer than the {self.size} ranks")

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
        """Of the run after `step` steps."""
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
        # Drawn for the whole global batch, in one op, which takes no longer.
        keys = self._draw(_KEYS, first, self.global_batch_size, dtype=tf.int32)[:, :2]
        return self.order(positions), tf.gather(keys, positions - first)

    def local_positions(self, step: tf.Tensor) -> tf.Tensor:
        """Positions, counted over the whole run, of this rank's samples at `step`: int64 [n]."""
        micro = self.global_batch_size // self.micro_batches
        first, last = self._part()
        starts = self._first(step) + tf.range(self.micro_batches, dtype=tf.int64) * micro
        return tf.reshape(starts[:, None] + tf.range(first, last, dtype=tf.int64), [-1])

    def ids_of(self, step: int, part: int) -> list[int]:
        """The samples of rank `part` at `step`; with virtual ranks, of that virtual rank."""
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
        epochs, offsets = positions // self.num_samples, positions % self.num_samples
        first, count = epochs[0], epochs[-1] - epochs[0] + 1
        if self.shards:
            return self._windowed(positions - first * self.num_samples, first, count)
        # The op uses the lowest 8 to 32 bits of each of three words: raw seed and epoch would
        # leave most of the key constant.
        keys = self._draw(_ORDERS, first, count, dtype=tf.uint32)[:, :3]
        return _permute(offsets, tf.gather(keys, epochs - first), self.num_samples)

    def _windowed(self, positions: tf.Tensor, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """As `order`, by shards; positions count from epoch `first` on, over `count` epochs.

        Each epoch puts the shards in an order, cuts it into windows of nearly as many shards each,
        and puts the samples of each window in an order. All ends below are positions.
        """
        sizes, windows = np.array(self.shards.sizes, np.int64), len(self.shards.windows)
        shards = self._shard_order(first, count)
        ends = tf.cumsum(tf.reshape(tf.gather(sizes, shards), [-1]))
        last = [part.stop - 1 for part in self.shards.windows]
        window_ends = tf.reshape(tf.gather(tf.reshape(ends, [-1, len(sizes)]), last, axis=1), [-1])
        starts = tf.concat([[0], window_ends], 0)

        window = tf.searchsorted(window_ends, positions, "right", out_type=tf.int64)
        start, total_in = tf.gather(starts, window), tf.gather(starts[1:] - starts[:-1], window)
        keys = self._draw(_WINDOWS, first * windows, count * windows, dtype=tf.uint32)[:, :3]
        places = start + _permute(positions - start, tf.gather(keys, window), total_in)

        found = tf.searchsorted(ends, places, "right", out_type=tf.int64)
        # Samples before the end of a shard, in the order of ids.
        ids_before = tf.gather(np.cumsum(sizes), tf.gather(tf.reshape(shards, [-1]), found))
        return ids_before - tf.gather(ends, found) + places

    def _shard_order(self, first: tf.Tensor, count: tf.Tensor | int) -> tf.Tensor:
        """The shards in the order of each of `count` epochs: [count, shards]."""
        total = len(self.shards.sizes)
        words = self._draw(_SHARDS, first * total, count * total, dtype=tf.int32)
        words = tf.reshape(tf.bitcast(words[:, :2], tf.int64), [-1, total])
        return tf.argsort(words, stable=True)

    def coming_shards(self, step: int) -> list[int]:
        """The shards of the window at `step`, then those of the next; [] without shards: all."""
        if not self.shards:
            return []
        epoch, offset = divmod(self.place(step).position, self.num_samples)
        order = self._shard_order(tf.constant(epoch, tf.int64), 2).numpy()
        ends = np.cumsum(np.array(self.shards.sizes)[order[0]])
        parts = [(row, part) for row in order for part in self.shards.windows]
        now = next(n for n, (_, part) in enumerate(parts) if offset < ends[part.stop - 1])
        both = [row[part] for row, part in parts[now : now + 2]]
        return [*dict.fromkeys(np.concatenate(both).tolist())]

    def _draw(
        self, use: int, first: tf.Tensor, count: tf.Tensor | int, *, dtype: tf.DType
    ) -> tf.Tensor:
        """Four random 32-bit words for each of `count` numbers from `first` on: [count, 4].

        The seed is the key; the counter goes up by one after four words.
        """
        seed = tf.constant(self.seed, tf.uint64)
        words = philox(WORDS, seed, [first, use], shape=[4 * count], dtype=dtype)
        return tf.reshape(words, [-1, 4])


def permuted(index: tf.Tensor, total: int, seed: int) -> tf.Tensor:
    """The entry `index` (int64 scalar) of the seed's permutation of [0, total)."""
    return Sampler(total, 1, 1, seed, 0, 1).order(index[None])[0]


def _permute(index: tf.Tensor, keys: tf.Tensor, total: int | tf.Tensor) -> tf.Tensor:
    """Entries of permutations of [0, total): int64 [n]; keys: uint32 [n, 3], totals: one each."""
    total = tf.broadcast_to(tf.cast(total, tf.int64), tf.shape(index))

    def shuffled(index: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
        # tf.random.experimental.index_shuffle is this op with 4 rounds, too few: orders of two
        # epochs then look alike.
        return tf.raw_ops.RandomIndexShuffle(index=index, seed=keys, max_index=last, rounds=8)

    # The op computes on ceil(log2(last)) bits: for a power of two that can be one too few to hold
    # `last` itself, and two positions would get one id. So shuffle one more entry, then skip it.
    last = total - 1
    last += tf.cast((last >= 2**16) & (last & (last - 1) == 0), tf.int64)
    ids = shuffled(index, last)
    out = ids == total
    again = lambda: tf.where(out, shuffled(tf.minimum(total, last), last), ids)  # noqa: E731
    return tf.cond(tf.reduce_any(out), again, lambda: ids)
