"""Requests to stop: Ctrl-C (SIGINT), a preemption notice (SIGTERM), a time limit (SIGUSR1), a
terminal that is gone (SIGHUP).

Python runs a signal handler only when the main thread is back from C code, where a rank may be for
minutes: in `hvd.init`, a long step, or a collective that another rank never enters. So a thread
receives the signals here, and answers at once whatever the main thread is doing.
"""

import contextlib
import os
import signal
import threading
import time

from hvdkit import launcher
from hvdkit.stop import PREEMPTED

# SIGINTs this close together, in seconds, are one Ctrl-C that came in two ways: the terminal
# sends it to every process, and a launcher may pass it on.
_ONE_PRESS = 0.5
_ALONE = 25.0  # A rank whose launcher is gone may save for so many seconds.
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_ENDED_BY_CTRL_C = 130  # A shell reports this for SIGINT.
# mpirun sends SIGCONT, waits, sends SIGTERM, waits as long again, and kills; in seconds, the
# longest such wait, and how long before the end a rank says that it has not saved.
_LONGEST_WAIT = 120.0
_BEFORE_THE_END = 0.3


class StopSignal:
    """Remembers that this process was asked to save and end; a second Ctrl-C ends it at once.

    Rank 0 answers SIGINT and SIGTERM with a line on standard error; not SIGUSR1, which hosts.sh
    and Slurm report themselves, and not SIGHUP, after which nobody is there. Where mpirun has sent
    SIGTERM, the line has the seconds that are left, and another one says if they were too few.
    """

    def __init__(self, rank: int, *, in_notebook: bool = False) -> None:
        """Listens from here on. To be called in the main thread.

        `in_notebook`: a second Ctrl-C interrupts the cell, and does not end the process.
        """
        self.asked = False
        self.number: int | None = None  # The first signal that asked has this number.
        self.words = "stopping after this step: saving, then ending"
        self.saved = False  # Once saved, nothing is lost where the process is killed.
        self._speaks = rank == 0
        self._continued: float | None = None  # SIGCONT came last at this time.
        self._pressed: float | None = None  # The first SIGINT came at this time.
        self._in_notebook = in_notebook
        if launcher.is_launched():
            threading.Thread(
                target=self._follow, args=(os.getppid(),), daemon=True
            ).start()
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        threading.Thread(
            target=self._listen, args=(reader,), name="stop", daemon=True
        ).start()
        # The C part of a handler writes the signal's number there without waiting for Python.
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {number: signal.getsignal(number) for number in _REQUESTS}
        if launcher.is_under_mpirun():
            signal.signal(signal.SIGCONT, _left_to_the_thread)
        for number in _REQUESTS:
            by_terminal = number in (signal.SIGINT, signal.SIGHUP)
            if by_terminal and signal.getsignal(number) is signal.SIG_IGN:
                continue  # `nohup`, or a script's `&`, keeps these signals from it.
            interrupts = in_notebook and number == signal.SIGINT
            signal.signal(
                number, self._interrupt if interrupts else _left_to_the_thread
            )
        # A forked child (multiprocessing) would answer a signal of its own into this pipe.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS),
            after_in_parent=lambda: signal.pthread_sigmask(
                signal.SIG_UNBLOCK, _REQUESTS
            ),
            after_in_child=_forget,
        )

    def end(self) -> None:
        """Gives signals back to whoever had them, as a notebook's kernel."""
        for number, handler in self._handlers.items():
            if handler is not None:  # Python does not know a handler of C code.
                signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)

    def _interrupt(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self._is_second_press(time.monotonic()):
            raise KeyboardInterrupt

    def _is_second_press(self, now: float) -> bool:
        return self._pressed is not None and now - self._pressed > _ONE_PRESS

    def _listen(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number in _REQUESTS:
                    self._hear(number)
                if number == signal.SIGCONT:
                    self._continued = time.monotonic()
        os.close(reader)

    def _follow(self, launcher: int) -> None:
        """Saves if it can, and ends, once the launcher is gone: nobody else would end it."""
        while os.getppid() == launcher:
            time.sleep(1)
        self._hear(signal.SIGUSR1)
        time.sleep(_ALONE)
        os._exit(PREEMPTED)

    def _hear(self, number: int) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._is_second_press(now) and not self._in_notebook:
                os._exit(_ENDED_BY_CTRL_C)
            self._pressed = self._pressed or now
        is_first = not self.asked
        self.number = self.number or number
        self.asked = True
        if is_first and self._speaks:
            self._answer(number)

    def _answer(self, number: int) -> None:
        words = self.words
        if os.isatty(2):  # The terminal shows ^C on this line.
            words = "\n" + words
        if number == signal.SIGINT:
            _write(f"{words}; Ctrl-C again ends at once")
        if number != signal.SIGTERM:
            return
        seconds = self._seconds_left()
        if not seconds:
            _write(words)
            return
        _write(f"{words}; mpirun kills it in {seconds:.0f} s")
        if not self.saved:
            late = threading.Timer(max(0.0, seconds - _BEFORE_THE_END), self._lose)
            late.daemon = True
            late.start()

    def _seconds_left(self) -> float | None:
        """Until mpirun kills this process; None where SIGTERM did not come from mpirun."""
        if self._continued is None:
            return None
        waited = time.monotonic() - self._continued
        return waited if waited < _LONGEST_WAIT else None

    def _lose(self) -> None:
        if not self.saved:
            _write(
                "error: not saved: that takes longer than mpirun waits. A rerun resumes from the "
                "newest checkpoint. horovodrun and launch/hosts.sh wait until a run has saved"
            )


def _write(line: str) -> None:
    """To standard error, without print: the main thread may hold its lock."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _forget() -> None:
    """In a forked child: signals end it, as usual, and do not reach the run."""
    signal.set_wakeup_fd(-1)
    for number in _REQUESTS:
        if signal.getsignal(number) is _left_to_the_thread:
            signal.signal(
                number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN
            )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _REQUESTS)


def _left_to_the_thread(number: int, frame: object) -> None:
    pass
