"""Writes a run's report.html: what was trained, where, curves, scores, predictions.

    hvdkit report runs/demo          rewrites runs/demo/report.html from the run's files

train.py writes it at the end and when it is stopped. It is one file and needs no network.
"""

import itertools
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np

from hvdkit import logs, whole_files
from hvdkit import scores as scores_lib
from hvdkit.data.labels import COLOURS
from hvdkit.evaluate import metrics
from hvdkit.observe import pages, records
from hvdkit.observe.records import Records, column, is_of_class, is_score
from hvdkit.stop import DONE

_MOST_BARS = 30
_MOST_SCORES = 100
_MOST_STARTS = 100  # the newest are shown
# Curves by title: figures of metrics.jsonl, and their names in the legend.
_CURVES = {
    "Learning rate": {"lr": ""},
    "Norm of the gradient": {"grad_norm": ""},
    "Samples a second, all ranks": {"samples_per_second": ""},
    "Share of time spent waiting for data, rank 0": {"data_wait": ""},
    "A rank's own seconds a step": {
        "own_seconds_least": "least",
        "own_seconds_median": "median",
        "own_seconds_most": "most",
    },
}
_BAD_SAMPLES = "bad_samples.jsonl"
_MOST_BAD = 20
_MOST_OPERATIONS = 10
_COUNTS = {
    "skipped_steps": "steps skipped because loss or gradients were not finite",
    "samples_passed_over": "samples left out after going back",
}


def write(run_dir: Path) -> Path:
    """Returns the page's path. Raises OSError or ValueError."""
    run = records.read(run_dir)
    names, counts, fault = _confusion(run_dir)
    versions = list(run.summary.get("fingerprint", {}).items())
    flags = "\n".join(f"--{name}={value}" for name, value in run.settings.items())
    parts = [
        pages.table(about(run)),
        pages.section("Training", pages.cards(training(run))),
        pages.section("Scores", pages.cards(scores(run, names, counts))),
        pages.section(
            "What it predicts", *predictions(run, names), pages.escaped(fault)
        ),
        *profile(run_dir),
        pages.section("Starts, faults and time lost", *faults(run)),
        pages.section("Computed with", pages.table(versions)),
        f"<details><summary>All settings</summary><pre>{pages.escaped(flags)}</pre></details>",
    ]
    state = run.summary.get("exit_reason") or f"not ended, step {run.last_step():,}"
    out = run_dir / "report.html"
    pages.write(out, f"{run.folder.resolve().name}: {state}", parts, by="report")
    return out


def _confusion(run_dir: Path) -> tuple[list[str], np.ndarray, str]:
    """Names of classes and the confusion matrix; and why they are not shown, or ""."""
    nothing = np.zeros([0, 0], np.int64)
    file = run_dir / "confusion.csv"
    if not file.exists():
        return [], nothing, ""
    try:
        names, counts = metrics.read_confusion(file)
    except OSError as error:
        return [], nothing, f"{file.name} is not shown: {error.strerror or error}"
    return [records.text(name) for name in names], counts, ""


def about(run: Records) -> list[tuple[str, object]]:
    """The most important facts of a run, by name; facts that are not known are left out."""
    total = run.settings.get("num_steps", "?")
    if total.isdecimal() and len(total) < 20:
        total = f"{int(total):,}"
    start = run.last_start()
    rows: list[tuple[str, object]] = [
        ("run", run.folder.resolve()),
        ("what", start.get("what")),
        ("where", start.get("where")),
        ("began from", run.starts[0].get("from") if run.starts else None),
        ("steps", f"{run.last_step():,} of {total}"),
        ("ended", run.summary.get("exit_reason")),
    ]
    if run.evaluations:
        values = [
            f"{name} {v:.4f}" for name, v in run.scores().items() if v is not None
        ]
        rows.append(
            (f"scores of step {run.evaluations[-1]['step']:,}", ", ".join(values))
        )
    metric = run.main_metric()
    if best := run.best():
        rows.append(
            ("best", f"{metric.describe()}: {best.value:.4f}, of step {best.step:,}")
        )
    elif run.evaluations and metric.name:
        rows.append(("best", scores_lib.none_is_best(metric.name)))
    if speed := run.summary.get("samples_per_second"):
        rows.append(("speed, median", f"{speed:,.0f} samples/s"))
    end = max((line.get("time", 0.0) for line in run.lines), default=0.0)
    if run.starts and end:
        duration = timedelta(seconds=round(end - run.starts[0]["time"]))
        rows.append(("time, first start to last record", str(duration)))
    rows.append(("weights, SHA-256", run.summary.get("weights_sha256")))
    return [(name, value) for name, value in rows if value]


def training(run: Records) -> list[str]:
    """Plots of what was logged, over the steps."""
    if not run.steps:
        return []
    x = column(run.steps, "step")
    losses = {"training": (x, column(run.steps, "loss"))}
    if run.evaluations:
        evaluated = column(run.evaluations, "step")
        losses["validation"] = (evaluated, column(run.evaluations, "eval_loss"))
    marks = [start["step"] for start in run.starts[1:]][-_MOST_STARTS:]
    title = "Loss (dotted: a new start)" if marks else "Loss"
    plots = [pages.curves(title, losses, marks=marks)]
    for title, labels in _CURVES.items():
        lines = {label: (x, column(run.steps, name)) for name, label in labels.items()}
        if any(np.isfinite(y).any() for _, y in lines.values()):
            plots.append(pages.curves(title, lines))
    return plots


