"""What launch/scaling.py predicts for links that are shaped here, beside measured steps. Root.

    python benchmarks/links.py [--hosts=2,3,4] [--mbit=25,50,100] [--delay_ms=0,5]

Hosts are network namespaces with their own sshd (tests/hosts.py), one rank each, started by
launch/hosts.sh over Gloo. The kernel limits what a host sends (tc, tbf). It has no delay to offer
here (netem), so with one a process takes the place of the bridge and holds every frame back.

The model has eight equal layers and computes by sleeping, 5 ms forward and 10 ms backward a layer,
so that ranks do not take each other's cores. Trained with --benchmark: first with links that are
not limited, on as many ranks, which tells the computing time; then with each link. Predicted from
the first, the link's bits, and half the least round trip of small packets before each run (delay).
Nothing is fitted. Times are lower quartiles of ten steps: other work on the machine, which is not
in the model, only adds to them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("launch", "tests", "template", "template/tests")]

import numpy as np
from planner.model import Horovod, Job, Links, step
from planner.tables import TOTALS

from links_net import PAYLOAD, delayed, prepare, round_trip, shape

GOAL = 0.15
LAYERS, WIDTH = 8, 256
FORWARD, BACKWARD = 0.005, 0.010  # seconds a layer
FLAGS = ["--task=blank", "--num_steps=15", "--base_lr=0.001", "--log_every=1000", "--benchmark"]
FLAGS += ["--trackers=", "--cpu_threads=4", "--data_workers=1"]
_NEEDED = ("tc", "ip", "ssh", "sshd", "unshare", "nsenter")


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        return worker(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, values in (("hosts", "2,3,4"), ("mbit", "25,50,100"), ("delay_ms", "0,5")):
        parser.add_argument(f"--{name}", default=values)
    args = parser.parse_args()
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in _NEEDED if not shutil.which(name, path=path)]
    if os.geteuid() or missing:
        print(f"skipped: needs {', '.join(missing) or 'root'}, for network namespaces")
        return 0
    print("| hosts | Mbit/s | delay, ms | ms a step: free links | shaped | predicted | error |")
    print("| --- " * 7 + "|", flush=True)
    found = []
    for count in map(int, args.hosts.split(",")):
        found += measure(count, _numbers(args.mbit), _numbers(args.delay_ms))
    within = sum(abs(error) <= GOAL for error in found)
    print(f"\n{within} of {len(found)} within {GOAL:.0%}; largest {max(map(abs, found)):.1%}")
    return 0


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


# ---- Measured and predicted --------------------------------------------------------------------


def measure(count: int, rates: list[float], delays: list[float]) -> Iterator[float]:
    """Relative errors, one a row that it prints."""
    from hosts import Hosts

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        hosts = Hosts(Path(folder), count)
        stack.callback(hosts.end)
        prepare(hosts)
        free = train(hosts, Path(folder) / "free")
        for delay in delays:
            with delayed(hosts, delay / 1e3):
                for rate in rates:
                    for host in hosts:
                        shape(hosts, host, rate)
                    hop = round_trip(hosts) / 2
                    run = train(hosts, Path(folder) / f"{rate:g}-{delay:g}")
                    yield row(count, rate, hop, free, run)


def row(count: int, rate: float, delay: float, free: Path, run: Path) -> float:
    """Prints a row; returns its relative error."""
    computing, measured = seconds(free), seconds(run)
    links = Links(1, 1.0, 0.0, rate * 1e6 / 8 * PAYLOAD, delay)
    # A layer's own gradient is there before it has waited, in the backward pass.
    profile = tuple((n / LAYERS, 1 / LAYERS) for n in range(LAYERS))
    job = Job(computing, 1, 4.0 * LAYERS * (WIDTH + 1) * WIDTH, profile, besides=TOTALS)
    predicted = step(job, count, links, Horovod("gloo")).total
    error = predicted / measured - 1
    cells = [count, f"{rate:g}", f"{delay * 1e3:.1f}", *map(_ms, (computing, measured, predicted))]
    print(
        "|",
        " | ".join(map(str, [*cells, f"{error:+.1%}"])),
        "|",
        flush=True,
    )
    return error


def seconds(run: Path) -> float:
    """Of a step: the lower quartile of ten."""
    record = json.loads((run / "benchmark.json").read_text())
    rates = np.sum([rank["samples_per_second"] for rank in record["by_rank"]], axis=0)
    return record["global_batch_size"] / float(np.quantile(rates, 0.75))


def _ms(value: float) -> str:
    return f"{value * 1e3:.0f}"


def train(hosts, run: Path) -> Path:
    """A benchmark on all hosts; raises SystemExit when it fails."""
    names = ",".join(f"{host.name}:1" for host in hosts)
    words = [ROOT / "launch" / "hosts.sh", "-H", names, "-p", "2222", "--interface", "eth0"]
    count = names.count(":")
    words += [sys.executable, __file__, "--worker", *FLAGS, f"--run_dir={run}"]
    words += [f"--global_batch_size={8 * count}"]
    ended = hosts[1].run(*words, timeout=600, env={"CUDA_VISIBLE_DEVICES": ""})
    if ended.code:
        raise SystemExit(f"exit code {ended.code}\n" + ended.output[-3000:])
    return run


def worker(words: list[str]) -> int:
    """train.py --task=blank, with another model."""
    import hvdkit
    import keras
    import tensorflow as tf

    import train
    from tasks import blank

    def wait(x: tf.Tensor, seconds: float) -> tf.Tensor:
        """x, later."""

        def slowly(value: np.ndarray) -> np.ndarray:
            time.sleep(seconds)
            return value

        return tf.ensure_shape(tf.numpy_function(slowly, [x], x.dtype), x.shape)

    class Computing(keras.layers.Layer):
        def call(self, x):
            @tf.custom_gradient
            def slowly(x):
                return wait(x, FORWARD), lambda upstream: wait(upstream, BACKWARD)

            return slowly(x)

    class Task(blank.Task):
        def build_model(self):
            numbers = keras.Input((blank.FEATURES,))
            x = keras.layers.Dense(WIDTH, trainable=False)(numbers)
            for _ in range(LAYERS):
                x = keras.layers.Dense(WIDTH, activation="relu")(Computing()(x))
            x = keras.layers.Dense(self.config.num_classes, trainable=False)(x)
            return keras.Model(numbers, x, name="waiting")

    blank.Task = Task
    return hvdkit.main(train.train, train.Settings, ["train.py", *words])


if __name__ == "__main__":
    sys.exit(main())
