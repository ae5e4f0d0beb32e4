"""The same bits on any number of ranks: the table of --virtual_ranks.

    python benchmarks/bits.py [--columns=NAME,...] [--rows=NAME,...]

Every row is one run with 8 virtual ranks, every column a way to start it: a number of real ranks,
over Gloo or MPI, with other settings of Horovod's fusion. Printed are the first 12 digits of
weights_sha256, equal along a row; "!" marks figures of metrics.jsonl that are not those of the
first column. Exit code 1 if anything in a row differs. All of it took 49 minutes on two busy cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "template"), str(ROOT / "tests" / "helpers")]

from ranks import last_lines, launch

WORKER = Path(__file__).parent / "bits_runs.py"
FUSION = {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "0.1"}
# Name: ranks, backend, knobs of Horovod.
COLUMNS: dict[str, tuple[int, str, dict[str, str]]] = {
    "1": (1, "alone", {}),
    "2 Gloo": (2, "gloo", {}),
    "3 Gloo": (3, "gloo", {}),
    "4 Gloo": (4, "gloo", {}),
    "8 Gloo": (8, "gloo", {}),
    "2 MPI": (2, "mpirun", {}),
    "3 MPI": (3, "mpi", {}),
    "3 Gloo unfused": (3, "gloo", FUSION),
}
ROWS = ("unet", "digits", "transformer", "transformer16", "resnet50")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--rows", default=",".join(ROWS))
    args = parser.parse_args()
    columns, rows = args.columns.split(","), args.rows.split(",")
    unknown = {*columns} - {*COLUMNS} | {*rows} - {*ROWS}
    if unknown:
        parser.error(f"unknown: {sorted(unknown)}")

    cells: dict[tuple[str, str], dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, column in enumerate(columns):
            ranks, backend, knobs = COLUMNS[column]
            print(f"training on {column} ...", file=sys.stderr, flush=True)
            out = Path(folder) / str(number)
            out.mkdir()
            ended = launch(ranks, [WORKER, out, *rows], backend, timeout=3000, env=knobs)
            if ended.code:
                raise SystemExit(last_lines(ended.output))
            for row in rows:
                cells[row, column] = json.loads((out / f"{row}.json").read_text())
    return table(rows, columns, cells)


def table(rows: list[str], columns: list[str], cells: dict[tuple[str, str], dict]) -> int:
    print("| run |" + "".join(f" {column} |" for column in columns))
    print("| --- |" + " --- |" * len(columns))
    same = True
    for row in rows:
        first = cells[row, columns[0]]
        shown = []
        for column in columns:
            cell = cells[row, column]
            mark = "" if cell["records"] == first["records"] else "!"
            shown.append(f" `{cell['weights_sha256'][:12]}`{mark} |")
            same &= cell == first
        print(f"| {first['about']} |" + "".join(shown))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
