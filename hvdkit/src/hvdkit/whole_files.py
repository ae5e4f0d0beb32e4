"""Files on disk: whole or absent whenever a process or machine dies; hashed; locked."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def written(path: Path, hidden: str = "") -> Iterator[Path]:
    """Yields a hidden path to write to, which then replaces `path` and is flushed to disk.

    Args:
      hidden: its name until then; by default .NAME.partial.
    Raises:
      OSError: it cannot be written. After any exception the old file is unchanged.
    """
    partial = path.with_name(hidden or f".{path.name}.partial")
    try:
        yield partial
        flush(partial)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error says more
            partial.unlink(missing_ok=True)
        raise
    flush(path.parent)


def write_json(path: Path, content: Any) -> None:
    """As JSON; NaN and infinity become null."""
    with written(path) as partial:
        partial.write_text(json.dumps(without_nan(content), indent=1) + "\n")


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """As CSV; names of files may be any bytes."""
    how = {"newline": "", "encoding": "utf-8", "errors": "surrogateescape"}
    with written(path) as partial, partial.open("w", **how) as file:
        csv.writer(file).writerows(rows)


def flush(path: Path) -> None:
    """Waits until the file's content, or the folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Of the whole file, hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class NoLocks(OSError):
    """The file system has no locks."""


def lock(path: Path) -> IO[str]:
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


def without_nan(value: Any) -> Any:
    """The same for JSON, with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
