"""Compares runs side by side, and says if they are the same to the last bit.

    hvdkit compare runs/one runs/other ...
    hvdkit compare runs/one runs/other --html=compared.html --score=0.8

It prints a table: how each run ended, its scores, the time to a score, the settings that differ.
--html also writes the table and the curves of all runs as one page that needs no other file.

Then it compares the first run with each other one: weights, and every figure except times. Runs on
different devices, or with different builds of TensorFlow, Keras or Horovod, cannot be compared bit
by bit. Exit code: 0 all the same, 1 not the same, 2 cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdkit.logs import complain
from hvdkit.observe import records
from hvdkit.observe.records import TIMES, Records, column
from hvdkit.ranks.fingerprint import differences
from hvdkit.stop import WRONG_USE


class Ended(NamedTuple):
    """The records of a run, from its folder."""

    folder: str
    summary: dict[str, Any]
    records: list[dict[str, Any]]


def read(folder: str) -> Ended:
    """Raises ValueError, naming the file, where `folder` holds no run that has ended."""
    summary, records = (Path(folder) / name for name in ("summary.json", "metrics.jsonl"))
    try:
        lines = [json.loads(line) for line in records.read_text().splitlines()]
        about = json.loads(summary.read_text())
        if not {"step", "weights_sha256", "exit_reason", "fingerprint"} <= set(about):
            raise ValueError(f"{summary} is no summary of a run")
        if not all(isinstance(line, dict) and "step" in line for line in lines):
            raise ValueError(f"{records} has lines that no run writes")
        figures = [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]
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
    kinds = [run.summary["fingerprint"] for run in (one, other)]
    unlike = differences(*kinds)
    if unlike:
        return 2, f"{both} were not computed alike, so bits cannot be compared: {', '.join(unlike)}"
    steps = [run.summary["step"] for run in (one, other)]
    if steps[0] != steps[1]:
        return 1, f"{both} ended at different steps: {steps[0]} and {steps[1]}"
    if one.records != other.records:
        rows = zip(one.records, other.records)
        first = next((a["step"] for a, b in rows if a != b), None)
        counts = f"{len(one.records)} and {len(other.records)} lines"
        where = f"they hold {counts}" if first is None else f"first at step {first}"
        return 1, f"{both} differ in metrics.jsonl: {where}"
    if one.summary["weights_sha256"] != other.summary["weights_sha256"]:
        return 1, f"{both} logged the same figures but ended with different weights"
    count = len(one.records)
    return 0, f"{both} are the same to the last bit: weights, and {count} lines of metrics.jsonl"


def side_by_side(runs: Sequence[Records], score: float | None) -> list[list[str]]:
    """Rows of a table: a name, then its value in each run; first results, then settings.

    Args:
      score: one row has the time to reach it; None: the lowest of the runs' best scores, if all
        measure the same.
    """
    measures = [run.starts[-1].get("score", "") if run.starts else "" for run in runs]
    bests = [_scored(run, measure) for run, measure in zip(runs, measures)]
    goal = score
    if goal is None and len({m for m, found in zip(measures, bests) if found}) < 2:
        goal = min((max(s for s, _, _ in found) for found in bests if found), default=None)
    rows = [
        ["ended", *(str(run.summary.get("exit_reason", "not yet")) for run in runs)],
        ["step", *(f"{run.last_step():,}" for run in runs)],
        ["ranks", *(str(run.starts[-1].get("ranks", "?")) if run.starts else "?" for run in runs)],
        ["starts", *(str(len(run.starts)) for run in runs)],
    ]
    keys = dict.fromkeys(n for run in runs for n in run.scores())
    rows += [[f"{n}, last", *(_text(run.scores().get(n)) for run in runs)] for n in keys]
    rows.append(["best score", *(_best(*pair) for pair in zip(measures, bests))])
    if goal is not None:
        reached = [next((x for x in found if x[0] >= goal), None) for found in bests]
        told = (f"step {x[1]:,}, {x[2]:,.1f} s" if x else "not reached" for x in reached)
        rows.append([f"to a score of {goal:.4g}", *told])
    speeds = [run.summary.get("samples_per_second") for run in runs]
    rows.append(["samples/s, median", *map(_text, speeds)])
    rows.append(["weights", *(str(run.summary.get("weights_sha256", ""))[:12] for run in runs)])
    flags = dict.fromkeys(name for run in runs for name in run.settings)
    for name in flags:
        values = [run.settings.get(name, "(none)") for run in runs]
        if len(set(values)) > 1 and name != "run_dir":
            rows.append([f"--{name}", *values])
    return rows


def printed(rows: Sequence[Sequence[str]], most: int = 40) -> str:
    """The table for a terminal; long values lose their beginning: paths differ at the end."""
    cut = [[c if len(c) <= most else f"...{c[3 - most :]}" for c in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*cut)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cut)
    return "\n".join(lines)


def html(runs: Sequence[Records], names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table, and the curves of all runs, one plot for each figure."""
    from hvdkit.observe import pages  # here: loading the plot library takes half a second

    wanted = {"loss": "Training loss", "lr": "Learning rate", "grad_norm": "Norm of the gradient"}
    wanted |= {"samples_per_second": "Samples a second, all ranks"}
    scores = dict.fromkeys(n for run in runs for n in run.scores())
    wanted |= {"eval_loss": "Validation loss"} | {f"eval_{n}": f"Validation: {n}" for n in scores}
    found = []
    for key, title in wanted.items():
        lines = {}
        for run, name in zip(runs, names):
            held = run.evaluations if key.startswith("eval_") else run.steps
            x, y = column(held, "step"), column(held, key)
            if not all(map(math.isnan, y)):
                lines[name] = (x, y)
        if lines:
            found.append(pages.curves(title, lines))
    parts = [pages.table(rows, ["", *names]), pages.section("Curves", pages.cards(found))]
    return pages.page(f"{len(runs)} runs compared", parts)


