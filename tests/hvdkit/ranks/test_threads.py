"""Threads and devices of a rank: what a flag says, else a share of the cores."""

from __future__ import annotations

import os

import pytest
import tensorflow as tf

from hvdkit.ranks import devices, fingerprint
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.world import World
from hvdkit.settings import Settings
from hvdkit.stop import Stop

ALONE, FOURTH = World(0, 1, 0, 1), World(0, 4, 0, 4)


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    """That nobody bound, and no thread chosen yet."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(world_lib, "_threads", lambda: 0)
    for name in ("OMPI_MCA_orte_bound_at_launch", "RANK_BOUND", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("flag", "world", "threads"), [(0, ALONE, 8), (0, FOURTH, 2), (5, FOURTH, 5)]
)
def test_readers_are_the_flags_or_a_share_of_the_cores(flag, world, threads):
    assert world_lib.data_workers(world, Settings(data_workers=flag)) == threads


@pytest.mark.parametrize(("flag", "threads"), [(0, 8), (3, 3)])
def test_threads_are_the_flags_or_a_share_of_the_cores(flag, threads, monkeypatch):
    chosen = []
    monkeypatch.setattr(world_lib, "_choose_device", lambda *how: chosen.append(how))
    world_lib.set_up(ALONE, Settings(cpu_threads=flag, device="cpu"))
    assert chosen == [(ALONE, "cpu", threads)]


def test_a_rank_that_was_bound_has_the_cores_it_sees(monkeypatch):
    monkeypatch.setenv("RANK_BOUND", "0-7")
    assert world_lib.data_workers(FOURTH, Settings()) == 8


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(devices, "why_no_gpu", lambda device: f"{device}: none" * (device == "gpu"))
    with pytest.raises(Stop, match="gpu: none"):
        world_lib.set_up(ALONE, Settings(device="gpu"))


def test_a_run_on_cpus_tells_its_threads():
    """Kernels split their sums by them, so two runs compare only where they are equal."""
    found = fingerprint.here()
    assert found["threads"] == str(tf.config.threading.get_intra_op_parallelism_threads())
    assert {*found} == {"device", "threads", "tensorflow", "keras", "horovod", "switches"}
