"""What `hvdkit start` understands of a table: pictures, by name or as bytes, and their classes.

A CSV (comma, semicolon, tab or | between) or Parquet file with a line of names. One column names
pictures beside the table or below, or holds their bytes (Parquet); one holds their classes (--label
says which, where there are more); one called split may hold train, val and test.
"""

import csv
import io
import os
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from PIL import Image

from hvdkit import whole_files
from hvdkit.data import layout, spelling
from hvdkit.data.arrangement import Item
from hvdkit.data.readers import listing
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES, OTHER_SUFFIXES
from hvdkit.logs import join, printable

TABLES = (".csv", ".tsv", ".parquet")
ARRAYS = (".npy", ".npz")
_NO_PICTURES = (
    "names no picture, and start is for pictures: copy tasks/blank.py to a task of your own, whose "
    "`sources` read the columns by name (examples/tabular does)"
)
_ARRAYS = (
    "holds arrays, and start is for pictures in files: copy tasks/blank.py to a task of your own, "
    'whose `sources` return Arrays(image=np.load("FILE.npy", mmap_mode="r"), label=...)'
)
_MOST_BYTES = 2**30  # of a table of text
_MORE_BYTES = 2**30  # in the values of a Parquet file than in the file
_ROWS, _BYTES_A_VALUE = 64, 64  # at a time; in Python, besides its text
_ENDINGS = IMAGE_SUFFIXES + OTHER_SUFFIXES
_MISSING = ("", "na", "n/a", "nan", "null", "none", "?", "-")
_FORMATS = {"PNG": ".png", "JPEG": ".jpg", "MPO": ".jpg", "WEBP": ".webp"}

Column = list[Any]  # str, or the bytes of pictures
Table = dict[str, Column]


class _NoValue(str):
    """What a cell of Parquet holds instead of a single value, in words."""


def refused(path: Path) -> str:
    """Why a file without pictures is none to start from, "" for a table."""
    return f"{path} {_ARRAYS}" if path.suffix.lower() in ARRAYS else ""


def of(root: Path) -> Path | None:
    """The one table of a folder; ValueError for several, or for arrays."""
    files = [*root.glob("[!.]*"), *root.glob("[!.]*/[!.]*")]
    tables = sorted(path for path in root.glob("[!.]*") if path.suffix.lower() in TABLES)
    if len(tables) > 1:
        how = "join them into one, or give one, without the others"
        raise ValueError(f"{root} holds several tables, {join(tables)}: {how}")
    arrays = sorted(path for path in files if path.suffix.lower() in ARRAYS)
    if arrays and not tables:
        raise ValueError(refused(arrays[0]))
    return tables[0] if tables else None


