#!/usr/bin/env python3
"""What to expect of more GPUs: step time, efficiency, cost, what limits, and which flag helps.

    python launch/scaling.py --params=25.6M --step_ms=110 --batch=64 \\
        --gpus=8,64,512,1024 --link=25Gbit --gpus_per_host=8
    python launch/scaling.py --run_dir=runs/measured --gpus=8,64 --link=8x200Gbit --inside=nvlink3

From the time of a step on one GPU, the bytes of its gradients and the links. --run_dir is a run of
train.py --benchmark on one rank, which tells parameters, step time and batch. Formulas and their
sources: planner/model.py. A prediction, not a measurement: check it on a few hosts first.

Exit code: 0, or 2 for a wrong value.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import signal
import sys
from pathlib import Path
from typing import NoReturn

from planner.model import Horovod, Job, Links
from planner.plan import Plan, Running, predictions
from planner.run import arrivals, benchmark
from planner.show import plot, table
from planner.tables import INSIDE, INSIDE_LATENCY, LINK_LATENCY, PROFILES, TOTALS

_SUFFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
_UNITS = {"Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "MB": 1e6, "GB": 1e9}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        plan = planned(args)
        rows = predictions(plan, args.gpus)
        if args.plot:
            plot(plan, args.gpus, args.plot)
        if args.json:
            record = {"plan": dataclasses.asdict(plan), "predictions": [r.record() for r in rows]}
            Path(args.json).write_text(json.dumps(_finite(record), indent=1) + "\n")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(plan, rows))
    return 0


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__.split("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=_gpus, required=True, help="numbers of GPUs, as in 8,64,512")
    job = parser.add_argument_group("the model, on one GPU").add_argument
    job("--run_dir", type=Path, help="a run of train.py --benchmark, instead of the next four")
    job("--params", type=_count, help="parameters that are trained: 25.6M")
    job("--step_ms", type=_above_zero, help="milliseconds of a step, input not waited for")
    job("--batch", type=_whole, help="samples a step on one GPU, all micro-batches of it")
    job("--accumulation_steps", type=_whole, help="micro-batches of a step (1)")
    job(
        "--profile",
        default="even",
        help=f"when gradients are ready: {', '.join(PROFILES)}, or a run made with --timeline",
    )
    job("--jitter", type=_share, default=0.06, help="standard deviation of a step's computing time "
        "over ranks, as a share (0.06: benchmarks/published.py)")  # fmt: skip
    job("--input_rate", type=_count, default=math.inf, help="samples a second a host can prepare")
    links = parser.add_argument_group("the cluster").add_argument
    links("--gpus_per_host", type=_whole, default=8)
    links("--link", type=_rate, required=True, help="a host's network: 25Gbit, 8x200Gbit, 3GB")
    links("--link_share", type=_part, default=0.93, help="share of it for data (0.93: RoCE, TCP)")
    links("--link_us", type=_zero_or_more, default=LINK_LATENCY * 1e6, help="latency of a hop "
          "between hosts, microseconds (14: NCCL's model)")  # fmt: skip
    links("--inside", default="pcie3", help=f"between GPUs of a host: {', '.join(INSIDE)}, or 50GB")
    links("--price", type=_zero_or_more, default=0.0, help="of a GPU hour")
    sent = parser.add_argument_group("flags of train.py (environment variables of Horovod)")
    sent.add_argument("--reduce_backend", default="nccl", choices=("nccl", "gloo", "mpi"))
    sent.add_argument("--compression", choices=("none", "fp16"), help="default: the run's, or none")
    sent.add_argument("--fusion_threshold_mb", type=_zero_or_more, default=64.0)
    sent.add_argument("--cycle_time_ms", type=_above_zero, default=1.0)
    sent.add_argument("--hierarchical_allreduce", action="store_true")
    weeks = parser.add_argument_group("over weeks").add_argument
    weeks("--save_s", type=_above_zero, default=0.5, help="seconds a save holds the training up")
    weeks("--write_s", type=_zero_or_more, default=30.0, help="seconds until it is written")
    weeks("--restart_s", type=_zero_or_more, default=300.0, help="from a failure to a new step")
    weeks("--mtbf_days", type=_above_zero, default=260.0, help="mean time between failures of one "
          "host, days (260: 419 failures in 54 days on 2,048 hosts, Llama 3, 2024)")  # fmt: skip
    weeks("--checkpoint_minutes", type=_zero_or_more, default=0.0, help="0: the best, after Daly")
    out = parser.add_argument_group("output, besides the table").add_argument
    out("--plot", default="", metavar="FILE", help="a picture of it, .svg or .png")
    out("--json", default="", metavar="FILE", help="all of it")
    return parser.parse_args(argv)


def planned(args: argparse.Namespace) -> Plan:
    """Raises ValueError: what is wrong with the flags, together."""
    given = {"--params": args.params, "--step_ms": args.step_ms, "--batch": args.batch}
    missing = [name for name, value in given.items() if value is None]
    if args.run_dir is None and missing:
        raise ValueError(f"{' and '.join(missing)}: give them, or --run_dir of a benchmark")
    if args.run_dir is not None and (len(missing) < 3 or args.accumulation_steps):
        flags = "--params, --step_ms, --batch and --accumulation_steps"
        raise ValueError(f"--run_dir tells {flags}: leave them out")
    if args.plot and Path(args.plot).suffix not in (".svg", ".png"):
        raise ValueError(f"--plot={args.plot}: a name that ends in .svg or .png")
    note = ""
    if args.run_dir is not None:
        run = benchmark(args.run_dir)
        args.params, args.step_ms, args.batch = run.parameters, run.seconds * 1e3, run.batch
        args.accumulation_steps = run.accumulation
        args.compression = args.compression or run.compression
        if args.compression == "bf16":
            raise ValueError(
                f"{args.run_dir} has --compression=bf16, which is not modelled: give --compression"
            )
        if run.virtual_ranks:
            raise ValueError(
                f"{args.run_dir} has --virtual_ranks, whose messages are not modelled: benchmark "
                "without"
            )
        if run.ranks > 1:
            note = f"note: measured on {run.ranks} ranks: its time holds their communication too"
    profile = PROFILES.get(args.profile) or arrivals(Path(args.profile))
    bytes_each = 2 if args.compression == "fp16" else 4
    job = Job(args.step_ms / 1e3, args.batch, args.params * bytes_each, profile,
              args.accumulation_steps or 1, TOTALS, args.jitter, args.input_rate)  # fmt: skip
    kind = "nvlink" if args.inside.startswith("nvlink") else "pcie"
    inside = INSIDE.get(args.inside) or _inside(args.inside)
    links = Links(args.gpus_per_host, inside, INSIDE_LATENCY[kind],
                  args.link * args.link_share, args.link_us / 1e6)  # fmt: skip
    horovod = Horovod(
        args.reduce_backend,
        "two-level" if args.hierarchical_allreduce else "auto",
        args.fusion_threshold_mb * (1 << 20),
        args.cycle_time_ms / 1e3,
    )
    between = args.mtbf_days * 86400
    every = args.checkpoint_minutes * 60
    running = Running(args.save_s, args.write_s, args.restart_s, between, every, args.price)
    return Plan(job, links, horovod, running, args.params, bytes_each, note)


# ---- Values ------------------------------------------------------------------------------------


def _count(text: str) -> float:
    head, suffix = (text[:-1], text[-1:]) if text[-1:].isalpha() else (text, "")
    value = _number(head) * _SUFFIXES.get(suffix, math.nan)
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0, as in 25.6M")
    return value


def _rate(text: str) -> float:
    """Bytes a second."""
    many, _, each = text.rpartition("x")
    for unit, scale in _UNITS.items():
        if each.endswith(unit):
            value = _number(many or "1") * _number(each.removesuffix(unit)) * scale
            if 0 < value < math.inf:
                return value
    raise argparse.ArgumentTypeError(f"'{text}' is not a rate, as in 25Gbit, 8x200Gbit or 3GB")


def _inside(text: str) -> float:
    try:
        return _rate(text)
    except argparse.ArgumentTypeError:
        raise ValueError(f"--inside={text}: one of {', '.join(INSIDE)}, or a rate: 50GB") from None


def _gpus(text: str) -> list[int]:
    return sorted({_whole(part) for part in text.split(",")})


def _whole(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 to 1,000,000")
    return int(text)


def _above_zero(text: str) -> float:
    if not 0 < _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return float(text)


def _zero_or_more(text: str) -> float:
    if not 0 <= _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0")
    return float(text)


def _share(text: str) -> float:
    if not 0 <= _number(text) <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a share from 0 to 1")
    return float(text)


def _part(text: str) -> float:
    if not _share(text):
        raise argparse.ArgumentTypeError(f"'{text}' leaves no bandwidth: above 0, at most 1")
    return float(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _finite(value: object) -> object:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no trace where `| head` has read enough
    sys.exit(main())
