"""A small process beside a rank, which ends the rank when it was stopped (SIGSTOP) for long.

In an elastic run the others go on once a rank has ended, and wait for one that only hangs.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time

_SILENT = 45.0  # seconds without a word: the rank was stopped
_BETWEEN = 5.0  # seconds between words


def start() -> None:
    """Starts the guard of this process; it ends with it."""
    heard, told = os.pipe()
    # No environment: stop.sh knows ranks by it.
    words = [sys.executable, "-I", __file__, str(os.getpid())]
    subprocess.Popen(words, stdin=heard, stdout=subprocess.DEVNULL, env={})
    os.close(heard)
    threading.Thread(target=_say, args=(told,), name="guard", daemon=True).start()


def _say(told: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # somebody ended it
        while True:
            os.write(told, b".")
            time.sleep(_BETWEEN)


def _guard(rank: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    heard = time.monotonic()
    while os.getppid() == rank:
        before = time.monotonic()
        ready, _, _ = select.select([0], [], [], _BETWEEN)
        now = time.monotonic()
        if ready and not os.read(0, 4096):
            return
        if ready or now - before > 2 * _BETWEEN:  # or the guard itself was stopped
            heard = now
        if now - heard > _SILENT:
            said = f"error: a rank was stopped {_SILENT:.0f} s ago: killing it\n"
            os.write(2, said.encode())
            os.kill(rank, signal.SIGKILL)
            return


if __name__ == "__main__":
    _guard(int(sys.argv[1]))
