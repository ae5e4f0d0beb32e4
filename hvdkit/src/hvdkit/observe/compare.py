"""Compares runs side by side, and reports whether they are the same to the last bit.

    hvdkit compare runs/one runs/other ...
    hvdkit compare runs/one runs/other --html=compared.html --score=0.8

It prints a table: how each run ended, its scores, the time to a score, the settings that differ.
--html also writes the table and the curves of all runs as one page that needs no other file.

Then it compares the first run with each other one: weights, and every figure except times. Runs on
different devices, or with different builds of TensorFlow, Keras or Horovod, cannot be compared bit
by bit. Exit code: 0 all the same, 1 not the same, 2 cannot be compared.
"""

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit import logs
from hvdkit.observe import records
from hvdkit.observe.records import TIMES, Records, column
from hvdkit.ranks.fingerprint import differences
from hvdkit.settings.typed import path_argument

_MOST_PLOTS = 100
_CELL = 40  # most characters of a printed cell


def verdict(one: Records, other: Records) -> tuple[int, str]:
    """The exit code, and what is said of the two runs."""
    if one.folder.resolve() == other.folder.resolve():
        return 2, "are one folder: give those of two runs"
    unlike = differences(one.summary["fingerprint"], other.summary["fingerprint"])
    if unlike:
        return (
            2,
            f"were not computed alike, so bits cannot be compared: {', '.join(unlike)}",
        )
    step = one.summary["step"]
    other_step = other.summary["step"]
    if step != other_step:
        return 1, f"ended at different steps: {step} and {other_step}"

    lines = figures(one)
    other_lines = figures(other)
    for line, other_line in zip(lines, other_lines):
        if line != other_line:
            return 1, f"differ in metrics.jsonl: first at step {line['step']}"
    if len(lines) != len(other_lines):
        return (
            1,
            f"differ in metrics.jsonl: they hold {len(lines)} and {len(other_lines)} lines",
        )
    if one.summary["weights_sha256"] != other.summary["weights_sha256"]:
        return 1, "logged the same figures but ended with different weights"
    return (
        0,
        f"are the same to the last bit: weights, and {len(lines)} lines of metrics.jsonl",
    )


def check_ended(run: Records) -> None:
    """Raises OSError or ValueError, naming the file, if the run has not ended."""
    if (
        not {"step", "weights_sha256", "exit_reason", "fingerprint"}
        <= run.summary.keys()
    ):
        raise ValueError(
            f"{run.folder}/summary.json is no summary of a run: give folders of runs that have "
            "ended"
        )
    file = run.folder / "metrics.jsonl"
    if None in records.each_line(file):
        raise ValueError(
            f"{file} has lines that no run writes: give folders of runs that have ended"
        )


def figures(run: Records) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times."""
    return [
        {k: v for k, v in line.items() if not k.startswith(TIMES)} for line in run.lines
    ]


def side_by_side(runs: Sequence[Records], score: float | None) -> list[list[str]]:
    """Rows of a table: a name, then its value in each run; first results, then settings.

    `score`: one row has the time to reach it; None: the worst of the runs' best scores, if all
    measure the same.
    """
    if score is None:
        score = _worst_best_score(runs)

    def row(name: str, value: Callable[[Records], object]) -> list[str]:
        return [name, *(str(value(run)) for run in runs)]

    rows = [
        row("ended", lambda run: run.summary.get("exit_reason", "not yet")),
        row("step", lambda run: f"{run.last_step():,}"),
        row("ranks", lambda run: run.last_start().get("ranks", "?")),
        row("starts", lambda run: len(run.starts)),
    ]
    scores = [run.scores() for run in runs]
    for name in _names(scores):
        rows.append(
            [f"{name}, last", *(_text(run_scores.get(name)) for run_scores in scores)]
        )
    rows.append(row("best score", _best))
    if score is not None:
        rows.append(row(f"to a score of {score:.4g}", lambda run: _reached(run, score)))
    rows.append(
        row(
            "samples/s, median",
            lambda run: _text(run.summary.get("samples_per_second")),
        )
    )
    rows.append(
        row("weights", lambda run: str(run.summary.get("weights_sha256", ""))[:12])
    )

    for name in _names([run.settings for run in runs]):
        values = [run.settings.get(name, "(none)") for run in runs]
        if len(set(values)) > 1 and name != "run_dir":
            rows.append([f"--{name}", *values])
    return rows


def _names(tables: Sequence[Mapping[str, object]]) -> list[str]:
    """All keys of the tables, each once, in the order in which they come."""
    return list(dict.fromkeys(itertools.chain.from_iterable(tables)))


def _worst_best_score(runs: Sequence[Records]) -> float | None:
    """The worst of the runs' best scores; None where there are none, or of several measures."""
    bests = []
    metrics = set()
    measures = set()
    for run in runs:
        if best := run.best():
            bests.append(best)
            metrics.add(run.main_metric())
            # A run of an older version does not say what it measures.
            if measure := run.last_start().get("measure"):
                measures.add(str(measure))
    if len(metrics) != 1 or len(measures) > 1:
        return None
    return min(bests, key=metrics.pop().rank).value


