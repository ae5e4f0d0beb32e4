"""TCP between each two hosts: can they connect, how long is the way, how much goes through.

One rank of each host takes part. In every round each host talks to one other, so that H hosts
are through in H - 1 rounds, whatever their number. Runs before Horovod is up: a port that a
firewall closes is named here, where a collective would hang.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import time
from typing import Any

_TIMEOUT = 20.0  # for any one answer
_CHUNK = bytes(1 << 18)
_PINGS = 20


def listen() -> socket.socket:
    """A socket on a free port of every interface, as the transports under Horovod open them."""
    server = socket.create_server(("", 0), backlog=128)
    server.settimeout(_TIMEOUT)
    return server


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
    server: socket.socket, own: int, places: list[tuple[str, int]], seconds: float
) -> list[dict[str, Any]]:
    """This host's part of all rounds.

    Args:
      own: this host's position in `places`.
      places: each host's address and port.
      seconds: how long bytes are sent, in each direction of each pair.
    Returns:
      For the pairs in which this host is the first: {"pair": (own, other)}, and either "there"
      and "back" in bytes a second and "rtt" in seconds, or "error".
    """
    results, waiting = [], {}
    for pairs in rounds(len(places)):
        for first, second in pairs:
            if own == first:
                results.append({"pair": (first, second)} | _call(own, places[second], seconds))
            elif own == second:
                with contextlib.suppress(OSError):  # the first of the pair reports it
                    _answer(server, first, waiting, seconds)
    return results


def _call(own: int, place: tuple[str, int], seconds: float) -> dict[str, Any]:
    try:
        with socket.create_connection(place, timeout=_TIMEOUT) as link:
            _prepare(link)
            link.sendall(struct.pack("!i", own))
            _receive_exactly(link, 1)
            times = []
            for _ in range(_PINGS):
                start = time.perf_counter()
                link.sendall(b"p")
                _receive_exactly(link, 1)
                times.append(time.perf_counter() - start)
            _send(link, seconds)
            there = struct.unpack("!d", _receive_exactly(link, 8))[0]
            link.sendall(b"b")
            back = _receive(link)
            return {"there": there, "back": back, "rtt": statistics.median(times)}
    except OSError as error:
        return {"error": f"{place[0]} port {place[1]}: {error.strerror or error}"}


def _answer(server: socket.socket, first: int, waiting: dict, seconds: float) -> None:
    while first not in waiting:
        link, _ = server.accept()
        _prepare(link)
        waiting[struct.unpack("!i", _receive_exactly(link, 4))[0]] = link
    with waiting.pop(first) as link:
        link.sendall(b"g")
        for _ in range(_PINGS):
            _receive_exactly(link, 1)
            link.sendall(b"p")
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
