"""What grows with the number of ranks, and with time: figures of rank 0 of the blank task.

    python benchmarks/scale.py [--ranks=1,2,4,8] [--mocked=128,1024,8192]
    python benchmarks/scale.py --steps=100000
    python benchmarks/scale.py --samples=100000000

Real ranks run over MPI on this host, many on a core, so their times are mostly those of the cores.
For a mocked number of ranks one process is rank 0 of so many, and every other rank sends what it
sends itself: the times are what rank 0's own Python, memory and files cost, without the network.

  start         seconds from the command to the first step done
  log, save     milliseconds of one log line (with the ranks' times), of one checkpoint's copy
  together      milliseconds of World.fail_together, in which all ranks learn whether one failed
  MB, files     resident memory and open files at the end
  exchanges     collectives outside of graphs until the first step, and kB that rank 0 received

--steps: instead, one rank makes that many steps; printed at a tenth, half and the end are seconds
for 1,000 steps since the last row, resident memory, open files and bytes written.

--samples: instead, a packed set of so many samples with a real index and 1,000 files that are empty
but for their ends; printed is what it costs each kind of rank to open it and to read 320 places.
"""

import argparse
import collections
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "template"
TIMEOUT = 1200  # seconds, of one run
MARK = "scale: "
SHORT = ["--num_steps=30", "--log_every=1", "--checkpoint_every=6", "--eval_every=0"]


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        sys.exit(rank(float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2,4,8", help="real ones; 16,24 take minutes")
    parser.add_argument("--mocked", default="128,1024,8192")
    parser.add_argument("--steps", type=int, default=0, help="growth over so many steps instead")
    parser.add_argument("--samples", type=int, default=0, help="opens a packed set instead")
    args = parser.parse_args()
    if args.steps or args.samples:
        return growth(args.steps) if args.steps else opening(args.samples)
    print(f"Rank 0 of the blank task; real ranks share {len(os.sched_getaffinity(0))} cores.\n")
    print("| ranks | start, s | log, ms | save, ms | together, ms | MB | files | exchanges | kB |")
    print("| --- " * 9 + "|")
    for text, mocked in ((args.ranks, False), (args.mocked, True)):
        for count in map(int, filter(None, text.split(","))):
            row = run(count, mocked, [*SHORT, f"--global_batch_size={max(count, 32)}"])[-1]
            values = [f"{row[name]:.{digits}f}" for name, digits in _COLUMNS.items()]
            print(f"| {count:,}{' mocked' * mocked} | {' | '.join(values)} |", flush=True)


def opening(samples: int) -> None:
    """Prints the table of a packed set."""
    import numpy as np

    from hvdkit.data import shared_listing
    from hvdkit.data.readers import records

    findings: dict = {}
    ways = {"rank 0": lambda: shared_listing.kept(findings)}
    ways["a rank on rank 0's host"] = lambda: shared_listing.given(findings, look=False)
    ways["the first rank of another host"] = lambda: shared_listing.given(findings, look=True)
    print("| who | s | MB of its own | files opened |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        hollow_pack(Path(folder, "train"), samples)
        opened: list[str] = []
        sys.addaudithook(lambda what, of: what == "open" and opened.append(str(of[0])))
        for who, way in ways.items():
            opened.clear()
            before, start = own_memory(), time.perf_counter()
            with way():
                source = records.Records(Path(folder), "train")
            for part in np.split(np.random.default_rng(1).integers(0, samples, 320), 10):
                source.fetch(part)
            taken, files = time.perf_counter() - start, sum(n.startswith(folder) for n in opened)
            print(f"| {who} | {taken:.1f} | {own_memory() - before:.0f} | {files:,} |", flush=True)


def hollow_pack(folder: Path, samples: int, shards: int = 1000, length: int = 100_000) -> None:
    """A packed split whose files take no space: 100 kB a sample, zeros."""
    import numpy as np

    from hvdkit.data.readers import records

    folder.mkdir()
    around, listed = records.BEFORE + records.AFTER, []
    index = np.empty(samples, records.PLACE)
    index["length"] = length
    for number in range(shards):
        first, last = samples * number // shards, samples * (number + 1) // shards
        places = np.arange(last - first, dtype=np.uint64) * (length + around)
        index["offset"][first:last] = places + records.BEFORE
        size = (last - first) * (length + around)
        with (folder / f"{number}").open("wb") as file:
            file.truncate(size)
        listed.append({"name": f"{number}", "records": last - first, "bytes": size})
    meta = {"kind": "class", "num_classes": 1, "packed_from": "", "shards": listed}
    records.write_meta(folder, meta, index)


def own_memory() -> float:
    """MB that no other process and no file shares."""
    return int(re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1e3


_COLUMNS = {"start": 1, "log": 2, "save": 1, "together": 2, "MB": 0, "files": 0}
_COLUMNS |= {"exchanges": 0, "kB": 0}  # name: digits


def growth(steps: int) -> None:
    """Prints the table of a long run."""
    tenth = steps // 10
    flags = [f"--num_steps={steps}", "--log_every=20", f"--checkpoint_every={tenth}"]
    print("| step | s a 1,000 | MB | files | metrics.jsonl | tensorboard | checkpoints | other |")
    print("| --- " * 8 + "|")
    for row in run(1, False, [*flags, f"--eval_every={tenth}"])[:-1]:
        sizes = [f"{row['bytes'].get(name, 0):,}" for name in _WRITTEN]
        seconds = f"{row['seconds'] / row['steps'] * 1000:.2f}"
        print(f"| {row['step']:,} | {seconds} | {row['MB']:.0f} | {row['files']} | ", end="")
        print(f"{' | '.join(sizes)} |")


_WRITTEN = ("metrics.jsonl", "tensorboard", "checkpoints", "other")


def run(count: int, mocked: bool, flags: list[str]) -> list[dict]:
    """What rank 0 printed of one run."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "rank", repr(time.time()), count if mocked else 0]
        if count > 1 and not mocked:
            words = [ROOT / "launch/hosts.sh", "-np", count, *words]
        words += ["--flagfile=configs/blank.cfg", f"--run_dir={folder}/run", *flags]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        words = list(map(str, words))
        ended = subprocess.run(words, env=env, cwd=TEMPLATE, timeout=TIMEOUT, **pipes)
    rows = re.findall(rf"{MARK}(\{{.*\}})", ended.stdout)
    if ended.returncode or not rows:
        raise SystemExit(f"exit code {ended.returncode}\n{ended.stdout[-3000:]}")
    return [json.loads(text) for text in rows]


class Watch:
    """What parts of a run cost this rank."""

    def __init__(self, typed: float) -> None:
        self._typed, self._start = typed, 0.0  # seconds from the command to the first step done
        self._kb: list[float] = []  # of each exchange until then
        self._ms: dict[str, list[float]] = {"log": [], "save": [], "together": []}
        self._last_step, self._last_time = 0, 0.0

    def exchanged(self, size: int) -> None:
        if not self._start:
            self._kb.append(size / 1e3)

    def judged(self, *_: object) -> None:
        self._start = self._start or time.time() - self._typed

    def saved(self, seconds: float, *_: object) -> None:
        self._ms["save"].append(seconds * 1e3)

    def logged(self, seconds: float, action, step: int, *_: object) -> None:
        self._ms["log"].append(seconds * 1e3)
        config, now = action._run.config, time.perf_counter()
        if 10 * step in (config.num_steps, 5 * config.num_steps, 10 * config.num_steps):
            row = {"step": step, "steps": step - self._last_step, "seconds": now - self._last_time}
            say(row | held() | {"bytes": written(Path(config.run_dir))})
            self._last_step, self._last_time = step, now
        self._last_time = self._last_time or now

    def ended(self, world) -> None:
        for name in ("first", *["scale"] * 20):
            start = time.perf_counter()
            with world.fail_together(name):
                pass
            self._ms["together"].append((time.perf_counter() - start) * 1e3)
        middle = {name: statistics.median(ms[1:] or ms) for name, ms in self._ms.items()}
        found = {"exchanges": len(self._kb), "kB": sum(self._kb), "start": self._start}
        say(middle | found | held())


def say(row: dict) -> None:
    import hvdkit

    if hvdkit.stop.launch_rank() == 0:
        print(MARK + json.dumps(row), flush=True)


def after(owner: object, name: str, look) -> None:
    """Calls look(seconds, *arguments) after every call of this function."""
    inner = getattr(owner, name)

    def call(*args, **how):
        start = time.perf_counter()
        found = inner(*args, **how)
        look(time.perf_counter() - start, *args)
        return found

    setattr(owner, name, call)


def count(owner: object, name: str, *, mocked: int, exchanged) -> None:
    """Collectives outside of graphs; of an allgather, what so many ranks would have sent."""
    import tensorflow as tf

    inner = getattr(owner, name)

    def call(*args, **how):
        found = inner(*args, **how)
        if tf.executing_eagerly():
            if name == "allgather" and mocked:
                found = tf.tile(found, [mocked] + [1] * (len(found.shape) - 1))
            exchanged(found.numpy().nbytes)
        return found

    setattr(owner, name, call)


def rank(typed: float, mocked: int, flags: list[str]) -> int:
    """One rank of train.py, watched; `mocked`: as rank 0 of so many."""
    sys.path.insert(0, str(TEMPLATE))
    import hvdkit.ranks.quiet

    # isort: split
    import horovod.tensorflow as hvd
    from horovod.tensorflow import functions

    import hvdkit
    import train
    from hvdkit.ranks import messages
    from hvdkit.run import actions, health, loop

    watch = Watch(typed)
    for name in ("allreduce", "allgather", "broadcast"):
        count(hvd, name, mocked=mocked, exchanged=watch.exchanged)
    count(functions, "broadcast", mocked=mocked, exchanged=watch.exchanged)  # of variables
    mpi = messages.Mpi  # what Horovod does not carry
    after(mpi, "largest", lambda s, _, numbers: watch.exchanged(8 * len(numbers)))
    after(mpi, "gather", lambda s, _, own, ranks: watch.exchanged((8 + own.size) * ranks))
    after(mpi, "broadcast", lambda s, _, part, *rest: watch.exchanged(part.size))
    after(health.Pace, "add", watch.judged)
    after(actions.Log, "__call__", watch.logged)
    after(actions.Save, "__call__", watch.saved)
    summarize = loop.Run._summarize
    loop.Run._summarize = lambda run, ended: (watch.ended(run.world), summarize(run, ended))[1]
    if mocked:
        be_one_of(mocked)
    return hvdkit.main(train.train, train.Settings, ["train.py", *flags])


def be_one_of(ranks: int) -> None:
    """Rank 0 of so many, in one process, with a sample for each."""
    from hvdkit.ranks import proof
    from hvdkit.ranks import world as world_lib
    from tasks import blank

    connect, numbers, sign = world_lib.connect, blank.numbers, proof.sign
    proof.sign = lambda key, rank: sign(key, 0)  # the others answer what this one says
    world_lib.connect = lambda limit: connect() and world_lib.World(0, ranks, 0, 1)
    blank.numbers = lambda split, samples, classes: numbers(split, max(samples, ranks), classes)


def held() -> dict[str, float]:
    """Of this process: resident memory and open files."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    megabytes = pages * os.sysconf("SC_PAGESIZE") / 1e6
    return {"MB": megabytes, "files": len(os.listdir("/proc/self/fd"))}


def written(folder: Path) -> dict[str, int]:
    """Bytes by kind of record."""
    found: collections.Counter[str] = collections.Counter()
    for path in filter(Path.is_file, folder.rglob("*")):
        name = path.relative_to(folder).parts[0]
        found[name if name in _WRITTEN else "other"] += path.stat().st_size
    return found


if __name__ == "__main__":
    main()
