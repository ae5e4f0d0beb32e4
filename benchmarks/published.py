"""What launch/scaling.py predicts for clusters whose figures others have published.

    python benchmarks/published.py

Efficiency is samples a second on N GPUs over N times those on one. The error is prediction minus
published figure, in points (hundredths). The model knows of a row: the network, the samples a
second on one GPU, the batch, GPUs and hosts, and the link. All else is from elsewhere, each with
its source here or in launch/planner/tables.py, but one number: how much a rank's computing time
varies (jitter). For each row it is the one with the least median error of all rows of other
sources.

A link's payload: TCP in Ethernet frames of 1,500 bytes carries 1,448 of 1,538 bytes on the wire.
RoCE v2 carries 1,024 of 1,106: 38 of Ethernet, 28 of IP and UDP, 16 of InfiniBand (BTH, ICRC).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "launch"))

from planner.model import Horovod, Job, Links, step
from planner.tables import INSIDE, INSIDE_LATENCY, LINK_LATENCY, PROFILES

GOAL = 5.0  # points
GBIT = 1e9 / 8
UBER = "Uber: horovod#44, docs/benchmarks.rst"
TCP = 1448 / 1538
RDMA = 1024 / 1106
# Horovod's cycle was 5 ms when these figures were published, 1 ms today; NCCL had no trees before
# its version 2.4 of 2019.
HOROVOD = Horovod(cycle=5e-3)
BEFORE_TREES = {"horovod#779", "horovod#416", "horovod#693", UBER}
JITTERS = np.arange(0.0, 0.1001, 0.0025)

# Parameters: of keras.applications, as benchmarks/profiles.py counts them; U-Net: the layers of
# Ronneberger et al. 2015, which NVIDIA's has.
PARAMETERS = {
    "resnet50": 25_583_592,
    "resnet101": 44_601_832,
    "inceptionv3": 23_817_352,
    "vgg16": 138_357_544,
    "efficientnetb4": 19_341_616,
    "unet": 31_031_810,
}


class Row(NamedTuple):
    """`link`: bytes a second of a host's network; `published`: efficiency."""

    source: str
    what: str
    model: str
    batch: int
    rate: float  # samples a second on one GPU
    per_host: int
    inside: str
    link: float
    gpus: int
    published: float


def rows() -> list[Row]:
    """Sources that share a cluster or an author have one name: neither tells of the other."""
    nvidia = "NVIDIA DeepLearningExamples"
    tcp, rdma = 25 * GBIT * TCP, 25 * GBIT * RDMA
    found = []

    def add(source, what, model, batch, rate, per_host, inside, link, *measured):
        for gpus, samples in measured:
            given = samples if samples < 1 else samples / (gpus * rate)
            found.append(Row(source, what, model, batch, rate, per_host, inside, link, gpus, given))

    # p3.16xlarge. Batch: not given; 256 is what one GPU's 872 a second are usual for.
    sizes = (8, 6679), (16, 12828), (32, 23870), (64, 47195), (128, 89783)
    add("horovod#779", "V100, 25G TCP", "resnet50", 256, 872, 8, "nvlink2", tcp, *sizes)
    sizes = (4, 650.92), (16, 2379.56)
    link = 40 * GBIT * RDMA
    add("horovod#416", "V100 PCIe, 40G RoCE", "resnet101", 64, 202.78, 8, "pcie3", link, *sizes)
    # Four GPUs a host. The link of #44 is not given there: as in the 512-GPU benchmark, 25G.
    what = "Pascal, 25G RDMA"
    add(UBER, what, "inceptionv3", 64, 134.4, 4, "pcie3", rdma, (16, 2022.6), (512, 0.90))
    add(UBER, what, "resnet101", 64, 119.4, 4, "pcie3", rdma, (16, 1746.2), (512, 0.90))
    add(UBER, what, "vgg16", 64, 130.9, 4, "pcie3", rdma, (16, 1787.4), (512, 0.68))
    what = "Pascal, 25G TCP"
    add(UBER, what, "resnet101", 64, 119.4, 4, "pcie3", tcp, (16, 1685.1))
    add(UBER, what, "vgg16", 64, 130.9, 4, "pcie3", tcp, (16, 1308.7))
    # One GPU: not given; a quarter of 608.38, which four GPUs of one host make.
    slow = 1 * GBIT * TCP
    add("horovod#693", "1080 Ti, 1G TCP", "resnet50", 64, 608.38 / 4, 4, "pcie3", slow, (8, 300.18))
    # One host: no link. DGX A100 has eight of 200 Gbit/s; that EfficientNet used them is assumed.
    hdr = 8 * 200 * GBIT * RDMA
    add(nvidia, "A100 AMP", "resnet50", 256, 2375, 8, "nvlink3", hdr, (8, 17400))
    add(nvidia, "A100 TF32", "resnet50", 256, 909, 8, "nvlink3", hdr, (8, 7000))
    add(nvidia, "DGX-1 V100 AMP", "resnet50", 256, 1270, 8, "nvlink2", hdr, (8, 9510))
    add(nvidia, "DGX-2 V100 AMP", "resnet50", 256, 1300, 16, "nvlink2", hdr, (16, 17250))
    sizes = (32, 12908), (64, 25455)
    add(nvidia, "A100 AMP", "efficientnetb4", 160, 470, 8, "nvlink3", hdr, *sizes)
    add(nvidia, "A100 AMP", "unet", 8, 141.03, 8, "nvlink3", hdr, (8, 1000.89))
    return found


