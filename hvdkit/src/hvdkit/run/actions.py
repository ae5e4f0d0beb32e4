"""What happens after a step, in the order of run/modes.py; called as action(step, result).

`due(step)`: whether it acts after a step. `settles`: whether the step must be known to be applied
before. It returns why the run must end, or None. All ranks call the same actions at the same steps:
an action may hold collectives. `due` is asked once for each step, in order; with --steps_per_call
before the step is made, since a step after which an action is due ends its call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hvdkit import scores
from hvdkit.checkpoint.checkpoints import CheckpointInfo
from hvdkit.evaluate import metrics
from hvdkit.evaluate.evaluator import stopped_improving
from hvdkit.ranks import agreement
from hvdkit.ranks.world import World, raw, say
from hvdkit.run import health, sample_figures
from hvdkit.run.context import RunContext, judge_plateau
from hvdkit.run.health import Ending
from hvdkit.run.parts import RunParts
from hvdkit.scores import Score
from hvdkit.settings import Settings
from hvdkit.stop import DONE, PREEMPTED, WRONG_USE, Stop
from hvdkit.train.layers import batch_norm
from hvdkit.train.optim import groups
from hvdkit.train.step.step import Result
from hvdkit.train.task import checks as task_checks


class Action(Protocol):
    settles: bool

    def due(self, step: int) -> bool: ...

    def __call__(self, step: int, result: Result) -> Ending | None: ...


def ends_call(action: Action, step: int) -> bool:
    """Whether an action that is due after a step acts before the next one is made.

    One that looks at figures of all steps, but not at weights, has `ends_call(step)`.
    """
    asked = getattr(action, "ends_call", None)
    return asked is None or asked(step)


class Sync:
    """Combines the ranks' moving statistics of batch norm, every so many steps."""

    settles = False

    def __init__(self, run: RunContext, sync: Callable[[], None]) -> None:
        # A sync at an unplanned step (a stop signal) changes no bit where every step has one.
        self._every = 1 if run.config.deterministic else run.config.bn_sync_every
        if sync is batch_norm.no_sync:
            self._every = 0
        self._sync = sync

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def __call__(self, step: int, result: Result) -> None:
        self._sync()


class Log:
    """A progress line, and the same figures for tools."""

    settles = True

    def __init__(self, parts: RunParts) -> None:
        self._run = parts.context
        self._telemetry = parts.telemetry
        self._feed = parts.feed
        self._pace = parts.health.pace
        self._waited = 0.0  # So many of the feed's seconds were logged.

    def due(self, step: int) -> bool:
        return step % self._run.config.log_every == 0

    def __call__(self, step: int, result: Result) -> None:
        config = self._run.config
        state = self._run.state
        figures = {name: float(result[name]) for name in ("loss", "lr", "grad_norm")}
        figures |= {
            f"loss/{name}": float(value)
            for name, value in result.get("terms", {}).items()
        }
        if config.precision == "float16":
            figures["loss_scale"] = float(state.loss_scale.value)
            figures["skipped"] = int(state.skipped)
        if "keras_loss" in result:  # The model adds this to the task's loss.
            figures["keras_loss"] = float(result["keras_loss"])
        losses = health.losses(self._run.world, config.virtual_ranks, result)
        waited = self._feed.waited - self._waited
        self._waited = self._feed.waited
        times, note = self._pace.interval(waited)
        self._telemetry.step(step, figures, losses=losses, waited=waited, times=times)
        if note:
            say(self._run.world, note)
        if config.log_gradients:
            paths = [variable.path for variable in state.model.trainable_variables]
            self._telemetry.gradients(step, paths, result["layers"].numpy())


class AtStep:
    """Calls a function after one step."""

    settles = True

    def __init__(self, step: int, function: Callable[[], None]) -> None:
        self._step = step
        self._function = function

    def due(self, step: int) -> bool:
        return step == self._step

    def __call__(self, step: int, result: Result) -> None:
        self._function()


DRIFT_EVERY = 1000  # steps
# So many steps after a start, state that changes now and then has changed.
_EARLY = (10, 100)


