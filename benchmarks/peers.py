"""Time a step of the same ResNet-50 here and elsewhere, in turn in one run.

    python benchmarks/peers.py [--ranks=2] [--rounds=3] [--windows=4] [--torch=PYTHON] [WAY ...]
    python benchmarks/peers.py --rounds=12 bare template      these ways only

WAYs are in NAMES. It prints medians over rounds (of a round: the median of windows of ten steps,
after ten for warm-up), and this project's speed over the other's with the least and the most of a
round; more than 1 is faster. --torch: a Python with requirements-peers.txt, for PyTorch's row.

All train the same: ResNet-50 with the stride in the 3x3 convolution (25,557,032 parameters, 1,000
classes), 64 pixels, 8 samples a rank, float32, SGD with momentum 0.9, batch norm by rank, one
thread a rank. Whole steps are timed, from one beginning to the next. "input" means that batches
come from this project's input pipeline (random pictures, cropped and mirrored); otherwise every
step gets the same batch. "bare" is `bare_step`. "small" is the blank task's model (387 parameters)
on 16 constant samples a rank: what the project itself takes between two steps, in windows of 500.
"""

import argparse
import json
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 300  # seconds, of one run
SIZE, BATCH, CLASSES, MOMENTUM, RATE = 64, 8, 1000, 0.9, 0.01
SMALL_BATCH = 16
# `launch` starts this Python, which becomes another: PyTorch's.
BECOME = ["-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"]
MARK = "seconds a step: "  # before rank 0's windows
# The name of each way in the table, and which of ours is compared with it.
NAMES = {
    "template": ("this project, constant batch", ""),
    "bare": ("bare Horovod loop, constant batch", "template"),
    "ddp": ("PyTorch DDP, Gloo, constant batch", "template"),
    "mwms": ("MultiWorkerMirroredStrategy, constant batch", "template"),
    "template, small": ("this project, small step", ""),
    "bare, small": ("bare Horovod loop, small step", "template, small"),
    "template, input": ("this project, with its input", ""),
    "bare, input": ("bare Horovod loop, with the same input", "template, input"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=4, help="in a run")
    parser.add_argument(
        "--torch", metavar="PYTHON", help="interpreter that has PyTorch"
    )
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join(NAMES))
    args = parser.parse_args()
    unknown = set(args.ways) - set(NAMES)
    if unknown:
        parser.error(f"no way {sorted(unknown)}; there are {list(NAMES)}")
    if "ddp" in args.ways and not args.torch:
        parser.error("ddp needs --torch=PYTHON")
    ways = [way for way in NAMES if way in (args.ways or NAMES)]
    if "ddp" in ways and not args.torch:
        ways.remove("ddp")
    torch = Path(args.torch or "").absolute()  # not resolved: the target has no PyTorch
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(args.rounds):
        # There and back, so that a slow drift affects both sides of a ratio.
        for way in ways if number % 2 == 0 else reversed(ways):
            median = statistics.median(run(way, torch, args.windows, ranks=args.ranks))
            print(
                f"round {number + 1}: {way}: {median * 1e3:.2f} ms a step",
                file=sys.stderr,
            )
            seconds[way].append(median)
    table(seconds, args.ranks)


def run(way: str, torch: Path, windows: int, *, ranks: int) -> list[float]:
    """Seconds a step of each window, as rank 0 saw them, in processes of their own."""
    # Not in `worker`: PyTorch's Python has no hvdkit.
    from ranks import last_lines, launch

    # Ways without a launcher of their own are started by mpirun, which gives them their rank.
    launcher = "gloo" if way.startswith(("template", "bare")) else "mpirun"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        ports = [
            held.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(ranks)
        ]
        numbers = [port.getsockname()[1] for port in ports]
        held.close()
        command = [
            Path(__file__),
            "--worker",
            way,
            windows,
            Path(folder) / "run",
            *numbers,
        ]
        if way == "ddp":
            command = [*BECOME, torch, *command]
        ended = launch(
            ranks, command, launcher, timeout=TIMEOUT, env={"CUDA_VISIBLE_DEVICES": ""}
        )
    seconds = shown(ended.output)
    if ended.code or not seconds:
        raise SystemExit(f"{way}: exit code {ended.code}\n{last_lines(ended.output)}")
    return seconds


def shown(output: str) -> list[float]:
    """What `Clock.show` printed: seconds a step of each window; [] where it did not."""
    match = re.search(rf"{MARK}(\[[^]]*\])", output)
    return json.loads(match[1]) if match else []


