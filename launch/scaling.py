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


def measured(folder: str) -> Job:
    """The job of a benchmarked run."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        record = json.loads(Path(folder, "benchmark.json").read_text())
        config = Path(folder, "config.cfg").read_text()
        flags = dict(re.findall(r"^--(\w+)=(.*)$", config, re.M))
        figures = [record["seconds_a_step"], record["global_batch_size"]]
        figures += [4.0 * record["trained_parameters"]]
        sound = record["ranks"] == 1 and flags["virtual_ranks"] == "0"
        if sound and all(0 < figure < math.inf for figure in figures):
            return Job(*figures, accumulation=int(flags["accumulation_steps"]))
    what = "a run of train.py --benchmark on one rank, without --virtual_ranks"
    raise argparse.ArgumentTypeError(f"{folder} is not {what}: make one")


def parse() -> argparse.Namespace:
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
    args = parser.parse_args()
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


def main() -> int:
    args = parse()
    if args.published:
        import published

        published.print_table()
        return 0
    rates = INSIDE[args.inside], args.link * PAYLOAD
    cluster = Cluster(args.gpus_per_host, *rates, LATENCY[args.inside[:-1]], LATENCY["link"])
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
