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


def write(
    folder: Path, step: int, arrays: Mapping[str, np.ndarray], **about: Any
) -> Path:
    """Writes the checkpoint of this step, in the place of one that is there; returns its folder.

    (A run that begins sets later checkpoints aside, so only a save that is tried again meets one.)

    `about`: all other fields of its Manifest, but for `sha256` and `dtypes`. Raises OSError,
    ValueError: it cannot be written; nothing is left of it and nothing else changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = files.name_of(step)
    with whole_files.held(folder) as held_folder:
        partial = held_folder / f".{name}.partial"
        final = held_folder / name
        try:
            files.delete(partial)
            partial.mkdir()
            with whole_files.held(partial) as inside:
                sha256 = _write_arrays(inside / files.STATE, arrays)
                dtypes = {}
                for array_name, array in arrays.items():
                    if not _is_numpys(array.dtype):
                        dtypes[array_name] = array.dtype.name
                _write_manifest(
                    inside, files.Manifest(step, sha256=sha256, dtypes=dtypes, **about)
                )
            if final.exists() and not final.is_dir():
                raise ValueError(f"{name} is in the way: it is no folder")
            whole_files.put(partial, final)
            whole_files.flush(held_folder)
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
    with whole_files.held(path) as held_path:
        _write_manifest(held_path, manifest)


def check_types(variables: Mapping[str, Any]) -> None:
    """Raises ValueError where a variable cannot be saved."""
    for name, variable in variables.items():
        dtype = np.dtype(raw(variable).dtype.as_numpy_dtype)
        if not _is_numpys(dtype) and not hasattr(ml_dtypes, dtype.name):
            raise ValueError(
                f"{name} is of type {dtype.name}: a checkpoint holds numbers only"
            )
        shape = raw(variable).shape
        # Undoing a step would broadcast its value to the old one.
        if not shape.is_fully_defined():
            raise ValueError(
                f"{name} has the shape {shape}: variables keep their shape in a run; make it of "
                "its full size, and another that says how much of it is in use"
            )


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Writes the arrays, of NumPy's types or not, and flushes them; returns the file's SHA-256."""
    with open(path, "xb") as file:  # It refuses what is there already, also a link.
        hashed = _HashedFile(file)
        np.savez(hashed, **_storable(arrays))
        file.flush()
        os.fsync(file.fileno())
    return hashed.digest.hexdigest()


class _HashedFile(io.RawIOBase):
    """A file that is hashed as it is written, from its first byte to its last.

    It has no `seek`, so that zipfile writes each part's checksum behind its data.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        heartbeat.beat()  # A slow disk is none that hangs.
        return self._file.write(data)


def _write_manifest(folder: Path, manifest: files.Manifest) -> None:
    # The checksum is of the content as it is read again.
    record = whole_files.without_nan(dataclasses.asdict(manifest))
    checksum = files.checksum_of(record, files.FORMAT)
    content = {"format": files.FORMAT, **record, "checksum": checksum}
    whole_files.write_json(folder / files.MANIFEST, content)


def _storable(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The arrays, those of a type that NumPy does not know as bare bytes."""
    stored = dict(arrays)
    for name, array in arrays.items():
        if not _is_numpys(array.dtype):
            stored[name] = array.view(f"V{array.itemsize}")
    return stored


def _is_numpys(dtype: np.dtype) -> bool:
    """bfloat16 and its like come from ml_dtypes; a file does not say which of them it holds."""
    # By the module: ml_dtypes gives some of its types the letter of NumPy's floats.
    return dtype.kind in "biufc" and dtype.type.__module__ == "numpy"
