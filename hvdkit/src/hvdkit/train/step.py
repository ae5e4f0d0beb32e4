"""One training step on all ranks together: forward, reduce, unscale, judge, apply."""

from __future__ import annotations

import math
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdkit.observe import stragglers
from hvdkit.ranks import agreement
from hvdkit.ranks.world import World, raw
from hvdkit.run import health
from hvdkit.settings.config import Config
from hvdkit.train import gradients, graph_checks, keras_losses, reduction, task_checks, virtual
from hvdkit.train import optimizer as optimizers
from hvdkit.train.gradients import Reduced
from hvdkit.train.state import State
from hvdkit.train.task import Example, Task, make_schedule


def make_train_step(config: Config, world: World, task: Task, state: State, spec: Any):
    """Returns the function of (batch, votes) that does one step; all ranks must call it together.

    The run's loss is sum(losses * weights) / sum(weights), both sums over the global batch. The
    second sum is known only when the ranks have added up their parts, which can go on beside the
    backward pass. So each number is divided where it is known:

      backward pass, on each rank:  gradient of  loss_sum * scale / positions
      reduction:                    sum over ranks
      after it:                     * positions / (count * scale)

    with `loss_sum` and `count` the sums of losses * weights and of weights, `positions` the size
    of `losses` in the global batch (by its shape, known to all ranks beforehand; it only keeps the
    numbers of the backward pass small, for float16) and `scale` the loss scale, 1 but for float16.
    What is left is the gradient of sum(losses * weights) / sum(weights), however uneven the ranks'
    shares. Weights are constants in it.

    Losses that the model adds by itself are not divided by `count`. Where there are any, the
    backward pass waits for the sums of all ranks and takes the whole loss at once.

    Args:
      spec: of a batch: nested tensors [micro-batches, samples, ...].
    Raises:
      Stop: on all ranks, when the step cannot be made, or their steps would run other collectives.
    """
    model, optimizer = state.model, state.optimizer
    variables = model.trainable_variables
    values = [raw(v) for v in variables]
    # What a forward pass in training changes: moving statistics, seeds, a layer's own counters.
    untrained = [raw(v) for v in model.non_trainable_variables]
    with world.together("making the schedule"), task_checks.told("schedule"):
        learning_rate = make_schedule(task, config, world.size)
    # Which variables the loss depends on, before and after the reduction; known once it is traced.
    had: list[bool] = []
    got: list[bool] = []
    # What XLA compiles: each micro-batch's forward and backward pass, without any collective.
    compiled: gradients.Compiled | None = [] if config.jit else None

    def forward(micro: Example) -> tuple[list[tf.Tensor], tf.Tensor]:
        samples = tf.nest.flatten(micro)[0].shape[0]  # of this rank in a micro-batch
        with tf.GradientTape() as tape:
            with (
                keras_losses.means(model, samples),
                task_checks.told("the model, called in training,"),
            ):
                outputs = model(micro["inputs"], training=True)
            added = keras_losses.total(model)  # now: `loss` may call the model once more
            losses, weights = task_checks.loss(task, outputs, micro["targets"], samples)
        graph_checks.check_weights(tape, weights, values)
        # Weight 0 leaves a position out of the sum, also one whose loss is no number.
        loss_sum = tf.reduce_sum(tf.math.multiply_no_nan(losses, weights))
        count = tf.reduce_sum(weights)
        # By shape, not by tf.size: what a rank's own data leave out or pad must not change it.
        per_sample = math.prod(size or 1 for size in losses.shape[1:])
        positions = samples * per_sample
        scale = tf.cast(state.loss_scale.value, losses.dtype)
        targets = [loss_sum * scale / (per_sample * config.global_batch_size)]
        if added is not None:
            added = tf.cast(added, losses.dtype) * (samples / config.global_batch_size)
            targets.append(added * scale)
        sums = [loss_sum, count, positions, 0.0 if added is None else added]
        return targets, tf.stack([tf.cast(x, tf.float64) for x in sums])

    def by_rank(batch: Example, votes: tf.Tensor) -> Reduced:
        """Forward and backward on this rank's share, then one sum over the ranks."""
        with tf.GradientTape() as tape:
            targets, sums = gradients.accumulate(
                forward, batch, config.accumulation_steps, variables, compiled
            )
            ready = stragglers.moment(sums)
            own_loss = tf.math.divide_no_nan(sums[0], sums[1])
            sums, votes = add_totals(sums, votes)
            _, count, positions, _ = tf.unstack(sums)
            to_mean = tf.stop_gradient(tf.math.divide_no_nan(positions, count))
            scale = tf.cast(state.loss_scale.value, tf.float64)
            target, factor = targets[0], to_mean / scale
            if len(targets) > 1:
                target, factor = target * tf.cast(to_mean, target.dtype) + targets[1], 1 / scale
        tape = reduction.distribute(tape, config, variables)  # hvd.DistributedGradientTape
        grads = gradients.unscale(tape.gradient(target, values), factor)
        return Reduced(grads, tape.connected, sums, len(targets) > 1, votes, own_loss[None], ready)

    # One seam: the same from here on, whether a share is a real rank's or a virtual one's.
    virtual_ranks = config.virtual_ranks
    reduce = by_rank
    if virtual_ranks:
        reduce = virtual.Passes(config, world, forward, state, compiled).reduce
    signature = [spec, tf.TensorSpec([health.NUM_VOTES], tf.float64)]

    @tf.function(input_signature=signature, autograph=False)
    def train_step(batch: Example, votes: tf.Tensor) -> dict[str, tf.Tensor]:
        before = [v.read_value() for v in untrained]
        scale = tf.cast(state.loss_scale.value, tf.float64)
        found = reduce(batch, votes)
        grads, (loss_sum, count, _, added) = found.grads, tf.unstack(found.sums)
        had[:], got[:] = found.had, [g is not None for g in grads]

        # From means over the global batch to a verdict that is the same on every rank.
        layers = gradients.layer_figures(grads) if config.log_gradients else None
        l2 = optimizers.l2_weight(config)
        grads, norm = gradients.finish(grads, variables, l2, config.clip_norm)
        rate = learning_rate(state.step)
        finite = tf.reduce_all(tf.math.is_finite(tf.stack([norm, loss_sum, rate]))) & (rate >= 0)
        readable = found.votes[health.DATA_FAILED] == 0
        optimizer.learning_rate.assign(tf.cast(rate, optimizer.learning_rate.dtype))
        pairs = [(g, v) for g, v in zip(grads, variables) if g is not None]

        def leave_no_trace() -> None:
            for variable, value in zip(untrained, before):
                variable.assign(value)

        tf.cond(finite & readable, lambda: optimizer.apply(*zip(*pairs)), leave_no_trace)
        state.advance(finite, readable)
        result = {
            "step": state.step.read_value(),
            "loss": tf.math.divide_no_nan(loss_sum, count),
            "lr": rate,
            "grad_norm": norm,
            "finite": finite,
            "skipped_in_a_row": state.loss_scale.skipped_in_a_row.read_value(),
            "loss_scale": scale,
            "votes": found.votes,
            "losses": found.losses,
            "layers": layers,
            "moments": tf.stack([found.ready, stragglers.moment(norm)]),
        }
        result |= {"faults": found.faults} if virtual_ranks else {}
        return result | ({"keras_loss": added} if found.adds_losses else {})

    with world.together("making the step"), task_checks.told("the step"):
        whole = train_step.get_concrete_function()
        task_checks.check_variables(model, variables, untrained)
        graph_checks.check_state(whole.graph, state.variables.values(), task)
        graph_checks.check_draws(
            whole.graph,
            "the step",
            "use keras.random with a keras.random.SeedGenerator that the layer makes in __init__",
        )
        graph_checks.check_compiles(compiled or [])
    agreement.check_gradients(world, variables, had)
    agreement.check_not_lost(world, variables, had, got)
    agreement.check_collectives(world, whole)
    return train_step


def add_totals(sums: tf.Tensor, votes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums and votes added over the ranks, in one collective, as small on thousands of them."""
    totals = tf.stop_gradient(tf.concat([sums, votes], 0))
    totals = hvd.allreduce(totals, op=hvd.Sum, name="step.totals")
    return tf.split(totals, [sums.shape[0], health.NUM_VOTES])
