"""The checkpoints of a run: saved, scored, found and restored by all ranks together.

Rank 0 writes and reads (hvdkit/checkpoint/files.py has the format); what came of it is broadcast,
so that all ranks go on or end together. Every method must be called on every rank, but for those
that write (hvdkit/checkpoint/saver.py calls them).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdkit.checkpoint import files, writing
from hvdkit.checkpoint.files import Damaged, Manifest, OtherFormat
from hvdkit.ranks import fingerprint as fingerprints
from hvdkit.ranks.world import World, raw, say
from hvdkit.settings import Settings
from hvdkit.stop import WRONG_USE, Stop

Variables = Mapping[str, keras.Variable | tf.Variable]

# Settings that may change without making it another run: where it is kept, what is watched and
# kept of it, and how gradients travel, which changes the rounding of their sums at most. Every
# other setting is named when it changed. Among those are some that look harmless: data_dir (the
# data may be others), accumulation_steps (batch norm sees micro-batches), compression,
# deterministic (a promise about the whole run), init_from (it is not read any more).
_HARMLESS = {
    *("run_dir", "resume", "keep", "benchmark", "checkpoint_every", "max_bad_steps"),
    *("log_every", "log_gradients", "eval_every", "eval_batch_size", "early_stop_evals"),
    *("reduce_backend", "gradient_groups", "pack_bytes", "pack_count"),
    *("data_workers", "dry_run", "find_lr", "trackers"),
}


# Settings that say what a score is of, besides the data and the metric.
_MEASURE = ("task", "image_size", "eval_crop", "eval_window", "eval_scales", "eval_flip")


def measure(config: Settings, metric: str, data: str) -> dict[str, Any]:
    """What a run's scores are of, by name: only scores of one measure can be compared.

    Args:
      metric: the task's main metric; data: the fingerprint of the samples it is taken over, which
        tells a copy of them elsewhere from others.
    """
    settings = {f"--{name}": getattr(config, name) for name in _MEASURE}
    return settings | {"main_metric": metric, "the validation data's fingerprint": data[:16]}


class Best(NamedTuple):
    """The main metric's highest value so far, and the step it was first seen at."""

    score: float
    step: int


class Copy(NamedTuple):
    """What a checkpoint is written of."""

    step: int
    arrays: dict[str, np.ndarray]
    config: dict[str, Any]
    skipped: int  # steps in a row up to it that changed no weights


class Found(NamedTuple):
    """A sound checkpoint to go on from; `asked` when --resume named this very one."""

    path: Path
    step: int
    asked: bool

    def lies_in(self, folder: Path) -> bool:
        return self.path.parent.resolve() == folder.resolve()


def _fields(found: Found | None) -> list[Any] | None:
    """For other ranks: `_found` makes it again."""
    return [str(found.path), found.step, found.asked] if found else None


def _found(fields: list[Any] | None) -> Found | None:
    return Found(Path(fields[0]), *fields[1:]) if fields else None


