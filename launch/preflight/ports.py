"""Ports between hosts: each host opens one, as MPI and NCCL do, and every other knocks at it.

Anyone may reach the port. It has a token that only the ranks are told, answers one byte to who
brings it, and closes the connection of everyone else.
"""

import concurrent.futures
import contextlib
import hmac
import secrets
import socket
import threading
from typing import Any

_SECONDS = 5.0  # in which a connection is there or will not be


def listen(port: int) -> socket.socket:
    """On every address of this host; port 0: one that is free."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)


def open_door() -> dict[str, Any]:
    """Its "port" and its "token"; it stays open as long as the process."""
    server, token = listen(0), secrets.token_bytes(16)

    def answer(link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            link.settimeout(_SECONDS)
            if hmac.compare_digest(link.recv(16), token):
                link.sendall(b"k")

    def serve() -> None:
        while True:
            link, _ = server.accept()
            # Each in a thread of its own: one who says nothing must not keep others waiting.
            threading.Thread(target=answer, args=(link,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return {"port": server.getsockname()[1], "token": token.hex()}


def closed(own: int, doors: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """(host, why) for each other host none of whose "addresses" answers this one.

    `own`: this host's position in `doors`, of which each host has one.
    """
    others = [other for other in range(len(doors)) if other != own]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        reasons = pool.map(lambda other: _knock_at_all(doors[other]), others)
        return [(other, why) for other, why in zip(others, reasons) if why]


def _knock_at_all(door: dict[str, Any]) -> str:
    reasons = []
    for address in door["addresses"]:
        if not (why := _knock(address, door)):
            return ""
        reasons.append(f"{address} port {door['port']}: {why}")
    return "; ".join(reasons)


def _knock(address: str, door: dict[str, Any]) -> str:
    """Why it was in vain; empty if that very door answered."""
    try:
        with socket.create_connection((address, door["port"]), timeout=_SECONDS) as link:
            link.sendall(bytes.fromhex(door["token"]))
            return "" if link.recv(1) == b"k" else "something else is there"
    except OSError as error:
        return error.strerror or str(error)
