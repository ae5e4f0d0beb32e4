"""What happens after a step, in the order of run/modes.py; called as action(step, result).

`due(step)`: whether it acts after a step. `settles`: whether the step must be known to be applied
before. It returns why the run must end, or None. All ranks call the same actions at the same steps:
an action may hold collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from hvdkit import scores
from hvdkit.checkpoint.checkpoints import CheckpointInfo
from hvdkit.evaluate import metrics
from hvdkit.evaluate.evaluator import stopped_improving
from hvdkit.ranks import agreement
from hvdkit.ranks.world import World, raw, say
from hvdkit.run import health
from hvdkit.run.context import RunContext, judge_plateau
from hvdkit.run.health import Ending
from hvdkit.scores import Score
from hvdkit.settings import Settings
from hvdkit.stop import DONE, PREEMPTED
from hvdkit.train import batch_norm, task_checks
from hvdkit.train.step import Result

if TYPE_CHECKING:
    from hvdkit.run.loop import Run


class Action(Protocol):
    settles: bool

    def due(self, step: int) -> bool: ...

    def __call__(self, step: int, result: Result) -> Ending | None: ...


class Sync:
    """Combines the ranks' moving statistics of batch norm, every so many steps."""

    settles = False

    def __init__(self, run: RunContext, sync: Callable[[], None]) -> None:
        # Every step: then a sync at an unplanned step (a stop signal) changes no bit.
        self._every = 1 if run.config.deterministic else run.config.bn_sync_every
        self._sync = sync

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def __call__(self, step: int, result: Result) -> None:
        self._sync()


class Log:
    """A progress line, and the same figures for tools."""

    settles = True

    def __init__(self, run: Run) -> None:
        self._run = run.context
        self._telemetry = run.telemetry
        self._feed = run.feed
        self._pace = run.health.pace
        self._waited = 0.0  # of the feed's seconds, those that were logged

    def due(self, step: int) -> bool:
        return step % self._run.config.log_every == 0

    def __call__(self, step: int, result: Result) -> None:
        config = self._run.config
        state = self._run.state
        figures = {name: float(result[name]) for name in ("loss", "lr", "grad_norm")}
        figures |= {f"loss/{name}": float(value) for name, value in result.get("terms", {}).items()}
        if config.precision == "float16":
            figures["loss_scale"] = float(state.loss_scale.value)
            figures["skipped"] = int(state.skipped)
        if "keras_loss" in result:  # what the model adds to the task's loss
            figures["keras_loss"] = float(result["keras_loss"])
        losses = health.losses(self._run.world, config.virtual_ranks, result)
        logged = self._waited
        self._waited = self._feed.waited
        times, note = self._pace.interval(self._waited - logged)
        self._telemetry.step(
            step, figures, losses=losses, waited=self._waited - logged, times=times
        )
        if note:
            say(self._run.world, note)
        if config.log_gradients:
            paths = [v.path for v in state.model.trainable_variables]
            self._telemetry.gradients(step, paths, result["layers"].numpy())


DRIFT_EVERY = 1000  # steps


class CheckDrift:
    """Checks that all ranks hold the same weights and state, every DRIFT_EVERY steps."""

    settles = False

    def __init__(self, run: RunContext) -> None:
        # Each rank has moving statistics of its own until they are synced.
        alike = run.config.bn_sync == "full" or run.config.virtual_ranks
        apart = set() if alike else batch_norm.moving_ids(run.model)
        named = run.state.variables.items()
        self._world = run.world
        self._named = {n: v for n, v in named if id(raw(v)) not in apart}

    def due(self, step: int) -> bool:
        return step % DRIFT_EVERY == 0

    def __call__(self, step: int, result: Result) -> None:
        agreement.check_same_state(self._world, self._named, step)


class CheckNumbers:
    """Tells, once for each, of a layer's number that was changed after the step was traced."""

    settles = False

    def __init__(self, run: RunContext) -> None:
        self._world = run.world
        self._every = run.config.log_every
        self._layers = run.state.task_state.layers
        self._traced = self._numbers()

    def due(self, step: int) -> bool:
        return step % self._every == 0

    def __call__(self, step: int, result: Result) -> None:
        for place, value in self._numbers().items():
            traced = self._traced.get(place, value)
            if value == traced:
                continue
            del self._traced[place]  # it is told once
            say(
                self._world,
                f"note: {place} is {value:g} since, and steps compute with {traced:g}: their graph "
                "keeps a number of Python as it was; make it a tf.Variable and assign to that",
            )

    def _numbers(self) -> dict[str, float]:
        """Not of whole numbers: layers may count their calls."""
        found = {}
        for layer in self._layers:
            for name, value in vars(layer).items():
                if type(value) is float and not name.startswith("_") and not math.isnan(value):
                    found[f"{layer.path or layer.name}.{name}"] = value
        return found


class Own:
    """An action of the task: an error in it ends all ranks with one sentence."""

    def __init__(self, world: World, action: Action) -> None:
        self._world = world
        self._action = action
        self.settles = action.settles
        self.due = action.due
        self._name = f"the task's action {type(action).__name__}"

    def __call__(self, step: int, result: Result) -> Ending | None:
        """An ending that any rank returns is every rank's."""
        ending = None
        with self._world.fail_together(f"step {step}"), task_checks.user_code_errors(self._name):
            ending = self._action(step, result)
            if not isinstance(ending, Ending | None):
                raise ValueError(
                    f"{self._name} returned {ending!r}: it must return None, or an Ending "
                    "(hvdkit/run/health.py) where the run must end"
                )
        everyone = self._world.gather_alike(ending, f"{self._name}.{step}")
        return next((Ending(*theirs) for theirs in everyone if theirs), None)


