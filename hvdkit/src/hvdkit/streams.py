"""Standard input, output and error of a program that goes on, whoever reads it. No TensorFlow.

One that is closed is /dev/null from here on: the next file that is opened would get its number,
and lines would land in that file. What cannot be written, to a reader that has ended or a full
disk, is given up. A run never waits for a reader: what is not taken now is kept, and comes later.
"""

import atexit
import contextlib
import errno
import io
import os
import select
import sys
import threading
import time
from typing import Any

_MOST_KEPT = 1 << 26  # The most bytes that wait for a reader; later ones are lost.
_AT_END = 10.0  # A run waits this many seconds at its end for a reader of what is kept.

_waits = True  # Commands wait for readers, runs do not.
_lost: set[int] = set()  # These streams, by their numbers, could not be written.


class _Patient(io.RawIOBase):
    """Standard output or error; writing never raises, and in a run it never waits."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        self._kept = bytearray()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with self._lock:
            if len(self._kept) < _MOST_KEPT:
                self._kept += data
            self._send(until=0.0)
        return len(data)

    def end(self) -> None:
        with self._lock:
            self._send(until=time.monotonic() + _AT_END)

    def _send(self, until: float) -> None:
        """Writes what is kept; in a run what the reader takes until then."""
        while self._kept:
            size = len(self._kept)
            if not _waits:
                if not self._is_taken(until):
                    return
                # A pipe takes this much without waiting. Launchers put tags between writes, so
                # that these are whole lines.
                end_of_line = self._kept.rfind(b"\n", 0, select.PIPE_BUF) + 1
                size = end_of_line or select.PIPE_BUF
            try:
                written = os.write(self._number, self._kept[:size])
            except BlockingIOError:
                # Another program has made the pipe or terminal non-blocking.
                if _waits:
                    select.select([], [self._number], [])
                    continue
                return
            except OSError as error:
                self._give_up(error)
                return
            del self._kept[:written]

    def _is_taken(self, until: float) -> bool:
        """Whether the reader takes more, or has ended."""
        poll = select.poll()
        poll.register(self._number, select.POLLOUT)
        seconds = max(until - time.monotonic(), 0.0)
        return bool(poll.poll(1000 * seconds))

    def _give_up(self, error: OSError) -> None:
        self._kept.clear()
        _lost.add(self._number)
        # From here on, writes by other languages and by programs that this one starts succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._number)
        if self._number == 1 and not (_waits and error.errno == errno.EPIPE):
            consequence = "" if _waits else "; the run goes on"
            text = f"note: standard output cannot be written{consequence}: {error.strerror}\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode())


def open_closed() -> None:
    """Opens /dev/null as each standard stream that is closed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # `open` takes the lowest number that is free: this one.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def hold() -> None:
    """Makes this program's output as described above; what a test or a notebook has put in its
    place stays."""
    open_closed()
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _patient(number, stream.encoding))


def _patient(number: int, encoding: str) -> io.TextIOWrapper:
    raw = _Patient(number)
    atexit.register(raw.end)
    # A line is written at once and in one piece, also with PYTHONUNBUFFERED=1, because mpirun
    # tags every piece. backslashreplace: names of files may hold any bytes.
    buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer, encoding, errors="backslashreplace", line_buffering=True
    )


def never_wait() -> None:
    """From here on this is a run, which waits for no reader."""
    global _waits
    _waits = False


def is_lost() -> bool:
    """Whether something could not be written to standard output."""
    return 1 in _lost
