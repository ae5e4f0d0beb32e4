"""hvdkit/run/sample_figures.py: which parts of an example are steady, and what is kept of them."""

import numpy as np
import tensorflow as tf

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
