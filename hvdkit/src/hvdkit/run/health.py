"""What can go wrong in mid-run: this rank's votes, and a verdict that is the same on all ranks."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from hvdkit import whole_files
from hvdkit.checkpoint import lease, run_folder
from hvdkit.checkpoint.saver import MOST_FAILED, Saver
from hvdkit.data.pipeline import Replaced, TrainingFeed
from hvdkit.data.sampler import Sampler
from hvdkit.logs import join
from hvdkit.observe import records
from hvdkit.ranks import agreement
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.messages import heartbeat
from hvdkit.ranks.stragglers import Pace
from hvdkit.ranks.world import World, say
from hvdkit.run.context import RunContext
from hvdkit.settings import Settings
from hvdkit.stop import (
    BUG,
    DIVERGED,
    NOT_NOW,
    PREEMPTED,
    WRONG_USE,
    Stop,
    passes,
    passes_for_a_run,
)
from hvdkit.train.optim import optimizer as optimizers
from hvdkit.train.step import calls, objective
from hvdkit.train.step.gradients import LossScale
from hvdkit.train.step.step import Result
from hvdkit.train.virtual import fixed_point

# float16: from the first loss scale to its floor there are 25 halvings.
MOST_SKIPS = 20


class Ending(NamedTuple):
    """Why a run ends before its last step, or at it.

    `code`: the exit code, see hvdkit/stop.py. `reason`: one or two words, for summary.json.
    `message`: a sentence for a person; "" where there is nothing to say. `save`: whether the
    weights as they are now are worth a checkpoint. `bad_since`, `bad_until`: the first and the last
    of the steps that an earlier checkpoint and other data may mend; 0 where there are none.
    """

    code: int
    reason: str
    message: str
    save: bool
    bad_since: int = 0
    bad_until: int = 0


class Health:
    """This rank's votes, and what the votes and figures of all ranks say about the run."""

    def __init__(
        self,
        run: RunContext,
        stop_signal: StopSignal,
        *,
        sampler: Sampler,
        feed: TrainingFeed,
        saver: Saver,
    ) -> None:
        self._world = run.world
        self._config = run.config
        self._sampler = sampler
        self._feed = feed
        self._saver = saver
        self._state = run.state
        self.stop_signal = stop_signal
        self.pace = Pace(run.world, sampler.micro_batches * sampler.local_micro_size)
        self.bad_samples = BadSamples(run.world, run.config, sampler.num_samples)
        self._run_dir = Path(run.config.run_dir)
        self._trainable = run.state.trainable_flags()
        self._fault: Ending | None = None  # This rank's first, with which the run ends.
        self._float16 = run.config.precision == "float16"
        self._noted = False  # Whether a note said that gradients are too small.
        self._unjudged: Result | None = None  # The newest call's, until it is judged.
        # Verdicts waited so many seconds for steps to be done: a GPU works then.
        self.waited = 0.0

    def votes(self) -> tf.Tensor:
        """This rank's votes on the batch it was given last, float64 [NUM_VOTES]."""
        self._saver.look()
        self._fault = self._fault or self._fault_here()
        return agreement.votes(
            data_failed=self._fault is not None,
            stop_asked=self.stop_signal.asked,
            failed_saves=self._saver.failed,
            replaced=len(self._feed.replaced_at()),
        )

    def _fault_here(self) -> Ending | None:
        """What this rank alone sees."""
        if error := self._feed.error:
            if passes(error) or run_folder.data_away(self._config):
                return Ending(NOT_NOW, "data away", error, save=True)
            return Ending(WRONG_USE, "bad data", error, save=True)
        if self._state.trainable_flags() != self._trainable:
            try:
                optimizers.check_trainable(self._state.optimizer, self._state.model)
            except ValueError as fault:
                return Ending(WRONG_USE, "trainable changed", str(fault), save=True)
        if message := lease.lost(self._run_dir):
            return Ending(NOT_NOW, "taken over", message, save=False)
        return None

    def after_step(self, result: Result, *, at_once: bool) -> Ending | None:
        """`verdict` one call late, so that a GPU already has the next one to work on, unless
        `at_once` or the run ends."""
        ending = self.verdict()
        self._unjudged = result
        if ending or at_once:
            newest = self.verdict()
            # Any other ending is graver than a stop signal's.
            if not ending or (newest and ending.code == PREEMPTED):
                ending = newest
        heartbeat.leave_step()
        return ending

    def verdict(self) -> Ending | None:
        """Why the run must end after the newest call, the same on every rank; None: it goes on.

        All ranks must call it after the same steps. Each step is judged once.
        """
        result = self._unjudged
        self._unjudged = None
        if result is None:
            return None

        start = time.perf_counter()
        result["votes"].numpy()
        self.waited += time.perf_counter() - start
        heartbeat.beat()
        endings = []
        for of_step in calls.each(result):
            ending = self._judge(of_step)
            if ending:
                endings.append(ending)
        # Any other ending is graver than a stop signal's.
        graver = [ending for ending in endings if ending.code != PREEMPTED]
        return next(iter(graver or endings), None)

    def _judge(self, result: Result) -> Ending | None:
        """`verdict` about one step."""
        votes = np.asarray(result["votes"])
        if votes[agreement.DATA_FAILED]:
            return self._fault_anywhere()
        if votes[agreement.REPLACED]:
            step = int(result["step"])
            if too_many := self.bad_samples.add(step, self._feed.replaced_at(step)):
                return Ending(WRONG_USE, "bad data", too_many, save=True)

        note = fixed_point.note_on_underflow(result)
        if note and not self._noted:
            say(self._world, note)
            self._noted = True
        if fault := fixed_point.overflow(result):
            return Ending(*fault, save=False)
        if not result["finite"]:
            if fault := objective.refused_weights(result):
                return Ending(*fault, save=False)
            if ending := self._end_at_skip(result):
                return ending

        failed = int(votes[agreement.FAILED_SAVES])
        if failed >= MOST_FAILED:
            error = self._world.broadcast_object(self._saver.error, "saves.failed")
            if error:  # There is none where a save was written since that vote.
                message = f"{failed} saves in a row were not written: {error}"
                code = NOT_NOW if passes_for_a_run(message) else BUG
                return Ending(code, "saves failed", message, save=False)
        if votes[agreement.STOP_ASKED]:
            return Ending(PREEMPTED, "preempted", "stop signal received", save=True)
        return None

    def _fault_anywhere(self) -> Ending:
        """The fault of the first rank that has one; raises Stop where nothing may be written."""
        everyone = self._world.gather_objects(self._fault, "data.errors")
        faults = [fields for fields in everyone if fields]
        ending = Ending(*faults[0])
        if ending.reason == "taken over":
            raise Stop(ending.code, ending.message)
        return ending

    def _end_at_skip(self, result: Result) -> Ending | None:
        """Why a step that was skipped, as it was not finite, ends the run; None: it goes on.

        All ranks must call it after the same step, since they may gather their losses.
        """
        step = int(result["step"])
        skipped = int(result["skipped_in_a_row"])

        # No other data would mend the rate.
        rate = float(result["lr"])
        if not (math.isfinite(rate) and rate >= 0):
            return Ending(DIVERGED, "diverged", _diverged(result), save=False)

        most = self._config.max_bad_steps
        if self._float16:
            may_lower_scale = float(result["loss_scale"]) > LossScale.MIN_SCALE
            most = MOST_SKIPS if may_lower_scale else 0
        # A run whose second half was skipped has not trained, however short it is.
        is_last = step >= self._config.num_steps
        is_untrained = is_last and skipped > self._config.num_steps // 2
        ranks = self._ranks_without_loss(result)
        if skipped >= most or is_untrained:
            message = _diverged(result) + ranks
            return Ending(
                DIVERGED,
                "diverged",
                message,
                save=False,
                bad_since=step - skipped + 1,
                bad_until=step,
            )
        # A gradient that float16's loss scale made too large is usual.
        loss = float(result["loss"])
        is_usual = self._float16 and math.isfinite(loss)
        if not is_usual:
            grad_norm = float(result["grad_norm"])
            say(
                self._world,
                f"note: step {step} is skipped, its loss {loss:g}, gradient "
                f"norm {grad_norm:g}{ranks}",
            )
        return None

    def _ranks_without_loss(self, result: Result) -> str:
        """Ranks whose loss is no number at a step, with their samples; or ""."""
        virtual_ranks = self._sampler.virtual_ranks
        by_rank = losses(self._world, virtual_ranks, result)
        ranks = np.flatnonzero(~np.isfinite(by_rank)).tolist()
        if not ranks:
            return ""

        kind = "virtual rank" if virtual_ranks else "rank"
        steps_before = int(result["step"]) - 1
        parts = []
        for rank in ranks[:3]:
            samples = join(self._sampler.ids_of(steps_before, rank), 32)
            parts.append(f"{kind} {rank} with samples {samples}")
        text = ", ".join(parts)
        if len(ranks) > 3:
            text += f" and {len(ranks) - 3} more ranks"
        return f" (no number: loss of {text})"


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
        self._reasons: dict[int, str] = {}  # Why each sample is bad, by its number.

    def begin(self) -> None:
        """Counts those of earlier starts; on every rank, once the run's folder is open.

        Raises Stop, on all ranks, where they are too many.
        """
        self._reasons = dict(
            self._world.from_chief("reading earlier bad samples", self._recorded)
        )
        if too_many := self._too_many():
            raise Stop(WRONG_USE, too_many)

    def _recorded(self) -> list[tuple[int, str]]:
        pairs = []
        for record in records.lines(self._file):
            if isinstance(record.get("sample"), int):
                pairs.append((record["sample"], str(record.get("why"))))
        return pairs

    def add(self, step: int, replaced: list[Replaced]) -> str:
        """Adds what this rank replaced at a step; a sentence where there are too many by now.

        Every rank must call it once for each step at which any rank replaced a sample.
        """
        bad_samples = []
        for of_rank in self._world.gather_objects(replaced, "bad_samples.add"):
            bad_samples += [Replaced(*fields) for fields in of_rank]
        bad_samples.sort()
        self._reasons |= {sample.sample: sample.why for sample in bad_samples}

        say(
            self._world,
            f"note: step {step}: {len(bad_samples)} bad samples replaced: {bad_samples[0].why}",
        )
        try:
            if self._world.is_chief:
                with whole_files.opened(self._file, append=True) as file:
                    for sample in bad_samples:
                        file.write(json.dumps(sample._asdict()) + "\n")
        except OSError as error:  # A full disk ends no run.
            reason = error.strerror or error
            say(self._world, f"note: {self._file} cannot be written: {reason}")
        return self._too_many()

    def _too_many(self) -> str:
        reasons = list(self._reasons.values())
        if len(reasons) <= self._most:
            return ""
        return (
            f"{len(reasons):,} bad training samples, more than --max_bad_samples={self._limit}: "
            f"{self._file} lists them; the last: {reasons[-1]}"
        )


