"""What the preflight concludes from what ranks saw; no rank is started here."""

from __future__ import annotations

import copy
import sys

import pytest

from doctor_facts import OPTIONS, fact
from hosts import ROOT

sys.path.insert(0, str(ROOT / "launch"))
from preflight import exchange, findings, links, verdict, verdict_network


@pytest.fixture
def facts() -> list[dict]:
    """Two ranks on each of three hosts."""
    every = [fact(f"node{n}", n) for n in (1, 2, 3) for _ in range(2)]
    for rank, one in enumerate(every):
        one["local_rank"] = rank % 2
    return every


def texts(findings: list[verdict.Finding]) -> list[str]:
    return [f"{f.where}: {f.what}" for f in findings]


def test_nothing_is_found_on_sound_hosts(facts):
    assert verdict.before_horovod(facts, "Gloo", OPTIONS) == []


@pytest.mark.parametrize(
    "gone, dealt, where",
    [
        ([3], [], "node2 (rank 3)"),  # beside rank 2
        ([2, 3], [], "unknown host (rank 2, 3)"),
        ([2, 3], ["node1"] * 2 + ["node2"] * 2 + ["node3"] * 2, "node2 (rank 2, 3)"),
        ([1, 2, 3], [], "node1 (rank 1); unknown host (rank 2, 3)"),
    ],
)
def test_a_rank_that_did_not_come_is_fatal(facts, gone, dealt, where):
    for rank in gone:
        facts[rank] = None
    [finding] = verdict.missing(facts, dealt, "the server at a port 1", 120)
    assert finding.where == where and finding.fatal
    assert "nothing came from there in 120 s to the server at a port 1" in finding.what
    verdict.before_horovod(facts, "Gloo", OPTIONS)


