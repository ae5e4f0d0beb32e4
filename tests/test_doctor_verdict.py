"""What the preflight concludes from what ranks saw; no rank is started here."""

from __future__ import annotations

import copy
import sys
import types

import pytest

from hosts import ROOT

sys.path.insert(0, str(ROOT / "launch"))
from preflight import exchange, links, verdict

OPTIONS = types.SimpleNamespace(min_free_gb=1.0)
GB = 1 << 30


def fact(host: str, number: int) -> dict:
    """A sound host's facts."""
    disk = {"path": "/x", "free": 50 * GB, "error": None}
    return {
        "host": host,
        "program": "/usr/bin/python3",
        "versions": {"python": "3.11.7", "tensorflow": "2.21.0"},
        "libraries": {"NCCL": "2.27.7"},
        "imports": {},
        "gpus": {"count": 2, "visible": 2, "names": ["H100"], "driver": "550"},
        "names": {"name": host, "addresses": [f"10.0.0.{number}"]},
        "interfaces": {"eth0": [f"10.0.0.{number}"], "lo": ["127.0.0.1"]},
        "address": f"10.0.0.{number}",
        "disks": {use: dict(disk) for use in ("the run folder", "temporary files", "/dev/shm")},
        "data": None,
        "limits": {"open files": 65536.0, "locked memory": float("inf")},
        "infiniband": True,
        "environment": {},
    }


@pytest.fixture
def facts() -> list[dict]:
    """Two ranks on each of three hosts."""
    return [fact(f"node{n}", n) for n in (1, 2, 3) for _ in range(2)]


def texts(findings: list[verdict.Finding]) -> list[str]:
    return [f"{f.where}: {f.what}" for f in findings]


def test_nothing_is_found_on_sound_hosts(facts):
    assert verdict.before_horovod(facts, "Gloo", OPTIONS) == []


def test_a_rank_that_did_not_come_is_fatal(facts):
    facts[3] = None
    [finding] = verdict.before_horovod(facts, "Gloo", OPTIONS)
    assert finding.where == "rank 3" and finding.fatal


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
        (lambda f: f["gpus"].update(visible=0), "node2 (rank 2, 3)", "no GPU is visible"),
        (lambda f: f["gpus"].update(visible=1), "node2 (rank 2, 3)", "2 ranks but 1 visible"),
        (lambda f: f["imports"].update(keras="ImportError: x"), "node2 (rank 2)", "import keras"),
        (lambda f: f["names"].update(addresses=["10.9.9.9"]), "node2 (rank 2)", "no address of"),
        (
            lambda f: f["names"].update(addresses=[], error="unknown"),
            "node2 (rank 2)",
            "not resolve",
        ),
        (lambda f: f["limits"].update({"locked memory": 65536.0}), "node2 (rank 2)", "locked"),
        (lambda f: f["limits"].update({"open files": 1024.0}), "node2 (rank 2)", "1024 open"),
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
    found = texts(verdict.links(facts, rates(3, slow), [0, 2, 4], 4.0))
    assert [text.split(" at ")[0] for text in found] == [
        "node2 (rank 2): sends",
        "node2 (rank 2): receives",
    ]


def test_a_slow_pair_is_named_as_a_pair(facts):
    [text] = texts(verdict.links(facts, rates(3, {(0, 2)}), [0, 2, 4], 4.0))
    assert text.startswith("node1 (rank 0) to node3 (rank 4): 10.0 MB/s")


def test_even_links_are_fine(facts):
    assert verdict.links(facts, rates(3, set()), [0, 2, 4], 4.0) == []


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
