"""A step tried before the first one: on a few samples at once, and on parts of them.

The step is run as it is written, outside of graphs: on one rank, and on two that are simulated
(simulated_ranks.py), or, where a rank accumulates, in two micro-batches. The sums of its losses,
its gradients and its state must come out alike, or ranks would compute something else than one.
Batch norm is at rest meanwhile, every row draws the same random numbers, and the optimizer is plain
SGD: it makes no large step of a rounding error.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from hvdkit.data.sampler import share
from hvdkit.logs import join
from hvdkit.ranks import agreement
from hvdkit.ranks.world import World, raw, say
from hvdkit.train.layers import batch_norm, dropout
from hvdkit.train.step import across, combine, objective
from hvdkit.train.step import gradients as gradients_lib
from hvdkit.train.step.state import TaskState, leave_zero, unchanged
from hvdkit.train.step.step import SimulatedShare, Step
from hvdkit.train.step.tracing import StepFunction
from hvdkit.train.task import checks as task_checks
from hvdkit.train.task.protocol import Example
from hvdkit.train.trial import simulated_ranks

_LONG = 30.0  # seconds of a trial, after which a line tells of it
_LARGE = 1e4  # Gradients of so many times their size reach what a step clips by.
_OTHERS = (
    "a sample depends on others of its batch, which ranks, virtual ranks and micro-batches divide. "
    "Bring them together with hvdkit.train.across.gather, or use one rank"
)


class Outcome(NamedTuple):
    """What a run of the step leaves."""

    state: dict[str, np.ndarray]
    means: list[np.ndarray | None]  # mean gradients over all ranks
    sums: list[np.ndarray]  # of each loss, the sums of `gradients.Forward`
    terms: Sequence[str]  # names of the losses' terms


class Plan(NamedTuple):
    """How a step is tried.

    `samples` in all; `by_ranks`: on two ranks; `by_steps`: in two micro-batches; `compares`: the
    whole with its parts, which does not do where a sample's place decides what it draws; `near`:
    relative difference that sums in another order may have; `whose`: loss it is, for messages;
    `own_step`: whether the step is a user's, who may do something to gradients.
    """

    samples: int
    compares: bool
    by_ranks: bool
    by_steps: bool
    near: float
    whose: str
    own_step: bool = False


def try_out(step: Step, sample: Callable[..., Example], *, size: int) -> None:
    """Stop, on all ranks, where the step is another on parts of a batch than on the whole.

    Steps that are the template's, of a loss that compares no samples, are tried in evaluation
    (`Evaluator.check_sums`), which takes less time.

    `sample(place, draw=...)`: one example of the training set, which has `size`.
    """
    mixes = bool(getattr(step.task, "mixes", False))
    if not _is_needed(step, mixes):
        return
    plan = _plan(step)
    with step.world.fail_together("trying the step"):
        examples = []
        for number in range(plan.samples):
            place = step.world.rank * plan.samples + number
            example = sample(
                _spread(place, plan.samples * step.world.size, size),
                draw=place if mixes else 0,
            )
            examples.append(example)
        with at_rest(step.state.task_state), _told_if_long(step.world):
            for function, changed, assigned in step.functions:
                step.combiner.begin(assigned)
                for number in _steps_to_try(step):
                    run = partial(_outcome, step, function, changed, number)
                    comparison = Comparison(plan, examples, run, combiner=step.combiner)
                    for note in comparison.notes():
                        say(step.world, f"note: {note}")


@contextlib.contextmanager
def _told_if_long(world: World) -> Iterator[None]:
    """Says after a while what a start takes so long for."""
    text = (
        f"note: the step is still being tried on a few samples, for {_LONG:.0f} s, outside of "
        "graphs, where loops over time take long"
    )
    timer = threading.Timer(_LONG, say, [world, text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _spread(number: int, count: int, size: int) -> int:
    """Where sample `number` of `count` lies in a set of `size`: pairs, far from each other.

    Neighbours are often of one class, and others of another: a loss may compare only these.
    """
    pairs = -(-count // 2)
    return number // 2 * max(size // pairs, 2) + number % 2


def _is_of_user(step: Step) -> bool:
    return step.own_losses or not step.of_template


def _by_ranks(step: Step) -> bool:
    return step.world.size > 1 or step.settings.virtual_ranks > 0


def _is_needed(step: Step, mixes: bool) -> bool:
    if not objective.divides(step.settings, step.world.size):
        return False
    is_asked = _is_of_user(step) or across.used or step.adds_of_samples or mixes
    if is_asked and not step.draws_by_place:
        return True
    return _by_ranks(step) and _changes_state(step)


def _changes_state(step: Step) -> bool:
    """Whether a forward pass of any of the step's functions changes what ranks share."""
    for _, _, assigned in step.functions:
        step.combiner.begin(assigned)
        if step.combiner.changes():
            return True
    return False