def _seen(value: tf.Tensor) -> np.ndarray:
    """Its memory, not copied where it lies in the host's."""
    # NumPy takes no scalar of a type that is not its own.
    return np.asarray(value if value.shape.rank else value.numpy())


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run: `folder`, and how many of the newest are kept.

    `fingerprint` is what its bits depend on besides settings (ranks/fingerprint.py), `measure`
    what its scores are of. A score of another measure does not count; its best checkpoint stays.
    """

    folder: Path
    keep: int
    world: World
    fingerprint: Mapping[str, str] = dataclasses.field(default_factory=dict)
    measure: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _room: dict[str, np.ndarray] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def copy(self, step: int, variables: Variables, config: Settings) -> Copy:
        """The values as they are now; rank 0 calls it, between steps.

        They are in memory of their own, which the next copy takes over: new memory takes six times
        as long to fill, so what was copied last must be written by then.
        """
        arrays = {name: self._filled(name, _seen(raw(v).value())) for name, v in variables.items()}
        skipped = int(raw(variables["skipped_in_a_row"])) if "skipped_in_a_row" in variables else 0
        return Copy(step, arrays, dataclasses.asdict(config), skipped)

    def _filled(self, name: str, value: np.ndarray) -> np.ndarray:
        room = self._room.get(name)
        if room is None or (room.shape, room.dtype) != (value.shape, value.dtype):
            room = self._room[name] = value.copy()
        else:
            np.copyto(room, value)
        return room

    def write(self, copy: Copy) -> Path:
        """Writes step-XXXXXXXX, without a score, and deletes what is no longer kept; on rank 0.

        Raises:
          OSError, ValueError: it cannot be written; older checkpoints are untouched.
        """
        about = {"config": copy.config, "fingerprint": self.fingerprint}
        about |= {"ranks": self.world.size, "tensorflow": tf.__version__}
        try:
            return writing.write(self.folder, copy.step, copy.arrays, **about)
        finally:
            self._prune(copy.step - copy.skipped)

    def add_score(self, step: int, score: float, skipped: int = 0) -> None:
        """Marks the checkpoint of `step` as evaluated, then deletes what is no longer kept; rank 0.

        Args:
          score: the task's main metric at this step. The checkpoint with the highest one is kept
            besides the newest; a score that is no finite number is never the best.
          skipped: as in Copy.
        Raises:
          OSError, ValueError: it cannot be written; the checkpoint is as it was.
        """
        try:
            writing.set_score(self._path(step), score, self.measure)
        finally:
            self._prune(step - skipped)

    def kept(self) -> str:
        """A sentence on what is in the folder, for a person whose disk is full."""
        there = ", ".join(p.name for p in files.candidates(self.folder)) or "none"
        return f"Kept in {self.folder}: {there}. Free some space, or go on in another --run_dir"

    def best(self) -> Best | None:
        """The best of the checkpoints there are; call it after `run_folder.begin`."""
        found = None
        if self.world.is_chief:
            there = files.candidates(self.folder)
            path = files.best(there, self.measure)
            about = files.read_manifest(path) if path else None
            found = Best(about.score, about.step) if about else None
        found = self.world.broadcast_object(found, "checkpoint.best")
        return found and Best(*found)

    def has_score(self, path: Path) -> bool:
        """Whether the checkpoint was evaluated as this run does, be its score a number or not."""
        evaluated = False
        if self.world.is_chief:
            with contextlib.suppress(Damaged, OtherFormat):
                about = files.read_manifest(path)
                evaluated = about.evaluated and not about.unlike(self.measure)
        return self.world.broadcast_object(evaluated, "checkpoint.has_score")

    def other_scores(self) -> tuple[int, str]:
        """The newest step in the folder whose score is of another measure, and a sentence on it.

        0 and "" where there is none.
        """
        newest = (0, "")
        if self.world.is_chief:
            there = files.scored(files.candidates(self.folder))
            unlike = [(m.step, found) for m in there.values() if (found := m.unlike(self.measure))]
            for step, found in unlike[-1:]:
                changed = [f"{n} was {_shown(a)}, is {_shown(b)}" for n, (a, b) in found.items()]
                said = (
                    f"the score of step {step} is of another measure ({'; '.join(changed)}): such "
                    "scores are not compared with this run's"
                )
                newest = (step, said)
        return tuple(self.world.broadcast_object(newest, "checkpoint.other_scores"))

    def holds(self, found: Found) -> bool:
        """Whether it is one of this run's own, and not of another run's folder."""
        return self.world.broadcast_object(found.lies_in(self.folder), "checkpoint.holds")

    def find(self, resume: str, num_steps: int) -> Found | None:
        """What to go on from, the same on every rank; None to start anew. Changes nothing on disk.

        Args:
          resume: auto, never, the path of a checkpoint, or that of a run's folder (its newest
            sound checkpoint).
        Raises:
          Stop: `resume` is a path without a sound checkpoint, the checkpoint is of another format,
            or its step lies past `num_steps`.
        """
        found, error = None, None
        if self.world.is_chief and resume != "never":
            try:
                found = self._choose(resume)
                if found and found.step > num_steps:
                    error = (
                        f"{found.path} is of step {found.step}, past --num_steps={num_steps}: give "
                        "more --num_steps, another --run_dir or --resume=never"
                    )
            except (OSError, ValueError) as caught:
                error = why_not(caught, self.folder)
        fields, error = self.world.broadcast_object((_fields(found), error), "checkpoint.find")
        if error:
            raise Stop(WRONG_USE, f"--resume={resume}: {error}")
        return _found(fields)

    def sound_before(self, step: int) -> Found | None:
        """The newest sound checkpoint of the folder that is of a step before `step`, if any."""
        found = None
        with self.world.fail_together("looking for a checkpoint to go back to"):
            if self.world.is_chief:
                path, _ = files.newest_sound(self.folder, step)
                if path:
                    found = Found(path, files.read_manifest(path).step, asked=True)
        return _found(self.world.broadcast_object(_fields(found), "checkpoint.sound_before"))

    def restore(self, found: Found, variables: Variables, config: Settings) -> None:
        """Sets the variables on rank 0 (the start-up broadcast brings them to the others).

        It also tells a person which settings make this another run than the one that was begun.

        Raises:
          Stop: on all ranks, when names, shapes or types do not fit; names the first that does not.
        """
        changed = []
        with self.world.fail_together(f"restoring {found.path}"):
            if self.world.is_chief:
                load(found.path, variables)
                before = files.read_manifest(found.path)
                normed = any(name.endswith("/moving_mean") for name in variables)
                changed = changes(before, config, ranks=self.world.size, normed=normed)
                if config.deterministic and before.fingerprint:
                    changed += fingerprints.differences(before.fingerprint, self.fingerprint)
        if changed:
            say(self.world, f"note: another run than {found.path.name}'s: {'; '.join(changed)}")

    def _choose(self, resume: str) -> Found | None:
        path = Path(resume)
        asked = resume != "auto" and files.is_checkpoint(path)
        if asked:
            return Found(path, files.verify(path).step, asked)
        folder = self.folder if resume == "auto" else path / "checkpoints"
        newest, passed_over = files.newest_sound(folder)
        for why in passed_over:
            say(self.world, f"note: passed over: {why}")
        if newest:
            return Found(newest, files.read_manifest(newest).step, asked)
        if resume != "auto":
            raise Damaged(
                "is no checkpoint (step-XXXXXXXX), and no folder of a run with a sound checkpoint "
                "in checkpoints/"
            )
        return None

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _prune(self, applied: int) -> None:
        """Keeps the newest, and the best by each measure; what cannot be deleted is told.

        `applied`: the newest step that changed weights. The run may go back to before it.
        """
        paths = [p for p in files.candidates(self.folder) if p.is_dir()]
        before = [p for p in paths if files.step_of(p) <= applied]
        kept = {*paths[-self.keep :], *before[-1:], *files.best_of_each(paths)}
        for path in paths:
            try:
                if path not in kept:
                    files.delete(path)
            except OSError as error:
                say(self.world, f"note: {path} cannot be deleted: {error.strerror or error}")


def check_types(variables: Variables) -> None:
    """Raises ValueError where a variable cannot be saved, before there is something to lose."""
    for name, variable in variables.items():
        writing.check_type(name, np.dtype(raw(variable).dtype.as_numpy_dtype))


def changes(before: Manifest, config: Settings, *, ranks: int, normed: bool) -> list[str]:
    """What makes this another run than the one that `before` was saved by, in words.

    Args:
      normed: whether the model has batch norm.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(config)}  # with a fork's own
    now = dataclasses.asdict(config)
    # A setting that is newer than the checkpoint had its default's effect.
    pairs = ((name, before.config.get(name, defaults[name]), new) for name, new in now.items())
    found = [
        f"--{name} was {_shown(old)}, is {_shown(new)}"
        for name, old, new in pairs
        if old != new and name not in _HARMLESS
    ]
    if before.ranks != ranks and not config.virtual_ranks:
        were = f"which were {before.ranks}, are {ranks}"
        if config.lr_scaling != "none":
            found.append(f"--lr_scaling={config.lr_scaling} multiplies by the ranks, {were}")
        if normed and config.bn_sync != "full":
            found.append(f"--bn_sync={config.bn_sync} normalizes on each of the ranks, {were}")
        if config.deterministic:
            found.append(f"--deterministic holds for one number of ranks, {were}")
    return found


