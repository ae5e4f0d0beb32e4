"""A step tried before the first one: on a few samples at once, and on parts of them.

The step is run as it is written, outside of graphs: on one rank, and on two that are simulated
(simulated_ranks.py), or, where a rank accumulates, in two micro-batches. The sums of its losses,
its gradients and its state must come out alike, or ranks would compute something else than one.
Batch norm is at rest meanwhile, every row draws the same random numbers, and the optimizer is plain
SGD: it makes no large step of a rounding error.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data.sampler import share
from hvdkit.train import batch_norm, combine, dropout, simulated_ranks
from hvdkit.train import gradients as gradients_lib
from hvdkit.train.task import Example

_OTHERS = (
    "a sample depends on others of its batch, which ranks, virtual ranks and micro-batches divide. "
    "Bring them together with hvdkit.train.across.gather, or use one rank"
)


class Part(NamedTuple):
    """Which part of a trial's batch a run of the step computes."""

    rank: int
    samples: Sequence[int]  # of each rank
    steps: int = 1  # micro-batches
    combines: bool = True  # whether rules combine state


class Outcome(NamedTuple):
    """What a run of the step leaves."""

    state: dict[str, np.ndarray]
    means: list[np.ndarray | None]  # gradients, over all ranks
    sums: list[np.ndarray]  # of each of its losses, `gradients.Forward`
    terms: Sequence[str]  # their names


class Plan(NamedTuple):
    """How a step is tried.

    `samples` in all; `by_ranks`: on two ranks; `by_steps`: in two micro-batches; `near`: relative
    difference that sums in another order may have; `whose`: loss it is, for messages.
    """

    samples: int
    by_ranks: bool
    by_steps: bool
    near: float
    whose: str


def samples_of(most: int, uneven: bool) -> int:
    """How many samples to try, so that a rank that holds `most` has the memory for them."""
    if uneven:
        return 5 if most >= 5 else 3
    return 4 if most >= 4 else 2


@contextlib.contextmanager
def at_rest(layers: Sequence[keras.Layer]) -> Iterator[None]:
    """Inside, functions run eagerly, and no sample's outputs depend on its place or on others."""
    eager = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        with batch_norm.at_rest(layers), dropout.same_in_each_row(layers):
            yield
    finally:
        tf.config.run_functions_eagerly(eager)


def compare(
    plan: Plan,
    examples: Sequence[Example],
    run: Callable[[Example, Part], Outcome],
    *,
    combiner: combine.Combiner,
) -> list[str]:
    """Runs the step on the whole and on parts; notes, a sentence each.

    Raises ValueError where they do not come out alike.
    """
    count = plan.samples

    def batch(first: int, last: int, steps: int = 1) -> Example:
        def stacked(*rows: tf.Tensor) -> tf.Tensor:
            return tf.reshape(tf.stack(rows), [steps, -1, *rows[0].shape])

        return tf.nest.map_structure(stacked, *examples[first:last])

    def on_ranks(sizes: Sequence[int], *, steps: int = 1, combines: bool = True) -> list[Outcome]:
        def on_rank(rank: int) -> Outcome:
            part = Part(rank, sizes, steps, combines)
            return run(batch(*share(count, rank, len(sizes)), steps), part)

        return simulated_ranks.outcomes(on_rank, sizes)

    before = combiner.values()
    (whole,) = on_ranks([count])
    if plan.by_steps:
        parts = on_ranks([count], steps=2)
        _check_sums(plan, whole, parts)
        _check_gradients(plan, whole, parts[0])
    if not plan.by_ranks:
        return []
    bounds = [share(count, rank, 2) for rank in range(2)]
    sizes = [last - first for first, last in bounds]
    parts = on_ranks(sizes)
    _check_sums(plan, whole, parts)
    notes = []
    wrong = _different_state(before, whole, parts, near=plan.near)
    if wrong:
        as_they_are = on_ranks(sizes, combines=False)
        still = _different_state(before, whole, as_they_are, near=plan.near)
        notes = combiner.judge(wrong, set(wrong) - set(still))
    _check_gradients(plan, whole, parts[0])
    return notes


