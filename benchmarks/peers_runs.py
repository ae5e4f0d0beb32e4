"""One way to train the same ResNet-50, started on each rank by peers.py: prints its step times.

    python benchmarks/peers_runs.py WAY WINDOWS FOLDER PORT PORT

All train the same: ResNet-50 with the stride in the 3x3 convolution (25,557,032 parameters, 1,000
classes), 64 pixels, 8 samples a rank, float32, SGD with momentum 0.9, batch norm by rank, one
thread a rank. Timed are whole steps as a user has them, from one beginning to the next. "input"
says that batches come from this project's input pipeline (random pictures, cropped and mirrored);
else every step gets the same batch.

    bare            own tf.function and loop: hvd.DistributedGradientTape, Keras's SGD, no checks
    template        train.py --benchmark: all that it does in a step, a log line every ten steps
    ddp             PyTorch: DistributedDataParallel over Gloo, torchvision's model
    mwms            tf.distribute.MultiWorkerMirroredStrategy, ring over gRPC, Keras's SGD
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

SIZE, BATCH, CLASSES, MOMENTUM, RATE = 64, 8, 1000, 0.9, 0.01
WINDOW = 10  # steps; the first of them, with the tracing, are not counted
MARK = "seconds a step: "  # what rank 0's windows are printed behind


class Clock:
    """Mean seconds a step of each window; `tick` is called where a step begins."""

    def __init__(self, windows: int) -> None:
        self.steps = (windows + 1) * WINDOW
        self._ticks: list[float] = []

    def tick(self) -> None:
        self._ticks.append(time.perf_counter())

    def show(self) -> None:
        """Prints the windows; `tick` was called once more after the last step."""
        edges = self._ticks[WINDOW::WINDOW]
        print(MARK + json.dumps([(b - a) / WINDOW for a, b in pairwise(edges)]), flush=True)


def bare(clock: Clock, with_input: bool) -> None:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    _one_thread()
    model, optimizer, loss_of = _keras_parts()
    values = [v.value for v in model.trainable_variables]
    hvd.broadcast_variables([v.value for v in [*model.variables, *optimizer.variables]], 0)

    @tf.function(autograph=False)
    def step(image, label):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(model({"image": image}, training=True), label))
        grads = hvd.DistributedGradientTape(tape).gradient(loss, values)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    feed = _feed(clock.steps, hvd.rank(), hvd.size()) if with_input else None
    image, label = _batch(hvd.rank())
    for number in range(clock.steps):
        clock.tick()
        if feed:
            batch = tf.nest.map_structure(lambda t: t[0], feed.next())
            image, label = batch["inputs"]["image"], batch["targets"]
        loss = step(image, label)
        if number % WINDOW == 0:
            float(loss)
    clock.tick()
    if hvd.rank() == 0:
        clock.show()


def template(clock: Clock, run_dir: str, with_input: bool) -> None:
    """train.py with flags; only its feed is another: it tells the clock where a step begins."""
    import hvdkit
    import train

    class Feed(hvdkit.run.loop.TrainingFeed):
        batch = None

        def next(self):
            clock.tick()
            if with_input:
                return super().next()
            self.batch = super().next() if self.batch is None else self.batch
            return self.batch

    hvdkit.run.loop.TrainingFeed = Feed
    code = hvdkit.main(
        train.train, train.Settings, ["train.py", *_flags(clock.steps + 1), f"--run_dir={run_dir}"]
    )
    if code:
        sys.exit(code)
    if int(os.environ["HOROVOD_RANK"]) == 0:
        clock.show()


def mwms(clock: Clock, ports: list[str]) -> None:
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    workers = [f"127.0.0.1:{port}" for port in ports]
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    import tensorflow as tf

    _one_thread()
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        model, optimizer, loss_of = _keras_parts()

    def replica(image, label):
        with tf.GradientTape() as tape:
            losses = loss_of(model({"image": image}, training=True), label)
            loss = tf.reduce_sum(losses) / (BATCH * size)
        values = [v.value for v in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, values), model.trainable_variables)  # sums them first
        return loss

    step = tf.function(lambda *batch: strategy.run(replica, batch), autograph=False)
    batch = _batch(rank)
    for number in range(clock.steps):
        clock.tick()
        loss = step(*batch)
        if number % WINDOW == 0:
            float(loss)
    clock.tick()
    if rank == 0:
        clock.show()


def ddp(clock: Clock, ports: list[str]) -> None:
    import torch
    import torchvision

    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=size
    )
    torch.manual_seed(rank)
    image, label = torch.rand(BATCH, 3, SIZE, SIZE), torch.randint(0, CLASSES, (BATCH,))
    model = torch.nn.parallel.DistributedDataParallel(torchvision.models.resnet50())
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    for number in range(clock.steps):
        clock.tick()
        loss = torch.nn.functional.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % WINDOW == 0:
            loss.item()
    clock.tick()
    if rank == 0:
        clock.show()
    torch.distributed.destroy_process_group()


def _flags(steps: int) -> list[str]:
    size = int(os.environ["HOROVOD_SIZE"])
    return [
        *("--task=classification", "--model=resnet50", f"--num_classes={CLASSES}"),
        *(f"--image_size={SIZE}", f"--global_batch_size={BATCH * size}", "--optimizer=sgd"),
        *(f"--momentum={MOMENTUM}", f"--base_lr={RATE}", "--lr_policy=constant"),
        *("--benchmark", "--synthetic_data", "--cpu_threads=1", f"--log_every={WINDOW}"),
        f"--num_steps={steps}",
    ]


def _one_thread() -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def _keras_parts():
    """Model, optimizer with its slots, and the function of (logits, labels) to losses."""
    import keras
    import tensorflow as tf

    from hvdkit.models.resnet import resnet50

    model = resnet50(SIZE, CLASSES, dropout=0.0)
    optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    optimizer.build(model.trainable_variables)

    def loss_of(logits, labels):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)

    return model, optimizer, loss_of


def _batch(rank: int):
    import tensorflow as tf

    image = tf.random.stateless_uniform([BATCH, SIZE, SIZE, 3], [rank, 0], 0, 256, tf.int32)
    label = tf.random.stateless_uniform([BATCH], [rank, 1], 0, CLASSES, tf.int32)
    return tf.cast(image, tf.uint8), tf.cast(label, tf.int64)


def _feed(steps: int, rank: int, size: int):
    """What train.py makes of the same flags."""
    from hvdkit import settings as settings_lib
    from hvdkit.data.pipeline import TrainingFeed, reader
    from hvdkit.data.sampler import Sampler
    from tasks import classification

    config = settings_lib.parse(["peers", *_flags(steps)])
    task = classification.Task(config)
    source, _ = task.sources()
    order = Sampler(len(source), BATCH * size, 1, config.seed, rank, size)
    read = reader(source, task.training_example, keyed=True)
    return TrainingFeed(source, order, read, 0, steps, workers=1)


def main() -> None:
    way, windows, folder, *ports = sys.argv[1:]
    clock, (name, *rest) = Clock(int(windows)), way.split(", ")
    if name == "ddp":  # its interpreter has no TensorFlow
        return ddp(clock, ports)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "template"))
    import hvdkit.ranks.quiet  # noqa: F401

    with_input = rest == ["input"]
    if name == "bare":
        bare(clock, with_input)
    elif name == "template":
        template(clock, folder, with_input)
    else:
        mwms(clock, ports)


if __name__ == "__main__":
    main()
