"""Formulas of scaling.py: how long a step takes on N GPUs, and how much of the time is useful.

Times are seconds, sizes bytes, bandwidths bytes a second in each direction. Nothing here was fitted
to a run; benchmarks/published.py and benchmarks/links.py compare it with measured ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

# Gradients as (at, share): `share` of all bytes is there when `at` of the backward pass is done.
Profile = tuple[tuple[float, float], ...]

# The backward pass is two of three: gradients by weights and by inputs, after the forward pass.
BACKWARD = 2 / 3
MIB = 1 << 20
_GLOO_SEGMENT = MIB  # gloo/allreduce.h, kMaxSegmentSize


@dataclasses.dataclass(frozen=True)
class Links:
    """What GPUs are joined by; `link` is one host's, which all its GPUs share."""

    gpus_per_host: int
    inside: float
    inside_latency: float
    link: float
    link_latency: float


@dataclasses.dataclass(frozen=True)
class Horovod:
    """How gradients are sent; defaults as in Horovod (docs/tensor-fusion.rst).

    Attributes:
      backend: nccl, where messages queue on a stream while the next ones are gathered; gloo or
        mpi, where Horovod's thread does nothing else meanwhile.
      algorithm: ring, tree, auto (the faster one, as NCCL takes it) or two-level.
    """

    backend: str = "nccl"
    algorithm: str = "auto"
    fusion: float = 64 * MIB
    cycle: float = 1e-3


@dataclasses.dataclass(frozen=True)
class Job:
    """One GPU's part of a step.

    Attributes:
      compute: of all micro-batches of a step, forward and backward.
      gradients: bytes of all gradients as they travel.
      besides: bytes that a step sums besides, in a message of their own, as of another type.
      jitter: standard deviation of a rank's compute time, as a share of it.
      input_rate: samples a second that one host can prepare.
    """

    compute: float
    batch: int
    gradients: float
    profile: Profile
    accumulation: int = 1
    besides: float = 0.0
    jitter: float = 0.0
    input_rate: float = math.inf


@dataclasses.dataclass(frozen=True)
class Step:
    """Where a step's seconds go; `total` is their sum."""

    compute: float
    stragglers: float
    input: float
    bandwidth: float
    latency: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


# ---- One allreduce -----------------------------------------------------------------------------


