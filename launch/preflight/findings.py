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
# Bytes a second that one rank sends by TCP without NCCL, on any faster link.
_MPI_RATE = 1.25e9
_SLOW = 4  # a pair with so many times less bandwidth than the fast pairs is slow
_MOST_RANKS_SHOWN = 8
_MOST_HOSTS_SHOWN = 6


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
    """Names hosts and ranks: `node2 (rank 2, 3)`; `hosts`: of each rank, as far as known."""
    ranks_by_host = collections.defaultdict(list)
    for rank in ranks:
        host = hosts[rank] if rank < len(hosts) else "unknown host"
        ranks_by_host[host].append(rank)
    shown = []
    for host, local_ranks in ranks_by_host.items():
        numbers = [str(rank) for rank in local_ranks[:_MOST_RANKS_SHOWN]]
        if len(local_ranks) > _MOST_RANKS_SHOWN:
            numbers.append("...")
        shown.append(f"{host} (rank {', '.join(numbers)})")
    if len(shown) > _MOST_HOSTS_SHOWN:
        hidden = len(shown) - _MOST_HOSTS_SHOWN
        shown[_MOST_HOSTS_SHOWN:] = [f"and {hidden} more hosts"]
    return "; ".join(shown)


def leaders(hosts: Sequence[str]) -> list[int]:
    """The lowest rank on each host."""
    return [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]


def missing(gone: Sequence[int], hosts: Sequence[str], seconds: float) -> Finding:
    """Ranks that did not report; `hosts`: of each rank, or empty if unknown."""
    what = f"no report in {seconds:.0f} s: the process did not start, hangs or cannot reach rank 0"
    todo = (
        "look for its own error above; on that host, check its disks, that Python and this file "
        "are at the same path, firewalls, the network that MPI takes (hosts.sh --interface)"
    )
    return Finding(place(hosts, gone), what, todo, "fatal")


def of_facts(facts: Sequence[Facts], device: str) -> list[Finding]:
    """Faults of single ranks, and differences in what should be alike."""
    hosts = [fact["host"] for fact in facts]
    wanted = device == "gpu" or any(fact.get("gpus", {}).get("seen") for fact in facts)
    ranks_by_fault = collections.defaultdict(list)
    for host in dict.fromkeys(hosts):
        local_ranks = [rank for rank, other in enumerate(hosts) if other == host]
        visible = [facts[rank].get("gpus", {}).get("each", []) for rank in local_ranks]
        for rank, gpu in zip(local_ranks, choose_gpus(visible)):
            for fault in facts[rank]["faults"]:
                ranks_by_fault[tuple(fault)].append(rank)
            gpus = facts[rank].get("gpus", {})
            if "seen" in gpus:
                fault = gpu_fault(gpus, gpu, wanted)
                if fault:
                    ranks_by_fault[fault].append(rank)

    found = []
    for (what, todo, level), ranks in ranks_by_fault.items():
        found.append(Finding(place(hosts, ranks), what, todo, level))
    names: set[str] = set()
    for fact in facts:
        names.update(fact["alike"])
    for name in sorted(names):
        found += _alike(name, facts, hosts)
    return found


def gpu_fault(gpus: Facts, gpu: int, wanted: bool) -> tuple[str, str, str] | None:
    """If training would refuse this rank, or compute on a CPU beside an idle GPU.

    `gpus`: what `facts.gpus_of_driver` and `gpus_of_tensorflow` return; `gpu`: the one that
    training would take, -1 if other ranks take all; `wanted`: --device=gpu, or another rank has
    one.
    """
    count = gpus["seen"]
    shown = gpus["shown"]
    if not count and (shown or wanted):
        if gpus["cuda"]:
            return (
                f"TensorFlow sees no GPU, the driver shows {shown}",
                "look at the driver, CUDA_VISIBLE_DEVICES and what TensorFlow says at its import; "
                "to train on CPUs: --device=cpu",
                "wrong",
            )
        return (
            f"TensorFlow sees no GPU, the driver shows {shown}: it is the CPU build",
            "install the GPU build there (make setup DEVICE=gpu); to train on CPUs: --device=cpu",
            "wrong",
        )
    if count and gpu < 0:
        what = f"other ranks there take all of the {count} visible GPU(s)"
        return (
            what,
            "start at most one rank a GPU, or see CUDA_VISIBLE_DEVICES",
            "fatal",
        )
    if count and not gpus["nccl"]:
        what = "Horovod is built without NCCL: gradients would go through the hosts' memory"
        return what, "build it for GPUs: make setup DEVICE=gpu", "note"
    return None


