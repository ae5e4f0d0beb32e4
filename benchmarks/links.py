"""What launch/scaling.py predicts for links that are shaped here, beside measured steps. Root.

    python benchmarks/links.py [--hosts=2,3,4] [--mbit=25,50,100] [--delay_ms=0,5]

Hosts are network namespaces with their own sshd (tests/hosts.py), one rank each, started by
launch/hosts.sh over Gloo. The kernel limits what a host sends (tc, tbf). It has no delay to offer
here (netem), so with one a process takes the place of the bridge and holds every frame back.

The model has eight equal layers and computes by sleeping, 5 ms forward and 10 ms backward a layer,
so that ranks do not take each other's cores. Trained with --benchmark: first with links that are
not limited, on as many ranks, which tells the computing time; then with each link. Predicted from
the first, the link's bits, and half the round trip of a small UDP packet before each run (delay).
Nothing is fitted. Times are medians of ten steps; on a busy machine ranks wait for cores, which is
not in the model.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("launch", "tests", "template", "template/tests")]

from planner.model import Horovod, Job, Links, step
from planner.tables import TOTALS

GOAL = 0.15
LAYERS, WIDTH = 8, 256
FORWARD, BACKWARD = 0.005, 0.010  # seconds a layer
MTU = 9000
# What tbf counts of a full frame is 9,014 bytes, with 8,948 of data.
PAYLOAD = (MTU - 52) / (MTU + 14)
FLAGS = ["--task=blank", "--num_steps=15", "--base_lr=0.001", "--log_every=1000", "--benchmark"]
FLAGS += ["--trackers=", "--cpu_threads=4", "--data_workers=1"]
_PORT, _ENOUGH = 7007, b"!"
_NEEDED = ("tc", "ip", "ssh", "sshd", "unshare", "nsenter")
_OFFLOADS = (0x17, 0x1F, 0x21, 0x25)  # linux/ethtool.h: checksums, TSO, UFO, GSO


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        return worker(sys.argv[2:])
    if sys.argv[1:2] == ["--plain"]:
        return send_plain_frames(sys.argv[2])
    if sys.argv[1:2] == ["--echo"]:
        return echo()
    if sys.argv[1:2] == ["--ask"]:
        return ask(sys.argv[2])
    if sys.argv[1:2] == ["--switch"]:
        return switch(float(sys.argv[2]), sys.argv[3:])
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
        for host in hosts:
            shape(hosts, host, None)
            for pid, name in ((host.pid, "eth0"), (hosts.switch, f"port{host.name[4:]}")):
                _in(pid, f"ip link set {name} mtu {MTU}")
                _in(pid, sys.executable, __file__, "--plain", name)
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
    """Of a step: a median."""
    record = json.loads((run / "benchmark.json").read_text())
    return record["global_batch_size"] / record["samples_per_second"]["median"]


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
    import keras
    import numpy as np
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
    return train.main(["train.py", *words])


# ---- Links -------------------------------------------------------------------------------------


def shape(hosts, host, megabits: float | None) -> None:
    """Limits what the host sends; None: nothing does."""
    _in(hosts.switch, f"tc qdisc del dev port{host.name[4:]} root", quiet=True)
    _in(host.pid, "tc qdisc del dev eth0 root", quiet=True)
    if megabits:
        how = f"tbf rate {megabits:g}mbit burst 20kb latency 2000ms"
        _in(host.pid, f"tc qdisc add dev eth0 root {how}")


@contextlib.contextmanager
def delayed(hosts, seconds: float) -> Iterator[None]:
    """Frames take this long from host to host."""
    if not seconds:
        yield
        return
    ports = [f"port{host.name[4:]}" for host in hosts]
    for port in ports:
        _in(hosts.switch, f"ip link set {port} nomaster")
    enter = ["nsenter", "--target", str(hosts.switch), "--net"]
    words = [*enter, sys.executable, __file__, "--switch", str(seconds), *ports]
    process = subprocess.Popen(words)
    try:
        yield
    finally:
        process.kill()
        process.wait(10)
        for port in ports:
            _in(hosts.switch, f"ip link set {port} master bridge0")


def switch(delay: float, ports: list[str]) -> int:
    """Hands frames from port to port, each after `delay` seconds; until it is killed."""
    # A switch has no scheduler: no other process here may make it late.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    sockets = {}
    for port in ports:
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23)
        end.bind((port, 0))
        end.setblocking(False)
        sockets[end.fileno()] = end
    lives: dict[bytes, socket.socket] = {}  # by hardware address
    held: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    while True:
        rest = max(0.0, held[0][0] - time.monotonic()) if held else None
        for number in select.select(list(sockets), [], [], rest)[0]:
            frame, about = sockets[number].recvfrom(65536)
            if about[2] == socket.PACKET_OUTGOING:
                continue
            lives[frame[6:12]] = sockets[number]
            to = lives.get(frame[:6])
            for end in [to] if to else [s for n, s in sockets.items() if n != number]:
                held.append((time.monotonic() + delay, end, frame))
        while held and held[0][0] <= time.monotonic():
            _, end, frame = held.popleft()
            with contextlib.suppress(OSError):  # a full queue drops, as a switch does
                end.send(frame)


def round_trip(hosts) -> float:
    """Seconds, of small packets between the first two hosts; a median."""
    server = subprocess.Popen(hosts[2].words(sys.executable, __file__, "--echo"))
    try:
        return float(hosts[1].run(sys.executable, __file__, "--ask", hosts[2].address).output)
    finally:
        server.wait(10)


def echo() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.bind(("", _PORT))
        while True:
            said, asker = end.recvfrom(64)
            end.sendto(said, asker)
            if said == _ENOUGH:
                return 0


def ask(address: str) -> int:
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.settimeout(0.5)
        deadline = time.monotonic() + 30  # until the other one listens
        while len(times) < 30 and time.monotonic() < deadline:
            start = time.perf_counter()
            with contextlib.suppress(OSError):
                end.sendto(b"?", (address, _PORT))
                end.recv(64)
                times.append(time.perf_counter() - start)
            time.sleep(0.02)
        end.sendto(_ENOUGH, (address, _PORT))
    print(statistics.median(times))
    return 0


def send_plain_frames(name: str) -> int:
    """Whole frames with their checksums, which `switch` can pass on; what `ethtool -K` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in _OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", name.encode(), ctypes.addressof(value))
            with contextlib.suppress(OSError):  # a kernel without that offload
                fcntl.ioctl(any_socket, 0x8946, request)  # SIOCETHTOOL
    return 0


def _in(pid: int, *command: str, quiet: bool = False) -> None:
    words = [w for part in command for w in (part.split() if len(command) == 1 else [part])]
    enter = ["nsenter", "--target", str(pid), "--net"]
    subprocess.run([*enter, *words], check=not quiet, capture_output=quiet)


if __name__ == "__main__":
    sys.exit(main())
