"""Writes a run's report.html: what was trained, where, curves, scores, predictions.

    hvdkit report runs/demo          rewrites runs/demo/report.html from the run's files

train.py writes it at the end and when it is stopped. It is one file and needs no network.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np

from hvdkit import logs
from hvdkit import scores as scores_lib
from hvdkit.data.labels import COLOURS
from hvdkit.evaluate import metrics
from hvdkit.observe import pages, records
from hvdkit.observe.records import Records, column, is_of_class, is_score
from hvdkit.stop import DONE

_MOST_BARS = 30
_MOST_SCORES = _MOST_STARTS = 100  # that a page shows; of starts the newest
# By title: figures of metrics.jsonl, and their names in the legend.
_CURVES = {
    "Learning rate": {"lr": ""},
    "Norm of the gradient": {"grad_norm": ""},
    "Samples a second, all ranks": {"samples_per_second": ""},
    "Share of time spent waiting for data, rank 0": {"data_wait": ""},
    "A rank's own seconds a step": {f"own_seconds_{n}": n for n in ("least", "median", "most")},
}
_BAD_SAMPLES = "bad_samples.jsonl"
_MOST_BAD = 20
_COUNTS = {
    "skipped_steps": "steps skipped because loss or gradients were not finite",
    "samples_passed_over": "samples left out after going back",
}


def write(run_dir: Path) -> Path:
    """Returns the page's path. Raises OSError or ValueError."""
    run = records.read(run_dir)
    names = []
    counts = np.zeros([0, 0], np.int64)
    if (file := run_dir / "confusion.csv").exists():
        names, counts = metrics.read_confusion(file)
        names = list(map(records.text, names))
    versions = [*run.summary.get("fingerprint", {}).items()]
    flags = "\n".join(f"--{name}={value}" for name, value in run.settings.items())
    parts = [
        pages.table(about(run)),
        pages.section("Training", pages.cards(training(run))),
        pages.section("Scores", pages.cards(scores(run, names, counts))),
        pages.section("What it predicts", *predictions(run, names)),
        pages.section("Starts, faults and time lost", *faults(run)),
        pages.section("Computed with", pages.table(versions)),
        f"<details><summary>All settings</summary><pre>{pages.escaped(flags)}</pre></details>",
    ]
    state = run.summary.get("exit_reason") or f"not ended, step {run.last_step():,}"
    out = run_dir / "report.html"
    pages.write(out, f"{run.folder.resolve().name}: {state}", parts, by="report")
    return out


def about(run: Records) -> list[tuple[str, object]]:
    """The most important facts."""
    rows: list[tuple[str, object]] = [("run", run.folder.resolve())]
    last = run.last_start()
    total = run.settings.get("num_steps", "?")
    rows += [(key, last[key]) for key in ("what", "where") if last.get(key)]
    if run.starts and run.starts[0].get("from"):
        rows.append(("began from", run.starts[0]["from"]))
    total = f"{int(total):,}" if total.isdecimal() and len(total) < 20 else total
    rows.append(("steps", f"{run.last_step():,} of {total}"))
    if reason := run.summary.get("exit_reason"):
        rows.append(("ended", reason))
    if run.evaluations:
        shown = ", ".join(f"{n} {v:.4f}" for n, v in run.scores().items() if v is not None)
        rows.append((f"scores of step {run.evaluations[-1]['step']:,}", shown))
    if best := run.best():
        metric = run.main_metric().describe()
        rows.append(("best", f"{metric}: {best.value:.4f}, of step {best.step:,}"))
    elif run.evaluations and run.main_metric().name:
        rows.append(("best", scores_lib.none_is_best(run.main_metric().name)))
    if speed := run.summary.get("samples_per_second"):
        rows.append(("speed, median", f"{speed:,.0f} samples/s"))
    if run.starts and (end := max((line.get("time", 0.0) for line in run.lines), default=0.0)):
        took = timedelta(seconds=round(end - run.starts[0]["time"]))
        rows.append(("time, first start to last record", took))
    if sha := run.summary.get("weights_sha256"):
        rows.append(("weights, SHA-256", sha))
    return rows


