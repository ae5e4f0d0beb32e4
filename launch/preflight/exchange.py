"""How ranks talk to each other before Horovod is up, so that what would hang it can be named.

Under `horovodrun --gloo` through the launcher's rendezvous server (a key-value store over HTTP),
where there is an MPI world through mpi4py.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol


class Exchange(Protocol):
    name: str
    rank: int
    size: int

    def gather(self, name: str, value: Any, seconds: float) -> list[Any]:
        """On rank 0 every rank's value, None for a rank that did not come; elsewhere []."""

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


class Rendezvous:
    """Gloo: the server that horovodrun keeps for its workers."""

    name = "Gloo"

    def __init__(self) -> None:
        self.rank = int(os.environ["HOROVOD_RANK"])
        self.size = int(os.environ["HOROVOD_SIZE"])
        port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        self.server = (os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], port)

    def gather(self, name: str, value: Any, seconds: float) -> list[Any]:
        if self.rank:
            self._request("PUT", f"{name}.{self.rank}", pickle.dumps(value))
            return []
        values, deadline = {0: value}, time.monotonic() + seconds
        while len(values) < self.size and time.monotonic() < deadline:
            for rank in set(range(self.size)) - set(values):
                found = self._request("GET", f"{name}.{rank}")
                if found is not None:
                    values[rank] = pickle.loads(found)
            time.sleep(0.05)
        return [values.get(rank) for rank in range(self.size)]

    def broadcast(self, name: str, value: Any, seconds: float) -> Any:
        if self.rank == 0:
            self._request("PUT", name, pickle.dumps(value))
            return value
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self._request("GET", name)
            if found is not None:
                return pickle.loads(found)
            time.sleep(0.1)
        raise TimeoutError(f"rank 0 said nothing in {seconds:.0f} s (waiting for its {name!r})")

    def _request(self, method: str, key: str, body: bytes | None = None) -> bytes | None:
        # Without urllib: it would send this through a proxy where one is configured.
        connection = http.client.HTTPConnection(*self.server, timeout=30)
        try:
            connection.request(method, f"/doctor/{key}", body)
            answer = connection.getresponse()
            content = answer.read()
            return content if answer.status == 200 else None
        finally:
            connection.close()


class Mpi:
    """An MPI world; its calls wait for every rank, so they are made under `watch`."""

    name = "MPI"

    def __init__(self) -> None:
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size

    def gather(self, name: str, value: Any, seconds: float) -> list[Any]:
        return self.world.gather(value) or []

    def broadcast(self, name: str, value: Any, seconds: float) -> Any:
        return self.world.bcast(value)


class Alone:
    name, rank, size = "no launcher", 0, 1

    def gather(self, name: str, value: Any, seconds: float) -> list[Any]:
        return [value]

    def broadcast(self, name: str, value: Any, seconds: float) -> Any:
        return value


@contextlib.contextmanager
def watch(stage: str, seconds: float, advice: str) -> Iterator[None]:
    """Ends this process, saying where it hung, when the block takes longer than `seconds`."""

    def expire() -> None:
        ranks = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
        rank = next((os.environ[name] for name in ranks if name in os.environ), "0")
        print(
            f"error: rank {rank} on {os.uname().nodename} hung for {seconds:.0f} s while {stage}: "
            f"{advice}",
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
