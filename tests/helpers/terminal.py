"""A command in a terminal of its own, where Ctrl-C reaches every process of its foreground
group."""

import contextlib
import fcntl
import os
import re
import select
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

CTRL_C = b"\x03"


class Terminal:
    """Runs `words` as a terminal's foreground job. At the end of `with` all its processes end.

    env: variables that are added; with None, one that is taken away.
    """

    def __init__(
        self,
        words: Sequence[str],
        cwd: Path,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self.shown = ""  # all that was printed so far
        self._mark = f"in-terminal-{os.urandom(8).hex()}"
        variables = os.environ | (env or {}) | {"TEST_TERMINAL": self._mark}
        self._keyboard, screen = os.openpty()
        self._process = subprocess.Popen(
            words,
            cwd=cwd,
            env={name: value for name, value in variables.items() if value is not None},
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(screen)
        self.pid = self._process.pid

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        self.hang_up()

    def wait_for(self, pattern: str, timeout: float) -> re.Match[str]:
        """The first match in all that was printed; AssertionError where it comes late or never."""
        end = time.monotonic() + timeout
        while True:
            match = re.search(pattern, self.shown)
            if match:
                return match
            assert time.monotonic() < end, (
                f"no {pattern!r} in {timeout} s:\n{self.shown}"
            )
            assert self._read() or self._process.poll() is None, (
                f"no {pattern!r}:\n{self.shown}"
            )

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._keyboard)

    def press(self, key: bytes) -> None:
        os.write(self._keyboard, key)

    def wait(self, timeout: float) -> int:
        """The exit code, as a shell gives it: 128 + the signal where one ended it."""
        end = time.monotonic() + timeout
        while self._read() or self._process.poll() is None:
            assert time.monotonic() < end, (
                f"still runs after {timeout} s:\n{self.shown}"
            )
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def processes(self) -> list[psutil.Process]:
        """The command's processes that still run, whatever session they moved to."""
        running = []
        for process in psutil.process_iter(["environ"]):
            variables = process.info["environ"] or {}
            if variables.get("TEST_TERMINAL") == self._mark:
                running.append(process)
        return running

    def left_after(self, seconds: float) -> list[str]:
        """Names of its processes that still run after so many seconds; returns early if none."""
        end = time.monotonic() + seconds
        left = self.processes()
        while left and time.monotonic() < end:
            time.sleep(0.05)
            left = self.processes()
        return [str(process) for process in left]

    def _read(self) -> bool:
        """Takes the output of the next tenth of a second; whether there was any."""
        ready, _, _ = select.select([self._keyboard], [], [], 0.1)
        if not ready:
            return False
        try:
            data = os.read(self._keyboard, 65536)
        except OSError:  # Linux: nobody has the terminal open any more
            time.sleep(0.05)
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
