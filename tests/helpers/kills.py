"""Kills a process at each of its moments, to see what it leaves on disk."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_KILLED = 99
_CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


def killed_at_each(
    root: Path, start: Callable[[Path], None], work: Callable[[Path], None]
) -> Iterator[Path]:
    """The folder that `start` makes, as `work` leaves it, killed before its n-th disk call, or
    never.

    Yields one folder for n = 1, 2, ..., and last the one where the work was not killed.
    """
    code = _KILLED
    moment = 0
    while code == _KILLED:
        folder = root / str(moment)
        start(folder)
        process = os.fork()
        if not process:
            _die_at(moment)
            try:
                work(folder)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(process, 0)
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, _KILLED):
            raise RuntimeError(f"at moment {moment} the work itself failed")
        yield folder
        moment += 1


def _die_at(moment: int) -> None:
    left = moment

    def hook(event: str, _: tuple) -> None:
        nonlocal left
        # A lease's thread opens files too, at any moment.
        if event in _CHANGES and threading.current_thread() is threading.main_thread():
            if left == 0:
                os._exit(_KILLED)
            left -= 1

    sys.addaudithook(hook)
