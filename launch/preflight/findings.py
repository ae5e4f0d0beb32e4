"""Concludes from the facts of all ranks what is wrong: where, what, how to fix it."""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

try:
    from hvdkit.ranks.placement import choose_gpus
except ImportError:  # which `facts.import_faults` reports

    def choose_gpus(gpus: Sequence[Any]) -> list[int]:
        return [0] * len(gpus)


Facts = dict[str, Any]
_OVERHEAD = 0.002  # seconds of an allreduce in which nothing is sent
_OF_MPI = 1.25e9  # bytes a second that one rank sends by TCP without NCCL, on any faster link
_SLOW = 4  # how many times less bandwidth than the fast pairs of hosts is slow


@dataclasses.dataclass(frozen=True)
class Finding:
    """A note does not fail the preflight; after a fatal one, Horovod would crash or hang."""

    where: str
    what: str
    todo: str
    level: str = "wrong"  # or "note", "fatal"

    def __str__(self) -> str:
        level = "NOTE" if self.level == "note" else "WRONG"
        return f"{level}  {self.where}: {self.what}.\n       {self.todo}"


def place(hosts: Sequence[str], ranks: Sequence[int]) -> str:
    """As in `node2 (rank 2, 3)`; `hosts`: of each rank, as far as known."""
    by_host = collections.defaultdict(list)
    for rank in ranks:
        by_host[hosts[rank] if rank < len(hosts) else "unknown host"].append(rank)
    parts = []
    for host, its in by_host.items():
        parts.append(f"{host} (rank {', '.join(map(str, its[:8]))}{', ...' * (len(its) > 8)})")
    return "; ".join(parts[:6]) + (f"; and {len(parts) - 6} more hosts" if len(parts) > 6 else "")


def leaders(hosts: Sequence[str]) -> list[int]:
    """The lowest rank on each host."""
    return [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]


def missing(gone: Sequence[int], hosts: Sequence[str], seconds: float) -> Finding:
    """Ranks that did not report; `hosts`: of each rank, or empty if unknown."""
    what = f"no report in {seconds:.0f} s: the process did not start, hangs or cannot reach rank 0"
    todo = "look for its own error above; on that host, check its disks, that Python and this file "
    todo += "are at the same path, firewalls, the network that MPI takes (hosts.sh --interface)"
    return Finding(place(hosts, gone), what, todo, "fatal")


def of_facts(facts: Sequence[Facts], device: str) -> list[Finding]:
    """Faults of single ranks, and differences in what should be alike."""
    by_fault = collections.defaultdict(list)
    wanted = device == "gpu" or any(fact.get("gpus", {}).get("seen") for fact in facts)
    hosts = [fact["host"] for fact in facts]
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        each = [facts[rank].get("gpus", {}).get("each", []) for rank in ranks]
        for rank, gpu in zip(ranks, choose_gpus(each)):
            its = [tuple(fault) for fault in facts[rank]["faults"]]
            if "seen" in facts[rank].get("gpus", {}):
                its.append(gpu_fault(facts[rank]["gpus"], gpu, wanted))
            for fault in filter(None, its):
                by_fault[fault].append(rank)
    found = [Finding(place(hosts, ranks), *fault) for fault, ranks in by_fault.items()]
    for name in sorted({name for fact in facts for name in fact["alike"]}):
        found += _alike(name, facts, hosts)
    return found


def gpu_fault(its: Facts, gpu: int, wanted: bool) -> tuple[str, str, str] | None:
    """If training would refuse this rank, or compute on a CPU beside an idle GPU.

    `its`: what `facts.gpus_of_driver` and `gpus_of_tensorflow` return; `gpu`: the one that training
    would take, -1 if other ranks take all; `wanted`: --device=gpu, or
    another rank has one.
    """
    count, shown = its["seen"], its["shown"]
    if not count and (shown or wanted):
        what = f"TensorFlow sees no GPU, the driver shows {shown}"
        todo = "look at the driver, CUDA_VISIBLE_DEVICES and what TensorFlow says at its import"
        if not its["cuda"]:
            what += ": it is the CPU build"
            todo = "install the GPU build there (make setup DEVICE=gpu)"
        return what, f"{todo}; to train on CPUs: --device=cpu", "wrong"
    if count and gpu < 0:
        what = f"other ranks there take all of the {count} visible GPU(s)"
        return what, "start at most one rank a GPU, or see CUDA_VISIBLE_DEVICES", "fatal"
    if count and not its["nccl"]:
        what = "Horovod is built without NCCL: gradients would go through the hosts' memory"
        return what, "build it for GPUs: make setup DEVICE=gpu", "note"
    return None


def _alike(name: str, facts: Sequence[Facts], hosts: Sequence[str]) -> list[Finding]:
    """Ranks whose value is not the commonest one (in a tie, the lowest rank's)."""
    ranks = collections.defaultdict(list)
    for rank, fact in enumerate(facts):
        if name in fact["alike"]:
            ranks[fact["alike"][name]].append(rank)
    usual = max(ranks, key=lambda value: len(ranks[value]))
    todo = "make it the same on all hosts: one image, or one folder on a shared disk"
    level = "note" if "GPU" in name else "wrong"  # may be so by design
    return [
        Finding(place(hosts, its), f"{name} is {value}, elsewhere {usual}", todo, level)
        for value, its in ranks.items()
        if value != usual
    ]


