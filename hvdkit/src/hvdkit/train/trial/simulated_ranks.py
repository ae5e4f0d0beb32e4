"""Ranks that this process stands in for, one after the other: what a step does on several of them.

Inside `acting`, Horovod's functions are those of a simulated rank: hvd.rank(), hvd.size() and the
collectives, which Horovod's tape and `across.gather` call too. A rank posts what it gives to each
collective, and gets what the others posted a round before. Once a round posts what the one before
did, each rank has computed what it would among real ones.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common import process_sets
from horovod.tensorflow import mpi_ops

from hvdkit.ranks import exchange

# What is no sum, by Horovod's operation.
_REDUCED = {hvd.Max: tf.reduce_max, hvd.Min: tf.reduce_min, hvd.Product: tf.reduce_prod}
_MOST_ROUNDS = 20  # collectives of a step do not form longer chains


class SimulatedRank:
    """One rank in one round. Its methods stand for the operations of Horovod's library.

    Attributes:
      posted: what it gave to each collective, in order.
    """

    def __init__(
        self, rank: int, samples: Sequence[int], known: Sequence[Sequence[tf.Tensor]]
    ) -> None:
        """`samples`: of each rank; `known`: what each rank posted a round before."""
        self.rank = rank
        self.size = len(samples)
        self.posted: list[tf.Tensor] = []
        self._samples = samples
        self._known = known

    def horovod_allreduce(
        self,
        tensor: tf.Tensor,
        *,
        reduce_op: int,
        prescale_factor: float,
        postscale_factor: float,
        **others: Any,
    ) -> tf.Tensor:
        def reduced(x: tf.Tensor) -> tf.Tensor:
            values = self._everyone(x)
            if reduce_op in _REDUCED:
                return _REDUCED[reduce_op](tf.stack(values), 0)
            factor = prescale_factor * postscale_factor
            if reduce_op == hvd.Average:
                factor = factor / self.size
            return tf.add_n(values) * tf.cast(factor, x.dtype)

        @tf.custom_gradient
        def with_gradient(x: tf.Tensor):
            return reduced(x), reduced  # as Horovod has it

        return with_gradient(tf.convert_to_tensor(tensor))

    def horovod_grouped_allreduce(
        self, tensors: Sequence[tf.Tensor], **others: Any
    ) -> list[tf.Tensor]:
        return [self.horovod_allreduce(tensor, **others) for tensor in tensors]

    def horovod_allgather(self, tensor: tf.Tensor, **others: Any) -> tf.Tensor:
        @tf.custom_gradient
        def with_gradient(x: tf.Tensor):
            parts = self._everyone(x, guess=self._as_many_rows)
            first = sum(part.shape[0] for part in parts[: self.rank])

            def backward(upstream: tf.Tensor) -> tf.Tensor:
                # Horovod's gradient of a gather is this mean too.
                mean = tf.add_n(self._everyone(upstream)) / self.size
                return mean[first : first + x.shape[0]]

            return tf.concat(parts, 0), backward

        return with_gradient(tf.convert_to_tensor(tensor))

    def horovod_grouped_allgather(
        self, tensors: Sequence[tf.Tensor], **others: Any
    ) -> list[tf.Tensor]:
        return [self.horovod_allgather(tensor) for tensor in tensors]

    def horovod_alltoall(
        self, tensor: tf.Tensor, *, splits: tf.Tensor, **others: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        tensor = tf.convert_to_tensor(tensor)
        if not splits.shape[0]:
            splits = tf.fill([self.size], tensor.shape[0] // self.size)
        tensors = self._everyone(tensor)
        sizes = self._everyone(splits)
        parts = [tf.split(x, size)[self.rank] for x, size in zip(tensors, sizes)]
        return tf.concat(parts, 0), tf.stack([part.shape[0] for part in parts])

    def horovod_broadcast(
        self, tensor: tf.Tensor, *, root_rank: int, **others: Any
    ) -> tf.Tensor:
        return self._everyone(tf.convert_to_tensor(tensor))[root_rank]

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            f"the step calls {name}, which its trial on simulated ranks does not know: use "
            "hvd.allreduce, hvd.allgather, hvd.alltoall or hvd.broadcast"
        )

    def _everyone(
        self, own: tf.Tensor, guess: Callable[[tf.Tensor, int], tf.Tensor] | None = None
    ) -> list[tf.Tensor]:
        """What each rank gives to this collective; `guess`: in the first round."""
        number = len(self.posted)
        self.posted.append(own)
        values = []
        for rank in range(self.size):
            known = self._known[rank]
            if rank == self.rank:
                values.append(own)
            elif number < len(known):
                values.append(known[number])
            else:
                values.append(guess(own, rank) if guess else own)
        return values

    def _as_many_rows(self, own: tf.Tensor, rank: int) -> tf.Tensor:
        """This rank's rows, as many as another has if they are rows of samples."""
        rows = own.shape[0]
        samples = self._samples[self.rank]
        if rows % samples:
            return own
        count = rows // samples * self._samples[rank]
        return tf.gather(own, tf.range(count) % rows)