def test_over_gloo_each_rank_needs_an_open_file_for_every_other():
    facts = [fact(f"node{n // 8}", n // 8) for n in range(1024)]
    assert verdict.limits(facts, "Gloo") == []
    for its in facts:
        its["limits"] = {"open files": 1024, "locked memory": None}
    found = verdict.limits(facts, "Gloo")
    assert len(found) == 128 and all(f.fatal and "needs 1157" in f.what for f in found)
    assert "over MPI (hosts.sh --mpi)" in found[0].todo
    assert {f.level for f in verdict.limits(facts, "MPI")} == {"note"}
    assert {f.level for f in verdict.limits(facts[:800], "Gloo")} == {"note"}


def test_many_hosts_measure_six_links_each():
    assert [len(links.rounds(hosts)) for hosts in (2, 3, 32, 33, 1000)] == [1, 3, 31, 6, 6]
    drawn = links.rounds(1000)
    assert drawn == links.rounds(1000) and len({p for pairs in drawn for p in pairs}) == 3000
    assert all(len({host for pair in pairs for host in pair}) == 1000 for pairs in drawn)


def test_hosts_of_ranks_as_the_launcher_dealt_them(monkeypatch):
    monkeypatch.setenv("LAUNCH_HOSTS", "node1:2,fe80::1:1,node3")
    assert exchange.dealt() == ["node1", "node1", "fe80::1", "node3"]


def test_machines_of_one_name_are_told_apart(facts):
    for rank in (2, 3):
        facts[rank]["host"] = "node1"
    findings.tell_apart(facts)
    assert list(findings.leaders(facts)) == ["node1 at 10.0.0.1", "node1 at 10.0.0.2", "node3"]


@pytest.mark.parametrize(
    "change, where, what",
    [
        (
            lambda f: f["names"].update(addresses=["127.0.0.1"]),
            "node2 (rank 2)",
            "which no other host can reach",
        ),
        (lambda f: f["versions"].pop("tensorflow"), "node2 (rank 2)", "tensorflow is not there"),
        (lambda f: f["libraries"].update(NCCL="2.18.1"), "node2 (rank 2)", "NCCL is 2.18.1"),
        (lambda f: f["gpus"].update(driver="470"), "node2 (rank 2)", "GPU driver is 470"),
        (lambda f: f["gpus"].update(driver="471"), "node2 (rank 2)", "GPU driver is 471"),
        (
            lambda f: f["fabric"][1].update(state="DOWN"),
            "node2 (rank 2)",
            "active InfiniBand ports is 1, elsewhere 2",
        ),
        (lambda f: f["imports"].update(keras="ImportError: x"), "node2 (rank 2)", "import keras"),
        (
            lambda f: f["names"].update(addresses=["10.9.9.9"]),
            "node2 (rank 2)",
            "no interface there",
        ),
        (
            lambda f: f["names"].update(addresses=[], error="unknown"),
            "node2 (rank 2)",
            "not resolve",
        ),
        (lambda f: f["limits"].update({"locked memory": 65536}), "node2 (rank 2)", "locked"),
        (lambda f: f["limits"].update({"open files": 1024}), "node2 (rank 2)", "1024 open"),
        (lambda f: f["environment"].update(NCCL_IB_DISABLE="1"), "node2 (rank 2)", "NCCL_IB_D"),
        (lambda f: f["disks"]["/dev/shm"].update(free=64 << 20), "node2 (rank 2)", "0.06 GB free"),
    ],
)
def test_one_odd_host(facts, change, where, what):
    facts[2] = copy.deepcopy(facts[2])
    change(facts[2])
    [text] = texts(verdict.before_horovod(facts, "Gloo", OPTIONS))
    assert text.startswith(f"{where}: ") and what in text


def test_a_loopback_name_is_no_fault_under_mpi_or_on_one_host(facts):
    for one in facts[2:4]:
        one["names"]["addresses"] = ["127.0.1.1"]
    [finding] = verdict.before_horovod(facts, "MPI", OPTIONS)
    assert finding.level == "note"
    assert verdict.before_horovod(facts[2:4], "Gloo", OPTIONS) == []


def test_data_that_differs_is_put_down_to_the_host_that_differs(facts):
    for rank in (0, 2, 4):
        facts[rank]["data"] = {"path": "/d", "files": 9, "bytes": 90, "sha256": "a"}
    facts[4]["data"] = {"path": "/d", "files": 8, "bytes": 80, "sha256": "b"}
    [text] = texts(verdict.before_horovod(facts, "Gloo", OPTIONS))
    assert text.startswith("node3 (rank 4): the data folder /d has other files: 8 of 80 bytes")


def test_clocks_are_judged_against_most_hosts_even_if_rank_0_is_wrong(facts):
    differences = [0.0, 0.0, 7.0, 7.0, 7.1, 7.1]
    [text] = texts(verdict.clocks(facts, differences, 1.0))
    assert text == "node1 (rank 0): its clock is 7.0 s behind the others"


def rates(hosts: int, slow: set[tuple[int, int]]) -> list[dict]:
    def rate(way: tuple[int, int]) -> float:
        return 1e7 if way in slow else 1e9

    pairs = [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]
    return [{"pair": (a, b), "there": rate((a, b)), "back": rate((b, a))} for a, b in pairs]


def test_a_slow_host_is_named_once_a_direction(facts):
    slow = {(1, 0), (0, 1), (1, 2), (2, 1)}
    found = texts(verdict_network.links(facts, rates(3, slow), [0, 2, 4], 4.0))
    assert [text.split(" at ")[0] for text in found] == [
        "node2 (rank 2): sends",
        "node2 (rank 2): receives",
    ]


def test_a_slow_pair_is_named_as_a_pair(facts):
    [text] = texts(verdict_network.links(facts, rates(3, {(0, 2)}), [0, 2, 4], 4.0))
    assert text.startswith("node1 (rank 0) to node3 (rank 4): 10.0 MB/s")


def test_even_links_are_fine(facts):
    assert verdict_network.links(facts, rates(3, set()), [0, 2, 4], 4.0) == []


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_every_pair_meets_once_and_no_host_is_in_two_pairs_of_a_round(count):
    table = links.rounds(count)
    for pairs in table:
        seats = [host for pair in pairs for host in pair]
        assert len(seats) == len(set(seats))
    everyone = {(a, b) for a in range(count) for b in range(a + 1, count)}
    assert sorted(pair for pairs in table for pair in pairs) == sorted(everyone)


def test_a_hang_ends_with_a_message(tmp_path):
    import subprocess

    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from preflight.exchange import watch\n"
        "with watch('doing nothing', 0.2, 'wake up'): time.sleep(60)\n"
    )
    words = [sys.executable, "-c", script, str(ROOT / "launch")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert "hung for 0 s while doing nothing: wake up" in ended.stderr
    assert exchange.launcher() == "alone"
