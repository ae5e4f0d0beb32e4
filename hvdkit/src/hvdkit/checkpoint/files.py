"""The format of a checkpoint on disk: verified before use, found, deleted.

A checkpoint is a folder step-XXXXXXXX/ with state.npz (every variable by name) and manifest.json:
format, step, score, settings, the SHA-256 of state.npz, and a checksum over all of these. It is
written under another name, flushed to disk and renamed (hvdkit/checkpoint/writing.py). Folders that
begin with a dot are checkpoints being written (.partial) or deleted (.deleted).
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, get_type_hints

import ml_dtypes
import numpy as np

from hvdkit import scores, whole_files
from hvdkit.data.place import Place
from hvdkit.logs import join, printable, say
from hvdkit.ranks.figures import NUM_FIGURES
from hvdkit.scores import MainMetric, Score
from hvdkit.stop import NotNow, passes

FORMAT = 5  # Since 5, a manifest may have fields that only a newer version knows.
_READ = (4, FORMAT)  # Since 4, the place in the data counts samples, not steps.
STATE = "state.npz"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.step-\d{8,}\.(partial|partial\.old|(partial\.)?deleted)")


class Damaged(ValueError):
    """Not a checkpoint, or not the one that was written; the message names the file."""


class OtherFormat(ValueError):
    """A checkpoint that another version of this code wrote."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    `step`, `samples` and `passed_over` are a hvdkit.data.place.Place.
    `score` is the task's main metric; None where `evaluated` is False or it was no finite number.
    `loss` and `since` belong to it, as in hvdkit.scores.Score; `measure` says what it measures.
    `config` holds the settings by name, `dtypes` those of variables that NumPy does not know,
    `fingerprint` what bits depend on besides settings, `card` the data card (hvdkit/data/card.py),
    `rules` what the task's own optimizer and schedule were made with, `figures` those of the
    model's outputs for some samples (hvdkit/run/sample_figures.py). What is read is compared with
    these types.
    """

    step: int
    samples: int
    passed_over: int
    config: dict
    ranks: int
    tensorflow: str
    sha256: str
    dtypes: dict
    score: float | int | None = None
    loss: float | int | None = None
    since: int | None = None
    evaluated: bool = False
    fingerprint: dict = dataclasses.field(default_factory=dict)
    measure: dict = dataclasses.field(default_factory=dict)
    card: dict = dataclasses.field(default_factory=dict)
    rules: dict = dataclasses.field(default_factory=dict)
    figures: dict = dataclasses.field(default_factory=dict)

    def place(self) -> Place:
        return Place(self.step, self.samples, self.passed_over)

    def as_score(self) -> Score:
        value = math.nan if self.score is None else self.score
        loss = math.inf if self.loss is None else self.loss
        return Score(value, self.step, loss, since=self.since or self.step)

    def unlike(self, measure: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """What differs in `measure`, by name: its value when this was scored, and now.

        Which score is the better, main_metric_mode, says nothing of what a score measures.
        """
        changed = {}
        defaults = {f"--{name}": value for name, value in scores.OF_LOSS.items()}
        then = defaults | self.measure
        for name, new in (defaults | without_mode(measure)).items():
            old = then.get(name, new)
            if old != new:
                changed[name] = (old, new)
        return changed


def without_mode(measure: Mapping[str, Any]) -> dict[str, Any]:
    """The measure without main_metric_mode."""
    return {
        name: value for name, value in measure.items() if name != "main_metric_mode"
    }


def read_manifest(path: Path) -> Manifest:
    """The verified manifest of the checkpoint at `path`; its arrays are not looked at.

    Raises Damaged, OtherFormat: naming the file and what is wrong with it.
    """
    return _guarded(path / MANIFEST, lambda: _parse(path))


def verify(path: Path) -> Manifest:
    """The manifest of a checkpoint that is as it was written.

    Raises Damaged, OtherFormat: it is not; the message names the file.
    """
    manifest = read_manifest(path)
    file = path / STATE
    sha256 = _guarded(file, lambda: whole_files.sha256(file, links=False))
    if sha256 != manifest.sha256:
        raise Damaged(f"{file} is damaged: its SHA-256 is not the one in {MANIFEST}")
    return manifest


def read(path: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, np.ndarray]:
    """The arrays whose names begin with one of `prefixes`, as they were written.

    Raises Damaged, OtherFormat: they cannot be read.
    """
    dtypes = read_manifest(path).dtypes

    def load() -> dict[str, np.ndarray]:
        with (
            whole_files.opened(path / STATE) as file,
            np.load(file, allow_pickle=False) as state,
        ):
            check_zip(state.zip, file)
            arrays = {
                name: state[name] for name in state.files if name.startswith(prefixes)
            }
        for name in arrays.keys() & dtypes.keys():
            arrays[name] = arrays[name].view(getattr(ml_dtypes, dtypes[name]))
        return arrays

    return _guarded(path / STATE, load)


def check_zip(archive: zipfile.ZipFile, file: IO[bytes], more: int = 0) -> None:
    """Raises ValueError where the archive claims over `more` bytes more than its file has.

    Ours are stored, not compressed. zipfile reads no more of a part than it claims.
    """
    claimed = sum(part.file_size for part in archive.infolist())
    size = os.fstat(file.fileno()).st_size
    if claimed > size + more:
        raise ValueError(f"its parts claim {claimed:,} bytes, and it has {size:,}")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step that a checkpoint's name says; -1 where it is no checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint; one that a person renamed is known by its manifest."""
    return step_of(path) >= 0 or (path / MANIFEST).exists()


