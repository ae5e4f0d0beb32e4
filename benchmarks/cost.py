"""What a setting costs: its time a step over the plain setting's, taken in turn in one run.

    python benchmarks/cost.py [--ranks=2] [--rounds=3] [--steps=40] [NAME ...]
    python benchmarks/cost.py --steps=12 -- --virtual_ranks     the three rows of virtual ranks
    python benchmarks/cost.py --steps=12 -- --jit               forward and backward by XLA
    python benchmarks/cost.py --steps=4000 --ranks=1 -- --steps_per_call    a small step

Prints the ratio of medians and, in brackets, the smallest and largest of a round; 1.00 is no cost.
The model is the demo's (0.55 million parameters, 64 pixels, 32 samples a step); rows that say so
and those of virtual ranks (V) train ResNet-50 (25.6 million) on random pictures, one thread a rank;
virtual ranks are set against a plain step of as many samples, a micro-batch for each of a rank's.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "template"), str(ROOT / "tests" / "helpers")]

from hvdkit.data.prepare import scenes
from ranks import launch_well


class Row(NamedTuple):
    """A setting and what it is compared with: flags of both, and of each."""

    both: str
    plain: str
    setting: str


BLANK = "--flagfile=configs/blank.cfg --cpu_threads=1"
DEMO = "--flagfile=configs/demo.cfg --global_batch_size=32 --warmup_steps=0 --data_dir={data}"
RESNET = (
    "--flagfile=configs/imagenet.cfg --synthetic_data --cpu_threads=1 --image_size={size} "
    "--global_batch_size={batch}"
)


def rows(ranks: int, data: Path) -> dict[str, Row]:
    settings = (
        "--deterministic",
        "--bn_sync=full",
        "--bn_sync_every=1",
        "--log_gradients",
        "--compression=fp16",
        "--compression=bf16",
        "--gradient_groups=1",
        "--accumulation_steps=2",
        "--jit",
    )
    rows = {name: Row(DEMO.format(data=data), "", name) for name in settings}
    resnet = RESNET.format(size=64, batch=8 * ranks)
    rows["--jit, ResNet-50, 64 px, 8 samples each"] = Row(resnet, "", "--jit")
    rows["--steps_per_call=10, blank task"] = Row(BLANK, "", "--steps_per_call=10")
    rows["--virtual_ranks, 64 px, 8 samples each, V = N"] = _virtual(ranks, 64, 8, 1)
    rows["--virtual_ranks, 128 px, 16 samples each, V = N"] = _virtual(
        ranks, 128, 16, 1
    )
    rows["--virtual_ranks, 64 px, 8 samples each, V = 4 N"] = _virtual(ranks, 64, 8, 4)
    return rows


def _virtual(ranks: int, size: int, samples: int, virtual_of_each: int) -> Row:
    """ResNet-50 with so many virtual ranks on each rank, and so many samples on each of these."""
    return Row(
        both=RESNET.format(size=size, batch=samples * virtual_of_each * ranks),
        plain=f"--accumulation_steps={virtual_of_each}" if virtual_of_each > 1 else "",
        setting=f"--virtual_ranks={virtual_of_each * ranks}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="beginnings of rows' names"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        all_rows = rows(args.ranks, data)
        wanted = tuple(args.names) or ("",)
        chosen = {
            name: row for name, row in all_rows.items() if name.startswith(wanted)
        }
        if not chosen:
            parser.error(f"no row begins with {args.names}; there are {list(all_rows)}")
        if any(str(data) in row.both for row in chosen.values()):
            scenes.ensure_demo(data, scenes.Settings(train=320, val=4))

        seconds: dict[str, list[float]] = {}
        for row in chosen.values():
            for line in _both_lines(row):
                seconds[line] = []
        for _ in range(args.rounds):
            for line, measured in seconds.items():
                measured.append(_seconds_a_step(line, args.ranks, args.steps))
    print(
        f"| setting, {args.ranks} ranks, {args.rounds} rounds | time a step over plain |"
    )
    print("| --- | --- |")
    for name, row in chosen.items():
        plain, setting = (seconds[line] for line in _both_lines(row))
        ratios = [a / b for a, b in zip(setting, plain)]
        middle = statistics.median(setting) / statistics.median(plain)
        print(f"| {name} | {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")


def _both_lines(row: Row) -> tuple[str, str]:
    return f"{row.both} {row.plain}".strip(), f"{row.both} {row.setting}"


def _seconds_a_step(line: str, ranks: int, steps: int) -> float:
    """Median over the logged quarters of a run, without the first; of as many samples a step."""
    with tempfile.TemporaryDirectory() as run_dir:
        command = [
            "train.py",
            *line.split(),
            f"--num_steps={steps}",
            f"--log_every={steps // 4}",
            "--benchmark",
            f"--run_dir={run_dir}",
        ]
        launch_well(ranks, command, "gloo", timeout=900)
        records = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(record).get("samples_per_second") for record in records]
    logged = [rate for rate in rates if rate]
    return 1 / statistics.median(logged[1:])


if __name__ == "__main__":
    main()
