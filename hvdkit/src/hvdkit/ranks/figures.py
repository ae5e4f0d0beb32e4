"""Figures of an array, by which ranks, or a run and its checkpoint, compare what should be equal.

Hosts of another kind round otherwise, so digests of bytes would not do.
"""

from collections.abc import Sequence

import numpy as np

NUM_FIGURES = 5
_LABELS = 64  # Whole numbers of so small arrays are labels: each digit counts.
_MOST = 1e30  # Sums of larger numbers would be no numbers.
_MOST_NUMBERS = (
    2**22
)  # Of a larger array some numbers, evenly spread: copies need memory.


def figures_of(values: np.ndarray) -> list[float]:
    """Mean; mean weighted by place; mean of sizes; number; whether each digit counts."""
    if not values.size:
        return [0.0, 0.0, 0.0, 0.0, 0.0]
    is_exact = values.dtype.kind in "biu" and values.size <= _LABELS
    some = values.ravel()[:: -(-values.size // _MOST_NUMBERS)].astype(np.float64)
    numbers = np.nan_to_num(some).clip(-_MOST, _MOST)
    by_place = numbers * np.linspace(1.0, 2.0, numbers.size)
    size = np.mean(np.abs(numbers))
    means = [np.mean(numbers), np.mean(by_place), size]
    return [*(float(mean) for mean in means), float(values.size), float(is_exact)]


def differ(one: Sequence[float], other: Sequence[float], *, near: float) -> bool:
    """Whether figures differ by more than `near`, relative to the mean size."""
    mean, by_place, size, number, is_exact = one
    other_mean, other_by_place, _, other_number, _ = other
    if number != other_number:
        return True
    least = 1e-9 if is_exact else near * size + 1e-6
    return abs(mean - other_mean) > least or abs(by_place - other_by_place) > least
