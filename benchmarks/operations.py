"""How many operations of a step TensorFlow starts one by one, with --jit and without it.

    python benchmarks/operations.py [--ranks=1,2] [--weights=12,204]

With --jit a step is two programs of XLA, and a few operations between and around them, counted here
in the traced graph. Arguments and identities do not count: TensorFlow takes them out before it runs
a graph. A branch counts as one. "the update" says where the step ends: in a program, or in a
branch of the graph. The network is of dense layers and batch norms, with moving statistics beside
its weights; SGD with momentum, L2, clipping and moving averages of the weights.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT / folder) for folder in ("template", "tests/helpers", "tests/ranks")
]

from ranks import launch_well

MOST = {1: 16}  # operations outside of the programs, by ranks
MOST_OF_SEVERAL = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2", help="with commas")
    parser.add_argument(
        "--weights", default="12,204", help="with commas: multiples of 4"
    )
    args = parser.parse_args()
    print(
        "| ranks | weights | flags | programs | operations outside of them | the update |"
    )
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    too_many = []
    for ranks in [int(number) for number in args.ranks.split(",")]:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "counts.json"
            launch_well(
                ranks, [Path(__file__), "--worker", out, args.weights], timeout=1200
            )
            lines = json.loads(out.read_text())
        for line in lines:
            print(f"| {ranks} | {' | '.join(str(cell) for cell in line)} |", flush=True)
            weights, flags, _, operations, update = line
            most = MOST.get(ranks, MOST_OF_SEVERAL)
            if flags and (operations > most or update != "a program"):
                too_many.append(f"{weights} weights on {ranks} rank(s)")
    for failure in too_many:
        print(
            f"\nfailed: {failure}: more operations than wanted, or the update is a branch"
        )
    return int(bool(too_many))


def worker(out: str, weights: str) -> None:
    """Writes the lines of the table for this number of ranks; on each rank."""
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    import keras
    from checks_step import PLAIN, regression_step
    from programs import programs_and_others

    from hvdkit.ranks import world as world_lib

    world = world_lib.connect()
    lines = []
    for number in [int(number) for number in weights.split(",")]:
        for jit in (False, True):
            parts = [keras.Input((4,))]
            for _ in range(number // 4):
                parts += [keras.layers.Dense(1), keras.layers.BatchNormalization()]
            model = keras.Sequential(parts)
            config = dataclasses.replace(
                PLAIN,
                jit=jit,
                momentum=0.9,
                weight_decay=1e-4,
                clip_norm=1.0,
                ema_decay=0.9,
            )
            do, _ = regression_step(world, config, model)
            programs, others = programs_and_others(do.step.graph)
            update = "a branch" if do.run.why_branch or not jit else "a program"
            flags = "--jit" if jit else ""
            lines.append((number, flags, programs, others.total(), update))
    if world.is_chief:
        Path(out).write_text(json.dumps(lines))
    world_lib.finish(world)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(worker(*sys.argv[2:]))
    sys.exit(main())
