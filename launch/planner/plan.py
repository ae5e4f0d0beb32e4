"""Predictions of scaling.py for each number of GPUs: what limits, and which flag helps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from planner.model import Horovod, Job, Links, Step, daly, goodput, step

_WORTH = 0.005  # of efficiency: what a flag must bring to be named
_MUCH = 0.02  # share of the time: what is less limits nothing
# What helps against losses that the model has no flag of.
HELPS = {
    "stragglers": "slow ranks are named in the log; hosts.sh --bind, --cpu_threads",
    "input": "hvdkit/data/pack.py, --data_workers, launch/stage.py",
    "saves and failures": "--elastic (no new start), --checkpoint_parts (a shorter save)",
}


@dataclasses.dataclass(frozen=True)
class Running:
    """Seconds, but for `price`, of a GPU hour; `every`: between saves, 0: the best."""

    save: float
    write: float
    restart: float
    between_failures: float  # of one host
    every: float
    price: float


@dataclasses.dataclass(frozen=True)
class Plan:
    job: Job
    links: Links
    horovod: Horovod
    running: Running
    parameters: float
    bytes_each: int  # of a parameter's gradient, as it travels
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of one number of GPUs.

    Attributes:
      kept: share of the time that makes steps which count, beside saves and failures.
      losses: shares of the time, by name; helps: flags against the large ones, largest first.
    """

    gpus: int
    hosts: int
    step: Step
    samples: float  # a second, while training
    efficiency: float
    kept: float
    every: float  # seconds between saves
    losses: dict[str, float]
    helps: dict[str, str]
    price: float

    @property
    def cost(self) -> float:
        """Of a million samples that count."""
        return self.price * self.gpus / 3600 * 1e6 / (self.samples * self.kept)

    def record(self) -> dict[str, Any]:
        own = dataclasses.asdict(self) | {"seconds_a_step": self.step.total}
        return own | {"cost_a_million_samples": self.cost}


def predictions(plan: Plan, gpus: Sequence[int]) -> list[Prediction]:
    return [prediction(plan, count) for count in gpus]


def prediction(plan: Plan, gpus: int) -> Prediction:
    parts = step(plan.job, gpus, plan.links, plan.horovod)
    hosts = math.ceil(gpus / plan.links.gpus_per_host)
    kept, every = _kept(plan.running, hosts)
    losses = {name: value / parts.total for name, value in dataclasses.asdict(parts).items()}
    del losses["compute"]
    losses["saves and failures"] = 1 - kept
    limits = _limits(losses)
    return Prediction(
        gpus,
        hosts,
        parts,
        samples=gpus * plan.job.batch / parts.total,
        efficiency=plan.job.compute / parts.total,
        kept=kept,
        every=every,
        losses=losses,
        helps={name: _help(plan, gpus, name) for name in limits},
        price=plan.running.price,
    )


def _limits(losses: dict[str, float]) -> list[str]:
    """The large losses, the largest first; against both of the network's the same flags help."""
    large = {name: share for name, share in losses.items() if share >= _MUCH}
    if large.keys() >= {"bandwidth", "latency"}:
        large["bandwidth and latency"] = large.pop("bandwidth") + large.pop("latency")
    return sorted(large, key=large.__getitem__, reverse=True)


def _kept(running: Running, hosts: int) -> tuple[float, float]:
    """Share of the time that counts, and seconds between saves; ValueError where none counts."""
    between = running.between_failures / hosts
    # A save waits until the one before it is written (hvdkit/checkpoint/saver.py).
    every = running.every or max(daly(running.save, between), running.write)
    save = running.save + max(0.0, running.write - every)
    kept = goodput(every, save, running.restart + running.write, between)
    if not kept:
        raise ValueError(
            f"with {hosts:,} hosts one fails every {between:.3g} s (--mtbf_days), sooner than "
            "restart and save take (--restart_s, --write_s, --checkpoint_minutes): no step is kept"
        )
    return kept, every


def _help(plan: Plan, gpus: int, limit: str) -> str:
    """Flags that help against a loss of the network's: those that the model says bring most, and
    the efficiency with them. Empty for other losses: see HELPS."""
    if limit in HELPS:
        return ""
    before = step(plan.job, gpus, plan.links, plan.horovod).total / plan.job.compute
    found = []
    for words, other in _others(plan):
        parts = step(other.job, gpus, other.links, other.horovod)
        found.append((other.job.compute / parts.total, words))
    best = sorted(found, reverse=True)[:2]
    shown = [f"{words}: {x:.0%}" for x, words in best if x >= 1 / before + _WORTH]
    return ", ".join(shown) or "no flag helps"


def _others(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The same plan with one flag more."""
    job, horovod = plan.job, plan.horovod
    if plan.bytes_each == 4:
        half = dataclasses.replace(job, gradients=job.gradients / 2)
        yield "--compression=fp16", dataclasses.replace(plan, job=half, bytes_each=2)
    # The same micro-batches, twice as many of them in a step: twice the global batch.
    longer = dataclasses.replace(
        job, compute=2 * job.compute, batch=2 * job.batch, accumulation=2 * job.accumulation
    )
    words = f"--accumulation_steps={longer.accumulation} (global batch x2)"
    yield words, dataclasses.replace(plan, job=longer)
    changes = {}
    if horovod.backend == "nccl" and horovod.algorithm != "two-level":
        changes["--hierarchical_allreduce"] = {"algorithm": "two-level"}
    for size in (16, 256):
        changes[f"--fusion_threshold_mb={size}"] = {"fusion": size * (1 << 20)}
    changes["--cycle_time_ms=5"] = {"cycle": 5e-3}
    for words, change in changes.items():
        yield words, dataclasses.replace(plan, horovod=dataclasses.replace(horovod, **change))
