"""A task's figures over its validation set, the same on any number of ranks."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdkit.data.pipeline import EvaluationFeed, line_of, reason_of
from hvdkit.evaluate import metrics
from hvdkit.logs import join
from hvdkit.ranks import agreement
from hvdkit.ranks.messages import heartbeat
from hvdkit.ranks.world import raw, say, unoptimized
from hvdkit.settings import Settings
from hvdkit.train.layers.dropout import Seeds
from hvdkit.train.step import across, graph_checks, objective
from hvdkit.train.step.state import leave_zero, unchanged
from hvdkit.train.task import checks as task_checks
from hvdkit.train.task import protocol as tasks
from hvdkit.train.task.protocol import Example, Task

_SECONDS_BETWEEN_VOTES = 5.0
# At most so many samples have their loss computed together and in two halves, and fewer where their
# outputs are of more bytes.
_TRIED = 16
_TRIED_BYTES = 2**27
# So many of them have it computed with the targets of one, for each of so many: some losses compare
# samples of one class only, and a batch may have few of these.
_FEW = 8
_ALIKE = 16
_DRAWS_INSTEAD = (
    "use tf.random.stateless_* with a fixed seed, or keras.random with a "
    "keras.random.SeedGenerator that the model holds"
)
_DRAWN = 4  # batches that are drawn where a batch is a single example


class Evaluation(NamedTuple):
    figures: dict[str, float]  # `loss` and what the task's `metrics` returns
    # The task's `sums` and those of the loss, over all samples; the figures come from them.
    totals: dict[str, np.ndarray]
    # Drawn pictures, uint8 [n, height, width, 3], on rank 0 of a task that draws.
    pictures: np.ndarray | None

    def confusion(self) -> np.ndarray | None:
        """The confusion matrix, integer [n, n], row: label; None if the task has none."""
        counts = self.totals.get("confusion")
        if counts is None or counts.ndim != 2 or counts.shape[0] != counts.shape[1]:
            return None
        return counts.astype(np.int64)


class Evaluator:
    """Runs evaluations of a hvdkit.run.context.RunContext, which share one traced step."""

    def __init__(self, run: Any, feed: EvaluationFeed) -> None:
        self._world = run.world
        self._task = run.task
        self._feed = feed
        self._draw = tasks.optional(run.task, "draw") if run.world.is_chief else None
        self._notes = tasks.optional(run.task, "notes")
        self._printed: set[str] = set()
        self._state = run.state
        self._step = make_step(run.task, run.model, feed.spec)
        self._weights = [raw(v) for v in run.model.trainable_variables]
        self._untrained = run.state.untrained
        # `try_out` keeps those that a batch changes.
        self._changed = run.state.untrained
        # With virtual ranks, layers that draw in evaluation draw by batch, not by rank.
        self._exact = bool(run.config.virtual_ranks)
        generators = run.state.task_state.generators
        self._seeds = (
            Seeds(run.config.seed, generators, evaluating=True) if self._exact else None
        )
        self.near = objective.nearness(run.config)
        self._divided = objective.divides(run.config, run.world.size)
        # In a graph, as a loss may loop over time.
        self._sums_of_loss = tf.function(
            partial(objective.loss_sums, run.task), autograph=False
        )
        # It is called with each batch of this rank: its samples' mean losses, and their numbers.
        self.on_batch: Callable[[np.ndarray, list[int]], None] | None = None

    def try_out(self) -> None:
        """Evaluates one example, so that mistakes show before the first training step."""
        with self._world.fail_together("evaluating one sample"):
            batch = task_checks.read_example(self._feed.reader, training=False)
            errors = task_checks.user_code_errors("evaluating one sample")
            with errors, unchanged(self._changed), unoptimized():
                graph = self.graph
                assigned = {
                    id(handle) for handle in graph_checks.assigned_handles(graph)
                }
                self._changed = [v for v in self._changed if id(v.handle) in assigned]
                graph_checks.check_state(graph, self._state, "the evaluation")
                graph_checks.check_draws(graph, "the evaluation", _DRAWS_INSTEAD)
                _check_metrics(self._task, assigned)
                _check_alone(graph)
                try:
                    outputs, _, batch_sums, rows = self._step(batch)
                except tf.errors.OpError as error:
                    raise ValueError(self._reason(error)) from None
            self._check_size(rows)
            try:
                self._figures(_as_arrays(batch_sums | rows))
            except ValueError as error:  # one sample may be too few for a metric
                cause = error.__cause__
                if isinstance(cause, ValueError) and _is_of_a_library(cause):
                    self._say_once(
                        f"metrics cannot be tried with one sample ({cause}): they run first after "
                        "--eval_every steps"
                    )
                elif not isinstance(cause, ZeroDivisionError):
                    raise
            with task_checks.user_code_errors("draw"):
                self._drawn(batch, outputs)

    @property
    def graph(self) -> tf.Graph:
        """The graph of a batch's outputs, losses and sums."""
        return self._step.get_concrete_function().graph

    def check_sums(self) -> None:
        """Raises Stop, on all ranks, where the task's sums do not add up.

        And where batches are divided and the losses of samples depend on each other. What gathers
        rows compares samples of a batch in evaluation too.
        """
        # A mean of a batch that is one sample is that sample's.
        tries_sums = self._feed.batch_size > 1
        if across.used or not (self._divided or tries_sums):
            return
        with self._world.fail_together("trying the loss"), unchanged(self._weights):
            leave_zero(self._weights)
            with task_checks.user_code_errors("evaluating a few samples"):
                samples = self._samples_to_try()
                if len(samples) < 2 or not _are_alike(samples):
                    return
                if self._divided:
                    self._check_loss(samples)
                if tries_sums:
                    self._check_task_sums(_joined(samples), size=len(samples))

    def _samples_to_try(self) -> list[Example]:
        first = self.outputs(self.batch(0))
        num_bytes = sum(tensor.numpy().nbytes for tensor in _tensors(first))
        most = _TRIED_BYTES // max(num_bytes, 1)
        if not self._divided:  # Sums show it by few samples.
            most = min(most, _FEW)
        numbers = self._numbers_to_try(most)
        return [self.batch(number) for number in numbers]

    def _check_task_sums(self, batch: Example, *, size: int) -> None:
        """Raises ValueError where the task's sums of `size` samples are not those of two halves.

        The outputs are computed once: a model may round otherwise in other batches, and a rounded
        score is another class. Sums that draw, or compare samples as the loss does, are let be.
        """
        sums_of = tf.function(partial(task_checks.sums, self._task), autograph=False)
        try:
            outputs = self.outputs(batch)
            targets = batch["targets"]
            whole = (outputs, targets)
            if not all(self._by_sample()) or not _have_rows(whole, size):
                return  # What belongs to no sample may count once a batch.
            with unchanged(self._changed), unoptimized():
                traced = sums_of.get_concrete_function(outputs, targets)
                if graph_checks.draws(traced.graph):
                    return
                name, difference = _differing_sum(sums_of, whole, size, near=self.near)
                loss_of = self._sums_of_loss
                if not name or _differing_sum(loss_of, whole, size, near=self.near)[0]:
                    return
        except Exception:
            # What `sums` needs, as Keras's mask, may be lost in halves. An evaluation names what
            # fails there too.
            return
        raise ValueError(
            f"the task's sums: {name} of {size} samples together is {difference}, so that a score "
            "would depend on --eval_batch_size: return what adds up (squared errors, and their "
            "number), and take means and roots of the totals in `metrics`, or use per_sample"
        )

    def _check_loss(self, samples: Sequence[Example]) -> None:
        """Raises ValueError where the loss of some samples is not the sum of two halves'."""
        check = partial(
            objective.check_sum,
            draws=lambda: graph_checks.draws(self.graph),
            near=self.near,
        )
        few = samples[:: max(len(samples) // _FEW, 1)]
        outputs = [self.outputs(sample) for sample in few[: len(few) // 2 * 2]]
        if self._feed.batch_size == 1 and self._has_one_row():
            return
        # The shapes of outputs may depend on what is in a sample.
        if self._feed.batch_size > 1 or self._takes(
            [(one, sample["targets"]) for one, sample in zip(outputs, samples)]
        ):
            check(self._loss_sums, samples)
        for sample in samples[:_ALIKE]:
            pairs = [(output, sample["targets"]) for output in outputs]
            if self._takes(pairs):
                words = " of one class, with equal targets,"
                check(self._sums_of_pairs, pairs, of=words)

    def _numbers_to_try(self, most: int) -> list[int]:
        """Two samples, or more where `most` allows.

        They are neighbours, far from other neighbours; the first of each pair are the first half.
        Some losses compare samples of one class, others of different classes.
        """
        count = len(self._feed.reader.source)
        if self._feed.batch_size == 1:
            return sorted({0, count // 2})
        pairs = max(min(self._feed.batch_size, _TRIED, most) // 2, 1)
        firsts = [pair * (count // pairs) for pair in range(pairs)]
        return firsts + [number + 1 for number in firsts]

    def _takes(self, pairs: Sequence[tuple[Any, Any]]) -> bool:
        """Whether these outputs can be joined, and the loss takes them with these targets."""
        if not _are_alike([output for output, _ in pairs]):
            return False
        try:
            self._sums_of_pairs(*pairs)
        except Exception:  # They may be too long for these outputs, as in CTC's loss.
            return False
        return True

    def _sums_of_pairs(self, *pairs: tuple[Any, Any]) -> dict[str, float]:
        """Sums of the loss for pairs of outputs and targets."""
        outputs = self._joined_outputs([output for output, _ in pairs])
        targets = _joined([target for _, target in pairs])
        with unchanged(self._changed), unoptimized():
            sums = self._sums_of_loss(outputs, targets)
        return {name: float(value) for name, value in sums.items()}

    def _loss_sums(self, *samples: Example) -> dict[str, float]:
        """Sums of the loss, and how large its gradient by the outputs is.

        Samples that are evaluated one by one, as memory may hold no more, have their outputs
        joined.
        """
        batch = _joined(samples)
        with unoptimized():
            if self._feed.batch_size > 1:
                with unchanged(self._changed):
                    outputs, _, sums, _ = self._step(batch)
            else:
                outputs = self._joined_outputs([self.outputs(s) for s in samples])
                with unchanged(self._changed):
                    sums = self._sums_of_loss(outputs, batch["targets"])
            with unchanged(self._changed):  # a loss may change state too
                gradient = objective.gradient(
                    self._task, outputs, batch["targets"], by_sample=self._by_sample()
                )
        values = {}
        for name, value in sums.items():
            if name.split("/")[0] in ("loss", "weight"):
                values[name] = float(value)
        values["loss's gradient by the outputs"] = gradient
        return values

    def _has_one_row(self) -> bool:
        """Whether an output is of one row always: of the sample, or common to all, nobody knows."""
        outputs = self._step.get_concrete_function().structured_outputs[0]
        return any(tensor.shape[:1] == [1] for tensor in _tensors(outputs))

    def _by_sample(self) -> list[bool]:
        """For each output, whether it has a row for each sample; others belong to all of them."""
        outputs = self._step.get_concrete_function().structured_outputs[0]
        batch_size = tf.nest.flatten(self._feed.spec)[0].shape[0]
        by_sample = []
        for output in tf.nest.flatten(outputs):
            shape = output.shape if tf.is_tensor(output) else tf.TensorShape([])
            has_rows = shape.rank is None or (shape.rank > 0 and shape[0] == batch_size)
            by_sample.append(has_rows)
        return by_sample

    def _joined_outputs(self, outputs: Sequence[Any]) -> Any:
        """Outputs of samples as those of one batch."""
        rows = [tf.nest.flatten(output) for output in outputs]
        joined = []
        for has_rows, tensors in zip(self._by_sample(), zip(*rows)):
            joined.append(tf.concat(tensors, 0) if has_rows else tensors[0])
        return tf.nest.pack_sequence_as(outputs[0], joined)

    def run(self, stop_asked: Callable[[], bool]) -> Evaluation | None:
        """Every rank must call it. None after a stop signal; Stop for a task's mistake."""
        with unchanged(self._untrained):
            return self._evaluate(stop_asked)

    def one(self, number: int) -> tuple[Example, Any]:
        """One sample as a batch, and its outputs."""
        batch = self.batch(number)
        return batch, self.outputs(batch)

    def outputs(self, batch: Example) -> Any:
        """What the model says of a batch; state stays as it was."""
        with unchanged(self._changed):
            return self._step(batch)[0]

    def batch(self, number: int) -> Example:
        """One sample as a batch."""
        example = self._feed.reader.read_one(number)
        return tf.nest.map_structure(lambda part: part[None], example)

    def _evaluate(self, stop_asked: Callable[[], bool]) -> Evaluation | None:
        zero_sums, no_rows = metrics.zeros(self._step)
        rank_sums = metrics.Sums(self._world, zero_sums, exact=self._exact)
        rank_rows = metrics.Rows(no_rows)
        pictures = []
        fault = None
        batches = iter(self._feed)
        ballot = Ballot()
        # All ranks make as many rounds as the rank with the most batches.
        for place in range(self._feed.rounds):
            try:
                batch = next(batches, None)
                if batch is not None:
                    ids = self._feed.ids(place)
                    outputs, means, batch_sums, batch_rows = self._evaluate_batch(
                        batch, place
                    )
                    rank_sums.add(batch_sums)
                    rank_rows.add(batch_rows, ids)
                    if self.on_batch:
                        self.on_batch(means, ids)
                    if place < (_DRAWN if self._feed.one_by_one else 1):
                        pictures += self._try_to_draw(batch, outputs)
            except ValueError as error:
                # Only its words are kept: the error holds the pipeline, which would read on until
                # it is collected.
                fault = str(error)
                batches = iter(())
            batch = None  # its memory is free while the next one is awaited
            heartbeat.beat()
            if ballot.any(stop_asked()):
                return None

        with self._world.fail_together("evaluating the validation data"):
            if fault is not None:
                raise ValueError(fault)
        totals = rank_sums.over_ranks()
        rows = rank_rows.of_all_ranks()
        with self._world.fail_together("computing the figures"):
            _check_weights(totals)
            figures = self._figures(totals | rows)
            notes = self._checked_notes(totals)
        for note in notes:
            self._say_once(note)
        alike = [part for part in pictures if part.shape[1:] == pictures[0].shape[1:]]
        return Evaluation(figures, totals, np.concatenate(alike) if alike else None)

    def _try_to_draw(self, batch: Example, outputs: Any) -> list[np.ndarray]:
        """The pictures of a batch; [] where they cannot be drawn: training continues."""
        try:
            return self._drawn(batch, outputs)
        except Exception as error:
            self._say_once(f"no pictures: draw failed: {type(error).__name__}: {error}")
            return []

    def _checked_notes(self, totals: dict[str, np.ndarray]) -> Sequence[str]:
        with task_checks.user_code_errors("notes"):
            notes = self._notes(totals) if self._notes else []
            is_list = isinstance(notes, list | tuple)
            if not (is_list and all(isinstance(note, str) for note in notes)):
                raise ValueError(
                    f"the task's notes must return a list of texts, not {notes!r}"
                )
        return notes

    def _evaluate_batch(
        self, batch: Example, place: int
    ) -> tuple[Any, np.ndarray, dict, dict]:
        """What `make_step` returns for this rank's batch number `place`.

        Raises ValueError naming the samples.
        """
        if self._seeds:
            number = place * self._world.size + self._world.rank
            self._seeds.assign(self._state.step, tf.constant(number, tf.int64))
        try:
            with unchanged(self._changed):
                outputs, means, batch_sums, rows = self._step(batch)
            return outputs, means.numpy(), _as_arrays(batch_sums), _as_arrays(rows)
        except (tf.errors.OpError, ValueError) as error:
            shapes = join(list(part.shape) for part in tf.nest.flatten(batch["inputs"]))
            if isinstance(error, tf.errors.ResourceExhaustedError):
                raise ValueError(
                    f"a batch of evaluation with inputs of shape {shapes} does not fit into "
                    "memory: give a smaller --eval_batch_size or, for whole pictures, "
                    "--eval_window"
                ) from None
            raise ValueError(
                f"sample {join(self._feed.ids(place))} (counted from 0; inputs of shape {shapes}): "
                f"{self._reason(error)}: the task's model, loss and sums must take every sample "
                "(pictures of any size: see `stride` of segmentation, and --eval_crop)"
            ) from None

    def _reason(self, error: Exception) -> str:
        """Why the graph of a batch failed, and at which line of the task, where it is known."""
        line = line_of(error, self.graph)
        return f"{line}: {reason_of(error)}" if line else reason_of(error)

    def _check_size(self, rows: dict[str, tf.Tensor]) -> None:
        """Says how much memory `per_sample` takes; ValueError where it is too much."""
        size = sum(row.numpy().nbytes for row in rows.values())
        samples = len(self._feed.reader.source)
        most = metrics.Rows.MOST_BYTES
        if size * samples > most:
            raise ValueError(
                f"the task's per_sample keeps {size:,} bytes of each of {samples:,} samples, "
                f"{size * samples / 2**30:,.1f} GiB: every rank holds them all, "
                f"{most / 2**30:g} GiB at most: keep less, or add up `sums`"
            )
        if rows:
            self._say_once(
                f"metrics of all predictions keep {size:,} bytes of each of {samples:,} samples "
                "on each rank"
            )

    def _figures(self, values: dict[str, np.ndarray]) -> dict[str, float]:
        """The loss, its terms and the task's figures.

        `values`: by name, sums of the task and the loss, and rows of `per_sample`; those of all
        samples, or, when a task is tried out, of one.
        """
        means = {}
        for name in _losses(values):
            weight = float(values[_weight_of(name)])
            means[name] = float(values[name]) / weight if weight else math.nan
        # A term without weight counts 0, as in training.
        counted = [means[name] for name in means if values[_weight_of(name)]]
        losses = {"loss": sum(counted) if counted else math.nan} | means
        figures = task_checks.metrics(self._task, values, losses)
        if math.isnan(figures["loss"]):
            # The task's own figure may look sound: argmax finds a class among NaN outputs too.
            figures[self._task.main_metric] = math.nan
        return figures

    def _drawn(self, batch: Example, outputs: Any) -> list[np.ndarray]:
        """The pictures of a batch; [] where the task draws none."""
        if not self._draw:
            return []
        return [
            task_checks.pictures(self._draw(batch["inputs"], batch["targets"], outputs))
        ]

    def _say_once(self, note: str) -> None:
        if note not in self._printed:
            self._printed.add(note)
            say(self._world, f"note: {note}")


def _have_rows(parts: Any, size: int) -> bool:
    """Whether each tensor has a row for each of `size` samples."""
    return all(tensor.shape[:1] == [size] for tensor in _tensors(parts))


def _differing_sum(
    sums_of: Callable, whole: tuple[Any, Any], size: int, *, near: float
) -> tuple[str, str]:
    """The name of a sum that differs from that of two halves added up, and how; or "" and "".

    `whole`: outputs and targets of `size` samples.
    """
    middle = size // 2

    def half(*, first: bool) -> tuple[Any, Any]:
        rows = slice(0, middle) if first else slice(middle, size)
        return tf.nest.map_structure(
            lambda part: part[rows] if tf.is_tensor(part) else part, whole
        )

    totals = sums_of(*whole)
    halves = [sums_of(*half(first=first)) for first in (True, False)]
    # Float sums of what cancels out are rounded by about so much.
    rounded = near * 1e-3 * _norm(_tensors(whole))
    for name, tensor in totals.items():
        total = np.ravel(tensor.numpy())
        parts = [np.ravel(sums[name].numpy()) for sums in halves]
        least = near * np.max(np.abs(parts), initial=0.0)
        if total.dtype.kind == "f":
            least += rounded
        of_halves = parts[0] + parts[1]
        # NaN is equal to NaN here.
        is_other = np.abs(total - of_halves) > least
        if is_other.any():
            place = int(np.argmax(is_other))
            return name, f"{total[place]:.6g}, and {of_halves[place]:.6g} in two halves"
    return "", ""


def _norm(tensors: Sequence[tf.Tensor]) -> float:
    """The root of a sum over floats: of their squares, and of 1 for each."""
    squares = [
        float(tf.reduce_sum(1 + tf.square(tf.cast(tensor, tf.float64))))
        for tensor in tensors
        if tensor.dtype.is_floating
    ]
    return math.sqrt(sum(squares))


def _are_alike(parts: Sequence[Any]) -> bool:
    """Whether all have tensors of the same shapes."""
    shapes = {tuple(tensor.shape for tensor in _tensors(part)) for part in parts}
    return len(shapes) == 1


def _tensors(nested: Any) -> list[tf.Tensor]:
    """Those of an example or of outputs, whose other leaves may be None."""
    return [tensor for tensor in tf.nest.flatten(nested) if tf.is_tensor(tensor)]


def _joined(parts: Sequence[Any]) -> Any:
    """Nested tensors [n, ...], one after the other."""
    return tf.nest.map_structure(lambda *tensors: tf.concat(tensors, 0), *parts)


def _losses(names: Iterable[str]) -> list[str]:
    """Of names of sums those of the loss, or of its terms."""
    return [name for name in names if name.split("/")[0] == "loss"]


def _check_weights(totals: dict[str, np.ndarray]) -> None:
    """Raises ValueError where the weights of all terms of the loss are 0."""
    weights = [totals[_weight_of(loss)] for loss in _losses(totals)]
    if not any(weights):
        raise ValueError("all weights of the validation set are 0: nothing to score")


def _weight_of(loss: str) -> str:
    """Of "loss" or "loss/NAME" the sum of weights."""
    return loss.replace("loss", "weight", 1)


def _as_arrays(tensors: dict[str, tf.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


class Ballot:
    """Asks every few seconds whether any rank got a stop signal; every rank must call it."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._rounds = 1
        self._left = 1

    def any(self, wanted: bool) -> bool:
        self._left -= 1
        if self._left:
            return False
        now = time.monotonic()
        vote = tf.constant(
            [float(wanted), (now - self._start) / self._rounds], tf.float64
        )
        maxima = hvd.allreduce(vote, op=hvd.Max, name="evaluation.votes")
        is_wanted, seconds_a_round = maxima.numpy()
        self._rounds = int(np.clip(_SECONDS_BETWEEN_VOTES / seconds_a_round, 1, 1000))
        self._left = self._rounds
        self._start = now
        return bool(is_wanted)


def make_step(task: Task, model: keras.Model, spec: Any):
    """Returns the function of one evaluation batch; it has no collectives.

    It returns outputs; the mean loss of each sample, its terms added up; the batch's sums: the
    task's, and of each term of the loss "loss/NAME" and "weight/NAME"; the rows of `per_sample`.
    """

    @tf.function(input_signature=[spec], autograph=False)
    def eval_step(batch: Example) -> tuple[Any, tf.Tensor, dict, dict]:
        outputs = task_checks.outputs(task, model, batch["inputs"])
        terms = objective.loss(task, outputs, batch["targets"])
        batch_sums = task_checks.sums(task, outputs, batch["targets"])
        means = 0.0
        for name, (losses, weights) in terms.items():
            weights = objective.require_weights(weights, name)
            weighted = tf.math.multiply_no_nan(losses, weights)
            means += tf.math.divide_no_nan(
                _sum_by_sample(weighted), _sum_by_sample(weights)
            )
            term = f"/{name}" if name else ""
            batch_sums[f"loss{term}"] = tf.reduce_sum(tf.cast(weighted, tf.float64))
            batch_sums[f"weight{term}"] = tf.reduce_sum(tf.cast(weights, tf.float64))
        graph = tf.compat.v1.get_default_graph()
        graph_checks.check_collectives(graph, "the task, in evaluation,")
        rows = task_checks.per_sample(
            task, outputs, batch["targets"], taken=set(batch_sums)
        )
        return outputs, means, batch_sums, rows

    return eval_step


def _sum_by_sample(values: tf.Tensor) -> tf.Tensor:
    """Sums over all dimensions but the first: [B, ...] -> [B]."""
    return tf.reduce_sum(values, range(1, len(values.shape)))


def stopped_improving(config: Settings, step: int, best_step: int) -> bool:
    """Whether --early_stop_evals evaluations have passed since that of `best_step`.

    Steps alone decide, so that a resumed run stops at the same step as an uninterrupted one.
    """
    every = config.eval_every
    if not every or not config.early_stop_evals:
        return False
    return step // every - best_step // every >= config.early_stop_evals


def _check_alone(graph: tf.Graph) -> None:
    """Raises ValueError where ranks would meet: each evaluates as many batches as it has."""
    collectives = list(agreement.collectives(graph.as_graph_def(add_shapes=True)))
    if collectives:
        raise ValueError(
            f"the evaluation exchanges {join(collectives)} between ranks, of which each has "
            "batches of its own: call batch norms with training=False in predict, loss and sums, "
            "or take another --bn_sync than full"
        )


def _check_metrics(task: Task, assigned: Set[int]) -> None:
    """Raises ValueError where `sums` updates a metric of Keras that the task holds.

    `assigned`: ids of the handles of variables that an evaluation changes.
    """
    for name, held in vars(task).items():
        for metric in _metrics_in(held):
            if any(
                id(raw(variable).handle) in assigned for variable in metric.variables
            ):
                raise ValueError(
                    f"the task's sums update self.{name}, whose state goes back after each batch: "
                    f"return the sums of hvdkit.evaluate.metrics.KerasMetrics({name}=...)"
                )


def _metrics_in(held: Any) -> Iterator[keras.metrics.Metric]:
    """Metrics of Keras in what a task holds, also in dicts, lists and tuples."""
    if isinstance(held, keras.metrics.Metric):
        yield held
    elif isinstance(held, dict):
        for value in held.values():
            yield from _metrics_in(value)
    elif isinstance(held, (list, tuple)):
        for value in held:
            yield from _metrics_in(value)


def _is_of_a_library(error: BaseException) -> bool:
    """Whether code outside of the project raised it."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next:
        trace = trace.tb_next
    file = Path(trace.tb_frame.f_code.co_filename)
    return "site-packages" in file.parts
