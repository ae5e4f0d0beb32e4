"""A task's figures over its validation set, the same on any number of ranks."""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdkit.data.pipeline import EvaluationFeed, line_of, read_one, reason_of
from hvdkit.evaluate import metrics
from hvdkit.logs import join
from hvdkit.ranks.messages import heartbeat
from hvdkit.ranks.world import raw, say, unoptimized
from hvdkit.settings import Settings
from hvdkit.train import across, graph_checks, objective, task_checks
from hvdkit.train import task as tasks
from hvdkit.train.dropout import Seeds
from hvdkit.train.state import leave_zero, unchanged
from hvdkit.train.task import Example, Task

_SECONDS_BETWEEN_VOTES = 5.0
_TRIED = 3  # samples, together and one by one
_DRAWN = 4  # batches, where one is a single example


class Evaluation(NamedTuple):
    figures: dict[str, float]  # `loss` and what the task's `metrics` returns
    sums: dict[str, np.ndarray]  # the task's `sums` over all samples, from which they come
    pictures: np.ndarray | None  # uint8 [n, height, width, 3], on rank 0, if the task draws

    def confusion(self) -> np.ndarray | None:
        """The confusion matrix, integer [n, n], row: label; None if the task has none."""
        counts = self.sums.get("confusion")
        square = counts is not None and counts.ndim == 2 and counts.shape[0] == counts.shape[1]
        return counts.astype(np.int64) if square else None