class CheckDrift:
    """Checks that all ranks hold the same weights and state, every DRIFT_EVERY steps.

    And twice soon after a start, before much is lost.
    """

    settles = False

    def __init__(self, run: RunContext) -> None:
        self._world = run.world
        self._first = 0  # the first step of this start, once it is known
        # A benchmark measures what most steps cost.
        self._early = () if run.config.benchmark else _EARLY
        self._variables = dict(run.state.variables)
        if run.config.bn_sync != "full" and not run.config.virtual_ranks:
            # Each rank has moving statistics of its own until they are synced.
            moving_ids = batch_norm.moving_ids(run.model)
            for name, variable in run.state.variables.items():
                if id(raw(variable)) in moving_ids:
                    del self._variables[name]

    def due(self, step: int) -> bool:
        self._first = self._first or step
        return step % DRIFT_EVERY == 0 or step - self._first + 1 in self._early

    def __call__(self, step: int, result: Result) -> None:
        agreement.check_same_state(self._world, self._variables, step)


class CheckNumbers:
    """Prints a note, once for each number that was changed and with which no step computes.

    Numbers of layers and of the optimizer, which the step's graph keeps; the learning rate, which
    each step sets. After actions of the task that look at weights, and at logged steps.
    """

    settles = False

    def __init__(self, run: RunContext, task_actions: Sequence[TaskAction]) -> None:
        self._world = run.world
        self._every = run.config.log_every
        self._task_actions = task_actions
        self._layers = run.state.task_state.layers
        self._optimizer = run.optimizer
        self._traced = self._numbers()
        self._traced_of_optimizer = self._numbers_of_optimizer()
        self._looks_at_rate = bool(task_actions)

    def due(self, step: int) -> bool:
        acts = any(action.settles and action.was_due for action in self._task_actions)
        return acts or step % self._every == 0

    def __call__(self, step: int, result: Result) -> None:
        for place, value in _changed(self._traced, self._numbers()):
            self._note(
                f"{place} is {value:g} since, and steps compute with {self._traced.pop(place):g}: "
                "their graph keeps a number of Python as it was; make it a tf.Variable and assign "
                "to that"
            )
        traced = self._traced_of_optimizer
        for place, value in _changed(traced, self._numbers_of_optimizer()):
            self._note(
                f"{place} is {value} since, and steps compute with {traced.pop(place)}: their "
                "graph keeps a number of Python as it was; give it by its flag, or in the task's "
                "`optimizer`, and start again to resume"
            )
        if self._looks_at_rate:
            self._check_rate(float(result["lr"]))

    def _check_rate(self, rate: float) -> None:
        variable = raw(self._optimizer.learning_rate)
        value = float(variable)
        if math.isclose(value, rate, rel_tol=1e-5) or math.isnan(rate):
            return
        self._looks_at_rate = False
        self._note(
            f"the optimizer's learning_rate is {value:g} since, and each step sets that of the "
            f"schedule, {rate:g} in this one: write a `schedule` of the task, or take --lr_policy"
        )

    def _note(self, note: str) -> None:
        say(self._world, f"note: {note}")

    def _numbers(self) -> dict[str, float]:
        """Floats by layer and name, without whole numbers: layers may count their calls."""
        numbers = {}
        for layer in self._layers:
            for name, value in _floats(layer).items():
                numbers[f"{layer.path or layer.name}.{name}"] = value
        return numbers

    def _numbers_of_optimizer(self) -> dict[str, float | None]:
        """Floats by name, and None where there may be one; of each group's optimizer."""
        numbers: dict[str, float | None] = {}
        parts = groups.optimizers_of(self._optimizer)
        for number, part in enumerate(parts):
            whose = f"group {number}'s" if len(parts) > 1 else "the optimizer's"
            for name, value in vars(part).items():
                if value is None and not name.startswith("_"):
                    numbers[f"{whose} {name}"] = None
            for name, value in _floats(part).items():
                numbers[f"{whose} {name}"] = value
        return numbers


def _floats(holder: object) -> dict[str, float]:
    """Public numbers of a layer or an optimizer, by name."""
    numbers = {}
    for name, value in vars(holder).items():
        is_public = not name.startswith("_")
        if is_public and type(value) is float and not math.isnan(value):
            numbers[name] = value
    return numbers


