"""A hidden folder to write in, OUT/.NAME.packing, so that OUT/NAME is always complete."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_ENDING = ".packing"


@contextlib.contextmanager
def folder(out: Path, name: str) -> Iterator[Path]:
    """An empty folder in `out` for what becomes OUT/NAME; removed at the end.

    Leftovers of a killed process are removed at the start.

    Raises ValueError if another process is writing OUT/NAME.
    """
    work = out / f".{name}{_ENDING}"  # in the same folder: only then a rename is atomic
    work.mkdir(exist_ok=True)
    lock = os.open(work, os.O_RDONLY | os.O_NOFOLLOW)  # the lock ends with the process
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{out / name} is being written by another process: wait for its end, or give "
                    "another --as"
                ) from None
        _clear(work)
        try:
            yield work
        finally:
            _clear(work)
            work.rmdir()
    finally:
        os.close(lock)


def check_name(name: str) -> None:
    """Raises ValueError for an invalid name of a folder, or one like the hidden names used here."""
    if name in ("", ".", "..") or "/" in name or _ENDING in name:
        raise ValueError(
            f"{name!r} cannot be the name of a packed split: it must be a folder's name, without "
            f"'/' and {_ENDING!r}; give another --as"
        )


def _clear(work: Path) -> None:
    for path in work.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
