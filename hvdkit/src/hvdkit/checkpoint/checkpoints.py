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
from hvdkit.settings import Settings, absl_flags, project, runs
from hvdkit.stop import NotNow, passes

Variables = Mapping[str, keras.Variable | tf.Variable]
Rules = Mapping[str, Mapping[str, str]]

# Settings that say what a score measures, besides the data and the metric.
MEASURE = (
    "task",
    "image_size",
    "eval_crop",
    "eval_window",
    "eval_scales",
    "eval_flip",
)


def measure(config: Settings, metric: MainMetric, data: str) -> dict[str, Any]:
    """What a run's scores measure, by name: only scores of one measure can be compared.

    `data`: the fingerprint of the validation samples.
    """
    flags = {f"--{name}": getattr(config, name) for name in MEASURE}
    if metric.name == "loss":
        for name, default in scores.OF_LOSS.items():
            if getattr(config, name) != default:
                flags[f"--{name}"] = getattr(config, name)
    return flags | {
        "main_metric": metric.name,
        "main_metric_mode": metric.mode,
        "the validation data's fingerprint": data[:16],
    }


class Copy(NamedTuple):
    """What a checkpoint is written of.

    `skipped`: so many steps in a row up to it changed no weights. `figures`: see Manifest.
    """

    place: Place
    arrays: dict[str, np.ndarray]
    config: dict[str, Any]
    skipped: int
    figures: dict[str, Any]


