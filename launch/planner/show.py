"""The table and the plot of scaling.py."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from planner.plan import HELPS, Plan, Prediction, predictions

_LOSSES = ("stragglers", "input", "bandwidth", "latency", "saves and failures")
_PARTS = ("computing", "stragglers", "waiting for input", "bandwidth of links", "latency")
# The report's, and greys.
_COLOURS = ("#2f7fd6", "#dd7a2c", "#8a8f27", "#b8559c", "#7d6bd0")
_LOOK = {
    "svg.fonttype": "none",
    "svg.hashsalt": "scaling",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
_CURVE = 41  # points


def table(plan: Plan, rows: Sequence[Prediction]) -> str:
    """Lines for a person."""
    job, links = plan.job, plan.links
    shown = [
        f"{plan.parameters / 1e6:.4g} M parameters, {job.gradients / 1e6:.4g} MB of gradients a "
        f"step; {job.compute * 1e3:.4g} ms for {job.batch:,} samples on one GPU",
        f"hosts of {links.gpus_per_host} GPUs: {links.inside / 1e9:.3g} GB/s inside, "
        f"{links.link / 1e9:.3g} GB/s between",
        "",
    ]
    columns = [_column(row, plan.running.price > 0) for row in rows]
    for name in columns[0]:
        cells = "".join(f"{column[name]:>11}" for column in columns)
        shown.append(f"{name:<22}{cells}")
    shown += ["", *_advice(rows)]
    shown.append("predicted, not measured: try it on a few hosts first")
    return "\n".join(shown + [plan.note] * bool(plan.note))


def _column(row: Prediction, priced: bool) -> dict[str, str]:
    shown = {
        "GPUs": f"{row.gpus:,}",
        "hosts": f"{row.hosts:,}",
        "ms a step": f"{row.step.total * 1e3:,.1f}",
        "efficiency": f"{row.efficiency:.1%}",
        "samples/s": f"{row.samples:,.0f}",
    }
    shown |= {f"lost: {name}"[:22]: f"{row.losses[name]:.1%}" for name in _LOSSES[:-1]}
    shown["saves and failures"] = f"{row.losses[_LOSSES[-1]]:.2%}"
    shown["save every, minutes"] = f"{row.every / 60:.3g}"
    if priced:
        shown["cost of 1 M samples"] = f"{row.cost:,.2f}"
    return shown


def _advice(rows: Sequence[Prediction]) -> Iterator[str]:
    """What limits, largest loss first; numbers of GPUs with the same are told together."""
    for helps, group in itertools.groupby(rows, lambda row: row.helps):
        of = [f"{row.gpus:,}" for row in group]
        of = f"{of[0]} to {of[-1]}" if len(of) > 1 else of[0]
        limits = ", ".join(f"{n} ({text})" if text else n for n, text in helps.items())
        yield f"{of} GPUs: limited by {limits or 'computing'}"
    for name, text in HELPS.items():
        if any(name in row.helps for row in rows):
            yield f"against {name}: {text}"


def plot(plan: Plan, gpus: Sequence[int], file: str) -> None:
    """Where a step's time goes by the number of GPUs, to a .svg or .png file.

    Raises:
      OSError: it cannot be written.
      ValueError: there is no Matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator, PercentFormatter
    except ImportError:
        raise ValueError(f"--plot={file} needs Matplotlib, as in requirements.txt") from None
    counts = sorted({*gpus, *(round(max(gpus) ** (n / (_CURVE - 1))) for n in range(_CURVE))})
    rows = predictions(plan, counts)
    parts = zip(*(dataclasses.astuple(row.step) for row in rows))
    shares = [[part / row.step.total for part, row in zip(own, rows)] for own in parts]
    kept = [row.efficiency * row.kept for row in rows]
    with matplotlib.rc_context(_LOOK):
        figure = Figure((7.2, 3.8), layout="constrained")
        axes = figure.add_subplot()
        axes.stackplot(counts, shares, labels=_PARTS, colors=_COLOURS, alpha=0.85)
        axes.plot(counts, kept, color="#101010", linestyle=":", label="after saves and failures")
        for row in rows:
            if row.gpus in gpus:
                text = f"{row.efficiency:.0%}"
                axes.annotate(text, (row.gpus, row.efficiency), (0, -14), color="white",
                              textcoords="offset points", ha="right")  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [f"{count:,}" for count in gpus])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(counts[0], counts[-1] if len(counts) > 1 else 2)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("GPUs")
        axes.set_ylabel("share of a step's time")
        figure.legend(loc="outside upper center", ncols=3)
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.endswith(".svg") else None)