def table(seconds: dict[str, list[float]], ranks: int) -> None:
    print(f"| {ranks} rank(s) | ms a step | samples/s | our speed over it |")
    print("| --- | --- | --- | --- |")
    for way, its_seconds in seconds.items():
        name, our_way = NAMES[way]
        median = statistics.median(its_seconds)
        ratio = ""
        if our_way in seconds:
            ours = seconds[our_way]
            ratios = [theirs / own for theirs, own in zip(its_seconds, ours)]
            whole = median / statistics.median(ours)
            ratio = f"{whole:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        samples = BATCH
        digits = 0
        if way.endswith("small"):
            samples = SMALL_BATCH
            digits = 2
        print(
            f"| {name} | {median * 1e3:.{digits}f} | {ranks * samples / median:.1f} | {ratio} |"
        )


class Clock:
    """Mean seconds a step of each window; `tick` is called at the beginning of a step."""

    def __init__(self, windows: int, steps: int = 10) -> None:
        """The first window, with the tracing, is not counted."""
        self.window = steps
        self.steps = (windows + 1) * steps
        self._ticks: list[float] = []

    def tick(self) -> None:
        self._ticks.append(time.perf_counter())

    def run(self, step, rank: int) -> None:
        """Calls step() -> loss, waits for the device at the end of a window; rank 0 prints."""
        for number in range(self.steps):
            self.tick()
            loss = step()
            if number % self.window == 0:
                float(loss)
        self.tick()
        if rank == 0:
            self.show()

    def windows(self) -> list[float]:
        """Seconds a step of each; `tick` was called once more after the last step."""
        borders = self._ticks[self.window :: self.window]
        return [(end - start) / self.window for start, end in pairwise(borders)]

    def show(self) -> None:
        print(MARK + json.dumps(self.windows()), flush=True)


