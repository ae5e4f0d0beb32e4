"""The checkpoints of a run: saved, scored, found and restored.

Rank 0 reads and writes (hvdkit/checkpoint/files.py has the format). Every rank must call all
methods but those that write (saver.py calls them): results and errors are broadcast.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdkit import scores, whole_files
from hvdkit.checkpoint import files, writing
from hvdkit.checkpoint.files import Damaged, Manifest
from hvdkit.data import card as cards
from hvdkit.data.place import Place
from hvdkit.logs import join
from hvdkit.ranks import fingerprint as fingerprints
from hvdkit.ranks.world import World, raw, say
from hvdkit.scores import MainMetric, Score
from hvdkit.settings import Settings, project
from hvdkit.stop import NotNow, passes

Variables = Mapping[str, keras.Variable | tf.Variable]
Rules = Mapping[str, Mapping[str, str]]

# Settings that may change without making it another run: where it is kept, what is logged and
# kept, and how gradients travel (at most, sums are rounded otherwise). A resume names all others
# that changed, also data_dir (it may hold other data), accumulation_steps (batch norm sees
# micro-batches), compression, deterministic (about the whole run), init_from (not read any more).
_HARMLESS = {
    *("run_dir", "resume", "keep", "benchmark", "checkpoint_every", "max_bad_steps"),
    *("log_every", "log_gradients", "eval_every", "eval_batch_size", "early_stop_evals"),
    *("reduce_backend", "gradient_groups", "pack_bytes", "pack_count", "accept_changed_data"),
    *("bind", "data_workers", "max_pixels", "dry_run", "find_lr", "trackers", "max_bad_samples"),
}
# Settings that say what a score measures, besides the data and the metric.
_MEASURE = ("task", "image_size", "eval_crop", "eval_window", "eval_scales", "eval_flip")


def measure(config: Settings, metric: MainMetric, data: str) -> dict[str, Any]:
    """What a run's scores measure, by name: only scores of one measure can be compared.

    `data`: the fingerprint of the validation samples.
    """
    found = {f"--{name}": getattr(config, name) for name in _MEASURE}
    found["main_metric"] = metric.name
    found["main_metric_mode"] = metric.mode
    found["the validation data's fingerprint"] = data[:16]
    return found


class Copy(NamedTuple):
    """What a checkpoint is written of."""

    place: Place
    arrays: dict[str, np.ndarray]
    config: dict[str, Any]
    skipped: int  # steps in a row up to it that changed no weights


class Found(NamedTuple):
    """A sound checkpoint to resume from."""

    path: Path
    place: Place
    asked: bool  # --resume named this very one
    own: bool  # it is in this run's own folder

    @property
    def step(self) -> int:
        return self.place.step


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run: `folder`, and how many of the newest are kept.

    `fingerprint` is what its bits depend on besides settings (ranks/fingerprint.py), `measure`
    what its scores measure. Scores of another measure do not count; their best checkpoint stays.
    `card` is the run's data card, of `train_source`; `rules`: what the task's own optimizer and
    schedule are made with, by "optimizer" and "schedule".
    """

    folder: Path
    keep: int
    world: World
    fingerprint: Mapping[str, str] = dataclasses.field(default_factory=dict)
    measure: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    card: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rules: Rules = dataclasses.field(default_factory=dict)
    train_source: Any = None
    listed: set[str] = dataclasses.field(default_factory=set, init=False)  # when `find` looked
    _room: dict[str, np.ndarray] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def copy(self, place: Place, variables: Variables, config: Settings) -> Copy:
        """The values as they are now, at this place of the run; rank 0 calls it, between steps.

        The next copy reuses its memory (new takes six times as long to fill): write it before.
        """
        arrays = {name: self._copied(name, raw(v).value()) for name, v in variables.items()}
        skipped = int(raw(variables["skipped_in_a_row"])) if "skipped_in_a_row" in variables else 0
        return Copy(place, arrays, dataclasses.asdict(config), skipped)

    def _copied(self, name: str, tensor: tf.Tensor) -> np.ndarray:
        # A view where it lies in the host's memory. NumPy takes no scalar of ml_dtypes' types.
        value = np.asarray(tensor if tensor.shape.rank else tensor.numpy())
        room = self._room.get(name)
        if room is None or (room.shape, room.dtype) != (value.shape, value.dtype):
            room = self._room[name] = value.copy()
        else:
            np.copyto(room, value)
        return room

    def write(self, copy: Copy) -> Path:
        """Writes step-XXXXXXXX, without a score, and deletes what is no longer kept; on rank 0.

        Raises OSError, ValueError: it cannot be written; older checkpoints are untouched.
        """
        try:
            return writing.write(
                self.folder,
                copy.place.step,
                copy.arrays,
                samples=copy.place.samples,
                passed_over=copy.place.passed_over,
                config=copy.config,
                fingerprint=self.fingerprint,
                ranks=self.world.size,
                tensorflow=tf.__version__,
                card=dict(self.card),
                rules=dict(self.rules),
            )
        finally:
            self._prune(copy.place.step - copy.skipped)

    def add_score(self, score: Score, skipped: int = 0) -> None:
        """Marks the checkpoint of its step as evaluated; deletes what is no longer kept; rank 0.

        The checkpoint with the best score is kept besides the newest; a score that is no finite
        number is never the best. `skipped`: as in Copy. Raises OSError, ValueError: it cannot be
        written; the checkpoint is as it was.
        """
        try:
            writing.set_score(self.folder / f"step-{score.step:08d}", score, self.measure)
        finally:
            self._prune(score.step - skipped)

    def best(self) -> Score | None:
        """The best of the checkpoints there are; call it after `run_folder.begin`."""
        found = None
        if self.world.is_chief:
            there = files.scored(files.candidates(self.folder))
            if path := files.best(there, self.measure):
                found = there[path].as_score()
        found = self.world.broadcast_object(found, "checkpoint.best")
        return found and Score(*found)

    def other_scores(self) -> tuple[int, str]:
        """The newest step in the folder with a score of another measure, and a sentence about it.

        0 and "" where there is none. The sentence may also be about another main_metric_mode.
        """
        newest = (0, "")
        if self.world.is_chief:
            for about in files.scored(files.candidates(self.folder)).values():
                if unlike := about.unlike(self.measure):
                    changed = [_changed(name, *values) for name, values in unlike.items()]
                    note = (
                        f"the score of step {about.step} is of another measure "
                        f"({'; '.join(changed)}): such scores are not compared with this run's"
                    )
                    newest = (about.step, note)
                    continue
                was = scores.of_measure(about.measure)
                now = scores.of_measure(self.measure)
                if was.name and was.mode != now.mode:
                    note = (
                        f"{_changed('main_metric_mode', was.mode, now.mode)}: the best is chosen "
                        "anew, of the checkpoints that were kept"
                    )
                    newest = (newest[0], note)
        return tuple(self.world.broadcast_object(newest, "checkpoint.other_scores"))

    def find(self, resume: str) -> Found | None:
        """What to resume from, the same on every rank; None to start anew. Changes nothing on disk.

        `resume`: auto, never, the path of a checkpoint, or that of a run's folder (its newest sound
        checkpoint). Raises Stop: `resume` is a path without a sound checkpoint, or the checkpoint
        is of another format.
        """
        found = None
        with self.world.fail_together(f"--resume={resume}"):
            if self.world.is_chief:
                self.listed.clear()
                self.listed.update(path.name for path in files.candidates(self.folder))
                found = None if resume == "never" else self._choose(resume)
        return self._broadcast(found, "find")

    def score_of(self, found: Found) -> float | None:
        """Of its evaluation, if it was evaluated as this run does; NaN where that gave no number.

        Every rank must call it.
        """
        scored = False
        value = None
        with self.world.fail_together(f"reading the score of {found.path}"):
            if self.world.is_chief:
                about = files.read_manifest(found.path)
                scored = about.evaluated and not about.unlike(self.measure)
                value = about.score
        scored, value = self.world.broadcast_object([scored, value], "checkpoint.score_of")
        if not scored:
            return None
        return math.nan if value is None else value

    def sound_before(self, step: int) -> Found | None:
        """The newest sound checkpoint of the folder that is of a step before `step`, if any."""
        found = None
        with self.world.fail_together("looking for a checkpoint to go back to"):
            if self.world.is_chief:
                path, _ = files.newest_sound(self.folder, step)
                found = path and self._found(path, asked=True)
        return self._broadcast(found, "sound_before")

    def _choose(self, resume: str) -> Found | None:
        path = Path(resume)
        if resume != "auto" and files.is_checkpoint(path):
            files.verify(path)
            return self._found(path, asked=True)
        folder = self.folder if resume == "auto" else path / "checkpoints"
        newest, passed_over = files.newest_sound(folder)
        for why in passed_over:
            say(self.world, f"note: passed over: {why}")
        away = list(filter(passes, passed_over))
        if away and not newest:
            raise NotNow(f"{away[0]}: to begin anew although it is there, give --resume=never")
        if not newest and resume != "auto":
            if not Path(resume).exists():
                raise Damaged("does not exist")
            raise Damaged(
                "is no checkpoint (step-XXXXXXXX), and no folder of a run with a sound checkpoint "
                "in checkpoints/"
            )
        return newest and self._found(newest, asked=False)

    def _found(self, path: Path, asked: bool) -> Found:
        own = path.parent.resolve() == self.folder.resolve()
        return Found(path, files.read_manifest(path).place(), asked, own)

    def _broadcast(self, found: Found | None, name: str) -> Found | None:
        fields = found and [str(found.path), found.place, found.asked, found.own]
        fields = self.world.broadcast_object(fields, f"checkpoint.{name}")
        if not fields:
            return None
        path, place, asked, own = fields
        return Found(Path(path), Place(*place), asked, own)

    def restore(self, found: Found, variables: Variables, config: Settings) -> None:
        """Sets the variables on rank 0 (the start-up broadcast brings them to the others).

        It prints which settings make this another run than the one that saved the checkpoint.

        Raises Stop: on all ranks, when names, shapes or types do not fit; names the first.
        """
        changed = []
        batch = None
        every = config.eval_every
        with self.world.fail_together(f"restoring {found.path}"):
            if self.world.is_chief:
                load(found.path, variables)
                before = files.read_manifest(found.path)
                changed = cards.check(
                    found.path,
                    before.card,
                    self.card,
                    source=self.train_source,
                    accepted=config.accept_changed_data,
                )
                normed = any(name.endswith("/moving_mean") for name in variables)
                changed += changes(before, config, ranks=self.world.size, normed=normed)
                changed += rule_changes(before.rules, self.rules)
                if config.deterministic and before.fingerprint:
                    changed += fingerprints.differences(before.fingerprint, self.fingerprint)
                batch = before.config.get("global_batch_size")
                every = before.config.get("eval_every", config.eval_every)
        if changed:
            say(self.world, f"note: another run than {found.path.name}'s: {'; '.join(changed)}")
        if config.early_stop_evals and config.eval_every and every != config.eval_every:
            say(
                self.world,
                f"note: --eval_every was {every}, is {config.eval_every}: --early_stop_evals="
                f"{config.early_stop_evals} ends the run {config.early_stop_evals} times "
                f"{config.eval_every} steps after the best one, whenever it was evaluated before",
            )
        if batch not in (None, config.global_batch_size):
            say(
                self.world,
                f"note: steps had {batch} samples and have {config.global_batch_size}: the data go "
                f"on after the {found.place.position:,} samples so far, the learning rate by steps:"
                f" at step {found.step:,} of {config.num_steps:,}",
            )

    def _prune(self, applied: int) -> None:
        """Keeps the newest, and the best by each measure; prints what cannot be deleted.

        `applied`: the newest step that changed weights. The run may go back to before it.
        """
        paths = [p for p in files.candidates(self.folder) if p.is_dir()]
        before = [p for p in paths if files.step_of(p) <= applied]
        read = files.manifests(paths)  # what a failing disk does not show may be the best
        there = {path: about for path, about in read.items() if about.score is not None}
        # This run's measure last: its mode decides between scores of the same measure.
        every_measure = [about.measure for about in there.values()]
        if any(not about.unlike(self.measure) for about in there.values()):
            every_measure.append(self.measure)
        measures = {}
        for measure in every_measure:
            measures[json.dumps(files.without_mode(measure), sort_keys=True)] = measure
        best = [files.best(there, measure) for measure in measures.values()]
        kept = {*paths[-self.keep :], *before[-1:], *best}
        for path in paths:
            try:
                if path in read and path not in kept:
                    with whole_files.held(path.parent) as folder:
                        files.delete(folder / path.name)
            except OSError as error:
                say(self.world, f"note: {path} cannot be deleted: {error.strerror or error}")


