"""The largest batch that fits on a rank: doubled until it does not, each in a process of its own.

    python find_batch.py --flagfile=configs/demo.cfg [--memory=8] [--most=256]

Each line is a short `train.py --benchmark` of one rank: samples a second, and the most memory it
held. A batch does not fit when a GPU's memory runs out, or when the process takes more than
--memory GiB of the host's (default: half of what is free now): then it is ended. Flags of train.py
may follow, but none that sets the batch.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from hvdkit import settings as settings_lib
from hvdkit.stop import BUG, DONE, WRONG_USE, complain

_STEPS = 15  # of a benchmark, at least
_GIB = 2**30
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)
_OUT_OF_MEMORY = ("does not fit into memory", "ResourceExhausted", "out of memory", "OOM when")


class Tried(NamedTuple):
    """What became of one size."""

    fits: bool
    rate: float = 0.0  # samples a second
    peak: float = 0.0  # bytes
    why: str = ""  # it does not fit, or failed otherwise
    failed: bool = False  # not for memory


def tried(flags: list[str], batch: int, limit: float) -> Tried:
    """One size, in a process that is gone afterwards, whatever happens here."""
    with tempfile.TemporaryDirectory(prefix="find-batch-") as folder:
        more = [f"--batch_per_rank={batch}", "--accumulation_steps=1", f"--num_steps={_STEPS}"]
        more += ["--benchmark", "--resume=never", f"--run_dir={folder}/run"]
        words = [sys.executable, str(Path(__file__).with_name("train.py")), *flags, *more]
        log = Path(folder) / "log"
        with log.open("w") as out:
            child = subprocess.Popen(
                words, stdout=out, stderr=subprocess.STDOUT, preexec_fn=_end_with_parent
            )
            try:
                over = _watched(child, limit)
            finally:
                child.kill()
                child.wait()
        text = log.read_text(errors="replace")
        if over:
            return Tried(False, peak=over, why=f"more than {limit / _GIB:.1f} GiB")
        if child.returncode == -9 or any(words in text for words in _OUT_OF_MEMORY):
            return Tried(False, why="memory ran out")
        if child.returncode:
            return Tried(False, why=text.strip().splitlines()[-1] if text else "", failed=True)
        record = json.loads((Path(folder) / "run" / "benchmark.json").read_text())
    (own,) = record["by_rank"]
    peak = own["gpu_peak_bytes"] or own["host_peak_bytes"]
    fits = bool(own["gpu_peak_bytes"]) or peak <= limit
    why = "" if fits else f"more than {limit / _GIB:.1f} GiB"
    return Tried(fits, record["samples_per_second"]["mean"], peak, why)


def _end_with_parent() -> None:
    """Called in the child before it becomes train.py: the kernel ends it with this process.

    `finally` is not enough: SIGKILL runs none, and a signal may come before Popen returns.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watched(child: subprocess.Popen, limit: float) -> float:
    """Waits for its end; ends it where it takes more of the host's memory, and returns how much.

    0: it did not.
    """
    process = psutil.Process(child.pid)
    while child.poll() is None:
        try:
            held = process.memory_info().rss
        except psutil.Error:
            break
        if held > limit:
            child.kill()
            return held
        time.sleep(0.1)
    child.wait()
    return 0.0


def search(flags: list[str], limit: float, most: int) -> int:
    """Prints a line a size and the largest that fits; returns the exit code."""
    best, batch = 0, 1
    print(f"{'batch':>7}  {'samples/s':>10}  {'peak GiB':>8}", flush=True)
    while batch <= most:
        found = tried(flags, batch, limit)
        if found.failed:
            complain(f"--batch_per_rank={batch} failed, and not for memory: {found.why}")
            return WRONG_USE if not best else BUG
        rate = f"{found.rate:,.1f}" if found.rate else ""
        peak = f"{found.peak / _GIB:.2f}" if found.peak else ""
        print(f"{batch:>7}  {rate:>10}  {peak:>8}  {found.why}".rstrip(), flush=True)
        if not found.fits:
            break
        best, batch = batch, 2 * batch
    if not best:
        complain("not even one sample fits: give more --memory, or a smaller model or picture")
        return BUG
    print(f"the largest of these that fits: --batch_per_rank={best}")
    return DONE


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 nothing fits, or a larger size failed; 2 wrong use."""
    kind = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, formatter_class=kind, allow_abbrev=False)
    made.add_argument("--memory", type=float, help="GiB of the host that a rank may take")
    made.add_argument("--most", type=int, default=2**16, help="largest size that is tried")
    own, flags = made.parse_known_args(argv[1:])
    for flag in ("--global_batch_size", "--batch_per_rank"):
        if any(word.split("=")[0] in (flag, flag[1:]) for word in flags):
            complain(f"{flag} is what find_batch.py looks for: leave it out; --most limits it")
            return WRONG_USE
    if own.most < 1:
        complain(f"--most={own.most}: give 1 or more")
        return WRONG_USE
    settings_lib.check([argv[0], *flags], settings_lib.of_project())  # a mistake is told at once
    # As Ctrl-C: the process that tries a size ends with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    free = psutil.virtual_memory().available
    limit = free / 2 if own.memory is None else own.memory * _GIB
    if not 0 < limit <= free:
        most = free / _GIB
        complain(f"--memory={own.memory:g}: give more than 0 and at most {most:.1f} (GiB free now)")
        return WRONG_USE
    return search(flags, limit, own.most)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv))
    except KeyboardInterrupt:
        sys.exit(130)
