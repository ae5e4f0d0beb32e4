"""From what all ranks saw to what is wrong: who, what, and what to do. No rank is asked here."""

from __future__ import annotations

import collections
import dataclasses
import ipaddress
import math
import statistics
from typing import Any

Facts = dict[str, Any]
GB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Finding:
    """`wrong` fails the preflight; a note does not. `fatal`: Horovod would not come up."""

    level: str
    where: str
    what: str
    todo: str
    fatal: bool = False


def wrong(where: str, what: str, todo: str, fatal: bool = False) -> Finding:
    return Finding("wrong", where, what, todo, fatal)


def note(where: str, what: str, todo: str) -> Finding:
    return Finding("note", where, what, todo)


def place(facts: list[Facts | None], ranks: list[int]) -> str:
    """`node2 (rank 2, 3)`, for ranks of any number of hosts."""
    by_host = collections.defaultdict(list)
    for rank in ranks:
        fact = facts[rank]
        by_host[fact["host"] if fact else "unknown host"].append(rank)
    parts = []
    for host, its in by_host.items():
        shown = ", ".join(map(str, its[:8])) + (", ..." if len(its) > 8 else "")
        parts.append(f"{host} (rank {shown})")
    return "; ".join(parts[:6]) + (f"; and {len(parts) - 6} more hosts" if len(parts) > 6 else "")


def leaders(facts: list[Facts | None]) -> dict[str, int]:
    """The lowest rank on each host."""
    found: dict[str, int] = {}
    for rank, fact in enumerate(facts):
        if fact:
            found.setdefault(fact["host"], rank)
    return found


def before_horovod(facts: list[Facts | None], via: str, options: Any) -> list[Finding]:
    """What is wrong with the hosts, as far as it is known without a collective."""
    present = [rank for rank, fact in enumerate(facts) if fact]
    found = missing(facts)
    for check in (imports, versions, own_names, gpus, data, limits, environment):
        found += check(facts, present, via, options)
    return found + disks(facts, present, options)


def missing(facts: list[Facts | None]) -> list[Finding]:
    gone = [rank for rank, fact in enumerate(facts) if fact is None]
    if not gone:
        return []
    shown = ", ".join(map(str, gone[:16]))
    return [
        wrong(
            f"rank {shown}",
            "did not report: its process did not start, or cannot reach the launcher's port",
            "look for its own error above; check that Python and this file are at the same path "
            "on that host, and that no firewall is between",
            fatal=True,
        )
    ]


def imports(facts, present, via, options) -> list[Finding]:
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


def versions(facts, present, via, options) -> list[Finding]:
    """Everything that should be the same everywhere, and is not."""
    found = []
    tables = {rank: _should_be_the_same(facts[rank]) for rank in present}
    for name in sorted({name for table in tables.values() for name in table}):
        values = {rank: table.get(name, "not there") for rank, table in tables.items()}
        usual, odd = _usual_and_odd(values)
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
    return fact["versions"] | fact.get("libraries", {}) | devices


def _usual_and_odd(values: dict[int, Any]) -> tuple[Any, dict[Any, list[int]]]:
    """The commonest value (of a draw, the one with the lowest rank), and the others' ranks."""
    ranks = collections.defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    usual = max(ranks, key=lambda value: (len(ranks[value]), -ranks[value][0]))
    return usual, {value: its for value, its in ranks.items() if value != usual}


