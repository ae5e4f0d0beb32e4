"""Runs the benchmarks one after the other and writes what they print into RESULTS.md.

    python benchmarks/results.py [--torch=PYTHON] [--out=benchmarks/RESULTS.md] [NAME ...]

NAMEs are equivalence, peers, operations, small, input and cost; without any, all of them, with the
flags in PARTS: 50 minutes on two cores. Run it on an idle machine: the file says what the load was
at the start. If a part fails, the file holds what it printed, the others run, and the exit code is
1. With NAMEs it is RESULTS.some.md, and RESULTS.md stays; until all have run it is named *.new.
--torch is the Python of an environment with requirements-peers.txt, for PyTorch's rows.
"""

import argparse
import datetime
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
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
    about: str
    torch: bool = False  # whether it takes --torch


PARTS = {
    "equivalence": Part(
        "Same weights on any number of ranks",
        "equivalence.py",
        "Largest relative difference of a variable to the run on 1 rank. On two cores 3 and 4 "
        "ranks share them, so that time a step grows.",
    ),
    "peers": Part(
        "A step, here and elsewhere",
        "peers.py --rounds=5 --windows=3",
        "ResNet-50, 64 pixels, float32, SGD with momentum, one thread a rank. Our speed over "
        "another's: more than 1 is faster; in brackets the least and the most of a round.",
        torch=True,
    ),
    "operations": Part(
        "Operations of a step",
        "operations.py",
        "With --jit, those outside of the programs of XLA; without it, all.",
    ),
    "small": Part(
        "A small step of a rank alone",
        "peers.py --ranks=1 --rounds=5 'template, small' 'bare, small'",
        "16 samples of the blank task: what is ours shows, and a GPU would wait for it.",
    ),
    "input": Part(
        "Input pipeline",
        "input.py --rounds=2 --seconds=3",
        "Samples a second, and ratios with the least and the most of a round.",
        torch=True,
    ),
    "cost": Part(
        "What settings cost",
        "cost.py --rounds=2 --steps=16 -- --deterministic --bn_sync --log_gradients --compression "
        "--gradient_groups --accumulation_steps '--virtual_ranks, 64 px, 8 samples each, V = N'",
        "Time a step over the plain setting's: 1.00 is no cost.",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--torch", metavar="PYTHON", help="interpreter that has PyTorch"
    )
    parser.add_argument("--out", type=Path, help="RESULTS.md; of some, RESULTS.some.md")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PARTS))
    args = parser.parse_args()
    # The results of all are not replaced by those of some.
    args.out = args.out or HERE / ("RESULTS.some.md" if args.names else "RESULTS.md")
    unknown = set(args.names) - set(PARTS)
    if unknown:
        parser.error(f"no benchmark {sorted(unknown)}; there are {list(PARTS)}")
    if not args.out.parent.is_dir():
        parser.error(f"--out={args.out}: there is no folder {args.out.parent}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = {
        name: part for name, part in PARTS.items() if name in (args.names or PARTS)
    }
    return run_all(chosen, args.torch, args.out)


def run_all(parts: Mapping[str, Part], torch: str | None, out: Path) -> int:
    """Runs the parts and adds their output to `out`; 0 if all of them ended with 0, else 1."""
    printed = "them" if len(parts) == len(PARTS) else "some of them"
    head = [
        f"# Benchmarks, as `make bench` last printed {printed}",
        "",
        *machine(),
        versions(torch),
    ]
    # What is no file, as /dev/stdout, is written to at once.
    unfinished = out
    if out.is_file() or not out.exists():
        unfinished = out.with_name(f"{out.name}.new")
    unfinished.write_text("\n".join(head) + "\n")
    failed = []
    for name, part in parts.items():
        file, *flags = shlex.split(part.command)
        if torch and part.torch:
            flags.append(f"--torch={Path(torch).absolute()}")
        print(f"== {part.command}", file=sys.stderr, flush=True)
        start = time.monotonic()
        code, output = run([sys.executable, "-u", HERE / file, *flags])
        minutes, seconds = divmod(round(time.monotonic() - start), 60)
        outcome = "done"
        if code:
            outcome = f"**failed with exit code {code}**"
            failed.append(name)
        with unfinished.open("a") as results:
            results.write(f"\n## {part.title}\n\n")
            results.write(f"`python benchmarks/{part.command}`: ")
            results.write(
                f"{outcome} after {minutes} min {seconds} s. {part.about}\n\n"
            )
            results.write(f"{output.strip()}\n")
    if unfinished != out:
        unfinished.replace(out)
    if failed:
        print(f"{out}; failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    print(out, file=sys.stderr)
    return 0


def run(command: Sequence[object]) -> tuple[int, str]:
    """Exit code (124: it took longer than TIMEOUT) and standard output, shown as it comes."""
    # timeout sends SIGINT once: a second one would keep the command from ending its ranks.
    words = ["timeout", "--foreground", "--signal=INT", TIMEOUT, *command]
    lines = []
    with subprocess.Popen(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        except BaseException:
            process.send_signal(signal.SIGINT)
            raise
    return process.returncode, "".join(lines)


def machine() -> list[str]:
    """Lines on when and where this runs."""
    now = datetime.datetime.now(datetime.UTC)
    git = ["git", "-C", HERE, "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    memory = int(_found("/proc/meminfo", "MemTotal").split()[0]) / 2**20
    return [
        f"- date: {now:%Y-%m-%d %H:%M} UTC, commit {commit or 'unknown'}",
        f"- machine: {_found('/proc/cpuinfo', 'model name')}, "
        f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, Linux {platform.release()}; "
        f"load at the start {os.getloadavg()[0]:.2f}",
    ]


def versions(torch: str | None) -> str:
    """Versions of Python and of what is imported, which may be installed under other names."""
    installed = metadata.packages_distributions()
    shown = [f"- versions: Python {platform.python_version()}"]
    for module in ("tensorflow", "keras", "horovod", "numpy"):
        for name in sorted(set(installed[module])):
            shown.append(f"{name} {metadata.version(name)}")
    if torch:
        code = "import torch, torchvision; print(torch.__version__, torchvision.__version__)"
        ended = subprocess.run([torch, "-c", code], capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(
                f"--torch={torch}: {ended.stderr.strip().splitlines()[-1]}"
            )
        torch_version, torchvision_version = ended.stdout.split()
        shown.append(f"torch {torch_version}, torchvision {torchvision_version}")
    return ", ".join(shown)


def _found(file: str, name: str) -> str:
    match = re.search(rf"^{name}\s*: *(.*)$", Path(file).read_text(), re.MULTILINE)
    return match[1] if match else "unknown"


if __name__ == "__main__":
    sys.exit(main())
