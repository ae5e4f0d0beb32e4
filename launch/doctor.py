#!/usr/bin/env python3
"""Preflight: looks at every host before hours are spent on it, and names the culprit.

Run it as training is run, with the same launcher, hosts and folders:

    launch/hosts.sh -H node1:4,node2:4 python launch/doctor.py --data_dir=DATA --run_dir=RUN
    horovodrun -np 8 -H node1:4,node2:4 python launch/doctor.py --full

Exit code 0: nothing is wrong (notes may remain); 1: something is, and the last lines say which
host, which rank, what, and what to do. What would keep Horovod from starting is found before
Horovod is started, and nothing here waits for ever.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from preflight import collectives, exchange, facts, links, report, verdict
from preflight.exchange import Exchange, watch

MB = 1 << 20


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data_dir", default="", help="data folder, as each host will open it")
    add("--run_dir", default="", help="run folder, as training will get it")
    add("--interface", default="", help="network interface between hosts; default: Horovod's")
    add("--json", default="", metavar="FILE", help="write everything there as JSON; - is stdout")
    add("--full", action="store_true", help="also allgather and broadcast, sizes up to 256 MB")
    add("--max_mb", type=int, default=16, help="largest allreduce that is timed (default 16)")
    add("--no_collectives", action="store_true", help="stop before Horovod is started")
    add("--min_free_gb", type=float, default=1.0, help="free space wanted in the run folder")
    add("--max_clock_s", type=float, default=1.0, help="clock difference that is still fine")
    add("--slow_factor", type=float, default=4.0, help="a link this many times slower is wrong")
    add(
        "--link_seconds",
        type=float,
        default=0.3,
        help="time for each try of each direction of each link",
    )
    add("--timeout", type=float, default=120.0, help="seconds after which a stage counts as hung")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    with watch("looking at its own host", options.timeout, "a disk, a mount or nvidia-smi hangs"):
        own = facts.collect(options.data_dir, options.run_dir, options.interface)
        if not own["imports"]:
            own["libraries"] = facts.library_versions()
    if exchange.launcher() == "srun":
        print("error: srun started this without an MPI world: use srun --mpi=pmix", file=sys.stderr)
        return 1
    with watch("reaching the other ranks", options.timeout, "look at --interface and firewalls"):
        others = exchange.connect()
    record = examine(others, own, options)
    with watch("waiting for rank 0", options.timeout, "look at its host"):
        if others.rank == 0:
            show(record, others, options)
        failed = any(f.level == "wrong" for f in record["findings"]) if record else None
        return int(others.broadcast("verdict", failed, options.timeout))


def examine(others: Exchange, own: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """All stages; rank 0 gets the record of what was seen, the others get {}."""
    record: dict[str, Any] = {}
    mark = f".doctor-{uuid.uuid4().hex}"
    door = links.Door()
    own["port"] = door.port
    if others.rank == 0 and options.run_dir:
        facts.leave_mark(options.run_dir, mark)

    with watch("telling rank 0 what it saw", 2 * options.timeout, "rank 0 or the network hangs"):
        everyone = others.gather("facts", own, options.timeout)
        plan: dict[str, Any] = {}
        if others.rank == 0:
            record = {"facts": everyone, "pairs": [], "speeds": [], "clocks": None}
            record["findings"] = verdict.before_horovod(everyone, others.name, options)
            record["hosts"] = list(verdict.leaders(everyone).values())
            places = [(everyone[r]["address"], everyone[r]["port"]) for r in record["hosts"]]
            plan = {"leaders": record["hosts"], "places": places, "mark": mark}
        plan = others.broadcast("plan", plan, options.timeout)

    # Every host with every other; a rank that is not its host's first only waits.
    limit = options.timeout + len(plan["leaders"]) * (4 * options.link_seconds + 5)
    with watch("testing links between hosts", limit, "look at the findings of other ranks"):
        seen, closed = _look_around(others, plan, door, options, limit)
        views = others.gather("views", seen, limit)
        go_on = None
        if others.rank == 0:
            record["pairs"] = [p for view in views if view for p in view.get("pairs", [])]
            record["closed"] = closed
            go_on = _judge_links(record, views, options)
            if options.run_dir:
                facts.remove_mark(options.run_dir, mark)
        go_on = others.broadcast("go_on", go_on, limit)
    door.close()
    if go_on:
        measured = run_collectives(others.rank, options)
        if others.rank == 0:
            record |= measured
            differences = measured["clocks"]
            record["findings"] += verdict.clocks(everyone, differences, options.max_clock_s)
            record["findings"] += verdict.results(everyone, measured["wrong"])
    return record


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
        ways = {way["pair"] for way in closed}
        seen["pairs"] = links.measure(door, position, places, ways, options.link_seconds)
        if options.run_dir:
            seen["mark"] = facts.sees_mark(options.run_dir, plan["mark"])
    return seen, closed


def _judge_links(record: dict[str, Any], views: list[Any], options: argparse.Namespace) -> bool:
    """On rank 0; returns whether Horovod can be started."""
    everyone, found = record["facts"], record["findings"]
    pairs = record["closed"] + record["pairs"]
    found += verdict.links(everyone, pairs, record["hosts"], options.slow_factor)
    sees = {rank: v["mark"] for rank, v in enumerate(views) if v and "mark" in v}
    found += verdict.run_folder(everyone, sees, options.run_dir)
    return not options.no_collectives and not any(f.fatal for f in found)


def run_collectives(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Clocks, right results, speeds: the same on every rank."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    advice = "its transport finds no way: look at --interface, firewalls, NCCL_DEBUG=INFO"
    with watch("starting Horovod", options.timeout, advice):
        hvd.init()
        gpus = tf.config.list_physical_devices("GPU")
        if gpus:
            own = gpus[hvd.local_rank() % len(gpus)]
            tf.config.set_visible_devices(own, "GPU")
            tf.config.experimental.set_memory_growth(own, True)
    advice = "look at NCCL_DEBUG=INFO and at the links above"
    with watch("running the first collectives", options.timeout, advice):
        differences = collectives.clock_differences(hvd, tf)
        wrong = collectives.wrong_results(hvd, tf)
        wrong_by_rank = hvd.allgather_object(wrong, name="doctor.wrong")
    with watch("timing collectives", 10 * options.timeout, "try a smaller --max_mb"):
        largest = (256 if options.full else options.max_mb) * MB
        rows = collectives.speeds(hvd, tf, largest, options.full) if hvd.size() > 1 else []
    return {"clocks": [float(d) for d in differences], "wrong": wrong_by_rank, "speeds": rows}


def show(record: dict[str, Any], others: Exchange, options: argparse.Namespace) -> None:
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
        if found:
            print(f"\n{report.findings(found)}")
        print(f"\n{bad} thing(s) wrong" if bad else "\nnothing is wrong", flush=True)
    if options.json:
        content = record | {"findings": [dataclasses.asdict(f) for f in found]}
        content |= {"ok": not bad, "launcher": others.name, "time": time.time()}
        text = json.dumps(content, indent=1, default=str)
        if options.json == "-":
            print(text, flush=True)
        else:
            Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
