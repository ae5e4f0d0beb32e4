"""The same weights on any number of ranks: prints the table that the README shows.

    python benchmarks/equivalence.py [--ranks=1,2,3,4]

Each setting is trained for 40 steps of 10 samples on 1, 2, 3 and 4 real ranks (shares 10, 5+5,
3+3+4, 2+3+2+3); the largest relative difference of a variable to the 1-rank run is printed. Rows
with local batch norm show what --bn_sync=full is for. Exit code 1 if a float64 row with
--bn_sync=full is beyond 1e-12.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "template"), str(ROOT / "tests" / "helpers")]

import equivalence
from hvdkit.data.prepare import scenes
from ranks import launch_well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2,3,4")
    args = parser.parse_args()
    ranks = [int(count) for count in args.ranks.split(",")]
    if ranks[0] != 1:
        parser.error(
            f"--ranks={args.ranks} must begin with 1, which the others are compared to"
        )

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        settings = scenes.Settings(
            train=60, val=4, size=32, box=(12, 16), digits=(1, 3)
        )
        scenes.ensure_demo(root / "data", settings)
        times = {count: _train(root, count) for count in ranks}
        return _table(root, ranks, times)


def _train(root: Path, ranks: int) -> dict[str, float]:
    """Trains every setting on `ranks` ranks; returns milliseconds a step by setting."""
    print(f"training on {ranks} rank(s) ...", file=sys.stderr, flush=True)
    (root / str(ranks)).mkdir()
    worker = [equivalence.__file__, root / "data", root / str(ranks), "tiny"]
    ended = launch_well(ranks, [*worker, *equivalence.SETTINGS], "gloo", timeout=1800)
    lines = re.findall(r"(float\d\d [a-z_ ]+): ([\d.]+) ms a step", ended.output)
    return {name: float(milliseconds) for name, milliseconds in lines}


def _table(root: Path, ranks: list[int], times: dict[int, dict[str, float]]) -> int:
    """Prints the table; returns the exit code."""
    head = [f"setting ({equivalence.STEPS} steps)"]
    head += [f"{count} ranks" for count in ranks[1:]]
    print(f"| {' | '.join(head)} |")
    print(f"| {' | '.join('---' for _ in head)} |")
    code = 0
    for name in equivalence.SETTINGS:
        cells = [name]
        for count in ranks[1:]:
            on_one = root / "1" / f"{name}.npz"
            on_many = root / str(count) / f"{name}.npz"
            difference = equivalence.largest_difference(on_one, on_many)
            cells.append(f"{difference:.0e}, {times[count][name]:.0f} ms a step")
            if (
                name.startswith("float64")
                and "local" not in name
                and difference > 1e-12
            ):
                code = 1
        print(f"| {' | '.join(cells)} |")
    return code


if __name__ == "__main__":
    sys.exit(main())
