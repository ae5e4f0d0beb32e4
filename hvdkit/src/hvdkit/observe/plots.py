"""Plots for a page, as SVG in the page's text colour, for light and dark mode."""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

Curve = tuple[Sequence[float], Sequence[float]]  # x and y; NaN leaves a gap

SIZE = (4.6, 2.7)  # inches: the width of a phone without zooming
_MOST_POINTS = 400  # of a curve: what a screen can show
_LONGEST = 24  # characters of a name
_LEGEND = 60  # characters of one row of the legend
_STYLES = ("-", "--", ":", "-.")
_COLOURS = ("#2f7fd6", "#dd7a2c", "#2a9d74", "#b8559c", "#8a8f27", "#7d6bd0")
# Replaced in the SVG: Matplotlib cannot use the page's colour.
_INK, _FAINT = "#010203", "#010204"
_LOOK = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.parse_math": False,  # a class may be called $5
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _FAINT,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
}
_SPACES = {"xmlns": "2000/svg", "xmlns:xlink": "1999/xlink"}
_numbers = itertools.count()


def curves(
    title: str,
    lines: Mapping[str, Curve],
    xlabel: str = "step",
    log_x: bool = False,
    marks: Sequence[float] = (),
) -> str:
    """Lines over one axis, as SVG; long ones are drawn as means of neighbouring points.

    Args:
      lines: by the name in the legend.
      marks: places on the x axis with a vertical line.
    """
    with matplotlib.rc_context(_LOOK):
        figure = Figure(SIZE, layout="constrained")
        axes = figure.add_subplot()
        looks = itertools.cycle(itertools.product(_STYLES, _COLOURS))
        for (name, (x, y)), (style, colour) in zip(lines.items(), looks):
            x, y = thinned(x, y)
            alone = np.isfinite(y).sum() < 2
            name = _short(f" {name}" if name.startswith("_") else name)  # for the legend
            look = {"color": colour, "linestyle": style, "marker": "o" if alone else None}
            axes.plot(x, y, label=name, **look)
        for place in marks:
            axes.axvline(place, color=_COLOURS[1], linestyle=":")
        axes.set_xlabel(xlabel)
        if log_x:
            axes.set_xscale("log")
        if len(lines) > 1:
            columns = max(1, min(4, len(lines), _LEGEND // (6 + max(map(len, map(_short, lines))))))
            rows = math.ceil(len(lines) / columns)
            figure.set_size_inches(SIZE[0], SIZE[1] + 0.2 * max(rows - 2, 0))
            figure.legend(loc="outside lower center", ncols=columns)
        return _svg(figure, title)


def bars(title: str, values: Mapping[str, float], colours: Sequence[str] = ()) -> str:
    """A bar from 0 to 1 for each name, the first on top; NaN has a note instead of a bar."""
    shown = [0.0 if math.isnan(value) else value for value in values.values()]
    with matplotlib.rc_context(_LOOK | {"axes.grid": False}):
        figure = Figure((SIZE[0], 0.7 + 0.19 * len(values)), layout="constrained")
        axes = figure.add_subplot()
        names = list(map(_short, values))
        places = range(len(names))
        axes.barh(places, shown, color=list(colours) or _COLOURS[0], height=0.7)
        axes.set_yticks(places, names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(0, 1.12)
        axes.set_xticks([0, 0.5, 1])
        for place, value in enumerate(values.values()):
            text = "none" if math.isnan(value) else f"{value:.3f}"
            axes.text(shown[place] + 0.01, place, text, va="center", fontsize=9)
        return _svg(figure, title)


def matrix(title: str, counts: np.ndarray, names: Sequence[str]) -> str:
    """A confusion matrix, integer [n, n], row: label; colours show shares of the row."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    size, count = SIZE[0], len(names)
    with matplotlib.rc_context(_LOOK | {"axes.grid": False}):
        figure = Figure((size, size), layout="constrained")
        axes = figure.add_subplot()
        cells = np.zeros((count, count, 4))
        cells[..., :3] = np.array([0x2F, 0x7F, 0xD6]) / 255
        cells[..., 3] = shares  # 0 is the page's background
        axes.imshow(cells, interpolation="nearest")
        axes.set_xlabel("prediction")
        axes.set_ylabel("label")
        if count <= 30:
            axes.set_xticks(range(count), map(_short, names), rotation=90)
            axes.set_yticks(range(count), map(_short, names))
        if count <= 12:
            for row, column in itertools.product(range(count), repeat=2):
                shown = shares[row, column] >= 0.005
                text = f"{shares[row, column]:.2f}".lstrip("0") if shown else ""
                colour = "white" if shares[row, column] > 0.5 else _INK
                axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
        return _svg(figure, title)


def _short(name: str) -> str:
    """Cut in the middle: names of runs often differ at the end."""
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[: half - 3]}...{name[-half:]}"


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """At most `_MOST_POINTS` points: means of neighbours, without NaN."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(x) <= _MOST_POINTS:
        return x, y
    groups = np.arange(len(x)) * _MOST_POINTS // len(x)
    counts = np.bincount(groups, np.isfinite(y))
    with np.errstate(invalid="ignore"):
        means = np.bincount(groups, np.where(np.isfinite(y), y, 0.0)) / counts
    return np.bincount(groups, x) / np.bincount(groups), means


def _svg(figure: Figure, title: str) -> str:
    """For a page: no XML header, unique ids, the page's colours, as wide as its container."""
    file, salt = io.StringIO(), {"svg.hashsalt": f"plot-{next(_numbers)}"}
    with warnings.catch_warnings(), matplotlib.rc_context(salt):
        # Matplotlib's fonts lack many scripts, but the browser draws the text in the page's font.
        warnings.simplefilter("ignore")
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    head, rest = text.split(">", 1)
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    view = f'viewBox="0 0 {width} {height}"'
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    spaces = " ".join(f'{name}="http://www.w3.org/{end}"' for name, end in _SPACES.items())
    head = f'<svg {spaces} {view} role="img" aria-label="{label}"'
    text = f"{head}>{rest}".replace(_INK, "currentColor").replace(_FAINT, "var(--line)")
    return f"<figure><figcaption>{label}</figcaption>{text}</figure>"
