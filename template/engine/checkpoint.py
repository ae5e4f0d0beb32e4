"""Checkpoints: written whole or not at all, verified before use, few kept.

A checkpoint is a folder `step-XXXXXXXX/` with `state.npz` (every variable by name) and
`manifest.json` (step, score, settings, SHA-256 of state.npz). It is written under another name,
flushed to disk and renamed, so a folder of that name is complete. Rank 0 writes and reads; what
came of it is broadcast, so that all ranks go on or end together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from config import Config
from engine.stop import WRONG_USE, Stop
from engine.world import World, raw, say

Variables = Mapping[str, "keras.Variable | tf.Variable"]

_STATE, _MANIFEST = "state.npz", "manifest.json"
# A change in these makes the resumed run another run than the one that was begun.
_DEFINING = ("task", "seed", "global_batch_size", "num_steps", "base_lr", "optimizer", "precision")


class Best(NamedTuple):
    """The main metric's highest value so far, and the step it was first seen at."""

    score: float
    step: int


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run: `folder`, and how many of the newest are kept."""

    folder: Path
    keep: int
    world: World

    def add_score(self, step: int, score: float) -> None:
        """Notes the main metric in the checkpoint of `step`; on rank 0."""
        path = self.folder / f"step-{step:08d}"
        if self.world.is_chief and path.exists():
            (path / _MANIFEST).write_text(json.dumps(manifest(path) | {"score": score}, indent=1))
            self._prune()

    def save(
        self, step: int, variables: Variables, config: Config, score: float | None = None
    ) -> None:
        """Writes step-XXXXXXXX and deletes what is no longer kept; every rank must call it.

        Args:
          score: the task's main metric at this step, or None when it was not evaluated; the
            checkpoint with the highest score is kept besides the newest.
        Raises:
          Stop: on all ranks, when it cannot be written; older checkpoints are untouched.
        """
        error = None
        if self.world.is_chief:
            try:
                self._write(step, variables, config, score)
                self._prune()
            except OSError as caught:
                error = f"{caught.strerror or caught} ({caught.filename or self.folder})"
        error = self.world.broadcast_object(error, "checkpoint.save")
        if error:
            kept = ", ".join(p.name for p in self._all()) or "none"
            raise Stop(
                WRONG_USE,
                f"checkpoint of step {step} not written: {error}. Kept in {self.folder}: {kept}. "
                "Free some space or choose another --run_dir, then start again to go on",
            )

    def find(self, resume: str) -> Path | None:
        """The checkpoint to go on from, the same on every rank; None to start anew.

        Raises:
          Stop: `resume` is a path that is not a sound checkpoint.
        """
        found, error = None, None
        if self.world.is_chief and resume == "auto":
            found = self._newest_sound()
        elif self.world.is_chief and resume != "never":
            found, error = Path(resume), fault(Path(resume))
        found, error = self.world.broadcast_object((found, error), "checkpoint.find")
        if error:
            raise Stop(WRONG_USE, f"--resume={resume}: {error}")
        return found

    def restore(self, path: Path, variables: Variables, config: Config) -> None:
        """Sets the variables on rank 0 (the start-up broadcast brings them to the others).

        Raises:
          Stop: on all ranks, when names or shapes do not fit; names the first that does not.
        """
        with self.world.together(f"restoring {path}"):
            if self.world.is_chief:
                _load(path, variables)
        changed = _changed_settings(manifest(path)["config"], config) if self.world.is_chief else []
        if changed:
            say(self.world, f"note: settings differ from {path.name}'s: {', '.join(changed)}")

    def best(self) -> Best | None:
        """The best among the checkpoints there are (rank 0's view, on every rank)."""
        path = best(self._all()) if self.world.is_chief else None
        found = Best(_score(path), manifest(path)["step"]) if path else None
        return self.world.broadcast_object(found, "checkpoint.best")

    def _write(self, step: int, variables: Variables, config: Config, score: float | None) -> None:
        final = self.folder / f"step-{step:08d}"
        partial = self.folder / f".{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with open(partial / _STATE, "wb") as file:
            np.savez(file, **{name: raw(v).numpy() for name, v in variables.items()})
            file.flush()
            os.fsync(file.fileno())
        about = {
            "step": step,
            "score": score,
            "config": dataclasses.asdict(config),
            "ranks": self.world.size,
            "tensorflow": tf.__version__,
            "sha256": _sha256(partial / _STATE),
        }
        with open(partial / _MANIFEST, "w") as file:
            json.dump(about, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _flush_folder(self.folder)

    def _prune(self) -> None:
        paths = self._all()
        kept = {*paths[-self.keep :], best(paths)}
        for path in paths:
            if path not in kept:
                shutil.rmtree(path)

    def _all(self) -> list[Path]:
        """Oldest first."""
        return sorted(p for p in self.folder.glob("step-????????") if p.is_dir())

    def _newest_sound(self) -> Path | None:
        for path in reversed(self._all()):
            why = fault(path)
            if why is None:
                return path
            say(self.world, f"note: skipping {why}")
        return None


def best(paths: Iterable[Path]) -> Path | None:
    """The checkpoint with the highest score, the oldest of equals; None where none has a score."""
    scored = [p for p in sorted(paths) if _score(p) is not None]
    return max(scored, key=_score, default=None)


def manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / _MANIFEST).read_text())


def fault(path: Path) -> str | None:
    """What is wrong with the checkpoint, naming the file; None when it is sound."""
    if not path.is_dir():
        return f"there is no checkpoint folder {path}"
    try:
        expected = manifest(path)["sha256"]
        if _sha256(path / _STATE) != expected:
            return f"{path / _STATE} is damaged: its SHA-256 is not the one in {_MANIFEST}"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (OSError, ValueError, KeyError) as error:
        return f"{path / _MANIFEST} cannot be read: {error}"
    return None


def _load(path: Path, variables: Variables) -> None:
    try:
        state = np.load(path / _STATE)
    except (zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path / _STATE} is damaged: {error}") from None
    with state:
        missing = [n for n in variables if n not in state]
        unknown = [n for n in state.files if n not in variables]
        if missing or unknown:
            example = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} is not known"
            raise ValueError(
                f"holds {len(state.files)} variables, the model and optimizer have "
                f"{len(variables)}; {example}. Was it written by another model or optimizer? "
                "Use another --run_dir or --resume=never"
            )
        for name, variable in variables.items():
            value, shape = state[name], tuple(raw(variable).shape)
            if value.shape != shape:
                raise ValueError(
                    f"{name} has shape {value.shape} in the checkpoint, {shape} in the model. "
                    "Use another --run_dir or --resume=never"
                )
            raw(variable).assign(value)


def _changed_settings(before: Mapping[str, Any], config: Config) -> list[str]:
    now = dataclasses.asdict(config)
    pairs = ((name, before.get(name), now[name]) for name in _DEFINING)
    return [f"--{name} was {old}, is {new}" for name, old, new in pairs if old != new]


def _score(path: Path) -> float | None:
    try:
        return manifest(path)["score"]
    except (OSError, ValueError, KeyError):
        return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
