"""hvdkit/run/sample_figures.py: which parts of an example are steady, and what is kept of them."""

from functools import partial

import numpy as np
import tensorflow as tf

from hvdkit.ranks import agreement
from hvdkit.run import sample_figures


def example(text: str, number: float) -> dict:
    inputs = {
        "text": tf.constant([text, "b"]),
        "ids": tf.ragged.constant([[1], [2, 3]]),
    }
    return {"inputs": inputs, "targets": tf.constant(number)}


def test_parts_are_compared_by_content_also_texts_and_what_is_no_number():
    steady = sample_figures._steady
    nan = float("nan")
    assert {*steady(example("a", nan), example("a", nan))} == {"inputs", "targets"}
    assert {*steady(example("a", 1.0), example("c", 1.0))} == {"targets"}
    assert {*steady(example("a", 1.0), example("a", 2.0))} == {"inputs"}


def test_texts_have_no_figures_and_labels_count_to_the_digit():
    parts = sample_figures._steady(example("a", np.inf), example("a", np.inf))
    figures = sample_figures._described("sample 0", parts)
    # A ragged tensor is its values and its rows.
    assert len(figures) == 3 and all(np.isfinite(list(figures.values())).ravel())
    one, other = (
        sample_figures.figures_of(np.array([label, 7])) for label in (5000, 5001)
    )
    assert sample_figures.differ(one, other, near=0.05)
    assert not sample_figures.differ(one, one, near=0.0)


def test_a_large_array_is_looked_at_in_places_and_has_all_of_its_numbers():
    one, other = (np.zeros(2**22 + size, np.float16) for size in (1, 2))
    figures = [sample_figures.figures_of(values) for values in (one, other)]
    assert [number for *_, number, _ in figures] == [one.size, other.size]
    assert sample_figures.differ(*figures, near=1.0)


def test_the_same_tables_in_any_order_are_the_same():
    # Their means, by which one would sort them, are 0 but for rounding.
    waves = np.sin(np.arange(8) * np.pi / 4), np.cos(np.arange(8) * np.pi / 4)
    one, other, third = (
        sample_figures.figures_of(values) for values in (*waves, 2 * waves[0])
    )
    same = partial(agreement._are_the_same, near=1e-3)
    assert same([one, other, one], [one, one, other])
    assert not same([one, other], [one, one]) and not same([one], [one, one])
    assert not same([one], []) and not same([one], [third])
