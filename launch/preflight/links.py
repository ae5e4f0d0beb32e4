"""TCP between each two hosts: can they connect, how long is the way, how much goes through.

One rank of each host takes part. First each knocks at every other's door; then, in rounds in which
each host talks to one other, they measure: H hosts are through in H - 1 rounds. Runs before
Horovod is up: a port that a firewall closes is named here, where a collective would hang.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import statistics
import struct
import threading
import time
from typing import Any

_KNOCK = 5.0  # seconds in which a connection is there or will not be
_TIMEOUT = 30.0  # for any one answer of a host that can be reached
_CHUNK = bytes(1 << 18)
_PINGS = 20
_TRIES = 2  # a busy host may be slow once, a bad link always is


Place = tuple[str, int]  # address, port
Pair = tuple[int, int]  # positions of two hosts


class Door:
    """A listening port on every interface, as the transports under Horovod open them."""

    def __init__(self) -> None:
        self._server = socket.create_server(("", 0), backlog=1024)
        self.port = self._server.getsockname()[1]
        self._callers: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._let_in, daemon=True).start()

    def caller(self, position: int) -> socket.socket:
        """The connection over which the host at `position` wants to measure."""
        with self._changed:
            if not self._changed.wait_for(lambda: position in self._callers, _TIMEOUT):
                raise TimeoutError(f"host {position} did not call")
            return self._callers.pop(position)

    def close(self) -> None:
        self._server.close()

    def _let_in(self) -> None:
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:
                return  # closed
            with contextlib.suppress(OSError):
                _prepare(link)
                position = struct.unpack("!i", _receive_exactly(link, 4))[0]
                if position < 0:  # only a knock
                    link.sendall(b"k")
                    link.close()
                    continue
                with self._changed:
                    self._callers[position] = link
                    self._changed.notify_all()


def knock(own: int, places: list[Place]) -> list[dict[str, Any]]:
    """{"pair": (own, other), "error"} for each place that cannot be reached from here."""

    def try_one(other: int) -> dict[str, Any] | None:
        try:
            with socket.create_connection(places[other], timeout=_KNOCK) as link:
                link.sendall(struct.pack("!i", -1))
                _receive_exactly(link, 1)
        except OSError as error:
            place = f"{places[other][0]} port {places[other][1]}"
            return {"pair": (own, other), "error": f"{place}: {error.strerror or error}"}
        return None

    others = [other for other in range(len(places)) if other != own]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        return [failed for failed in pool.map(try_one, others) if failed]


def rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """Every pair once; in each round no host is in two pairs (the circle method)."""
    seats: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    table = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]))
        table.append([(min(p), max(p)) for p in pairs if None not in p])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return table


def measure(
    door: Door, own: int, places: list[Place], closed: set[Pair], seconds: float
) -> list[dict[str, Any]]:
    """This host's part of all rounds.

    Args:
      own: this host's position in `places`.
      places: each host's address and port.
      closed: pairs that cannot reach each other, in either direction; they are left out.
      seconds: how long bytes are sent, in each direction of each pair; the better of two tries
        counts.
    Returns:
      For the pairs in which this host is the first: {"pair": (own, other)}, and either "there"
      and "back" in bytes a second and "rtt" in seconds, or "error".
    """
    results = []
    for pairs in rounds(len(places)):
        for first, second in pairs:
            if (first, second) in closed or (second, first) in closed:
                continue
            if own == first:
                results.append({"pair": (first, second)} | _call(own, places[second], seconds))
            elif own == second:
                with contextlib.suppress(OSError):  # the first of the pair reports it
                    _answer(door, first, seconds)
    return results


def _call(own: int, place: Place, seconds: float) -> dict[str, Any]:
    try:
        with socket.create_connection(place, timeout=_TIMEOUT) as link:
            _prepare(link)
            link.sendall(struct.pack("!i", own))
            _receive_exactly(link, 1)
            times, there, back = [], 0.0, 0.0
            for _ in range(_PINGS):
                start = time.perf_counter()
                link.sendall(b"p")
                _receive_exactly(link, 1)
                times.append(time.perf_counter() - start)
            for _ in range(_TRIES):
                _send(link, seconds)
                there = max(there, struct.unpack("!d", _receive_exactly(link, 8))[0])
                link.sendall(b"b")
                back = max(back, _receive(link))
            return {"there": there, "back": back, "rtt": statistics.median(times)}
    except OSError as error:
        return {"error": f"{place[0]} port {place[1]}: {error.strerror or error}"}


def _answer(door: Door, first: int, seconds: float) -> None:
    with door.caller(first) as link:
        link.sendall(b"g")
        for _ in range(_PINGS):
            _receive_exactly(link, 1)
            link.sendall(b"p")
        for _ in range(_TRIES):
            rate = _receive(link)
            link.sendall(struct.pack("!d", rate))
            _receive_exactly(link, 1)
            _send(link, seconds)


def _prepare(link: socket.socket) -> None:
    link.settimeout(_TIMEOUT)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Little is kept back unsent, so that a slow link does not go on for long after the last send.
    link.setsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_NOTSENT_LOWAT", 25), 1 << 19)


def _send(link: socket.socket, seconds: float) -> None:
    """Blocks, each with its length before it; an empty one ends them."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        link.sendall(struct.pack("!i", len(_CHUNK)))
        link.sendall(_CHUNK)
    link.sendall(struct.pack("!i", 0))


def _receive(link: socket.socket) -> float:
    """Bytes a second from the first block's end to the last one's."""
    moved, first, last = 0, 0.0, 0.0
    while length := struct.unpack("!i", _receive_exactly(link, 4))[0]:
        _receive_exactly(link, length)
        last = time.perf_counter()
        if first:
            moved += length
        else:
            first = last
    return moved / (last - first) if moved else 0.0


def _receive_exactly(link: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = link.recv(min(count, 1 << 20))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
