"""Trains a task on one GPU or a thousand, one process a GPU, with Horovod.

    python train.py --flagfile=configs/demo.cfg                          one rank
    horovodrun -np 2 python train.py --flagfile=configs/demo.cfg         two ranks on this host
    ../launch/hosts.sh -H node1:8,node2:8 python train.py --flagfile=configs/demo.cfg

The same command again resumes from the newest checkpoint in --run_dir; --help lists the flags.
"""

import sys

import hvdkit  # first: it keeps TensorFlow's start quiet, and reads flags before it

from settings import Settings

if __name__ == "__main__":
    hvdkit.check_flags(Settings)

import horovod.tensorflow as hvd
import tensorflow as tf


def make_step(run: hvdkit.Run):
    """One step: every rank takes gradients of its share of the batch, Horovod sums them."""

    @run.function  # traced at once with the batch's signature, checked on all ranks
    def step(batch):
        with tf.GradientTape() as tape:
            loss = run.loss(batch)  # this rank's part, times a factor that run.update takes out
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **run.reduction)
        gradients = tape.gradient(loss, run.weights, use_generic_names=True)  # alike on all
        return run.update(gradients)  # unscale, check, clip, poly rate, apply: alike on every rank

    return step


def train(run: hvdkit.Run) -> None:
    """The run. It may be called twice: after steps that are not finite a run goes back once."""
    step = run.make_step(make_step)  # virtual ranks, packing and bfloat16 messages bring their own
    for batch in run.batches():  # from where the run resumes; ends early on a stop signal
        run.after_step(step(batch))  # sync batch norm, log, save, evaluate


if __name__ == "__main__":
    sys.exit(hvdkit.main(train, Settings))