def bare_step(model, optimizer, scale: float = 1.0):
    """The plainest step, of (inputs, label), without checks; all ranks begin with one's weights."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    values = [v.value for v in model.trainable_variables]
    hvd.broadcast_variables(
        [v.value for v in [*model.variables, *optimizer.variables]], 0
    )

    @tf.function(autograph=False)
    def step(inputs, label):
        with tf.GradientTape() as tape:
            logits = model(inputs, training=True)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
            )
            scaled = loss * scale
        grads = hvd.DistributedGradientTape(tape).gradient(scaled, values)
        if scale != 1:
            grads = [g / scale for g in grads]
        optimizer.apply(grads, model.trainable_variables)
        return loss

    return step


def bare(clock: Clock, kind: str) -> None:
    import horovod.tensorflow as hvd

    hvd.init()
    _one_thread()
    task = _task(_flags(clock, kind, hvd.size()))
    run_bare(clock, task, rank=hvd.rank(), size=hvd.size(), fed=kind == "input")


def run_bare(
    clock: Clock, task, *, rank: int, size: int, scale: float = 1.0, fed: bool = False
):
    """Trains in the plainest loop, on one batch, or with `fed` on those that train.py takes."""
    model, optimizer = _built(task)
    step = bare_step(model, optimizer, scale)
    with _feed(task, rank, size, steps=clock.steps if fed else 1) as feed:
        if fed:
            clock.run(lambda: step(*_batch(feed)), rank)
        else:
            inputs, label = _batch(feed)
            clock.run(lambda: step(inputs, label), rank)


def train_py(clock: Clock, words: list[str], *, same_batch: bool = False) -> None:
    """train.py with another feed, which notes when a step begins."""
    import hvdkit
    import train

    watch_feed(clock.tick, same_batch=same_batch)
    code = hvdkit.main(train.train, train.Settings, ["train.py", *words])
    if code:
        sys.exit(code)
    if hvdkit.launcher.launch_rank() == 0:
        clock.show()


def watch_feed(tick, *, same_batch: bool = False) -> None:
    """Has each step of train.py call `tick` as it begins.

    With `same_batch` it gets the first batch again, which stays on the device: no input.
    """
    import tensorflow as tf

    from hvdkit.run import parts

    class Feed(parts.TrainingFeed):
        batch = None

        def next(self):
            tick()
            if not same_batch:
                return super().next()
            if self.batch is None:
                self.batch = tf.nest.map_structure(tf.identity, super().next())
            return self.batch

    parts.TrainingFeed = Feed


def _rank_and_size() -> list[int]:
    return [int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE")]


def mwms(clock: Clock, ports: list[str]) -> None:
    rank, size = _rank_and_size()
    workers = [f"127.0.0.1:{port}" for port in ports]
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    import tensorflow as tf

    _one_thread()
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    task = _task(_flags(clock, "", size))
    with _feed(task, rank, size, steps=1) as feed:
        batch = _batch(feed)
    with strategy.scope():
        model, optimizer = _built(task)

    def replica(inputs, label):
        with tf.GradientTape() as tape:
            logits = model(inputs, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
            loss = tf.reduce_sum(losses) / (BATCH * size)
        values = [v.value for v in model.trainable_variables]
        # Sums them first.
        optimizer.apply(tape.gradient(loss, values), model.trainable_variables)
        return loss

    step = tf.function(lambda *batch: strategy.run(replica, batch), autograph=False)
    clock.run(lambda: step(*batch), rank)


def ddp(clock: Clock, precision: str, batch: int, port: str) -> None:
    """ResNet-50 in PyTorch: on CPUs, or a GPU a rank in float32, tf32 or bfloat16 (gpu.py)."""
    import torch
    import torchvision

    rank, size = _rank_and_size()
    torch.set_num_threads(1)
    device, side, layout = "cpu", SIZE, torch.contiguous_format
    if precision:
        torch.cuda.set_device(rank)
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        device, side, layout = "cuda", 224, torch.channels_last
    torch.distributed.init_process_group(
        "nccl" if precision else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
    )
    torch.manual_seed(rank)
    image = torch.rand(batch, 3, side, side, device=device).contiguous(
        memory_format=layout
    )
    label = torch.randint(0, CLASSES, (batch,), device=device)
    model = torchvision.models.resnet50().to(device, memory_format=layout)
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            loss = torch.nn.functional.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    clock.run(step, rank)
    torch.distributed.destroy_process_group()


def _flags(clock: Clock, kind: str, size: int) -> list[str]:
    if kind == "small":
        flags = [
            "--task=blank",
            "--num_classes=3",
            f"--global_batch_size={SMALL_BATCH * size}",
        ]
    else:
        flags = [
            "--task=classification",
            "--model=resnet50",
            f"--num_classes={CLASSES}",
            f"--image_size={SIZE}",
            f"--global_batch_size={BATCH * size}",
            "--synthetic_data",
        ]
    return [
        *flags,
        "--optimizer=sgd",
        f"--momentum={MOMENTUM}",
        f"--base_lr={RATE}",
        "--lr_policy=constant",
        "--benchmark",
        "--cpu_threads=1",
        f"--log_every={clock.window}",
        f"--num_steps={clock.steps + 1}",
    ]


def _one_thread() -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def _task(flags: list[str]):
    from hvdkit import settings as settings_lib
    from tasks import blank, classification

    config = settings_lib.parse(["peers", *flags])
    return (blank if config.task == "blank" else classification).Task(config)


def _built(task):
    """Model, and optimizer with its slots."""
    import keras

    model = task.build_model()
    optimizer = keras.optimizers.SGD(task.config.base_lr, momentum=task.config.momentum)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def _feed(task, rank: int, size: int, *, steps: int):
    """Makes the training feed as train.py does."""
    from hvdkit.data.pipeline import TrainingFeed, reader
    from hvdkit.data.sampler import Sampler
    from hvdkit.ranks import world

    source, _ = task.sources()
    order = Sampler(
        len(source),
        task.config.global_batch_size,
        micro_batches=1,
        seed=task.config.seed,
        rank=rank,
        size=size,
    )
    read = reader(source, task.training_example, keyed=True)
    return TrainingFeed(order, read, num_steps=steps, workers=1, device=world.gpu())


def _batch(feed):
    """The next one, of one micro-batch: inputs and targets."""
    import tensorflow as tf

    batch = feed.next()
    return tf.nest.map_structure(
        lambda part: part[0], (batch["inputs"], batch["targets"])
    )


def worker(way: str, windows: str, folder: str, *ports: str) -> None:
    """Trains in one way on each rank; rank 0 prints its step times."""
    name, _, kind = way.partition(", ")
    clock = Clock(int(windows), 500 if kind == "small" else 10)
    if name == "ddp":  # its interpreter has no TensorFlow
        return ddp(clock, "", BATCH, ports[0])
    if name == "cuda":
        return ddp(clock, folder, int(ports[0]), ports[1])
    sys.path.insert(0, str(ROOT / "template"))
    import hvdkit.ranks.quiet  # noqa: F401

    if name == "mwms":
        mwms(clock, list(ports))
    elif name == "bare":
        bare(clock, kind)
    else:
        flags = _flags(clock, kind, int(os.environ["HOROVOD_SIZE"]))
        train_py(clock, [*flags, f"--run_dir={folder}"], same_batch=kind != "input")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        sys.path.insert(0, str(ROOT / "tests" / "helpers"))
        main()
