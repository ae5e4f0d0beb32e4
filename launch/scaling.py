#!/usr/bin/env python3
"""What to expect of more GPUs: step time, efficiency, where time is lost, what three flags give.

    python launch/scaling.py --params=25.6M --step_ms=110 --batch=64 --gpus=8,64,512 --link=25Gbit
    python launch/scaling.py --run_dir=runs/one_gpu --gpus=8,64 --link=8x200Gbit --inside=nvlink3
    python launch/scaling.py --published        the same formulas against published figures

--run_dir is a run of train.py --benchmark on one rank. A prediction: check it on a few hosts first.
"""

import argparse
import contextlib
import functools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

# Bytes a second of a ring over the GPUs of a host: NCCL's src/graph/topo.h and tuning.cc.
INSIDE = {"pcie3": 12e9, "pcie4": 24e9, "nvlink1": 72e9, "nvlink2": 120e9, "nvlink3": 235e9}
INSIDE["nvlink4"] = 371e9
# Seconds a hop of a ring: NCCL, src/graph/tuning.cc, hwLat, the Simple protocol.
LATENCY = {"pcie": 5.7e-6, "nvlink": 3.4e-6, "link": 14e-6}
BACKWARD = 2 / 3  # of a step: gradients by weights and by inputs, after the forward pass
PAYLOAD = 0.93  # of a link: RoCE v2 carries 1,024 of 1,106 bytes, TCP 1,448 of 1,538


class Cluster(NamedTuple):
    """GPUs of a host, bytes a second inside it and of the link that they share, seconds a hop."""

    per_host: int
    inside: float
    link: float
    inside_hop: float
    hop: float


class Horovod(NamedTuple):
    """Defaults of docs/tensor-fusion.rst. `algorithm`: auto (as NCCL), ring or two-level."""

    algorithm: str = "auto"
    cycle: float = 1e-3
    fusion: float = 64 << 20


USUAL = Horovod()


class Job(NamedTuple):
    """One GPU's step: seconds, samples and bytes of gradients, those in order of the backward pass.

    `profile`: (at, share) pairs: `share` of the bytes is ready when `at` of the pass is done.
    `jitter`: standard deviation of the seconds over ranks, as a share; `input_rate`: of a host.
    """

    compute: float
    batch: float
    gradients: float
    profile: Sequence[tuple[float, float]] = tuple((n / 20, 1 / 20) for n in range(1, 21))
    accumulation: int = 1
    jitter: float = 0.0
    input_rate: float = math.inf


def ring(size: float, ranks: int, *, bandwidth: float, hop: float) -> float:
    """2(N-1)/N size/B + 2(N-1) hops. Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce"."""
    return 2 * (ranks - 1) / ranks * size / bandwidth + 2 * (ranks - 1) * hop


def allreduce(size: float, ranks: int, cluster: Cluster, *, how: str) -> float:
    """Seconds of the sum of `size` bytes. In a ring each host's link carries every byte once.

    Two-level: Horovod's hierarchical allreduce. Tree: NCCL's double binary tree (Sanders, Speck and
    Traeff 2009) with a chain in each host, as in its src/graph/tuning.cc.
    """
    local = min(cluster.per_host, ranks)
    hosts = math.ceil(ranks / local)
    slowest = min([cluster.inside] * (local > 1) + [cluster.link] * (hosts > 1), default=math.inf)
    if how == "two-level":
        inside = ring(size, local, bandwidth=cluster.inside, hop=cluster.inside_hop)
        return inside + ring(size, hosts, bandwidth=cluster.link, hop=cluster.hop)
    between = 2 * (hosts - 1)  # hops of a ring
    hops = (2 * (ranks - 1) - between) * cluster.inside_hop + between * cluster.hop
    in_ring = ring(size, ranks, bandwidth=slowest, hop=0) + hops
    hops = (local - 1) * cluster.inside_hop + math.log2(hosts) * cluster.hop
    in_tree = 2 * size / (0.9 * slowest) + 2 * hops
    return in_ring if how == "ring" else min(in_ring, in_tree)


def messages_end(
    ready: Sequence[tuple[float, float]], reduce: Callable[[float], float], horovod: Horovod
) -> float:
    """When the last of `ready`, (seconds, bytes) in order of time, is summed.

    Once a cycle Horovod's thread packs what all ranks have into messages of at most the fusion
    buffer and queues them (operations.cc, RunLoopOnce). Ranks agree in a small allreduce before.
    """
    free, tick, first, agree = 0.0, 0.0, 0, reduce(8.0)
    period = max(horovod.cycle, agree)
    while first < len(ready):
        tick, packed = max(tick, ready[first][0] + period / 2), [0.0]
        while first < len(ready) and ready[first][0] <= tick:
            if packed[-1] + ready[first][1] > horovod.fusion:
                packed.append(0.0)
            packed[-1] += ready[first][1]
            first += 1
        free = max(free, tick + agree) + sum(reduce(size) for size in packed if size)
        tick += period
    return free


