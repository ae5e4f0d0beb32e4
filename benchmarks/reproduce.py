"""Trains what others published, with three seeds, and prints published, ours, difference.

    python benchmarks/reproduce.py [--ranks=1,2] [--seeds=3] [--networks=linear,mlp,cnn,...] \
        [-- FLAG ...]

MNIST-1D and UCI's digits on CPUs (benchmarks/mnist1d.py says from where), and Fashion-MNIST by
configs/fashion.cfg: accuracy on the rows that are held back, after the last step. The digits'
figure is the nearest neighbour's; ours a network's. Fashion-MNIST's is that of two networks with
two convolutions in the table of the data set's README ("2 Conv+3 FC ~500K parameters", "2
Conv+pooling+BN").
A row of the table is a mean, with the least and the most of the seeds.
FLAGs are for train.py; the difference to what was published then says little. With
`--networks=cnn,gru --seeds=2 -- --precision=float64 --num_steps=300` each seed has the same
accuracy on 1 and 2 ranks.
Runs stay in .cache/reproduce/work: given again, it goes on. Where hvdkit's code or the copied files
have changed, runs begin anew, and the old ones stay.
"""

import argparse
import functools
import hashlib
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
PUBLISHED = {
    "linear": 32,
    "mlp": 68,
    "cnn": 94,
    "gru": 91,
    "digits": 98,
    "fashion": 93.4,
}
FLAGS = [
    *("--task=mnist1d", "--optimizer=adam", "--base_lr=0.01", "--lr_policy=constant"),
    *(
        "--global_batch_size=100",
        "--eval_batch_size=500",
        "--num_steps=6000",
        "--warmup_steps=0",
    ),
    *("--weight_decay=0", "--eval_every=0", "--checkpoint_every=0", "--log_every=1000"),
]
FASHION = [
    "--flagfile=configs/fashion.cfg",
    f"--data_dir={SITE}/usr/share/datasets/fashion-mnist",  # as Debian's package has it
    "--eval_every=0",
]
COPIED = (
    *("train.py", "settings.py", "models.py", "configs/fashion.cfg"),
    *("tasks/blank.py", "tasks/classification.py"),
)


@functools.cache
def _code() -> str:
    """Of all code that a run has: a run of other code is no run of this one."""
    digest = hashlib.sha256()
    files = sorted((ROOT / "hvdkit/src").rglob("*.py"))
    files += [ROOT / "template" / name for name in COPIED]
    for file in [*files, ROOT / "benchmarks" / "mnist1d.py"]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def trained(network: str, ranks: int, seed: int, *, more: list[str]) -> float:
    """The accuracy of one run, in percent; ends this program where the run does not end well."""
    from hvdkit.commands.jobs import seeds

    name = f"{network}-{ranks}-{seed}-{_code()}"
    folder = WORK / "runs" / "".join([name, *more])
    flags = [*FLAGS, f"--model={network}"]
    if network == "digits":
        flags += ["--base_lr=0.001", "--lr_policy=poly"]
    if network == "fashion":
        flags = FASHION
    start = [sys.executable, "train.py"]
    if ranks > 1:
        start = ["horovodrun", "--gloo", "-np", str(ranks), *start]
    ended = subprocess.run(
        [*start, *flags, *more, f"--seed={seed}", f"--run_dir={folder}"],
        stdout=subprocess.DEVNULL,
        cwd=WORK,
        env=os.environ | {"PYTHONPATH": str(SITE)},
        check=False,
    )
    if ended.returncode:
        sys.exit(
            f"error: {network}, {ranks} rank(s), seed {seed}: exit code {ended.returncode}"
        )
    _, result = seeds.score(folder)
    return 100 * result.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", default=",".join(PUBLISHED))
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="for train.py")
    args = parser.parse_args()
    networks = args.networks.split(",")
    unknown = set(networks) - PUBLISHED.keys()
    if unknown:
        parser.error(
            f"--networks: {', '.join(unknown)} is none of {', '.join(PUBLISHED)}"
        )
    for name in COPIED:
        (WORK / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "template" / name, WORK / name)
    shutil.copy(ROOT / "benchmarks" / "mnist1d.py", WORK / "tasks")
    print(
        "| network | ranks | published | ours | least to most | difference | s a run |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for network in networks:
        for ranks in args.ranks.split(","):
            _print_row(network, int(ranks), args.seeds, more=args.flags)


def _print_row(network: str, ranks: int, seeds: int, *, more: list[str]) -> None:
    start = time.monotonic()
    accuracies = [
        trained(network, ranks, seed, more=more) for seed in range(1, seeds + 1)
    ]
    seconds = (time.monotonic() - start) / seeds
    mean = sum(accuracies) / seeds
    published = PUBLISHED[network]
    print(
        f"| {network} | {ranks} | {published} % | {mean:.1f} % "
        f"| {min(accuracies):.1f} to {max(accuracies):.1f} | {mean - published:+.1f} "
        f"| {seconds:.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
