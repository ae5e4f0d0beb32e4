"""A traced step without a run around it: train.py's own, or the engine's where settings ask."""

from __future__ import annotations

from types import SimpleNamespace

import horovod.tensorflow as hvd

import train
from hvdkit.ranks.world import raw
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


def rank_sums(tape, loss, settings, variables):
    """The gradients of `loss` summed over ranks, as a run's step has them with these settings."""
    raws = [raw(v) for v in variables]
    if reduction.has_own_messages(settings):
        return reduction.rank_sums(tape.gradient(loss, raws), settings, variables)
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **reduction.arguments(settings))
    return tape.gradient(loss, raws, use_generic_names=True)