def training(run: Records) -> list[str]:
    """Curves over the steps."""
    if not run.steps:
        return []
    x = column(run.steps, "step")
    marks = [start["step"] for start in run.starts[1:]][-_MOST_STARTS:]
    loss = {"training": (x, column(run.steps, "loss"))}
    if run.evaluations:
        loss["validation"] = column(run.evaluations, "step"), column(run.evaluations, "eval_loss")
    found = [pages.curves("Loss" + (" (dotted: a new start)" if marks else ""), loss, marks=marks)]
    for title, names in _CURVES.items():
        lines = {label: (x, column(run.steps, name)) for name, label in names.items()}
        if any(np.isfinite(y).any() for _, y in lines.values()):
            found.append(pages.curves(title, lines))
    return found


def scores(run: Records, names: Sequence[str], counts: np.ndarray) -> list[str]:
    """All evaluations; each class in the newest one; its confusion matrix."""
    found = []
    keys = dict.fromkeys(n for line in run.evaluations for n in line if is_score(n))
    at = column(run.evaluations, "step")
    shown = [*keys][:_MOST_SCORES]
    lines = {n.removeprefix("eval_"): (at, column(run.evaluations, n)) for n in shown}
    title = "Scores of the validation set"
    title += f": {len(shown)} of {len(keys)}" * (len(shown) < len(keys))
    if lines:
        found.append(pages.curves(title, lines))
    if not names:
        return found
    by_pixel = _is_segmentation(run)
    order = range(len(names))
    values = metrics.class_figures(counts)["iou" if by_pixel else "recall"]
    title = f"{'IoU' if by_pixel else 'Recall'} of each class"
    if len(names) > _MOST_BARS:
        order = np.argsort(values, kind="stable")[:_MOST_BARS].tolist()  # NaN last
        title = f"{title}: the {_MOST_BARS} lowest of {len(names)}"
    colours = list(map(_colour, order)) if by_pixel else []
    # With the number, where two classes have one name.
    own = {n: names[n] if names.count(names[n]) == 1 else f"{names[n]} ({n})" for n in order}
    shown = {own[n]: float(values[n]) for n in order}
    found.append(pages.bars(title, shown, colours))
    found.append(pages.matrix("Confusion matrix: shares of each label", counts, names))
    return found


def predictions(run: Records, names: Sequence[str]) -> list[str]:
    drawn = run.folder / "predictions.png"
    if not _is_segmentation(run):
        return [pages.picture(drawn, "validation samples, as the newest evaluation drew them")]
    legend = pages.legend(names, [*map(_colour, range(len(COLOURS)))])  # as many as have one
    return [pages.picture(drawn, "input | label | prediction"), legend if drawn.exists() else ""]


def faults(run: Records) -> list[str]:
    """The newest starts, and the time lost before each."""
    rows = []
    first = max(0, len(run.starts) - _MOST_STARTS)
    steps, times = (np.array(column([*run.starts, *run.lines], n)) for n in ("step", "time"))
    for number, start in enumerate(run.starts[first:], start=first):
        # Records after the step that a start resumed from were dropped and made again.
        kept = times[(steps <= start["step"]) & (times < start["time"])]
        lost = timedelta(seconds=round(start["time"] - kept.max())) if len(kept) else "not known"
        lost = lost if number else ""
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start["time"]))
        rows.append((date, f"{start['step']:,}", start.get("where", ""), lost))
    head = ("started", "from step", "where", "lost: from the last record kept to this start")
    counts = {words: run.summary.get(key) for key, words in _COUNTS.items()}
    counted = [f"{count:,} {words}" for words, count in counts.items() if count]
    lines = records.lines(run.folder / _BAD_SAMPLES)
    bad = {str(line.get("sample")): line.get("why") for line in lines}
    if bad:
        counted.append(f"{len(bad):,} bad training samples replaced ({_BAD_SAMPLES})")
    counted += [records.text(why) for why in [*bad.values()][:_MOST_BAD]]
    notes = "".join(f"<p>{pages.escaped(text)}</p>" for text in counted)
    return [pages.table(rows, head) if rows else "", notes]


def _is_segmentation(run: Records) -> bool:
    """Whether classes are of pixels, which have the palette's colours."""
    return any(is_of_class(name) for line in run.evaluations for name in line)


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
