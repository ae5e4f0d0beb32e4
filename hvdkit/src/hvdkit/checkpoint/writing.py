"""Writes checkpoints: whole or not at all, hashed as they are written, flushed to disk.

hvdkit/checkpoint/files.py says what they look like.
"""

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
from hvdkit.checkpoint import files
from hvdkit.ranks.messages import heartbeat
from hvdkit.ranks.world import raw
from hvdkit.scores import Score


def write(folder: Path, step: int, arrays: Mapping[str, np.ndarray], **about: Any) -> Path:
    """Writes the checkpoint of this step, in the place of one that is there; returns its folder.

    (A run that begins sets later checkpoints aside, so only a save that is tried again meets one.)

    `about`: `config`, `ranks`, `tensorflow` and `fingerprint` of its Manifest. Raises OSError,
    ValueError: it cannot be written; nothing is left of it and nothing else changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-{step:08d}"
    with whole_files.held(folder) as there:
        partial = there / f".{name}.partial"
        final = there / name
        try:
            files.delete(partial)
            partial.mkdir()
            with whole_files.held(partial) as inside:
                sha256 = _write_arrays(inside / files.STATE, arrays)
                dtypes = {n: a.dtype.name for n, a in arrays.items() if not _is_numpys(a.dtype)}
                _write_manifest(inside, files.Manifest(step, sha256=sha256, dtypes=dtypes, **about))
            if final.exists() and not final.is_dir():
                raise ValueError(f"{name} is in the way: it is no folder")
            whole_files.put(partial, final)
            whole_files.flush(there)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder / name


def set_score(path: Path, score: Score, measure: Mapping[str, Any]) -> None:
    """Records that the checkpoint was evaluated, by a new manifest in the old one's place."""
    manifest = dataclasses.replace(
        files.read_manifest(path),
        score=float(score.value) if math.isfinite(score.value) else None,
        loss=float(score.loss) if math.isfinite(score.loss) else None,
        since=score.since,
        evaluated=True,
        measure=dict(measure),
    )
    with whole_files.held(path) as there:
        _write_manifest(there, manifest)


def check_types(variables: Mapping[str, Any]) -> None:
    """Raises ValueError where a variable cannot be saved."""
    for name, variable in variables.items():
        dtype = np.dtype(raw(variable).dtype.as_numpy_dtype)
        if not _is_numpys(dtype) and not hasattr(ml_dtypes, dtype.name):
            raise ValueError(f"{name} is of type {dtype.name}: a checkpoint holds numbers only")
        shape = raw(variable).shape
        if not shape.is_fully_defined():  # a step that is undone would broadcast to the old one
            raise ValueError(
                f"{name} has the shape {shape}: variables keep their shape in a run; make it of "
                "its full size, and another that says how much of it is in use"
            )


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Writes the arrays, NumPy's or not, and flushes them to disk; the file's SHA-256."""
    known = {n: a if _is_numpys(a.dtype) else a.view(f"V{a.itemsize}") for n, a in arrays.items()}
    with open(path, "xb") as file:  # nothing that is there, nor a link
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
        self._file = file
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        heartbeat.beat()  # a disk that is slow is not one that hangs
        return self._file.write(data)


def _write_manifest(folder: Path, manifest: files.Manifest) -> None:
    record = whole_files.without_nan(dataclasses.asdict(manifest))  # as it is read again
    about = {"format": files.FORMAT, **record, "checksum": files.checksum_of(record, files.FORMAT)}
    whole_files.write_json(folder / files.MANIFEST, about)


def _is_numpys(dtype: np.dtype) -> bool:
    """bfloat16 and its like come from ml_dtypes; a file does not say which of them it holds."""
    return dtype.kind in "biufc"
