"""Seconds from the command typed to the first step done, and where they go.

    python benchmarks/startup.py [--rounds=3] [--ranks=2] [-- --flagfile=configs/digits.cfg ...]

Runs two steps of the demo (or of what the flags say) by launch/hosts.sh, over Gloo and over MPI, in
turn, and prints medians of what rank 0's clock said, in the order of the run:

  launched    hosts.sh, the launcher, until Python begins on rank 0
  imports     TensorFlow, Keras, Horovod, this project
  connected   Horovod's start, the device, ranks compared
  assembled   data opened, model and optimizer made, on all ranks
  step made   the training step traced, ranks' collectives compared
  tried       the evaluation traced and run on a few samples
  first step  the first batch, the first step, judged

Then, where there is strace, how often one process asks the file system while it imports: what each
rank asks a shared disk for.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "template"
TIMEOUT = 300  # seconds, of one run
MARK = "startup: "
PARTS = ("launched", "imports", "connected", "assembled", "step made", "tried", "first step")


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        rank(float(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("flags", nargs="*", default=["--flagfile=configs/demo.cfg"])
    args = parser.parse_args()
    found: dict[str, list[list[float]]] = {"gloo": [], "mpi": []}
    for number in range(args.rounds + 1):
        for via, rows in found.items():
            row = start(via, args.ranks, args.flags)
            if number:  # the first brings files into memory
                rows.append(row)
    print(f"| {args.ranks} ranks, seconds | " + " | ".join([*PARTS, "whole"]) + " |")
    print("| --- " * (len(PARTS) + 2) + "|")
    for via, rows in found.items():
        middle = [statistics.median(column) for column in zip(*rows)]
        whole = statistics.median(sum(row) for row in rows)
        print(f"| {via} | " + " | ".join(f"{x:.1f}" for x in [*middle, whole]) + " |")

    if shutil.which("strace"):
        found = lookups()
        print(f"\nimports of one process: {found['openat']:,} opens, {found['newfstatat']:,} stats")


def lookups() -> dict[str, int]:
    """Calls of the system that name a file, by name, of one process that imports train.py."""
    with tempfile.NamedTemporaryFile("r") as table:
        words = ["strace", "-f", "-c", "-e", "trace=%file", "-o", table.name]
        words += [sys.executable, "-c", "import hvdkit, train"]
        subprocess.run(words, cwd=TEMPLATE, check=True, stderr=subprocess.DEVNULL, timeout=TIMEOUT)
        rows = [line.split() for line in table.read().splitlines()[2:]]
    return {row[-1]: int(row[3]) for row in rows if row[3:4] and row[3].isdigit()}


def start(via: str, ranks: int, flags: list[str]) -> list[float]:
    """Seconds of each part, of one run from its command on."""
    with tempfile.TemporaryDirectory() as folder:
        own = [f"--run_dir={folder}/run", "--num_steps=2", "--warmup_steps=0", "--eval_every=0"]
        words = [ROOT / "launch/hosts.sh", f"--{via}", "-np", ranks, sys.executable, __file__]
        words += ["rank", repr(time.time()), *flags, *own]
        usual = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(
            list(map(str, words)),
            env=os.environ | usual,
            cwd=TEMPLATE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
        )
    # mpirun may put two ranks' words into a line.
    said = re.search(rf"{MARK}(\[[^]]*\])", ended.stdout)
    if ended.returncode or not said:
        raise SystemExit(f"{via}: exit code {ended.returncode}\n{ended.stdout[-2000:]}")
    return json.loads(said[1])


def rank(typed: float, flags: list[str]) -> None:
    """One rank: train.py as it is, with a look at the clock where a part ends."""
    times = [typed, time.time()]
    sys.path.insert(0, str(TEMPLATE))
    import hvdkit

    import train

    times.append(time.time())

    def look(owner: object, name: str, before: bool = False) -> None:
        """At the clock, before or after this function of train.py's."""
        inner = getattr(owner, name)

        def call(*args, **how):
            if before:
                times.append(time.time())
            found = inner(*args, **how)
            if not before:
                times.append(time.time())
            return found

        setattr(owner, name, call)

    look(train, "assemble")
    look(train, "assemble", before=True)
    look(train, "make_train_step")
    look(train.Evaluator, "try_out")
    look(train.health.Health, "_judge")
    code = hvdkit.main(train.train, train.Settings, ["train.py", *flags])
    if hvdkit.stop.launch_rank() == 0:
        print(MARK + json.dumps([b - a for a, b in pairwise(times)][: len(PARTS)]))
    sys.exit(code)


if __name__ == "__main__":
    main()
