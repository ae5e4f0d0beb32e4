"""Two networks that take turns, each with its own optimizer, as in WGAN-GP (arXiv:1704.00028).

Each turn is a step of its own, which updates only the weights of its network. The penalty is taken
half-way between real and made samples, where the paper draws a place.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # also with PYTHONSAFEPATH=1

import hvdkit
from settings import Settings

if __name__ == "__main__":
    hvdkit.check_flags(Settings)

import horovod.tensorflow as hvd
import tensorflow as tf

PENALTY = 10.0
CRITIC_TURNS = 2  # for each of the maker's


def make_turn(run: hvdkit.Run, network, losses):
    """A step that updates `network` by `losses`, micro-batch -> losses and weights a sample."""
    own = {id(v.value) for v in network.trainable_variables}

    @run.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = run.loss(batch, losses)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **run.reduction)
        weights = [w for w in run.weights if id(w) in own]
        found = iter(tape.gradient(loss, weights, use_generic_names=True))
        # None: the other network's optimizer does nothing in this turn.
        return run.update([next(found) if id(w) in own else None for w in run.weights])

    return step


def train(run: hvdkit.Run) -> None:
    maker, critic = run.task.maker, run.task.critic

    def critic_losses(micro):
        real, noise = micro["inputs"]
        made = maker(noise, training=True)
        real = tf.cast(real, made.dtype)
        with tf.GradientTape() as inner:
            between = (real + made) / 2
            inner.watch(between)
            score = critic(between, training=True)
        # A sample's own: no collective.
        slope = tf.norm(inner.gradient(score, between), axis=-1)
        scores = critic(made, training=True) - critic(real, training=True)
        weights = tf.ones_like(slope)
        return {
            "critic": (scores[:, 0], weights),
            "penalty": (tf.square(slope - 1.0), weights, PENALTY),
        }

    def maker_losses(micro):
        made = maker(micro["inputs"][1], training=True)
        scores = -critic(made, training=True)[:, 0]
        return {"maker": (scores, tf.ones_like(scores))}

    critic_turn = make_turn(run, critic, critic_losses)
    turns = [critic_turn] * CRITIC_TURNS + [make_turn(run, maker, maker_losses)]
    for batch in run.batches():
        run.after_step(turns[run.step % len(turns)](batch))


if __name__ == "__main__":
    sys.exit(hvdkit.main(train, Settings))