def labels(folders: Sequence[Path]) -> list[str]:
    """Short names that still differ: paths without the folders that all begin with."""
    paths = [folder.resolve() for folder in folders]
    shared = Path(os.path.commonpath([path.parent for path in paths]))
    # A folder's name may be any bytes; a page must be text.
    names = (str(path.relative_to(shared)) for path in paths)
    return [name.encode("utf-8", "replace").decode() for name in names]


def _scored(run: Records, measure: str) -> list[tuple[float, int, float]]:
    """Each evaluation with the score: the score, its step, seconds since the run's first start."""
    begin = run.starts[0].get("time", math.nan) if run.starts else math.nan
    rows = zip(column(run.evaluations, f"eval_{measure}"), column(run.evaluations, "time"))
    found = ((score, time - begin) for score, time in rows)
    steps = (line["step"] for line in run.evaluations)
    return [(score, step, s) for (score, s), step in zip(found, steps) if not math.isnan(score)]


def _best(measure: str, found: Sequence[tuple[float, int, float]]) -> str:
    if not found:
        return "none"
    score, step, _ = max(found, key=lambda one: one[0])
    return f"{measure} {score:.4f}, step {step:,}"


def _text(value: object) -> str:
    return f"{value:,.4f}" if isinstance(value, int | float) else "none"


def main(argv: list[str]) -> int:
    as_it_is = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=as_it_is, allow_abbrev=False
    )
    made.add_argument("folders", nargs="+", type=Path, metavar="RUN_DIR")
    made.add_argument("--html", type=Path, help="write the comparison as a page to this file")
    made.add_argument("--score", type=float, help="also show each run's time to this score")
    own = made.parse_args(argv[1:])
    if len(own.folders) < 2:
        complain("give two runs or more: hvdkit compare runs/one runs/other")
        return WRONG_USE
    sys.stdout.reconfigure(errors="backslashreplace")  # names of folders may not be text
    try:
        runs = [records.read(folder) for folder in own.folders]
        rows, names = side_by_side(runs, own.score), labels(own.folders)
        if own.html:
            own.html.write_text(html(runs, names, rows), encoding="utf-8")
    except (OSError, ValueError) as error:
        complain(str(error))
        return WRONG_USE
    print(printed([["", *names], *rows]))
    if own.html:
        print(f"page: {own.html}")
    try:
        ended = [read(str(folder)) for folder in own.folders]
    except ValueError as error:
        complain(str(error))
        return WRONG_USE
    found = [verdict(ended[0], run) for run in ended[1:]]
    print("\n".join(sentence for _, sentence in found))
    return max(code for code, _ in found)
