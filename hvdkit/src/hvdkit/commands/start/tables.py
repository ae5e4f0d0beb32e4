"""What `hvdkit start` understands of a table: pictures, by name or as bytes, and their classes.

A CSV (comma, semicolon, tab or | between) or Parquet file with a line of names. One column names
pictures beside the table or below, or holds their bytes (Parquet); one holds their classes (--label
says which, where there are more); one called split may hold train, val and test.
"""

import csv
import io
import itertools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from hvdkit import whole_files
from hvdkit.data import spelling
from hvdkit.data.prepare.arrangement import Item
from hvdkit.data.readers import layout, listing
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES, OTHER_SUFFIXES
from hvdkit.logs import join, printable

TABLES = (".csv", ".tsv", ".parquet")
ARRAYS = (".npy", ".npz")
_NO_PICTURES = (
    "names no picture, and start is for pictures: `hvdkit example tabular` copies a task that "
    "reads columns by name"
)
_ARRAYS = (
    "holds arrays, and start is for pictures in files: copy tasks/blank.py to a task of your own, "
    'whose `sources` return Arrays(image=np.load("FILE.npy", mmap_mode="r"), label=...)'
)
_MOST_BYTES = 2**30  # most bytes of a CSV file
_MORE_BYTES = 2**30  # most bytes of a Parquet file's values, beyond the file's size
_ROWS = 64  # so many rows of a Parquet file are read at a time
_BYTES_A_VALUE = 64  # so many bytes Python needs for a value besides its text
_ENDINGS = IMAGE_SUFFIXES + OTHER_SUFFIXES
_MISSING = ("", "na", "n/a", "nan", "null", "none", "?", "-")
_FORMATS = {"PNG": ".png", "JPEG": ".jpg", "MPO": ".jpg", "WEBP": ".webp"}

Column = list[Any]  # texts, or the bytes of pictures
Table = dict[str, Column]


class _NoValue(str):
    """What a cell of Parquet holds instead of a single value, in words."""


def refuse_other(path: Path) -> None:
    """Raises ValueError for a file that is no table."""
    suffix = path.suffix.lower()
    if suffix in ARRAYS:
        raise ValueError(f"{path} {_ARRAYS}")
    if suffix not in TABLES:
        raise ValueError(f"{path} is no folder, and no table ({join(TABLES)})")


def of(root: Path) -> Path | None:
    """The one table of a folder; ValueError for several, or for arrays."""
    tables = sorted(
        path for path in root.glob("[!.]*") if path.suffix.lower() in TABLES
    )
    if len(tables) > 1:
        raise ValueError(
            f"{root} holds several tables, {join(tables)}: join them into one, or give one, "
            "without the others"
        )
    if tables:
        return tables[0]
    for path in sorted([*root.glob("[!.]*"), *root.glob("[!.]*/[!.]*")]):
        if path.suffix.lower() in ARRAYS:
            refuse_other(path)
    return None


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
    others = sorted(file.name for file in path.parent.glob("[!.]*") if file != path)
    tables = [name for name in others if Path(name).suffix.lower() in TABLES]
    if tables:
        print(printable(f"  not read: {len(tables)} tables beside it, as {tables[0]}"))
    _check_labels(path, labels, label)
    counts = [f"{name} ({count})" for name, count in sorted(Counter(labels).items())]
    print(printable(f"  {label}: {join(counts, 40)}"))
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
        delimiter = max(",;\t|", key=first.count)
        lines = csv.reader(file, delimiter=delimiter, strict=True)
        rows = [[text.strip() for text in line] for line in lines if line]
    names = rows.pop(0) if rows else []
    for number, row in enumerate(rows, 1):
        if len(row) != len(names):
            raise ValueError(
                f"{path}: row {number} has {len(row)} values, the line of names {len(names)}"
            )
    _check_names(path, names)
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _check_names(path: Path, names: list[str]) -> None:
    """Raises ValueError for columns of one name, and for a first row that names none."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(
            f"{path} has more than one column {join(repeated)}: rename one"
        )
    for name in names:
        is_value = _is_picture(name) or name.isdecimal()
        if is_value or (path.parent / name).is_file():
            raise ValueError(
                f"{path}: its first line must name the columns; {name} is no name"
            )


def _features(path: Path, metadata: bytes) -> dict[str, Any]:
    """What `datasets` says of each column, by name; empty where it says nothing."""
    description = whole_files.from_json(metadata, f"{path}: its text about `datasets`")
    for name in ("info", "features"):
        if not isinstance(description, dict):
            return {}
        description = description.get(name)
    return description if isinstance(description, dict) else {}


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
        feature = features.get(name)
        # A feature of the kind ClassLabel has names.
        classes = feature.get("names") if isinstance(feature, dict) else None
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
            read += sum(_bytes_of(value) for value in values)
            column += values
        needed = max(needed, read)
        if needed > most:
            break
    if needed > most:
        raise OSError(
            f"its values need more than {most:,} bytes, so it is not read: split it"
        )
    return columns


def _bytes_of(value: Any) -> int:
    """What a value needs in Python's memory, about."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return _BYTES_A_VALUE + sum(_bytes_of(part) for part in value)
    return _BYTES_A_VALUE + (len(value) if isinstance(value, str | bytes) else 0)