def _plan(step: Step) -> Plan:
    settings = step.settings
    by_ranks = _by_ranks(step)
    by_steps = settings.accumulation_steps > 1
    micro_batch = settings.global_batch_size // settings.accumulation_steps
    shares = settings.virtual_ranks or step.world.size
    # Two micro-batches need an even number of samples.
    is_uneven = by_ranks and not by_steps and micro_batch % shares > 0
    most = tf.nest.flatten(step.spec)[0].shape[1]
    return Plan(
        samples=_number_of_samples(most, is_uneven),
        compares=not step.draws_by_place,
        by_ranks=by_ranks,
        by_steps=by_steps,
        near=objective.nearness(settings),
        whose="run.loss(batch, losses): " if step.own_losses else "the task's loss: ",
        own_step=not step.of_template,
    )


def _number_of_samples(most: int, is_uneven: bool) -> int:
    """How many samples to try, so that a rank that holds `most` has the memory for them."""
    if is_uneven:
        return 5 if most >= 5 else 3
    return 4 if most >= 4 else 2


def _steps_to_try(step: Step) -> list[int]:
    """The next step; where losses or the step are a user's own, also the run's last.

    What grows from 0 with the step has no effect at the first one.
    """
    first = int(step.state.step)
    last = step.settings.num_steps - 1
    if _is_of_user(step) and last > first:
        return [first, last]
    return [first]


def _outcome(
    step: Step,
    function: StepFunction,
    changed: list[tf.Variable],
    number: int,
    batch: Example,
    part: SimulatedShare,
) -> Outcome:
    """What step `number` makes of a small batch, as one of several ranks; it leaves no trace."""
    samples = sum(part.samples)
    user_code = task_checks.user_code_errors(
        f"the step, tried on {samples} samples outside of graphs (take sizes from tensors, not "
        "from settings, and gradients by tf.GradientTape),"
    )
    variables = {name: raw(variable) for name, variable in step.state.variables.items()}
    with (
        step.simulated(part, batch, changed=changed),
        unchanged(list(variables.values())),
        user_code,
    ):
        step.state.step.assign(number)
        # Where a forward pass sets a weight, 0 may mean that it has not done so yet.
        leave_zero([w for w in step.weights if not step.combiner.assigns(w)])
        _, tracing = step.call(
            function, batch, tf.zeros([agreement.NUM_VOTES], tf.float64)
        )
        state = {name: variable.numpy() for name, variable in variables.items()}
    return Outcome(
        state=state,
        means=[
            None if gradient is None else gradient.numpy() for gradient in tracing.means
        ],
        sums=[sums.numpy() for sums in tracing.sums],
        terms=tracing.terms,
    )


@contextlib.contextmanager
def at_rest(task_state: TaskState) -> Iterator[None]:
    """Inside, functions run eagerly, and no sample's outputs depend on its place or on others."""
    eager = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        with (
            batch_norm.at_rest(task_state.layers),
            dropout.same_in_each_row(task_state.generators),
        ):
            yield
    finally:
        tf.config.run_functions_eagerly(eager)