def _changed(
    traced: Mapping[str, Any], now: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """What is another number now; a second change is none, once the first is taken out."""
    return [
        (place, value)
        for place, value in now.items()
        if place in traced and value != traced[place]
    ]


class TaskAction:
    """An action of the task: an error in it ends all ranks with one sentence."""

    def __init__(self, world: World, action: Action) -> None:
        self._world = world
        self._action = action
        self.settles = action.settles
        self.was_due = False  # at the newest step for which it was asked
        self._name = f"the task's action {type(action).__name__}"

    def due(self, step: int) -> bool:
        """Raises Stop where it fails: on all ranks, as all ask alike."""
        try:
            with task_checks.user_code_errors(f"{self._name}.due({step})"):
                self.was_due = bool(self._action.due(step))
        except (ValueError, OSError) as error:
            raise Stop(WRONG_USE, str(error)) from error
        return self.was_due

    def __call__(self, step: int, result: Result) -> Ending | None:
        """An ending that any rank returns is every rank's."""
        ending = None
        with (
            self._world.fail_together(f"step {step}"),
            task_checks.user_code_errors(self._name),
        ):
            ending = self._action(step, dict(result))
            if not isinstance(ending, Ending | None):
                raise ValueError(
                    f"{self._name} returned {ending!r}: it must return None, or an Ending "
                    "(hvdkit/run/health.py) where the run must end"
                )
        for fields in self._world.gather_alike(ending, f"{self._name}.{step}"):
            if fields:
                return Ending(*fields)
        return None


def evaluation_due(config: Settings, step: int) -> bool:
    every = config.eval_every
    return step == config.num_steps or bool(every and step % every == 0)


class Save:
    """A checkpoint every so many steps, before an evaluation, after the last step."""

    settles = True

    def __init__(self, parts: RunParts) -> None:
        self._run = parts.context
        self._saver = parts.saver
        self._sync = parts.sync
        self._telemetry = parts.telemetry
        self._place = parts.sampler.place
        self._samples = None
        is_saving = not (parts.config.benchmark or parts.config.find_lr)
        with parts.world.fail_together("reading a few validation samples"):
            if parts.world.is_chief and is_saving:
                self._samples = sample_figures.ValidationSamples(
                    parts.evaluator, parts.val_feed.reader
                )
        # A checkpoint of another folder is not in this one yet.
        self._saved_at = parts.start.step if parts.start.source == "own" else None

    def due(self, step: int) -> bool:
        every = self._run.config.checkpoint_every
        return evaluation_due(self._run.config, step) or bool(
            every and step % every == 0
        )

    def __call__(self, step: int, result: Result | None = None) -> None:
        if step == self._saved_at:
            return
        run = self._run
        with self._telemetry.not_training():
            self._sync()
            # Rank 0's state is saved, and that of others would be lost, so they must be the same.
            # Weights are compared at the end of the run.
            untrained_ids = {id(variable) for variable in run.state.untrained}
            untrained = {}
            for name, variable in run.state.variables.items():
                if id(raw(variable)) in untrained_ids:
                    untrained[name] = variable
            agreement.check_same_state(run.world, untrained, step)
            self._saver.save(
                self._place(step),
                run.state.variables,
                run.config,
                figures=self._samples.to_save() if self._samples else None,
            )
        self._saved_at = step

    def last(self, step: int) -> None:
        """Every rank learns whether it could be written; raises Stop where not."""
        self(step)
        with self._telemetry.not_training():
            self._saver.last(
                self._place(step), self._run.state.variables, self._run.config
            )


class Evaluate:
    """The score of the weights, or of their moving average; when to stop early.

    It comes after Save: whatever fails in an evaluation, the trained weights are on disk.
    """

    settles = True

    def __init__(self, parts: RunParts) -> None:
        self._run = parts.context
        self._saver = parts.saver
        self._evaluator = parts.evaluator
        self._stop_signal = parts.health.stop_signal
        self._sync = parts.sync
        self._telemetry = parts.telemetry
        other_step, note = parts.context.checkpoints.other_scores()
        if note:
            say(parts.world, f"note: {note}")
        # From this step on the folder has scores of this measure.
        self._scored_since = (
            other_step if parts.start.source == "own" else parts.start.step
        )
        self._metric = scores.of_task(parts.context.task)
        # The best score is that of the run so far, the figures are those of the newest evaluation.
        self.best = parts.context.checkpoints.best()
        self.figures: dict[str, float] = {}

    def due(self, step: int) -> bool:
        return evaluation_due(self._run.config, step)

    def __call__(self, step: int, result: Result | None = None) -> Ending | None:
        run = self._run
        with self._telemetry.not_training():
            self._sync()
            with run.state.averaged_weights():
                evaluation = self._evaluator.run(lambda: self._stop_signal.asked)
            if evaluation is None:  # A rerun evaluates this checkpoint first.
                return Ending(PREEMPTED, "preempted", "stop signal received", save=True)
            self.figures = evaluation.figures
            self._telemetry.evaluation(
                step,
                self.figures,
                main_metric=self._metric.name,
                pictures=evaluation.pictures,
            )
            counts = evaluation.confusion()
            if counts is not None:
                names = metrics.class_names(
                    len(counts), run.val_source, run.train_source
                )
                self._telemetry.confusion(names, counts)
            # The score is written last: a step that lacks it is evaluated, and logged, again.
            score = self._compared(step)
            self._saver.add_score(score)
        # A run that goes on later judges the last score then.
        if step >= run.config.num_steps:
            return None
        judge_plateau(run, value=score.value, step=step)
        best_step = self._scored_since
        if self.best:
            best_step = max(self.best.since, best_step)
        if stopped_improving(run.config, step, best_step):
            return Ending(DONE, "early stop", self._no_better_score(), save=True)
        return None

    def _no_better_score(self) -> str:
        best = self.best
        name = self._metric.name
        evaluations = self._run.config.early_stop_evals
        if not best:
            return f"stopped early: no {name} that is a number in {evaluations} evaluations"
        better = "below" if self._metric.mode == "min" else "above"
        return (
            f"stopped early: no {name} {better} {best.value:.4f}, of step {best.since}, in "
            f"{evaluations} evaluations"
        )

    def _compared(self, step: int) -> Score:
        """The score of the newest evaluation, after a look whether it is the run's best."""
        value = self.figures[self._metric.name]
        loss = self.figures["loss"]
        best = self.best
        since = best.since if best and value == best.value else step
        score = Score(value, step, loss, since)
        is_better = best is None or self._metric.rank(score) > self._metric.rank(best)
        # Infinity is never the best, as among checkpoints.
        if math.isfinite(value) and is_better:
            self.best = score
        return score

    def best_figures(self) -> dict[str, str | float]:
        """For the run's summary."""
        figures: dict[str, str | float] = {
            "main_metric": self._metric.name,
            "main_metric_mode": self._metric.mode,
        }
        if self.best:
            figures["best_score"] = self.best.value
            figures["best_step"] = self.best.step
            if self._lacks_best():
                figures["no_best_checkpoint"] = "it is not there"
        elif self.figures:
            figures["no_best"] = self.describe_best()
        return figures

    def _lacks_best(self) -> bool:
        """Whether rank 0 finds no checkpoint of the best score: its save may have failed."""
        best = self.best
        if not best or not self._run.world.is_chief:
            return False
        return not self._saver.has(best.step)

    def describe_best(self) -> str:
        """The best score and its step, or why there is none; "" where there was no evaluation."""
        if self.best:
            lacks = ", whose checkpoint is not there" if self._lacks_best() else ""
            return (
                f"best {self._metric.name}: {self.best.value:.4f}, of step {self.best.step}"
                f"{lacks}"
            )
        return scores.none_is_best(self._metric.name) if self.figures else ""


def evaluates_first(run: RunContext, checkpoint: CheckpointInfo) -> bool:
    """Whether a resumed run begins with an evaluation: one that is missing, or an ended run's."""
    config = run.config
    best = run.checkpoints.best()
    if config.benchmark or not evaluation_due(config, checkpoint.step):
        return False
    if (
        checkpoint.step == config.num_steps
        or run.checkpoints.score_of(checkpoint) is None
    ):
        return True
    best_step = best.since if best else 0
    return checkpoint.is_own and stopped_improving(config, checkpoint.step, best_step)