def candidates(folder: Path) -> list[Path]:
    """What has a checkpoint's name in `folder`, sound or not, by step."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if step_of(path) >= 0]
    return sorted(named, key=step_of)


def newest_sound(
    folder: Path, before: float = math.inf
) -> tuple[Path | None, list[str]]:
    """The newest sound checkpoint in `folder`, and what is wrong with each newer one.

    `before`: only those of earlier steps count. Raises OtherFormat: a newer one than any that is
    sound is of another format: passing it over could mean to begin a long run again.
    """
    faults: list[str] = []
    for path in reversed(candidates(folder)):
        if step_of(path) >= before:
            continue
        try:
            verify(path)
            return path, faults
        except Damaged as error:
            faults.append(str(error))
    return None, faults


def manifests(
    paths: Iterable[Path], unread: Callable[[Exception], None] | None = None
) -> dict[Path, Manifest]:
    """The manifests that can be read, in the same order; `unread` gets why another cannot."""
    readable = {}
    for path in paths:
        try:
            readable[path] = read_manifest(path)
        except (Damaged, OtherFormat) as error:
            if unread:
                unread(error)
    return readable


def telling(
    tell: Callable[[str], None], *, waits: bool = True
) -> Callable[[Exception], None]:
    """`unread` for those who look for the best checkpoint, as it may be one that cannot be read.

    It tells, and with `waits` raises NotNow where that may pass.
    """

    def unread(error: Exception) -> None:
        if waits and passes(error):
            raise NotNow(f"{error}: it may be the best checkpoint") from None
        tell(f"note: passed over: {error}")

    return unread


def scored(
    paths: Iterable[Path], unread: Callable[[Exception], None] | None = None
) -> dict[Path, Manifest]:
    """The manifests of checkpoints that have a score, in the same order; `unread`: as above."""
    readable = manifests(paths, unread)
    return {path: found for path, found in readable.items() if found.score is not None}


def card_of(path: Path) -> dict[str, Any]:
    """The data card of a checkpoint, or of the newest in a run's folder that has one; else {}."""
    checkpoints = [path] if is_checkpoint(path) else candidates(path / "checkpoints")
    for checkpoint in reversed(checkpoints):
        with contextlib.suppress(Damaged, OtherFormat):
            return read_manifest(checkpoint).card
    return {}


