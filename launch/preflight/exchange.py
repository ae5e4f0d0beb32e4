"""How ranks talk to each other before Horovod is up, so that what would hang it can be named.

Under `horovodrun --gloo` through the launcher's rendezvous server (a key-value store over HTTP),
where there is an MPI world through mpi4py. Values travel as JSON: anyone who reaches that server's
port can write to it, and what is read from it must not be able to do anything.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

_MOST = 1 << 26  # bytes of one value; facts of a rank are some thousands
_TRIES = 3
_LONGEST_PAUSE = 1.0  # of a rank that asks again, or more: hundreds of them share one server,
_ASKED_A_SECOND = 200  # which answers some 1,500 requests a second


class Failed(RuntimeError):
    """Ranks could not tell each other something; one sentence says which, where and why."""


class Exchange(Protocol):
    name: str
    rank: int
    size: int
    meeting: str  # the place where ranks report, in words

    def gather(self, name: str, value: Any, seconds: float) -> list[Any]:
        """On rank 0 every rank's value, None for a rank that did not come; elsewhere [].

        Args:
          value: what JSON holds; every rank gets lists for tuples.
        Raises:
          Failed: what a rank sent cannot be read, or it cannot be sent.
        """

    def broadcast(self, name: str, value: Any, seconds: float) -> Any:
        """Rank 0's value on every rank."""


def launcher() -> str:
    """What started this process: gloo, mpi, alone, or srun without an MPI world."""
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        return "gloo"
    if "OMPI_COMM_WORLD_RANK" in os.environ or "PMIX_RANK" in os.environ:
        return "mpi"
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    return "srun" if "SLURM_STEP_ID" in os.environ and int(tasks) > 1 else "alone"


def connect() -> Exchange:
    return {"gloo": Rendezvous, "mpi": Mpi}.get(launcher(), Alone)()


def dealt() -> list[str]:
    """The host of each rank as the launcher dealt them; empty where it does not say."""
    hosts: list[str] = []
    for entry in filter(None, os.environ.get("LAUNCH_HOSTS", "").split(",")):
        name, _, slots = entry.rpartition(":")
        hosts += [name] * int(slots) if name and slots.isdecimal() else [entry]
    return hosts


