"""What scaling.py takes from runs of this project: a benchmark's figures, a timeline's arrivals."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from planner.model import Profile

_GRADIENT = re.compile(r"grad_\d+|virtual\.gradients")
_BITS = re.compile(r"\d+$")
_POINTS = 50


class Measured(NamedTuple):
    """A benchmark's figures; `batch` is one rank's samples a step, `seconds` those of its step."""

    parameters: int
    seconds: float
    batch: int
    ranks: int
    accumulation: int
    compression: str
    virtual_ranks: int


def benchmark(run: Path) -> Measured:
    """Of a run made with --benchmark.

    Raises:
      ValueError: it was not, or its files are of something else.
    """
    try:
        record = json.loads((run / "benchmark.json").read_text())
        flags = dict(re.findall(r"^--(\w+)=(.*)$", (run / "config.cfg").read_text(), re.M))
        found = Measured(
            int(record["trained_parameters"]),
            float(record["seconds_a_step"]),
            round(record["global_batch_size"] / record["ranks"]),
            int(record["ranks"]),
            int(flags["accumulation_steps"]),
            flags["compression"],
            int(flags["virtual_ranks"]),
        )
        if not all(0 < figure < math.inf for figure in found[:5]):
            raise ValueError(f"figures that are not above 0: {found[:5]}")
        return found
    except OSError as error:
        raise ValueError(
            f"--run_dir={run}: no {Path(error.filename).name}: train with --benchmark"
        ) from None
    except (ValueError, LookupError, TypeError, ArithmeticError):
        raise ValueError(
            f"--run_dir={run}: benchmark.json or config.cfg is not as --benchmark writes it: "
            "train with --benchmark again"
        ) from None


def arrivals(run: Path) -> Profile:
    """When gradients were ready in a run made with --timeline=FIRST:LAST, means over its steps.

    A step's backward pass is taken to last from its first gradient to its last one. On GPUs, where
    operations are queued long before they run, Horovod notes when they were queued: too early.

    Raises:
      ValueError: there is no timeline with a whole step.
    """
    found = sorted((run / "timeline").glob("step-*.json"))
    if not found:
        raise ValueError(f"--profile={run}: no profile of that name, and no run with a timeline")
    try:
        uses = _uses(json.loads(found[-1].read_text()))
    except (ValueError, LookupError, TypeError):
        uses = {}
    steps = min((len(times) for times in uses.values()), default=0)
    sums: dict[str, tuple[float, float]] = {}
    for step in range(steps):
        begun = [times[step][0] for times in uses.values()]
        first, long = min(begun), max(max(begun) - min(begun), 1e-9)
        for name, times in uses.items():
            at, size = times[step]
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + (at - first) / long / steps, float(size))
    whole = sum(size for _, size in sums.values())
    if not whole:
        raise ValueError(f"--profile={run}: {found[-1].name} holds no whole step with gradients")
    return _thinned(sorted((at, size / whole) for at, size in sums.values()))


def _uses(events: list[dict[str, Any]]) -> dict[str, list[tuple[float, int]]]:
    """(microseconds, bytes) of each gradient's uses, by its name."""
    names: dict[int, str] = {}
    asked: dict[int, float] = {}
    uses: dict[str, list[tuple[float, int]]] = {}
    for event in events:
        pid, phase, about = event.get("pid"), event["ph"], event.get("args", {})
        if phase == "M" and event.get("name") == "process_name":
            names[pid] = about.get("name", "")
        elif phase == "B" and event["name"].startswith("NEGOTIATE_"):
            asked[pid] = event["ts"]
        elif phase == "E" and "shape" in about and pid in asked:
            if _GRADIENT.match(names.get(pid, "")):
                uses.setdefault(names[pid], []).append((asked[pid], _bytes(about)))
            del asked[pid]
    return uses


def _bytes(about: dict[str, str]) -> int:
    count = int(_BITS.search(about["dtype"])[0]) // 8
    for size in re.findall(r"\d+", about["shape"]):
        count *= int(size)
    return count


def _thinned(points: list[tuple[float, float]]) -> Profile:
    """At most _POINTS points; what is joined counts when the last of it is ready."""
    joined: dict[int, tuple[float, float]] = {}
    for at, share in points:
        place = min(_POINTS - 1, int(at * _POINTS))
        joined[place] = (at, joined.get(place, (0.0, 0.0))[1] + share)
    return tuple(joined.values())
