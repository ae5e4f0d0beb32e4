"""A traced step without a run around it: train.py's own, or the engine's where settings ask."""

from __future__ import annotations

from types import SimpleNamespace

import horovod.tensorflow as hvd

import train
from hvdkit.train import reduction
from hvdkit.train.step import Step


def make_train_step(settings, world, task, *, state, spec):
    """The function of (batch, votes) that does one step; all ranks must call it together."""
    parts = Step(settings, world, task, state=state, spec=spec)
    own = parts.own_step()
    if own:
        return parts.trace(own)
    run = SimpleNamespace(
        function=parts.trace,
        loss=parts.loss,
        update=parts.update,
        reduction=parts.reduction,
        weights=parts.weights,
    )
    return train.make_step(run)


def distribute(tape, settings, variables):
    """The tape that sums over ranks with these settings, as a run's step has it."""
    if reduction.has_own_messages(settings):
        return reduction.RankSumTape(tape, settings, variables)
    return hvd.DistributedGradientTape(tape, op=hvd.Sum, **reduction.arguments(settings))
