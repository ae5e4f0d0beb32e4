"""What scaling.py knows beforehand: bandwidths inside hosts, and when gradients are ready."""

from __future__ import annotations

from planner.model import Profile

# Bytes a second that a ring over the GPUs of one host moves, by its wires. NCCL's own model of
# hardware (src/graph/topo.h: PCI_BW, SM60_ to SM90_NVLINK_BW for each NVLink, and GPUs have 4, 6,
# 12, 18 of them; src/graph/tuning.cc: at most 235 GB/s on A100).
INSIDE = {
    "pcie3": 12e9,
    "pcie4": 24e9,
    "nvlink1": 4 * 18e9,  # P100
    "nvlink2": 6 * 20e9,  # V100
    "nvlink3": 235e9,  # A100
    "nvlink4": 18 * 20.6e9,  # H100
}
# Seconds a hop of a ring: NCCL, src/graph/tuning.cc, hwLat, ring, the Simple protocol.
INSIDE_LATENCY = {"pcie": 5.7e-6, "nvlink": 3.4e-6}
LINK_LATENCY = 14e-6

# What a step of this project sums besides gradients: ten float64 (step.py, step.totals).
TOTALS = 80.0

# Printed by benchmarks/profiles.py; "even": as many bytes in every part of the backward pass.
PROFILES: dict[str, Profile] = {
    "even": tuple((number / 20, 1 / 20) for number in range(1, 21)),
    "resnet50": (  # 25,583,592 parameters
        (0.044, 0.2136),
        (0.07, 0.0823),
        (0.127, 0.1747),
        (0.19, 0.195),
        (0.247, 0.0437),
        (0.29, 0.0334),
        (0.347, 0.0437),
        (0.373, 0.0206),
        (0.43, 0.0437),
        (0.487, 0.0438),
        (0.55, 0.0488),
        (0.593, 0.0084),
        (0.65, 0.011),
        (0.676, 0.0052),
        (0.733, 0.011),
        (0.796, 0.0122),
        (0.84, 0.0021),
        (0.896, 0.0028),
        (0.936, 0.002),
        (1.0, 0.002),
    ),
    "resnet101": (  # 44,601,832 parameters
        (0.036, 0.1697),
        (0.097, 0.212),
        (0.148, 0.0442),
        (0.19, 0.0369),
        (0.248, 0.0502),
        (0.299, 0.0443),
        (0.35, 0.0442),
        (0.392, 0.0369),
        (0.45, 0.0502),
        (0.494, 0.0383),
        (0.536, 0.0369),
        (0.594, 0.0502),
        (0.645, 0.0443),
        (0.696, 0.0442),
        (0.738, 0.037),
        (0.799, 0.0343),
        (0.835, 0.0078),
        (0.896, 0.0133),
        (0.947, 0.0028),
        (1.0, 0.0023),
    ),
    "inceptionv3": (  # 23,817,352 parameters
        (0.049, 0.2695),
        (0.096, 0.1735),
        (0.148, 0.1578),
        (0.196, 0.0403),
        (0.243, 0.0387),
        (0.291, 0.0403),
        (0.348, 0.0468),
        (0.398, 0.0421),
        (0.448, 0.0415),
        (0.499, 0.0417),
        (0.524, 0.0214),
        (0.594, 0.0457),
        (0.647, 0.0104),
        (0.693, 0.0089),
        (0.749, 0.011),
        (0.765, 0.0032),
        (0.892, 0.006),
        (1.0, 0.0012),
    ),
    "vgg16": (  # 138,357,544 parameters
        (0.038, 0.9107),
        (0.098, 0.0341),
        (0.217, 0.0171),
        (0.337, 0.0171),
        (0.397, 0.0085),
        (0.516, 0.0043),
        (0.636, 0.0043),
        (0.695, 0.0021),
        (0.815, 0.0011),
        (0.875, 0.0005),
        (1.0, 0.0003),
    ),
    "efficientnetb4": (  # 19,341,616 parameters
        (0.027, 0.1344),
        (0.067, 0.0953),
        (0.146, 0.1357),
        (0.192, 0.0969),
        (0.237, 0.0829),
        (0.298, 0.1199),
        (0.344, 0.0969),
        (0.389, 0.0499),
        (0.432, 0.0214),
        (0.499, 0.0348),
        (0.542, 0.0214),
        (0.586, 0.0214),
        (0.643, 0.0267),
        (0.693, 0.0244),
        (0.75, 0.0241),
        (0.798, 0.0059),
        (0.843, 0.0043),
        (0.888, 0.0016),
        (0.941, 0.0017),
        (1.0, 0.0005),
    ),
}
