"""What is wrong with the network between the hosts. No rank is asked here."""

from __future__ import annotations

import collections
import ipaddress
import math
import statistics
from typing import Any

from . import links as ways
from . import nccl, network
from .findings import Facts, Finding, leaders, note, place, wrong


def own_names(facts: list[Facts | None], via: str) -> list[Finding]:
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
            what = f"its own name {name} resolves to {gets}, which no interface there has"
        else:
            continue
        gloo = via == "Gloo"
        found.append(wrong(where, what, todo, fatal=True) if gloo else note(where, what, todo))
    return found


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def uses_nccl(fact: Facts, device: str) -> bool:
    built = fact.get("libraries", {}).get("NCCL (Horovod)") == "yes"
    return built and device != "cpu" and fact.get("tensorflow", {"gpus": 0})["gpus"] > 0


def named(facts: list[Facts | None], via: str, options: Any) -> list[Finding]:
    """Interfaces that were asked for by name, on hosts that have no such one."""
    found = []
    for rank in leaders(facts).values():
        fact = facts[rank]
        there, asked = fact["interfaces"], {}
        if options.interface:
            asked["--interface"] = options.interface.split(",")
        if via == "Gloo" and "HOROVOD_GLOO_IFACE" in fact["environment"]:
            asked["HOROVOD_GLOO_IFACE"] = [fact["environment"]["HOROVOD_GLOO_IFACE"]]
        sound = {n for n, its in there.items() if its} - set(fact["down"])
        lacking = {n: why for why, its in asked.items() for n in its if n not in sound}
        nccl_asked = fact["environment"].get("NCCL_SOCKET_IFNAME", "")
        if uses_nccl(fact, options.device) and not nccl.would_take(nccl_asked, there, fact["down"]):
            lacking.setdefault(nccl_asked, "NCCL_SOCKET_IFNAME")
        for name, why in lacking.items():
            state = "is down" if name in fact["down"] else "is not there, or has no address"
            has = ", ".join(f"{name} ({there[name][0]})" for name in sorted(sound))
            todo = f"name one that every host has; there: {has}"
            what = f"the interface {name} ({why}) {state}"
            found.append(wrong(place(facts, [rank]), what, todo, fatal=True))
    return found


def others_addresses(fact: Facts) -> list[str]:
    """Those by which other hosts might want to reach it, without the one that they are given."""
    every = (a for its in fact["interfaces"].values() for a in its)
    return [a for a in every if network.is_for_others(a) and a != fact["address"]][:16]


def interfaces(
    facts: list[Facts | None],
    hosts: list[int],
    unreached: list[list[Any]],
    via: str,
    options: Any,
) -> list[Finding]:
    """Interfaces that a library may choose by itself, and that lead to no other host.

    Args:
      hosts: the rank that looked, by position.
      unreached: (position of who tried, of whose door it was, address) where none answered.
    """
    vain = collections.defaultdict(set)
    for own, other, address in unreached:
        vain[other, address].add(own)
    everyone = range(len(hosts))
    closed = {
        (other, address)
        for (other, address), askers in vain.items()
        if askers == {own for own in everyone if other in ways.asked_by(own, len(hosts))}
    }
    seen = collections.defaultdict(dict)  # (interface, who takes it, level) -> rank -> address
    for position, rank in enumerate(hosts):
        there = facts[rank]["interfaces"]
        for name, addresses in there.items():
            its = [a for a in addresses if network.is_for_others(a)]
            if its and all((position, a) in closed for a in its):
                for taker, level in _takers(name, facts[rank], via, options):
                    seen[name, taker, level][rank] = its[0]
    found = []
    for (name, taker, level), addresses in seen.items():
        right = _interface_of(facts[min(addresses)])
        what = f"{taker} may choose {name} ({', '.join(sorted(set(addresses.values()))[:4])})"
        what += ", by which no other host can reach it"
        if len(addresses) > 1 and len(set(addresses.values())) == 1:
            what += " (all have the same address)"
        todo = f"name the right one: --interface {right} (NCCL_SOCKET_IFNAME, btl_tcp_if_include)"
        found.append(Finding(level, place(facts, sorted(addresses)), what, todo))
    return found


