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

from hvdkit import logs, whole_files
from hvdkit.observe import records
from hvdkit.observe.records import TIMES, Records, column
from hvdkit.ranks.fingerprint import differences
from hvdkit.settings.typed import path_argument

_MOST_PLOTS = 100


def verdict(one: Records, other: Records) -> tuple[int, str]:
    """Exit code and sentence."""
    both = f"{one.folder} and {other.folder}"
    if one.folder.resolve() == other.folder.resolve():
        return 2, f"{both} are one folder: give those of two runs"
    unlike = differences(one.summary["fingerprint"], other.summary["fingerprint"])
    if unlike:
        return 2, f"{both} were not computed alike, so bits cannot be compared: {', '.join(unlike)}"
    steps = [run.summary["step"] for run in (one, other)]
    if steps[0] != steps[1]:
        return 1, f"{both} ended at different steps: {steps[0]} and {steps[1]}"
    lines = figures(one)
    others = figures(other)
    if lines != others:
        counts = f"they hold {len(lines)} and {len(others)} lines"
        steps = (f"first at step {a['step']}" for a, b in zip(lines, others) if a != b)
        return 1, f"{both} differ in metrics.jsonl: {next(steps, counts)}"
    if one.summary["weights_sha256"] != other.summary["weights_sha256"]:
        return 1, f"{both} logged the same figures but ended with different weights"
    return (
        0,
        f"{both} are the same to the last bit: weights, and {len(lines)} lines of metrics.jsonl",
    )


def check_ended(run: Records) -> None:
    """Raises OSError or ValueError, naming the file, if the run has not ended."""
    file = run.folder / "metrics.jsonl"
    ended = "give folders of runs that have ended"
    if not {"step", "weights_sha256", "exit_reason", "fingerprint"} <= {*run.summary}:
        raise ValueError(f"{run.folder}/summary.json is no summary of a run: {ended}")
    if len(whole_files.read(file, whole_files.LINES_BYTES).splitlines()) != len(run.lines):
        raise ValueError(f"{file} has lines that no run writes: {ended}")


def figures(run: Records) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times."""
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in run.lines]


def side_by_side(runs: Sequence[Records], score: float | None) -> list[list[str]]:
    """Rows of a table: a name, then its value in each run; first results, then settings.

    `score`: one row has the time to reach it; None: the worst of the runs' best scores, if all
    measure the same.
    """
    metrics = [run.main_metric() for run in runs]
    bests = [run.best() for run in runs]
    heights = [metric.height(best.value) for metric, best in zip(metrics, bests) if best]
    if score is None and heights and len({m for m, best in zip(metrics, bests) if best}) == 1:
        score = metrics[0].height(min(heights))

    def row(name: str, value: Callable[[Records], object]) -> list[str]:
        return [name, *(str(value(run)) for run in runs)]

    rows = [
        row("ended", lambda run: run.summary.get("exit_reason", "not yet")),
        row("step", lambda run: f"{run.last_step():,}"),
        row("ranks", lambda run: run.last_start().get("ranks", "?")),
        row("starts", lambda run: len(run.starts)),
    ]
    scores = [run.scores() for run in runs]
    for name in dict.fromkeys(name for own in scores for name in own):
        rows.append([f"{name}, last", *(_text(own.get(name)) for own in scores)])
    cells = []
    for metric, best in zip(metrics, bests):
        cells.append(f"{metric.name} {best.value:.4f}, step {best.step:,}" if best else "none")
    rows.append(["best score", *cells])
    if score is not None:
        rows.append([f"to a score of {score:.4g}", *(_reached(run, score) for run in runs)])
    rows.append(row("samples/s, median", lambda run: _text(run.summary.get("samples_per_second"))))
    rows.append(row("weights", lambda run: str(run.summary.get("weights_sha256", ""))[:12]))
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        values = [run.settings.get(name, "(none)") for run in runs]
        if len(set(values)) > 1 and name != "run_dir":
            rows.append([f"--{name}", *values])
    return rows


def printed(rows: Sequence[Sequence[str]], most: int = 40) -> str:
    """The table for a terminal; long values lose their beginning: paths differ at the end."""
    rows = [list(map(logs.printable, row)) for row in rows]
    cut = [[c if len(c) <= most else f"...{c[3 - most :]}" for c in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*cut)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cut)
    return "\n".join(lines)


def write(file: Path, runs: Mapping[str, Records], rows: Sequence[Sequence[str]]) -> None:
    """A page with the table, and the curves of all runs, by their names. Raises OSError."""
    from hvdkit.observe import pages  # here: loading the plot library takes half a second

    wanted = {
        "loss": "Training loss",
        "lr": "Learning rate",
        "grad_norm": "Norm of the gradient",
        "samples_per_second": "Samples a second, all ranks",
        "eval_loss": "Validation loss",
    }
    wanted |= {f"eval_{n}": f"Validation: {n}" for run in runs.values() for n in run.scores()}
    found = []
    for key, title in itertools.islice(wanted.items(), _MOST_PLOTS):
        lines = {}
        for name, run in runs.items():
            of_key = run.evaluations if key.startswith("eval_") else run.steps
            curve = column(of_key, "step"), column(of_key, key)
            if not all(map(math.isnan, curve[1])):
                lines[name] = curve
        found += [pages.curves(title, lines)] if lines else []
    parts = [pages.table(rows[1:], rows[0]), pages.section("Curves", pages.cards(found))]
    pages.write(file, f"{len(runs)} runs compared", parts, by="compare")


def check_page(file: Path) -> None:
    """Raises ValueError: the file is there, and no page of this command."""
    from hvdkit.observe import pages  # here: loading the plot library takes half a second

    whole_files.refuse_other(file, pages.sign("compare"))


def labels(folders: Sequence[Path]) -> list[str]:
    """Short names that still differ: paths without the folders that all begin with."""
    paths = [folder.resolve() for folder in folders]
    shared = os.path.commonpath([path.parent for path in paths])
    return [records.text(path.relative_to(shared)) for path in paths]


def _reached(run: Records, value: float) -> str:
    """The first step with a score as good, and the seconds since the run's first start."""
    begin = run.starts[0]["time"] if run.starts else math.nan
    times = dict(zip(column(run.evaluations, "step"), column(run.evaluations, "time")))
    for score in run.scored():
        if not run.main_metric().is_better(value, score.value):
            return f"step {score.step:,}, {times[score.step] - begin:,.1f} s"
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
    parser.add_argument("--score", type=float, help="also show each run's time to this score")
    own = parser.parse_args(argv[1:])
    if len(own.folders) < 2:
        raise ValueError("give two runs or more: hvdkit compare runs/one runs/other")
    if own.html:
        check_page(own.html)
    runs = [records.read(folder) for folder in own.folders]
    names = labels(own.folders)
    rows = [["", *names], *side_by_side(runs, own.score)]
    print(printed(rows))
    if own.html:
        write(own.html, dict(zip(names, runs)), rows)
        print(logs.printable(f"page: {own.html}"))
    for run in runs:
        check_ended(run)
    found = [verdict(runs[0], run) for run in runs[1:]]
    print("\n".join(logs.printable(sentence) for _, sentence in found))
    return max(code for code, _ in found)
