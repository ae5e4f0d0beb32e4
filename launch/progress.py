#!/usr/bin/env python3
"""Prints the newest step that a run has saved, or has made (as far as it was logged).

    progress.py saved|made python train.py --flagfile=configs/demo.cfg ...

slurm.sbatch runs it before and after a start, and does not requeue a job that makes no progress.
Exit code 1: the step is unknown, because the command does not train or its folder does not exist.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from hvdkit import settings


def run_folder(words: list[str]) -> Path:
    """--run_dir of a training command, as its own project reads it."""
    program = next(number for number, word in enumerate(words) if word.endswith("train.py"))
    sys.modules["__main__"].__file__ = words[program]  # by which hvdkit finds the project
    return Path(settings.parse(words[program:], settings.of_project()).run_dir)


def newest_step(folder: Path, made: bool) -> int:
    steps = [0]
    for path in (folder / "checkpoints").glob("step-*"):
        with contextlib.suppress(ValueError):
            steps.append(int(path.name.removeprefix("step-")))
    if made:
        with contextlib.suppress(OSError), open(folder / "metrics.jsonl", "rb") as file:
            for line in file:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    steps.append(int(json.loads(line)["step"]))
    return max(steps)


if __name__ == "__main__":
    try:
        folder = run_folder(sys.argv[2:])
        if not folder.is_dir():
            sys.exit(1)
        print(newest_step(folder, made=sys.argv[1] == "made"))
    except (StopIteration, ImportError, ValueError):
        sys.exit(1)