def losses(world: World, virtual_ranks: int, result: Result) -> np.ndarray:
    """Mean loss of each rank, or of each virtual one; every rank must call it.

    It is not in the step, whose messages must not grow with the number of ranks.
    """
    values = np.asarray(result["losses"])
    return (
        values
        if virtual_ranks
        else world.gather_numbers(values.tolist(), "losses")[:, 0]
    )


def _diverged(result: Result) -> str:
    loss = float(result["loss"])
    grad_norm = float(result["grad_norm"])
    skipped = int(result["skipped_in_a_row"])
    loss_scale = float(result["loss_scale"])

    text = f"diverged at step {int(result['step'])}"
    if skipped > 1 and loss_scale != 1:
        text += f" ({skipped} steps in a row skipped, loss scale {loss_scale:g})"
    elif skipped > 1:
        text += f" ({skipped} steps in a row skipped)"
    text += (
        f": loss {loss:g}, gradient norm {grad_norm:g} at learning rate {float(result['lr']):g}. "
        "Checkpoints are unchanged. Try a lower --base_lr, --warmup_steps, --clip_norm"
    )
    if math.isnan(loss):
        text += ", and check for labels that are no class"
    elif math.isfinite(loss) and math.isnan(grad_norm):
        text += ", and replace labels that are no number by tf.where, also where weight is 0"
    return text
