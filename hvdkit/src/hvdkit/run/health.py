"""What can go wrong in mid-run: this rank's votes, and a verdict that is the same on all ranks."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf

from hvdkit import whole_files
from hvdkit.checkpoint import lease, run_folder
from hvdkit.checkpoint.saver import MOST_FAILED
from hvdkit.data.pipeline import Replaced
from hvdkit.logs import join
from hvdkit.observe import records
from hvdkit.ranks import agreement
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.messages import heartbeat
from hvdkit.ranks.stragglers import Pace
from hvdkit.ranks.world import World, say
from hvdkit.settings import Settings
from hvdkit.stop import BUG, DIVERGED, NOT_NOW, PREEMPTED, WRONG_USE, Stop, passes
from hvdkit.train import fixed_point, objective
from hvdkit.train import optimizer as optimizers
from hvdkit.train.gradients import LossScale
from hvdkit.train.step import Result

if TYPE_CHECKING:
    from hvdkit.run.loop import Run

# float16: from the first loss scale to its floor there are 25 halvings.
MOST_SKIPS = 20


class Ending(NamedTuple):
    """Why a run ends before its last step, or at it."""

    code: int  # exit code, see hvdkit/stop.py
    reason: str  # one or two words, for summary.json
    message: str  # a sentence for a person; empty where there is nothing to say
    save: bool  # whether the weights as they are now are worth a checkpoint
    bad_since: int = 0  # the first of the steps that an earlier checkpoint and other data may mend


class Health:
    """This rank's votes, and what the votes and figures of all ranks say about the run."""

    def __init__(self, run: Run, stop_signal: StopSignal) -> None:
        self._world = run.world
        self._config = run.settings
        self._sampler = run.sampler
        self._feed = run.feed
        self._saver = run.saver
        self._state = run.state
        self.stop_signal = stop_signal
        self.pace = Pace(run.world, run.sampler.micro_batches * run.sampler.local_micro_size)
        self.bad_samples = BadSamples(run.world, run.settings, run.sampler.num_samples)
        self._run_dir = Path(run.settings.run_dir)
        self._trainable = run.state.trainable_flags()
        self._fault: tuple | None = None  # of this rank at the newest step, an Ending
        self._float16 = run.settings.precision == "float16"
        self._noted = False  # that gradients are too small
        self._waits: Result | None = None  # of the newest step, until it is judged
        self.waited = 0.0  # seconds that verdicts waited for steps to be done: a GPU works then

    def votes(self) -> tf.Tensor:
        """This rank's votes on the batch it was given last, float64 [NUM_VOTES]."""
        heartbeat.enter_step()
        self._saver.look()
        self._fault = self._found_fault()
        return agreement.votes(
            data_failed=self._fault is not None,
            stop_asked=self.stop_signal.asked,
            failed_saves=self._saver.failed,
            replaced=len(self._feed.replaced_at()),
        )

    def _found_fault(self) -> Ending | None:
        if error := self._feed.error:
            away = passes(error) or run_folder.data_away(self._config)
            code, reason = (NOT_NOW, "data away") if away else (WRONG_USE, "bad data")
            return Ending(code, reason, error, save=True)
        if self._state.trainable_flags() != self._trainable:
            try:
                optimizers.check_trainable(self._state.optimizer, self._state.model)
            except ValueError as why:
                return Ending(WRONG_USE, "trainable changed", str(why), save=True)
        if why := lease.lost(self._run_dir):
            return Ending(NOT_NOW, "taken over", why, save=False)
        return None

    def after_step(self, result: Result, *, at_once: bool) -> Ending | None:
        """`verdict` one step late, so that a GPU already has the next step to work on, unless
        `at_once` or the run ends."""
        ending = self.verdict()
        self._waits = result
        if ending or at_once:
            newest = self.verdict()
            if not ending or (newest and ending.code == PREEMPTED):  # others are graver
                ending = newest
        heartbeat.leave_step()
        return ending

    def verdict(self) -> Ending | None:
        """Why the run must end after the newest step, the same on every rank; None: it goes on.

        All ranks must call it after the same steps. Each step is judged once.
        """
        result = self._waits
        self._waits = None
        if result is None:
            return None
        start = time.perf_counter()
        counted = result["votes"].numpy()
        self.waited += time.perf_counter() - start
        heartbeat.beat()
        if "moments" in result:
            self.pace.add(result["moments"])
        if counted[agreement.DATA_FAILED]:
            errors = self._world.gather_objects(self._fault, "data.errors")
            ending = Ending(*next(error for error in errors if error))
            if ending.reason == "taken over":  # it must not write to its folder any more
                raise Stop(ending.code, ending.message)
            return ending
        if counted[agreement.REPLACED]:
            step = int(result["step"])
            if why := self.bad_samples.add(step, self._feed.replaced_at(step)):
                return Ending(WRONG_USE, "bad data", why, save=True)
        note = fixed_point.note_on_underflow(result)
        if note and not self._noted:
            say(self._world, note)
            self._noted = True
        if fault := fixed_point.overflow(result):
            return Ending(*fault, save=False)
        if not result["finite"]:
            if fault := objective.refused_weights(result):
                return Ending(*fault, save=False)
            if ending := self._not_finite(result):
                return ending
        failed = int(counted[agreement.FAILED_SAVES])
        # Nothing to say where one was written since that vote.
        if failed >= MOST_FAILED and (
            why := self._world.broadcast_object(self._saver.error, "saves.failed")
        ):
            message = f"{failed} saves in a row were not written: {why}"
            return Ending(NOT_NOW if passes(message) else BUG, "saves failed", message, save=False)
        if counted[agreement.STOP_ASKED]:
            return Ending(PREEMPTED, "preempted", "stop signal received", save=True)
        return None

    def _not_finite(self, result: Result) -> Ending | None:
        """None where the next steps may do without this one."""
        step = int(result["step"])
        skipped = int(result["skipped_in_a_row"])
        rate = float(result["lr"])
        if not (math.isfinite(rate) and rate >= 0):  # whatever the data
            return Ending(DIVERGED, "diverged", _figures(result), save=False)
        most = self._config.max_bad_steps
        if self._float16:  # a smaller loss scale may help
            most = MOST_SKIPS if float(result["loss_scale"]) > LossScale.MIN_SCALE else 0
        # A run whose second half was skipped has not trained, however short it is.
        trained = step < self._config.num_steps or skipped <= self._config.num_steps // 2
        whose = self._whose(result)
        if skipped >= most or not trained:
            ending = Ending(DIVERGED, "diverged", _figures(result) + whose, save=False)
            return ending._replace(bad_since=step - skipped + 1)
        # A gradient that float16's loss scale made too large is usual.
        usual = self._float16 and math.isfinite(float(result["loss"]))
        if not usual:
            say(
                self._world,
                f"note: step {step} is skipped, its loss {float(result['loss']):g}, gradient "
                f"norm {float(result['grad_norm']):g}{whose}",
            )
        return None

    def _whose(self, result: Result) -> str:
        """Ranks whose loss is no number at a step, with their samples; or ""."""
        virtual_ranks = self._sampler.virtual_ranks
        before = int(result["step"]) - 1
        ranks = np.flatnonzero(~np.isfinite(losses(self._world, virtual_ranks, result))).tolist()
        kind = "virtual rank" if virtual_ranks else "rank"
        samples = {r: join(self._sampler.ids_of(before, r), 32) for r in ranks[:3]}
        parts = [f"{kind} {r} with samples {ids}" for r, ids in samples.items()]
        more = f" and {len(ranks) - 3} more ranks" if len(ranks) > 3 else ""
        return f" (no number: loss of {', '.join(parts)}{more})" if parts else ""


