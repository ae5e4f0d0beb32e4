"""A hidden folder to write in, so that what has its name is whole; what a kill leaves is removed.

OUT/.NAME.packing-XXXXXXXX            the folder; what becomes OUT/NAME is moved out of it
OUT/.NAME.packing-XXXXXXXX/.packing   says that it is such a folder: others are left alone
OUT/.NAME.packing.lock                who writes in it; gone with it

The lock ends with its process, however that ends. Where a disk is shared, its hosts may not share
the locks: a living process therefore touches its lock file too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_MARK = ".packing"
_FOLDER = re.compile(r"\.(.+)\.packing-[a-z0-9_]{8}", re.DOTALL)  # as `tempfile.mkdtemp` names it
_SIGN = (
    "python -m hvdkit.data.pack writes here; what is left of a killed one goes at its next start\n"
)
_TOUCHED_EVERY = 30.0  # seconds
_SILENCE = 300.0  # seconds, after which a process of another host that touches nothing is dead


@contextlib.contextmanager
def folder(out: Path, name: str) -> Iterator[Path]:
    """A folder in `out` for what becomes OUT/NAME, with only its sign in it; it goes in the end.

    Folders in `out` of processes that have ended are removed first.

    Raises ValueError when another process writes OUT/NAME at this moment, or something else has
    the lock's name.
    """
    with _lock(out, name):
        for other in {of for _, of in _left(out)} - {name}:
            # One that is written at this moment, or is another person's, stays.
            with contextlib.suppress(ValueError, OSError), _lock(out, other):
                _remove_left(out, other)
        _remove_left(out, name)
        # Beside its last place, as only a rename inside one file system is atomic.
        work = Path(tempfile.mkdtemp(dir=out, prefix=f".{name}{_MARK}-"))
        try:
            (work / _MARK).write_text(_SIGN)
            yield work
        finally:
            with contextlib.suppress(FileNotFoundError):  # someone else removed it
                _remove(work)


def check_name(name: str) -> None:
    """Raises ValueError for a name that is no folder's in OUT, or like the hidden ones' here."""
    if name in ("", ".", "..") or "/" in name or _MARK in name:
        raise ValueError(
            f"{name!r} cannot be the name of a packed split: it must be a folder's name, without "
            f"'/' and {_MARK!r}; give another --as"
        )


def _left(out: Path) -> list[tuple[Path, str]]:
    """Folders that were begun here, each with the name that it was to get."""
    names = [(out / entry, _FOLDER.fullmatch(entry)) for entry in os.listdir(out)]
    return [(path, match[1]) for path, match in names if match and _is_begun_here(path)]


def _is_begun_here(path: Path) -> bool:
    try:
        return not path.is_symlink() and (path / _MARK).read_text() == _SIGN
    except (OSError, ValueError):  # there is no such file, or it is no text
        return False


def _remove_left(out: Path, name: str) -> None:
    for path, of in _left(out):
        if of == name:
            _remove(path)


def _remove(folder: Path) -> None:
    """With the sign last: what is removed in part is found again."""
    for path in folder.iterdir():
        if path.name != _MARK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(folder)


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
        file = path.open("a+", errors="replace")  # it may be another's: nothing is cut off
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
    if owner and not (len(owner) == 3 and owner[2].isdecimal()):
        raise ValueError(
            f"{file.name} is there, and no pack made it: remove it, or give another --as"
        )
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
