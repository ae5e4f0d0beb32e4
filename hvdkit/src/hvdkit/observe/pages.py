"""Self-contained HTML pages with SVG plots, for report.html and `hvdkit compare --html`.

Plots have the page's text colour, for light and dark mode.
"""

import base64
import contextlib
import hashlib
import html
import io
import itertools
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from hvdkit import whole_files
from hvdkit.observe import records

Numbers: TypeAlias = Sequence[float] | np.ndarray
Curves = Mapping[str, tuple[Numbers, Numbers]]  # x and y by name; NaN leaves a gap

SIZE = (4.6, 2.7)  # inches: the width of a phone without zooming
_MOST_POINTS = 400  # points of a curve that a screen can show
_LONGEST = 24  # most characters of a name
_LEGEND = 60  # most characters of one row of the legend
_COLOURS = ("#2f7fd6", "#dd7a2c", "#2a9d74", "#b8559c", "#8a8f27", "#7d6bd0")
# Matplotlib cannot use the page's colours, so they replace these in the SVG.
_INK = "#010203"
_FAINT = "#010204"
_LOOK = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.parse_math": False,  # a class may be called $5
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "grid.color": _FAINT,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "lines.linewidth": 1.4,
    "axes.prop_cycle": cycler(linestyle=("-", "--", ":", "-."))
    * cycler(color=_COLOURS),
}
_numbers = itertools.count()
_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f5f7fa; --text: #1b2430;
        --soft: #5c6878; --line: #d5dbe3; }