def _best(run: Records) -> str:
    best = run.best()
    return (
        f"{run.main_metric().name} {best.value:.4f}, step {best.step:,}"
        if best
        else "none"
    )


def printed(rows: Sequence[Sequence[str]]) -> str:
    """The table for a terminal; long values lose their beginning: paths differ at the end."""
    return logs.in_columns(
        [[_cut(logs.printable(cell)) for cell in row] for row in rows]
    )


def _cut(cell: str) -> str:
    return cell if len(cell) <= _CELL else f"...{cell[3 - _CELL :]}"


def write(
    file: Path, runs: Mapping[str, Records], rows: Sequence[Sequence[str]]
) -> None:
    """Writes a page with the table, and the curves of all runs by their names.

    Raises ValueError where a file that is no page of this command has the name; OSError.
    """
    # The import stands here because loading the plot library takes half a second.
    from hvdkit.observe import pages

    titles = {
        "loss": "Training loss",
        "lr": "Learning rate",
        "grad_norm": "Norm of the gradient",
        "samples_per_second": "Samples a second, all ranks",
        "eval_loss": "Validation loss",
    }
    for name in _names([run.scores() for run in runs.values()]):
        titles[f"eval_{name}"] = f"Validation: {name}"
    plots = []
    for figure, title in itertools.islice(titles.items(), _MOST_PLOTS):
        curves = {}
        for name, run in runs.items():
            lines = run.evaluations if figure.startswith("eval_") else run.steps
            values = column(lines, figure)
            if not all(math.isnan(value) for value in values):
                curves[name] = (column(lines, "step"), values)
        if curves:
            plots.append(pages.curves(title, curves))
    parts = [
        pages.table(rows[1:], rows[0]),
        pages.section("Curves", pages.cards(plots)),
    ]
    pages.write(file, f"{len(runs)} runs compared", parts, by="compare")


def labels(folders: Sequence[Path]) -> list[str]:
    """Short names that still differ: paths without the folders that all begin with."""
    paths = [folder.resolve() for folder in folders]
    shared = os.path.commonpath([path.parent for path in paths])
    return [records.text(path.relative_to(shared)) for path in paths]


def _reached(run: Records, value: float) -> str:
    """The first step with a score as good, and the seconds since the run's first start."""
    start_time = run.starts[0]["time"] if run.starts else math.nan
    times = dict(zip(column(run.evaluations, "step"), column(run.evaluations, "time")))
    for score in run.scored():
        if not run.main_metric().is_better(value, score.value):
            return f"step {score.step:,}, {times[score.step] - start_time:,.1f} s"
    return "not reached"


def _text(value: object) -> str:
    return f"{value:,.4f}" if isinstance(value, int | float) else "none"


@logs.explained
def main(argv: list[str]) -> int:
    """Returns the exit code: 0 all the same, 1 not the same, 2 cannot be compared."""
    parser = logs.parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--html", type=path_argument, help="write the comparison as a page to this file"
    )
    parser.add_argument(
        "--score", type=float, help="also show each run's time to this score"
    )
    options = parser.parse_args(argv[1:])
    if len(options.folders) < 2:
        raise ValueError("give two runs or more: hvdkit compare runs/one runs/other")

    runs = [records.read(folder) for folder in options.folders]
    names = labels(options.folders)
    rows = [["", *names], *side_by_side(runs, options.score)]
    # The page comes first: where another file has its name, nothing else is said.
    if options.html:
        write(options.html, dict(zip(names, runs)), rows)
    print(printed(rows))
    if options.html:
        print(logs.printable(f"page: {options.html}"))

    for run in runs:
        check_ended(run)
    exit_code = 0
    for run in runs[1:]:
        code, words = verdict(runs[0], run)
        print(logs.printable(f"{runs[0].folder} and {run.folder} {words}"))
        exit_code = max(exit_code, code)
    return exit_code