class Evaluator:
    """Runs evaluations of a hvdkit.run.context.RunContext, which share one traced step."""

    def __init__(self, run: Any, feed: EvaluationFeed) -> None:
        self._world = run.world
        self._task = run.task
        self._source = run.val_source
        self._feed = feed
        self._draw = tasks.optional(run.task, "draw") if run.world.is_chief else None
        self._notes = tasks.optional(run.task, "notes")
        self._printed = set()
        self._state = run.state
        self._step = make_step(run.task, run.model, feed.spec)
        self._weights = [raw(v) for v in run.model.trainable_variables]
        self._untrained = self._moved = run.state.untrained  # moved: by a batch, `try_out` finds it
        # With virtual ranks, layers that draw in evaluation draw by batch, not by rank.
        self._exact = bool(run.config.virtual_ranks)
        self._seeds = Seeds(run.config.seed, run.model, evaluating=True) if self._exact else None
        self._at = run.state.step
        self._near = objective.nearness(run.config)
        self._divided = objective.divides(run.config, run.world.size)
        # Called with each batch of this rank: its samples' mean losses, and their numbers.
        self.on_batch: Callable[[np.ndarray, list[int]], None] = lambda *batch: None

    def try_out(self) -> None:
        """Evaluates one example, so that mistakes show before the first training step."""
        with self._world.fail_together("evaluating one sample"):
            batch = task_checks.read_example(self._feed.reader, self._source, training=False)
            where = task_checks.user_code_errors("evaluating one sample")
            with where, unchanged(self._moved), unoptimized():
                graph = self.graph
                handles = set(map(id, graph_checks.assigned_handles(graph)))
                self._moved = [v for v in self._moved if id(v.handle) in handles]
                graph_checks.check_state(graph, self._state, "the evaluation")
                try:
                    outputs, _, sums, rows = self._step(batch)
                except tf.errors.OpError as error:
                    raise ValueError(self._reason(error)) from None
            self._check_size(rows)
            try:
                self._figures({name: value.numpy() for name, value in (sums | rows).items()})
            except ValueError as error:  # one sample may be too few for a metric
                if not isinstance(error.__cause__, ZeroDivisionError):
                    raise
            if self._draw:
                with task_checks.user_code_errors("draw"):
                    self._drawn(batch, outputs)

    @property
    def graph(self) -> tf.Graph:
        """Of a batch's outputs, losses and sums, once `try_out` has traced it."""
        return self._step.get_concrete_function().graph

    def check_loss(self) -> None:
        """Raises Stop, on all ranks, where batches are divided and samples depend on each other."""
        if self._divided and not across.used:
            with self._world.fail_together("trying the loss"), unchanged(self._weights):
                leave_zero(self._weights)
                self._check_sum()

    def _check_sum(self) -> None:
        """Raises ValueError where the loss of a few samples is not the sum of each one's."""
        count = len(self._source)
        tried = range(0, count, -(-count // _TRIED))[: self._feed.batch_size]
        if len(tried) < 2:
            return
        each = [self._batch(number) for number in tried]

        def sums(*batches: Example) -> dict[str, float]:
            whole = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *batches)
            with task_checks.user_code_errors("evaluating a few samples"), unoptimized():
                with unchanged(self._moved):
                    outputs, _, found, _ = self._step(whole)
                with unchanged(self._moved):  # a loss may change state too
                    grad = objective.gradient(self._task, outputs, whole["targets"])
            parts = {n: float(v) for n, v in found.items() if n.split("/")[0] in ("loss", "weight")}
            return parts | {"loss's gradient by the outputs": grad}

        objective.check_sum(
            sums, each, draws=lambda: graph_checks.draws(self.graph), near=self._near
        )

    def run(self, stop_asked: Callable[[], bool]) -> Evaluation | None:
        """Every rank must call it. None after a stop signal; Stop for a task's mistake."""
        with unchanged(self._untrained):
            return self._evaluate(stop_asked)

    def one(self, number: int) -> tuple[Example, Any]:
        """One sample as a batch, and its outputs."""
        batch = self._batch(number)
        with unchanged(self._moved):
            return batch, self._step(batch)[0]

    def _batch(self, number: int) -> Example:
        example = read_one(self._feed.reader, self._source, number)
        return tf.nest.map_structure(lambda part: part[None], example)

    def _evaluate(self, stop_asked: Callable[[], bool]) -> Evaluation | None:
        zeros, empty = metrics.zeros(self._step)
        total = metrics.Sums(self._world, zeros, exact=self._exact)
        kept = metrics.Rows(empty)
        drawn = []
        words = None
        batches = iter(self._feed)
        ballot = Ballot()
        for place in range(self._feed.rounds):  # as many as the rank that has most batches
            batch = None
            try:
                batch = next(batches, None)
                if batch is not None:
                    outputs, means, more, rows = self._one(batch, place)
                    total.add(more)
                    kept.add(rows, self._feed.ids(place))
                    self.on_batch(means, self._feed.ids(place))
                    if self._draw and place < (_DRAWN if self._feed.one_by_one else 1):
                        try:
                            drawn.append(self._drawn(batch, outputs))
                        except Exception as fault:  # training continues
                            self._say_once(
                                f"no pictures: draw failed: {type(fault).__name__}: {fault}"
                            )
            except ValueError as error:
                # Only its words: it holds the pipeline, which would read on until it is collected.
                words = str(error)
                batches = iter(())
            heartbeat.beat()
            if ballot.any(stop_asked()):
                return None
        with self._world.fail_together("evaluating the validation data"):
            if words is not None:
                raise ValueError(words)
        sums = total.over_ranks()
        rows = kept.of_all_ranks()
        with self._world.fail_together("computing the figures"):
            for name in ("weight" + loss.removeprefix("loss") for loss in _losses(sums)):
                if not sums[name]:
                    of = f" ({name.removeprefix('weight/')})" if "/" in name else ""
                    why = f"all weights of the validation set{of} are 0: nothing to score"
                    raise ValueError(why)
            figures = self._figures(sums | rows)
            with task_checks.user_code_errors("notes"):
                notes = self._notes(sums) if self._notes else []
                listed = isinstance(notes, list | tuple)
                if not (listed and all(isinstance(x, str) for x in notes)):
                    raise ValueError(f"the task's notes must return a list of texts, not {notes!r}")
        for note in notes:
            self._say_once(note)
        alike = [part for part in drawn if part.shape[1:] == drawn[0].shape[1:]]
        return Evaluation(figures, sums, np.concatenate(alike) if alike else None)

    def _one(self, batch: Example, place: int) -> tuple[Any, np.ndarray, dict, dict]:
        """Of this rank's batch number `place`, as `make_step`; a ValueError names samples."""
        if self._seeds:
            number = place * self._world.size + self._world.rank
            self._seeds.assign(self._at, tf.constant(number, tf.int64))
        try:
            with unchanged(self._moved):
                outputs, *found = self._step(batch)
            return outputs, *tf.nest.map_structure(lambda x: x.numpy(), found)
        except (tf.errors.OpError, ValueError) as error:
            shape = join(list(part.shape) for part in tf.nest.flatten(batch["inputs"]))
            if isinstance(error, tf.errors.ResourceExhaustedError):
                raise ValueError(
                    f"a batch of evaluation with inputs of shape {shape} does not fit into "
                    "memory: give a smaller --eval_batch_size or, for whole pictures, "
                    "--eval_window"
                ) from None
            raise ValueError(
                f"sample {join(self._feed.ids(place))} (counted from 0; inputs of shape {shape}): "
                f"{self._reason(error)}: the task's model, loss and sums must take every sample "
                "(pictures of any size: see `stride` of segmentation, and --eval_crop)"
            ) from None

    def _reason(self, error: Exception) -> str:
        """Why the graph of a batch failed, and at which line of the user's, where it is known."""
        line = line_of(error, self.graph)
        return f"{line}: {reason_of(error)}" if line else reason_of(error)

    def _check_size(self, rows: dict[str, tf.Tensor]) -> None:
        """Tells the memory that `per_sample` takes; ValueError where it is too much."""
        size = sum(row.numpy().nbytes for row in rows.values())
        samples = len(self._source)
        most = metrics.Rows.MOST_BYTES
        taken = f"{size:,} bytes of each of {samples:,} samples"
        if size * samples > most:
            raise ValueError(
                f"the task's per_sample keeps {taken}, {size * samples / 2**30:,.1f} GiB: "
                f"every rank holds them all, {most / 2**30:g} GiB at most: keep less, or add "
                "up `sums`"
            )
        if rows:
            self._say_once(f"metrics of all predictions keep {taken} on each rank")

    def _figures(self, sums: dict[str, np.ndarray]) -> dict[str, float]:
        means = {}
        for name in _losses(sums):
            weight = float(sums["weight" + name.removeprefix("loss")])
            means[name] = float(sums[name]) / weight if weight else float("nan")
        losses = {"loss": sum(means.values())} | means
        figures = task_checks.metrics(self._task, sums, losses)
        if math.isnan(figures["loss"]):  # outputs that are NaN have a largest one all the same
            figures[self._task.main_metric] = math.nan
        return figures

    def _drawn(self, batch: Example, outputs: Any) -> np.ndarray:
        return task_checks.pictures(self._draw(batch["inputs"], batch["targets"], outputs))

    def _say_once(self, note: str) -> None:
        if note not in self._printed:
            self._printed.add(note)
            say(self._world, f"note: {note}")


def _losses(sums: Iterable[str]) -> list[str]:
    """Names of the sums of the loss, or of its terms."""
    return [name for name in sums if name.split("/")[0] == "loss"]


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
        own = [float(wanted), (now - self._start) / self._rounds]
        votes = hvd.allreduce(tf.constant(own, tf.float64), op=hvd.Max, name="evaluation.votes")
        asked, seconds_a_round = votes.numpy()
        self._rounds = self._left = int(np.clip(_SECONDS_BETWEEN_VOTES / seconds_a_round, 1, 1000))
        self._start = now
        return bool(asked)


def make_step(task: Task, model: keras.Model, spec: Any):
    """Returns the function of one evaluation batch; it has no collectives.

    It returns outputs, the mean loss of each sample with its terms added up, sums, rows.
    """

    @tf.function(input_signature=[spec], autograph=False)
    def eval_step(batch: Example) -> tuple[Any, tf.Tensor, dict, dict]:
        outputs = task_checks.outputs(task, model, batch["inputs"])
        terms = objective.loss(task, outputs, batch["targets"])
        sums = task_checks.sums(task, outputs, batch["targets"])
        means = 0.0
        for name, (losses, weights) in terms.items():
            weights = objective.require_weights(weights, name)
            of = f"/{name}" if name else ""
            each = tf.math.multiply_no_nan(losses, weights)
            parts = (tf.reduce_sum(x, range(1, len(x.shape))) for x in (each, weights))
            means += tf.math.divide_no_nan(*parts)
            sums[f"loss{of}"] = tf.reduce_sum(tf.cast(each, tf.float64))
            sums[f"weight{of}"] = tf.reduce_sum(tf.cast(weights, tf.float64))
        graph = tf.compat.v1.get_default_graph()
        graph_checks.check_collectives(graph, "the task, in evaluation,")
        rows = task_checks.per_sample(task, outputs, batch["targets"], taken=set(sums))
        return outputs, means, sums, rows

    return eval_step


def stopped_improving(config: Settings, step: int, best_step: int) -> bool:
    """Whether --early_stop_evals evaluations have passed since that of `best_step`.

    Steps alone decide, so that a resumed run stops at the same step as an uninterrupted one.
    """
    every = config.eval_every
    evals = config.early_stop_evals
    return bool(every and evals) and step // every - best_step // every >= evals
