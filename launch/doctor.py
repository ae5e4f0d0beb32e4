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
from preflight.ranks import launcher, watch

_MOST_HOSTS = 32  # with more hosts, each is timed with six others only
_ROUNDS = 6
_log_of_nccl: Path | None = None  # in a folder of its own
_NETWORK = "look at firewalls and at the network that MPI takes (hosts.sh --interface)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data_dir", default="", help="data folder of the run; each host opens it")
    add("--run_dir", default="", help="run folder of the run")
    add(
        "--device",
        default="auto",
        choices=("auto", "gpu", "cpu"),
        help="as in training",
    )
    add(
        "--mb",
        type=int,
        default=16,
        help="size of the allreduce that is timed (default 16)",
    )
    add(
        "--timeout",
        type=float,
        default=120.0,
        help="seconds after which a stage counts as hung",
    )
    add(
        "--security",
        action="store_true",
        help="print what of SECURITY.md holds on each host",
    )
    add(
        "command",
        nargs="*",
        help="after --: a training command, which names folders and device",
    )
    options = parser.parse_args()
    take_folders(options)
    hold_output()

    fault = launcher.launch_fault()
    if fault:
        print(f"error: {fault}")
        return 1
    if launcher.is_lone_task_of_srun():
        print("error: srun started this without an MPI world: use srun --mpi=pmix")
        return 1
    if options.security:
        if not launcher.launch_local_rank():
            host = os.uname().nodename
            for line in security.lines(options.run_dir):
                print(f"{host}: {line}")
        return 0

    present = ranks.roll_call()
    with watch(
        "looking at its own host", options.timeout, "a disk, a mount or a driver hangs"
    ):
        own_facts = facts.collect(options.data_dir, options.run_dir, options.device)
    link = connect(own_facts, present, options)
    if not link:
        return 1
    return Examination(link, own_facts, options).run()


def hold_output() -> None:
    """Lets file names hold any bytes, and makes each line one write, since mpirun tags writes."""
    try:
        from hvdkit import streams
    except ImportError:  # a missing hvdkit is reported later, with what all hosts lack
        sys.stdout.reconfigure(
            errors="backslashreplace", line_buffering=True, write_through=False
        )
    else:
        streams.hold()


def take_folders(options: argparse.Namespace) -> None:
    """Takes device, run folder and data folder from the training command."""
    with contextlib.suppress(ImportError):  # a missing hvdkit is reported later
        from hvdkit.settings import of_command, project

        settings = of_command(options.command)
        if not settings:
            return
        options.device = settings.device
        options.run_dir = settings.run_dir
        options.data_dir = settings.data_dir
        # A run makes the demo's data where they are missing.
        demo = project.folder() / type(settings).data_dir
        if settings.synthetic_data or Path(settings.data_dir).absolute() == demo:
            options.data_dir = ""


def connect(
    own_facts: dict[str, Any], present: set[int] | None, options: argparse.Namespace
) -> Any:
    """How ranks exchange data; None if this rank knows why they cannot, and has printed it.

    `present`: from `ranks.roll_call`.
    """

    def name_the_missing() -> str:
        hosts = ranks.dealt()
        size, variable = launcher.launched_ranks()
        if not variable:
            size = len(hosts)
        gone = []
        if present:
            gone = [rank for rank in range(size) if rank not in present]
        return str(findings.missing(gone, hosts, options.timeout)) if gone else ""

    if launcher.in_mpi_world() and own_facts["alike"]["MPI"] != "none":
        # Rank 0 knows who is missing, so it gives up first.
        limit = options.timeout + (10 if launcher.launch_rank() else 0)
        with watch(
            "waiting for all ranks to start MPI",
            limit,
            _NETWORK,
            known=name_the_missing,
        ):
            return ranks.Mpi()

    host = own_facts["host"]
    unheard = facts.unheard(host)  # Gloo listens at the address of the host's name
    is_alone = not (launcher.over_gloo() or launcher.in_mpi_world())
    if unheard and not is_alone:
        todo = f"add the line '127.0.0.1 {host}' to /etc/hosts"
        own_facts["faults"].append((f"its own name {host} {unheard}", todo, "fatal"))
    found = findings.of_facts([own_facts], options.device)
    if any(finding.level == "fatal" for finding in found):
        print(*found, sep="\n", flush=True)
        return None
    if is_alone:  # as in training: hvdkit/ranks/start.py
        controller = "mpi" if unheard else "gloo"
        os.environ["HOROVOD_CONTROLLER"] = controller
        os.environ["HOROVOD_CPU_OPERATIONS"] = controller
        # With this Open MPI looks for no daemon.
        os.environ |= {"OMPI_MCA_ess_singleton_isolated": "1"}
    start_horovod(options)
    return ranks.Horovod()