def _value(value: Any, classes: list[str] | None) -> str | bytes:
    """A cell as text, without space around it, or as bytes; what is missing is ""."""
    # The library datasets writes an Image so.
    if isinstance(value, dict) and {"bytes", "path"} & {*value}:
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
    columns = [
        name for name in table if any(isinstance(value, bytes) for value in table[name])
    ]
    if len(columns) > 1:
        raise ValueError(
            f"{path}: {join(columns)} all hold bytes, and one column may hold pictures"
        )
    if not columns:
        return []
    (column,) = columns
    files = []
    folder = links / ".pictures"
    folder.mkdir(parents=True)
    for number, data in enumerate(table.pop(column), 1):
        try:
            ending = _FORMATS[Image.open(io.BytesIO(data or b"")).format]
        except (OSError, KeyError, TypeError):
            raise ValueError(
                f"{path}: row {number} of {column} is no PNG, JPEG or WebP: convert it, or remove "
                "the row"
            ) from None
        file = folder / f"row{number:08}{ending}"
        file.write_bytes(data)
        files.append(file)
    return files


def _named(path: Path, table: Table, label: str) -> list[Path]:
    """Takes out the column whose values are names of pictures; it is not `label`."""
    there = _pictures(path, table)
    keys_of = _columns_of_names(path, table, there, label)
    files_of = {}
    for column, keys in keys_of.items():
        files_of[column] = [min(there[key]) for key in keys]
    # Columns that name each picture once; another may be an id that several rows share.
    unique = [
        column for column, files in files_of.items() if len({*files}) == len(files)
    ]
    most_distinct = max(files_of, key=lambda name: len({*files_of[name]}))
    column = unique[0] if unique else most_distinct
    files = files_of[column]
    for key in keys_of[column]:
        if len(there[key]) > 1:
            raise ValueError(f"{path}: {key} may be each of {join(sorted(there[key]))}")
    _check_rows(f"{path}: {column}", files, table[column])
    for other in unique:
        if files_of[other] != files:
            raise ValueError(
                f"{path}: {column} and {other} name pictures, and one column may: remove the "
                "other; for masks make folders images/ and masks/"
            )
        del table[other]
    unnamed = set().union(*there.values()).difference(files)
    if unnamed:
        print(
            printable(
                f"  not read: {len(unnamed):,} pictures that {column} does not name, as "
                f"{min(unnamed)}"
            )
        )
    return files


def _columns_of_names(
    path: Path, table: Table, there: dict[str, set[Path]], label: str
) -> dict[str, list[str]]:
    """By column that names pictures, but for `label`: keys of `there`.

    Raises ValueError: no column does, or one names pictures that are not there.
    """
    keys_of: dict[str, list[str]] = {}
    lost_of: dict[str, list[str]] = {}
    for column, values in table.items():
        keys = [_key(path, value) for value in values]
        lost = [key for key in keys if key not in there]
        if lost:
            lost_of[column] = lost
        elif column != label:
            keys_of[column] = keys
    for column, lost in lost_of.items():
        near = spelling.near(lost[0], there)
        are_names = any(_is_picture(value) for value in table[column])
        if are_names or (near and not keys_of):
            raise ValueError(
                f"{path}: {column} names {len(lost)} pictures not beside it or below, first "
                f"{lost[0]}{near}: names must be alike to the letter, with / between folders, ids "
                "with their zeros"
            )
    if not keys_of:
        raise ValueError(f"{path} {_NO_PICTURES}")
    return keys_of