class CheckpointInfo(NamedTuple):
    """A sound checkpoint to resume from.

    `is_named`: --resume named this very one. `is_own`: it is in this run's own folder.
    """

    path: Path
    place: Place
    is_named: bool
    is_own: bool

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
    # The names of the checkpoints that there were when `find` looked, on rank 0.
    listed: set[str] = dataclasses.field(default_factory=set, init=False)
    # Steps of checkpoints that are kept until their score can be written.
    awaiting: set[int] = dataclasses.field(default_factory=set, init=False)
    _memory: dict[str, np.ndarray] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    def copy(
        self,
        place: Place,
        variables: Variables,
        config: Settings,
        *,
        figures: Mapping[str, Any] | None = None,
    ) -> Copy:
        """The values as they are now, at this place of the run; rank 0 calls it, between steps.

        The next copy reuses its memory (new takes six times as long to fill): write it before.
        """
        arrays = {
            name: self._copied(name, raw(v).value()) for name, v in variables.items()
        }
        skipped = (
            int(raw(variables["skipped_in_a_row"]))
            if "skipped_in_a_row" in variables
            else 0
        )
        return Copy(
            place,
            arrays,
            dataclasses.asdict(config) | absl_flags.values_of_the_fork(),
            skipped,
            dict(figures or {}),
        )

    def _copied(self, name: str, tensor: tf.Tensor) -> np.ndarray:
        # This is a view of a tensor in the host's memory. NumPy takes no scalar tensor of
        # ml_dtypes' types.
        value = np.asarray(tensor if tensor.shape.rank else tensor.numpy())
        copy = self._memory.get(name)
        if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
            copy = self._memory[name] = value.copy()
        else:
            np.copyto(copy, value)
        return copy

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
                figures=copy.figures,
            )
        finally:
            self._prune(copy.place.step - copy.skipped)

    def add_score(self, score: Score, skipped: int = 0) -> None:
        """Marks the checkpoint of its step as evaluated; deletes what is no longer kept; rank 0.

        The checkpoint with the best score is kept besides the newest; a score that is no finite
        number is never the best. `skipped`: see Copy. Raises OSError, ValueError: it cannot be
        written; the checkpoint is as it was.
        """
        try:
            writing.set_score(
                self.folder / files.name_of(score.step), score, self.measure
            )
        finally:
            self._prune(score.step - skipped)

    def best(self) -> Score | None:
        """The best of the checkpoints there are; call it after `run_folder.begin`."""
        fields = self.world.from_chief("looking for the best checkpoint", self._best)
        return Score(*fields) if fields else None

    def _best(self) -> Score | None:
        # A run goes on without a score that cannot be read; `_prune` keeps its checkpoint.
        unread = files.telling(lambda note: say(self.world, note), waits=False)
        scored = files.scored(files.candidates(self.folder), unread)
        path = files.best(scored, self.measure)
        return scored[path].as_score() if path else None

    def other_scores(self) -> tuple[int, str]:
        """The newest step in the folder with a score of another measure, and a sentence about it.

        0 and "" where there is none. The sentence may also be about another main_metric_mode.
        """
        step, note = self.world.from_chief(
            "looking for other scores", self._other_scores
        )
        return step, note

    def _other_scores(self) -> tuple[int, str]:
        step = 0
        note = ""
        for manifest in files.scored(files.candidates(self.folder)).values():
            if unlike := manifest.unlike(self.measure):
                changed = [
                    _changed(name, was, now) for name, (was, now) in unlike.items()
                ]
                step = manifest.step
                note = (
                    f"the score of step {step} is of another measure ({'; '.join(changed)}): such "
                    "scores are not compared with this run's"
                )
                continue
            old = scores.of_measure(manifest.measure)
            new = scores.of_measure(self.measure)
            if old.name and old.mode != new.mode:
                note = (
                    f"{_changed('main_metric_mode', old.mode, new.mode)}: the best is chosen "
                    "anew, of the checkpoints that were kept"
                )
        return step, note

    def find(self, resume: str) -> CheckpointInfo | None:
        """What to resume from, the same on every rank; None to start anew.

        Changes nothing on disk, but for the name of a checkpoint that a kill has left without.

        `resume`: auto, never, the path of a checkpoint, or that of a run's folder (its newest sound
        checkpoint). Raises Stop: `resume` is a path without a sound checkpoint, or the checkpoint
        is of another format.
        """
        fields = self.world.from_chief("--resume=", self._found, resume, path=resume)
        return _built(fields)

    def _found(self, resume: str) -> list[Any]:
        files.recover(self.folder)
        self.listed.clear()
        self.listed.update(path.name for path in files.candidates(self.folder))
        path = None if resume == "never" else self._choose(resume)
        return self._fields(path, is_named=path == Path(resume))

    def score_of(self, checkpoint: CheckpointInfo) -> float | None:
        """Its score, if it was evaluated as this run does; NaN where that gave no number.

        Every rank must call it.
        """
        path = checkpoint.path
        return self.world.from_chief(
            "reading the score of ", self._score_of, path, path=path
        )

    def _score_of(self, path: Path) -> float | None:
        manifest = files.read_manifest(path)
        if not manifest.evaluated or manifest.unlike(self.measure):
            return None
        return math.nan if manifest.score is None else manifest.score

    def sound_before(self, step: int) -> CheckpointInfo | None:
        """The newest sound checkpoint of the folder that is of a step before `step`, if any."""
        what = "looking for a checkpoint to go back to"
        return _built(self.world.from_chief(what, self._sound_before, step))

    def _sound_before(self, step: int) -> list[Any]:
        path, faults = files.newest_sound(self.folder, step)
        for fault in faults:
            say(self.world, f"note: passed over: {fault}")
            if passes(fault):
                raise NotNow(f"{fault}: to go back further would lose steps")
        return self._fields(path, is_named=True)

    def _choose(self, resume: str) -> Path | None:
        path = Path(resume)
        if resume != "auto" and files.is_checkpoint(path):
            files.verify(path)
            return path
        folder = self.folder if resume == "auto" else path / "checkpoints"
        newest, faults = files.newest_sound(folder)
        for fault in faults:
            say(self.world, f"note: passed over: {fault}")
        if newest:
            return newest
        for fault in faults:
            if passes(fault):
                raise NotNow(
                    f"{fault}: to begin anew although it is there, give --resume=never"
                )
        if resume == "auto":
            return None
        if not path.exists():
            raise Damaged("does not exist")
        raise Damaged(
            "is no checkpoint (step-XXXXXXXX), and no folder of a run with a sound checkpoint "
            "in checkpoints/"
        )

    def _fields(self, path: Path | None, *, is_named: bool) -> list[Any]:
        """The fields of a CheckpointInfo, as they are sent; [] where there is none."""
        if not path:
            return []
        is_own = path.parent.resolve() == self.folder.resolve()
        return [str(path), files.read_manifest(path).place(), is_named, is_own]

    def restore(
        self, checkpoint: CheckpointInfo, variables: Variables, config: Settings
    ) -> None:
        """Sets the variables on rank 0 (the start-up broadcast brings them to the others).

        It prints which settings make this another run than the one that saved the checkpoint.

        Raises Stop: on all ranks, when names, shapes or types do not fit; names the first. Or no
        step is left, and how steps train has changed.
        """
        changed = []
        batch = None
        every = config.eval_every
        with self.world.fail_together("restoring ", path=checkpoint.path):
            if self.world.is_chief:
                load(checkpoint.path, variables)
                before = files.read_manifest(checkpoint.path)
                _check_is_trained_with(before, checkpoint.step, config)
                changed = cards.check(
                    checkpoint.path,
                    before.card,
                    self.card,
                    source=self.train_source,
                    accepted=config.accept_changed_data,
                )
                has_batch_norm = any(
                    name.endswith("/moving_mean") for name in variables
                )
                changed += changes(
                    before, config, ranks=self.world.size, has_batch_norm=has_batch_norm
                )
                changed += rule_changes(before.rules, self.rules)
                if config.deterministic and before.fingerprint:
                    changed += fingerprints.differences(
                        before.fingerprint, self.fingerprint
                    )
                batch = before.config.get("global_batch_size")
                every = before.config.get("eval_every", config.eval_every)
        if changed:
            say(
                self.world,
                f"note: another run than {checkpoint.path.name}'s: {'; '.join(changed)}",
            )
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
                f"on after the {checkpoint.place.position:,} samples so far, the learning rate by "
                f"steps: at step {checkpoint.step:,} of {config.num_steps:,}",
            )

    def _prune(self, applied: int) -> None:
        """Keeps the newest, and the best by each measure; prints what cannot be deleted.

        `applied`: the newest step that changed weights. The run may go back to before it.
        """
        paths = [path for path in files.candidates(self.folder) if path.is_dir()]
        newest_applied = [path for path in paths if files.step_of(path) <= applied][-1:]
        manifests = files.manifests(paths)
        kept = {
            *paths[-self.keep :],
            *newest_applied,
            *[path for path in paths if files.step_of(path) in self.awaiting],
            *self._best_of_each_measure(manifests),
        }
        # A checkpoint that a failing disk does not show now may be the best, so it stays.
        for path in manifests:
            try:
                if path not in kept:
                    with whole_files.held(path.parent) as folder:
                        files.delete(folder / path.name)
            except OSError as error:
                say(
                    self.world,
                    f"note: {path} cannot be deleted: {error.strerror or error}",
                )

    def _best_of_each_measure(
        self, manifests: Mapping[Path, Manifest]
    ) -> list[Path | None]:
        scored = {
            path: found for path, found in manifests.items() if found.score is not None
        }
        measures: list[Mapping[str, Any]] = [
            manifest.measure for manifest in scored.values()
        ]
        if any(not manifest.unlike(self.measure) for manifest in scored.values()):
            measures.append(self.measure)
        # Of equal measures the last one counts: this run's mode decides between its scores.
        different = {
            json.dumps(files.without_mode(m), sort_keys=True): m for m in measures
        }
        return [files.best(scored, one) for one in different.values()]