def load(path: Path, variables: Variables) -> None:
    """Sets this rank's variables to those of a checkpoint.

    Raises:
      ValueError: it cannot be read, or names, shapes or types do not fit; names the first.
    """
    state = files.read(path)
    other = "Use a checkpoint of this model, another --run_dir or --resume=never"
    missing = [n for n in variables if n not in state]
    unknown = [n for n in state if n not in variables]
    if missing or unknown:
        example = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} is not known"
        raise ValueError(
            f"holds {len(state)} variables, the model and optimizer have {len(variables)}; "
            f"{example}. Was it written by another model or optimizer? {other}"
        )
    for name, variable in variables.items():
        value, shape = state[name], tuple(raw(variable).shape)
        if value.shape != shape:
            raise ValueError(
                f"{name} has shape {value.shape} in the checkpoint, {shape} in the model. {other}"
            )
        dtype = raw(variable).dtype.name
        if value.dtype.name != dtype:
            raise ValueError(
                f"{name} is {value.dtype.name} in the checkpoint, {dtype} in the model. Use the "
                f"--precision that it was written with, or {other[4:]}"
            )
    for name, variable in variables.items():
        raw(variable).assign(state[name])


def _shown(value: Any) -> str:
    return repr(value) if value == "" else str(value)


def why_not(error: Exception, folder: Path) -> str:
    """What is wrong with a file of the folder, in words."""
    if isinstance(error, OSError):
        return f"{error.strerror or error} ({error.filename or folder})"
    return str(error) or type(error).__name__
