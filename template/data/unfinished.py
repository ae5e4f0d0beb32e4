"""A hidden folder to write in, so that what has its name is whole; what a kill leaves is removed.

OUT/.NAME.packing-XXXXXXXX    the folder, moved to OUT/NAME when it is whole
OUT/.NAME.packing.lock        who writes in it; gone with it

The lock ends with its process, however that ends. Where a disk is shared, its hosts may not share
the locks: a living process therefore touches its lock file too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_MARK = ".packing"
_TOUCHED_EVERY = 30.0  # seconds
_SILENCE = 300.0  # seconds, after which a process of another host that touches nothing is dead


@contextlib.contextmanager
def folder(out: Path, name: str) -> Iterator[Path]:
    """An empty folder in `out` for what becomes OUT/NAME; it goes when the block ends.

    Folders in `out` of processes that have ended are removed first.

    Raises ValueError when another process writes OUT/NAME at this moment.
    """
    with _lock(out, name):
        for other in _names(out) - {name}:
            # One that is written at this moment, or is another person's, stays.
            with contextlib.suppress(ValueError, OSError), _lock(out, other):
                _remove_left(out, other)
        _remove_left(out, name)
        # Beside its last place, as only a rename inside one file system is atomic.
        with tempfile.TemporaryDirectory(dir=out, prefix=f".{name}{_MARK}-") as work:
            yield Path(work)


def _names(out: Path) -> set[str]:
    hidden = (entry for entry in os.listdir(out) if entry.startswith("."))
    return {name[1:] for name, mark, rest in (e.rpartition(_MARK) for e in hidden) if mark and rest}


def _remove_left(out: Path, name: str) -> None:
    for entry in os.listdir(out):
        if entry.startswith(f".{name}{_MARK}-"):
            shutil.rmtree(out / entry)


@contextlib.contextmanager
def _lock(out: Path, name: str) -> Iterator[None]:
    path = out / f".{name}{_MARK}.lock"
    file, locked = _opened(path, out / name)
    with file:
        _check_others(file, locked, out, name)
        file.truncate(0)
        file.write(f"{_machine()} {os.uname().nodename} {os.getpid()}")
        file.flush()
        ended = threading.Event()
        thread = threading.Thread(target=_touch, args=(file, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            path.unlink(missing_ok=True)


def _opened(path: Path, goal: Path) -> tuple[IO[str], bool]:
    """The lock file, and whether it is locked: not where the file system has no locks."""
    while True:
        file = path.open("a+")  # it may be another's: nothing is cut off
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            with file:
                raise ValueError(
                    f"{goal} is being written by {_owner(file)}: wait for its end, or give "
                    "another --out or --as"
                ) from None
        except OSError:
            locked = False
        # Its owner may have removed it since it was opened: then this is no lock any more.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file, locked
        file.close()


def _check_others(file: IO[str], locked: bool, out: Path, name: str) -> None:
    """With the lock, an owner on this machine is dead. Of another one only its silence tells."""
    owner = _words(file)
    if not owner or (locked and owner[0] == _machine()):
        return
    os.utime(out)
    age = out.stat().st_mtime - os.fstat(file.fileno()).st_mtime  # by the clock of the disk's host
    if age < _SILENCE:
        raise ValueError(
            f"{out / name} was being written by {_owner(file)} {max(age, 0):.0f} s ago, and no "
            f"lock tells whether that has ended: try again after {_SILENCE:.0f} s without a sign"
        )


def _owner(file: IO[str]) -> str:
    words = _words(file)
    return f"process {words[2]} on {words[1]}" if len(words) == 3 else "another process"


def _words(file: IO[str]) -> list[str]:
    file.seek(0)
    return file.read().split()


def _machine() -> str:
    """The running kernel's name: the same in all of its containers, another after a start anew."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _touch(file: IO[str], ended: threading.Event) -> None:
    while not ended.wait(_TOUCHED_EVERY):
        with contextlib.suppress(OSError):  # the disk is away for a moment
            os.utime(file.fileno())
