"""One training step on all ranks together: forward, reduce, unscale, judge, apply."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from config import Config
from engine import agreement, gradients, health, reduction, schedule
from engine import optimizer as optimizers
from engine.state import State
from engine.world import World, raw
from tasks.base import Example, Task


def make_train_step(config: Config, world: World, task: Task, state: State, spec: Any):
    """Returns the function of (batch, votes) that does one step; all ranks must call it together.

    The run's loss is sum(losses * weights) / sum(weights), both sums over the global batch. The
    second sum is known only when the ranks have added up their parts, which is after the backward
    pass. So each number is divided where it is known:

      backward pass, on each rank:  gradient of  loss_sum * scale / positions
      reduction:                    sum over ranks
      after it:                     * positions / (count * scale)

    with `loss_sum` and `count` the sums of losses * weights and of weights, `positions` the size
    of `losses` in the global batch (known to all ranks beforehand; it only keeps the numbers of
    the backward pass small, for float16) and `scale` the loss scale, 1 but for float16. What is
    left is the gradient of sum(losses * weights) / sum(weights), however uneven the ranks' shares.

    Args:
      spec: of a batch: nested tensors [micro-batches, samples, ...].
    Raises:
      Stop: on all ranks, when their traced steps would not run the same collectives.
    """
    model, optimizer = state.model, state.optimizer
    variables = model.trainable_variables
    values = [raw(v) for v in variables]
    learning_rate = schedule.make(config, world.size)
    connected: list[bool] = []  # which variables the loss depends on; known once it is traced

    def forward(micro: Example) -> tuple[tf.Tensor, tf.Tensor]:
        outputs = model(micro["inputs"], training=True)
        losses, weights = task.loss(outputs, micro["targets"])
        loss_sum, count = tf.reduce_sum(losses * weights), tf.reduce_sum(weights)
        positions = tf.size(losses, tf.int64)
        a_sample = positions // tf.shape(losses, tf.int64)[0]
        scale = tf.cast(state.loss_scale.value, losses.dtype)
        target = loss_sum * scale / tf.cast(a_sample * config.global_batch_size, losses.dtype)
        return target, tf.stack([tf.cast(x, tf.float64) for x in (loss_sum, count, positions)])

    signature = [spec, tf.TensorSpec([health.NUM_VOTES], tf.float64)]

    @tf.function(input_signature=signature, autograph=False)
    def train_step(batch: Example, votes: tf.Tensor) -> dict[str, tf.Tensor]:
        # Forward and backward on this rank's share, then one sum over the ranks.
        with tf.GradientTape() as tape:
            target, sums = gradients.accumulate(
                forward, batch, config.accumulation_steps, variables
            )
        tape = reduction.distribute(tape, config, variables)  # hvd.DistributedGradientTape
        grads = tape.gradient(target, values, use_generic_names=True)
        connected[:] = [g is not None for g in grads]

        own_loss = tf.math.divide_no_nan(sums[0], sums[1])
        own_loss = tf.one_hot(world.rank, world.size, own_loss, tf.zeros([], tf.float64))
        totals = tf.concat([sums, votes, own_loss], 0)
        totals = hvd.allreduce(totals, op=hvd.Sum, name="step.totals")
        sums, votes, losses = tf.split(totals, [3, health.NUM_VOTES, world.size])
        loss_sum, count, positions = tf.unstack(sums)

        # Means over the global batch, and a verdict that is the same on every rank.
        scale = tf.cast(state.loss_scale.value, tf.float64)
        grads = gradients.unscale(grads, tf.math.divide_no_nan(positions, count * scale))
        layers = gradients.layer_figures(grads) if config.log_gradients else None
        l2 = optimizers.l2_weight(config)
        grads, norm = gradients.finish(grads, variables, l2, config.clip_norm)
        finite = tf.math.is_finite(norm)
        readable = votes[health.DATA_FAILED] == 0

        rate = learning_rate(state.step)
        optimizer.learning_rate.assign(tf.cast(rate, optimizer.learning_rate.dtype))
        pairs = [(g, v) for g, v in zip(grads, variables) if g is not None]
        tf.cond(finite & readable, lambda: optimizer.apply(*zip(*pairs)), lambda: None)
        state.advance(finite, readable)
        return {
            "step": state.step.read_value(),
            "loss": tf.math.divide_no_nan(loss_sum, count),
            "lr": rate,
            "grad_norm": norm,
            "finite": finite,
            "votes": votes,
            "losses": losses,
            "layers": layers,
        }

    traced = train_step.get_concrete_function()
    agreement.check_gradients(world, variables, connected)
    agreement.check_collectives(world, traced)
    return train_step
