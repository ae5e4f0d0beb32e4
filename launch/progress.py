#!/usr/bin/env python3
"""What launchers ask of a training command, which is read as its own project reads it.

    progress.py saved python train.py --flagfile=configs/demo.cfg ...
    progress.py made|folders python train.py ...

saved, made: the newest step that the run has saved, or has made (as far as it was logged); with
these slurm.sbatch sees whether a start made progress. folders: device, run folder and data folder
as flags of doctor.py. Exit code 1: the command does not train, or its run's folder does not exist.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from hvdkit import settings, whole_files
from hvdkit.settings import project


def read(words: list[str]) -> settings.Settings:
    program = next(number for number, word in enumerate(words) if word.endswith("train.py"))
    sys.modules["__main__"].__file__ = words[program]  # by which hvdkit finds the project
    return settings.parse(words[program:], settings.of_project())


def folders(given: settings.Settings) -> list[str]:
    flags = [f"--device={given.device}", f"--run_dir={given.run_dir}"]
    # Where the demo's data are missing, the run makes them.
    demo = Path(given.data_dir).absolute() == project.folder() / type(given).data_dir
    return flags + [f"--data_dir={given.data_dir}"] * (not demo and not given.synthetic_data)


def newest_step(folder: Path, made: bool) -> int:
    steps = [0]
    for path in (folder / "checkpoints").glob("step-*"):
        with contextlib.suppress(ValueError):
            steps.append(int(path.name.removeprefix("step-")))
    if made:
        with contextlib.suppress(OSError), whole_files.opened(folder / "metrics.jsonl") as file:
            for line in file:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    steps.append(int(json.loads(line)["step"]))
    return max(steps)


if __name__ == "__main__":
    what = sys.argv[1]
    try:
        given = read(sys.argv[2:])
    except (StopIteration, ImportError, ValueError):
        sys.exit(1)
    if what == "folders":
        print(*folders(given), sep="\n")
    elif Path(given.run_dir).is_dir():
        print(newest_step(Path(given.run_dir), made=what == "made"))
    else:
        sys.exit(1)
