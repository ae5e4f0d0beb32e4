"""A run, as `train.py` sees it: the parts of a step, the batches, and what follows each step.

`Run.__init__` prepares and begins, `batches` and `after_step` loop, `hvdkit.main` calls `finish`.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdkit import logs, scores
from hvdkit.checkpoint import files, run_folder
from hvdkit.data import card
from hvdkit.data.pipeline import reason_of
from hvdkit.data.place import BEGINNING
from hvdkit.data.readers import remote
from hvdkit.observe import trackers
from hvdkit.observe.telemetry import Telemetry
from hvdkit.ranks import agreement, jit_cache
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.messages import heartbeat
from hvdkit.ranks.peers import left_alone
from hvdkit.ranks.world import World, say
from hvdkit.run import modes
from hvdkit.run import parts as parts_lib
from hvdkit.run.actions import Action, Evaluate, Save, ends_call, evaluates_first
from hvdkit.run.context import begin, describe, find_start, make_task, notes, prepare
from hvdkit.run.health import Ending
from hvdkit.settings import Settings
from hvdkit.stop import BUG, DONE, NOT_NOW, PREEMPTED, WRONG_USE, GoBack, Stop
from hvdkit.train.step import calls, reduction
from hvdkit.train.step.step import Result
from hvdkit.train.step.tracing import direct_call
from hvdkit.train.task import protocol as tasks

_ONE_EACH = "train.py: each batch of run.batches() needs one run.after_step(result)"
_ONE_STEP = (
    "train.py: each batch of run.batches() takes one step: call step(batch) once"
)


class Run:
    """One run on all ranks, made by `hvdkit.main`; every rank must use it alike.

    Attributes:
      settings: resolved for this number of ranks.
      world: rank, size and what ranks exchange outside a step.
      task, model, optimizer, state: as the task and the settings make them.
      weights: the model's trainable variables, what a step's gradients are taken of.
      reduction: what hvd.DistributedGradientTape takes besides `op`.
      context, parts: all that the run is made of.
    """

    def __init__(
        self,
        given: Settings,
        world: World,
        *,
        stop_signal: StopSignal,
        back: GoBack | None = None,
    ) -> None:
        """Data, model, weights of the start. Raises Stop, on all ranks, where it is refused."""
        self.world = world
        self._given = given
        agreement.check_code(world)
        self._ranks_line = world_lib.describe(world)
        say(world, self._ranks_line)
        with world.fail_together("reading the settings"):
            config = given.for_ranks(world.size)
        checkpoint, self._listed = find_start(config, world, back)
        path = checkpoint.path if checkpoint else None
        place = checkpoint.place if checkpoint else BEGINNING
        task = make_task(config, world)
        context = prepare(task, config, world, checkpoint=path, place=place)
        self._model_line = describe(context, place)
        say(world, self._model_line)
        for note in notes(context):
            say(world, f"note: {note}")

        self.context = context
        self.task = context.task
        self.model = context.model
        self.optimizer = context.optimizer
        self.state = context.state
        # What train.py reads of these settings counts as read by the task.
        self.settings = tasks.settings_of(task, context.config)
        self.parts = parts_lib.build(context, begin(context, checkpoint), stop_signal)
        self.weights = self.parts.step.weights
        self.reduction = self.parts.step.reduction

        # A run of another mode keeps no last checkpoint, and goes back to none.
        self._keeps_weights = modes.of(config) == "train"
        self._step = self.parts.start.step
        self._per_call = context.config.steps_per_call
        self._first = self._step  # The first step of the newest call.
        self._batches: calls.Batches | None = None  # Of the newest call.
        self._call: calls.CallResult | None = None  # What the newest call returned.
        self._due: list[Action] = []  # What acts after the newest call.
        self._newest_function: Callable[[Any], Result] | None = None
        # Whether make_step returned another function than that.
        self._is_wrapped = False
        self._ending: Ending | None = None
        self._waits_for_result = False
        self._step_calls = 0  # The step was called so often since the newest batch.
        self._actions: list[Action] = []  # They are made once the run's folder is open.
        self.open_parts = contextlib.ExitStack()

    @property
    def step(self) -> int:
        """Number of the step whose batch was given last, from 1; not for use in a graph.

        With --steps_per_call, of the last step of the call.
        """
        if tf.inside_function():
            raise ValueError(
                f"run.step is a number of Python, which a graph would keep at {self._step}: in a "
                "step use run.state.step, a variable that counts the steps before this one"
            )
        return self._step

    # ---- the step ---------------------------------------------------------------------------

    def loss(self, batch: Any, losses: Any = None) -> tf.Tensor:
        """This rank's part of the loss of a batch, to take gradients of: see `Step.loss`."""
        return self.parts.step.loss(batch, losses)

    def losses(self, batch: Any, losses: Any = None) -> dict[str, tf.Tensor]:
        """Each term of the loss by itself, for gradients of their own: see `Step.losses`."""
        return self.parts.step.losses(batch, losses)

    def update(self, gradients: list) -> Result:
        """Applies gradients that are summed over ranks: see `Step.update`."""
        return self.parts.step.update(gradients)

    def function(self, function: Callable[[Any], Result]) -> Callable[[Any], Result]:
        """One graph of a step, traced at once with the batch's signature, checked on all ranks.

        Returns the function of a batch that runs it; votes and checks travel with it unseen.

        Raises Stop: on all ranks, where the settings need the engine's step (`make_step`).
        """
        if reason := self.parts.step.special:
            raise Stop(WRONG_USE, f"{reason} needs run.make_step in train.py")
        return self._trace(function)

    def _trace(self, function: Callable[[Any], Result]) -> Callable[[Any], Result]:
        heartbeat.begin()
        parts = self.parts
        parts.traced_step = parts.step.trace(function)
        call_graph = direct_call(parts.traced_step, parts.feed.spec)
        if self._per_call > 1:
            with self.world.fail_together("making several steps one call"):
                call_several = calls.several(parts.traced_step, parts.feed.spec)

        # AutoGraph would hide the sentence of the Stop.
        @tf.autograph.experimental.do_not_convert
        def step(batch: Any) -> Result:
            # A graph would take this step's votes for those of each step.
            if tf.inside_function():
                raise Stop(
                    WRONG_USE, "train.py: the step is a graph: leave tf.function out"
                )
            self._step_calls += 1
            heartbeat.enter_step()
            try:
                if self._per_call == 1:
                    result = call_graph(batch, parts.health.votes())
                elif isinstance(batch, calls.Batches) and batch is self._batches:
                    result = self._call = call_several(batch)
                else:
                    raise Stop(WRONG_USE, calls.REFUSED)
            except tf.errors.OpError as error:
                # Another rank ended: see ranks/peers.py.
                if "Horovod" in str(error) or left_alone(error):
                    raise
                reason = reason_of(error)
                fault = jit_cache.fault(reason)
                place = f"at step {self._step}"
                if self._first < self._step:
                    place = f"at one of the steps {self._first} to {self._step}"
                logs.complain(
                    f"the step failed on rank {self.world.rank}, {place}: {fault or reason}"
                )
                sys.exit(NOT_NOW if fault else BUG)
            if self.world.size > 1:
                parts.health.pace.add(*calls.times(result))
            return result if self._per_call == 1 else dict(result)

        self._newest_function = step
        return step

    def make_step(self, make: Callable[["Run"], Callable]) -> Callable[[Any], Result]:
        """The step of `make`; with settings that reduce in messages of their own, the engine's.

        Raises Stop: on all ranks, when `make` is not the template's step and the settings (virtual
        ranks, packed gradients, bfloat16 on the wire) would leave it out.
        """
        step_parts = self.parts.step
        engine_step = step_parts.own_step()
        step_parts.of_template = reduction.is_template(make)
        if engine_step is None:
            step = make(self)
            self._is_wrapped = step is not self._newest_function
            return step
        with self.world.fail_together("making the step"):
            reduction.check_make_step(make, step_parts.special)
        return self._trace(engine_step)

    # ---- the loop ---------------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        """This rank's batches, from where the run begins to its end; each needs one `after_step`.

        The run's folder is opened at the first `next`: until then nothing on disk has changed. A
        stop signal, a fault or an early stop ends it sooner. With --steps_per_call each is the
        `calls.Batches` of a call.
        """
        parts = self.parts
        if not hasattr(parts, "traced_step"):
            raise Stop(
                WRONG_USE,
                "train.py: make the step, by run.make_step, before run.batches()",
            )
        if self._actions:
            raise Stop(
                WRONG_USE, "train.py: run.batches() yields the whole run: call it once"
            )
        needs_python = self._is_wrapped or len(parts.step.functions) > 1
        if self._per_call > 1 and needs_python:
            raise Stop(
                WRONG_USE,
                f"--steps_per_call={self._per_call} needs a train.py with one run.function, "
                "called by nothing but the loop: leave the flag out",
            )
        self._open_folder()
        while self._step < parts.config.num_steps and not self._ending:
            self._first = self._step + 1
            self._step = self._end_of_call()
            heartbeat.enter_step()
            batch: Any
            if self._per_call > 1:
                batch = self._batches = self._batches_of_call()
            else:
                batch = parts.feed.next()
            heartbeat.pause_step()
            self._waits_for_result = True
            self._step_calls = 0
            self._step_began = time.perf_counter()
            yield batch
            if self._waits_for_result:
                raise Stop(WRONG_USE, _ONE_EACH)

    def _end_of_call(self) -> int:
        """The last step of the next call: one after which something is due, if none is too many.

        Actions are asked once for each step, in order, as they may count.
        """
        if self._per_call == 1:
            return self._first
        last = min(self._first + self._per_call - 1, self.parts.config.num_steps)
        for step in range(self._first, last + 1):
            self._due = [action for action in self._actions if action.due(step)]
            if any(ends_call(action, step) for action in self._due):
                return step
        return last

    def _batches_of_call(self) -> calls.Batches:
        batches = []
        votes = []
        for _ in range(self._first, self._step + 1):
            batches.append(self.parts.feed.next())
            votes.append(self.parts.health.votes())
        return calls.Batches(batches, votes)

    def after_step(self, result: Result) -> None:
        """Judges the step, then logs, saves and evaluates as is due; every rank must call it."""
        if not self._waits_for_result:
            raise Stop(WRONG_USE, _ONE_EACH)
        if self._step_calls != 1:
            raise Stop(WRONG_USE, _ONE_STEP)
        self._waits_for_result = False
        self.parts.seconds_in_steps += time.perf_counter() - self._step_began
        if self._per_call == 1:
            self._due = [action for action in self._actions if action.due(self.step)]
        elif self._call:
            # A train.py may have made another mapping of the last step's result.
            result = self._call.with_last(result)
        due = self._due
        # An action that settles looks at the weights.
        at_once = any(action.settles for action in due)
        ending = self.parts.health.after_step(result, at_once=at_once)
        if not (ending and ending.code != PREEMPTED):
            # After a stop this step is logged and saved like any other; a rerun evaluates.
            for action in due:
                if not (ending and action is self._evaluate):
                    ending = action(self.step, result) or ending
        self._ending = ending

    def _open_folder(self) -> None:
        """Nothing refuses the run any more: its folder becomes this run's."""
        context = self.context
        parts = self.parts
        start = parts.start
        benchmark = modes.before_folder(parts, self._given)
        task_actions = modes.actions_of_task(context)
        # An interruption may have left out the evaluation of the checkpoint.
        evaluates = start.checkpoint is not None and evaluates_first(
            context, start.checkpoint
        )
        with self.world.fail_together("opening the run folder"):
            own_trackers = []
            if self.world.is_chief:
                own_trackers = self._begin_folder(evaluates)
            parts.telemetry = Telemetry(
                parts.config, self.world, parts.sampler, started=own_trackers
            )
            parts.telemetry.started(start.step, self._described())
        parts.health.bad_samples.begin()
        if start.checkpoint:
            say(self.world, f"resuming from {start.path} at step {start.step}")

        self._save = Save(parts)
        self._evaluate = Evaluate(parts)
        recorder = modes.profiler(parts)
        self._actions = modes.actions(
            parts,
            task_actions,
            save=self._save,
            evaluate=self._evaluate,
            benchmark=benchmark,
            recorder=recorder,
        )
        if recorder:
            self.open_parts.enter_context(recorder)
        # However the run ends, nothing reads ahead any more, and what is being written is written.
        for part in (parts.feed, parts.saver, parts.telemetry):
            self.open_parts.enter_context(part)
        source = context.train_source
        if remote.is_remote(source) and self.world.local_rank == 0:
            ahead = remote.fetched_ahead(
                source, lambda: parts.sampler.coming_shards(self.step)
            )
            self.open_parts.enter_context(ahead)
        if evaluates:
            # A checkpoint of another folder is not in this one yet.
            self._save(start.step)
            self._ending = self._evaluate(start.step)

    def _begin_folder(self, evaluates: bool) -> list[trackers.Tracker]:
        """Returns the user's trackers, which may refuse the run before its folder is changed."""
        config = self.context.config
        folder = Path(config.run_dir)
        names = [name for name in config.tracker_names if name != trackers.BUILT_IN]
        started: list[trackers.Tracker] = []

        def start_trackers() -> None:
            started.extend(trackers.make(names, folder, dataclasses.asdict(config)))

        try:
            note = run_folder.begin(
                folder,
                self.parts.start.checkpoint,
                config,
                evaluates_first=evaluates,
                listed=self._listed,
                start_trackers=start_trackers,
            )
        except BaseException:
            for tracker in started:
                with contextlib.suppress(Exception):
                    tracker.close()
            raise
        if note:
            say(self.world, note)
        card.keep_names(
            folder, self.context.checkpoints.card, self.context.train_source
        )
        return started

    def _described(self) -> dict[str, str]:
        """What the run's record says of this start."""
        metric = scores.of_task(self.task)
        description = {
            "what": self._model_line,
            "where": self._ranks_line,
            "score": metric.name,
            "score_mode": metric.mode,
            "measure": files.digest_of(self.context.checkpoints.measure),
        }
        config = self.context.config
        first_weights = config.init_from or config.backbone_weights
        if self.parts.start.source == "other":
            description["from"] = str(self.parts.start.path)
        elif self.parts.start.source == "new" and first_weights:
            description["from"] = first_weights
        return description

    def finish(self) -> None:
        """The last checkpoint, the records, the exit code; raises Stop or GoBack, on all ranks."""
        if not self._actions or self._waits_for_result:
            raise Stop(WRONG_USE, _ONE_EACH)
        num_steps = self.context.config.num_steps
        with self.open_parts:
            ending = self._ending or self.parts.health.verdict()
            if ending is None and self.step < num_steps:
                ending = Ending(
                    DONE,
                    "ended by train.py",
                    f"train.py ended the run at step {self.step} of {num_steps}",
                    save=True,
                )
            if (ending is None or ending.save) and self._keeps_weights:
                self._save.last(int(self.state.step))
                self.parts.health.stop_signal.saved = True
        if ending and ending.bad_since and self._keeps_weights:
            self._go_back(ending)
        self.parts.sync()
        self._summarize(ending)
        if ending and ending.code != DONE:
            raise Stop(ending.code, ending.message + self._prospects(ending))
        if ending:
            say(self.world, ending.message)

    def _go_back(self, ending: Ending) -> None:
        """Raises GoBack on all ranks, once a run, where a checkpoint is before the bad steps.

        The batches between are left out, as in Chowdhery et al. 2022 (PaLM, arXiv:2204.02311,
        section 5.1): from the same weights they would lead to the same steps.
        """
        checkpoint = self.context.checkpoints.sound_before(ending.bad_since)
        if checkpoint and not self.parts.start.place.passed_over:
            step = ending.bad_until
            say(
                self.world,
                f"note: {ending.message}. Going back to step {checkpoint.step}; the batches of "
                f"steps {checkpoint.step + 1} to {step} are left out. A run goes back only once",
            )
            raise GoBack(str(checkpoint.path), step)

    def _summarize(self, ending: Ending | None) -> None:
        """The run's last records, after proof that all ranks hold the same weights.

        Raises Stop: on all ranks, when the weights differ.
        """
        state = self.state
        telemetry = self.parts.telemetry
        sha256 = world_lib.weights_sha256(self.model.variables)
        self.world.check_same(sha256, "the final weights")
        if ending:
            reason, code = ending.reason, ending.code
        else:
            reason = "benchmark" if self.context.config.benchmark else "done"
            code = DONE
        telemetry.summary(
            {
                "step": int(state.step),
                "exit_reason": reason,
                "exit_code": code,
                "skipped_steps": int(state.skipped),
                "samples_passed_over": self.parts.start.place.passed_over,
                "samples_per_second": telemetry.median_speed(),
                **{
                    f"eval_{name}": value
                    for name, value in self._evaluate.figures.items()
                },
                **self._evaluate.best_figures(),
                "weights_sha256": sha256,
                "ranks": self.world.size,
                "fingerprint": self.context.fingerprint,
            }
        )
        if self._keeps_weights and self.world.is_chief:
            if sentence := self._evaluate.describe_best():
                logs.say(sentence)
            _report(Path(self.context.config.run_dir))

    def _prospects(self, ending: Ending) -> str:
        """What the message of an ending adds, for a person who wants to go on."""
        prospects = ""
        passed_over = self.parts.start.place.passed_over
        if ending.bad_since and passed_over:
            prospects += f" It went back once, and left out {passed_over:,} samples."
        if ending.code == PREEMPTED and self._keeps_weights:
            prospects += f": saved at step {int(self.state.step)}; rerun"
            if self.context.config.resume != "auto":
                prospects += " with --resume=auto"
            prospects += " to resume"
        return prospects


def _report(run_dir: Path) -> None:
    try:
        # The import stands here because it takes half a second.
        from hvdkit.observe import report

        logs.say(f"report: {report.write(run_dir)}")
    except Exception as error:  # A run without its report is still a good one.
        logs.say(f"note: no report: {type(error).__name__}: {error}")
