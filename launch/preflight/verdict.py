"""From what all ranks saw to what is wrong: who, what, and what to do. No rank is asked here."""

from __future__ import annotations

import collections
import statistics
from typing import Any

from . import verdict_gpus, verdict_network
from .findings import Facts, Finding, leaders, note, place, places, usual_and_odd, wrong

GB = 1 << 30
_OTHER_FILES = 133
_BY_MPI = "or start the ranks over MPI (hosts.sh --mpi), where they have a few connections"


def before_horovod(facts: list[Facts | None], via: str, options: Any) -> list[Finding]:
    """What is wrong with the hosts, as far as it is known without a collective."""
    present = [rank for rank, fact in enumerate(facts) if fact]
    found = []
    for check in (imports, versions, data, environment):
        found += check(facts, present)
    found += limits(facts, via)
    found += verdict_network.own_names(facts, via) + verdict_network.named(facts, via, options)
    return found + verdict_gpus.judge(facts, present, options.device) + disks(facts, options)


def missing(
    facts: list[Facts | None], dealt: list[str], meeting: str, seconds: float
) -> list[Finding]:
    """Ranks that did not report.

    Args:
      dealt: the host of each rank, as the launcher dealt them; empty if that is not known.
      meeting: where ranks report.
      seconds: how long rank 0 looked there.
    """
    gone = [rank for rank, fact in enumerate(facts) if fact is None]
    if not gone:
        return []
    by_host = collections.defaultdict(list)
    for rank in gone:
        by_host[_host_of(rank, facts, dealt)].append(rank)
    return [
        wrong(
            places(by_host),
            f"nothing came from there in {seconds:.0f} s to {meeting}: the process did not start, "
            "hangs, or cannot reach that port",
            "look for its own error above; check that Python and this file are at the same path "
            "on that host, that its disks answer, and that no firewall is between",
            fatal=True,
        )
    ]


def _host_of(rank: int, facts: list[Facts | None], dealt: list[str]) -> str:
    """Ranks of one host follow each other: those who came tell who else should be beside them."""
    if len(dealt) > rank:
        return dealt[rank]
    for other, fact in enumerate(facts):
        if fact and 0 <= rank - other + fact["local_rank"] < fact["local_size"]:
            return fact["host"]
    return "unknown host"


def imports(facts, present) -> list[Finding]:
    return [
        wrong(
            place(facts, [rank]),
            f"cannot import {name}: {text}",
            f"install the requirements for {facts[rank]['program']} on that host",
            fatal=True,
        )
        for rank in present
        for name, text in facts[rank]["imports"].items()
    ]


def versions(facts, present) -> list[Finding]:
    """Everything that should be the same everywhere, and is not."""
    found = []
    tables = {rank: _should_be_the_same(facts[rank]) for rank in present}
    for name in sorted({name for table in tables.values() for name in table}):
        values = {rank: table.get(name, "not there") for rank, table in tables.items()}
        usual, odd = usual_and_odd(values)
        for value, ranks in odd.items():
            found.append(
                wrong(
                    place(facts, ranks),
                    f"{name} is {value}, elsewhere {usual}",
                    "make it the same on all hosts: one image, or one environment on a shared disk",
                )
            )
    return found


def _should_be_the_same(fact: Facts) -> dict[str, str]:
    gpus = fact["gpus"]
    devices = {"GPU driver": gpus["driver"], "kind of GPU": ", ".join(gpus["names"]) or "none"}
    active = [port["kind"] for port in fact["fabric"] if port["state"] == "ACTIVE"]
    for kind, count in collections.Counter(active).items():
        devices[f"number of active {kind} ports"] = str(count)
    return fact["versions"] | fact.get("libraries", {}) | devices


def data(facts, present) -> list[Finding]:
    listings = {rank: facts[rank]["data"] for rank in present if facts[rank]["data"]}
    found = []
    for rank, seen in listings.items():
        problem = seen.get("error") or ("it is empty" if not seen["files"] else "")
        if problem:
            found.append(
                wrong(
                    place(facts, [rank]),
                    f"the data folder {seen['path']}: {problem}",
                    "copy or mount it there (launch/stage.py copies it), or give --data_dir",
                )
            )
    sound = {
        rank: seen for rank, seen in listings.items() if seen.get("files") and "sha256" in seen
    }
    if sound:
        usual, odd = usual_and_odd({rank: seen["sha256"] for rank, seen in sound.items()})
        normal = next(seen for seen in sound.values() if seen["sha256"] == usual)
        for ranks in odd.values():
            seen = sound[ranks[0]]
            found.append(
                wrong(
                    place(facts, ranks),
                    f"the data folder {seen['path']} has other files: {seen['files']:,} of "
                    f"{seen['bytes']:,} bytes in all, elsewhere {normal['files']:,} of "
                    f"{normal['bytes']:,}",
                    "copy it again (launch/stage.py copies only what is missing)",
                )
            )
    return found