def scores(run: Records, names: Sequence[str], counts: np.ndarray) -> list[str]:
    """Plots of all evaluations, of the classes in the newest one, and of its confusion matrix."""
    plots = []
    score_names = dict.fromkeys(
        n for n in itertools.chain(*run.evaluations) if is_score(n)
    )
    shown = list(score_names)[:_MOST_SCORES]
    steps = column(run.evaluations, "step")
    lines = {
        n.removeprefix("eval_"): (steps, column(run.evaluations, n)) for n in shown
    }
    if lines:
        title = "Scores of the validation set"
        if len(shown) < len(score_names):
            title += f": {len(shown)} of {len(score_names)}"
        plots.append(pages.curves(title, lines))
    if names:
        plots.append(_class_bars(run, names, counts))
        plots.append(
            pages.matrix("Confusion matrix: shares of each label", counts, names)
        )
    return plots


def _class_bars(run: Records, names: Sequence[str], counts: np.ndarray) -> str:
    is_segmentation = _is_segmentation(run)
    measure = "IoU" if is_segmentation else "Recall"
    values = metrics.class_figures(counts)[measure.lower()]
    order = np.argsort(values, kind="stable")[:_MOST_BARS].tolist()  # NaN comes last
    title = f"{measure} of each class: the {_MOST_BARS} lowest of {len(names)}"
    if len(names) <= _MOST_BARS:
        order = range(len(names))
        title = f"{measure} of each class"
    bars = {}
    for number in order:
        name = names[number]
        if names.count(name) > 1:
            name = f"{name} ({number})"
        bars[name] = values[number]
    return pages.bars(
        title, bars, [_colour(n) for n in order] if is_segmentation else []
    )


def predictions(run: Records, names: Sequence[str]) -> list[str]:
    file = run.folder / "predictions.png"
    if not _is_segmentation(run):
        return [
            pages.picture(
                file, "validation samples, as the newest evaluation drew them"
            )
        ]
    # Classes beyond the palette are left out: their colours repeat.
    legend = pages.legend(names, [_colour(number) for number in range(len(COLOURS))])
    return [
        pages.picture(file, "input | label | prediction"),
        legend if file.exists() else "",
    ]


def profile(run_dir: Path) -> list[str]:
    """The operations that cost most in the steps of --profile, if there were some."""
    file = run_dir / "profile" / "operations.json"
    if not file.exists():
        return []
    content = whole_files.from_json(
        whole_files.read(file, whole_files.JSON_BYTES), file
    )
    try:
        rows = [
            (entry["operation"], f"{entry['ms_a_step']:.3f}", f"{entry['share']:.1%}")
            for entry in content[:_MOST_OPERATIONS]
        ]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{file} is no record of --profile: remove the file") from None
    head = ("operation", "ms a step", "share")
    return [pages.section("Where the time of a step goes", pages.table(rows, head))]


def faults(run: Records) -> list[str]:
    """The newest starts, and the time lost before each."""
    rows = []
    all_lines = [*run.starts, *run.lines]
    steps = np.array(column(all_lines, "step"))
    times = np.array(column(all_lines, "time"))
    for start in run.starts[-_MOST_STARTS:]:
        lost: object = ""
        if start is not run.starts[0]:
            # Records after the step that a start resumed from were dropped and made again.
            kept_times = times[(steps <= start["step"]) & (times < start["time"])]
            lost = "not known"
            if len(kept_times):
                lost = timedelta(seconds=round(start["time"] - kept_times.max()))
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start["time"]))
        rows.append((date, f"{start['step']:,}", start.get("where", ""), lost))
    head = (
        "started",
        "from step",
        "where",
        "lost: from the last record kept to this start",
    )

    notes = []
    for key, words in _COUNTS.items():
        if count := run.summary.get(key):
            notes.append(f"{count:,} {words}")
    bad_samples = {}
    for line in records.lines(run.folder / _BAD_SAMPLES):
        bad_samples[str(line.get("sample"))] = line.get("why", "")
    if bad_samples:
        notes.append(
            f"{len(bad_samples):,} bad training samples replaced ({_BAD_SAMPLES})"
        )
    notes += list(bad_samples.values())[:_MOST_BAD]
    paragraphs = "".join(f"<p>{pages.escaped(note)}</p>" for note in notes)
    return [pages.table(rows, head), paragraphs]


def _is_segmentation(run: Records) -> bool:
    """Whether classes are of pixels, which have the palette's colours."""
    return any(is_of_class(name) for name in itertools.chain(*run.evaluations))


def _colour(number: int) -> str:
    return "#" + "".join(f"{part:02x}" for part in COLOURS[number % len(COLOURS)])


@logs.explained
def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 2 wrong use."""
    parser = logs.parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_DIR")
    for folder in parser.parse_args(argv[1:]).folders:
        print(logs.printable(f"report: {write(folder)}"))
    return DONE
