#!/usr/bin/env python3
"""Preflight: checks every host before a long run, and names host, rank and fix of each problem.

Run it like the training, with the same launcher, hosts and folders:

    launch/hosts.sh -H node1:4,node2:4 python launch/doctor.py --data_dir=DATA --run_dir=RUN
    horovodrun -np 8 -H node1:4,node2:4 python launch/doctor.py --full

Exit code 0: no problem (notes may remain); 1: the last lines say which host, which rank, what is
wrong and how to fix it. Problems that would keep Horovod from starting are found before Horovod is
started. Every check has a time limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from preflight import (
    collectives,
    exchange,
    facts,
    findings,
    gpus,
    links,
    nccl,
    network,
    report,
    verdict,
    verdict_network,
)
from preflight.exchange import Exchange, watch

MB = 1 << 20


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data_dir", default="", help="data folder of the run; each host opens it")
    add("--run_dir", default="", help="run folder of the run")
    add("--interface", default="", help="network interface between hosts; default: Horovod's")
    add("--device", default="auto", choices=("auto", "gpu", "cpu"), help="as in training")
    add("--json", default="", metavar="FILE", help="write all findings as JSON; -: standard output")
    add("--full", action="store_true", help="also allgather and broadcast, sizes up to 256 MB")
    add("--max_mb", type=int, default=16, help="largest allreduce to time, MB (default 16)")
    add(
        "--min_busbw",
        type=float,
        default=0.0,
        help="smallest acceptable bus bandwidth of the largest allreduce, GB/s; 0: any",
    )
    add("--no_collectives", action="store_true", help="stop before starting Horovod")
    add("--min_free_gb", type=float, default=1.0, help="free space that the run folder needs")
    add("--max_clock_s", type=float, default=1.0, help="largest acceptable clock difference")
    add("--slow_factor", type=float, default=4.0, help="report links this many times slower")
    add(
        "--link_seconds",
        type=float,
        default=0.3,
        help="seconds for each measurement of each direction of a link",
    )
    add("--timeout", type=float, default=120.0, help="seconds after which a stage counts as hung")
    options = parser.parse_args(argv)
    if options.min_busbw and options.no_collectives:
        parser.error("--min_busbw wants the collectives that --no_collectives leaves out")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    # A name of a file or a variable may hold bytes that are no text.
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.stderr.reconfigure(errors="backslashreplace")
    with watch("looking at its own host", options.timeout, "a disk, a mount or nvidia-smi hangs"):
        own = facts.collect(options.data_dir, options.run_dir, options.interface, options.device)
        if not own["imports"]:
            own["libraries"] = facts.library_versions()
            own["tensorflow"] = gpus.tensorflow()
    if exchange.launcher() == "srun":
        print("error: srun started this without an MPI world: use srun --mpi=pmix", file=sys.stderr)
        return 1
    record: dict[str, Any] = {"findings": []}
    try:
        with watch("reaching the other ranks", options.timeout, _which_interface(own)):
            others = exchange.connect()
        examine(others, own, options, record)
        with watch("waiting for rank 0", options.timeout, "look at its host"):
            failed = show(record, others, options) if others.rank == 0 else None
            return int(others.broadcast("verdict", failed, options.timeout))
    except exchange.Failed as error:
        print(*known(record), f"error: {error}", sep="\n", file=sys.stderr, flush=True)
        return 1


def _which_interface(own: dict[str, Any]) -> str:
    inner = network.inner(own["interfaces"])
    mostly = f": {inner} on this host most likely leads to no other" if inner else ""
    return f"look at firewalls, name the right --interface{mostly}"


def known(record: dict[str, Any]) -> list[str]:
    """What was found until now, for an early end."""
    found = record["findings"]
    return [report.findings(found)] if found else []


def examine(
    others: Exchange, own: dict[str, Any], options: argparse.Namespace, record: dict[str, Any]
) -> None:
    """All stages; on rank 0 `record` gets what was seen."""
    mark = f".doctor-{uuid.uuid4().hex}"
    door = links.Door()
    own["door"] = [door.port, door.token]
    if others.rank == 0 and options.run_dir:
        facts.leave_mark(options.run_dir, mark)

    # Rank 0 looks for the others' facts for one time-out, so they wait longer for what follows;
    # MPI does not look, and all of its ranks have come when one is here.
    patience = options.timeout * (1 if others.name == "MPI" else 3)
    with watch("telling rank 0 what it saw", patience, _which_interface(own)):
        everyone = others.gather("facts", own, options.timeout)
        plan: dict[str, Any] = {}
        if others.rank == 0:
            plan = _plan(everyone, others, options, record) | {"mark": mark}
        plan = others.broadcast("plan", plan, 2 * options.timeout)

    go_on = False
    if plan["everyone_came"]:
        go_on = _test_links(others, plan, door, options, record)
    if others.rank == 0 and options.run_dir:
        facts.remove_mark(options.run_dir, mark)
    door.close()
    if go_on:
        _test_collectives(others, options, record)


def _plan(
    everyone: list[Any], others: Exchange, options: argparse.Namespace, record: dict[str, Any]
) -> dict[str, Any]:
    """On rank 0: judges the facts; what all ranks must know for the next stage."""
    findings.tell_apart(everyone)
    doors = {rank: its.pop("door") for rank, its in enumerate(everyone) if its}
    record |= {"facts": everyone, "pairs": [], "speeds": [], "clocks": None, "networks": []}
    gone = verdict.missing(everyone, exchange.dealt(), others.meeting, options.timeout)
    record["findings"] += gone + verdict.before_horovod(everyone, others.name, options)
    record["hosts"] = list(findings.leaders(everyone).values())
    theirs = [everyone[rank] for rank in record["hosts"]]
    places = [(everyone[rank]["address"], *doors[rank]) for rank in record["hosts"]]
    return {
        "everyone_came": not gone,
        "leaders": record["hosts"],
        "places": places,
        "addresses": [verdict_network.others_addresses(its) for its in theirs],
    }


def _test_links(
    others: Exchange,
    plan: dict[str, Any],
    door: links.Door,
    options: argparse.Namespace,
    record: dict[str, Any],
) -> bool:
    """Hosts with each other; a rank that is not its host's first only waits."""
    rounds = links.rounds(len(plan["leaders"]))
    limit = options.timeout + (len(rounds) + 1) * (4 * options.link_seconds + 5)
    advice = "look at the findings of other ranks"
    with watch("testing links between hosts", limit, advice, lambda: "\n".join(known(record))):
        seen, closed = _look_around(others, plan, door, options, limit)
        views = others.gather("views", seen, limit)
        go_on = None
        if others.rank == 0:
            record["pairs"] = [p for view in views if view for p in view.get("pairs", [])]
            record["closed"] = closed
            go_on = _judge_links(record, views, others.name, options)
        return others.broadcast("go_on", go_on, limit)


