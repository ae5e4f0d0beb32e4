"""Every knob of the reduction takes effect: seen in Horovod's timeline of real ranks."""

from __future__ import annotations

import collections
import itertools
import json
import re
import statistics
from pathlib import Path

import pytest
from hvdkit import settings as settings_lib
from hvdkit.train import reduction

from ranks import last_lines, launch

KNOBS = Path(__file__).parent / "knobs.py"
STEPS = 6


class Timeline:
    """Rank 0's timeline: what happened to each tensor."""

    def __init__(self, path: Path) -> None:
        text = path.read_text().rstrip().rstrip(",")
        events = json.loads(text if text.endswith("]") else text + "]")
        names = {
            e["pid"]: e["args"].get("name", "")
            for e in events
            if e.get("ph") == "M" and e.get("name") == "process_name"
        }
        self.tensors = set(names.values())
        self.counts = collections.Counter(
            (names[e["pid"]], e["name"]) for e in events if e.get("ph") in "BX" and "pid" in e
        )
        self.activities = {activity for _, activity in self.counts}
        cycles = [e["ts"] for e in events if e.get("name") == "CYCLE_START"]
        self.cycle_ms = statistics.median(b - a for a, b in itertools.pairwise(cycles)) / 1000


def timeline(tmp_path, *flags, ranks=2, backend="gloo", **how):
    path = tmp_path / "timeline.json"
    env = {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"} | how.pop("env", {})
    usual = [f"--num_steps={STEPS}", "--global_batch_size=4", f"--run_dir={tmp_path}"]
    ended = launch(ranks, [KNOBS, *usual, *flags], backend, env=env, **how)
    assert ended.code == 0, last_lines(ended.output)
    return Timeline(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Default knobs, with 2 micro-batches a step."""
    return timeline(tmp_path_factory.mktemp("plain"), "--accumulation_steps=2")


def test_accumulation_reduces_once_a_step(plain):
    """2 micro-batches a step, and yet each gradient is negotiated and sent once a step."""
    grads = [t for t in plain.tensors if re.fullmatch(r"grad_\d+", t)]
    assert len(grads) == 13  # accumulated, the sparse one is dense
    for tensor in grads:
        assert plain.counts[tensor, "ALLREDUCE"] == STEPS
    assert plain.counts["step.totals", "ALLREDUCE"] == STEPS


def test_cache_fusion_and_cycle_time(plain, tmp_path):
    other = timeline(
        tmp_path, "--cache_capacity=0", "--fusion_threshold_mb=0", "--cycle_time_ms=40"
    )
    assert "MEMCPY_IN_FUSION_BUFFER" in plain.activities
    assert "MEMCPY_IN_FUSION_BUFFER" not in other.activities
    # A cached tensor is announced by each rank once, and then known by its bit.
    assert plain.counts["grad_3", "1"] < STEPS and other.counts["grad_3", "1"] == STEPS
    assert plain.cycle_ms < 20 and 35 < other.cycle_ms < 80


def test_the_cache_holds_large_models_unless_told(monkeypatch):
    monkeypatch.delenv("HOROVOD_CACHE_CAPACITY", raising=False)

    def capacity(**settings) -> str | None:
        found = reduction.environment(settings_lib.Settings(**settings))
        return found.get("HOROVOD_CACHE_CAPACITY")

    assert capacity() == "8192" and capacity(cache_capacity=5) == "5"
    assert capacity(timeline="5:6") == "0"
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "77")
    assert capacity() is None


def test_merge_groups(tmp_path):
    """13 gradients as two groups, each one message."""
    seen = timeline(tmp_path, "--gradient_groups=2")
    groups = {t for t in seen.tensors if t.startswith("grad_")}
    sizes = sorted(int(t.rsplit("of", 1)[1]) for t in groups if "_1of" in t)
    assert sizes == [6, 7]


def test_packing_of_small_gradients_by_bytes_and_count(tmp_path):
    """7 gradients of at most 200 bytes in packs of 4; the 6 others travel alone."""
    seen = timeline(tmp_path, "--pack_bytes=200", "--pack_count=4")
    packs = sorted(t for t in seen.tensors if re.fullmatch(r"grad_\d+_1of\d+", t))
    sizes = sorted(int(t.rsplit("of", 1)[1]) for t in packs)
    assert sizes == [1] * 6 + [3, 4], packs


def test_backend_is_what_carries_them(plain, tmp_path):
    assert "GLOO_ALLREDUCE" in plain.activities and "MPI_ALLREDUCE" not in plain.activities
    seen = timeline(tmp_path, "--reduce_backend=mpi", backend="mpi")
    assert "MPI_ALLREDUCE" in seen.activities and "GLOO_ALLREDUCE" not in seen.activities


def test_a_backend_that_was_not_started_is_an_error(tmp_path):
    for wanted, words in (("mpi", "horovodrun --mpi"), ("nccl", "no NCCL")):
        command = ["train.py", f"--reduce_backend={wanted}", f"--run_dir={tmp_path}"]
        ended = launch(2, command, "gloo")
        assert len(ended.errors()) == 1 and words in ended.errors()[0], ended.output


def test_hierarchical_reduction_reaches_horovod_as_its_knobs():
    """Only that: Horovod compiles both algorithms for GPUs alone, so none runs on CPUs."""
    plain = reduction.environment(settings_lib.Settings(stall_shutdown_s=0))
    asked = {"hierarchical_allreduce": True, "hierarchical_allgather": True}
    assert plain.keys() == {"HOROVOD_CACHE_CAPACITY"}
    assert reduction.environment(settings_lib.Settings(stall_shutdown_s=0, **asked)) == plain | {
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_HIERARCHICAL_ALLGATHER": "1",
    }


def test_autotune_writes_its_result_as_flags_that_can_be_used(tiny, tmp_path):
    quick = {
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "3",
    }
    command = ["train.py", "--flagfile=configs/demo.cfg", *tiny, "--num_steps=30", "--autotune"]
    ended = launch(2, command, "gloo", env=quick)
    assert ended.code == 0, last_lines(ended.output)
    found = tmp_path / "run" / "autotune.cfg"
    assert str(found) in ended.output
    config = settings_lib.parse(["train.py", f"--flagfile={found}"])
    assert config.cycle_time_ms > 0 and config.fusion_threshold_mb >= 0 and not config.autotune
