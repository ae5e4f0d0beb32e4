"""TCP between each two hosts: can they connect, how long is the way, how much goes through.

One rank of each host takes part. First each knocks at every other's door; then, in rounds in which
each host talks to one other, they measure: H hosts are through in H - 1 rounds, and of more than
32 each measures with a few. Runs before
Horovod is up: a port that a firewall closes is named here, where a collective would hang.

The ports are open to anyone who reaches the host. Each door has a token that only the ranks are
told; whoever does not bring it is shown out, and what is read has a longest length and time.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hmac
import random
import secrets
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

_KNOCK = 5.0  # seconds in which a connection is there or will not be
_TIMEOUT = 30.0  # for any one answer of a host that can be reached
_CHUNK = bytes(1 << 18)
_PINGS = 20
_TRIES = 2  # a busy host may be slow once, a bad link always is
_ASKERS = 2  # hosts that try every address of another one
_MOST_HOSTS, _ROUNDS = 32, 6  # of more hosts not every pair is measured; a bad host shows in six
_AT_ONCE = 256  # callers that are being let in; others of that moment are shown out

_TOKEN = 16  # bytes
_GREETING = struct.Struct(f"!{_TOKEN}si")  # the door's token; the caller's position, or -1: a knock

Place = tuple[str, int, str]  # address, port, the door's token in hexadecimal
Pair = tuple[int, int]  # positions of two hosts


class Door:
    """A listening port on every interface, as the transports under Horovod open them."""

    def __init__(self) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(
            ("", 0), family=family, backlog=1024, dualstack_ipv6=both
        )
        self.port = self._server.getsockname()[1]
        self.token = secrets.token_hex(_TOKEN)
        self._callers: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._room = threading.BoundedSemaphore(_AT_ONCE)
        threading.Thread(target=self._open, daemon=True).start()

    def caller(self, position: int) -> socket.socket:
        """The connection over which the host at `position` wants to measure."""
        with self._changed:
            if not self._changed.wait_for(lambda: position in self._callers, _TIMEOUT):
                raise TimeoutError(f"host {position} did not call")
            return self._callers.pop(position)

    def close(self) -> None:
        self._server.close()

    def _open(self) -> None:
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:
                return  # closed
            # Each in a thread of its own: one who says nothing must not keep others waiting.
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._let_in, args=(link,), daemon=True).start()
            else:
                link.close()

    def _let_in(self, link: socket.socket) -> None:
        position = None
        with contextlib.suppress(OSError), _at_most(link, _KNOCK):
            position = self._greet(link)
        self._room.release()
        if position is None:
            link.close()
            return
        with self._changed:
            self._callers[position] = link
            self._changed.notify_all()

    def _greet(self, link: socket.socket) -> int | None:
        """The caller's position; None for a stranger, and for one who only knocks."""
        token, position = _GREETING.unpack(_receive_exactly(link, _GREETING.size))
        if not hmac.compare_digest(token, bytes.fromhex(self.token)):
            return None
        _prepare(link)
        if position >= 0:
            return position
        link.sendall(b"k")
        return None


def knock(own: int, places: list[Place]) -> list[dict[str, Any]]:
    """{"pair": (own, other), "error"} for each place that cannot be reached from here."""

    def try_one(other: int) -> dict[str, Any] | None:
        error = _knock(places[other])
        return {"pair": (own, other), "error": error} if error else None

    others = [other for other in range(len(places)) if other != own]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        return [failed for failed in pool.map(try_one, others) if failed]


def asked_by(own: int, hosts: int) -> list[int]:
    """The hosts whose every address `own` tries: few, for all by all would be too many."""
    return sorted({(own + step) % hosts for step in range(1, _ASKERS + 1)} - {own})


def unreached(
    own: int, places: list[Place], addresses: list[list[str]]
) -> list[tuple[int, int, str]]:
    """(own, other, address) for each further address of others where their door does not answer."""

    def fails(way: tuple[int, int, str]) -> bool:
        _, other, address = way
        return bool(_knock((address, *places[other][1:])))

    ways = [(own, other, a) for other in asked_by(own, len(places)) for a in addresses[other]]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        return [way for way, failed in zip(ways, pool.map(fails, ways)) if failed]


def _knock(place: Place) -> str:
    """Why it was in vain; empty if that very door answered."""
    try:
        with socket.create_connection(place[:2], timeout=_KNOCK) as link, _at_most(link, _KNOCK):
            link.sendall(_GREETING.pack(bytes.fromhex(place[2]), -1))
            _receive_exactly(link, 1)
    except OSError as error:
        return f"{place[0]} port {place[1]}: {error.strerror or error}"
    return ""


def rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """Every pair once, or of many hosts some; in a round no host is in two (the circle method)."""
    seats: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    table = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]))
        table.append([(min(p), max(p)) for p in pairs if None not in p])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    # Drawn alike on every host.
    return table if hosts <= _MOST_HOSTS else random.Random(hosts).sample(table, _ROUNDS)


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
        with (
            socket.create_connection(place[:2], timeout=_TIMEOUT) as link,
            _at_most(link, _TIMEOUT + 4 * _TRIES * seconds),
        ):
            _prepare(link)
            link.sendall(_GREETING.pack(bytes.fromhex(place[2]), own))
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
    with door.caller(first) as link, _at_most(link, _TIMEOUT + 4 * _TRIES * seconds):
        link.sendall(b"g")
        for _ in range(_PINGS):
            _receive_exactly(link, 1)
            link.sendall(b"p")
        for _ in range(_TRIES):
            rate = _receive(link)
            link.sendall(struct.pack("!d", rate))
            _receive_exactly(link, 1)
            _send(link, seconds)


@contextlib.contextmanager
def _at_most(link: socket.socket, seconds: float) -> Iterator[None]:
    """Cuts the connection if the block takes longer: what waits on it gets an error."""

    def cut() -> None:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
        if length != len(_CHUNK):
            raise ConnectionResetError("the other side does not speak as a door does")
        _receive_exactly(link, length)
        last = time.perf_counter()
        if first:
            moved += length
        else:
            first = last
    return moved / (last - first) if last > first else 0.0


def _receive_exactly(link: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = link.recv(count)
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