def _alike(name: str, facts: Sequence[Facts], hosts: Sequence[str]) -> list[Finding]:
    """Ranks whose value is not the commonest one (in a tie, the lowest rank's)."""
    ranks_by_value = collections.defaultdict(list)
    for rank, fact in enumerate(facts):
        if name in fact["alike"]:
            ranks_by_value[fact["alike"][name]].append(rank)
    usual = max(ranks_by_value, key=lambda value: len(ranks_by_value[value]))
    todo = "make it the same on all hosts: one image, or one folder on a shared disk"
    level = "note" if "GPU" in name else "wrong"  # GPUs of several kinds may be meant
    found = []
    for value, ranks in ranks_by_value.items():
        if value != usual:
            what = f"{name} is {value}, elsewhere {usual}"
            found.append(Finding(place(hosts, ranks), what, todo, level))
    return found


def of_views(
    facts: Sequence[Facts], views: dict[int, Facts], run_dir: str
) -> list[Finding]:
    """Hosts that do not reach each other, see another run folder, or resolve names wrongly.

    `views`, by the first rank of each host: "closed", the number of each host that it does not
    reach (0 is that of rank 0) and which addresses failed, why; "names", for each host its name,
    whether the launcher was given that name, and what `facts.resolve` returns; "mark", whether
    rank 0's file in the run folder is there.
    """
    hosts = [fact["host"] for fact in facts]
    firsts = leaders(hosts)
    found = []
    for rank, view in views.items():
        for host_number, failures in view["closed"]:
            way = f"{place(hosts, [rank])} to {place(hosts, [firsts[host_number]])}"
            todo = "open all TCP ports between the hosts, or name their network: --interface"
            found.append(Finding(way, f"no connection to {failures}", todo, "fatal"))
    without_mark = [rank for rank, view in views.items() if not view["mark"]]
    if without_mark:
        what = f"the run folder {run_dir} is not the one that rank 0 has"
        todo = "fine while rank 0 stays on its host; put it on a shared disk to resume elsewhere"
        found.append(Finding(place(hosts, without_mark), what, todo, "note"))
    return found + _names(facts, views, hosts)


def _names(
    facts: Sequence[Facts], views: dict[int, Facts], hosts: list[str]
) -> list[Finding]:
    """Names that do not resolve, or to another host.

    ssh and MPI's daemons use the names that the launcher was given; a host's own name is a guess.
    """
    # By what goes wrong and its level: names, and the ranks that see it.
    names_by_fault: dict[tuple[str, str], dict[str, list[int]]] = {}
    for rank, view in views.items():
        for other, (name, given, (addresses, reason)) in zip(
            leaders(hosts), view["names"]
        ):
            if other == rank or set(facts[other]["every_address"]).intersection(
                addresses
            ):
                continue
            fault = f"does not resolve: {reason}"
            if addresses:
                expected = place(hosts, [other])
                fault = f"resolves to {', '.join(addresses)}, no address of {expected}"
            level = "wrong" if given else "note"
            ranks_by_name = names_by_fault.setdefault((fault, level), {})
            ranks_by_name.setdefault(name, []).append(rank)

    found = []
    for (fault, level), ranks_by_name in names_by_fault.items():
        shown = list(ranks_by_name)[:_MOST_HOSTS_SHOWN]
        if len(ranks_by_name) > _MOST_HOSTS_SHOWN:
            shown.append("...")
        names = ", ".join(shown)
        ranks: set[int] = set()
        for seen_by in ranks_by_name.values():
            ranks.update(seen_by)
        todo = f"in DNS or /etc/hosts there, give {names} the address that other hosts reach"
        found.append(
            Finding(
                place(hosts, sorted(ranks)), f"the name {names} {fault}", todo, level
            )
        )
    return found


