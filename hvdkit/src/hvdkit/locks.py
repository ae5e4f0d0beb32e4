"""A lock that ends with its process, however the process ends."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


class NoLocks(OSError):
    """The file system has none."""


def take(path: Path) -> IO[str]:
    """Locks the file, which it makes if needed, until the result is closed or the process ends.

    Raises:
      BlockingIOError: another process has it.
      NoLocks, OSError: the file cannot be locked, or cannot be made.
    """
    file = path.open("a")  # NFS locks only what may be written
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise
        raise NoLocks(*error.args) from None
    return file
