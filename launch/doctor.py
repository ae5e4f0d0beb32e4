#!/usr/bin/env python3
"""Checks every host before a long run, and names host, rank and fix of each problem.

Run it like the training, with the same launcher, hosts and folders:

    launch/hosts.sh -H node1:4,node2:4 python launch/doctor.py --data_dir=DATA --run_dir=RUN

Exit code 0: nothing is wrong (notes may remain); 1: each WRONG line says which host, which rank,
what is wrong and how to fix it. What would keep Horovod from starting is found before Horovod is
started. Every check has a time limit.
"""

import argparse
import contextlib
import math
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # also with PYTHONSAFEPATH=1

from preflight import facts, findings, ranks, security
from preflight.findings import leaders, place
from preflight.ranks import watch

_MOST_HOSTS, _ROUNDS = 32, 6  # of more hosts, each is timed with six others only
_NETWORK = "look at firewalls and at the network that MPI takes (hosts.sh --interface)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data_dir", default="", help="data folder of the run; each host opens it")
    add("--run_dir", default="", help="run folder of the run")
    add("--device", default="auto", choices=("auto", "gpu", "cpu"), help="as in training")
    add("--mb", type=int, default=16, help="size of the allreduce that is timed (default 16)")
    add("--timeout", type=float, default=120.0, help="seconds after which a stage counts as hung")
    add("--security", action="store_true", help="print what of SECURITY.md holds on each host")
    add("command", nargs="*", help="after --: a training command, which names folders and device")
    options = parser.parse_args()
    take_folders(options)
    hold_output()
    if fault := left_of_a_launch():
        print(f"error: {fault}")
        return 1
    if ranks.launcher() == "srun":
        print("error: srun started this without an MPI world: use srun --mpi=pmix")
        return 1
    if options.security:
        if not ranks.local_rank():
            host = os.uname().nodename
            print(*(f"{host}: {line}" for line in security.lines(options.run_dir)), sep="\n")
        return 0
    came = ranks.roll_call()
    with watch("looking at its own host", options.timeout, "a disk, a mount or a driver hangs"):
        own = facts.collect(options.data_dir, options.run_dir, options.device)
    everyone = connect(own, came, options)
    return Examination(everyone, own, options).run() if everyone else 1


def hold_output() -> None:
    """File names may be any bytes; mpirun tags every write, so a line must be one."""
    try:
        from hvdkit import streams
    except ImportError:  # found later, on all hosts
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True, write_through=False)
    else:
        streams.hold()


def left_of_a_launch() -> str:
    """Why this process is no rank though its environment says so; empty where it may be one."""
    with contextlib.suppress(ImportError):  # of hvdkit, which is found later, on all hosts
        from hvdkit import stop

        return stop.left_of_a_launch()
    return ""


def take_folders(options: argparse.Namespace) -> None:
    """Device, run folder and data folder of the training command."""
    with contextlib.suppress(ImportError):  # of hvdkit, which is found later, on all hosts
        from hvdkit.settings import of_command, project

        if given := of_command(options.command):
            options.device, options.run_dir = given.device, given.run_dir
            # Where the demo's data are missing, the run makes them.
            demo = Path(given.data_dir).absolute() == project.folder() / type(given).data_dir
            options.data_dir = "" if demo or given.synthetic_data else given.data_dir


def connect(own: dict[str, Any], came: set[int] | None, options: argparse.Namespace) -> Any:
    """How ranks exchange data; None if this rank knows why they cannot, and has printed it."""

    def absent() -> str:
        size = ranks.number("OMPI_COMM_WORLD_SIZE", default=len(ranks.dealt()))
        gone = [rank for rank in range(size) if rank not in came] if came else []
        return str(findings.missing(gone, ranks.dealt(), options.timeout)) if gone else ""

    if ranks.launcher() == "mpi" and own["alike"]["MPI"] != "none":
        # Rank 0 knows who is missing, so it gives up first.
        limit = options.timeout + (10 if ranks.rank() else 0)
        with watch("waiting for all ranks to start MPI", limit, _NETWORK, known=absent):
            return ranks.Mpi()
    why = facts.unheard(own["host"])  # Gloo listens where it points to
    alone = ranks.launcher() == "alone"
    if why and not alone:
        todo = f"add the line '127.0.0.1 {own['host']}' to /etc/hosts"
        own["faults"] += [(f"its own name {own['host']} {why}", todo, "fatal")]
    found = findings.of_facts([own], options.device)
    if any(f.level == "fatal" for f in found):
        print(*found, sep="\n", flush=True)
        return None
    if alone:  # without a launcher, as in training: hvdkit/ranks/start.py
        kind = "mpi" if why else "gloo"
        os.environ |= {"HOROVOD_CONTROLLER": kind, "HOROVOD_CPU_OPERATIONS": kind}
        os.environ |= {"OMPI_MCA_ess_singleton_isolated": "1"}  # it looks for no daemon
    start_horovod(options)
    return ranks.Horovod()


