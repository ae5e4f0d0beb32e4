"""Runs the benchmarks one after the other and writes what they print into RESULTS.md.

    python benchmarks/results.py [--torch=PYTHON] [--out=benchmarks/RESULTS.md] [NAME ...]

NAMEs are equivalence, peers, input and cost; without any, all of them, with the flags in
PARTS: 36 minutes on two cores. Figures are as good as the machine is idle: the file says what
its load was at the start. The file is written anew after each part; one that fails is in it with
what it printed, the others run all the same, and the exit code is 1. --torch is the Python of an
environment with requirements-peers.txt; without it PyTorch's rows are missing.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
TIMEOUT = 1800  # seconds, of one part


class Part(NamedTuple):
    title: str
    command: str  # file and flags
    torch: bool  # whether it takes --torch
    about: str


class Outcome(NamedTuple):
    code: int
    output: str
    seconds: float


PARTS = {
    "equivalence": Part(
        "Same weights on any number of ranks",
        "equivalence.py",
        False,
        "Largest relative difference of a variable to the run on 1 rank. On two cores 3 and 4 "
        "ranks share them, so that time a step grows.",
    ),
    "peers": Part(
        "A step, here and elsewhere",
        "peers.py --rounds=5 --windows=3",
        True,
        "ResNet-50, 64 pixels, float32, SGD with momentum, one thread a rank. Our speed over "
        "another's: more than 1 is faster; in brackets the least and the most of a round.",
    ),
    "input": Part(
        "Input pipeline",
        "input.py --rounds=2 --seconds=3",
        True,
        "Samples a second, and ratios with the least and the most of a round.",
    ),
    "cost": Part(
        "What settings cost",
        "cost.py --rounds=2 --steps=16 -- --deterministic --bn_sync --log_gradients --compression "
        "--gradient_groups --accumulation_steps '--virtual_ranks, 64 px, 8 samples each, V = N'",
        False,
        "Time a step over the plain setting's: 1.00 is no cost.",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", metavar="PYTHON", help="interpreter that has PyTorch")
    parser.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PARTS))
    args = parser.parse_args()
    if unknown := {*args.names} - {*PARTS}:
        parser.error(f"no benchmark {sorted(unknown)}; there are {list(PARTS)}")
    if not args.out.parent.is_dir():
        parser.error(f"--out={args.out}: there is no folder {args.out.parent}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = {name: part for name, part in PARTS.items() if name in (args.names or PARTS)}
    return run_all(chosen, args.torch, args.out)


def run_all(parts: Mapping[str, Part], torch: str | None, out: Path) -> int:
    """Runs the parts, and writes `out` after each; 0 if all of them ended with 0, else 1."""
    about = [*machine(), f"- versions: {versions(torch)}"]
    found: dict[str, Outcome] = {}
    for name, part in parts.items():
        file, *flags = shlex.split(part.command)
        if torch and part.torch:
            flags.append(f"--torch={Path(torch).absolute()}")
        command = [sys.executable, "-u", HERE / file, *flags]
        print(f"== {part.command}", file=sys.stderr, flush=True)
        found[name] = run(command, TIMEOUT)
        partial = out.with_name(f".{out.name}.partial")
        partial.write_text(text(parts, found, about))
        partial.rename(out)
    failed = [name for name, outcome in found.items() if outcome.code]
    print(f"{out}" + (f"; failed: {', '.join(failed)}" if failed else ""), file=sys.stderr)
    return 1 if failed else 0


def run(command: Sequence[object], timeout: float) -> Outcome:
    """Its standard output, shown line by line as it comes; ended after `timeout` seconds."""
    start, lines = time.monotonic(), []
    words = list(map(str, command))
    # As Ctrl-C does: only then it takes with it the ranks that it started, sessions of their own.
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(timeout, process.send_signal, [signal.SIGINT])
        timer.start()
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        finally:
            timer.cancel()
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
    return Outcome(process.returncode, "".join(lines), time.monotonic() - start)


def text(parts: Mapping[str, Part], found: Mapping[str, Outcome], about: Sequence[str]) -> str:
    head = "# Benchmarks, as `make bench` last printed them"
    sections = ["\n".join([head, "", *about])]
    for name, part in parts.items():
        title = f"## {part.title}\n\n`python benchmarks/{part.command}`"
        if name not in found:
            sections.append(f"{title}: not run.")
            continue
        code, output, seconds = found[name]
        ended = f"**failed with exit code {code}**" if code else "done"
        took = f"{ended} after {seconds / 60:.0f} min {seconds % 60:.0f} s"
        sections.append(f"{title}: {took}. {part.about}\n\n{output.strip()}".rstrip())
    return "\n\n".join(sections) + "\n"


def machine() -> list[str]:
    """Lines on when and where this runs."""
    now = datetime.datetime.now(datetime.UTC)
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    commit = subprocess.run(
        ["git", "-C", HERE, "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    return [
        f"- date: {now:%Y-%m-%d %H:%M} UTC, commit {commit or 'unknown'}",
        f"- machine: {_found('/proc/cpuinfo', 'model name')}, {cores} cores, "
        f"{int(_found('/proc/meminfo', 'MemTotal').split()[0]) / 2**20:.0f} GiB, "
        f"Linux {platform.release()}; load at the start {load:.2f}",
    ]


def versions(torch: str | None) -> str:
    """Of Python and what is imported, which may be installed under other names."""
    installed = metadata.packages_distributions()
    found = [f"Python {platform.python_version()}"]
    for module in ("tensorflow", "keras", "horovod", "numpy"):
        found += [f"{name} {metadata.version(name)}" for name in sorted({*installed[module]})]
    if torch:
        code = "import torch, torchvision; print(torch.__version__, torchvision.__version__)"
        torchs = subprocess.run([torch, "-c", code], capture_output=True, text=True)
        if torchs.returncode:
            raise SystemExit(f"--torch={torch}: {torchs.stderr.strip().splitlines()[-1]}")
        found += ["torch {}, torchvision {}".format(*torchs.stdout.split())]
    return ", ".join(found)


def _found(file: str, name: str) -> str:
    match = re.search(rf"^{name}\s*: *(.*)$", Path(file).read_text(), re.MULTILINE)
    return match[1] if match else "unknown"


if __name__ == "__main__":
    sys.exit(main())
