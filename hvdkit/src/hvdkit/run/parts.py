"""The parts of a run that actions, verdicts, modes and the model doctor work with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hvdkit.checkpoint.saver import Saver
from hvdkit.data.pipeline import EvaluationFeed, TrainingFeed
from hvdkit.data.sampler import Sampler, shards_of
from hvdkit.evaluate.evaluator import Evaluator
from hvdkit.observe.telemetry import Telemetry
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.world import World
from hvdkit.run.context import RunContext, Start, train_reader
from hvdkit.run.health import Health
from hvdkit.settings import Settings
from hvdkit.train.layers import batch_norm
from hvdkit.train.step.step import Result, Step
from hvdkit.train.task import checks as task_checks


@dataclasses.dataclass(kw_only=True)
class RunParts:
    """What a run is built of, once its weights are those of its start; made by `build`.

    `sampler` and `feed` give this rank's share of the training data, `sync` combines batch norm's
    moving statistics over ranks, `step` has the parts of a step. `traced_step`, the graph of a
    batch and votes, is there once the step is made, and `telemetry` once the run's folder is open.
    `seconds_in_steps` counts the time in calls of the step.
    """

    context: RunContext
    start: Start
    sampler: Sampler
    sync: Callable[[], None]
    feed: TrainingFeed
    val_feed: EvaluationFeed
    evaluator: Evaluator
    step: Step
    saver: Saver
    health: Health
    traced_step: Callable[..., Result] = dataclasses.field(init=False)
    telemetry: Telemetry = dataclasses.field(init=False)
    seconds_in_steps: float = 0.0

    @property
    def world(self) -> World:
        return self.context.world

    @property
    def config(self) -> Settings:
        return self.context.config


def build(context: RunContext, start: Start, stop_signal: StopSignal) -> RunParts:
    """Every rank must call it. Raises Stop, on all ranks, where a part cannot be made."""
    config = context.config
    world = context.world
    with world.fail_together("sharing out the data"):
        sampler = Sampler(
            num_samples=len(context.train_source),
            global_batch_size=config.global_batch_size,
            micro_batches=config.accumulation_steps,
            seed=config.seed,
            rank=world.rank,
            size=world.size,
            virtual_ranks=config.virtual_ranks,
            start=start.place,
            shards=shards_of(context.train_source, config.shuffle_shards),
        )
        sync = batch_norm.make_sync(
            context.model,
            config.bn_sync,
            weight=sampler.weight,
            virtual_ranks=config.virtual_ranks,
        )
    workers = config.data_workers or world.threads
    feed = TrainingFeed(
        sampler,
        train_reader(context),
        device=world_lib.gpu(),
        first_step=start.step,
        num_steps=config.num_steps,
        workers=workers,
        replaces=config.most_bad_samples(len(context.train_source)) > 0,
        ahead=max(2, config.steps_per_call),
    )
    with world.fail_together("reading the validation data"):
        val_feed = EvaluationFeed(
            task_checks.reader(context.task, context.val_source, training=False),
            config.eval_batch_size,
            rank=world.rank,
            size=world.size,
            workers=workers,
        )
    evaluator = Evaluator(context, val_feed)
    step = Step(config, world, context.task, state=context.state, spec=feed.spec)
    skipped = int(context.state.loss_scale.skipped_in_a_row)
    saver = Saver(context.checkpoints, skipped=skipped)
    return RunParts(
        context=context,
        start=start,
        sampler=sampler,
        sync=sync,
        feed=feed,
        val_feed=val_feed,
        evaluator=evaluator,
        step=step,
        saver=saver,
        health=Health(context, stop_signal, sampler=sampler, feed=feed, saver=saver),
    )
