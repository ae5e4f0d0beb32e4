"""Tables by column: CSV with a line of names (comma, semicolon or tab between), and Parquet.

Parquet takes pyarrow, which this package does not ask for: pip install pyarrow
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hvdkit import whole_files
from hvdkit.logs import join

SUFFIXES = (".csv", ".tsv", ".parquet")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_COMMA = re.compile(r"([-+]?\d*),(\d+)")
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2},\d{3}")
_MISSING = ("", "na", "n/a", "nan", "null", "none", "?", "-")
_NO_LABEL = {*_MISSING} - {"none", "-"}  # which may be classes


def read(path: Path) -> dict[str, list[str]]:
    """Columns by name, as text without space around it; what is missing is "".

    Raises ValueError for what is no table, naming the line where a row has another length.
    """
    try:
        names, rows = (_parquet if path.suffix.lower() == ".parquet" else _csv)(path)
    except ImportError:
        raise ValueError(f"{path}: pip install pyarrow, which reads Parquet") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8: save it as that") from None
    except (OSError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as a table: {error}") from None
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{path} has more than one column {join(twice)}: rename one")
    if not rows:
        raise ValueError(f"{path} holds no row: a table has a line of names, then rows")
    return dict(zip(names, map(list, zip(*rows))))


def _csv(path: Path) -> tuple[list[str], list[list[str]]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        file.seek(0)
        between = max(",;\t|", key=first.count)
        lines = csv.reader(file, delimiter=between, strict=True)
        names, *rows = [[text.strip() for text in line] for line in lines if line] or [[]]
    if number := next((n for n in names if "." in n and _NUMBER.fullmatch(n)), ""):
        raise ValueError(f"{path}: its first line must name the columns; {number} is no name")
    for number, row in enumerate(rows, 1):
        if len(row) != len(names):
            what = f"row {number} has {len(row)} values, the line of names {len(names)}"
            raise ValueError(f"{path}: {what}")
    if between == ",":
        return names, rows
    for name, column in zip(names, zip(*rows)):
        commas = [x for x in column if _COMMA.fullmatch(x)]
        others = any(map(_NUMBER.fullmatch, column))  # thousands begin at 1,000
        if commas and others and all(map(_THOUSANDS.fullmatch, commas)):
            ways = [commas[0].replace(",", between) for between in ("", ".")]
            what = f"{commas[0]} of {name} may be {' or '.join(ways)}: write one of these"
            raise ValueError(f"{path}: {what}")
    return names, [[_COMMA.sub(r"\1.\2", x) if _COMMA.fullmatch(x) else x for x in r] for r in rows]


def _parquet(path: Path) -> tuple[list[str], list[list[str]]]:
    from pyarrow import lib, parquet

    try:
        table = parquet.read_table(path)
    except lib.ArrowException as error:
        raise OSError(error) from None
    columns = [["" if x is None else str(x) for x in c.to_pylist()] for c in table.columns]
    return table.column_names, [*map(list, zip(*columns))]


def numbers(column: Sequence[str]) -> np.ndarray | None:
    """float64, NaN where one is missing; None where the column is none of finite numbers."""
    texts = ["nan" if text.lower() in _MISSING else text for text in column]
    if {*texts} == {"nan"} or not all(x == "nan" or _NUMBER.fullmatch(x) for x in texts):
        return None
    found = np.array([*map(float, texts)])
    return None if np.isinf(found).any() else found


def ordered(values: Iterable[str]) -> list[str]:
    """The different ones in order, numbers by size."""
    found = sorted({*values})
    by_size = numbers(found)
    return found if by_size is None else [found[i] for i in np.argsort(by_size, kind="stable")]


def classes(column: Sequence[str]) -> list[str]:
    """A column's labels, `ordered`; ValueError where a row has none."""
    if row := next((n for n, x in enumerate(column, 1) if x.lower() in _NO_LABEL), 0):
        raise ValueError(f"row {row} has no label: fill it in, or remove the row")
    return ordered(column)


def write(path: Path, columns: Mapping[str, Sequence[str]]) -> None:
    """As CSV."""
    with whole_files.written(path) as partial, open(partial, "w", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([[*columns], *zip(*columns.values())])
