"""A hidden folder to write in, so that what has its name is whole: OUT/.NAME.packing."""

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
    """An empty folder in `out` for what becomes OUT/NAME; it goes in the end.

    What a killed process left in it goes at the start.

    Raises ValueError when another process writes OUT/NAME at this moment.
    """
    work = out / f".{name}{_ENDING}"  # beside its last place: only there a rename is atomic
    work.mkdir(exist_ok=True)
    lock = os.open(work, os.O_RDONLY | os.O_NOFOLLOW)  # its end, however it ends, ends the lock
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
    """Raises ValueError for a name that is no folder's in OUT, or like the hidden ones' here."""
    if name in ("", ".", "..") or "/" in name or _ENDING in name:
        raise ValueError(
            f"{name!r} cannot be the name of a packed split: it must be a folder's name, without "
            f"'/' and {_ENDING!r}; give another --as"
        )


def _clear(work: Path) -> None:
    for path in work.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
