"""How ranks tell each other what they saw: JSON over MPI, or over Horovod on one host with Gloo.

What is received is never unpickled: mpi4py's and Horovod's own functions for objects would do that.
"""

import contextlib
import ctypes
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from . import ports


def launcher() -> str:
    """What started this process: gloo, mpi, alone, or srun without an MPI world."""
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        return "gloo"
    if "OMPI_COMM_WORLD_RANK" in os.environ or "PMIX_RANK" in os.environ:
        return "mpi"
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    return "srun" if "SLURM_STEP_ID" in os.environ and int(tasks) > 1 else "alone"


def number(*names: str, default: int = 0) -> int:
    """The first of these variables that is set."""
    return next((int(os.environ[name]) for name in names if name in os.environ), default)


def rank() -> int:
    """As the launcher says, before MPI or Horovod is up."""
    return number("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def local_rank() -> int:
    return number("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def dealt() -> list[str]:
    """The host of each rank as hosts.sh dealt them; empty where nothing says that."""
    hosts: list[str] = []
    for entry in filter(None, os.environ.get("LAUNCH_HOSTS", "").split(",")):
        name, _, slots = entry.rpartition(":")
        hosts += [name] * int(slots) if name and slots.isdecimal() else [entry]
    return hosts


def mpi() -> Any:
    """mpi4py's MPI, which is not started by that."""
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    return MPI


class Mpi:
    """Ranks talk with rank 0 only, so a way that is closed between two others hangs nobody."""

    name = "MPI"

    def __init__(self) -> None:
        self._mpi = mpi()
        # mpi4py's own call would hold all threads of Python up, and with them what ends a hang.
        start, got = ctypes.CDLL(self._mpi.__file__).MPI_Init_thread, ctypes.c_int()
        start(None, None, self._mpi.THREAD_MULTIPLE, ctypes.byref(got))
        self._world = self._mpi.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size

    def gather(self, value: Any, seconds: float) -> list[Any]:
        """On rank 0 every rank's value, None for one that did not come in that time; else []."""
        if self.rank:
            self._send(value, 0)
            return []
        values, deadline = {0: value}, time.monotonic() + seconds
        while len(values) < self.size and time.monotonic() < deadline:
            for source in set(range(self.size)) - set(values):
                if self._world.Iprobe(source):
                    values[source] = self._receive(source)
            time.sleep(0.01)
        return [values.get(rank) for rank in range(self.size)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.rank:
            return self._receive(0)
        for other in range(1, self.size):
            self._send(value, other)
        return value

    def _send(self, value: Any, other: int) -> None:
        self._world.Send([json.dumps(value).encode(), self._mpi.BYTE], other)

    def _receive(self, source: int) -> Any:
        status = self._mpi.Status()
        self._world.Probe(source, status=status)
        content = bytearray(status.Get_count(self._mpi.BYTE))
        self._world.Recv([content, self._mpi.BYTE], source)
        return json.loads(content)


class Horovod:
    """Where Horovod is started already: on one host over Gloo, or by itself."""

    def __init__(self, hvd: Any, tf: Any) -> None:
        self._hvd, self._tf, self.name = hvd, tf, "Gloo"
        self.rank, self.size = hvd.rank(), hvd.size()

    def gather(self, value: Any, seconds: float) -> list[Any]:
        import numpy as np

        line = np.frombuffer(json.dumps(value).encode() + b"\n", np.uint8)
        with self._tf.device("/CPU:0"):
            lines = self._hvd.allgather(self._tf.constant(line), name="doctor.gather").numpy()
        return [json.loads(line) for line in lines.tobytes().splitlines()]

    def broadcast(self, value: Any) -> Any:
        return self.gather(value, 0)[0]


def roll_call() -> set[int] | None:
    """The ranks that rank 0 has heard of by now, which grow; None on others.

    MPI's start waits for all ranks and cannot say which did not come. So each tells rank 0 before,
    at a port that follows from what hosts.sh sets; the port reads a number and answers nothing.
    """
    hosts, launch = dealt(), os.environ.get("LAUNCH_ID", "")
    if not launch or not hosts or launcher() != "mpi":
        return None
    came, port = {0}, 20_000 + zlib.crc32(launch.encode()) % 10_000
    work, words = (_call, (hosts[0], port)) if rank() else (_listen, (port, came))
    threading.Thread(target=work, args=words, daemon=True).start()
    return None if rank() else came


def _listen(port: int, came: set[int]) -> None:
    with contextlib.suppress(OSError), ports.listen(port) as server:
        while True:
            link, _ = server.accept()
            with link, contextlib.suppress(OSError, ValueError):
                link.settimeout(1)
                came.add(int(link.recv(8)))


def _call(host: str, port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            with socket.create_connection((host, port), timeout=5) as link:
                link.sendall(str(rank()).encode())
            return
        time.sleep(0.5)


@contextlib.contextmanager
def watch(
    stage: str, seconds: float, advice: str, known: Callable[[], str] = str
) -> Iterator[None]:
    """Ends this process, saying where it hung, when the block takes longer than `seconds`.

    On standard output, after what `known` returns.
    """

    def expire() -> None:
        where = f"rank {rank()} on {os.uname().nodename}"
        hung = f"error: {where} hung for {seconds:.0f} s while {stage}: {advice}"
        print(*filter(None, [known()]), hung, sep="\n", flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
