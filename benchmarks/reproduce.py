"""Trains what others published, with three seeds, and prints published, ours, difference.

    python benchmarks/reproduce.py [--ranks=1,2] [--seeds=3] [--networks=linear,mlp,cnn,gru,digits]

MNIST-1D and UCI's digits on CPUs (benchmarks/mnist1d.py says from where): accuracy on the rows that
are held back, after the last step. The digits' figure is the nearest neighbour's; ours a network's.
A row of the table is a mean, with the least and the most of the seeds.
Runs stay in .cache/reproduce/work: given again, it goes on.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / ".cache" / "reproduce"
WORK = SITE / "work"
# Test accuracies, in percent: the paper's table, and the text that comes with the digits.
PUBLISHED = {"linear": 32, "mlp": 68, "cnn": 94, "gru": 91, "digits": 98}
FLAGS = [
    *("--task=mnist1d", "--optimizer=adam", "--base_lr=0.01", "--lr_policy=constant"),
    *("--global_batch_size=100", "--eval_batch_size=500", "--num_steps=6000", "--warmup_steps=0"),
    *("--weight_decay=0", "--eval_every=0", "--checkpoint_every=0", "--log_every=1000"),
]


def trained(network: str, ranks: int, seed: int) -> float:
    """The accuracy of one run, in percent; ends this program where the run does not end well."""
    from hvdkit.commands.jobs import seeds

    folder = WORK / "runs" / f"{network}-{ranks}-{seed}"
    own = [f"--model={network}", f"--seed={seed}", f"--run_dir={folder}", *FLAGS]
    own += ["--base_lr=0.001", "--lr_policy=poly"] * (network == "digits")
    start = [sys.executable, "train.py"]
    if ranks > 1:
        start = ["horovodrun", "--gloo", "-np", str(ranks), *start]
    how = {"cwd": WORK, "env": os.environ | {"PYTHONPATH": str(SITE)}, "check": False}
    ended = subprocess.run([*start, *own], stdout=subprocess.DEVNULL, **how)
    if ended.returncode:
        sys.exit(f"error: {network}, {ranks} rank(s), seed {seed}: exit code {ended.returncode}")
    return 100 * seeds.score(folder)[1].value


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--ranks", default="1,2")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--networks", default=",".join(PUBLISHED))
    own = made.parse_args()
    if unknown := {*own.networks.split(",")} - PUBLISHED.keys():
        made.error(f"--networks: {', '.join(unknown)} is none of {', '.join(PUBLISHED)}")
    (WORK / "tasks").mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "benchmarks" / "mnist1d.py", WORK / "tasks")
    for name in ("train.py", "settings.py", "tasks/blank.py"):
        shutil.copy(ROOT / "template" / name, WORK / name)
    print("| network | ranks | published | ours | least to most | difference | s a run |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for network in own.networks.split(","):
        for ranks in map(int, own.ranks.split(",")):
            begun = time.monotonic()
            found = [trained(network, ranks, seed) for seed in range(1, own.seeds + 1)]
            mean, taken = sum(found) / len(found), (time.monotonic() - begun) / len(found)
            row = f"{mean:.1f} % | {min(found):.1f} to {max(found):.1f}"
            row += f" | {mean - PUBLISHED[network]:+.1f} | {taken:.0f}"
            print(f"| {network} | {ranks} | {PUBLISHED[network]} % | {row} |", flush=True)


if __name__ == "__main__":
    main()