def _check_rows(where: str, files: list[Path], names: list[str]) -> None:
    """Raises ValueError for a picture of two rows; `names`: as the table has them."""
    rows: dict[Path, int] = {}
    for row, file in enumerate(files):
        other = rows.setdefault(file, row)
        if other != row:
            raise ValueError(
                f"{where} has a picture twice, in rows {other + 1} and {row + 1} "
                f"({names[other]}, {names[row]}), and one class is learned of each"
            )


def _key(path: Path, name: str) -> str:
    """A picture's name in a table, from the table's folder."""
    full = os.path.normpath(path.parent / name)
    return spelling.composed(full.removeprefix(os.path.join(path.parent, "")))


def _pictures(path: Path, table: Table) -> dict[str, set[Path]]:
    """Pictures beside the table or below, by path, by name, and by name without ending."""
    # All below only where pictures are named: a table may lie in a home folder.
    files: Iterable[Path]
    if any(
        _is_picture(value) for value in itertools.chain.from_iterable(table.values())
    ):
        files = listing.files(path.parent)
    else:
        files = [*path.parent.glob("*"), *path.parent.glob("*/*")]
    there = defaultdict(set)
    for file in files:
        if file.suffix.lower() in IMAGE_SUFFIXES and not listing.is_of_system(
            file.name
        ):
            for name in (str(file.relative_to(path.parent)), file.name, file.stem):
                there[spelling.composed(name)].add(file)
    return there


def _is_picture(name: str) -> bool:
    return name.lower().endswith(_ENDINGS)


def _splits(path: Path, table: Table) -> list[str]:
    """Takes out the column called split, of train, val or test in each row; "" if there is none."""
    columns = [
        name for name in table if name.lower() in ("split", "subset", "set", "fold")
    ]
    if not columns:
        return [""] * len(next(iter(table.values()), []))
    column = columns[0]
    split_of = {value: layout.split_of(value) for value in {*table[column]}}
    if len(columns) > 1 or not all(split_of.values()):
        raise ValueError(
            f"{path}: the column {column} holds {join(sorted(split_of))}: one column may say "
            "train, val or test in each row, and be called split"
        )
    return [split_of[value] for value in table.pop(column)]


def _label(path: Path, table: Table, given: str) -> str:
    """The column of classes: that given, or the only one."""
    if given in table:
        return given
    if len(table) == 1 and not given:
        return next(iter(table))
    others = join(table) or "no other column"
    if given:
        raise ValueError(
            f"{path}: there is no column {given}. Give --label=, of {others}"
        )
    raise ValueError(
        f"{path}: which column holds the classes? Give --label=, of {others}"
    )


def _check_labels(path: Path, labels: list[str], label: str) -> None:
    """Raises ValueError where they are no classes that can be folders' names."""
    for number, name in enumerate(labels, 1):
        if not name:
            raise ValueError(
                f"{path}: row {number} has no label in the column {label}: fill it in, or remove "
                "the row"
            )
        if isinstance(name, _NoValue):
            raise ValueError(
                f"{path}: row {number} has {name} in the column {label} and a picture has one "
                "class: mend or remove the row"
            )
        if name.lower() in _MISSING:
            raise ValueError(
                f"{path}: row {number} has {name} as {label}, a class or nothing: write the class "
                "as a word, or remove the row"
            )
        is_name = "/" not in name and not name.startswith(".") and name.isprintable()
        if not is_name or len(os.fsencode(name)) >= 200:
            raise ValueError(
                f"{path}: the label {name!r} cannot be a folder's name: rename it"
            )
        if re.fullmatch(r"[-+]?\d*\.\d*[1-9]\d*", name):
            raise ValueError(
                f"{path}: {label} is no class but a number: {name} in row {number}"
            )
    classes = {*labels}
    spelling.check_classes(sorted(classes), f"{path}, {label}")
    if 2 * len(classes) > len(labels) > 20:
        raise ValueError(
            f"{path}: {label} is no class: {len(labels)} rows hold {len(classes)}"
        )
    if len(classes) < 2:
        raise ValueError(
            f"{path}: {label} is {labels[0]} in all rows: two classes are needed"
        )
