"""Writes checkpoints: whole or not at all, hashed as they are written, flushed to disk.

hvdkit/checkpoint/files.py says what they look like.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np

from hvdkit.checkpoint.files import (
    FORMAT,
    IN_PARTS,
    MANIFEST,
    STATE,
    Damaged,
    Manifest,
    OtherFormat,
    checksum_of,
    delete,
    read_manifest,
)
from hvdkit.ranks import heartbeat


class Written(NamedTuple):
    """A file of variables that is on disk: `dtypes` are those that NumPy does not know."""

    file: str
    size: int  # bytes
    sha256: str
    dtypes: dict[str, str]


def write(
    folder: Path,
    step: int,
    arrays: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    ranks: int,
    tensorflow: str,
    fingerprint: Mapping[str, str],
) -> Path:
    """Writes the checkpoint of this step, in one file, and returns its folder.

    It replaces one of the same step; the score of that one stays where the arrays are the same.

    Raises:
      OSError, ValueError: it cannot be written; nothing is left of it and nothing else changed.
    """
    partial = folder / f".step-{step:08d}.partial"
    with nothing_left(partial):
        delete(partial)
        partial.mkdir(parents=True)
        written = write_arrays(partial / STATE, arrays)
        return install(partial, [written], step, config, ranks, tensorflow, fingerprint)


@contextlib.contextmanager
def nothing_left(partial: Path) -> Iterator[None]:
    """Removes the folder of a save that fails."""
    try:
        yield
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def install(
    partial: Path,
    written: Sequence[Written],
    step: int,
    config: Mapping[str, Any],
    ranks: int,
    tensorflow: str,
    fingerprint: Mapping[str, str],
) -> Path:
    """Makes the checkpoint of this step of a folder with its arrays; returns where it is then."""
    final = partial.with_name(f"step-{step:08d}")
    sha256, parts = written[0].sha256, {}
    if len(written) > 1:
        parts = {one.file: one.sha256 for one in written}
        sha256 = hashlib.sha256("".join(parts.values()).encode()).hexdigest()
    dtypes = {name: dtype for one in written for name, dtype in one.dtypes.items()}
    about = (step, dict(config), ranks, tensorflow, sha256, dtypes)
    manifest = Manifest(*about, fingerprint=dict(fingerprint), parts=parts)
    with contextlib.suppress(Damaged, OtherFormat):
        before = read_manifest(final)
        if before.sha256 == sha256:
            same = {n: getattr(before, n) for n in ("score", "evaluated", "measure")}
            manifest = dataclasses.replace(manifest, **same)
    _write_manifest(partial, manifest)
    _put_in_place(partial, final)
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


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> Written:
    """Writes the arrays, NumPy's or not, and flushes them to disk."""
    known = {
        n: a if _is_numpys(a.dtype) else a.view(f"V{a.dtype.itemsize}") for n, a in arrays.items()
    }
    with open(path, "wb") as file:
        hashed = _Hashed(file)
        np.savez(hashed, **known)
        file.flush()
        os.fsync(file.fileno())
    dtypes = {n: a.dtype.name for n, a in arrays.items() if not _is_numpys(a.dtype)}
    return Written(path.name, path.stat().st_size, hashed.digest.hexdigest(), dtypes)


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
    number = IN_PARTS if manifest.parts else FORMAT
    if not manifest.parts:
        del record["parts"]  # older versions do not know it
    about = {"format": number, **record, "checksum": checksum_of(record, number)}
    write_json(folder / MANIFEST, about)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes the file whole or not at all, and flushes it and its folder to disk."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


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
    _flush_folder(final.parent)
    delete(old)


def _is_numpys(dtype: np.dtype) -> bool:
    """bfloat16 and its like come from ml_dtypes; a file does not say which of them it holds."""
    return dtype.kind in "biufc"


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
