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
    parser.add_argument(
        "--ranks", default="1,2,4,8", help="real ones; 16,24 take minutes"
    )
    parser.add_argument("--mocked", default="128,1024,8192")
    parser.add_argument(
        "--steps", type=int, default=0, help="growth over so many steps instead"
    )
    parser.add_argument(
        "--samples", type=int, default=0, help="opens a packed set instead"
    )
    args = parser.parse_args()
    if args.steps:
        growth(args.steps)
    elif args.samples:
        opening(args.samples)
    else:
        exchanges(_numbers(args.ranks), _numbers(args.mocked))


def _numbers(text: str) -> list[int]:
    """Of 1,2,4; none of an empty text."""
    return [int(number) for number in text.split(",") if number]


def exchanges(real: list[int], mocked: list[int]) -> None:
    """Prints the table of numbers of ranks."""
    print(
        f"Rank 0 of the blank task; real ranks share {len(os.sched_getaffinity(0))} cores.\n"
    )
    print(
        "| ranks | start, s | log, ms | save, ms | together, ms | MB | files | exchanges | kB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for ranks in real:
        _print_row(f"{ranks:,}", run(ranks, False, _short_run(ranks)))
    for ranks in mocked:
        _print_row(f"{ranks:,} mocked", run(ranks, True, _short_run(ranks)))


def _short_run(ranks: int) -> list[str]:
    return [*SHORT, f"--global_batch_size={max(ranks, 32)}"]


def _print_row(ranks: str, rows: list[dict]) -> None:
    """Prints the last of the rows that a run printed."""
    values = [f"{rows[-1][name]:.{digits}f}" for name, digits in _COLUMNS.items()]
    print(f"| {ranks} | {' | '.join(values)} |", flush=True)


def opening(samples: int) -> None:
    """Prints the table of a packed set."""
    import numpy as np

    from hvdkit.data import shared_listing
    from hvdkit.data.readers import records

    findings: dict = {}
    ways = {
        "rank 0": lambda: shared_listing.kept(findings),
        "a rank on rank 0's host": lambda: shared_listing.received(
            findings, checks_disk=False
        ),
        "the first rank of another host": lambda: shared_listing.received(
            findings, checks_disk=True
        ),
    }
    print("| who | s | MB of its own | files opened |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        hollow_pack(Path(folder, "train"), samples)
        opened: list[str] = []

        def note_opened_file(event: str, arguments: tuple) -> None:
            if event == "open" and str(arguments[0]).startswith(folder):
                opened.append(str(arguments[0]))

        sys.addaudithook(note_opened_file)
        for who, way in ways.items():
            opened.clear()
            memory_before = own_memory()
            start = time.perf_counter()
            with way():
                source = records.Records(Path(folder), "train")
            indices = np.random.default_rng(1).integers(0, samples, 320)
            for part in np.split(indices, 10):
                source.fetch(part)
            seconds = time.perf_counter() - start
            files = len(opened)
            megabytes = own_memory() - memory_before
            print(
                f"| {who} | {seconds:.1f} | {megabytes:.0f} | {files:,} |", flush=True
            )


def hollow_pack(
    folder: Path, samples: int, shards: int = 1000, length: int = 100_000
) -> None:
    """A packed split whose files take no space: 100 kB a sample, zeros."""
    import numpy as np

    from hvdkit.data.readers import records

    folder.mkdir()
    record_bytes = records.BEFORE + length + records.AFTER
    index = np.empty(samples, records.PLACE)
    index["length"] = length
    listed = []
    for number in range(shards):
        first = samples * number // shards
        last = samples * (number + 1) // shards
        count = last - first
        places = np.arange(count, dtype=np.uint64) * record_bytes
        index["offset"][first:last] = places + records.BEFORE
        with (folder / f"{number}").open("wb") as file:
            file.truncate(count * record_bytes)
        listed.append(
            {"name": f"{number}", "records": count, "bytes": count * record_bytes}
        )
    meta = {"kind": "class", "num_classes": 1, "packed_from": "", "shards": listed}
    records.write_meta(folder, meta, index)


def own_memory() -> float:
    """MB that no other process and no file shares."""
    return (
        int(re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())[1])
        / 1e3
    )


_COLUMNS = {  # name: digits
    "start": 1,
    "log": 2,
    "save": 1,
    "together": 2,
    "MB": 0,
    "files": 0,
    "exchanges": 0,
    "kB": 0,
}


def growth(steps: int) -> None:
    """Prints the table of a long run."""
    tenth = steps // 10
    flags = [f"--num_steps={steps}", "--log_every=20", f"--checkpoint_every={tenth}"]
    print(
        "| step | s a 1,000 | MB | files | metrics.jsonl | tensorboard | checkpoints | other |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in run(1, False, [*flags, f"--eval_every={tenth}"])[:-1]:
        cells = [
            f"{row['step']:,}",
            f"{row['seconds'] / row['steps'] * 1000:.2f}",
            f"{row['MB']:.0f}",
            f"{row['files']}",
        ]
        cells += [f"{row['bytes'].get(name, 0):,}" for name in _WRITTEN]
        print(f"| {' | '.join(cells)} |")


_WRITTEN = ("metrics.jsonl", "tensorboard", "checkpoints", "other")


def run(count: int, mocked: bool, flags: list[str]) -> list[dict]:
    """What rank 0 printed of one run."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            __file__,
            "rank",
            repr(time.time()),
            count if mocked else 0,
        ]
        if count > 1 and not mocked:
            words = [ROOT / "launch/hosts.sh", "-np", count, *words]
        words += ["--flagfile=configs/blank.cfg", f"--run_dir={folder}/run", *flags]
        ended = subprocess.run(
            [str(word) for word in words],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            cwd=TEMPLATE,
            timeout=TIMEOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    rows = re.findall(rf"{MARK}(\{{.*\}})", ended.stdout)
    if ended.returncode or not rows:
        raise SystemExit(f"exit code {ended.returncode}\n{ended.stdout[-3000:]}")
    return [json.loads(text) for text in rows]


class Watch:
    """What parts of a run cost this rank."""

    def __init__(self, typed: float) -> None:
        """`typed`: when the command was typed, as time.time() gives it."""
        self._typed = typed
        self._start = 0.0  # seconds from the command to the first step done
        self._kb: list[float] = []  # of each exchange until then
        self._ms: dict[str, list[float]] = {"log": [], "save": [], "together": []}
        self._last_step = 0
        self._last_time = 0.0

    def exchanged(self, size: int) -> None:
        if not self._start:
            self._kb.append(size / 1e3)

    def judged(self, *_: object) -> None:
        self._start = self._start or time.time() - self._typed

    def saved(self, seconds: float, *_: object) -> None:
        self._ms["save"].append(seconds * 1e3)

    def logged(self, seconds: float, action, step: int, *_: object) -> None:
        self._ms["log"].append(seconds * 1e3)
        config = action._run.config
        now = time.perf_counter()
        if 10 * step in (config.num_steps, 5 * config.num_steps, 10 * config.num_steps):
            row = {
                "step": step,
                "steps": step - self._last_step,
                "seconds": now - self._last_time,
            }
            say(row | held() | {"bytes": written(Path(config.run_dir))})
            self._last_step = step
            self._last_time = now
        self._last_time = self._last_time or now

    def ended(self, world) -> None:
        for _ in range(21):
            start = time.perf_counter()
            with world.fail_together("scale"):
                pass
            self._ms["together"].append((time.perf_counter() - start) * 1e3)
        row = {"exchanges": len(self._kb), "kB": sum(self._kb), "start": self._start}
        for name, milliseconds in self._ms.items():
            # The first one takes longer; it counts where it is the only one.
            row[name] = statistics.median(milliseconds[1:] or milliseconds)
        say(row | held())


def say(row: dict) -> None:
    import hvdkit

    if hvdkit.launcher.launch_rank() == 0:
        print(MARK + json.dumps(row), flush=True)


def after(owner: object, name: str, look) -> None:
    """Calls look(seconds, *arguments) after every call of this function."""
    inner = getattr(owner, name)

    def call(*args, **keywords):
        start = time.perf_counter()
        result = inner(*args, **keywords)
        look(time.perf_counter() - start, *args)
        return result

    setattr(owner, name, call)


def count(owner: object, name: str, *, mocked: int, exchanged) -> None:
    """Counts collectives outside of graphs; an allgather's as if so many ranks had sent."""
    import tensorflow as tf

    inner = getattr(owner, name)

    def call(*args, **keywords):
        result = inner(*args, **keywords)
        if tf.executing_eagerly():
            if name == "allgather" and mocked:
                copies = [1 for _ in result.shape]
                copies[0] = mocked
                result = tf.tile(result, copies)
            exchanged(result.numpy().nbytes)
        return result

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
    # Of variables.
    count(functions, "broadcast", mocked=mocked, exchanged=watch.exchanged)
    mpi = messages.Mpi  # what Horovod does not carry
    after(mpi, "largest", lambda s, _, numbers: watch.exchanged(8 * len(numbers)))
    after(
        mpi, "gather", lambda s, _, own, ranks: watch.exchanged((8 + own.size) * ranks)
    )
    after(mpi, "broadcast", lambda s, _, part, *rest: watch.exchanged(part.size))
    after(health.Pace, "add", watch.judged)
    after(actions.Log, "__call__", watch.logged)
    after(actions.Save, "__call__", watch.saved)
    summarize = loop.Run._summarize

    def watched_summarize(run, ended):
        watch.ended(run.world)
        return summarize(run, ended)

    loop.Run._summarize = watched_summarize
    if mocked:
        be_one_of(mocked)
    return hvdkit.main(train.train, train.Settings, ["train.py", *flags])


def be_one_of(ranks: int) -> None:
    """Makes this process rank 0 of so many, with a sample for each."""
    from hvdkit.ranks import proof
    from hvdkit.ranks import world as world_lib
    from tasks import blank

    connect = world_lib.connect
    numbers = blank.numbers
    sign = proof.sign

    def connect_as_one_of(limit):
        connect()
        return world_lib.World(0, ranks, 0, 1)

    def numbers_for_all(split, samples, classes):
        return numbers(split, max(samples, ranks), classes)

    def sign_as_rank_0(key, rank):
        return sign(key, 0)  # the others answer what this one says

    world_lib.connect = connect_as_one_of
    blank.numbers = numbers_for_all
    proof.sign = sign_as_rank_0


def held() -> dict[str, float]:
    """Resident memory and open files of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    megabytes = pages * os.sysconf("SC_PAGESIZE") / 1e6
    return {"MB": megabytes, "files": len(os.listdir("/proc/self/fd"))}


def written(folder: Path) -> dict[str, int]:
    """Bytes by kind of record."""
    sizes: collections.Counter[str] = collections.Counter()
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        name = path.relative_to(folder).parts[0]
        sizes[name if name in _WRITTEN else "other"] += path.stat().st_size
    return sizes


if __name__ == "__main__":
    main()
