"""What a setting costs: its time a step over the plain setting's, taken in turn in one run.

    python benchmarks/cost.py [--ranks=2] [--rounds=3] [--steps=40] [NAME ...]

Prints the ratio of medians and, in brackets, the smallest and largest of a round. The model is
the demo's (0.55 million parameters, 64 pixels, 32 samples a step); 1.00 is no cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "template"), str(ROOT / "template" / "tests")]

from data.demo import scenes
from ranks import last_lines, launch

SETTINGS = {
    "--deterministic": ["--deterministic"],
    "--bn_sync=full": ["--bn_sync=full"],
    "--bn_sync_every=1": ["--bn_sync_every=1"],
    "--log_gradients": ["--log_gradients"],
    "--compression=fp16": ["--compression=fp16"],
    "--compression=bf16": ["--compression=bf16"],
    "--gradient_groups=1": ["--gradient_groups=1"],
    "--accumulation_steps=2": ["--accumulation_steps=2"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SETTINGS))
    args = parser.parse_args()
    unknown = set(args.names) - set(SETTINGS)
    if unknown:
        parser.error(f"unknown {sorted(unknown)}; there are {sorted(SETTINGS)}")
    names = args.names or list(SETTINGS)

    seconds: dict[str, list[float]] = {name: [] for name in ("plain", *names)}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        scenes.make(data, scenes.Settings(train=320, val=4))
        for _ in range(args.rounds):
            for name in seconds:
                flags = SETTINGS.get(name, [])
                seconds[name].append(_seconds_a_step(data, args.ranks, args.steps, flags))
    print(f"| setting, {args.ranks} ranks, {args.rounds} rounds | time a step over plain |")
    print("| --- | --- |")
    for name in names:
        ratios = [a / b for a, b in zip(seconds[name], seconds["plain"])]
        middle = statistics.median(seconds[name]) / statistics.median(seconds["plain"])
        print(f"| {name} | {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")


def _seconds_a_step(data: Path, ranks: int, steps: int, flags: list[str]) -> float:
    """Median over the logged quarters of a run, without the first."""
    with tempfile.TemporaryDirectory() as run_dir:
        usual = [f"--num_steps={steps}", f"--log_every={steps // 4}", "--warmup_steps=0"]
        usual += [f"--data_dir={data}", f"--run_dir={run_dir}", "--eval_every=0"]
        command = ["train.py", "--flagfile=configs/demo.cfg", *usual, *flags]
        ended = launch(ranks, command, "gloo", timeout=900)
        if ended.code:
            raise SystemExit(last_lines(ended.output))
        lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line).get("samples_per_second") for line in lines]
    return 32 / statistics.median([rate for rate in rates if rate][1:])


if __name__ == "__main__":
    main()