def predict(row: Row, jitter: float) -> float:
    """Efficiency."""
    hop = INSIDE_LATENCY[row.inside[:-1]]
    links = Links(row.per_host, INSIDE[row.inside], hop, row.link, LINK_LATENCY)
    profile = PROFILES.get(row.model, PROFILES["even"])
    compute = row.batch / row.rate
    job = Job(compute, row.batch, 4 * PARAMETERS[row.model], profile, jitter=jitter)
    algorithm = "ring" if row.source in BEFORE_TREES else "auto"
    horovod = dataclasses.replace(HOROVOD, algorithm=algorithm)
    return compute / step(job, row.gpus, links, horovod).total


def errors(table: list[Row]) -> np.ndarray:
    """Points, float [rows, JITTERS]."""
    return np.array([[100 * (predict(r, j) - r.published) for j in JITTERS] for r in table])


def jitter_from(others: np.ndarray) -> int:
    """The place in JITTERS with the least median error of these rows, float [rows, JITTERS]."""
    return int(np.argmin(np.median(np.abs(others), axis=0)))


def left_out(table: list[Row], of_all: np.ndarray) -> list[int]:
    """For each row the place in JITTERS that the rows of all other sources tell."""
    sources = np.array([row.source for row in table])
    return [jitter_from(of_all[sources != row.source]) for row in table]


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    table = rows()
    of_all = errors(table)
    print("| source | model | GPUs | published | predicted | error, points | jitter |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    found = []
    for row, own, best in zip(table, of_all, left_out(table, of_all)):
        found.append(own[best])
        predicted = f"{row.published + own[best] / 100:.1%}"
        name = f"{row.source} | {row.model}, {row.what} | {row.gpus}"
        figures = f"{row.published:.1%} | {predicted} | {own[best]:+.1f}"
        print(f"| {name} | {figures} | {JITTERS[best]:.2%} |")
    given = np.array([100 * row.published for row in table])
    sources = np.array([row.source for row in table])
    flat = [np.median(given[sources != row.source]) - 100 * row.published for row in table]
    print(f"\nerror of efficiency: {_spread(found)} (goal: median {GOAL:g})")
    print(f"of one number for all, the median of other sources: {_spread(flat)}")
    print(f"jitter with the least median error of all rows: {JITTERS[jitter_from(of_all)]:.2%}")
    return 0


def _spread(errors_found: list[float]) -> str:
    size = np.abs(errors_found)
    return f"median {np.median(size):.1f}, mean {size.mean():.1f}, largest {size.max():.1f} points"


if __name__ == "__main__":
    sys.exit(main())
