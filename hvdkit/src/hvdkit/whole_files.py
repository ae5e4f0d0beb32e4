"""Files that are whole under their name, or not there: however a process or a machine ends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def written(path: Path, hidden: str = "") -> Iterator[Path]:
    """Gives the name of a hidden file to write, which then takes the place of `path`, on disk.

    Args:
      hidden: its name until then; by default .NAME.partial.
    Raises:
      OSError: it cannot be written; as after any other exception, what was there stays.
    """
    partial = path.with_name(hidden or f".{path.name}.partial")
    try:
        yield partial
        flush(partial)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the one that is on its way says more
            partial.unlink(missing_ok=True)
        raise
    flush(path.parent)


def write_json(path: Path, content: Any) -> None:
    """As JSON; null stands for what is no finite number."""
    with written(path) as partial:
        partial.write_text(json.dumps(without_nan(content), indent=1) + "\n")


def flush(path: Path) -> None:
    """Waits until what was written to the file, or which names are in the folder, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Of all of the file, hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def without_nan(value: Any) -> Any:
    """The same for JSON, which has no NaN and no infinity: None stands for them."""
    if isinstance(value, Mapping):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
