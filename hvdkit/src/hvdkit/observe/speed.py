"""Speed of a run from windows of steps, and a table of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

WINDOWS = 10
FEWEST = 15  # steps: 5 of warm-up, and windows of one step
_T = 2.262157  # 97.5 % quantile of Student's t with WINDOWS - 1 = 9 degrees of freedom


def window_ends(first_step: int, num_steps: int) -> range:
    """The last step of warm-up, and of each window; empty: too few steps.

    Warm-up is the first tenth (5 to 100 steps), and what does not fill windows of equal length.
    """
    steps = num_steps - first_step
    window = (steps - min(max(steps // 10, 5), 100)) // WINDOWS
    return range(num_steps - WINDOWS * window, num_steps + 1, window) if window > 0 else range(0)


def spread(rates: Sequence[float]) -> dict[str, Any]:
    """Mean with its 95 % interval (Student's t), median and jitter of WINDOWS windows' rates.

    Jitter is 1.4826 times the median absolute deviation, which is the standard deviation of normal
    rates; as in tf_cnn_benchmarks (get_perf_timing), there for steps.
    """
    mean, median = float(np.mean(rates)), float(np.median(rates))
    half = _T * float(np.std(rates, ddof=1)) / math.sqrt(WINDOWS)
    jitter = 1.4826 * float(np.median(np.abs(np.subtract(rates, median))))
    return {
        "mean": mean,
        "interval_95": [mean - half, mean + half],
        "median": median,
        "jitter": jitter,
    }


def table(record: Mapping[str, Any]) -> str:
    """The figures as lines of text."""
    ranks, seconds = record["ranks"], record["seconds_a_step"]
    lines = [
        f"benchmark: {record['windows']} windows of {record['steps_a_window']} steps after "
        f"{record['warm_up_steps']}; {seconds * 1e3:.4g} ms a step of "
        f"{record['global_batch_size']} samples on {ranks} rank(s) ({record['device']})",
        f"{'samples/s':<12}{'mean':>10}{'95 % interval':>22}{'median':>10}{'jitter':>10}",
    ]
    for name, key in (("in all", "samples_per_second"), ("a rank", "samples_per_second_a_rank")):
        found = record[key]
        low, high = (f"{x:.4g}" for x in found["interval_95"])
        lines.append(
            f"{name:<12}{found['mean']:>10.4g}{f'{low} to {high}':>22}"
            f"{found['median']:>10.4g}{found['jitter']:>10.2g}"
        )
    lines += [*_shares(record), _memory(record["by_rank"]), _operations(record)]
    return "\n".join(lines)


def _shares(record: Mapping[str, Any]) -> list[str]:
    shares, by_rank = record["shares_of_a_step"], record["by_rank"]
    worst = max(range(len(by_rank)), key=lambda rank: by_rank[rank]["input"])
    most = f" (rank {worst}: {by_rank[worst]['input']:.1%})" if worst else ""
    lines = [
        f"of a step: input wait {shares['input']:.1%}{most}, bookkeeping "
        f"{shares['bookkeeping']:.2%}"
    ]
    if shares["reduction_alone"] is not None:
        lines.append(
            "the sum of gradients over ranks, alone: "
            f"{record['seconds_of_reduction_alone'] * 1e3:.3g} ms = "
            f"{shares['reduction_alone']:.1%} of a step, some of it hidden behind the backward pass"
        )
    return lines


def _memory(by_rank: Sequence[Mapping[str, Any]]) -> str:
    host = max(own["host_peak_bytes"] for own in by_rank)
    gpu = max(own["gpu_peak_bytes"] or 0 for own in by_rank)
    return f"peak memory of a rank: host {_bytes(host)}" + (f", GPU {_bytes(gpu)}" if gpu else "")


def _operations(record: Mapping[str, Any]) -> str:
    found = record["model_flops"]
    if "not_counted" in found:
        return f"model FLOPs: not counted: {found['not_counted']}"
    line = (
        f"model FLOPs a sample: {_short(found['forward_a_sample'])} forward, "
        f"{_short(found['training_a_sample'])} in training (3 x forward); "
        f"{_short(found['a_second_a_rank'])} a second on a rank"
    )
    if "utilization" in found:
        most = _short(found["peak_a_second"])
        line += f" = {found['utilization']:.1%} of the device's {most} ({found['peak_of']})"
    return line


def _short(number: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g} {letter}"
    return f"{number:.0f}"


def _bytes(number: int) -> str:
    return f"{number / 2**30:.2f} GiB"