class Comparison:
    """A step on the whole of a few samples, and on parts of them; it raises ValueError.

    `run`: what the step makes of a batch, as a simulated rank.
    """

    def __init__(
        self,
        plan: Plan,
        examples: Sequence[Example],
        run: Callable[[Example, SimulatedShare], Outcome],
        *,
        combiner: combine.Combiner,
    ) -> None:
        self._plan = plan
        self._examples = examples
        self._run = run
        self._combiner = combiner
        self._state_before = combiner.values()
        self._halves = []
        for rank in range(2):
            first, last = share(plan.samples, rank, 2)
            self._halves.append(last - first)

    def notes(self) -> list[str]:
        """Compares all; notes, a sentence each."""
        notes = self._compare() if self._plan.compares else []
        if not self._plan.by_ranks:
            return notes
        if self._plan.compares and self._plan.own_step:
            self._check_large_gradients()
        if self._combiner.changes():
            self._check_draws()
        return notes

    def _compare(self) -> list[str]:
        """Compares the whole with its parts; copies of all state that this takes are gone then."""
        (whole,) = self._outcomes([self._plan.samples])
        if self._plan.by_steps:
            self._check_micro_batches(whole)
        return self._check_ranks(whole) if self._plan.by_ranks else []

    def _outcomes(
        self,
        sizes: Sequence[int],
        *,
        steps: int = 1,
        combines: bool = True,
        kept: Collection[str] = (),
        draws: bool = False,
        scale: float = 1.0,
    ) -> list[Outcome]:
        """Of ranks with so many samples; `draws`: whether their random numbers differ.

        `scale`: what losses are multiplied with.
        """

        def on_rank(rank: int) -> Outcome:
            first, last = share(self._plan.samples, rank, len(sizes))
            simulated = SimulatedShare(
                rank=rank,
                samples=sizes,
                steps=steps,
                combines=combines,
                kept=kept,
                draw=rank if draws else 0,
                scale=scale,
            )
            return self._run(_batch(self._examples[first:last], steps), simulated)

        return simulated_ranks.outcomes(on_rank, sizes)

    def _check_micro_batches(self, whole: Outcome) -> None:
        """Two micro-batches must give what the whole does, but for state that they may read."""
        try:
            self._check_steps(whole)
            return
        except ValueError:
            # The cause may be state: a forward pass changes it, and the next micro-batch reads it.
            if not self._combiner.changes():
                raise
        self._check_steps(whole, kept=self._state_before)
        if not self._plan.by_ranks:
            return
        by_samples = self._changed_by_samples(whole)
        alike = [name for name in self._state_before if name not in by_samples]
        try:
            self._check_steps(whole, kept=alike)
        except ValueError:
            raise ValueError(
                "the model reads in a micro-batch what the samples of the one before have changed "
                f"({join(by_samples)}), which other ranks do not know: use --accumulation_steps=1, "
                "or one rank"
            ) from None

    def _check_steps(self, whole: Outcome, kept: Collection[str] = ()) -> None:
        parts = self._outcomes([self._plan.samples], steps=2, kept=kept)
        _check_sums(self._plan, whole, parts)
        _check_gradients(self._plan, whole, parts[0])

    def _changed_by_samples(self, whole: Outcome) -> list[str]:
        """State that would differ between ranks if no rule combined it."""
        parts = self._outcomes(self._halves, combines=False)
        return _different_state(self._state_before, whole, parts, near=self._plan.near)

    def _check_ranks(self, whole: Outcome) -> list[str]:
        parts = self._outcomes(self._halves)
        _check_sums(self._plan, whole, parts)
        different = _different_state(
            self._state_before, whole, parts, near=self._plan.near
        )
        notes = []
        if different:
            by_samples = self._changed_by_samples(whole)
            notes = self._combiner.judge(different, set(different) - set(by_samples))
        _check_gradients(self._plan, whole, parts[0])
        return notes

    def _check_large_gradients(self) -> None:
        """Where a step clips a rank's own gradients, those of a few samples may be too small."""
        try:
            (whole,) = self._outcomes([self._plan.samples], scale=_LARGE)
            parts = self._outcomes(self._halves, scale=_LARGE)
        except ValueError:  # It may refuse such gradients itself.
            return
        means = [mean for mean in parts[0].means if mean is not None]
        # In float16 those of a half may be too large.
        if all(np.isfinite(mean).all() for mean in means):
            _check_gradients(self._plan, whole, parts[0])

    def _check_draws(self) -> None:
        """What ranks change by random numbers of their own must come together."""
        one, other = self._outcomes(self._halves, draws=True)
        different = []
        for name, start in self._state_before.items():
            if not _is_equal(one.state[name], other.state[name], start.dtype):
                different.append(name)
        if different:
            self._combiner.refuse_draws(different)


