"""A command in a terminal of its own, where Ctrl-C reaches every process of its foreground group."""

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
    """Runs `words` as a terminal's foreground job. For `with`: at its end nothing is left.

    env: more variables than there are; with None, one that is not to be there.
    """

    def __init__(
        self, words: Sequence[str], cwd: Path, env: Mapping[str, str | None] | None = None
    ) -> None:
        self.shown = ""  # all that was printed so far
        changed = os.environ | (env or {})
        self._mark = f"in-terminal-{os.urandom(8).hex()}"
        self._keyboard, screen = os.openpty()
        self._process = subprocess.Popen(
            words,
            cwd=cwd,
            env={name: value for name, value in changed.items() if value is not None}
            | {"TEST_TERMINAL": self._mark},
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
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < end, f"no {pattern!r} in {timeout} s:\n{self.shown}"
            assert self._read() or self._process.poll() is None, f"no {pattern!r}:\n{self.shown}"
        return found

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._keyboard)

    def press(self, key: bytes) -> None:
        os.write(self._keyboard, key)

    def wait(self, timeout: float) -> int:
        """The exit code, as a shell tells it: 128 + the signal where one ended it."""
        end = time.monotonic() + timeout
        while self._read() or self._process.poll() is None:
            assert time.monotonic() < end, f"still runs after {timeout} s:\n{self.shown}"
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def processes(self) -> list[psutil.Process]:
        """What still runs of all that the command started, whatever session it moved to."""
        every = psutil.process_iter(["environ"])
        return [p for p in every if (p.info["environ"] or {}).get("TEST_TERMINAL") == self._mark]

    def left_after(self, seconds: float) -> list[str]:
        """Names of what still runs when so many seconds have passed; soon if nothing."""
        end = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        return [str(process) for process in left]

    def _read(self) -> bool:
        """Takes what was printed in the next tenth of a second; whether there was any."""
        if not select.select([self._keyboard], [], [], 0.1)[0]:
            return False
        try:
            data = os.read(self._keyboard, 65536)
        except OSError:  # Linux: nobody has the terminal open any more
            time.sleep(0.05)
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
