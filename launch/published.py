"""scaling.py's formulas against published figures: python launch/scaling.py --published.

Efficiency is samples a second on N GPUs over N times those on one, its error in points
(hundredths). The jitter is fitted to the rows of other sources; nothing else is fitted.
"""

import statistics
from typing import NamedTuple

from scaling import INSIDE, LATENCY, Cluster, Horovod, Job, step

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
    own = []
    for number, row in enumerate(found):
        others = [n for n, other in enumerate(found) if other.source != row.source]
        best = min(points, key=lambda at: statistics.median(abs(at[n]) for n in others))
        own.append(best[number])
    return own


def print_table() -> None:
    points = errors(found := rows())
    print("| source | model | GPUs | published | predicted | error, points |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row, own in zip(found, points):
        figures = f"{row.published:.1%} | {row.published + own / 100:.1%} | {own:+.1f}"
        print(f"| {row.source} | {row.model}, {row.what} | {row.gpus} | {figures} |")
    size = [abs(own) for own in points]
    print(f"\nmedian error {statistics.median(size):.1f} points, largest {max(size):.1f}")
