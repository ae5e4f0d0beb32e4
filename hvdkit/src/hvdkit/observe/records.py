"""Reads the records in a run's folder; imports no TensorFlow."""

import contextlib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdkit import settings as settings_lib
from hvdkit import whole_files
from hvdkit.scores import MainMetric, Score
from hvdkit.settings import absl_flags, fields, flagfiles, runs

_LINE_BYTES = 2**20  # a longer line is damaged: a thousand classes are 30,000 bytes
# Entries of summary.json that are numbers or null.
_FIGURES = (
    "step",
    "samples_per_second",
    "skipped_steps",
    "samples_passed_over",
    "best_score",
    "best_step",
)
# Entries that are texts.
_TEXTS = ("exit_reason", "weights_sha256", "score", "score_mode", "from")
# What entries of metrics.jsonl that depend on the clock begin with.
TIMES = ("time", "samples_per_second", "data_wait", "own_seconds_", "input_wait_")


class Records(NamedTuple):
    """The records of a run; what is missing, or cut by a kill, is empty."""

    folder: Path
    settings: dict[str, str]  # flags of config.cfg, by name, as text
    lines: list[dict[str, Any]]  # metrics.jsonl: steps and evaluations
    starts: list[dict[str, Any]]  # starts.jsonl
    summary: dict[str, Any]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "loss" in line]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "eval_loss" in line]

    def last_step(self) -> int:
        lines = [*self.steps, *self.evaluations, *self.starts]
        return self.summary.get("step") or max(
            (line["step"] for line in lines), default=0
        )

    def last_start(self) -> dict[str, Any]:
        return self.starts[-1] if self.starts else {}

    def main_metric(self) -> MainMetric:
        """The main metric of the newest start; without a name where there was no start."""
        start = self.last_start()
        return MainMetric(start.get("score", ""), start.get("score_mode", "max"))

    def scored(self) -> list[Score]:
        """The evaluations with a score of the newest start's measure, in their order."""
        first_step = self._measured_since()
        evaluations = [one for one in self.evaluations if one["step"] >= first_step]
        values = column(evaluations, f"eval_{self.main_metric().name}")
        losses = column(evaluations, "eval_loss")
        scores = []
        for line, value, loss in zip(evaluations, values, losses):
            if math.isfinite(value):
                scores.append(Score(value, line["step"], loss, since=line["step"]))
        return scores

    def _measured_since(self) -> int:
        """The step at which a start first measured as the newest one does."""
        measure = self.last_start().get("measure")
        first_step = 0
        was_other = False
        for start in self.starts:
            is_other = start.get("measure", measure) != measure
            if was_other and not is_other:
                first_step = start["step"]
            was_other = is_other
        return first_step

    def best(self) -> Score | None:
        """The best score in the summary; of a run that has not ended, the best so far."""
        value = self.summary.get("best_score")
        step = self.summary.get("best_step")
        if value is not None and step is not None:
            return Score(value, step, math.nan, since=step)
        return max(self.scored(), key=self.main_metric().rank, default=None)

    def scores(self) -> dict[str, Any]:
        """Figures of the newest evaluation, over the whole validation set, without the loss."""
        newest = self.evaluations[-1] if self.evaluations else {}
        return {
            n.removeprefix("eval_"): value for n, value in newest.items() if is_score(n)
        }


def read(folder: Path) -> Records:
    """Raises ValueError if the folder is not a run's."""
    config = folder / runs.CONFIG
    if not folder.exists():
        raise ValueError(f"{folder} does not exist")
    if not config.is_file():
        raise ValueError(f"{folder} is no run's folder: it holds no {runs.CONFIG}")
    metrics = []
    for line in lines(folder / "metrics.jsonl"):
        metrics.append({n: x for n, x in line.items() if _is_figure(x) and _fits(n, x)})
    starts = []
    for line in lines(folder / "starts.jsonl"):
        if all(
            _fits(n, line.get(n, "")) for n in ("time", "score", "score_mode", "from")
        ):
            starts.append(line)
    file = folder / "summary.json"
    try:
        summary = whole_files.from_json(
            whole_files.read(file, whole_files.JSON_BYTES), file
        )
        summary = {n: x for n, x in summary.items() if _fits(n, x)}
    except (FileNotFoundError, ValueError, AttributeError):
        summary = {}
    return Records(folder, _settings(config), metrics, starts, summary)


def text(name: object) -> str:
    """A name as text: bytes of a file's name that are none become question marks."""
    return str(name).encode("utf-8", "replace").decode()


def is_score(name: str) -> bool:
    """Whether a figure of metrics.jsonl is a score of the whole validation set."""
    return name.startswith("eval_") and name != "eval_loss" and not is_of_class(name)


def is_of_class(name: str) -> bool:
    """Whether a figure belongs to one class: iou_ and its number."""
    return re.fullmatch(r"(eval_)?iou_\d+", name) is not None


def column(lines: Sequence[dict[str, Any]], name: str) -> list[float]:
    """A figure of all lines; NaN where it is missing or null."""
    values = [line.get(name) for line in lines]
    return [float(x) if isinstance(x, int | float) else math.nan for x in values]


def _fits(name: str, value: object) -> bool:
    """Whether a record's entry is of the type that a run writes, where code relies on it."""
    if name == "time":
        return isinstance(value, float) and 0 <= value < 1e11
    if name in _FIGURES:
        return _is_figure(value)
    if name in _TEXTS:
        return isinstance(value, str)
    return name != "fingerprint" or isinstance(value, dict)


def _is_figure(value: object) -> bool:
    """Whether a value is valid for a figure: null, or a number that a float holds."""
    if isinstance(value, int | float):
        return not abs(value) > sys.float_info.max  # NaN is valid too
    return value is None


def lines(file: Path) -> list[dict[str, Any]]:
    """The complete lines that have a step."""
    return [record for record in each_line(file) if record is not None]


def each_line(file: Path) -> Iterator[dict[str, Any] | None]:
    """Each line that has a step; None for a line that no run writes. Nothing where no file is."""
    if not file.is_file():
        return
    with whole_files.opened(file, most=whole_files.METRICS_BYTES) as opened:
        while line := opened.readline(_LINE_BYTES):
            is_whole = len(line) < _LINE_BYTES
            while len(line) == _LINE_BYTES and not line.endswith(b"\n"):
                line = opened.readline(_LINE_BYTES)
            yield _record(line, file) if is_whole else None


def _record(line: bytes, file: Path) -> dict[str, Any] | None:
    try:
        record = whole_files.from_json(line, file)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if isinstance(step, int) and _is_figure(step) else None


def _settings(file: Path) -> dict[str, str]:
    """The flags of config.cfg as text; those without a value are "on" or "off"."""
    kind = settings_lib.of_project()
    names = {*fields.of(kind), *absl_flags.beside(kind)}
    settings = {}
    for name, value in flagfiles.recorded(file).items():
        if value is not None:
            settings[name] = text(value)
        elif name.startswith("no") and name not in names:  # a flag may be named `noisy`
            settings[name.removeprefix("no")] = "off"
        else:
            settings[name] = "on"
    with contextlib.suppress(ValueError):
        if folder := runs.run_dir(file, settings.get("run_dir", "")):
            settings["run_dir"] = folder
    return settings