def _built(fields: list[Any]) -> CheckpointInfo | None:
    if not fields:
        return None
    path, place, is_named, is_own = fields
    return CheckpointInfo(Path(path), Place(*place), is_named, is_own)


def changes(
    before: Manifest, config: Settings, *, ranks: int, has_batch_norm: bool
) -> list[str]:
    """What makes this another run than the one that saved `before`, in words."""
    changed = []
    for name, text in _changed_settings(before, config).items():
        sets_rate = name == "eval_every" and config.lr_policy == "plateau"
        if sets_rate or name not in runs.HARMLESS:
            changed.append(text)
    for name, new in absl_flags.values_of_the_fork().items():
        old = before.config.get(name, new)
        if old != new:
            changed.append(_changed(name, old, new))
    if before.ranks == ranks or config.virtual_ranks:
        return changed
    if config.lr_scaling != "none":
        changed.append(
            f"--lr_scaling={config.lr_scaling} multiplies by the ranks, which were "
            f"{before.ranks}, are {ranks}"
        )
    if has_batch_norm and config.bn_sync != "full":
        changed.append(
            f"--bn_sync={config.bn_sync} normalizes on each of the ranks, which were "
            f"{before.ranks}, are {ranks}"
        )
    if config.deterministic:
        changed.append(
            f"--deterministic holds for one number of ranks, which were {before.ranks}, are {ranks}"
        )
    return changed


