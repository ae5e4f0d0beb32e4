"""Self-contained HTML pages, for report.py and compare.py."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from hvdkit import whole_files

_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f5f7fa; --text: #1b2430;
        --soft: #5c6878; --line: #d5dbe3; --link: #1c62b0; }
@media (prefers-color-scheme: dark) {
  :root { --back: #12161c; --card: #1b212a; --text: #e4e9f0; --soft: #9aa7b8; --line: #333d4b;
          --link: #7db4f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--back);
       color: var(--text); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p { margin: 0.3rem 0; } .soft { color: var(--soft); }
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
.good { color: #1d8a55; } .bad { color: #cf4436; }
details { margin-top: 1rem; } summary { cursor: pointer; }
pre { overflow-x: auto; background: var(--card); padding: 0.8rem; border-radius: 8px; }
"""
_ICON = "data:,"  # empty: otherwise a browser requests one


def page(title: str, parts: Sequence[str]) -> str:
    """The whole file; `parts` are HTML, the title is text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="{_ICON}">\n<title>{escaped(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escaped(title)}</h1>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def escaped(text: object) -> str:
    """As HTML; bytes that are not text (in file names) become question marks."""
    return html.escape(str(text).encode("utf-8", "replace").decode())


def section(title: str, *parts: str) -> str:
    """Empty if all its parts are."""
    inner = "\n".join(part for part in parts if part)
    return f"<h2>{escaped(title)}</h2>\n{inner}" if inner else ""


def cards(plots: Sequence[str]) -> str:
    return f'<div class="cards">{"".join(plots)}</div>' if plots else ""


def table(rows: Sequence[Sequence[object]], head: Sequence[object] = ()) -> str:
    """Without a header row the first column is the header."""
    if not rows:
        return ""
    lines = [_row(head, "th", "th")] if head else []
    lines += [_row(row, "td" if head else "th", "td") for row in rows]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def legend(names: Sequence[str], colours: Sequence[str]) -> str:
    chips = (
        f'<span class="chip"><i style="background:{colour}"></i>{escaped(name)}</span>'
        for name, colour in zip(names, colours)
    )
    return f"<p>{''.join(chips)}</p>"


def picture(file: Path, caption: str) -> str:
    """A PNG, inside the page; empty if the file does not exist."""
    if not file.exists():
        return ""
    data = base64.b64encode(file.read_bytes()).decode()
    alt = escaped(caption)
    return (
        f"<figure><figcaption>{alt}</figcaption>"
        f'<img alt="{alt}" src="data:image/png;base64,{data}"></figure>'
    )


def write(file: Path, text: str) -> None:
    """Atomic: a reader finds the old page or the new one."""
    with whole_files.written(file) as partial:
        partial.write_text(text, encoding="utf-8")


def _row(cells: Sequence[object], first: str, others: str) -> str:
    kinds = [first, *([others] * (len(cells) - 1))]
    return "<tr>" + "".join(f"<{k}>{escaped(c)}</{k}>" for k, c in zip(kinds, cells)) + "</tr>"
