"""When this rank last came through something that ranks do together, or a batch of evaluation."""

from __future__ import annotations

import time

_last = time.monotonic()


def beat() -> None:
    global _last
    _last = time.monotonic()


def still() -> float:
    """Seconds since the last beat."""
    return time.monotonic() - _last
