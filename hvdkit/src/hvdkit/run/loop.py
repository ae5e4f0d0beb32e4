"""A run, as `train.py` sees it: the parts of a step, the batches, and what follows each step.

`Run.__init__` prepares and begins, `batches` and `after_step` loop, `hvdkit.main` calls `finish`.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdkit import logs, scores
from hvdkit.checkpoint import run_folder
from hvdkit.checkpoint.saver import Saver
from hvdkit.data import card, remote
from hvdkit.data.pipeline import EvaluationFeed, TrainingFeed, reason_of
from hvdkit.data.place import BEGINNING
from hvdkit.data.sampler import Sampler, shards_of
from hvdkit.evaluate.evaluator import Evaluator
from hvdkit.observe.telemetry import Telemetry
from hvdkit.ranks import agreement
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.messages import heartbeat
from hvdkit.ranks.world import World, say
from hvdkit.run import modes
from hvdkit.run.actions import Action, Evaluate, Save, evaluates_first
from hvdkit.run.context import begin, describe, find_start, make_task, notes, prepare, train_reader
from hvdkit.run.health import Ending, Health
from hvdkit.settings import Settings
from hvdkit.stop import BUG, DONE, PREEMPTED, WRONG_USE, GoBack, Stop
from hvdkit.train import batch_norm, reduction, task, task_checks
from hvdkit.train.step import Result, Step
from hvdkit.train.tracing import direct_call

_ONE_EACH = "train.py: each batch of run.batches() needs one run.after_step(result)"
_ONE_STEP = "train.py: each batch of run.batches() takes one step: call step(batch) once"


class Run:
    """One run on all ranks, made by `hvdkit.main`; every rank must use it alike.

    Attributes:
      settings: resolved for this number of ranks.
      world: rank, size and what ranks exchange outside a step.
      task, model, optimizer, state: as the task and the settings make them.
      weights: the model's trainable variables, what a step's gradients are taken of.
      reduction: what hvd.DistributedGradientTape takes besides `op`.
    """

    def __init__(
        self, given: Settings, world: World, *, stop_signal: StopSignal, back: GoBack | None = None
    ) -> None:
        """Data, model, weights of the start. Raises Stop, on all ranks, where it is refused."""
        self.given = given
        self.world = world
        agreement.check_code(world)
        self.where = world_lib.describe(world)
        say(world, self.where)
        with world.fail_together("reading the settings"):
            self.settings = given.for_ranks(world.size)
        found, self._listed = find_start(self.settings, world, back)
        place = found.place if found else BEGINNING
        path = found.path if found else None
        made = make_task(self.settings, world)
        self.context = context = prepare(made, self.settings, world, checkpoint=path, place=place)
        self.task = context.task
        self.model = context.model
        self.optimizer = context.optimizer
        self.state = context.state
        self.what = describe(context, place)
        say(world, self.what)
        for note in notes(context):
            say(world, f"note: {note}")
        self.settings = task.settings_of(self.task, context.config)  # as train.py reads them
        self.start = begin(context, found)
        self._make_feeds()
        self._make_parts()
        self.mode = modes.of(self.settings)
        self.keeps_weights = self.mode == "train"  # its last checkpoint, and where to go back to
        self.saver = Saver(context.checkpoints)
        self.health = Health(self, stop_signal)
        self.traced_step: Callable[..., Result] | None = None  # the graph, of (batch, votes)
        self._step = self.start.step
        self._ending: Ending | None = None
        self._waits_for_result, self._stepped = False, 0  # steps called since the newest batch
        self.actions: list[Action] = []  # once the run's folder is open
        self.seconds_in_steps = 0.0
        self.open_parts = contextlib.ExitStack()

    @property
    def step(self) -> int:
        """Number of the step whose batch was given last, from 1; not for use in a graph."""
        if tf.inside_function():
            raise ValueError(
                f"run.step is a number of Python, which a graph would keep at {self._step}: in a "
                "step use run.state.step, a variable that counts the steps before this one"
            )
        return self._step

    def _make_feeds(self) -> None:
        """This rank's share of the data, and the evaluation."""
        context = self.context
        settings = self.settings
        world = self.world
        with world.fail_together("sharing out the data"):
            self.sampler = Sampler(
                num_samples=len(context.train_source),
                global_batch_size=settings.global_batch_size,
                micro_batches=settings.accumulation_steps,
                seed=settings.seed,
                rank=world.rank,
                size=world.size,
                virtual_ranks=settings.virtual_ranks,
                start=self.start.place,
                shards=shards_of(context.train_source, settings.shuffle_shards),
            )
            self.sync = batch_norm.make_sync(
                self.model,
                settings.bn_sync,
                weight=self.sampler.weight,
                virtual_ranks=settings.virtual_ranks,
            )
        workers = settings.data_workers or world.threads
        self.feed = TrainingFeed(
            self.sampler,
            train_reader(context),
            device=world_lib.gpu(),
            first_step=self.start.step,
            num_steps=settings.num_steps,
            workers=workers,
            replaces=settings.most_bad_samples(len(context.train_source)) > 0,
        )
        with world.fail_together("reading the validation data"):
            self.val_feed = EvaluationFeed(
                task_checks.reader(self.task, context.val_source, training=False),
                settings.eval_batch_size,
                rank=world.rank,
                size=world.size,
                workers=workers,
            )
        self.evaluator = Evaluator(context, self.val_feed)

    def _make_parts(self) -> None:
        """Those of a step."""
        config = self.context.config
        self.parts = Step(config, self.world, self.task, state=self.state, spec=self.feed.spec)
        self.weights = self.parts.weights
        self.reduction = self.parts.reduction

    # ---- the step ---------------------------------------------------------------------------

    def loss(self, batch: Any, losses: Any = None) -> tf.Tensor:
        """This rank's part of the loss of a batch, to take gradients of: see `Step.loss`."""
        return self.parts.loss(batch, losses)

    def losses(self, batch: Any, losses: Any = None) -> dict[str, tf.Tensor]:
        """Each term of the loss by itself, for gradients of their own: see `Step.losses`."""
        return self.parts.losses(batch, losses)

    def update(self, gradients: list) -> Result:
        """Applies gradients that are summed over ranks: see `Step.update`."""
        return self.parts.update(gradients)

    def function(self, function: Callable[[Any], Result]) -> Callable[[Any], Result]:
        """One graph of a step, traced at once with the batch's signature, checked on all ranks.

        Returns the function of a batch that runs it; votes and checks travel with it unseen.

        Raises Stop: on all ranks, where the settings need the engine's step (`make_step`).
        """
        if why := self.parts.special:
            raise Stop(WRONG_USE, f"{why} needs run.make_step in train.py")
        return self._trace(function)

    def _trace(self, function: Callable[[Any], Result]) -> Callable[[Any], Result]:
        self.traced_step = self.parts.trace(function)
        called = direct_call(self.traced_step, self.feed.spec)

        @tf.autograph.experimental.do_not_convert  # which would hide the sentence
        def step(batch: Any) -> Result:
            if tf.inside_function():  # this step's votes would be those of every step
                raise Stop(WRONG_USE, "train.py: the step is a graph: leave tf.function out")
            self._stepped += 1
            try:
                return called(batch, self.health.votes())
            except tf.errors.OpError as error:
                if "Horovod" in str(error):  # another rank ended: see ranks/peers.py
                    raise
                logs.complain(
                    f"the step failed on rank {self.world.rank}, at step {self._step}: "
                    f"{reason_of(error)}"
                )
                sys.exit(BUG)

        return step

    def make_step(self, make: Callable[["Run"], Callable]) -> Callable[[Any], Result]:
        """The step of `make`; with settings that reduce in messages of their own, the engine's.

        Raises Stop: on all ranks, when `make` is not the template's step and the settings (virtual
        ranks, packed gradients, bfloat16 on the wire) would leave it out.
        """
        own = self.parts.own_step()
        self.parts.of_template = reduction.is_template(make)
        if own is None:
            return make(self)
        with self.world.fail_together("making the step"):
            reduction.check_make_step(make, self.parts.special)
        return self._trace(own)

    # ---- the loop ---------------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        """This rank's batches, from where the run begins to its end; each needs one `after_step`.

        The run's folder is opened at the first `next`: until then nothing on disk has changed. A
        stop signal, a fault or an early stop ends it sooner.
        """
        if self.traced_step is None:
            raise Stop(WRONG_USE, "train.py: make the step, by run.make_step, before run.batches()")
        if self.actions:
            raise Stop(WRONG_USE, "train.py: run.batches() yields the whole run: call it once")
        self._open_folder()
        for step in range(self.start.step + 1, self.settings.num_steps + 1):
            if self._ending:
                return
            self._step = step
            heartbeat.enter_step()
            batch = self.feed.next()
            heartbeat.pause_step()
            self._waits_for_result = True
            self._stepped = 0
            self._called = time.perf_counter()
            yield batch
            if self._waits_for_result:
                raise Stop(WRONG_USE, _ONE_EACH)

    def after_step(self, result: Result) -> None:
        """Judges the step, then logs, saves and evaluates as is due; every rank must call it."""
        if not self._waits_for_result:
            raise Stop(WRONG_USE, _ONE_EACH)
        if self._stepped != 1:
            raise Stop(WRONG_USE, _ONE_STEP)
        self._waits_for_result = False
        self.seconds_in_steps += time.perf_counter() - self._called
        due = [action for action in self.actions if action.due(self.step)]
        at_once = any(action.settles for action in due)  # an action looks at the weights
        ending = self.health.after_step(result, at_once=at_once)
        if not (ending and ending.code != PREEMPTED):
            # After a stop this step is logged and saved like any other; a rerun evaluates.
            for action in due:
                if not (ending and action is self.evaluate):
                    ending = action(self.step, result) or ending
        self._ending = ending

    def _open_folder(self) -> None:
        """Nothing refuses the run any more: its folder becomes this run's."""
        context = self.context
        settings = self.settings
        world = self.world
        start = self.start
        modes.before_folder(self)
        others = modes.actions_of_task(context)
        make_up = start.found is not None and evaluates_first(context, start.found)
        with world.fail_together("opening the run folder"):
            if world.is_chief:
                folder = Path(settings.run_dir)
                note = run_folder.begin(
                    folder,
                    start.found,
                    settings,
                    evaluates_first=make_up,
                    listed=self._listed,
                )
                if note:
                    say(world, note)
                card.keep_names(folder, context.checkpoints.card, context.train_source)
            self.telemetry = Telemetry(settings, world, self.sampler)
            metric = scores.of_task(self.task)
            about = {
                "what": self.what,
                "where": self.where,
                "score": metric.name,
                "score_mode": metric.mode,
            }
            first = settings.init_from or settings.backbone_weights
            begun_from = {"new": first, "own": "", "other": str(start.path)}[start.source]
            if begun_from:
                about["from"] = begun_from
            self.telemetry.started(start.step, about)
        self.health.bad_samples.begin()
        if start.found:
            say(world, f"resuming from {start.path} at step {start.step}")
        self.save = Save(self)
        self.evaluate = Evaluate(self)
        self.actions = modes.actions(self, others)
        # However it ends: nothing reads ahead any more, what is being written is written.
        for part in (self.feed, self.saver, self.telemetry):
            self.open_parts.enter_context(part)
        source = self.context.train_source
        if getattr(source, "is_remote", False) and world.local_rank == 0:
            ahead = remote.fetched_ahead(source, lambda: self.sampler.coming_shards(self.step))
            self.open_parts.enter_context(ahead)
        if make_up:  # an evaluation that an interruption left out
            self.save(start.step)  # a checkpoint of another run's folder is not in this one yet
            self._ending = self.evaluate(start.step)

    def finish(self) -> None:
        """The last checkpoint, the records, the exit code; raises Stop or GoBack, on all ranks."""
        if not self.actions or self._waits_for_result:
            raise Stop(WRONG_USE, _ONE_EACH)
        with self.open_parts:
            ending = self._ending or self.health.verdict()
            if ending is None and self.step < self.settings.num_steps:
                message = f"train.py ended the run at step {self.step} of {self.settings.num_steps}"
                ending = Ending(DONE, "ended by train.py", message, save=True)
            if (ending is None or ending.save) and self.keeps_weights:
                self.save.last(int(self.state.step))
                self.health.stop_signal.saved = True
        if ending and ending.bad_since and self.keeps_weights:
            self._go_back(ending)
        self.sync()
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
        found = self.context.checkpoints.sound_before(ending.bad_since)
        if found and not self.start.place.passed_over:
            step = int(self.state.step)
            first = found.step + 1
            say(
                self.world,
                f"note: {ending.message}. Going back to step {found.step}; the batches of "
                f"steps {first} to {step} are left out. A run goes back only once",
            )
            raise GoBack(str(found.path), step)

    def _summarize(self, ending: Ending | None) -> None:
        """The run's last records, after proof that all ranks hold the same weights.

        Raises Stop: on all ranks, when the weights differ.
        """
        world = self.world
        state = self.state
        sha = world_lib.weights_sha256(self.model.variables)
        world.check_same(sha, "the final weights")
        reason = "benchmark" if self.settings.benchmark else "done"
        self.telemetry.summary(
            {
                "step": int(state.step),
                "exit_reason": ending.reason if ending else reason,
                "exit_code": ending.code if ending else DONE,
                "skipped_steps": int(state.skipped),
                "samples_passed_over": self.start.place.passed_over,
                "samples_per_second": self.telemetry.median_speed(),
                **{f"eval_{name}": value for name, value in self.evaluate.figures.items()},
                **self.evaluate.best_figures(),
                "weights_sha256": sha,
                "ranks": world.size,
                "fingerprint": self.context.fingerprint,
            }
        )
        if self.keeps_weights and world.is_chief:
            if told := self.evaluate.describe_best():
                say(world, told)
            _report(Path(self.settings.run_dir))

    def _prospects(self, ending: Ending) -> str:
        before = ""
        if ending.bad_since and (count := self.start.place.passed_over):
            before = f" It went back once, and left out {count:,} samples."
        if ending.code != PREEMPTED or not self.keeps_weights:
            return before
        how = "rerun" if self.settings.resume == "auto" else "rerun with --resume=auto"
        return f"{before}: saved at step {int(self.state.step)}; {how} to resume"


def _report(run_dir: Path) -> None:
    try:
        from hvdkit.observe import report  # here: it takes half a second to load

        logs.say(f"report: {report.write(run_dir)}")
    except Exception as error:  # a run without its report is still a good one
        logs.say(f"note: no report: {type(error).__name__}: {error}")