def expected_maximum(count: int) -> float:
    """Of the largest of `count` standard normal draws, within 5 % (Blom 1958)."""
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def step(job: Job, ranks: int, cluster: Cluster, *, horovod: Horovod = USUAL) -> dict[str, float]:
    """Seconds of a step on `ranks` GPUs by cause: all wait for the slowest rank, then for links."""
    slowest = job.compute * (1 + job.jitter * expected_maximum(ranks))
    compute = max(slowest, job.batch * min(cluster.per_host, ranks) / job.input_rate)
    backward = BACKWARD * compute / job.accumulation
    ready = [(compute - backward * (1 - at), share * job.gradients) for at, share in job.profile]
    ends = []
    for links in (cluster, cluster._replace(inside_hop=0.0, hop=0.0)):
        reduce = functools.partial(allreduce, ranks=ranks, cluster=links, how=horovod.algorithm)
        ends.append(max(compute, messages_end(ready, reduce, horovod) if ranks > 1 else 0.0))
    parts = {"computing": job.compute, "stragglers": slowest - job.compute}
    parts |= {"input": compute - slowest, "bandwidth": ends[1] - compute}
    return parts | {"latency": ends[0] - ends[1]}


def daly(save: float, between: float) -> float:
    """Best seconds between saves, a failure comes every `between`. Daly 2006, equation 37."""
    part = save / (2 * between)
    best = math.sqrt(2 * save * between) * (1 + math.sqrt(part) / 3 + part / 9) - save
    return best if part < 1 else between


def column(job: Job, gpus: int, cluster: Cluster, *, mtbf: float, save: float) -> dict[str, str]:
    """The table's column for `gpus`; seconds between failures of one host, and of a save."""
    parts, hosts = step(job, gpus, cluster), math.ceil(gpus / cluster.per_host)
    total = sum(parts.values())
    cells = {"GPUs": f"{gpus:,}", "ms a step": f"{total * 1e3:,.1f}"}
    cells["samples/s"] = f"{gpus * job.batch / total:,.0f}"
    cells["efficiency"] = f"{job.compute / total:.1%}"
    del parts["computing"]
    cells |= {f"lost: {name}": f"{part / total:.1%}" for name, part in parts.items()}
    more = {name: 2 * getattr(job, name) for name in ("compute", "batch", "accumulation")}
    for name, other, horovod in (
        ("with --compression=fp16", job._replace(gradients=job.gradients / 2), USUAL),
        ("with --hierarchical_allreduce", job, Horovod("two-level")),
        ("with --accumulation_steps, twice the batch", job._replace(**more), USUAL),
    ):
        seconds = sum(step(other, gpus, cluster, horovod=horovod).values())
        cells[name] = f"{other.compute / seconds:.1%}"
    return cells | {"save every, minutes": f"{daly(save, mtbf / hosts) / 60:.3g}"}


# Published figures. Efficiency is samples a second on N GPUs over N times those on one, its error
# in points (hundredths). The jitter is fitted to the rows of other sources; nothing else is fitted.
GBIT = 1e9 / 8
TCP, RDMA = 1448 / 1538, 1024 / 1106  # payload of Ethernet frames of 1,500 bytes, of RoCE v2
UBER = "horovod#44, docs/benchmarks.rst"
# NCCL had no trees before its version 2.4 of 2019.
BEFORE_TREES = {"horovod#779", "horovod#416", "horovod#693", UBER}
JITTERS = [n * 0.0025 for n in range(41)]
# Trained parameters of keras.applications, and of NVIDIA's U-Net.
MILLIONS = {"resnet50": 25.58, "resnet101": 44.60, "inceptionv3": 23.82, "vgg16": 138.36}
MILLIONS |= {"efficientnetb4": 19.34, "unet": 31.03}
# Its dense layers hold most parameters and are ready first.
VGG16 = (0.038, 0.911), (0.098, 0.034), (0.34, 0.034), (0.64, 0.017), (1.0, 0.004)


class Row(NamedTuple):
    source: str
    what: str
    model: str
    batch: int
    rate: float  # samples a second on one GPU
    per_host: int
    inside: str
    link: float  # bytes a second
    gpus: int
    published: float  # efficiency


