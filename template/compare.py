"""Says whether runs are the same to the last bit: weights, and every figure but times.

    python compare.py runs/one runs/other ...

Runs that computed on other devices, or with other builds of TensorFlow, Keras or Horovod, are told
so and not compared. Exit code: 0 all the same, 1 not the same, 2 cannot be compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from engine.fingerprint import differences

# Of a record in metrics.jsonl: what the clock says, not the run.
_TIMES = ("samples_per_second", "data_wait", "own_seconds_", "input_wait_")


class Ended(NamedTuple):
    """What a run's folder says of it."""

    folder: str
    summary: dict[str, Any]
    records: list[dict[str, Any]]


def read(folder: str) -> Ended:
    """Raises ValueError, naming the file, where `folder` holds no run that has ended."""
    summary, records = (Path(folder) / name for name in ("summary.json", "metrics.jsonl"))
    try:
        lines = [json.loads(line) for line in records.read_text().splitlines()]
        about = json.loads(summary.read_text())
        if not {"step", "weights_sha256", "exit_reason"} <= set(about):
            raise ValueError(f"{summary} is no summary of a run")
        if not all(isinstance(line, dict) and "step" in line for line in lines):
            raise ValueError(f"{records} holds other lines than a run's")
        figures = [{k: v for k, v in line.items() if not k.startswith(_TIMES)} for line in lines]
        return Ended(folder, dict(about), figures)
    except (OSError, ValueError, TypeError) as error:
        why = "there is none" if isinstance(error, FileNotFoundError) else error
        name = getattr(error, "filename", None) or folder
        raise ValueError(f"{name}: {why}: give folders of runs that have ended") from None


def verdict(one: Ended, other: Ended) -> tuple[int, str]:
    """Exit code and sentence."""
    both = f"{one.folder} and {other.folder}"
    if Path(one.folder).resolve() == Path(other.folder).resolve():
        return 2, f"{both} are one folder: give those of two runs"
    kinds = [run.summary.get("fingerprint") for run in (one, other)]
    if not all(isinstance(kind, dict) for kind in kinds):
        return 2, f"{both} cannot be compared: an older version left no fingerprint"
    unlike = differences(*kinds)
    if unlike:
        return 2, f"{both} were not computed alike, so bits tell nothing: {', '.join(unlike)}"
    steps = [run.summary["step"] for run in (one, other)]
    if steps[0] != steps[1]:
        return 1, f"{both} ended at other steps: {steps[0]} and {steps[1]}"
    if one.records != other.records:
        rows = zip(one.records, other.records)
        first = next((a["step"] for a, b in rows if a != b), None)
        counts = f"{len(one.records)} and {len(other.records)} lines"
        where = f"they hold {counts}" if first is None else f"first at step {first}"
        return 1, f"{both} differ in metrics.jsonl: {where}"
    if one.summary["weights_sha256"] != other.summary["weights_sha256"]:
        return 1, f"{both} logged the same figures and ended with other weights"
    count = len(one.records)
    return 0, f"{both} are the same to the last bit: weights, and {count} lines of metrics.jsonl"


def main(folders: list[str]) -> int:
    if len(folders) < 2 or any(name.startswith("-") for name in folders):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        runs = [read(folder) for folder in folders]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for run in runs:
        about = run.summary
        print(f"{about['weights_sha256'][:12]}  step {about['step']:>8}  {run.folder}")
    found = [verdict(runs[0], run) for run in runs[1:]]
    print("\n".join(sentence for _, sentence in found))
    return max(code for code, _ in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