def start_horovod(options: argparse.Namespace) -> None:
    with contextlib.suppress(ImportError):
        import hvdkit.ranks.quiet  # noqa: F401 (Keras without keras.json, as in training)

    # isort: split
    import horovod.tensorflow as hvd
    import tensorflow as tf

    global _log_of_nccl
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    if hvd.nccl_built() and "NCCL_DEBUG" not in os.environ:
        log = Path(tempfile.mkdtemp(prefix="doctor-"), "nccl")
        _log_of_nccl = log
        os.environ["NCCL_DEBUG"] = "INFO"
        os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,NET"
        os.environ["NCCL_DEBUG_FILE"] = str(log)
    from hvdkit.ranks import start

    start.tell_networks()  # as training does
    with watch("starting Horovod", options.timeout, _NETWORK):
        hvd.init()

    gpus = tf.config.list_physical_devices("GPU")
    if options.device == "cpu" or not gpus:
        tf.config.set_visible_devices([], "GPU")
        return
    # A rank that sees one GPU sees its own.
    gpu = gpus[min(hvd.local_rank(), len(gpus) - 1)]
    tf.config.set_visible_devices([gpu], "GPU")
    tf.config.experimental.set_memory_growth(gpu, True)


def network_of_nccl() -> str:
    """What NCCL sends by, from its own log, which is removed; "" where it says nothing."""
    log = _log_of_nccl
    if not log or not log.is_file():
        return ""
    network = facts.network_of_nccl(log.read_text(errors="replace"))
    shutil.rmtree(log.parent, ignore_errors=True)
    return network


def rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """Each pair of hosts once, or a sample, the same on all ranks; no host is twice in a round."""
    seats: list[int | None] = list(range(hosts))
    if hosts % 2:
        seats.append(None)  # the host that sits beside it pauses
    half = len(seats) // 2
    table = []
    for _ in range(len(seats) - 1):
        pairs = []
        for one, other in zip(seats[:half], reversed(seats[half:])):
            if one is not None and other is not None:
                pairs.append((min(one, other), max(one, other)))
        table.append(pairs)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    if hosts <= _MOST_HOSTS:
        return table
    return random.Random(hosts).sample(table, _ROUNDS)


def allreduce(megabytes: int, process_set: Any) -> dict[str, Any]:
    """Times and checks one allreduce of float32 by this rank's process set.

    Returns "rank"; "ranks" (empty: all); whether the sum is "right"; "seconds", the least of five;
    "rate", the bus bandwidth in bytes a second, as in nccl-tests: bytes / seconds x 2 (n - 1) / n.
    """
    import horovod.tensorflow as hvd
    import tensorflow as tf

    size = process_set.size()
    numbers = tf.ones([megabytes << 18])
    name = "doctor.all"
    if process_set.ranks:
        name = f"doctor.{'-'.join(str(rank) for rank in process_set.ranks)}"

    def reduce(tensor: Any) -> Any:
        return hvd.allreduce(tensor, op=hvd.Sum, name=name, process_set=process_set)

    # The first sum also makes the connections.
    is_right = bool(tf.reduce_all(reduce(numbers) == size))
    reduce(tf.zeros([1]))  # all ranks start together
    seconds = math.inf
    # Other work of the hosts makes one of the five slow; a bad cable makes all of them slow.
    for _ in range(5):
        start = time.perf_counter()
        reduce(numbers)[:1].numpy()  # waits until a GPU has finished
        seconds = min(seconds, time.perf_counter() - start)
    return {
        "rank": hvd.rank(),
        "ranks": [] if process_set is hvd.global_process_set else process_set.ranks,
        "seconds": seconds,
        "right": is_right,
        "rate": (megabytes << 20) / seconds * 2 * (size - 1) / size,
    }


