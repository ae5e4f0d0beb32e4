"""What lies in a run's folder for people and tools, read back; imports no TensorFlow."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Of a record in metrics.jsonl: what the clock says, not the run.
TIMES = ("time", "samples_per_second", "data_wait", "own_seconds_", "input_wait_")


class Records(NamedTuple):
    """What is not there, or was cut by a kill, is empty."""

    folder: Path
    settings: dict[str, str]  # flags of config.cfg, by name, as text
    steps: list[dict[str, Any]]  # metrics.jsonl: logged steps
    evaluations: list[dict[str, Any]]  # metrics.jsonl: evaluations
    starts: list[dict[str, Any]]  # starts.jsonl
    summary: dict[str, Any]

    def last_step(self) -> int:
        lines = [*self.steps, *self.evaluations, *self.starts]
        return self.summary.get("step") or max((line["step"] for line in lines), default=0)

    def scores(self) -> dict[str, Any]:
        """Of the newest evaluation: figures of the whole validation set, but its loss."""
        newest = self.evaluations[-1] if self.evaluations else {}
        names = {name: name.removeprefix("eval_") for name in newest if is_score(name)}
        return {short: newest[name] for name, short in names.items()}


def read(folder: Path) -> Records:
    """Raises ValueError where the folder is no run's."""
    if not (folder / "config.cfg").is_file():
        raise ValueError(f"{folder} is no run's folder: it holds no config.cfg")
    lines = _lines(folder / "metrics.jsonl")
    lines = [{name: x for name, x in line.items() if _is_figure(x)} for line in lines]
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        summary = {}
    return Records(
        folder,
        _settings(folder / "config.cfg"),
        [line for line in lines if "loss" in line],
        [line for line in lines if "eval_loss" in line],
        [line for line in _lines(folder / "starts.jsonl") if isinstance(line.get("time"), float)],
        summary if isinstance(summary, dict) else {},
    )


def is_score(name: str) -> bool:
    """Whether a figure of metrics.jsonl is one of the whole validation set, and no loss."""
    return name.startswith("eval_") and name != "eval_loss" and not is_of_class(name)


def is_of_class(name: str) -> bool:
    """Whether a figure is one class's: iou_ and its number."""
    return re.fullmatch(r"(eval_)?iou_\d+", name) is not None


def column(lines: Sequence[dict[str, Any]], name: str) -> list[float]:
    """A figure of all lines; NaN where a line has none, or null."""
    found = (line.get(name) for line in lines)
    return [float(x) if isinstance(x, int | float) else math.nan for x in found]


def without_nan(value: Any) -> Any:
    """The same for JSON, which has no NaN and no infinity: None stands for them."""
    if isinstance(value, Mapping):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_figure(value: object) -> bool:
    """Whether a value is one that figures have: null, or a number of a float's size."""
    if isinstance(value, int | float):
        return not abs(value) > sys.float_info.max  # NaN is one too
    return value is None


def _lines(file: Path) -> list[dict[str, Any]]:
    """Those that are whole and tell a step."""
    found = []
    if file.is_file():
        for line in file.read_bytes().splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            step = record.get("step") if isinstance(record, dict) else None
            if isinstance(step, int) and _is_figure(step):
                found.append(record)
    return found


def _settings(file: Path) -> dict[str, str]:
    found = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        name, is_given, value = line.removeprefix("--").partition("=")
        if line.startswith("--"):
            off = not is_given and name.startswith("no")
            found[name.removeprefix("no") if off else name] = (
                value if is_given else "off" if off else "on"
            )
    return found
