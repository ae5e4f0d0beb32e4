"""What the checks on real ranks share: settings, a step without a run around it."""

from types import SimpleNamespace

import horovod.tensorflow as hvd
import numpy as np
from refusals import refused

import train
from hvdkit.ranks.world import raw
from hvdkit.settings import Settings
from hvdkit.stop import Stop
from hvdkit.train import reduction
from hvdkit.train.step import Step

PLAIN = Settings(global_batch_size=12, num_steps=100, base_lr=0.1, momentum=0.0)


def rng(*seed):
    return np.random.default_rng(seed)


def gathered(world, value, name):
    return world.gather_objects(np.asarray(value), name)


def differ(call, *words):
    return refused(call, *words, kind=Stop)


def make_train_step(settings, world, task, *, state, spec):
    """The function of (batch, votes) that does one step, train.py's own or the engine's."""
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
    if reduction.needs_own_step(settings, variables):
        return reduction.rank_sums(tape.gradient(loss, raws), settings, variables)
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **reduction.arguments(settings))
    return tape.gradient(loss, raws, use_generic_names=True)
