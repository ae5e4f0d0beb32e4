"""Writes checkpoints: whole or not at all, hashed as they are written, flushed to disk.

hvdkit/checkpoint/files.py says what they look like.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from hvdkit import whole_files
from hvdkit.checkpoint.files import (
    FORMAT,
    MANIFEST,
    STATE,
    Damaged,
    Manifest,
    OtherFormat,
    checksum_of,
    delete,
    read_manifest,
)
from hvdkit.ranks.messages import heartbeat


def write(
    folder: Path,
    step: int,
    arrays: Mapping[str, np.ndarray],
    *,
    config: Mapping[str, Any],
    ranks: int,
    tensorflow: str,
    fingerprint: Mapping[str, str],
) -> Path:
    """Writes the checkpoint of this step and returns its folder.

    It replaces one of the same step; the score of that one stays where the arrays are the same.

    Raises:
      OSError, ValueError: it cannot be written; nothing is left of it and nothing else changed.
    """
    partial, final = folder / f".step-{step:08d}.partial", folder / f"step-{step:08d}"
    try:
        delete(partial)
        partial.mkdir(parents=True)
        sha256 = _write_arrays(partial / STATE, arrays)
        dtypes = {n: a.dtype.name for n, a in arrays.items() if not _is_numpys(a.dtype)}
        about = (step, dict(config), ranks, tensorflow, sha256, dtypes)
        manifest = Manifest(*about, fingerprint=dict(fingerprint))
        with contextlib.suppress(Damaged, OtherFormat):
            before = read_manifest(final)
            if before.sha256 == sha256:
                same = {n: getattr(before, n) for n in ("score", "evaluated", "measure")}
                manifest = dataclasses.replace(manifest, **same)
        _write_manifest(partial, manifest)
        _put_in_place(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def set_score(path: Path, score: float, measure: Mapping[str, Any]) -> None:
    """Records that the checkpoint was evaluated, by a new manifest in the old one's place."""
    known = float(score) if math.isfinite(score) else None
    found = {"score": known, "evaluated": True, "measure": dict(measure)}
    _write_manifest(path, dataclasses.replace(read_manifest(path), **found))


def check_type(name: str, dtype: np.dtype) -> None:
    """Raises ValueError for what is no number."""
    if not _is_numpys(dtype) and not hasattr(ml_dtypes, dtype.name):
        raise ValueError(f"{name} is of type {dtype.name}: a checkpoint holds numbers only")


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Writes the arrays, NumPy's or not, and flushes them to disk; the file's SHA-256."""
    known = {
        n: a if _is_numpys(a.dtype) else a.view(f"V{a.dtype.itemsize}") for n, a in arrays.items()
    }
    with open(path, "wb") as file:
        hashed = _Hashed(file)
        np.savez(hashed, **known)
        file.flush()
        os.fsync(file.fileno())
    return hashed.digest.hexdigest()


class _Hashed(io.RawIOBase):
    """A file that is hashed as it is written, from its first byte to its last.

    So it says that it cannot go back; a zip archive then has its checksums behind the data.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        heartbeat.beat()  # a disk that is slow is not one that hangs
        return self._file.write(data)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    record = dataclasses.asdict(manifest)
    about = {"format": FORMAT, **record, "checksum": checksum_of(record, FORMAT)}
    whole_files.write_json(folder / MANIFEST, about)


def _put_in_place(partial: Path, final: Path) -> None:
    """Renames; one that is there already is set aside first, so that a kill never loses both."""
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        if not final.is_dir():
            raise ValueError(f"{final} is in the way: it is no folder")
        delete(old)
        final.rename(old)
    try:
        partial.rename(final)
    except BaseException:
        if old.exists():
            old.rename(final)
        raise
    whole_files.flush(final.parent)
    delete(old)


def _is_numpys(dtype: np.dtype) -> bool:
    """bfloat16 and its like come from ml_dtypes; a file does not say which of them it holds."""
    return dtype.kind in "biufc"
