"""Trains the task in tasks/: the step of the template's train.py, which explains it.

horovodrun -np 2 python train.py --task=regression --base_lr=0.01 --num_steps=300
"""

import sys

import hvdkit

if __name__ == "__main__":
    hvdkit.check_flags(hvdkit.Settings)

import horovod.tensorflow as hvd
import tensorflow as tf


def make_step(run: hvdkit.Run):
    @run.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = run.loss(batch)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **run.reduction)
        return run.update(tape.gradient(loss, run.weights, use_generic_names=True))

    return step


def train(run: hvdkit.Run) -> None:
    step = run.make_step(make_step)
    for batch in run.batches():
        run.after_step(step(batch))


if __name__ == "__main__":
    sys.exit(hvdkit.main(train, hvdkit.Settings))