def ring(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """2(N-1)/N size/B + 2(N-1) latency: a reduce-scatter and an allgather, each N-1 steps.

    Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations";
    costs of a step as in Thakur, Rabenseifner and Gropp 2005, section 4.
    """
    return 2 * (ranks - 1) / ranks * size / bandwidth + 2 * (ranks - 1) * latency


def gloo_ring(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """The ring as Gloo has it (gloo/allreduce.cc), which is not bandwidth optimal for few ranks.

    A rank's chunk is cut into s >= 2 segments of at most 1 MiB, and each of the two phases sends
    sN - 2 segments where s(N-1) would do. Two segments are under way at a time, so that one lasts
    the larger of its own time on the link and half of that plus the latency.
    """
    chunk = size / ranks
    segments = max(2, math.ceil(chunk / _GLOO_SEGMENT))
    wire = chunk / segments / bandwidth
    return 2 * ((segments * ranks - 2) * max(wire, (wire + latency) / 2) + latency)


def allreduce(size: float, ranks: int, links: Links, horovod: Horovod) -> float:
    """Seconds of the sum of `size` bytes over all ranks.

    In a ring over hosts every byte crosses each host's link once in each direction, whatever the
    number of its GPUs; latencies add up along the ring, and of 2(N-1) hops 2(H-1) are between
    hosts (NCCL, src/graph/tuning.cc, ncclTopoTuneModel).
    """
    if ranks == 1:
        return 0.0
    local = min(links.gpus_per_host, ranks)
    hosts = math.ceil(ranks / local)
    slowest = min(links.inside if local > 1 else math.inf, links.link if hosts > 1 else math.inf)
    hops_between = 2 * (hosts - 1)
    hops_inside = 2 * (ranks - 1) - hops_between
    latency = hops_inside * links.inside_latency + hops_between * links.link_latency
    if horovod.backend == "gloo":
        return gloo_ring(size, ranks, slowest, latency / (2 * (ranks - 1)))
    in_ring = ring(size, ranks, slowest, 0) + latency
    in_tree = tree(size, local, hosts, slowest, links)
    if horovod.algorithm == "two-level":
        return two_level(size, local, hosts, links)
    by_name = {"ring": in_ring, "tree": in_tree, "auto": min(in_ring, in_tree)}
    return by_name[horovod.algorithm if horovod.backend == "nccl" else "ring"]


def tree(size: float, local: int, hosts: int, slowest: float, links: Links) -> float:
    """NCCL's double binary tree between hosts, a chain in each: 2 size / 0.9 B, log2(H) hops.

    Sanders, Speck and Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction
    and scan"; bandwidth and latency as in NCCL's src/graph/tuning.cc.
    """
    hops = (local - 1) * links.inside_latency + math.log2(hosts) * links.link_latency
    return 2 * size / (0.9 * slowest) + 2 * hops


def two_level(size: float, local: int, hosts: int, links: Links) -> float:
    """Horovod's hierarchical allreduce: reduce-scatter in each host, allreduce between hosts of
    each GPU's part at the same time (together they have the one link), allgather in each host.

    Horovod, ops/nccl_operations.cc, NCCLHierarchicalAllreduce.
    """
    inside = ring(size, local, links.inside, links.inside_latency) if local > 1 else 0.0
    return inside + (ring(size, hosts, links.link, links.link_latency) if hosts > 1 else 0.0)


# ---- One step ----------------------------------------------------------------------------------


def messages_end(
    ready: Sequence[tuple[float, float]],
    reduce: Callable[[float], float],
    horovod: Horovod,
    negotiation: float,
    besides: float = 0.0,
) -> float:
    """When the last gradient is summed.

    Horovod's thread asks once a cycle which tensors all ranks have, packs them in order into
    messages of at most the fusion buffer, and sends them one after another (docs/tensor-fusion.rst;
    operations.cc, RunLoopOnce). A tensor larger than the buffer travels alone. What is ready while
    the thread has nothing to do waits half a cycle, as it does on average.

    Args:
      ready: (seconds, bytes) of each gradient, in order of time.
      reduce: seconds of an allreduce of so many bytes.
      negotiation: seconds in which ranks agree, once a cycle.
      besides: bytes of a message that is ready with the first gradient and fuses with none.
    """
    free, tick, first = 0.0, 0.0, 0
    own = [besides] * bool(besides)
    period = max(horovod.cycle, negotiation)
    while first < len(ready):
        tick = max(tick, ready[first][0] + period / 2)
        last = first
        while last < len(ready) and ready[last][0] <= tick:
            last += 1
        free = max(free, tick + negotiation)
        for size in own + _fused([size for _, size in ready[first:last]], horovod.fusion):
            free += reduce(size)
        first, own = last, []
        tick = max(tick + period, free if horovod.backend != "nccl" else 0.0)
    return free


def _fused(sizes: Sequence[float], most: float) -> list[float]:
    packed: list[float] = []
    for size in sizes:
        if packed and packed[-1] + size <= most:
            packed[-1] += size
        else:
            packed.append(size)
    return packed


@functools.lru_cache
def expected_maximum(count: int) -> float:
    """Mean of the largest of `count` draws from the standard normal distribution.

    The integral of 1 - Phi(x)^n above 0, less that of Phi(x)^n below (David and Nagaraja 2003,
    "Order Statistics", section 3.1).
    """
    x = np.linspace(-10, 10, 20001)
    phi = 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return float(np.trapezoid(np.heaviside(x, 0.5) - phi**count, x))


def step(job: Job, ranks: int, links: Links, horovod: Horovod) -> Step:
    """Where the seconds of a step on `ranks` GPUs go."""
    slowest = job.compute * (1 + job.jitter * expected_maximum(ranks))
    needed = job.batch * min(links.gpus_per_host, ranks) / job.input_rate
    compute = max(slowest, needed)
    end = _end(job, compute, ranks, links, horovod)
    instant = dataclasses.replace(links, inside_latency=0.0, link_latency=0.0)
    wide = _end(job, compute, ranks, instant, horovod)
    return Step(job.compute, slowest - job.compute, compute - slowest, wide - compute, end - wide)


def _end(job: Job, compute: float, ranks: int, links: Links, horovod: Horovod) -> float:
    if ranks == 1:
        return compute
    backward = BACKWARD * compute / job.accumulation
    ready = [(compute - backward * (1 - at), share * job.gradients) for at, share in job.profile]
    # A bit a tensor, by the response cache: all ranks agree in one small allreduce.
    agree = allreduce(8.0, ranks, links, horovod)

    def reduce(size: float) -> float:
        return allreduce(size, ranks, links, horovod)

    return max(compute, messages_end(ready, reduce, horovod, agree, job.besides))


# ---- Over days ---------------------------------------------------------------------------------


def young(save: float, between_failures: float) -> float:
    """Best time between saves, sqrt(2 C M). Young 1974, "A first order approximation to the
    optimum checkpoint interval"."""
    return math.sqrt(2 * save * between_failures)


def daly(save: float, between_failures: float) -> float:
    """The same to a higher order: Daly 2006, "A higher order estimate of the optimum checkpoint
    interval for restart dumps", equation 37. Not longer than the time between failures."""
    if save >= 2 * between_failures:
        return between_failures
    part = save / (2 * between_failures)
    return young(save, between_failures) * (1 + math.sqrt(part) / 3 + part / 9) - save


def goodput(every: float, save: float, restart: float, between_failures: float) -> float:
    """Share of the time that makes steps which are kept, at a save every `every` seconds.

    Daly 2006, equation 20: a run of T useful seconds lasts
    M exp(R/M) (exp((every + save)/M) - 1) T/every. Without failures: every / (every + save).

    Args:
      save: seconds that a save keeps the training waiting.
      restart: seconds from a failure to the first new step, and until a save that is written
        beside the training counts.
    """
    if math.isinf(between_failures):
        return every / (every + save)
    m = between_failures
    try:
        return every / (m * math.exp(restart / m) * math.expm1((every + save) / m))
    except OverflowError:  # failures come so often that nothing is ever kept
        return 0.0