def own_names(facts, present, via, options) -> list[Finding]:
    """Gloo listens where a host's own name points to: other hosts must reach that."""
    found = []
    hosts = leaders(facts)
    if len(hosts) == 1:
        return []
    for rank in hosts.values():
        names, where = facts[rank]["names"], place(facts, [rank])
        name, gets = names["name"], ", ".join(names["addresses"])
        todo = f"in that host's /etc/hosts, give {name} the address {facts[rank]['address']}"
        own = {a for addresses in facts[rank]["interfaces"].values() for a in addresses}
        if not names["addresses"]:
            what = f"its own name {name} does not resolve: {names['error']}"
        elif _is_loopback(names["addresses"][0]):
            what = f"its own name {name} resolves to {gets}, which no other host can reach"
            todo += ", and take the name off the line of 127.0.x.x"
        elif names["addresses"][0] not in own:
            what = f"its own name {name} resolves to {gets}, which is no address of its own"
        else:
            continue
        gloo = via == "Gloo"
        found.append(wrong(where, what, todo, fatal=True) if gloo else note(where, what, todo))
    return found


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def gpus(facts, present, via, options) -> list[Finding]:
    found = []
    somewhere = any(facts[rank]["gpus"]["visible"] for rank in present)
    for host, rank in leaders(facts).items():
        seen = facts[rank]["gpus"]
        its = [r for r in present if facts[r]["host"] == host]
        if seen.get("error"):
            found.append(
                wrong(
                    place(facts, [rank]),
                    f"nvidia-smi fails: {seen['error']}",
                    "look at the driver on that host (dmesg, nvidia-smi)",
                )
            )
        elif not somewhere:
            continue
        elif not seen["visible"]:
            found.append(
                wrong(
                    place(facts, its),
                    "no GPU is visible there, other hosts have some",
                    "look at CUDA_VISIBLE_DEVICES and at what the scheduler granted",
                )
            )
        elif len(its) > seen["visible"]:
            found.append(
                wrong(
                    place(facts, its),
                    f"{len(its)} ranks but {seen['visible']} visible GPU(s)",
                    f"start at most {seen['visible']} ranks there, or see CUDA_VISIBLE_DEVICES",
                )
            )
    return found


def data(facts, present, via, options) -> list[Finding]:
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
        usual, odd = _usual_and_odd({rank: seen["sha256"] for rank, seen in sound.items()})
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


def disks(facts, present, options) -> list[Finding]:
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


def limits(facts, present, via, options) -> list[Finding]:
    found = []
    for rank in leaders(facts).values():
        seen, where = facts[rank]["limits"], place(facts, [rank])
        if seen["open files"] < 4096:
            what = f"only {seen['open files']:.0f} open files are allowed (ulimit -n)"
            found.append(note(where, what, "65536 is usual on a cluster: limits.conf, LimitNOFILE"))
        if facts[rank]["infiniband"] and seen["locked memory"] != float("inf"):
            what = "InfiniBand is there but locked memory is limited (ulimit -l)"
            todo = "make it unlimited (limits.conf, docker run --ulimit memlock=-1)"
            found.append(wrong(where, what, todo))
    return found


def environment(facts, present, via, options) -> list[Finding]:
    found = []
    tables = {rank: facts[rank]["environment"] for rank in present}
    for name in sorted({name for table in tables.values() for name in table}):
        values = {rank: table.get(name, "not set") for rank, table in tables.items()}
        usual, odd = _usual_and_odd(values)
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


def links(
    facts: list[Facts | None], pairs: list[dict[str, Any]], hosts: list[int], factor: float
) -> list[Finding]:
    """Directions that are `factor` times slower than the fast ones, put down to a host if to all.

    Args:
      hosts: the rank that measured, by position on the list that pairs refer to.
    """
    found, rates = [], {}
    for pair in pairs:
        first, second = pair["pair"]
        if "error" in pair:
            found.append(
                wrong(
                    f"{place(facts, [hosts[first]])} to {place(facts, [hosts[second]])}",
                    f"no connection to {pair['error']}",
                    "open all TCP ports between the hosts, or name the right --interface",
                    fatal=True,
                )
            )
            continue
        rates[first, second], rates[second, first] = pair["there"], pair["back"]
    if not rates:
        return found
    usual = sorted(rates.values())[math.ceil(0.9 * (len(rates) - 1))]
    slow = {way for way, rate in rates.items() if rate < usual / factor}
    for host in range(len(hosts)):
        for end, verb in ((0, "sends"), (1, "receives")):
            ways = {way for way in rates if way[end] == host}
            # With two hosts, a slow direction is as much the one's as the other's.
            if len(ways) > 1 and ways <= slow:
                rate = statistics.median(rates[way] for way in ways)
                what = f"{verb} at {_rate(rate)} to or from every host, others reach {_rate(usual)}"
                found.append(wrong(place(facts, [hosts[host]]), what, _LOOK_AT_LINK))
                slow -= ways
    for way in sorted(slow):
        a, b = (place(facts, [hosts[end]]) for end in way)
        what = f"{_rate(rates[way])} from the first to the second, others reach {_rate(usual)}"
        found.append(wrong(f"{a} to {b}", what, _LOOK_AT_LINK))
    return found


_LOOK_AT_LINK = (
    "look at its cable, port speed (ethtool), errors (ip -s link) and shaping (tc qdisc)"
)


def _rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e6:.1f} MB/s"


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