class Examination:
    """The stages; rank 0 collects what is wrong in `found`."""

    def __init__(
        self,
        link: ranks.Mpi | ranks.Horovod,
        own_facts: dict[str, Any],
        options: argparse.Namespace,
    ) -> None:
        self.link = link
        self.own_facts = own_facts
        self.options = options
        self.is_first = link.rank == 0
        # On rank 0:
        self.found: list[findings.Finding] = []
        self.facts: list[Any] = []  # of each rank
        self.hosts: list[str] = []  # of each rank

    def run(self) -> int:
        """The exit code, the same on all ranks."""
        self.own_facts["door"] = ranks.open_door() | {
            "addresses": self.own_facts["addresses"]
        }
        plan = self.exchange_facts()
        timed = []
        if self.look_around(plan):
            timed = self.time(plan["leaders"])
        with self.watch("sending its times to rank 0"):
            gathered = self.link.gather(timed, self.options.timeout)
            if self.is_first:
                everything_timed = []
                for timed_by_rank in gathered:
                    everything_timed += timed_by_rank or []
                self.report(everything_timed)
            failed = any(finding.level != "note" for finding in self.found)
            return int(self.link.broadcast(failed))

    def watch(self, stage: str, advice: str = _NETWORK, times: float = 1) -> Any:
        return watch(stage, times * self.options.timeout, advice, known=self.known)

    def known(self) -> str:
        """The findings so far, notes last."""
        findings_in_order = sorted(
            self.found, key=lambda finding: finding.level == "note"
        )
        return "\n".join(str(finding) for finding in findings_in_order)

    def exchange_facts(self) -> dict[str, Any]:
        """Rank 0 checks each rank's facts; returns what every rank must know of the others."""
        plan = None
        with self.watch("sending its facts to rank 0", times=3):
            self.facts = self.link.gather(self.own_facts, self.options.timeout)
            if self.is_first:
                plan = self.check_facts()
            return self.link.broadcast(plan)

    def check_facts(self) -> dict[str, Any]:
        """Returns the plan that rank 0 sends to the others."""
        dealt = ranks.dealt()
        gone = [
            rank
            for rank, facts_of_rank in enumerate(self.facts)
            if facts_of_rank is None
        ]
        if gone:
            print(findings.missing(gone, dealt, self.options.timeout), flush=True)
            os._exit(1)  # the launcher then ends the others
        self.found += findings.of_facts(self.facts, self.options.device)
        self.hosts = [facts_of_rank["host"] for facts_of_rank in self.facts]

        firsts = leaders(self.hosts)
        names_are_given = len(dealt) == len(self.facts)
        names = dealt if names_are_given else self.hosts
        mark = ""
        if self.options.run_dir:
            mark = facts.leave_mark(self.options.run_dir)
        return {
            "mark": mark,
            "leaders": firsts,
            "names": [(names[rank], names_are_given) for rank in firsts],
            "doors": [self.facts[rank]["door"] for rank in firsts],
        }

    def look_around(self, plan: dict[str, Any]) -> bool:
        """The first rank of each host tries the others; whether Horovod can be started."""
        view = None
        firsts = plan["leaders"]
        with self.watch(
            "looking at the other hosts", "a disk or a name server hangs", times=3
        ):
            if self.link.rank in firsts:
                view = self.view_of(plan)
            views = self.link.gather(view, 2 * self.options.timeout)
            if self.is_first:
                with contextlib.suppress(OSError):
                    os.unlink(plan["mark"])
                gone = [rank for rank in firsts if not views[rank]]
                if gone:
                    self.found.append(
                        findings.missing(gone, self.hosts, 2 * self.options.timeout)
                    )
                view_by_rank = {rank: view for rank, view in enumerate(views) if view}
                self.found += findings.of_views(
                    self.facts, view_by_rank, self.options.run_dir
                )
            can_start = not any(finding.level == "fatal" for finding in self.found)
            return self.link.broadcast(can_start)

    def view_of(self, plan: dict[str, Any]) -> dict[str, Any]:
        """What this host sees of the others, for `findings.of_views`."""
        firsts = plan["leaders"]
        names = []
        if len(firsts) > 1:
            for name, is_given in plan["names"]:
                names.append((name, is_given, facts.resolve(name)))
        return {
            "closed": ranks.closed(firsts.index(self.link.rank), plan["doors"]),
            "names": names,
            "mark": not plan["mark"] or os.path.exists(plan["mark"]),
        }

    def time(self, firsts: list[int]) -> list[dict[str, Any]]:
        """This rank's figures of an allreduce of all ranks, and of pairs of hosts."""
        start_horovod(self.options)
        import horovod.tensorflow as hvd

        advice = (
            "look at links and firewalls; NCCL_DEBUG=INFO says more; try a smaller --mb"
        )
        with self.watch("timing an allreduce of all ranks", advice):
            timed = [allreduce(self.options.mb, hvd.global_process_set)]
        network = network_of_nccl()
        timed[0]["network"] = network
        if self.link.size <= 2:  # two ranks on two hosts are all ranks
            return timed

        for pairs in rounds(len(firsts)):
            rank_pairs = [[firsts[one], firsts[other]] for one, other in pairs]
            names = " and ".join(f"{one} and {other}" for one, other in rank_pairs)
            with self.watch(f"timing an allreduce between ranks {names}", advice):
                # Every rank has to add each process set, also those it is not in.
                process_sets = [hvd.add_process_set(pair) for pair in rank_pairs]
                for process_set in process_sets:
                    if process_set.included():
                        result = allreduce(self.options.mb, process_set)
                        timed.append(result | {"network": network})
                for process_set in process_sets:
                    hvd.remove_process_set(process_set)
        return timed

    def report(self, timed: list[dict[str, Any]]) -> None:
        """Prints the result on rank 0; adds slow hosts and wrong sums to `found`."""
        firsts = leaders(self.hosts)
        print(
            f"\n{self.link.size} rank(s) on {len(firsts)} host(s), by {self.link.name}"
        )
        alike = self.facts[0]["alike"].items()
        print(", ".join(f"{name} {value}" for name, value in alike if value != "none"))
        for rank in firsts:
            host = self.hosts[rank]
            line = f"{host}: {self.hosts.count(host)} rank(s)"
            if "gpus" in self.facts[rank]:
                line += f", {self.facts[rank]['gpus'].get('seen', 0)} GPU(s)"
            print(line)

        timed_by_pair: dict[tuple[int, ...], list[Any]] = {}
        for one in timed:
            timed_by_pair.setdefault(tuple(one["ranks"]), []).append(one)
        for pair, timed_by_ranks in sorted(timed_by_pair.items()):
            one = timed_by_ranks[0]
            who = place(self.hosts, pair) if pair else "all ranks"
            print(
                f"allreduce of {self.options.mb} MB, {who}: {one['seconds'] * 1e3:.1f} ms, "
                f"bus bandwidth {one['rate'] / 1e6:,.1f} MB/s"
            )
        self.found += findings.of_times(self.hosts, timed_by_pair)
        self.found += findings.of_links(self.facts, timed_by_pair)
        # None where hosts do not reach each other.
        of_all_ranks = timed_by_pair.get((), [])
        self.found += findings.of_nccl(self.facts, of_all_ranks)
        if of_all_ranks and of_all_ranks[0]["network"]:
            print(f"NCCL sends by {of_all_ranks[0]['network']}")

        print(self.known())
        wrong = sum(finding.level != "note" for finding in self.found)
        print(f"{wrong} thing(s) wrong" if wrong else "nothing is wrong", flush=True)


if __name__ == "__main__":
    sys.exit(main())
