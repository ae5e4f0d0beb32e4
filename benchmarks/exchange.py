"""What batch norm's exchange over ranks costs: Horovod's sums, and the operation of exchange.cc.

    python benchmarks/exchange.py [--ranks=2] [--rounds=7] [--launcher=mpirun]

A sum is one of a chain of 124 sums of 6 KB, as many as a step with configs/voc.cfg makes. A step is
of 19 convolutions with a batch norm each, on 8 pictures a rank of 32 pixels. All variants of one
launch take turns. Times are the best and the median of the rounds, and ratios are of the best: to a
sum by Horovod with its own cycle of 1 ms, and to a step with --bn_sync=mean.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("template", "tests/helpers")]

from ranks import launch_well

SUMS = 124
STEPS = 5
NUMBERS = 768  # float64, 6 KB
CHANNELS = [16] * 7 + [32] * 6 + [64] * 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--launcher", default="mpirun", help="mpirun or gloo")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    for cycle in ("1", "0.1"):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "seconds.json"
            launch_well(
                args.ranks,
                [Path(__file__), "--worker", out, cycle, args.rounds],
                args.launcher,
                timeout=1200,
                env={"HOROVOD_CYCLE_TIME": cycle},
            )
            seconds |= json.loads(out.read_text())
    print(f"| {args.ranks} ranks, {args.launcher} | best, us | median, us | ratio |")
    print("| --- | --- | --- | --- |")
    for kind in ("a sum", "a step"):
        rows = {name: times for name, times in seconds.items() if kind in name}
        plain = min(rows.get("a step: mean") or next(iter(rows.values())))
        for name, times in rows.items():
            middle = sorted(times)[len(times) // 2]
            best = min(times)
            print(
                f"| {name} | {best * 1e6:.0f} | {middle * 1e6:.0f} | {best / plain:.2f} |"
            )


def worker(out: str, cycle: str, rounds: str) -> None:
    """Measures on each rank; rank 0 writes the seconds of all rounds, by variant."""
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    from hvdkit.ranks import exchange
    from hvdkit.ranks import world as world_lib
    from hvdkit.settings import Settings

    world = world_lib.set_up(world_lib.connect(), Settings())
    horovod = f"Horovod, cycle of {cycle} ms"
    runs = {f"a sum: {horovod}": chain(), f"a step: full, {horovod}": step(full=True)}
    ways = {}
    if cycle == "1":  # Horovod's own, which the operation leaves as it is.
        runs = {"a step: mean": step(full=False)} | runs
        ways["shared memory"] = world
        ways["MPI"] = dataclasses.replace(world, local_size=1)  # as if on several hosts
    for way, its_world in ways.items():
        exchange.start(its_world, 60)
        if exchange.in_use:
            runs[f"a sum: {way}"] = chain()
            runs[f"a step: full, {way}"] = step(full=True)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(int(rounds)):
        for name, run in runs.items():
            for way, its_world in ways.items():
                if name.endswith(way):
                    exchange.start(its_world, 60)
            world.barrier_max(name)
            begin = time.monotonic()
            run()
            times = SUMS if "a sum" in name else STEPS
            seconds[name].append((time.monotonic() - begin) / times)
    if world.is_chief:
        Path(out).write_text(json.dumps(seconds))
    world_lib.finish(world)


def chain() -> Callable[[], object]:
    """A function that adds up numbers over ranks again and again, traced already."""
    import tensorflow as tf

    from hvdkit.ranks import exchange

    @tf.function(autograph=False)
    def run(x: tf.Tensor) -> tf.Tensor:
        for number in range(SUMS):
            x = exchange.over_ranks(x, f"chain.{number}") * 0.5
        return x

    numbers = tf.ones([NUMBERS], tf.float64)
    run(numbers)
    return lambda: run(numbers).numpy()


def step(*, full: bool) -> Callable[[], object]:
    """A function of STEPS steps of a small network, traced already."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from hvdkit.train.layers import batch_norm

    parts = [keras.Input((32, 32, 3))]
    for channels in CHANNELS:
        parts.append(keras.layers.Conv2D(channels, 3, padding="same", use_bias=False))
        parts.append(keras.layers.BatchNormalization())
        parts.append(keras.layers.ReLU())
    parts += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    model = keras.Sequential(parts)
    if full:
        batch_norm.synchronize(model)
    weights = [variable.value for variable in model.trainable_variables]

    @tf.function(autograph=False)
    def run(pictures: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(pictures, training=True)))
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, num_groups=1)
        gradients = tape.gradient(loss, weights, use_generic_names=True)
        for weight, gradient in zip(weights, gradients):
            weight.assign_sub(0.01 * gradient)
        return loss

    pictures = tf.random.stateless_normal([8, 32, 32, 3], seed=[0, hvd.rank()])

    def steps() -> None:
        for _ in range(STEPS):
            run(pictures).numpy()

    steps()
    return steps


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(worker(*sys.argv[2:]))
    main()
