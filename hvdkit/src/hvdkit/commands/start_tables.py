"""What `hvdkit start` understands of a table: a list of pictures and their classes, or features."""

import os
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from hvdkit.data import arrangement, tables
from hvdkit.data.arrangement import Item
from hvdkit.data.check import Counts
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES, OTHER_SUFFIXES
from hvdkit.logs import join, printable

LABELS = ["label", "labels", "class", "classes", "target", "category", "species", "y"]
_MOST_WORDS = 100  # different ones in a column of features

Table = dict[str, list[str]]


def of(root: Path) -> Path | None:
    """The one table of a folder; ValueError for several."""
    there = sorted(root.glob("[!.]*"))
    found = [path for path in there if path.suffix.lower() in tables.SUFFIXES]
    if len(found) > 1:
        raise ValueError(f"{root} holds several tables: give one of {join(found)}")
    return found[0] if found else None


def understood(path: Path, label: str) -> tuple[list[Item], Table]:
    """Pictures of a table with their classes, and {}; or rows, by number, and the features.

    ValueError where a column, a file or a value does not say what it is.
    """
    table = tables.read(path)
    splits = _splits(table)
    pictures, files = _pictures(path, table)
    label = _label(path, {name: c for name, c in table.items() if name != pictures}, label)
    labels = table.pop(label)
    classes = tables.classes(labels)
    values, counts = tables.numbers(classes), Counter(labels)
    shown = ", ".join(f"{name} ({counts[name]})" for name in classes[:40])
    print(printable(f"  {label}: {shown}"))
    if (values is not None and (values % 1).any()) or 2 * len(classes) > len(labels) > 20:
        raise ValueError(f"{path}: {label} is no class but a number: see examples/regression")
    if len(classes) < 2:
        raise ValueError(f"{path}: {label} is {classes[0]} in all rows: two classes are needed")
    if pictures:
        checked(path, labels)
        names = ["_".join(file.relative_to(path.parent).with_suffix("").parts) for file in files]
        return [Item(*of) for of in zip(splits, names, files, labels)], {}
    table = dict(_features(table))
    if not table:
        raise ValueError(f"{path}: no column but {label} tells rows apart")
    if "label" in table:
        raise ValueError(f"{path}: {label} is the label: rename the column label")
    numbers = map(str, range(len(labels)))
    items = [Item(of, row, Path(row), label) for of, row, label in zip(splits, numbers, labels)]
    return items, table | {"label": labels}


def _pictures(path: Path, table: Table) -> tuple[str, list[Path]]:
    """The column whose values are names of pictures beside the table or below, and these."""
    endings, found, there = IMAGE_SUFFIXES + OTHER_SUFFIXES, [], defaultdict(set)
    files = [*path.parent.glob("*"), *path.parent.glob("*/*")]
    # All below only where pictures are named: a table may lie in a home folder.
    if any(value.lower().endswith(endings) for column in table.values() for value in column):
        files = [file for file, _ in arrangement.files(path.parent)]
    for file in files:
        if file.suffix.lower() in IMAGE_SUFFIXES:
            for name in (str(file.relative_to(path.parent)), file.name, file.stem):
                there[name].add(file)
    for name, column in table.items():
        lost = [value for value in column if value not in there]
        if lost and any(value.lower().endswith(endings) for value in column):
            what = f"{len(lost)} pictures that are not beside it or below, first {lost[0]}"
            rule = "names must be alike to the letter, with / between folders"
            raise ValueError(f"{path}: {name} names {what}: {rule}")
        found += [] if lost else [name]
    if not found:
        return "", []
    column = table[name := max(found, key=lambda name: len({*table[name]}))]
    if twice := next((value for value in column if len(there[value]) > 1), ""):
        raise ValueError(f"{path}: {twice} may be each of {join(sorted(there[twice]))}")
    if len({*column}) < len(column):
        raise ValueError(f"{path}: {name} has a picture twice, and one class is learned of each")
    return name, [next(iter(there[value])) for value in column]


def _label(path: Path, columns: Table, given: str) -> str:
    """The column of labels: that given, the one so called, or the only one."""
    found = [name for name in columns if name.lower() in LABELS] or [*columns]
    found = [given] if given else found
    if len(found) != 1 or found[0] not in columns:
        what = f"there is no column {given}." if given else "which column is the label?"
        raise ValueError(f"{path}: {what} Give --label=, of {join([*columns])}")
    return found[0]


def _splits(table: Table) -> list[str]:
    """Takes out the column that holds train, val or test in each row; "" if there is none."""
    for name, column in table.items():
        words = {value: arrangement.split_of(value) for value in {*column}}
        if all(words.values()):
            return [words[value] for value in table.pop(name)]
        if name.lower() == "split":
            found = join(sorted(words))
            raise ValueError(f"the column {name} holds {found}: give train, val or test")
    return [""] * len(next(iter(table.values()), []))


def checked(path: Path, labels: list[str]) -> set[str]:
    """The different labels, which become names of folders; ValueError for one that cannot."""
    for label in (found := {*labels}):
        bad = "/" in label or label.startswith(".") or not label.isprintable()
        if bad or not 0 < len(os.fsencode(label)) < 200:
            raise ValueError(f"{path}: the label {label!r} cannot be a folder's name: rename it")
    return found


def _features(table: Table) -> Table:
    """The columns to learn from; says of each what it is."""
    found = {}
    for name, column in table.items():
        values, different = tables.numbers(column), len({*column})
        counts = values is not None and different > 2 and (np.diff(values) == 1).all()
        counts = counts and values[0] % 1 == 0
        if different == 1:
            words = "left out: it has one value"
        elif counts or (values is None and different > _MOST_WORDS):
            shown = f"{different} words, such as {join(column[:2])}"
            words = f"left out: {'a number of rows' if counts else shown}"
        else:
            found[name] = column
            words = f"{different} words: {join([x or 'none' for x in tables.ordered(column)], 4)}"
            if values is not None:
                low, high = np.nanmin(values), np.nanmax(values)
                words = f"numbers, {low:g} to {high:g}, {np.isnan(values).sum()} missing"
        print(printable(f"  {name}: {words}"))
    return found


def counted(classes: list[str], labels: list[str]) -> Counts:
    """Rows of each class."""
    found = Counts(len(classes), "row")
    for label in labels:
        found.of[classes.index(label)] += 1
    found.sizes = [(1, 1)] * len(labels)
    return found


def write(items: list[Item], table: Table, folder: Path) -> None:
    """Rows of each split as a table."""
    for split in ("train", "val"):
        rows = [int(str(item.picture)) for item in items if item.split == split]
        own = {name: [column[row] for row in rows] for name, column in table.items()}
        folder.mkdir(parents=True, exist_ok=True)
        tables.write(folder / f"{split}.csv", own)