def changes(before: Manifest, config: Settings, *, ranks: int, normed: bool) -> list[str]:
    """What makes this another run than the one that saved `before`, in words.

    `normed`: whether the model has batch norm.
    """
    found = []
    for field in dataclasses.fields(config):  # with a fork's own
        # A setting that is newer than the checkpoint had its default.
        old = before.config.get(field.name, field.default)
        new = getattr(config, field.name)
        counts = field.name == "eval_every" and config.lr_policy == "plateau"
        if field.metadata["path"]:  # relative ones are the project's
            differs = project.folder() / str(old) != project.folder() / str(new)
        else:
            differs = old != new
        if differs and (counts or field.name not in _HARMLESS):
            found.append(_changed(f"--{field.name}", old, new))
    if before.ranks != ranks and not config.virtual_ranks:
        were = f"which were {before.ranks}, are {ranks}"
        if config.lr_scaling != "none":
            found.append(f"--lr_scaling={config.lr_scaling} multiplies by the ranks, {were}")
        if normed and config.bn_sync != "full":
            found.append(f"--bn_sync={config.bn_sync} normalizes on each of the ranks, {were}")
        if config.deterministic:
            found.append(f"--deterministic holds for one number of ranks, {were}")
    return found


def rule_changes(before: Rules, now: Rules) -> list[str]:
    """How the task's own optimizer and schedule differ from those that saved, in words.

    A checkpoint of an older version has none. Of a schedule, steps that both have are compared.
    """
    found = []
    for part in before.keys() & now.keys():
        was = before[part]
        is_now = now[part]
        names = [name for name in was if name in is_now]
        if part == "optimizer":
            names = list(dict.fromkeys([*was, *is_now]))
        pairs = {name: (was.get(name, "not set"), is_now.get(name, "not set")) for name in names}
        changed = [_changed(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]
        if changed:
            found.append(f"the task's {part}: {join(changed, 3)}")
    return sorted(found)


def load(path: Path, variables: Variables) -> None:
    """Sets this rank's variables to those of a checkpoint.

    Raises ValueError: it cannot be read, or names, shapes or types do not fit; names the first.
    """
    state = files.read(path)
    other = "a checkpoint of this model, another --run_dir or --resume=never"
    missing = [f"{n!r} is missing" for n in variables if n not in state]
    missing += [f"{n!r} is not known" for n in state if n not in variables]
    if missing:
        raise ValueError(
            f"holds {len(state)} variables, the model and optimizer have {len(variables)}; "
            f"{missing[0]}. Was it written by another model or optimizer? Use {other}"
        )
    for name, variable in variables.items():
        value = state[name]
        shape = tuple(raw(variable).shape)
        dtype = raw(variable).dtype.name
        if value.shape != shape:
            where = f"has shape {value.shape} in the checkpoint, {shape} in the model. Use"
            raise ValueError(f"{name} {where} {other}")
        if value.dtype.name != dtype:
            where = f"is {value.dtype.name} in the checkpoint, {dtype} in the model. Use"
            raise ValueError(f"{name} {where} the --precision that it was written with, or {other}")
    for name, variable in variables.items():
        raw(variable).assign(state[name])


def _changed(name: str, old: Any, new: Any) -> str:
    old, new = (repr(value) if value == "" else value for value in (old, new))
    return f"{name} was {old}, is {new}"
