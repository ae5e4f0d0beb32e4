"""A stranger who takes all places of a port, and opens each connection again as it ends."""

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

_LINKS = 80  # to each port at once


def _hold(port: tuple[str, int], end: float) -> None:
    while time.monotonic() < end:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(tuple(port), 3) as link,
        ):
            while link.recv(99):
                pass


def hold(ports: Iterable[tuple[str, int]], seconds: float) -> None:
    """Starts threads that take the ports' places for so many seconds."""
    end = time.monotonic() + seconds
    for port in ports:
        for _ in range(_LINKS):
            threading.Thread(target=_hold, args=(port, end), daemon=True).start()


def guard(folder: Path) -> Path:
    """Builds the guard, as set-up does, where nobody can read it."""
    source = Path(__file__).resolve().parents[2] / "docker/setup/guard.c"
    library = folder / "guard.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True
    )
    return library
