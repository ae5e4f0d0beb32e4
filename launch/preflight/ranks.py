"""How ranks exchange JSON: over MPI, or over Horovod on one host with Gloo.

Nothing is unpickled, as mpi4py's and Horovod's functions for objects would do. Each host also opens
a port, as MPI and NCCL do, to which every other host connects. It answers one byte to whoever sends
the token that only the ranks know, and closes all other connections.
"""

import concurrent.futures
import contextlib
import ctypes
import hmac
import importlib.util
import json
import os
import secrets
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_DOOR_SECONDS = 5.0  # timeout of a connection


def _launcher_from_its_file() -> ModuleType:
    """hvdkit/launcher.py, which imports nothing else of hvdkit."""
    project = Path(__file__).resolve().parents[2]
    for folder in ("hvdkit", "vendor/hvdkit"):
        file = project / folder / "src/hvdkit/launcher.py"
        if file.is_file():
            spec = importlib.util.spec_from_file_location("launcher", file)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    sys.exit(
        f"error: {os.uname().nodename}: {sys.executable} has no hvdkit: make setup installs it"
    )


try:
    from hvdkit import launcher
except ImportError:  # a missing hvdkit is reported later, with what all hosts lack
    launcher = _launcher_from_its_file()


def dealt() -> list[str]:
    """The host of each rank, from hosts.sh; empty if another launcher started them."""
    hosts: list[str] = []
    for entry in os.environ.get("LAUNCH_HOSTS", "").split(","):
        if not entry:
            continue
        name, _, slots = entry.rpartition(":")
        if name and slots.isdecimal():
            hosts.extend(name for _ in range(int(slots)))
        else:
            hosts.append(entry)
    return hosts


def mpi() -> Any:
    """mpi4py's MPI, not started."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    from mpi4py import MPI

    return MPI


class Mpi:
    """Ranks talk to rank 0 only, so that a closed connection between two others hangs nobody."""

    name = "MPI"

    def __init__(self) -> None:
        # A missing hvdkit is reported later, with what is missing on all hosts.
        with contextlib.suppress(ImportError):
            from hvdkit.ranks import start

            start.share_without_names()
        self._mpi = mpi()
        # mpi4py's own call would block all Python threads, also `watch`, which ends a hang.
        mpi_init_thread = ctypes.CDLL(self._mpi.__file__).MPI_Init_thread
        provided = ctypes.c_int()
        mpi_init_thread(None, None, self._mpi.THREAD_MULTIPLE, ctypes.byref(provided))
        self._world = self._mpi.COMM_WORLD
        self.rank = self._world.rank
        self.size = self._world.size

    def gather(self, value: Any, seconds: float) -> list[Any]:
        """On rank 0: every rank's value, None if it did not arrive in time. On others: []."""
        if self.rank:
            self._send(value, 0)
            return []
        values = {0: value}
        deadline = time.monotonic() + seconds
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
    """Horovod over Gloo on one host, already started."""

    name = "Gloo"

    def __init__(self) -> None:
        import horovod.tensorflow as hvd

        self._hvd = hvd
        self.rank = hvd.rank()
        self.size = hvd.size()

    def gather(self, value: Any, seconds: float) -> list[Any]:
        import numpy as np
        import tensorflow as tf

        line = json.dumps(value).encode() + b"\n"
        characters = tf.constant(np.frombuffer(line, np.uint8))
        with tf.device("/CPU:0"):
            lines = self._hvd.allgather(characters, name="doctor.gather").numpy()
        return [json.loads(line) for line in lines.tobytes().splitlines()]

    def broadcast(self, value: Any) -> Any:
        return self.gather(value, 0)[0]


def roll_call() -> set[int] | None:
    """On rank 0 a set that grows as ranks report; None on others.

    MPI's start waits for all ranks and cannot name a missing one. So each first sends its number to
    rank 0, at a port that follows from LAUNCH_ID of hosts.sh and answers nothing.
    """
    hosts = dealt()
    launch_id = os.environ.get("LAUNCH_ID", "")
    if not launch_id or not hosts or not launcher.in_mpi_world():
        return None
    port = 20_000 + zlib.crc32(launch_id.encode()) % 10_000
    if launcher.launch_rank():
        threading.Thread(target=_call, args=(hosts[0], port), daemon=True).start()
        return None
    present = {0}
    threading.Thread(target=_listen, args=(port, present), daemon=True).start()
    return present


def _listen(port: int, present: set[int]) -> None:
    with contextlib.suppress(OSError), listen(port) as server:
        while True:
            link, _ = server.accept()
            with link, contextlib.suppress(OSError, ValueError):
                link.settimeout(1)
                present.add(int(link.recv(8)))


def _call(host: str, port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            with socket.create_connection((host, port), timeout=5) as link:
                link.sendall(str(launcher.launch_rank()).encode())
            return
        time.sleep(0.5)


@contextlib.contextmanager
def watch(
    stage: str, seconds: float, advice: str, *, known: Callable[[], str] = str
) -> Iterator[None]:
    """Ends this process if the block takes longer than `seconds`; prints `known()` and where."""

    def expire() -> None:
        report = known()
        if report:
            print(report)
        print(
            f"error: rank {launcher.launch_rank()} on {os.uname().nodename} hung for "
            f"{seconds:.0f} s while {stage}: {advice}",
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


def listen(port: int) -> socket.socket:
    """Listens on every address of this host; port 0: one that is free."""
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    return socket.create_server(
        ("", port),
        family=family,
        backlog=1024,
        dualstack_ipv6=dual_stack,
    )


def open_door() -> dict[str, Any]:
    """Returns its "port" and its "token"; it stays open as long as the process."""
    server = listen(0)
    token = secrets.token_bytes(16)

    def answer(link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            link.settimeout(_DOOR_SECONDS)
            if hmac.compare_digest(link.recv(16), token):
                link.sendall(b"k")

    def serve() -> None:
        while True:
            link, _ = server.accept()
            # In its own thread: a silent connection must not delay others.
            threading.Thread(target=answer, args=(link,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return {"port": server.getsockname()[1], "token": token.hex()}


def closed(this_host: int, doors: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """For each host that this one does not reach: its index in `doors`, and its `_failures`.

    `doors`: one a host, with its "addresses"; `this_host`: the index of this one.
    """
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        futures = {}
        for host, door in enumerate(doors):
            if host != this_host:
                futures[host] = pool.submit(_failures, door)
        return [
            (host, future.result())
            for host, future in futures.items()
            if future.result()
        ]


def _failures(door: dict[str, Any]) -> str:
    """Each address that was tried in vain, its port, and why; "" if one of them answers."""
    failures = []
    for address in door["addresses"]:
        why = "something else is there"
        try:
            with socket.create_connection(
                (address, door["port"]), timeout=_DOOR_SECONDS
            ) as link:
                link.sendall(bytes.fromhex(door["token"]))
                if link.recv(1) == b"k":
                    return ""
        except OSError as error:
            why = error.strerror or str(error)
        failures.append(f"{address} port {door['port']}: {why}")
    return "; ".join(failures)