class _Place:
    """Stands for Horovod's C library in this thread: it tells rank and size."""

    def __init__(self, library: Any, rank: SimulatedRank) -> None:
        self._library = library
        self._rank = rank
        self._thread = threading.get_ident()

    def horovod_rank(self) -> int:
        return self._rank.rank if self._is_here() else self._library.horovod_rank()

    def horovod_size(self) -> int:
        return self._rank.size if self._is_here() else self._library.horovod_size()

    def horovod_process_set_rank(self, process_set: int) -> int:
        return self.horovod_rank()

    def horovod_process_set_size(self, process_set: int) -> int:
        return self.horovod_size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def _is_here(self) -> bool:
        return threading.get_ident() == self._thread


@contextlib.contextmanager
def acting(rank: SimulatedRank) -> Iterator[None]:
    """Inside, what this thread calls of Horovod is the simulated rank's."""
    basics = mpi_ops._basics
    everyone = process_sets.global_process_set
    operations = mpi_ops.MPI_LIB
    library = basics.MPI_LIB_CTYPES
    ranks = everyone.ranks
    in_use = exchange.in_use
    exchange.in_use = None
    mpi_ops.MPI_LIB = rank
    basics.MPI_LIB_CTYPES = _Place(library, rank)
    everyone.ranks = list(range(rank.size))
    try:
        yield
    finally:
        mpi_ops.MPI_LIB = operations
        basics.MPI_LIB_CTYPES = library
        everyone.ranks = ranks
        exchange.in_use = in_use


def outcomes(act: Callable[[int], Any], samples: Sequence[int]) -> list[Any]:
    """What `act(rank)` returns on each of the simulated ranks, which have so many samples.

    It is called several times for each rank, and must leave no trace.
    """
    known: list[list[tf.Tensor]] = [[] for _ in samples]
    results: list[Any] = []
    for _ in range(_MOST_ROUNDS):
        results = []
        posted = []
        for number in range(len(samples)):
            rank = SimulatedRank(number, samples, known)
            with acting(rank):
                results.append(act(number))
            posted.append(rank.posted)
        if len(samples) == 1 or _alike(posted, known):
            break
        known = posted
    return results


def _alike(
    posted: Sequence[Sequence[tf.Tensor]], known: Sequence[Sequence[tf.Tensor]]
) -> bool:
    for now, earlier in zip(posted, known):
        if [tensor.shape for tensor in now] != [tensor.shape for tensor in earlier]:
            return False
        for one, other in zip(now, earlier):
            one = np.asarray(tf.cast(one, tf.float64))
            other = np.asarray(tf.cast(other, tf.float64))
            if not np.allclose(one, other, rtol=1e-5, atol=1e-9, equal_nan=True):
                return False
    return True