class BadSamples:
    """Training samples so far that were bad and replaced (data/pipeline.py), alike on all ranks.

    RUN_DIR/bad_samples.jsonl has a line for each: step, sample, by (the one in its place), why. A
    resume counts those up to its step.
    """

    def __init__(self, world: World, config: Settings, samples: int) -> None:
        self._world = world
        self._file = Path(config.run_dir) / run_folder.BAD_SAMPLES
        self._limit = config.max_bad_samples
        self._most = config.most_bad_samples(samples)
        self._why: dict[int, str] = {}  # by sample

    def begin(self) -> None:
        """Counts those of earlier starts; on every rank, once the run's folder is open.

        Raises Stop, on all ranks, where they are too many.
        """
        pairs = []
        with self._world.fail_together("reading earlier bad samples"):
            found = records.lines(self._file) if self._world.is_chief else []
            sound = [one for one in found if isinstance(one.get("sample"), int)]
            pairs = [[one["sample"], str(one.get("why"))] for one in sound]
        self._why = dict(self._world.broadcast_object(pairs, "bad_samples.begin"))
        if too_many := self._too_many():
            raise Stop(WRONG_USE, too_many)

    def add(self, step: int, own: list[Replaced]) -> str:
        """Adds what this rank replaced at a step; a sentence where there are too many by now.

        Every rank must call it once for each step at which any rank replaced a sample.
        """
        everyone = self._world.gather_objects([list(one) for one in own], "bad_samples.add")
        found = sorted(Replaced(*one) for theirs in everyone for one in theirs)
        self._why |= {one.sample: one.why for one in found}
        say(self._world, f"note: step {step}: {len(found)} bad samples replaced: {found[0].why}")
        try:
            if self._world.is_chief:
                with whole_files.opened(self._file, append=True) as file:
                    file.writelines(json.dumps(one._asdict()) + "\n" for one in found)
        except OSError as error:  # a full disk ends no run
            say(self._world, f"note: {self._file} cannot be written: {error.strerror or error}")
        return self._too_many()

    def _too_many(self) -> str:
        if len(self._why) <= self._most:
            return ""
        return (
            f"{len(self._why):,} bad training samples, more than --max_bad_samples={self._limit}: "
            f"{self._file} lists them; the last: {[*self._why.values()][-1]}"
        )


def losses(world: World, virtual_ranks: int, result: Result) -> np.ndarray:
    """Mean loss of each rank, or of each virtual one; every rank must call it.

    It is not in the step, whose messages must not grow with the number of ranks.
    """
    own = result["losses"].numpy()
    return own if virtual_ranks else world.gather_numbers(own, "losses")[:, 0]


def _figures(result: Result) -> str:
    skipped = int(result["skipped_in_a_row"])
    scale = float(result["loss_scale"])
    scale = f", loss scale {scale:g}" if scale != 1 else ""
    row = f" ({skipped} steps in a row skipped{scale})" if skipped > 1 else ""
    loss = float(result["loss"])
    labels = ", and check for labels that are no class" if math.isnan(loss) else ""
    if math.isfinite(loss) and math.isnan(float(result["grad_norm"])):
        labels = ", and replace labels that are no number by tf.where, also where weight is 0"
    return (
        f"diverged at step {int(result['step'])}{row}: loss {loss:g}, gradient norm "
        f"{float(result['grad_norm']):g} at learning rate {float(result['lr']):g}. Checkpoints are "
        f"unchanged. Try a lower --base_lr, --warmup_steps, --clip_norm{labels}"
    )