def digest_of(measure: Mapping[str, Any]) -> str:
    """Two measures have the same one where their scores can be compared."""
    text = json.dumps(without_mode(measure), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def best(scored: Mapping[Path, Manifest], measure: Mapping[str, Any]) -> Path | None:
    """The checkpoint with the best score of this measure, if any.

    `scored`: what the function `scored` returns for checkpoints by step.
    """
    metric = scores.of_measure(measure)
    ranks = {}
    for path, manifest in scored.items():
        if not manifest.unlike(measure):
            ranks[path] = metric.rank(manifest.as_score())
    return max(ranks, key=ranks.__getitem__, default=None)


def newest_measure(scored: Mapping[Path, Manifest]) -> dict[str, Any]:
    """What the newest score measures; `scored` is as for `best`."""
    return list(scored.values())[-1].measure if scored else {}


def best_now(
    scored: Mapping[Path, Manifest], metric: MainMetric
) -> tuple[Path | None, str]:
    """The best by the newest score's measure, and a note where the task's metric has changed since.

    `metric`: the task's main metric now. Its mode decides. Raises ValueError: the scores are of
    another metric, so that the best by this one is not known.
    """
    if not scored:
        return None, ""
    measure = newest_measure(scored)
    old = scores.of_measure(measure)
    note = ""
    if old.name and old.name != metric.name:
        raise ValueError(
            f"the scores of the checkpoints are {old.name}, and the task's main_metric is now "
            f"{metric.name}, so which one is the best is not known: name last or a step"
        )
    if old.name and old.mode != metric.mode:
        note = (
            f"note: main_metric_mode was {old.mode} and is now {metric.mode}: the best is chosen "
            f"anew, of the {len(scored)} checkpoints with a score that were kept"
        )
    return best(scored, {**measure, "main_metric_mode": metric.mode}), note


def delete(path: Path) -> None:
    """Deletes a folder; a kill meanwhile does not leave half of it under its name."""
    if path.exists():
        doomed = path.with_name(f".{path.name.lstrip('.')}.deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def tidy(folder: Path) -> None:
    """Removes checkpoints that a kill left half-written or half-deleted."""
    for path in list(folder.iterdir()):
        if not _UNFINISHED.fullmatch(path.name):
            continue
        try:
            shutil.rmtree(path)
        except OSError as error:
            say(f"note: {path.name} cannot be removed: {error.strerror or error}")


def recover(folder: Path) -> None:
    """Gives a checkpoint its name back that a kill, between two renames, left without."""
    for path in folder.glob(".step-*.partial.old"):
        step = folder / path.name.removeprefix(".").removesuffix(".partial.old")
        if _UNFINISHED.fullmatch(path.name) and not step.exists():
            path.rename(step)


def _guarded(file: Path, read: Callable[[], Any]) -> Any:
    """What `read` returns; whatever goes wrong becomes a sentence that names the file."""
    folder = file.parent
    try:
        if folder.is_symlink():
            raise Damaged(f"{folder} is a link, which is not followed")
        if not folder.exists():
            raise Damaged(f"{folder} is no checkpoint: it does not exist")
        if not folder.is_dir():
            raise Damaged(f"{folder} is no checkpoint: it is no folder")
        return read()
    except OSError as error:
        raise Damaged(f"{file} cannot be read: {error.strerror or error}") from None
    except (Damaged, OtherFormat):
        raise
    # At bytes that they did not write, zipfile, json and NumPy raise BadZipFile, KeyError,
    # RecursionError, a MemoryError from a header that claims terabytes, and others.
    except Exception as error:
        raise Damaged(
            f"{file} is damaged: {type(error).__name__}: {printable(error)}"
        ) from None


def _parse(path: Path) -> Manifest:
    file = path / MANIFEST
    record = whole_files.from_json(whole_files.read(file, whole_files.JSON_BYTES), file)
    checksum = record.pop("checksum", None)
    format_number = record.pop("format", None)
    if checksum != checksum_of(record, format_number):
        raise Damaged(f"{file} is damaged: its checksum is not that of its content")
    if format_number not in _READ:
        raise OtherFormat(
            f"{path} is of checkpoint format {format_number}, and this version reads "
            f"{join(_READ)}: "
            "resume with the version that wrote it, or start anew: another --run_dir or "
            "--resume=never"
        )
    known = {field.name for field in dataclasses.fields(Manifest)}
    manifest = Manifest(**{name: record[name] for name in record if name in known})
    for name, kind in get_type_hints(Manifest).items():
        value = getattr(manifest, name)
        if not isinstance(value, kind):
            raise Damaged(f"{file} is damaged: its {name} is {value!r:.40}")
    if not _is_card(manifest.card):
        raise Damaged(f"{file} is damaged: its card is {manifest.card!r:.40}")
    if not _are_figures(manifest.figures):
        raise Damaged(f"{file} is damaged: its figures are {manifest.figures!r:.40}")
    if min(manifest.place()) < 0 or step_of(path) not in (-1, manifest.step):
        raise Damaged(f"{path} is damaged: its manifest says {manifest.place()}")
    return manifest


def _is_card(card: Mapping[str, Any]) -> bool:
    """Whether what is read of a data card has the types that it needs; old ones have none."""
    train = card.get("train", {"fingerprint": "", "samples": 0})
    class_names = card.get("class_names", [])
    return (
        isinstance(train, dict)
        and isinstance(train.get("fingerprint"), str)
        and isinstance(train.get("samples"), int)
        and isinstance(class_names, list)
        and all(isinstance(name, str) for name in class_names)
    )


def _are_figures(figures: Mapping[str, Any]) -> bool:
    """Whether figures of samples have their types; checkpoints of before have none."""
    samples = figures.get("samples", {})
    if not isinstance(figures.get("data", ""), str) or not isinstance(samples, dict):
        return False
    for values in samples.values():
        if not isinstance(values, list) or len(values) != NUM_FIGURES:
            return False
        if not all(isinstance(value, float) for value in values):
            return False
    return True


def checksum_of(record: Mapping[str, Any], format_number: Any) -> str:
    """SHA-256 of the content in one spelling, so that it can be written with line breaks."""
    content = {"format": format_number, **record}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
