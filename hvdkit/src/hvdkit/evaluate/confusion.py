"""A confusion matrix as a file, and the figures of each class."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import whole_files
from hvdkit.evaluate import metrics


def class_names(source: Any, count: int) -> list[str]:
    """The data's class names, or the numbers of the classes if their count does not match."""
    names = [str(name) for name in getattr(source, "class_names", None) or []]
    return names if len(names) == count else [str(number) for number in range(count)]


def write(file: Path, names: Sequence[str], confusion: np.ndarray) -> None:
    """As CSV; confusion: integer [n, n], row: label, column: prediction."""
    how = {"newline": "", "encoding": "utf-8", "errors": "surrogateescape"}
    with whole_files.written(file) as partial, partial.open("w", **how) as opened:
        writer = csv.writer(opened)
        writer.writerow(["label \\ prediction", *names])
        writer.writerows([name, *row] for name, row in zip(names, confusion.tolist()))


def read(file: Path) -> tuple[list[str], np.ndarray]:
    """Names, and the matrix, int64 [n, n]; raises ValueError, naming the file."""
    try:
        with file.open(newline="", encoding="utf-8", errors="surrogateescape") as opened:
            (_, *names), *rows = csv.reader(opened)
        counts = np.array([[int(cell) for cell in row[1:]] for row in rows], np.int64)
        if counts.shape != (len(names), len(names)):
            raise ValueError(f"{len(names)} names, {counts.shape}")
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{file} holds no confusion matrix ({error}): remove the file") from None
    return names, counts


def classes(confusion: np.ndarray) -> dict[str, list[float]]:
    """Figures of each class from a confusion matrix (row: label), NaN where undefined."""
    hits = np.diag(confusion).astype(np.float64)
    labels, predictions = confusion.sum(1), confusion.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {"labels": labels, "recall": hits / labels, "precision": hits / predictions}
    found["iou"] = metrics.intersection_over_union(confusion)
    return {name: values.tolist() for name, values in found.items()}