def _look_around(
    others: Exchange,
    plan: dict[str, Any],
    door: links.Door,
    options: argparse.Namespace,
    limit: float,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What this rank sees of other hosts, and (the same on all ranks) which ways are closed."""
    leaders, places, seen = plan["leaders"], plan["places"], {}
    position = leaders.index(others.rank) if others.rank in leaders else None
    failed = links.knock(position, places) if position is not None else []
    everyone = others.gather("knocks", failed, limit)
    closed = others.broadcast("closed", [way for its in everyone for way in its or []], limit)
    if position is not None:
        seen["unreached"] = links.unreached(position, places, plan["addresses"])
        ways = {tuple(way["pair"]) for way in closed}
        seen["pairs"] = links.measure(door, position, places, ways, options.link_seconds)
        if options.run_dir:
            seen["mark"] = facts.sees_mark(options.run_dir, plan["mark"])
    return seen, closed


def _judge_links(
    record: dict[str, Any], views: list[Any], via: str, options: argparse.Namespace
) -> bool:
    """On rank 0; returns whether Horovod can be started."""
    everyone, hosts, found = record["facts"], record["hosts"], record["findings"]
    pairs = record["closed"] + record["pairs"]
    found += verdict_network.links(everyone, pairs, hosts, options.slow_factor)
    record["unreached"] = unreached = [
        way for view in views if view for way in view.get("unreached", [])
    ]
    found += verdict_network.interfaces(everyone, hosts, unreached, via, options)
    sees = {rank: v["mark"] for rank, v in enumerate(views) if v and "mark" in v}
    found += verdict.run_folder(everyone, sees, options.run_dir)
    return not options.no_collectives and not any(f.fatal for f in found)


def _test_collectives(
    others: Exchange, options: argparse.Namespace, record: dict[str, Any]
) -> None:
    own = run_collectives(others.rank, options, lambda: "\n".join(known(record)))
    # Not by Horovod, which may be what is wrong.
    with watch("telling rank 0 what came out", options.timeout, "look at the other ranks"):
        seen = others.gather("collectives", [own.pop("wrong"), own.pop("network")], options.timeout)
    if others.rank == 0:
        everyone, found = record["facts"], record["findings"]
        record |= own | {"wrong": [its[0] for its in seen], "networks": [its[1] for its in seen]}
        found += verdict.clocks(everyone, own["clocks"], options.max_clock_s)
        found += verdict.results(everyone, record["wrong"])
        found += verdict_network.fabric(everyone, record["networks"], options)
        found += verdict_network.bandwidth(own["speeds"], options.min_busbw)


def run_collectives(
    rank: int, options: argparse.Namespace, known: Callable[[], str]
) -> dict[str, Any]:
    """Clocks and speeds, the same on every rank; of this rank, wrong results and NCCL's network."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # as training does
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(most, 65536)), most))
    if exchange.launcher() == "alone":  # Gloo needs no launcher, MPI would look for its daemon
        os.environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    advice = "its transport finds no way: look at --interface, firewalls, NCCL_DEBUG=INFO"
    with nccl.listening() as log:
        with watch("starting Horovod", options.timeout, advice, known):
            hvd.init()
            devices = tf.config.list_physical_devices("GPU") if options.device != "cpu" else []
            own = devices[hvd.local_rank() % len(devices)] if devices else None
            tf.config.set_visible_devices([own] if own else [], "GPU")
            if own:
                tf.config.experimental.set_memory_growth(own, True)
        advice = "look at NCCL_DEBUG=INFO and at the links above"
        try:
            with watch("running the first collectives", options.timeout, advice, known):
                differences = collectives.clock_differences(hvd, tf)
                wrong = collectives.wrong_results(hvd, tf)
            with watch("timing collectives", 10 * options.timeout, "try a smaller --max_mb", known):
                largest = (256 if options.full else options.max_mb) * MB
                rows = collectives.speeds(hvd, tf, largest, options.full) if hvd.size() > 1 else []
        except (tf.errors.OpError, RuntimeError) as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise exchange.Failed(
                f"collectives failed on rank {rank}, host {os.uname().nodename}: {said}; {advice}"
            ) from None
        taken = {"network": log.network(), "excuse": log.excuse} if own else None
    clocks = [float(d) for d in differences]
    return {"clocks": clocks, "speeds": rows, "wrong": wrong, "network": taken}


