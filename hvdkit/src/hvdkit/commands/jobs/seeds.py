"""Runs a command with several seeds, one after the other: mean, deviation, confidence interval.

    hvdkit seeds --count=5 --run_dir=runs/five -- horovodrun -np 2 python train.py --flagfile=...

Seed N runs COMMAND --seed=N --run_dir=RUN_DIR/seed-N --resume=auto. The figure is the main metric
of the run's last evaluation. The interval is Student's, of 95 %: mean +- t * deviation /
sqrt(count). Given again, the command resumes; another one needs another folder.
"""

import argparse
import math
import signal
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hvdkit import logs, whole_files
from hvdkit.commands.jobs.process_tree import tell
from hvdkit.commands.jobs.supervise import end_with_parent, hear
from hvdkit.observe import records
from hvdkit.scores import MainMetric, Score
from hvdkit.settings import all_of_command, fields, runs, typed
from hvdkit.settings.typed import path_argument
from hvdkit.stop import BUG, DONE, PREEMPTED

# Student's t at 97.5 %, by degrees of freedom, from 1.
T: tuple[float, ...] = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, standard deviation (of a sample: n - 1), half the width of the 95 % interval."""
    count = len(values)
    deviation = statistics.stdev(values)
    half_width = T[count - 2] * deviation / math.sqrt(count)
    return statistics.mean(values), deviation, half_width


class NoScore(ValueError):
    """A run that ended well has no score."""


def score(folder: Path) -> tuple[MainMetric, Score]:
    """The main metric and its newest value.

    Raises NoScore; ValueError where the run did not end well: a launcher or a script may lose its
    exit code.
    """
    run = records.read(folder)
    if run.summary.get("exit_code") != DONE:
        reason = run.summary.get("exit_reason", "it wrote no summary.json")
        raise ValueError(f"{folder}: its run did not end well: {reason}")
    metric = run.main_metric()
    if not run.evaluations or not metric.name:
        raise NoScore(f"{folder}: it has no evaluation, so no score")
    last = run.evaluations[-1]
    scores = run._replace(lines=[last]).scored()
    if scores:
        return metric, scores[0]
    if f"eval_{metric.name}" in last:
        raise NoScore(
            f"{folder}: {metric.name} of its last evaluation is NaN or infinite"
        )
    others = logs.join(run.scores()) or "nothing"
    raise NoScore(
        f"{folder}: {metric.name} is missing in its last evaluation, of {others}"
    )


def _begin() -> None:
    """In the new process of a run: in a process group of its own, it may write to the terminal."""
    end_with_parent()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def _settings(command: Sequence[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """What the command's flags and flagfiles say: settings, and the fork's other flags.

    Both are empty where it is no training command. Raises ValueError where each seed would begin
    from the same checkpoint.
    """
    found = all_of_command(command)
    if not found:
        return {}, {}
    settings, others = found
    if settings.resume not in ("auto", "never"):
        raise ValueError(
            f"--resume={settings.resume}: a seed resumes its own run alone; --init_from= takes "
            "first weights from another"
        )
    # Each seed has its own; runs of other lengths are others.
    harmless = (runs.HARMLESS | {"seed"}) - {
        "early_stop_evals",
        "eval_every",
        "max_bad_steps",
    }
    values = {
        name: str(getattr(settings, name))
        for name in fields.of(settings)
        if name not in harmless
    }
    flags: dict[str, list[str]] = {}
    for flag in others:
        flags.setdefault(flag.name, []).append(str(flag.value))
    return values, flags


class SeedRuns:
    """Runs of one command, a seed each; `run_all` makes them and returns the exit code."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen | None = None
        self._signals: list[int] = []  # all signals that came to this process

    def run_all(self) -> int:
        """Raises ValueError: a run did not end well, or its score is of another metric."""
        hear(self._hear)
        self._keep_command()
        first = self._arguments.first
        count = self._arguments.count
        metrics: list[MainMetric] = []
        values: list[float] = []
        for seed in range(first, first + count):
            if self._signals:  # the run before had ended when the signal came
                logs.complain(
                    f"told to stop before seed {seed}: the same command goes on"
                )
                return PREEMPTED
            folder = self._arguments.run_dir / f"seed-{seed}"
            code = self._train(seed, folder)
            if code:
                logs.complain(
                    f"seed {seed} ended with exit code {code}; its run is in {folder}"
                )
                return code if code > 0 else 128 - code
            try:
                metric, newest = score(folder)
            except ValueError as error:
                if self._signals:
                    return PREEMPTED
                if not isinstance(error, NoScore):
                    raise
                logs.complain(str(error))
                return BUG
            metrics.append(metric)
            values.append(newest.value)
            if metric != metrics[0]:
                raise ValueError(
                    f"the score of seed {seed} is of {metric.describe()}, that of seed {first} of "
                    f"{metrics[0].describe()}: give another --run_dir"
                )
            print(
                logs.printable(f"seed {seed}: {metric.name} {newest.value:.6g}"),
                flush=True,
            )

        mean, deviation, half_width = interval(values)
        print(
            f"{metrics[0].describe()} of {count} seeds: mean {mean:.6g}, "
            f"standard deviation {deviation:.3g}, 95 % confidence interval "
            f"{mean - half_width:.6g} to {mean + half_width:.6g}"
        )
        return DONE

    def _keep_command(self) -> None:
        """Writes what trains; ValueError where the folder has runs of another command."""
        file = self._arguments.run_dir / "seeds.json"
        command = self._arguments.command
        settings, flags = _settings(command)
        if not any(self._arguments.run_dir.glob("seed-*")):
            file.parent.mkdir(parents=True, exist_ok=True)
            record = {"command": command, "settings": settings, "flags": flags}
            whole_files.write_json(file, record)
            return
        kept = None
        if file.exists():
            content = whole_files.read(file, whole_files.JSON_BYTES)
            kept = whole_files.from_json(content, file)
        if not isinstance(kept, dict) or kept.get("command") != command:
            raise ValueError(
                f"{file.parent} has runs of another command, which {file.name} holds: give "
                "that one, or another --run_dir"
            )
        # A flagfile may have been edited since.
        changed = []
        before = kept.get("settings")
        if isinstance(before, dict):
            both = settings.keys() & before.keys()
            changed += sorted(name for name in both if settings[name] != before[name])
        before = kept.get("flags")
        if isinstance(before, dict):
            names = sorted(flags.keys() | before.keys())
            changed += [f"--{n}" for n in names if flags.get(n) != before.get(n)]
        if changed:
            raise ValueError(
                f"{file.parent} has runs of the same command with another "
                f"{logs.join(changed)}: give another --run_dir"
            )

    def _train(self, seed: int, folder: Path) -> int:
        """Returns the exit code of the run; -N where signal N ended it."""
        run_dir = typed.written(folder, is_path=True)
        command = [
            *self._arguments.command,
            f"--seed={seed}",
            f"--run_dir={run_dir}",
            "--resume=auto",  # A seed that has ended is not trained again.
        ]
        # In a process group of its own: Ctrl-C comes to this process alone, which passes it on.
        # In the background, who reads the terminal is stopped for ever.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=_begin,
        )
        if self._signals:  # it came while there was no process to tell
            tell(self._process, self._signals[0])
        return self._process.wait()

    def _hear(self, number: int, frame: object) -> None:
        self._signals.append(number)
        if self._process:
            tell(self._process, number)


@logs.explained
def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 a run has no score, 2 wrong use, 75 told to stop, or a run's
    that ended badly."""
    parser = logs.parser(__doc__)
    counts = range(2, len(T) + 2)
    parser.add_argument("--count", type=int, default=5, choices=counts, metavar="2..31")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument(
        "--run_dir", type=path_argument, required=True, help="folder for the runs"
    )
    parser.add_argument("command", nargs="+", help="after --: what trains")
    return SeedRuns(parser.parse_args(argv[1:])).run_all()