def start_horovod(options: argparse.Namespace) -> None:
    with contextlib.suppress(ImportError):
        import hvdkit.ranks.quiet  # noqa: F401 (Keras without keras.json, as in training)

    # isort: split
    import horovod.tensorflow as hvd
    import tensorflow as tf

    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    if hvd.nccl_built() and "NCCL_DEBUG" not in os.environ:
        log = Path(tempfile.mkdtemp(prefix="doctor-"), "nccl")
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
        os.environ["NCCL_DEBUG_FILE"] = str(log)
    from hvdkit.ranks import start

    start.tell_networks()  # as training does
    with watch("starting Horovod", options.timeout, _NETWORK):
        hvd.init()
    seen = tf.config.list_physical_devices("GPU") if options.device != "cpu" else []
    own = seen[min(hvd.local_rank(), len(seen) - 1) :][:1]  # a task may see its own alone
    tf.config.set_visible_devices(own, "GPU")
    for gpu in own:
        tf.config.experimental.set_memory_growth(gpu, True)


def network_of_nccl() -> str:
    """What NCCL sends by, from its own log, which is removed; "" where it says nothing."""
    log = Path(os.environ.get("NCCL_DEBUG_FILE", ""))
    if not log.parent.name.startswith("doctor-") or not log.is_file():
        return ""
    found = facts.network_of_nccl(log.read_text(errors="replace"))
    shutil.rmtree(log.parent, ignore_errors=True)
    return found


def rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """Each pair of hosts once, or a sample, the same on all ranks; no host is twice in a round."""
    seats: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    table = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]))
        table.append([(min(p), max(p)) for p in pairs if None not in p])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return table if hosts <= _MOST_HOSTS else random.Random(hosts).sample(table, _ROUNDS)


def allreduce(megabytes: int, process_set: Any) -> dict[str, Any]:
    """Times and checks one allreduce of float32 by this rank's process set.

    Returns "rank"; "ranks" (empty: all); whether the sum is "right"; "seconds", the least of five;
    "rate", the bus bandwidth in bytes a second, as in nccl-tests: bytes / seconds x 2 (n - 1) / n.
    """
    import horovod.tensorflow as hvd
    import tensorflow as tf

    size, numbers = process_set.size(), tf.ones([megabytes << 18])
    name = f"doctor.{'-'.join(map(str, process_set.ranks or ['all']))}"

    def once(tensor: Any) -> Any:
        return hvd.allreduce(tensor, op=hvd.Sum, name=name, process_set=process_set)

    right = bool(tf.reduce_all(once(numbers) == size))  # also makes the connections
    once(tf.zeros([1]))  # all start together
    seconds = math.inf
    for _ in range(5):  # what else the hosts do makes one slow; a bad cable makes all slow
        start = time.perf_counter()
        once(numbers)[:1].numpy()  # a GPU has finished
        seconds = min(seconds, time.perf_counter() - start)
    rate = (megabytes << 20) / seconds * 2 * (size - 1) / size
    its = [] if process_set is hvd.global_process_set else process_set.ranks
    return {"rank": hvd.rank(), "ranks": its, "seconds": seconds, "right": right, "rate": rate}