def encode(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def decode(content: bytes, source: str) -> Any:
    """The value that `encode` was given.

    Raises:
      Failed: `content` is something else; `source` says where it came from.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise Failed(
            f"{source} is not what a rank of doctor.py writes ({content[:40]!r}): does another "
            "program use that port?"
        ) from None


class Rendezvous:
    """Gloo: the server that horovodrun keeps for its workers."""

    name = "Gloo"

    def __init__(self) -> None:
        self.rank = int(os.environ["HOROVOD_RANK"])
        self.size = int(os.environ["HOROVOD_SIZE"])
        port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        self.server = (os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], port)
        self.meeting = f"the launcher's server at {self.server[0]} port {port}"

    def gather(self, name: str, value: Any, seconds: float) -> list[Any]:
        if self.rank:
            self._put(f"{name}.{self.rank}", value)
            return []
        values, missing = {0: decode(encode(value), name)}, set(range(1, self.size))

        def look() -> bool:
            for rank in sorted(missing):
                found = self._get(f"{name}.{rank}")
                if found is not None:
                    values[rank] = found[0]
                    missing.discard(rank)
            return not missing

        _until(look, seconds)
        return [values.get(rank) for rank in range(self.size)]

    def broadcast(self, name: str, value: Any, seconds: float) -> Any:
        if self.rank == 0:
            self._put(name, value)
            return decode(encode(value), name)
        found: list[Any] = []

        def look() -> bool:
            found.extend(self._get(name) or [])
            return bool(found)

        if not _until(look, seconds, max(_LONGEST_PAUSE, self.size / _ASKED_A_SECOND)):
            raise Failed(f"rank 0 wrote no {name!r} to {self.meeting} in {seconds:.0f} s")
        return found[0]

    def _put(self, key: str, value: Any) -> None:
        status, _ = self._request("PUT", key, encode(value))
        if status != 200:
            raise Failed(f"{self.meeting} refused {key!r} of rank {self.rank}: HTTP {status}")

    def _get(self, key: str) -> list[Any] | None:
        """[the value], None while there is none."""
        status, content = self._request("GET", key)
        if len(content) > _MOST:
            raise Failed(f"{key!r} at {self.meeting} has more than {_MOST:,} bytes")
        return [decode(content, f"{key!r} at {self.meeting}")] if status == 200 else None

    def _request(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        # Without urllib: it would send this through a proxy where one is configured. Again when it
        # fails: the server queues five connections, and hundreds of ranks come at once.
        for left in reversed(range(_TRIES)):
            connection = http.client.HTTPConnection(*self.server, timeout=30)
            try:
                connection.request(method, f"/doctor/{key}", body)
                answer = connection.getresponse()
                return answer.status, answer.read(_MOST + 1)
            except (OSError, http.client.HTTPException) as error:
                if not left:
                    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                    raise Failed(
                        f"rank {self.rank} on {os.uname().nodename} cannot talk to {self.meeting}, "
                        f"tried {_TRIES} times: {why}; look at --interface and firewalls"
                    ) from None
                time.sleep(1)
            finally:
                connection.close()
        raise AssertionError("not reached")


def _until(look: Callable[[], bool], seconds: float, longest: float = _LONGEST_PAUSE) -> bool:
    """Looks again, ever more seldom, until there is what is looked for or time is over."""
    deadline, pause = time.monotonic() + seconds, 0.05
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(longest, 1.3 * pause)
    return True


class Mpi:
    """An MPI world; its calls wait for every rank, so they are made under `watch`.

    Buffers of JSON: mpi4py's own `gather` and `bcast` of objects would unpickle what they receive.
    """

    name, meeting = "MPI", "the MPI world"

    def __init__(self) -> None:
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size

    def gather(self, name: str, value: Any, seconds: float) -> list[Any]:
        import numpy as np

        own = np.frombuffer(encode(value), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        self.world.Allgather(np.array([own.size], np.int64), sizes)
        together = np.empty(sizes.sum() if self.rank == 0 else 0, np.uint8)
        self.world.Gatherv(own, [together, sizes.tolist()] if self.rank == 0 else None)
        if self.rank:
            return []
        parts = np.split(together, np.cumsum(sizes)[:-1])
        return [decode(p.tobytes(), f"{name!r} of rank {r}") for r, p in enumerate(parts)]

    def broadcast(self, name: str, value: Any, seconds: float) -> Any:
        import numpy as np

        content = np.frombuffer(encode(value), np.uint8).copy()
        size = np.array([content.size], np.int64)
        self.world.Bcast(size)
        if self.rank:
            content = np.empty(size[0], np.uint8)
        self.world.Bcast(content)
        return decode(content.tobytes(), f"{name!r} of rank 0")


class Alone:
    name, rank, size, meeting = "no launcher", 0, 1, "this process"

    def gather(self, name: str, value: Any, seconds: float) -> list[Any]:
        return [decode(encode(value), name)]

    def broadcast(self, name: str, value: Any, seconds: float) -> Any:
        return decode(encode(value), name)


@contextlib.contextmanager
def watch(
    stage: str, seconds: float, advice: str, known: Callable[[], str] = str
) -> Iterator[None]:
    """Ends this process, saying where it hung, when the block takes longer than `seconds`.

    Args:
      known: returns lines to print first, about what was found out so far.
    """

    def expire() -> None:
        ranks = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
        rank = next((os.environ[name] for name in ranks if name in os.environ), "0")
        print(
            *filter(None, [known()]),
            f"error: rank {rank} on {os.uname().nodename} hung for {seconds:.0f} s while {stage}: "
            f"{advice}",
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