def rows() -> list[Row]:
    """Rows of one cluster or author have one source: none is fitted to another."""
    nvidia, hdr = "NVIDIA DeepLearningExamples", 8 * 200 * GBIT * RDMA  # DGX A100
    tcp, rdma, slow = 25 * GBIT * TCP, 25 * GBIT * RDMA, 1 * GBIT * TCP
    # The batch of #779, the link of #44 and one GPU's rate of #693 are not given there: the usual.
    known = [
        ("horovod#779", "V100, 25G TCP", "resnet50", 256, 872, 8, "nvlink2", tcp,
         (8, 6679), (16, 12828), (32, 23870), (64, 47195), (128, 89783)),
        ("horovod#416", "V100 PCIe, 40G RoCE", "resnet101", 64, 202.78, 8, "pcie3",
         40 * GBIT * RDMA, (4, 650.92), (16, 2379.56)),
        (UBER, "Pascal, 25G RDMA", "inceptionv3", 64, 134.4, 4, "pcie3", rdma,
         (16, 2022.6), (512, 0.90)),
        (UBER, "Pascal, 25G RDMA", "resnet101", 64, 119.4, 4, "pcie3", rdma,
         (16, 1746.2), (512, 0.90)),
        (UBER, "Pascal, 25G RDMA", "vgg16", 64, 130.9, 4, "pcie3", rdma, (16, 1787.4), (512, 0.68)),
        (UBER, "Pascal, 25G TCP", "resnet101", 64, 119.4, 4, "pcie3", tcp, (16, 1685.1)),
        (UBER, "Pascal, 25G TCP", "vgg16", 64, 130.9, 4, "pcie3", tcp, (16, 1308.7)),
        ("horovod#693", "1080 Ti, 1G TCP", "resnet50", 64, 608.38 / 4, 4, "pcie3", slow,
         (8, 300.18)),
        (nvidia, "A100 AMP", "resnet50", 256, 2375, 8, "nvlink3", hdr, (8, 17400)),
        (nvidia, "A100 TF32", "resnet50", 256, 909, 8, "nvlink3", hdr, (8, 7000)),
        (nvidia, "DGX-1 V100 AMP", "resnet50", 256, 1270, 8, "nvlink2", hdr, (8, 9510)),
        (nvidia, "DGX-2 V100 AMP", "resnet50", 256, 1300, 16, "nvlink2", hdr, (16, 17250)),
        (nvidia, "A100 AMP", "efficientnetb4", 160, 470, 8, "nvlink3", hdr,
         (32, 12908), (64, 25455)),
        (nvidia, "A100 AMP", "unet", 8, 141.03, 8, "nvlink3", hdr, (8, 1000.89)),
    ]  # fmt: skip
    return [
        Row(*row[:8], gpus, samples if samples < 1 else samples / (gpus * row[4]))
        for row in known
        for gpus, samples in row[8:]
    ]


def predict(row: Row, jitter: float) -> float:
    """Efficiency. Horovod's cycle was 5 ms when these figures were published."""
    hops = LATENCY[row.inside[:-1]], LATENCY["link"]
    cluster = Cluster(row.per_host, INSIDE[row.inside], row.link, *hops)
    job = Job(row.batch / row.rate, row.batch, 4e6 * MILLIONS[row.model], jitter=jitter)
    job = job._replace(profile=VGG16) if row.model == "vgg16" else job
    horovod = Horovod("ring" if row.source in BEFORE_TREES else "auto", cycle=5e-3)
    return job.compute / sum(step(job, row.gpus, cluster, horovod=horovod).values())


def errors(found: list[Row]) -> list[float]:
    """Points of each row, with the jitter of least median error of other sources."""
    points = [[100 * (predict(row, jitter) - row.published) for row in found] for jitter in JITTERS]

    def error_of_others(own: Row, at: list[float]) -> float:
        return statistics.median(abs(p) for row, p in zip(found, at) if row.source != own.source)

    return [
        min(points, key=lambda at: error_of_others(row, at))[number]
        for number, row in enumerate(found)
    ]


