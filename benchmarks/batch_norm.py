"""What batch norm over all ranks costs: a step's milliseconds, with --bn_sync=full and with mean.

    python benchmarks/batch_norm.py [--ranks=2] [--rounds=5] [--steps=6]
    python benchmarks/batch_norm.py --ranks=2 --rounds=2 --steps=1 19     a short form

Forward, backward and the sum of the gradients, in float32 on one thread a rank: 19 convolutions
with a batch norm each (32 pixels, 8 samples a rank), and one batch norm as DeepLab has it. "Keras's
formula" is the exchange of --bn_sync=full with Keras's operations instead of fused kernels. All
kinds take turns in one launch; ratios are those of medians, in brackets the least and the most of a
round.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("template", "tests/helpers")]

from ranks import launch_well

MEAN = "mean"
KINDS = (MEAN, "full, Keras's formula", "full")
NETWORKS = ("19 batch norms, float32", "8x64x64x256, float32", "8x64x64x256, bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of each kind in a round")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="beginnings of networks' names"
    )
    args = parser.parse_args()
    wanted = tuple(args.names) or ("",)
    chosen = [name for name in NETWORKS if name.startswith(wanted)]
    if not chosen:
        parser.error(f"no network begins with {args.names}; there are {NETWORKS}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        command = [__file__, "--worker", out, args.rounds, args.steps, *chosen]
        launch_well(
            args.ranks,
            [str(part) for part in command],
            timeout=1200,
        )
        seconds = json.loads(out.read_text())
    print(f"| network, {args.ranks} ranks | --bn_sync | ms a step | over mean |")
    print("| --- | --- | --- | --- |")
    for network, by_kind in seconds.items():
        means = by_kind[MEAN]
        for kind, rounds in by_kind.items():
            middle = statistics.median(rounds)
            ratio = middle / statistics.median(means)
            ratios = [one / mean for one, mean in zip(rounds, means)]
            range_of_rounds = f"{min(ratios):.2f} to {max(ratios):.2f}"
            cells = [network, kind, f"{1000 * middle:.1f}"]
            cells.append(f"{ratio:.2f} ({range_of_rounds})")
            print(f"| {' | '.join(cells)} |")


def worker(out: str, rounds: str, steps: str, *networks: str) -> None:
    """Writes a round's seconds a step, by network and kind; on each rank."""
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    import tensorflow as tf

    from hvdkit.ranks import exchange
    from hvdkit.ranks import world as world_lib

    tf.config.threading.set_intra_op_parallelism_threads(1)
    world = world_lib.connect()
    exchange.start(world, seconds=60)
    seconds: dict[str, dict[str, list[float]]] = {}
    for network in networks:
        made = {kind: make_step(network, kind) for kind in KINDS}
        for step in made.values():
            step()
        seconds[network] = {kind: [] for kind in KINDS}
        for _ in range(int(rounds)):
            for kind, step in made.items():
                start = time.monotonic()
                for _ in range(int(steps)):
                    step()
                duration = time.monotonic() - start
                seconds[network][kind].append(duration / int(steps))
    if world.is_chief:
        Path(out).write_text(json.dumps(seconds))
    world_lib.finish(world)


def make_step(network: str, kind: str) -> Callable[[], None]:
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from hvdkit.train.layers import batch_norm

    class KerasFormula(batch_norm.SyncBatchNormalization):
        """Has moments of its own, so its operations are Keras's."""

        def _moments(self, inputs, mask):
            return super()._moments(inputs, mask)

    classes = (
        keras.layers.BatchNormalization,
        KerasFormula,
        batch_norm.SyncBatchNormalization,
    )
    norm = dict(zip(KINDS, classes))[kind]
    shape = (32, 32, 3)
    layers: list[keras.Layer] = []
    if network == NETWORKS[0]:
        for place in range(19):
            width = 16 * 2 ** (place // 7)
            stride = 2 if place in (7, 14) else 1
            layers.append(keras.layers.Conv2D(width, 3, stride, "same", use_bias=False))
            layers += [norm(), keras.layers.ReLU()]
    else:
        shape = (64, 64, 256)
        layers.append(norm(dtype=keras.DTypePolicy(_policy(network))))
    model = keras.Sequential([keras.Input(shape), *layers])
    x = tf.random.stateless_normal([8, *shape], [1, hvd.rank()])
    x = tf.cast(x, model.layers[0].compute_dtype)

    @tf.function(autograph=False)
    def step() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
            loss = tf.reduce_sum(y * y)
        weights = [variable.value for variable in model.trainable_variables]
        by_x, *gradients = tape.gradient(loss, [x, *weights])
        gradients = hvd.grouped_allreduce(gradients, op=hvd.Sum)
        return [by_x[0, 0, 0, 0], *gradients]

    def run() -> None:
        for tensor in step():
            tensor.numpy()

    return run


def _policy(network: str) -> str:
    return "mixed_bfloat16" if network.endswith("bfloat16") else "float32"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(worker(*sys.argv[2:]))
    sys.exit(main())