def evaluation_due(config: Settings, step: int) -> bool:
    every = config.eval_every
    return step == config.num_steps or bool(every and step % every == 0)


class Save:
    """A checkpoint every so many steps, before an evaluation, after the last step."""

    settles = True

    def __init__(self, run: Run) -> None:
        self._run = run.context
        self._saver = run.saver
        self._sync = run.sync
        self._telemetry = run.telemetry
        self._place = run.sampler.place
        # A checkpoint of another folder is not in this one yet.
        self._saved_at = run.start.step if run.start.source == "own" else None

    def due(self, step: int) -> bool:
        every = self._run.config.checkpoint_every
        return evaluation_due(self._run.config, step) or bool(every and step % every == 0)

    def __call__(self, step: int, result: Result | None = None) -> None:
        if step == self._saved_at:
            return
        run = self._run
        with self._telemetry.not_training():
            self._sync()
            # Rank 0's is saved: the others' would be lost. Weights are compared at the end.
            untrained = set(map(id, run.state.untrained))
            named = {n: v for n, v in run.state.variables.items() if id(raw(v)) in untrained}
            agreement.check_same_state(run.world, named, step)
            self._saver.save(self._place(step), run.state.variables, run.config)
        self._saved_at = step

    def last(self, step: int) -> None:
        """Every rank learns whether it could be written; raises Stop where not."""
        self(step)
        with self._telemetry.not_training():
            self._saver.last(self._place(step), self._run.state.variables, self._run.config)


class Evaluate:
    """The score of the weights, or of their moving average; when to stop early.

    It comes after Save: whatever fails in an evaluation, the trained weights are on disk.
    """

    settles = True

    def __init__(self, run: Run) -> None:
        self._run = run.context
        self._saver = run.saver
        self._evaluator = run.evaluator
        self._stop_signal = run.health.stop_signal
        self._sync = run.sync
        self._telemetry = run.telemetry
        other_step, other_measure = run.context.checkpoints.other_scores()
        if other_measure:
            say(run.world, f"note: {other_measure}")
        # From where on this folder has scores of this measure.
        self._scored_since = other_step if run.start.source == "own" else run.start.step
        self._metric = scores.of_task(run.task)
        self.best = run.context.checkpoints.best()  # of the run so far
        self.figures: dict[str, float] = {}  # of the newest evaluation

    def due(self, step: int) -> bool:
        return evaluation_due(self._run.config, step)

    def __call__(self, step: int, result: Result | None = None) -> Ending | None:
        run = self._run
        with self._telemetry.not_training():
            self._sync()
            with run.state.averaged_weights():
                found = self._evaluator.run(lambda: self._stop_signal.asked)
            if found is None:  # rerun, it evaluates this checkpoint first
                return Ending(PREEMPTED, "preempted", "stop signal received", save=True)
            self.figures = found.figures
            main = self._metric.name
            # The score last: what lacks it is evaluated, and logged, again.
            self._telemetry.evaluation(
                step, self.figures, main_metric=main, pictures=found.pictures
            )
            if (counts := found.confusion()) is not None:
                names = metrics.class_names(len(counts), run.val_source, run.train_source)
                self._telemetry.confusion(names, counts)
            score = self._compared(step)
            self._saver.add_score(score)
        best = self.best
        config = run.config
        if step < config.num_steps:  # a run that goes on later judges it then
            judge_plateau(run, value=score.value, step=step)
        best_step = max(best.since if best else 0, self._scored_since)
        if step >= config.num_steps or not stopped_improving(config, step, best_step):
            return None
        above = "below" if self._metric.mode == "min" else "above"
        above = f"{above} {best.value:.4f}, of step {best.since}," if best else "that is a number"
        return Ending(
            DONE,
            "early stop",
            f"stopped early: no {main} {above} in {config.early_stop_evals} evaluations",
            save=True,
        )

    def _compared(self, step: int) -> Score:
        """The score of the newest evaluation, after a look whether it is the run's best."""
        value = self.figures[self._metric.name]
        loss = self.figures["loss"]
        best = self.best
        since = best.since if best and value == best.value else step
        score = Score(value, step, loss, since)
        is_better = best is None or self._metric.rank(score) > self._metric.rank(best)
        if math.isfinite(value) and is_better:  # as the checkpoints': infinity is never the best
            self.best = score
        return score

    def best_figures(self) -> dict[str, str | float]:
        """For the run's summary."""
        found = {"main_metric": self._metric.name, "main_metric_mode": self._metric.mode}
        if self.best:
            found |= {"best_score": self.best.value, "best_step": self.best.step}
        elif self.figures:
            found["no_best"] = self.describe_best()
        return found

    def describe_best(self) -> str:
        """Its score and step, or why there is none; empty where there was no evaluation."""
        best = self.best
        name = self._metric.name
        if best:
            return f"best {name}: {best.value:.4f}, of step {best.step}"
        return scores.none_is_best(name) if self.figures else ""


def evaluates_first(run: RunContext, found: CheckpointInfo) -> bool:
    """Whether a resumed run begins with an evaluation: one that is missing, or an ended run's."""
    config = run.config
    best = run.checkpoints.best()
    if config.benchmark or not evaluation_due(config, found.step):
        return False
    if found.step == config.num_steps or run.checkpoints.score_of(found) is None:
        return True
    return found.is_own and stopped_improving(config, found.step, best.since if best else 0)