def show(record: dict[str, Any], others: Exchange, options: argparse.Namespace) -> bool:
    """Prints and writes everything; returns whether something is wrong."""
    everyone, found = record["facts"], record["findings"]
    bad = sum(f.level == "wrong" for f in found)
    if options.json != "-":
        hosts = len(record["hosts"])
        print(f"\n{others.size} rank(s) on {hosts} host(s), by {others.name}\n")
        print(report.hosts(everyone, record["clocks"]))
        if 1 < hosts <= 16:
            print(f"\n{report.links(everyone, record['pairs'], record['hosts'])}")
        if record["speeds"]:
            print(f"\n{report.speeds(record['speeds'])}")
        if any(record["networks"]):
            print(f"\n{report.networks(record['networks'])}")
        if found:
            print(f"\n{report.findings(found)}")
        print(f"\n{bad} thing(s) wrong" if bad else "\nnothing is wrong", flush=True)
    if options.json:
        content = record | {"findings": [dataclasses.asdict(f) for f in found]}
        content |= {"ok": not bad, "launcher": others.name, "time": time.time()}
        text = json.dumps(content, indent=1)
        if options.json == "-":
            print(text, flush=True)
        else:
            try:
                Path(options.json).write_text(text + "\n")
            except OSError as error:
                raise exchange.Failed(f"--json={options.json}: {error.strerror}") from None
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