def understood(path: Path, label: str, links: Path) -> list[Item]:
    """Pictures of a table with their classes; those whose bytes it holds are written below `links`.

    ValueError where a column, a file or a value does not say what it is.
    """
    try:
        table = _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8: save it as that") from None
    except (OSError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as a table: {error}") from None
    if not any(table.values()):
        raise ValueError(f"{path} holds no row: a table has a line of names, then rows")
    pictures = _stored(path, table, links) or _named(path, table, label)
    splits = _splits(path, table)
    label = _label(path, table, label)
    labels = table.pop(label)
    if table:
        print(printable(f"  not read: the columns {join(table)}"))
    beside = [other for other in path.parent.glob("[!.]*") if other.suffix.lower() in TABLES]
    if others := sorted(other.name for other in beside if other != path):
        print(printable(f"  not read: {len(others)} tables beside it, as {others[0]}"))
    _check_labels(path, labels, label)
    counts = sorted(Counter(labels).items())
    print(printable(f"  {label}: {join((f'{name} ({count})' for name, count in counts), 40)}"))
    items = []
    for split, file, name in zip(splits, pictures, labels, strict=True):
        folder = path.parent if file.is_relative_to(path.parent) else file.parent
        parts = file.relative_to(folder).with_suffix("").parts
        items.append(Item(split, "_".join(parts), file, name))
    return items


def _csv(path: Path) -> Table:
    opened = whole_files.opened(path, most=_MOST_BYTES, links=True)
    with io.TextIOWrapper(opened, encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        file.seek(0)
        between = max(",;\t|", key=first.count)
        lines = csv.reader(file, delimiter=between, strict=True)
        rows = [[text.strip() for text in line] for line in lines if line]
    names = rows.pop(0) if rows else []
    for number, row in enumerate(rows, 1):
        if len(row) != len(names):
            what = f"row {number} has {len(row)} values, the line of names {len(names)}"
            raise ValueError(f"{path}: {what}")
    _check_names(path, names)
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _check_names(path: Path, names: list[str]) -> None:
    """Raises ValueError for columns of one name, and for a first row that names none."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{path} has more than one column {join(twice)}: rename one")
    for name in names:
        is_value = name.lower().endswith(_ENDINGS) or name.isdecimal()
        if is_value or (path.parent / name).is_file():
            raise ValueError(f"{path}: its first line must name the columns; {name} is no name")


def _features(path: Path, metadata: bytes) -> dict[str, Any]:
    """What `datasets` says of each column, by name; empty where it says nothing."""
    found = whole_files.from_json(metadata, f"{path}: its text about `datasets`")
    for name in ("info", "features"):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _parquet(path: Path) -> Table:
    try:
        from pyarrow import lib, parquet
    except ImportError:
        raise ValueError(f"{path}: pip install pyarrow, which reads Parquet") from None

    try:
        with whole_files.opened(path, links=True) as opened:
            file = parquet.ParquetFile(opened)
            schema = file.schema_arrow
            _check_names(path, schema.names)
            metadata = (schema.metadata or {}).get(b"huggingface", b"{}")
            features = _features(path, metadata)
            columns = _columns(file, os.fstat(opened.fileno()).st_size + _MORE_BYTES)
    except lib.ArrowException as error:
        raise OSError(error) from None
    table = {}
    for name in schema.names:
        known = features.get(name, {})
        classes = known.get("names") if isinstance(known, dict) else None  # of datasets' ClassLabel
        if not isinstance(classes, list):
            classes = None
        table[name] = [_value(value, classes) for value in columns[name]]
    return table


def _columns(file: Any, most: int) -> Table:
    """The values of a Parquet file's columns; OSError where they need more bytes than `most`."""
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    needed = sum(group.total_byte_size for group in groups)
    columns: Table = {name: [] for name in file.schema_arrow.names}
    # A value that is stored once may be in every row, so rows are read a few at a time.
    batches = file.iter_batches(_ROWS) if needed <= most else ()
    read = 0
    for batch in batches:
        for column, part in zip(columns.values(), batch.columns, strict=True):
            values = part.to_pylist()
            read += sum(map(_bytes_of, values))
            column += values
        needed = max(needed, read)
        if needed > most:
            break
    if needed > most:
        raise OSError(f"its values need more than {most:,} bytes, so it is not read: split it")
    return columns


def _bytes_of(value: Any) -> int:
    """In Python's memory, about."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return _BYTES_A_VALUE + sum(map(_bytes_of, parts))
    return _BYTES_A_VALUE + (len(value) if isinstance(value, str | bytes) else 0)


def _value(value: Any, classes: list[str] | None) -> str | bytes:
    """A cell as text, without space around it, or as bytes; what is missing is ""."""
    if isinstance(value, dict) and {"bytes", "path"} & {*value}:  # an Image of datasets
        value = value.get("bytes") or value.get("path")
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value
    if isinstance(value, (dict, list)):
        return _NoValue(f"{value!s:.40}, no single value,")
    if classes and isinstance(value, int):
        if not 0 <= value < len(classes):
            return _NoValue(f"{value}, which is no class of 0 to {len(classes) - 1},")
        value = classes[value]
    return str(value).strip()


def _stored(path: Path, table: Table, links: Path) -> list[Path]:
    """Takes out the column of bytes, and writes each as a file; [] where there is none."""
    found = [name for name in table if any(isinstance(x, bytes) for x in table[name])]
    if len(found) > 1:
        raise ValueError(f"{path}: {join(found)} all hold bytes, and one column may hold pictures")
    if not found:
        return []
    files = []
    folder = links / ".pictures"
    folder.mkdir(parents=True)
    for number, data in enumerate(table.pop(found[0]), 1):
        try:
            ending = _FORMATS[Image.open(io.BytesIO(data or b"")).format]
        except (OSError, KeyError, TypeError):
            what = f"row {number} of {found[0]} is no PNG, JPEG or WebP"
            raise ValueError(f"{path}: {what}: convert it, or remove the row") from None
        files.append(folder / f"row{number:08}{ending}")
        files[-1].write_bytes(data)
    return files


def _named(path: Path, table: Table, label: str) -> list[Path]:
    """Takes out the column whose values are names of pictures; it is not `label`."""
    there = _pictures(path, table)
    found: dict[str, list[str]] = {}
    lost: dict[str, str] = {}
    for name, column in table.items():
        keys = [_key(path, value) for value in column]
        missing = [key for key in keys if key not in there]
        if not missing and name != label:
            found[name] = keys
        elif missing:
            near = spelling.near(missing[0], there)
            lost[name] = f"{len(missing)} pictures not beside it or below, first {missing[0]}{near}"
    for name, what in lost.items():
        are_names = any(value.lower().endswith(_ENDINGS) for value in table[name])
        if are_names or ("spelled" in what and not found):
            rule = "names must be alike to the letter, with / between folders, ids with their zeros"
            raise ValueError(f"{path}: {name} names {what}: {rule}")
    if not found:
        raise ValueError(f"{path} {_NO_PICTURES}")
    lists = {name: [min(there[key]) for key in keys] for name, keys in found.items()}
    once = [name for name, files in lists.items() if len({*files}) == len(files)]
    name = once[0] if once else max(lists, key=lambda column: len({*lists[column]}))
    for key in found[name]:
        if len(there[key]) > 1:
            raise ValueError(f"{path}: {key} may be each of {join(sorted(there[key]))}")
    _check_rows(f"{path}: {name}", lists[name], table[name])
    if different := [name for name in once if lists[name] != lists[once[0]]]:
        what = f"{once[0]} and {different[0]} name pictures, and one column may: remove the other"
        raise ValueError(f"{path}: {what}; for masks make folders images/ and masks/")
    for name in once:
        del table[name]
    unnamed = set().union(*there.values()).difference(lists[name])
    if unnamed:
        what = f"{len(unnamed):,} pictures that {once[0]} does not name, as {min(unnamed)}"
        print(printable(f"  not read: {what}"))
    return lists[once[0]]


def _check_rows(where: str, files: list[Path], spelled: list[str]) -> None:
    """Raises ValueError for a picture of two rows."""
    rows: dict[Path, int] = {}
    for row, file in enumerate(files):
        other = rows.setdefault(file, row)
        if other != row:
            both = f"rows {other + 1} and {row + 1} ({spelled[other]}, {spelled[row]})"
            what = "and one class is learned of each"
            raise ValueError(f"{where} has a picture twice, in {both}, {what}")


def _key(path: Path, name: str) -> str:
    """A picture's name in a table, from the table's folder."""
    full = os.path.normpath(path.parent / name)
    return spelling.composed(full.removeprefix(os.path.join(path.parent, "")))


def _pictures(path: Path, table: Table) -> dict[str, set[Path]]:
    """Pictures beside the table or below, by path, by name, and by name without ending."""
    files = [*path.parent.glob("*"), *path.parent.glob("*/*")]
    # All below only where pictures are named: a table may lie in a home folder.
    if any(value.lower().endswith(_ENDINGS) for column in table.values() for value in column):
        files = [*listing.files(path.parent)]
    there = defaultdict(set)
    for file in files:
        if file.suffix.lower() in IMAGE_SUFFIXES and not listing.is_of_system(file.name):
            for name in (str(file.relative_to(path.parent)), file.name, file.stem):
                there[spelling.composed(name)].add(file)
    return there


def _splits(path: Path, table: Table) -> list[str]:
    """Takes out the column called split, of train, val or test in each row; "" if there is none."""
    found = [name for name in table if name.lower() in ("split", "subset", "set", "fold")]
    if not found:
        return [""] * len(next(iter(table.values()), []))
    (name, *more) = found
    words = {value: layout.split_of(value) for value in {*table[name]}}
    if more or not all(words.values()):
        rule = "one column may say train, val or test in each row, and be called split"
        raise ValueError(f"{path}: the column {name} holds {join(sorted(words))}: {rule}")
    return [words[value] for value in table.pop(name)]


def _label(path: Path, table: Table, given: str) -> str:
    """The column of classes: that given, or the only one."""
    if given in table:
        return given
    if given or len(table) != 1:
        what = f"there is no column {given}." if given else "which column holds the classes?"
        raise ValueError(f"{path}: {what} Give --label=, of {join(table) or 'no other column'}")
    return next(iter(table))


def _check_labels(path: Path, labels: list[str], label: str) -> None:
    """Raises ValueError where they are no classes that can be folders' names."""
    for number, name in enumerate(labels, 1):
        if not name:
            what = f"row {number} has no label in the column {label}"
            raise ValueError(f"{path}: {what}: fill it in, or remove the row")
        if isinstance(name, _NoValue):
            what = f"row {number} has {name} in the column {label}"
            raise ValueError(f"{path}: {what} and a picture has one class: mend or remove the row")
        if name.lower() in _MISSING:
            what = f"row {number} has {name} as {label}, a class or nothing"
            raise ValueError(f"{path}: {what}: write the class as a word, or remove the row")
        bad = "/" in name or name.startswith(".") or not name.isprintable()
        if bad or len(os.fsencode(name)) >= 200:
            raise ValueError(f"{path}: the label {name!r} cannot be a folder's name: rename it")
        if re.fullmatch(r"[-+]?\d*\.\d*[1-9]\d*", name):
            raise ValueError(f"{path}: {label} is no class but a number: {name} in row {number}")
    classes = {*labels}
    spelling.check_classes(sorted(classes), f"{path}, {label}")
    if 2 * len(classes) > len(labels) > 20:
        raise ValueError(f"{path}: {label} is no class: {len(labels)} rows hold {len(classes)}")
    if len(classes) < 2:
        raise ValueError(f"{path}: {label} is {labels[0]} in all rows: two classes are needed")
