"""What carries messages between ranks outside of a step: mpi4py, or Horovod where there is no MPI.

Both carriers have the same calls: `largest`, `gather`, `beside`, `broadcast`. Every rank must make
the same ones in the same order, from one thread. Only what `gather` returns grows with the ranks.

Horovod gives all collectives of a kind outside a graph one name, and MPI gives them none. So
`World` begins each exchange with the same call, `largest`, which shows that all are at one place.
"""

import collections
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit import launcher
from hvdkit.stop import BUG

# Bytes of all messages in one `gather`: MPI counts in 32 bits.
MOST_GATHERED = 2**31 - 1
_PART = 2**22  # One broadcast has at most so many bytes.
_LONGEST_NAP = 0.01  # seconds
_STEPS = 20  # A hanging step is known by the times of so many newest ones.
_LEAST_PATIENCE = 60.0  # seconds


class Heartbeat:
    """When this rank last finished a message, a step or a batch of evaluation.

    `parts`: how often it was done with its own part of a step, before it waits for others.
    `reads`: whether it waits for a batch of data.
    """

    parts = 0
    reads = False
    _last = time.monotonic()
    # When the rank entered the part of a step that it is in; 0 where it is in none.
    _entered = 0.0
    _spent = 0.0  # Earlier parts of the step took so many seconds.

    def __init__(self) -> None:
        # Seconds that the latest steps took.
        self._steps: collections.deque[float] = collections.deque(maxlen=_STEPS)

    def beat(self) -> None:
        self._last = time.monotonic()

    def still(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self._last

    def enter_step(self) -> None:
        """Before a part of a step: its input, or what is computed of it."""
        self._entered = self._last = time.monotonic()

    def begin(self) -> None:
        """Of a run: its first step may be as slow as that of the process's first run."""
        self._steps.clear()
        self._entered = 0.0
        self._spent = 0.0
        self.beat()

    def pause_step(self) -> None:
        """Between the parts: code of the user may take long there."""
        self.beat()
        self._spent += self._last - self._entered
        self._entered = 0.0

    def leave_step(self) -> None:
        self.pause_step()
        self._steps.append(self._spent)
        self._spent = 0.0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around a wait for a batch of data."""
        self.reads = True
        self.beat()
        try:
            yield
        finally:
            self.reads = False
            self.beat()

    def own_part_done(self) -> float:
        """Called within the step; the time, in seconds since 1970."""
        self.beat()
        self.parts += 1
        return time.time()

    def patience(self, start: float, most: float) -> float:
        """Seconds for which this rank may be still where it is.

        `start` before the first step has ended. In a step 30 times the median step, but at least
        60, and of the first ten steps at most `start`: the first one may be slow. Elsewhere `most`,
        as saving or a task's own action may take long. Infinity for `start`: for ever.
        """
        if not self._steps:
            return start
        most_at_first = min(start, most)
        if not self._entered:
            return most
        if len(self._steps) >= _STEPS // 2:
            most_at_first = most
        return min(
            most_at_first, max(_LEAST_PATIENCE, 30 * statistics.median_low(self._steps))
        )


heartbeat = Heartbeat()


class Horovod:
    """Over Gloo, and alone."""

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over the ranks; as many on all, each less than 2^63."""
        with tf.device("CPU:0"):
            found = hvd.allreduce(
                tf.constant(numbers, tf.int64), op=hvd.Max, name="messages.max"
            )
        heartbeat.beat()
        return found.numpy().tolist()

    def gather(self, own: np.ndarray, size: int) -> list[np.ndarray]:
        """Every rank's message, uint8 [n], in rank order, on every rank."""
        with tf.device("CPU:0"):
            lengths = hvd.allgather(
                np.array([own.size], np.int64), name="messages.lengths"
            )
            everything = hvd.allgather(own, name="messages.gather")
        heartbeat.beat()
        return np.split(everything.numpy(), np.cumsum(lengths)[:-1])

    def beside(self, own: np.ndarray) -> list[np.ndarray]:
        """The messages of this host's ranks, in rank order; here this one's for each."""
        return [own for _ in range(hvd.local_size())]

    def broadcast(self, part: np.ndarray, root: int, own: bool) -> None:
        """Gives uint8 [n] the values that rank `root`'s has; `own`: this is that rank."""
        with tf.device("CPU:0"):  # it may be more than a GPU has room for
            sent = hvd.broadcast(part, root_rank=root, name="messages.broadcast")
        if not own:
            part[:] = sent
        heartbeat.beat()


class Mpi:
    """As Horovod, through mpi4py; its own communicator never meets a step's collectives.

    Calls do not block: a rank that waits in MPI keeps a core busy, hears no signal, seems to work.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD.Dup()

    def largest(self, numbers: Sequence[int]) -> list[int]:
        own = np.array(numbers, np.int64)
        found = np.empty_like(own)
        self._wait(self._world.Iallreduce(own, found, self._mpi.MAX))
        return found.tolist()

    def gather(self, own: np.ndarray, size: int, ranks: Any = None) -> list[np.ndarray]:
        ranks = ranks or self._world
        lengths = np.empty(size, np.int64)
        self._wait(ranks.Iallgather(np.array([own.size], np.int64), lengths))
        everything = np.empty(lengths.sum(), np.uint8)
        self._wait(ranks.Iallgatherv(own, [everything, lengths.tolist()]))
        return np.split(everything, np.cumsum(lengths)[:-1])

    def beside(self, own: np.ndarray) -> list[np.ndarray]:
        host = self._world.Split_type(self._mpi.COMM_TYPE_SHARED)
        found = self.gather(own, host.size, ranks=host)
        host.Free()
        return found

    def broadcast(self, part: np.ndarray, root: int, own: bool) -> None:
        self._wait(self._world.Ibcast(part, root))

    def communicator(self) -> int:
        """The address of MPI's handle of a communicator of all ranks that nothing else uses."""
        self._of_step = self._world.Dup()
        return self._mpi._addressof(self._of_step)

    def _wait(self, request: Any) -> None:
        start = time.monotonic()
        while not request.Test():
            time.sleep(min(_LONGEST_NAP, (time.monotonic() - start) / 8))
        heartbeat.beat()


Carrier = Horovod | Mpi


def in_mpi_world() -> bool:
    """Whether this process is in an MPI world, and Horovod will use MPI."""
    over_mpi = os.environ.get("HOROVOD_CONTROLLER", "").lower() != "gloo"
    return over_mpi and launcher.in_mpi_world()


def carrier() -> Carrier:
    """The one for this world; call it after hvd.init, and on every rank."""
    if not (in_mpi_world() and hvd.mpi_enabled()):
        return Horovod()
    from mpi4py import MPI

    # Horovod's thread calls MPI too.
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE or MPI.COMM_WORLD.size != hvd.size():
        return Horovod()
    _end_all_on_exceptions()
    return Mpi()


def fill(carrier: Carrier, array: np.ndarray, *, root: int, own: bool) -> None:
    """Gives uint8 [n] the values of rank `root`, in parts; `own`: this is that rank."""
    for start in range(0, array.size, _PART):
        carrier.broadcast(array[start : start + _PART], root, own)


def _end_all_on_exceptions() -> None:
    """An uncaught exception ends the process at once, so that the launcher ends the others.

    Python's own way out would wait in MPI's finalize for ranks that wait for this one.
    """
    show = sys.excepthook

    def show_and_end(*error: Any) -> None:
        show(*error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(BUG)

    sys.excepthook = show_and_end
