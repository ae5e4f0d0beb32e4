"""One line on a terminal that is written over, between lines that stay.

Whoever writes whole lines to standard output calls `leave` before (hvdkit.ranks.world.say does).
"""

from __future__ import annotations

import contextlib
import os
import sys

from hvdkit.stop import RANK_VARIABLES

_LEAST = 5  # columns of a bar
_there = False  # a line that the next one is written over


def possible() -> bool:
    """Whether standard output is a terminal that understands what `show` writes.

    Never under a launcher: mpirun gives its ranks a terminal, and writes what comes out to a log.
    """
    launched = any(name in os.environ for name in RANK_VARIABLES)
    return not launched and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def show(text: str, done: int, count: int) -> None:
    """Over the last one, after a bar where there is room for one.

    Cut to the terminal's width, because a line that wraps stays.
    """
    global _there
    with contextlib.suppress(OSError):
        width = os.get_terminal_size(sys.stdout.fileno()).columns or 80
        room = min(20, width - len(text) - len("[] ") - 1)
        line = f"{bar(done, count, room)} {text}" if room >= _LEAST else text[: width - 1]
        print(f"\r\x1b[K{line}", end="", flush=True)
        _there = True


def leave() -> None:
    """The line stays as it is; what is written next stands below it."""
    global _there
    if _there:
        _there = False
        with contextlib.suppress(OSError):
            print(flush=True)


def progress(what: str, done: int, count: int) -> None:
    """How far something is, on standard error: a bar on a terminal, in a log a line each tenth."""
    if sys.stderr.isatty():
        if done % max(1, count // 200) == 0 or done == count:
            end = "\n" if done == count else ""
            text = f"\r{what:>8} {bar(done, count, 30)} {done}/{count}"
            print(text, end=end, file=sys.stderr, flush=True)
    elif 10 * done // count > 10 * (done - 1) // count:
        print(f"{what}: {done}/{count}", file=sys.stderr, flush=True)


def bar(done: int, count: int, width: int = 20) -> str:
    full = width * done // max(count, 1)
    return f"[{'#' * full}{'-' * (width - full)}]"