def _check_sums(plan: Plan, whole: Outcome, parts: Sequence[Outcome]) -> None:
    """Raises ValueError where sums of the whole batch are not those of its parts added up."""
    for number, sums in enumerate(whole.sums):
        of_parts = [part.sums[number] for part in parts]
        added = sum(of_parts)
        sizes = sum(np.abs(part) for part in of_parts)
        if _is_apart(sums[-1], added[-1], plan.near * (sizes[-1] + plan.near)):
            raise ValueError(
                f"the losses that the model adds (add_loss, activity regularizers) are "
                f"{sums[-1]:.6g} for {plan.samples} samples together, and {added[-1]:.6g} as the "
                "mean of two parts of them: make each a mean over the samples of its batch "
                "(tf.reduce_mean), or, where it compares samples, compute it from the rows of all "
                "ranks (hvdkit.train.across.gather)"
            )
        by_term = [gradients_lib.of_terms(x) for x in (sums, added, sizes)]
        for name, one, other, size in zip(whole.terms, *by_term):
            for figure, what in enumerate(("losses", "weights")):
                if _is_apart(one[figure], other[figure], plan.near * (1 + size[figure])):
                    raise ValueError(
                        f"{plan.whose}{what}{name and ' ' + name} of {plan.samples} samples "
                        f"together is {one[figure]:.6g}, and {other[figure]:.6g} in two parts: "
                        f"{_OTHERS}"
                    )


def _is_apart(one: float, other: float, least: float) -> bool:
    if np.isnan(one) or np.isnan(other):
        return bool(np.isnan(one) != np.isnan(other))
    return bool(one != other and not abs(one - other) <= least)


def _check_gradients(plan: Plan, whole: Outcome, part: Outcome) -> None:
    """Raises ValueError where the step updates by other gradients."""
    pairs = []
    for one, other in zip(whole.means, part.means):
        known = one is not None and other is not None
        if known and np.isfinite(one).all():  # float16's first loss scale may be too large
            pairs.append((np.float64(one), np.float64(other)))
    size = np.sqrt(sum(np.sum(np.square(g)) for g, _ in pairs))
    for one, other in pairs:
        least = plan.near * (np.linalg.norm(one) + 1e-3 * size) + 1e-12
        if _is_apart(np.linalg.norm(one - other), 0.0, least):
            raise ValueError(
                f"{plan.whose}gradient of {plan.samples} samples together, of norm "
                f"{np.linalg.norm(one):.6g} for a weight of shape {list(one.shape)}, differs by "
                f"{np.linalg.norm(one - other):.6g} from that of two parts: {_OTHERS}. What the "
                "step does to a rank's own gradients before their sum must be linear (a factor, "
                "not a norm to clip by)"
            )


def _different_state(
    before: dict[str, np.ndarray], whole: Outcome, parts: Sequence[Outcome], *, near: float
) -> list[str]:
    """Names of state that differs between two ranks, or between them and one."""
    different = []
    for name, start in before.items():
        values = [part.state[name] for part in parts]
        differs = not np.array_equal(*values, equal_nan=start.dtype.kind == "f")
        if differs or not _is_near(whole.state[name], values[0], start, near=near):
            different.append(name)
    return different


def _is_near(one: np.ndarray, other: np.ndarray, start: np.ndarray, *, near: float) -> bool:
    """Whether both changed alike from `start`."""
    if start.dtype.kind != "f":
        return np.array_equal(one, other)
    one, other, start = (np.float64(x) for x in (one, other, start))
    change = np.max(np.abs(one - start), initial=0.0)
    largest = np.max(np.abs(one), initial=0.0)
    least = near * change + 1e-6 * near * largest + 1e-7
    return np.allclose(one, other, rtol=0.0, atol=least, equal_nan=True)