def print_published() -> None:
    points = errors(found := rows())
    print("| source | model | GPUs | published | predicted | error, points |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row, own in zip(found, points):
        figures = f"{row.published:.1%} | {row.published + own / 100:.1%} | {own:+.1f}"
        print(f"| {row.source} | {row.model}, {row.what} | {row.gpus} | {figures} |")
    size = [abs(own) for own in points]
    print(f"\nmedian error {statistics.median(size):.1f} points, largest {max(size):.1f}")


def measured(folder: str) -> Job:
    """The job of a benchmarked run."""
    try:
        record = json.loads(Path(folder, "benchmark.json").read_text())
        config = Path(folder, "config.cfg").read_text()
        flags = dict(re.findall(r"^--(\w+)=(.*)$", config, re.M))
        figures = [record["seconds_a_step"], record["global_batch_size"]]
        figures += [4.0 * record["trained_parameters"]]
        job = Job(*figures, accumulation=int(flags["accumulation_steps"]))
        sound = all(0 < figure < math.inf for figure in figures)
        sound = sound and record["ranks"] == 1 and flags["virtual_ranks"] == "0"
    except (OSError, ValueError, LookupError, TypeError):
        sound = False
    if sound:
        return job
    what = "a run of train.py --benchmark on one rank, without --virtual_ranks"
    raise argparse.ArgumentTypeError(f"{folder} is not {what}: make one")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--published", action="store_true", help="only the formulas against published figures")
    add("--gpus", type=lambda text: [_whole(n) for n in text.split(",")], help="as in 8,64,512")
    add("--run_dir", type=measured, help="a run of train.py --benchmark, instead of the next four")
    add("--params", type=_number, help="parameters that are trained: 25.6M")
    add("--step_ms", type=_number, help="milliseconds of a step on one GPU")
    add("--batch", type=_whole, help="samples of that step")
    add("--accumulation_steps", type=_whole, help="micro-batches of that step (1)")
    add("--jitter", type=_number, default=0.06, help="deviation of a step's time over ranks (0.06)")
    add("--input_rate", type=_number, default=math.inf, help="samples a second a host can prepare")
    add("--gpus_per_host", type=_whole, default=8, help="of one host, which share its link")
    add("--link", type=_bytes_a_second, help="a host's network: 25Gbit, 8x200Gbit, 3GB")
    add("--inside", default="pcie3", choices=INSIDE, help="what joins the GPUs of a host")
    add("--save_s", type=_number, default=0.5, help="seconds a save holds the training up")
    add("--mtbf_days", type=_number, default=260.0, help="between failures of one host "
        "(260: 419 failures in 54 days on 2,048 hosts, Llama 3, 2024)")  # fmt: skip
    parser.error = lambda message: parser.exit(2, f"error: {message}\n")
    args = parser.parse_args(argv)
    names = "params", "step_ms", "batch", "accumulation_steps"
    given = [name for name in names if getattr(args, name)]
    if args.run_dir and given:
        parser.error(f"--run_dir and --{given[0]}: choose one")
    job = args.run_dir or (args.params and args.step_ms and args.batch)
    if not args.published and not (args.gpus and args.link and job):
        parser.error("give --gpus, --link, and either --run_dir or --params, --step_ms and --batch")
    return args


def _number(text: str) -> float:
    """Above 0; 25.6M is 25.6e6."""
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}.get(text[-1:])
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text[:-1]) * scale if scale else float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0, as in 25.6M")


def _whole(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 to 1,000,000")
    return int(text)


def _bytes_a_second(text: str) -> float:
    if not (found := re.fullmatch(r"(?:(\d+)x)?([\d.]+)(Gbit|Mbit|GB|MB)", text)):
        raise argparse.ArgumentTypeError(f"'{text}' is not a rate, as in 25Gbit, 8x200Gbit or 3GB")
    unit = {"Gbit": 1e9 / 8, "Mbit": 1e6 / 8, "GB": 1e9, "MB": 1e6}[found[3]]
    return int(found[1] or 1) * _number(found[2]) * unit


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.published:
        print_published()
        return 0
    kind = "nvlink" if args.inside.startswith("nvlink") else "pcie"
    rates = INSIDE[args.inside], args.link * PAYLOAD
    cluster = Cluster(args.gpus_per_host, *rates, LATENCY[kind], LATENCY["link"])
    more = {"accumulation": args.accumulation_steps or 1}
    job = args.run_dir or Job(args.step_ms / 1e3, args.batch, 4 * args.params, **more)
    job = job._replace(jitter=args.jitter, input_rate=args.input_rate)
    times = {"mtbf": args.mtbf_days * 86400, "save": args.save_s}
    columns = [column(job, n, cluster, **times) for n in args.gpus]
    for name in columns[0]:
        print(f"{name:<43}" + "".join(f"{cells[name]:>12}" for cells in columns))
    print("predicted, not measured: try it on a few hosts first")
    return 0


if __name__ == "__main__":
    sys.exit(main())