def _batch(examples: Sequence[Example], steps: int) -> Example:
    """The examples as [steps, micro-batch, ...]."""

    def stacked(*rows: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.stack(rows), [steps, -1, *rows[0].shape])

    return tf.nest.map_structure(stacked, *examples)


def _check_sums(plan: Plan, whole: Outcome, parts: Sequence[Outcome]) -> None:
    """Raises ValueError where sums of the whole batch are not those of its parts added up."""
    for number, sums in enumerate(whole.sums):
        sums_of_parts = [part.sums[number] for part in parts]
        added = np.sum(sums_of_parts, axis=0)
        sizes = np.sum(np.abs(sums_of_parts), axis=0)
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
            for figure, quantity in enumerate(("losses", "weights")):
                if _is_apart(
                    one[figure], other[figure], plan.near * (1 + size[figure])
                ):
                    term = f"{quantity} {name}" if name else quantity
                    raise ValueError(
                        f"{plan.whose}{term} of {plan.samples} samples together is "
                        f"{one[figure]:.6g}, and {other[figure]:.6g} in two parts: {_OTHERS}"
                    )


def _is_apart(one: float, other: float, least: float) -> bool:
    if np.isnan(one) or np.isnan(other):
        return bool(np.isnan(one) != np.isnan(other))
    return bool(one != other and not abs(one - other) <= least)


def _check_gradients(plan: Plan, whole: Outcome, part: Outcome) -> None:
    """Raises ValueError where the step updates by other gradients."""
    pairs = []
    for one, other in zip(whole.means, part.means):
        if one is None or other is None:
            continue
        if np.isfinite(one).all():  # float16's first loss scale may be too large
            pairs.append((one.astype(np.float64), other.astype(np.float64)))
    norm_of_all = np.sqrt(sum(np.sum(np.square(gradient)) for gradient, _ in pairs))
    # Where gradients of a weight cancel out, as of a bias before a normalization, rounding is left:
    # in 16 bits up to 0.003 of all gradients was seen.
    share_of_all = 1e-3 if plan.near <= 1e-3 else 0.2
    for of_whole, of_parts in pairs:
        norm = np.linalg.norm(of_whole)
        distance = float(np.linalg.norm(of_whole - of_parts))
        if _is_apart(
            distance, 0.0, plan.near * (norm + share_of_all * norm_of_all) + 1e-12
        ):
            raise ValueError(
                f"{plan.whose}gradient of {plan.samples} samples together, of norm {norm:.6g} for "
                f"a weight of shape {list(of_whole.shape)}, differs by {distance:.6g} from that of "
                f"two parts: {_OTHERS}. What the step does to a rank's own gradients before their "
                "sum must be linear (a factor, not a norm to clip by)"
            )


def _different_state(
    before: dict[str, np.ndarray],
    whole: Outcome,
    parts: Sequence[Outcome],
    *,
    near: float,
) -> list[str]:
    """Names of state that differs between two ranks, or between them and one."""
    names = []
    for name, start in before.items():
        one, other = (part.state[name] for part in parts)
        are_equal = _is_equal(one, other, start.dtype)
        if not are_equal or not _is_near(whole.state[name], one, start, near=near):
            names.append(name)
    return names


def _is_equal(one: np.ndarray, other: np.ndarray, dtype: np.dtype) -> bool:
    return np.array_equal(one, other, equal_nan=dtype.kind == "f")


def _is_near(
    one: np.ndarray, other: np.ndarray, start: np.ndarray, *, near: float
) -> bool:
    """Whether both changed alike from `start`."""
    if start.dtype.kind != "f":
        return np.array_equal(one, other)
    rounding = float(np.finfo(start.dtype).eps)
    one, other, start = (x.astype(np.float64) for x in (one, other, start))
    change = np.max(np.abs(one - start), initial=0.0)
    largest = np.max(np.abs(one), initial=0.0)
    # A sum over years of steps is rounded by its size, not by what a step adds.
    least = near * change + 8 * rounding * largest + 1e-7
    return np.allclose(one, other, rtol=0.0, atol=least, equal_nan=True)