def of_views(facts: Sequence[Facts], views: dict[int, Facts], run_dir: str) -> list[Finding]:
    """What the hosts see of each other.

    `views`, by the first rank of each host: "closed", from `ranks.closed`; "names", for each
    host its name, whether the launcher was given that name, and what `facts.resolve` returns;
    "mark", whether rank 0's file in the run folder is there.
    """
    hosts = [fact["host"] for fact in facts]
    firsts, found = leaders(hosts), []
    for rank, view in views.items():
        for other, why in view["closed"]:
            way = f"{place(hosts, [rank])} to {place(hosts, [firsts[other]])}"
            todo = "open all TCP ports between the hosts, or name their network: --interface"
            found.append(Finding(way, f"no connection to {why}", todo, "fatal"))
    if blind := [rank for rank, view in views.items() if not view["mark"]]:
        what = f"the run folder {run_dir} is not the one that rank 0 has"
        todo = "fine while rank 0 stays on its host; put it on a shared disk to resume elsewhere"
        found.append(Finding(place(hosts, blind), what, todo, "note"))
    return found + _names(facts, views, hosts)


def _names(facts: Sequence[Facts], views: dict[int, Facts], hosts: list[str]) -> list[Finding]:
    """Names that do not resolve, or to another host.

    ssh and MPI's daemons use the names that the launcher was given; a host's own name is a guess.
    """
    odd: dict[tuple[str, str], dict[str, list[int]]] = {}
    for rank, view in views.items():
        for other, (name, given, (addresses, why)) in zip(leaders(hosts), view["names"]):
            gets = f"resolves to {', '.join(addresses)}, no address of {place(hosts, [other])}"
            leads = gets if addresses else f"does not resolve: {why}"
            if other != rank and not set(facts[other]["every_address"]).intersection(addresses):
                level = "wrong" if given else "note"
                odd.setdefault((leads, level), {}).setdefault(name, []).append(rank)
    found = []
    for (leads, level), names in odd.items():
        shown = ", ".join(list(names)[:6]) + (", ..." if len(names) > 6 else "")
        where = place(hosts, sorted({rank for its in names.values() for rank in its}))
        todo = f"in DNS or /etc/hosts there, give {shown} the address that other hosts reach"
        found.append(Finding(where, f"the name {shown} {leads}", todo, level))
    return found


def of_times(hosts: list[str], seen: dict[tuple[int, ...], list[Facts]]) -> list[Finding]:
    """Sums that are wrong, and hosts or pairs of hosts that are slow.

    `hosts`: of each rank; `seen`: by the ranks of a pair (empty: all), `doctor.allreduce` of each.
    """
    wrong = sorted({one["rank"] for every in seen.values() for one in every if not one["right"]})
    todo = "do not train: look at Horovod's build and the network card"
    found = [Finding(place(hosts, wrong), "an allreduce's sum is wrong", todo)] if wrong else []
    rates = {pair: every[0]["rate"] / 1e6 for pair, every in seen.items() if pair}
    usual = sorted(rates.values())[math.ceil(0.9 * (len(rates) - 1))] if rates else 0.0
    slow = {pair: rate for pair, rate in rates.items() if rate < usual / _SLOW}
    for rank in leaders(hosts):  # a host with each of its pairs in one line
        its = [pair for pair in rates if rank in pair]
        if len(its) > 1 and slow.keys() >= set(its):
            slow[rank,] = max(slow.pop(pair) for pair in its)
    todo = "look at cable, port speed (ethtool), errors (ip -s link) and shaping (tc qdisc)"
    for ranks, rate in sorted(slow.items()):
        who = "between them" if len(ranks) > 1 else "with any other host"
        what = f"allreduce {who} reaches {rate:,.1f} MB/s, others {usual:,.1f} MB/s"
        found.append(Finding(place(hosts, ranks), what, todo, "note"))
    return found


def of_links(facts: Sequence[Facts], seen: dict[tuple[int, ...], list[Facts]]) -> list[Finding]:
    """Allreduces between hosts that take long for the slowest of their links.

    `seen`: as in `of_times`; its "network" is what NCCL sends by, or "".
    """
    hosts = [fact["host"] for fact in facts]
    found = []
    for pair, timed in sorted(seen.items()):
        ranks = pair or leaders(hosts)
        if len({hosts[rank] for rank in ranks}) < 2:
            continue
        links = [_link(facts[rank], timed[0].get("network", "")) for rank in ranks]
        seconds = timed[0]["seconds"]
        sent = timed[0]["rate"] * seconds
        if not min(links) or seconds < _SLOW * (sent / min(links) + _OVERHEAD):
            continue
        what = f"allreduce between them reaches {timed[0]['rate'] / 1e6:,.1f} MB/s, their link has "
        what += f"{min(links) / 1e6:,.1f} MB/s"
        todo = "look at cable, errors (ip -s link), shaping (tc qdisc), the network that is taken"
        found.append(Finding(place(hosts, ranks), what, todo, "note"))
    return found


def _link(fact: Facts, network: str) -> float:
    """Bytes a second that an allreduce may reach from there; 0: not known."""
    if network and not network.startswith("Socket"):
        return max(fact["cards"].values(), default=0.0)
    return fact["link"] if network else min(fact["link"], _OF_MPI)


def of_nccl(facts: Sequence[Facts], timed: list[Facts]) -> list[Finding]:
    """Ranks whose NCCL sends by TCP where InfiniBand is there."""
    hosts = [fact["host"] for fact in facts]
    found = []
    for one in timed:
        its = facts[one["rank"]]["cards"]
        if its and one.get("network", "").startswith("Socket"):
            what = f"NCCL sends by {one['network']}, though InfiniBand is there: {', '.join(its)}"
            todo = (
                "see why with NCCL_DEBUG=INFO; NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA must not "
            )
            todo += (
                "leave it out; ibstat must show it as active; memory must be lockable (ulimit -l)"
            )
            found.append(Finding(place(hosts, [one["rank"]]), what, todo, "note"))
    return found