def _takers(name: str, fact: Facts, via: str, options: Any) -> list[tuple[str, str]]:
    """Who would use the interface, and how bad that is."""
    settings, found = fact["environment"], []
    if via == "Gloo" and settings.get("HOROVOD_GLOO_IFACE") == name:
        found.append(("Gloo", "wrong"))
    asked, there = settings.get("NCCL_SOCKET_IFNAME", ""), fact["interfaces"]
    chosen = nccl.would_take(asked, there, fact["down"])
    if uses_nccl(fact, options.device) and name in chosen:
        found.append(("NCCL", "wrong"))
    # Its files of settings, which nobody reads here, may say otherwise.
    limits = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude", "OMPI_MCA_btl")
    if via == "MPI" and not any(limit in settings for limit in limits):
        found.append(("Open MPI", "note"))
    return found


def _interface_of(fact: Facts) -> str:
    its = [name for name, there in fact["interfaces"].items() if fact["address"] in there]
    return its[0] if its else "NAME"


def fabric(facts: list[Facts | None], taken: list[Any], options: Any) -> list[Finding]:
    """NCCL on TCP where there is something faster.

    Args:
      taken: by rank, {"network", "excuse"} as NCCL's log told it.
    """
    if len(leaders(facts)) == 1:
        return []  # what it took is not used
    seen = collections.defaultdict(list)
    for rank, its in enumerate(taken):
        ports = [p for p in facts[rank]["fabric"] if p["state"] == "ACTIVE"]
        if not ports or not its or not uses_nccl(facts[rank], options.device):
            continue
        kinds = sorted({port["kind"] for port in ports})
        if not its["network"]:
            seen[f"it is not known which network NCCL took: {its['excuse']}", "note", ""] += [rank]
        elif nccl.is_plain(its["network"]):
            what = f"{' and '.join(kinds)} is there, but NCCL took TCP ({its['network']})"
            # A plain Ethernet card often tells of RoCE that its network does not carry.
            level = "note" if kinds == ["RoCE"] else "wrong"
            seen[what, level, _way_to_fabric(facts[rank], kinds)] += [rank]
    return [
        Finding(level, place(facts, ranks), what, todo or "run it again so that it is")
        for (what, level, todo), ranks in seen.items()
    ]


def _way_to_fabric(fact: Facts, kinds: list[str]) -> str:
    settings = fact["environment"]
    if not fact["verbs"]:
        return "no program can open /dev/infiniband/uverbs* there: docker run --device, or rights"
    for name in ("NCCL_NET", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "FI_PROVIDER"):
        if name in settings:
            return f"{name}={settings[name]} may be why: unset it"
    if "EFA" in kinds:
        return "put the aws-ofi-nccl plugin (libnccl-net.so) and libfabric into the image"
    return "libibverbs must be installed there; NCCL_DEBUG=INFO says more"


def bandwidth(rows: list[dict[str, Any]], least: float) -> list[Finding]:
    """`least` in GB/s of the largest allreduce; 0 judges nothing."""
    reached = [row for row in rows if row["op"] == "allreduce"]
    if not least:
        return []
    if not reached:
        todo = "start at least two ranks"
        return [note("all ranks", "--min_busbw was not looked at: one rank sends nothing", todo)]
    largest = max(reached, key=lambda row: row["bytes"])
    rate = largest["busbw"] / 1e9
    if rate >= least:
        return []
    what = f"an allreduce of {largest['bytes'] >> 20} MB has a bus bandwidth of {rate:.3g} GB/s, "
    what += f"less than --min_busbw={least:g}"
    todo = "look at the links, at the network that NCCL took, at NVLink; larger sizes: --full"
    return [wrong("all ranks", what, todo)]


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
