"""Trains a task on one GPU or a thousand, one process a GPU, with Horovod.

    python train.py --flagfile=configs/demo.cfg                          one rank
    horovodrun -np 2 python train.py --flagfile=configs/demo.cfg         two ranks on this host
    ../launch/hosts.sh -H node1:8,node2:8 python train.py --flagfile=configs/demo.cfg

The same command again resumes from the newest checkpoint in --run_dir; --help lists the flags.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # also with PYTHONSAFEPATH=1

try:
    import hvdkit  # before TensorFlow: it quiets its start, and reads the flags first
except ModuleNotFoundError as error:
    hint = "`make setup` makes .venv, then `source .venv/bin/activate`"
    print(f"error: {error} in {sys.executable}: {hint}", file=sys.stderr)
    sys.exit(2)

from settings import Settings

if __name__ == "__main__":
    hvdkit.check_flags(Settings)

import horovod.tensorflow as hvd
import tensorflow as tf


def make_step(run: hvdkit.Run):
    """One step: every rank takes gradients of its share of the batch, Horovod sums them."""

    # A tf.function, traced now; the run stops here if ranks trace different ones.
    @run.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = run.loss(batch)  # this rank's part of the sum over the global batch
        # Sum, not Average: run.update divides by the global batch, as shares may be uneven.
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **run.reduction)
        gradients = tape.gradient(loss, run.weights, use_generic_names=True)
        return run.update(gradients)  # divide, check, clip, set the rate, apply

    return step


def train(run: hvdkit.Run) -> None:
    """The run. Called again if a step is not finite: the run goes back to a checkpoint, once."""
    # Another step than this is refused with --virtual_ranks, --pack_bytes, --gradient_groups and
    # --compression=bf16.
    step = run.make_step(make_step)
    # From where the run resumes; ends early on a stop signal.
    for batch in run.batches():
        # Average batch norm's statistics, log, save, evaluate.
        run.after_step(step(batch))


if __name__ == "__main__":
    sys.exit(hvdkit.main(train, Settings))