class Examination:
    """The stages; rank 0 collects what is wrong in `found`."""

    def __init__(self, everyone: Any, own: dict[str, Any], options: argparse.Namespace) -> None:
        self.ranks, self.own, self.options = everyone, own, options
        self.first, self.found, self.facts = everyone.rank == 0, [], []
        self.hosts: list[str] = []  # on rank 0, of each rank

    def run(self) -> int:
        """The exit code, the same on all ranks."""
        self.own["door"] = ranks.open_door() | {"addresses": self.own["addresses"]}
        plan = self.exchange_facts()
        timed = self.time(plan["leaders"]) if self.look_around(plan) else []
        with self.watch("sending its times to rank 0"):
            every = self.ranks.gather(timed, self.options.timeout)
            if self.first:
                self.report([one for its in filter(None, every) for one in its])
            return int(self.ranks.broadcast(any(f.level != "note" for f in self.found)))

    def watch(self, stage: str, advice: str = _NETWORK, times: float = 1) -> Any:
        return watch(stage, times * self.options.timeout, advice, known=self.known)

    def known(self) -> str:
        return "\n".join(map(str, sorted(self.found, key=lambda one: one.level == "note")))

    def exchange_facts(self) -> dict[str, Any]:
        """Rank 0 checks each rank's facts; returns what every rank must know of the others."""
        plan = None
        with self.watch("sending its facts to rank 0", times=3):
            self.facts = every = self.ranks.gather(self.own, self.options.timeout)
            if self.first:
                dealt = ranks.dealt()
                if gone := [rank for rank, its in enumerate(every) if its is None]:
                    print(findings.missing(gone, dealt, self.options.timeout), flush=True)
                    os._exit(1)  # and the launcher ends the others
                self.found += findings.of_facts(every, self.options.device)
                self.hosts = [its["host"] for its in every]
                firsts, given = leaders(self.hosts), len(dealt) == len(every)
                names = [(dealt[r], True) if given else (self.hosts[r], False) for r in firsts]
                doors = [every[rank]["door"] for rank in firsts]
                mark = self.options.run_dir and facts.leave_mark(self.options.run_dir)
                plan = {"mark": mark, "leaders": firsts, "names": names, "doors": doors}
            return self.ranks.broadcast(plan)

    def look_around(self, plan: dict[str, Any]) -> bool:
        """The first rank of each host tries the others; whether Horovod can be started."""
        view, firsts = None, plan["leaders"]
        with self.watch("looking at the other hosts", "a disk or a name server hangs", times=3):
            if self.ranks.rank in firsts:
                names = plan["names"] if len(firsts) > 1 else []
                view = {
                    "closed": ranks.closed(firsts.index(self.ranks.rank), plan["doors"]),
                    "names": [(*one, facts.resolve(one[0])) for one in names],
                    "mark": not plan["mark"] or os.path.exists(plan["mark"]),
                }
            views = self.ranks.gather(view, 2 * self.options.timeout)
            if self.first:
                with contextlib.suppress(OSError):
                    os.unlink(plan["mark"])
                if gone := [rank for rank in firsts if not views[rank]]:
                    self.found.append(findings.missing(gone, self.hosts, 2 * self.options.timeout))
                views = {rank: its for rank, its in enumerate(views) if its}
                self.found += findings.of_views(self.facts, views, self.options.run_dir)
            return self.ranks.broadcast(not any(f.level == "fatal" for f in self.found))

    def time(self, firsts: list[int]) -> list[dict[str, Any]]:
        """This rank's figures of an allreduce of all ranks, and of pairs of hosts."""
        start_horovod(self.options)
        import horovod.tensorflow as hvd

        advice = "look at links and firewalls; NCCL_DEBUG=INFO says more; try a smaller --mb"
        with self.watch("timing an allreduce of all ranks", advice):
            timed = [allreduce(self.options.mb, hvd.global_process_set)]
        network = network_of_nccl()
        timed[0]["network"] = network
        # Two ranks on two hosts are all ranks.
        for pairs in rounds(len(firsts)) if self.ranks.size > 2 else []:
            of_two = [[firsts[one], firsts[other]] for one, other in pairs]
            shown = " and ".join(f"{one} and {other}" for one, other in of_two)
            with self.watch(f"timing an allreduce between ranks {shown}", advice):
                sets = [hvd.add_process_set(pair) for pair in of_two]  # by every rank
                timed += [
                    allreduce(self.options.mb, one) | {"network": network}
                    for one in sets
                    if one.included()
                ]
                for one in sets:
                    hvd.remove_process_set(one)
        return timed

    def report(self, timed: list[dict[str, Any]]) -> None:
        """On rank 0; adds slow hosts and wrong sums to `found`."""
        size, firsts = self.ranks.size, leaders(self.hosts)
        print(f"\n{size} rank(s) on {len(firsts)} host(s), by {self.ranks.name}")
        alike = self.facts[0]["alike"].items()
        print(", ".join(f"{name} {value}" for name, value in alike if value != "none"))
        for rank in firsts:
            its = self.facts[rank]
            sees = f", {its['gpus'].get('seen', 0)} GPU(s)" if "gpus" in its else ""
            print(f"{its['host']}: {self.hosts.count(its['host'])} rank(s){sees}")
        seen: dict[tuple[int, ...], list[Any]] = {}
        for one in timed:
            seen.setdefault(tuple(one["ranks"]), []).append(one)
        for pair, (one, *_) in sorted(seen.items()):
            speeds = f"{one['seconds'] * 1e3:.1f} ms, bus bandwidth {one['rate'] / 1e6:,.1f} MB/s"
            who = place(self.hosts, pair) if pair else "all ranks"
            print(f"allreduce of {self.options.mb} MB, {who}: {speeds}")
        self.found += findings.of_times(self.hosts, seen)
        self.found += findings.of_links(self.facts, seen)
        of_all = seen.get((), [])  # none where hosts do not reach each other
        self.found += findings.of_nccl(self.facts, of_all)
        if of_all and of_all[0]["network"]:
            print(f"NCCL sends by {of_all[0]['network']}")
        bad = sum(one.level != "note" for one in self.found)
        print(*filter(None, [self.known()]), sep="\n")
        print(f"{bad} thing(s) wrong" if bad else "nothing is wrong", flush=True)


if __name__ == "__main__":
    sys.exit(main())