def disks(facts, options) -> list[Finding]:
    found = []
    least = {"the run folder": options.min_free_gb, "temporary files": 0.1, "/dev/shm": 0.25}
    for rank in leaders(facts).values():
        for use, seen in facts[rank]["disks"].items():
            if seen["error"]:
                what = f"{seen['path']} ({use}) cannot be written to: {seen['error']}"
            elif seen["free"] < least[use] * GB:
                what = f"{seen['path']} ({use}) has {seen['free'] / GB:.2f} GB free"
            else:
                continue
            todo = "free some space there, or choose another folder"
            if use == "/dev/shm":
                todo = "give it 1 GB or more (docker run --shm-size, a memory-backed volume)"
                todo += " with --gpus: NCCL and MPI exchange data through it"
            elif use == "temporary files":
                todo = "free some space there, or set TMPDIR"
            found.append(wrong(place(facts, [rank]), what, todo))
    return found


def limits(facts: list[Facts | None], via: str) -> list[Finding]:
    found = []
    # Over Gloo each rank has a connection with every other; the rest was counted on one rank.
    needed = len(facts) + _OTHER_FILES if via == "Gloo" else 0
    for rank in leaders(facts).values():
        seen, where = facts[rank]["limits"], place(facts, [rank])
        allowed = seen["open files"]
        if allowed is not None and allowed < needed:
            what = f"only {allowed} open files are allowed (ulimit -Hn), and each of {len(facts)} "
            what += f"ranks over Gloo needs {needed}"
            todo = f"allow 65536 (limits.conf, LimitNOFILE of sshd or slurmd); {_BY_MPI}"
            found.append(wrong(where, what, todo, fatal=True))
        elif allowed is not None and allowed < 4096:
            what = f"only {allowed} open files are allowed (ulimit -Hn)"
            found.append(note(where, what, "65536 is usual on a cluster: limits.conf, LimitNOFILE"))
        kinds = sorted({port["kind"] for port in facts[rank]["fabric"]})
        if kinds and seen["locked memory"] is not None:
            what = f"{' and '.join(kinds)} is there but locked memory is limited (ulimit -l)"
            todo = "make it unlimited (limits.conf, docker run --ulimit memlock=-1)"
            found.append(wrong(where, what, todo))
    return found


def environment(facts, present) -> list[Finding]:
    found = []
    tables = {rank: facts[rank]["environment"] for rank in present}
    for name in sorted({name for table in tables.values() for name in table}):
        values = {rank: table.get(name, "not set") for rank, table in tables.items()}
        usual, odd = usual_and_odd(values)
        for value, ranks in odd.items():
            what = f"{name} is {value}, elsewhere {usual}"
            found.append(note(place(facts, ranks), what, "set it the same everywhere"))
    slow = [r for r, t in tables.items() if t.get("TF_ENABLE_ONEDNN_OPTS") == "0"]
    if slow and not any(facts[rank]["gpus"]["visible"] for rank in present):
        what = "TF_ENABLE_ONEDNN_OPTS=0 turns TensorFlow's fast CPU kernels off"
        found.append(note(place(facts, slow), what, "unset it for the ranks"))
    return found


def run_folder(facts: list[Facts | None], sees: dict[int, bool], run_dir: str) -> list[Finding]:
    """`sees`: by the first rank of each host, whether a file that rank 0 left there is seen."""
    blind = [rank for rank, seen in sees.items() if not seen]
    if not blind:
        return []
    return [
        note(
            place(facts, blind),
            f"the run folder {run_dir} is not the one that rank 0 has",
            "fine while rank 0 stays on its host; put it on a shared disk to go on elsewhere",
        )
    ]


def clocks(facts: list[Facts | None], differences: list[float], most: float) -> list[Finding]:
    """A whole host is wrong, not a rank; the clock that most hosts agree on is right."""
    hosts = leaders(facts)
    right = statistics.median_low([differences[rank] for rank in hosts.values()])
    found = []
    for rank in hosts.values():
        off = differences[rank] - right
        if abs(off) > most:
            side = "ahead of" if off > 0 else "behind"
            what = f"its clock is {abs(off):.1f} s {side} the others"
            found.append(wrong(place(facts, [rank]), what, "start chrony or ntpd on that host"))
    return found


def results(facts: list[Facts | None], wrong_by_rank: list[list[str]]) -> list[Finding]:
    return [
        wrong(
            place(facts, [rank]),
            f"collectives went wrong: {'; '.join(texts[:4])}",
            "do not train: check that all hosts run the same Horovod build, and the network card",
        )
        for rank, texts in enumerate(wrong_by_rank)
        if texts
    ]
