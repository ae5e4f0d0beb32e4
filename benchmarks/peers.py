"""Time a step of the same ResNet-50 here and elsewhere, in turn in one run.

    python benchmarks/peers.py [--rounds=3] [--windows=4] [--torch=PYTHON] [WAY ...]
    python benchmarks/peers.py --rounds=12 bare template      these ways only

peers_runs.py says what is trained and lists the ways. Printed are medians over rounds (of a round:
the median of windows of ten steps, after ten for warm-up), and this project's speed over the
other's with the least and the most of a round; 1.00 is as fast, more is faster. With its input
pipeline it is compared to the bare loop that is fed by the same pipeline. --torch is the Python of
an environment with requirements-peers.txt; without it PyTorch is left out.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from peers_runs import BATCH, MARK
from ranks import last_lines, launch

WORKER = Path(__file__).parent / "peers_runs.py"
RANKS = 2
TIMEOUT = 300  # seconds, of one run of about 30
# What is printed of each way, and which of ours is compared with it.
NAMES = {
    "template": ("this project, constant batch", ""),
    "bare": ("bare Horovod loop, constant batch", "template"),
    "ddp": ("PyTorch DDP, Gloo, constant batch", "template"),
    "mwms": ("MultiWorkerMirroredStrategy, constant batch", "template"),
    "template, input": ("this project, with its input", ""),
    "bare, input": ("bare Horovod loop, with the same input", "template, input"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=4, help="of ten steps, in a run")
    parser.add_argument("--torch", metavar="PYTHON", help="interpreter that has PyTorch")
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join(NAMES))
    args = parser.parse_args()
    if unknown := {*args.ways} - {*NAMES}:
        parser.error(f"no way {sorted(unknown)}; there are {list(NAMES)}")
    if "ddp" in args.ways and not args.torch:
        parser.error("ddp needs --torch=PYTHON")
    ways = [w for w in NAMES if w in (args.ways or NAMES) and (w != "ddp" or args.torch)]
    torch = Path(args.torch or "").absolute()  # not where its links lead: that has no PyTorch
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(args.rounds):
        # There and back: what warms up or slows down over a round falls on both sides alike.
        for way in ways if number % 2 == 0 else reversed(ways):
            python = str(torch) if way == "ddp" else sys.executable
            found = statistics.median(run(way, python, args.windows))
            print(f"round {number + 1}: {way}: {found * 1e3:.1f} ms a step", file=sys.stderr)
            seconds[way].append(found)
    table(seconds)


def run(way: str, python: str, windows: int) -> list[float]:
    """Seconds a step of each window, as rank 0 saw them, in processes of their own."""
    # What brings no launcher of its own is started by mpirun, which tells it its rank.
    launcher = "gloo" if way.startswith(("template", "bare")) else "mpirun"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        ports = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(RANKS)]
        numbers = [port.getsockname()[1] for port in ports]
        held.close()
        command = [WORKER, way, windows, Path(folder) / "run", *numbers]
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        ended = launch(RANKS, command, launcher, timeout=TIMEOUT, env=hidden, python=python)
    found = re.search(rf"{MARK}(\[[^]]*\])", ended.output)
    if ended.code or not found:
        raise SystemExit(f"{way}: exit code {ended.code}\n{last_lines(ended.output)}")
    return json.loads(found[1])


def table(seconds: dict[str, list[float]]) -> None:
    print(f"| {RANKS} ranks of {BATCH} samples | ms a step | samples/s | our speed over it |")
    print("| --- | --- | --- | --- |")
    for way, found in seconds.items():
        name, ours = NAMES[way]
        middle, cell = statistics.median(found), ""
        if ours in seconds:
            ratios = [theirs / own for theirs, own in zip(found, seconds[ours])]
            whole = middle / statistics.median(seconds[ours])
            cell = f"{whole:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        rate = RANKS * BATCH / middle
        print(f"| {name} | {middle * 1e3:.0f} | {rate:.1f} | {cell} |")


if __name__ == "__main__":
    main()
