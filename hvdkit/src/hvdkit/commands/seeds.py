"""Runs a command with several seeds, one after the other: mean, deviation, confidence interval.

    hvdkit seeds --count=5 --run_dir=runs/five -- horovodrun -np 2 python train.py --flagfile=...

Seed N runs COMMAND --seed=N --run_dir=RUN_DIR/seed-N. The figure is the main metric of the run's
last evaluation. The interval is Student's, of 95 %: mean +- t * deviation / sqrt(count). Given
again, the command resumes.
"""

import math
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hvdkit import logs
from hvdkit.commands.supervise import end_with_parent, hear, tell
from hvdkit.observe import records
from hvdkit.scores import MainMetric, Score
from hvdkit.settings import typed
from hvdkit.settings.typed import path_argument
from hvdkit.stop import BUG, DONE, PREEMPTED

# Student's t at 97.5 %, by degrees of freedom, from 1.
T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010)
T += (2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739)
T += (2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, standard deviation (of a sample: n - 1), half the width of the 95 % interval."""
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    return mean, deviation, T[len(values) - 2] * deviation / math.sqrt(len(values))


class NoScore(ValueError):
    """A run that ended well has no score."""


def score(folder: Path) -> tuple[MainMetric, Score]:
    """The main metric and its newest value.

    Raises NoScore; ValueError where the run did not end well: a launcher or a script may lose its
    exit code.
    """
    found = records.read(folder)
    if found.summary.get("exit_code") != DONE:
        why = found.summary.get("exit_reason", "it wrote no summary.json")
        raise ValueError(f"{folder}: its run did not end well: {why}")
    metric = found.main_metric()
    newest = found._replace(lines=found.evaluations[-1:]).scored()
    if not found.evaluations or not metric.name:
        raise NoScore(f"{folder}: it has no evaluation, so no score")
    if not newest and f"eval_{metric.name}" in found.evaluations[-1]:
        raise NoScore(f"{folder}: {metric.name} of its last evaluation is NaN or infinite")
    if not newest:
        there = logs.join(found.scores()) or "nothing"
        raise NoScore(f"{folder}: {metric.name} is missing in its last evaluation, of {there}")
    return metric, newest[0]


@logs.explained
def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 a run has no score, 2 wrong use, 75 told to stop, or a run's
    that ended badly."""
    made = logs.parser(__doc__)
    made.add_argument("--count", type=int, default=5, choices=range(2, len(T) + 2), metavar="2..31")
    made.add_argument("--first", type=int, default=1, help="the first seed")
    made.add_argument("--run_dir", type=path_argument, required=True, help="folder for the runs")
    made.add_argument("command", nargs="+", help="after --: what trains")
    own, scores, told, run = made.parse_args(argv[1:]), [], [], None
    first = None

    def pass_on(number: int, _: object) -> None:
        told.append(number)
        if run:
            tell(run, number)

    hear(pass_on)
    for seed in range(own.first, own.first + own.count):
        if told:  # too late for the run before to stop
            logs.complain(f"told to stop before seed {seed}: the same command goes on")
            return PREEMPTED
        folder = own.run_dir / f"seed-{seed}"
        run_dir = typed.written(folder, is_path=True)
        command = [*own.command, f"--seed={seed}", f"--run_dir={run_dir}"]
        how = {"process_group": 0, "preexec_fn": end_with_parent}  # Ctrl-C comes here alone
        run = subprocess.Popen(command, **how)
        if told:  # while there was none to tell
            tell(run, told[0])
        if code := run.wait():
            logs.complain(f"seed {seed} ended with exit code {code}; its run is in {folder}")
            return code if code > 0 else 128 - code
        try:
            metric, newest = score(folder)
        except ValueError as error:
            if told:
                return PREEMPTED
            if not isinstance(error, NoScore):
                raise
            logs.complain(str(error))
            return BUG
        first = first or metric
        if metric != first:
            other = f"of {metric.describe()}, that of seed {own.first} of {first.describe()}"
            raise ValueError(f"the score of seed {seed} is {other}: give another --run_dir")
        scores.append(newest.value)
        print(logs.printable(f"seed {seed}: {metric.name} {newest.value:.6g}"), flush=True)
    mean, deviation, half = interval(scores)
    spread = f"standard deviation {deviation:.3g}"
    spread += f", 95 % confidence interval {mean - half:.6g} to {mean + half:.6g}"
    print(f"{metric.describe()} of {own.count} seeds: mean {mean:.6g}, {spread}")
    return DONE
