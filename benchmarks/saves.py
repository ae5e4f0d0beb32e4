"""How much a checkpoint slows down the steps during which it is written.

    python benchmarks/saves.py [--saves=16] [demo] [resnet50]

Trains with regular saves on two ranks of one thread each, and on one. A save's cost is the time of
the first half of the steps from it to the next one, less that of the second half, when nothing is
written: the median over saves, its standard error in brackets, and the share of the time at a save
every hundred steps. On two cores, two ranks leave no core to the thread that writes; one rank does,
as on hosts with GPUs.
"""

import argparse
import math
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import peers
from ranks import PROJECT, last_lines, launch

TIMEOUT = 900
DEMO = "--flagfile=configs/demo.cfg --cpu_threads=1"
RESNET = (
    "--task=classification --model=resnet50 --num_classes=1000 --image_size=64 "
    "--global_batch_size=16 --synthetic_data --cpu_threads=1 --base_lr=0.01"
)
# Flags, and the steps between saves.
RUNS = {"demo": (DEMO, 40), "resnet50": (RESNET, 20)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=16)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=", ".join(RUNS))
    if sys.argv[1:2] == ["--worker"]:
        return worker(sys.argv[2:])
    args = parser.parse_args()
    unknown = set(args.runs) - set(RUNS)
    if unknown:
        parser.error(f"no run {sorted(unknown)}; there are {list(RUNS)}")
    print(
        "| run | ranks | MB a checkpoint | ms a step | ms a save | at a save every 100 steps |"
    )
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name in args.runs or RUNS:
        for ranks in (2, 1):
            row(name, ranks, args.saves)


def row(name: str, ranks: int, saves: int) -> None:
    flags, every = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            Path(__file__),
            "--worker",
            *flags.split(),
            f"--run_dir={folder}/run",
            f"--num_steps={every * (saves + 1)}",
            f"--checkpoint_every={every}",
            "--eval_every=0",
            "--log_every=1000000",
        ]
        ended = launch(
            ranks, command, "gloo", TIMEOUT, env={"CUDA_VISIBLE_DEVICES": ""}
        )
        seconds = peers.shown(ended.output)
        if ended.code or not seconds:
            raise SystemExit(
                f"{name}: exit code {ended.code}\n{last_lines(ended.output)}"
            )
        files = list(Path(folder).glob("run/checkpoints/step-*/*"))
        checkpoints = {file.parent for file in files}
        size = sum(file.stat().st_size for file in files) / len(checkpoints)
    step, save, error = cost(seconds, every)
    print(
        f"| {name} | {ranks} | {size / 1e6:.1f} | {step * 1e3:.1f} "
        f"| {save * 1e3:.0f} ({error * 1e3:.0f}) | {save / (100 * step):.2%} |",
        flush=True,
    )


def cost(seconds: list[float], every: int) -> tuple[float, float, float]:
    """Seconds of a step without a save, what a save adds, and the standard error of that.

    `seconds`: of step 2, 3, ...; that of step `every` holds the first save's copy.
    """
    # From one save to the next; the last save is waited for.
    starts = range(every - 2, len(seconds) - every, every)
    half = every // 2
    quiet = []
    added = []
    for start in starts:
        while_written = sum(seconds[start : start + half])
        after = sum(seconds[start + half : start + every])
        quiet.append(after)
        added.append(while_written - after)
    # A median's standard error, from the median distance to it, as of a normal distribution.
    middle = statistics.median(added)
    spread = 1.4826 * statistics.median(
        abs(seconds_added - middle) for seconds_added in added
    )
    error = math.sqrt(math.pi / 2) * spread / math.sqrt(len(added))
    return statistics.median(quiet) / half, middle, error


def worker(flags: list[str]) -> None:
    sys.path.insert(0, str(PROJECT))
    peers.train_py(peers.Clock(0, 1), flags)


if __name__ == "__main__":
    main()