def _changed_settings(before: Manifest, config: Settings) -> dict[str, str]:
    """How settings differ from those that saved `before`, in words, by name."""
    changed = {}
    for field in dataclasses.fields(config):  # These include a fork's own settings.
        # A setting that is newer than the checkpoint had its default.
        old = before.config.get(field.name, field.default)
        new = getattr(config, field.name)
        if field.metadata["path"]:  # Relative paths begin at the project's folder.
            differs = project.folder() / str(old) != project.folder() / str(new)
        else:
            differs = old != new
        if differs:
            changed[field.name] = _changed(f"--{field.name}", old, new)
    return changed


def _check_is_trained_with(before: Manifest, step: int, config: Settings) -> None:
    """Raises ValueError where no step is left to train with settings that have changed."""
    if step < config.num_steps:
        return
    changed = _changed_settings(before, config)
    of_steps = [text for name, text in changed.items() if name in runs.OF_STEPS]
    if of_steps:
        raise ValueError(
            f"no step is left to train with other settings ({'; '.join(of_steps)}): give another "
            "--run_dir, more --num_steps, or --resume=never to start anew"
        )


def rule_changes(before: Rules, now: Rules) -> list[str]:
    """How the task's own optimizer and schedule differ from those that saved, in words.

    A checkpoint of an older version has none. Of a schedule, steps that both have are compared.
    """
    changed_parts = []
    for part in before.keys() & now.keys():
        changed = []
        for name in {**before[part], **now[part]}:
            if part != "optimizer" and not (name in before[part] and name in now[part]):
                continue
            old = before[part].get(name, "not set")
            new = now[part].get(name, "not set")
            if old != new:
                changed.append(_changed(name, old, new))
        if changed:
            changed_parts.append(f"the task's {part}: {join(changed, 3)}")
    return sorted(changed_parts)


def load(path: Path, variables: Variables) -> None:
    """Sets this rank's variables to those of a checkpoint.

    Raises ValueError: it cannot be read, or names, shapes or types do not fit; names the first.
    """
    state = files.read(path)
    missing = [name for name in variables if name not in state]
    unknown = [name for name in state if name not in variables]
    if all(_is_average(name) for name in missing + unknown):
        _check_averages(path, is_missing=bool(missing), is_unknown=bool(unknown))
    faults = [f"{name!r} is missing" for name in missing]
    faults += [f"{name!r} is not known" for name in unknown]
    if faults:
        raise ValueError(
            f"holds {len(state)} variables, the model and optimizer have {len(variables)}; "
            f"{faults[0]}. Was it written by another model or optimizer? Use a checkpoint of this "
            "model, another --run_dir or --resume=never"
        )
    for name, variable in variables.items():
        value = state[name]
        shape = tuple(raw(variable).shape)
        dtype = np.dtype(raw(variable).dtype.as_numpy_dtype)
        if value.shape != shape:
            raise ValueError(
                f"{name} has shape {value.shape} in the checkpoint, {shape} in the model. Use a "
                "checkpoint of this model, another --run_dir or --resume=never"
            )
        is_wider = value.dtype.kind == dtype.kind == "i" and np.can_cast(
            value.dtype, dtype
        )
        if value.dtype != dtype and not is_wider:
            raise ValueError(
                f"{name} is {value.dtype.name} in the checkpoint, {dtype.name} in the model. Use "
                "the --precision that it was written with, or a checkpoint of this model, another "
                "--run_dir or --resume=never"
            )
    for name, variable in variables.items():
        dtype = raw(variable).dtype.as_numpy_dtype
        raw(variable).assign(state[name].astype(dtype, copy=False))


def _is_average(name: str) -> bool:
    return name.startswith(("ema/", "ema_updates/"))


def _check_averages(path: Path, *, is_missing: bool, is_unknown: bool) -> None:
    """Raises ValueError where only one of the checkpoint and this run averages the weights."""
    if is_missing and not is_unknown:
        raise ValueError(
            "holds no average of its weights: leave out --ema_decay (and `use_ema` of the task's "
            f"optimizer), or begin anew from its weights: --init_from={path}, another --run_dir"
        )
    if is_unknown and not is_missing:
        decay = files.read_manifest(path).config.get("ema_decay")
        way = f"--ema_decay={decay}" if decay else "`use_ema` to the task's optimizer"
        raise ValueError(
            f"holds averages of its weights, and this run keeps none: give {way} as before, or "
            f"begin anew from its weights: --init_from={path}, another --run_dir"
        )


def _changed(name: str, old: Any, new: Any) -> str:
    old = "''" if old == "" else old
    new = "''" if new == "" else new
    return f"{name} was {old}, is {new}"