def of_times(
    hosts: list[str], seen: dict[tuple[int, ...], list[Facts]]
) -> list[Finding]:
    """Sums that are wrong, and hosts or pairs of hosts that are slow.

    `hosts`: of each rank; `seen`: by the ranks of a pair (empty: all), `doctor.allreduce` of each.
    """
    found = []
    wrong: set[int] = set()
    for timed in seen.values():
        wrong.update(one["rank"] for one in timed if not one["right"])
    if wrong:
        todo = "do not train: look at Horovod's build and the network card"
        found.append(
            Finding(place(hosts, sorted(wrong)), "an allreduce's sum is wrong", todo)
        )

    rates = {pair: timed[0]["rate"] / 1e6 for pair, timed in seen.items() if pair}
    usual = 0.0
    if rates:
        usual = sorted(rates.values())[math.ceil(0.9 * (len(rates) - 1))]
    slow = {pair: rate for pair, rate in rates.items() if rate < usual / _SLOW}
    # A host that is slow with all others gets one line instead of one for each pair.
    for rank in leaders(hosts):
        pairs = [pair for pair in rates if rank in pair]
        if len(pairs) > 1 and slow.keys() >= set(pairs):
            slow[rank,] = max(slow.pop(pair) for pair in pairs)
    todo = "look at cable, port speed (ethtool), errors (ip -s link) and shaping (tc qdisc)"
    for ranks, rate in sorted(slow.items()):
        who = "between them" if len(ranks) > 1 else "with any other host"
        what = f"allreduce {who} reaches {rate:,.1f} MB/s, others {usual:,.1f} MB/s"
        found.append(Finding(place(hosts, ranks), what, todo, "note"))
    return found


def of_links(
    facts: Sequence[Facts], seen: dict[tuple[int, ...], list[Facts]]
) -> list[Finding]:
    """Allreduces between hosts that take long for the slowest of their links.

    `seen`: as in `of_times`; its "network" is what NCCL sends by, or "".
    """
    hosts = [fact["host"] for fact in facts]
    found = []
    for pair, timed in sorted(seen.items()):
        ranks = pair or leaders(hosts)
        if len({hosts[rank] for rank in ranks}) < 2:
            continue
        first = timed[0]
        seconds = first["seconds"]
        rate = first["rate"]
        slowest_link = min(
            _link(facts[rank], first.get("network", "")) for rank in ranks
        )
        if not slowest_link:
            continue
        expected = rate * seconds / slowest_link + _OVERHEAD
        if seconds < _SLOW * expected:
            continue
        what = (
            f"allreduce between them reaches {rate / 1e6:,.1f} MB/s, their link has "
            f"{slowest_link / 1e6:,.1f} MB/s"
        )
        todo = "look at cable, errors (ip -s link), shaping (tc qdisc), the network that is taken"
        found.append(Finding(place(hosts, ranks), what, todo, "note"))
    return found


def _link(fact: Facts, network: str) -> float:
    """Bytes a second that an allreduce may reach from there; 0: not known."""
    if network and not network.startswith("Socket"):
        return max(fact["cards"].values(), default=0.0)
    return fact["link"] if network else min(fact["link"], _MPI_RATE)


def of_nccl(facts: Sequence[Facts], timed: list[Facts]) -> list[Finding]:
    """Ranks whose NCCL sends by TCP where InfiniBand is there."""
    hosts = [fact["host"] for fact in facts]
    found = []
    for one in timed:
        cards = facts[one["rank"]]["cards"]
        if cards and one.get("network", "").startswith("Socket"):
            what = f"NCCL sends by {one['network']}, though InfiniBand is there: {', '.join(cards)}"
            todo = (
                "see why with NCCL_DEBUG=INFO; NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA must not "
                "leave it out; ibstat must show it as active; memory must be lockable (ulimit -l)"
            )
            found.append(Finding(place(hosts, [one["rank"]]), what, todo, "note"))
    return found