@media (prefers-color-scheme: dark) {
  :root { --back: #12161c; --card: #1b212a; --text: #e4e9f0; --soft: #9aa7b8; --line: #333d4b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--back);
       color: var(--text); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p { margin: 0.3rem 0; }
.cards { display: grid; gap: 1rem; align-items: start;
         grid: auto-flow / repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; padding: 0.6rem; background: var(--card); border-radius: 8px; }
figcaption { font-weight: 600; font-size: 0.9rem; }
figure svg { display: block; width: 100%; height: auto; color: var(--text); }
figure svg text { font-family: inherit !important; }
figure img { display: block; max-width: 100%; height: auto; image-rendering: pixelated; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 1rem 0.25rem 0;
         border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); } td { overflow-wrap: anywhere; min-width: 4rem; }
.chip { display: inline-block; margin: 0.15rem 0.9rem 0.15rem 0; white-space: nowrap; }
.chip i { display: inline-block; width: 0.8rem; height: 0.8rem; margin-right: 0.35rem;
          border: 1px solid var(--line); vertical-align: -0.05rem; }
.bad { color: #cf4436; }
details { margin-top: 1rem; } summary { cursor: pointer; }
pre { overflow-x: auto; background: var(--card); padding: 0.8rem; border-radius: 8px; }
"""


def policy(script: str = "") -> str:
    """A Content-Security-Policy: nothing is fetched, and no code runs but this script."""
    rules = ["default-src 'none'", "style-src 'unsafe-inline'", "img-src data: blob:"]
    rules += ["base-uri 'none'", "form-action 'none'"]
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        rules += [f"script-src 'sha256-{digest}'", "connect-src 'self'"]
    return "; ".join(rules)


def page(title: str, parts: Sequence[str], *, by: str, script: str = "") -> str:
    """The whole file; `parts` are HTML, the title is text; `by`: the command that writes it.

    The script comes after all parts.
    """
    if script:
        parts = [*parts, f"<script>{script}</script>"]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"{sign(by)}\n"
        f'<meta http-equiv="Content-Security-Policy" content="{policy(script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escaped(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escaped(title)}</h1>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def sign(by: str) -> str:
    """How a page of the command `by` begins, for whole_files.refuse_other."""
    return f'<meta name="generator" content="hvdkit {by}">'


def write(file: Path, title: str, parts: Sequence[str], *, by: str) -> None:
    """Writes a page at once: a reader finds the old one or the new one.

    Raises ValueError where a file that is no page of `by` has the name; OSError.
    """
    whole_files.refuse_other(file, sign(by))
    with whole_files.written(file) as partial:
        partial.write_text(page(title, parts, by=by), encoding="utf-8")


def escaped(text: object) -> str:
    return html.escape(records.text(text))


def section(title: str, *parts: str) -> str:
    """A heading and its parts; empty if all its parts are empty."""
    inner = "\n".join(part for part in parts if part)
    return f"<h2>{escaped(title)}</h2>\n{inner}" if inner else ""


def cards(plots: Sequence[str]) -> str:
    return f'<div class="cards">{"".join(plots)}</div>' if plots else ""


def table(rows: Sequence[Sequence[object]], head: Sequence[object] = ()) -> str:
    """A table; without a header row the first column is the header. Empty without rows."""
    if not rows:
        return ""
    lines = []
    if head:
        lines.append("".join(f"<th>{escaped(cell)}</th>" for cell in head))
    for first, *others in rows:
        tag = "td" if head else "th"
        cells = [f"<{tag}>{escaped(first)}</{tag}>"]
        cells += [f"<td>{escaped(cell)}</td>" for cell in others]
        lines.append("".join(cells))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>{body}</table></div>'


def legend(names: Sequence[str], colours: Sequence[str]) -> str:
    chips = []
    for name, colour in zip(names, colours):
        chips.append(
            f'<span class="chip"><i style="background:{colour}"></i>{escaped(name)}</span>'
        )
    return f"<p>{''.join(chips)}</p>"


def picture(file: Path, caption: str) -> str:
    """A PNG as part of the page, or why it is not shown; empty if the file does not exist."""
    if not file.exists():
        return ""
    try:
        content = whole_files.read(file, whole_files.TABLE_BYTES)
    except OSError as error:
        return escaped(f"{file.name} is not shown: {error.strerror or error}")
    data = base64.b64encode(content).decode()
    alt = escaped(caption)
    return (
        f'<figure><figcaption>{alt}</figcaption><img alt="{alt}" '
        f'src="data:image/png;base64,{data}"></figure>'
    )


@contextlib.contextmanager
def _plot(
    width: float, height: float, *, grid: bool = False
) -> Iterator[tuple[Figure, Axes]]:
    """A new figure (sizes in inches) and its axes, in the style of the pages."""
    with matplotlib.rc_context(_LOOK | {"axes.grid": grid}):
        figure = Figure((width, height), layout="constrained")
        yield figure, figure.add_subplot()


def curves(
    title: str,
    lines: Curves,
    *,
    xlabel: str = "step",
    log_x: bool = False,
    marks: Numbers = (),
) -> str:
    """Lines over one axis, as SVG; long ones are drawn as means of neighbouring points.

    `lines`: by the name in the legend. `marks`: places on the x axis with a vertical line.
    """
    with _plot(*SIZE, grid=True) as (figure, axes):
        for name, (all_x, all_y) in lines.items():
            x, y = thinned(all_x, all_y)
            is_one_point = np.isfinite(y).sum() < 2
            # The legend leaves out names that begin with an underscore.
            label = _short(f" {name}" if name.startswith("_") else name)
            axes.plot(x, y, label=label, marker="o" if is_one_point else None)
        for place in marks:
            axes.axvline(place, color=_COLOURS[1], linestyle=":")
        axes.set_xlabel(xlabel)
        if log_x:
            axes.set_xscale("log")
            # By default matplotlib writes powers of ten, which are no plain text.
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
        if len(lines) > 1:
            longest = max(len(_short(name)) for name in lines)
            columns = max(1, min(4, len(lines), _LEGEND // (6 + longest)))
            rows = math.ceil(len(lines) / columns)
            width, height = SIZE
            figure.set_size_inches(width, height + 0.2 * max(rows - 2, 0))
            figure.legend(loc="outside lower center", ncols=columns)
        return _svg(figure, title)


def bars(title: str, values: Mapping[str, float], colours: Sequence[str] = ()) -> str:
    """A bar from 0 to 1 for each name, the first on top; NaN has a note instead of a bar."""
    lengths = []
    notes = []
    for value in values.values():
        is_known = not math.isnan(value)
        lengths.append(value if is_known else 0.0)
        notes.append(f"{value:.3f}" if is_known else "none")
    with _plot(SIZE[0], 0.7 + 0.19 * len(values)) as (figure, axes):
        drawn = axes.barh(
            range(len(values)),
            lengths,
            tick_label=[_short(name) for name in values],
            color=list(colours) or _COLOURS[0],
            height=0.7,
        )
        axes.set_ylim(len(values) - 0.5, -0.5)
        axes.set_xlim(0, 1.12)
        axes.set_xticks([0, 0.5, 1])
        axes.bar_label(drawn, notes, padding=2, fontsize=9)
        return _svg(figure, title)


def matrix(title: str, counts: np.ndarray, names: Sequence[str]) -> str:
    """A confusion matrix, integer [n, n], row: label; colours show shares of the row."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    count = len(names)
    with _plot(SIZE[0], SIZE[0]) as (figure, axes):
        # Where nothing covers a place, the page's background shows.
        blue = ListedColormap(_COLOURS[:1])
        axes.imshow(np.zeros_like(shares), blue, interpolation="nearest", alpha=shares)
        axes.set_xlabel("prediction")
        axes.set_ylabel("label")
        if count <= 30:
            ticks = [_short(name) for name in names]
            axes.set_xticks(range(count), ticks, rotation=90)
            axes.set_yticks(range(count), ticks)
        if count <= 12:
            for (row, column), share in np.ndenumerate(shares):
                text = f"{share:.2f}".lstrip("0") if share >= 0.005 else ""
                colour = "white" if share > 0.5 else _INK
                axes.text(
                    column,
                    row,
                    text,
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=colour,
                )
        return _svg(figure, title)


def parallel(
    title: str,
    columns: Mapping[str, Sequence[float | str]],
    *,
    log: Collection[str] = (),
    least_is_best: bool = False,
) -> str:
    """Parallel coordinates as SVG: an axis for each column, a line for each row, the first orange.

    Texts are sorted by the alphabet; axes of the columns in `log` are logarithmic. The last column
    is a score: the better, the darker the line.
    """
    scales = [_scale(values, log=name in log) for name, values in columns.items()]
    rows = np.array([places for places, _ in scales]).T
    with _plot(max(SIZE[0], 1.3 * len(scales)), SIZE[1] + 0.5) as (figure, axes):
        for row in rows[::-1]:
            goodness = 1.0 - row[-1] if least_is_best else row[-1]
            axes.plot(row, color=_COLOURS[0], alpha=0.15 + 0.7 * goodness)
        axes.lines[-1].set(color=_COLOURS[1], alpha=1.0, linewidth=2.4)
        for x, (_, marks) in enumerate(scales):
            axes.axvline(x, color=_INK, linewidth=0.8)
            for y, text in marks.items():
                axes.text(x + 0.04, y, _short(text), va="center", fontsize=8)
        axes.set_xticks(range(len(scales)), [_short(name) for name in columns])
        axes.set_yticks([])
        axes.set_xlim(-0.1, len(scales) - 0.5)
        axes.spines[:].set_visible(False)
        return _svg(figure, title)


def _scale(
    values: Sequence[float | str], *, log: bool
) -> tuple[np.ndarray, dict[float, str]]:
    """Places from 0 to 1 on an axis, and the texts beside it."""
    if any(isinstance(value, str) for value in values):
        names = sorted({str(value) for value in values})
        place_of = {name: n / max(1, len(names) - 1) for n, name in enumerate(names)}
        marks = {place: name for name, place in place_of.items()}
        return np.array([place_of[str(value)] for value in values]), marks

    numbers = np.array(values, np.float64)
    places = np.log(numbers) if log else numbers
    places = (places - places.min()) / (np.ptp(places) or 1.0)
    low = numbers.min()
    high = numbers.max()
    marks = {0.0: f"{low:.4g}"}
    if high > low:
        marks[1.0] = f"{high:.4g}"
    return places, marks


def _short(name: str) -> str:
    """The name, cut in the middle if it is long: names of runs often differ at the end."""
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[: half - 3]}...{name[-half:]}"


def thinned(all_x: Numbers, all_y: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """At most `_MOST_POINTS` points: means of neighbours, without NaN."""
    # Matplotlib cannot divide an axis that is longer than a float holds.
    x = np.clip(np.asarray(all_x, np.float64), -1e300, 1e300)
    y = np.clip(np.asarray(all_y, np.float64), -1e300, 1e300)
    if len(x) <= _MOST_POINTS:
        return x, y
    groups = np.arange(len(x)) * _MOST_POINTS // len(x)
    counts = np.bincount(groups, np.isfinite(y))
    with np.errstate(invalid="ignore"):
        means = np.bincount(groups, np.where(np.isfinite(y), y, 0.0)) / counts
    return np.bincount(groups, x) / np.bincount(groups), means


def _svg(figure: Figure, title: str) -> str:
    """The plot for a page: no XML header, unique ids, the page's colours, its container's width."""
    file = io.StringIO()
    unique = {"svg.hashsalt": f"plot-{next(_numbers)}"}
    with warnings.catch_warnings(), matplotlib.rc_context(unique):
        # Matplotlib's fonts lack many scripts, but the browser draws the text in the page's font.
        warnings.simplefilter("ignore")
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    _, drawn = file.getvalue().split("<svg", 1)[1].split(">", 1)
    drawn = drawn.replace(_INK, "currentColor").replace(_FAINT, "var(--line)")
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    label = escaped(title)
    return (
        f'<figure><figcaption>{label}</figcaption><svg viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{label}">{drawn}</figure>'
    )
