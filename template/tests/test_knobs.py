"""Flags of the reduction as what Horovod reads; test_reduction.py sees what they do on ranks."""

from __future__ import annotations

import pytest
from hvdkit.settings import Settings
from hvdkit.train import reduction


@pytest.mark.parametrize(
    ("flag", "value", "knob", "told"),
    [
        ("fusion_threshold_mb", 3, "HOROVOD_FUSION_THRESHOLD", "3145728"),
        ("fusion_threshold_mb", 0, "HOROVOD_FUSION_THRESHOLD", "0"),
        ("cycle_time_ms", 2.5, "HOROVOD_CYCLE_TIME", "2.5"),
        ("cycle_time_ms", 0.0, "HOROVOD_CYCLE_TIME", "0.0"),
        ("cache_capacity", 7, "HOROVOD_CACHE_CAPACITY", "7"),
        ("cache_capacity", 0, "HOROVOD_CACHE_CAPACITY", "0"),
        ("hierarchical_allreduce", True, "HOROVOD_HIERARCHICAL_ALLREDUCE", "1"),
        ("hierarchical_allgather", True, "HOROVOD_HIERARCHICAL_ALLGATHER", "1"),
        ("autotune", True, "HOROVOD_AUTOTUNE", "1"),
    ],
)
def test_each_flag_is_its_knob(flag, value, knob, told, tmp_path):
    cached = {"HOROVOD_CACHE_CAPACITY": "8192"}
    plain = {"stall_shutdown_s": 0, "run_dir": str(tmp_path)}
    assert reduction.environment(Settings(**plain)) == cached
    knobs = reduction.environment(Settings(**plain, **{flag: value}))
    knobs.pop("HOROVOD_AUTOTUNE_LOG", None)
    assert knobs == cached | {knob: told}


@pytest.mark.parametrize(
    ("seconds", "given", "knobs"),
    [
        (0, None, {}),
        (600, None, {"SHUTDOWN": "600"}),
        (600, "0", {"SHUTDOWN": "600"}),  # horovodrun's word for "nobody said"
        (600, "30", {}),  # whoever started the run has the last word
        (60, None, {"SHUTDOWN": "60", "CHECK": "30"}),
    ],
)
def test_how_long_ranks_wait_for_one_that_hangs(seconds, given, knobs, monkeypatch):
    monkeypatch.delenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", raising=False)
    if given:
        monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", given)
    found = reduction.environment(Settings(stall_shutdown_s=seconds))
    found.pop("HOROVOD_CACHE_CAPACITY")
    assert found == {f"HOROVOD_STALL_{name}_TIME_SECONDS": v for name, v in knobs.items()}


def test_the_best_setting_is_the_one_of_the_highest_score(tmp_path):
    """Rows as Horovod 0.28.1 logs them; the last one, of a run that was cut off, has no score."""
    (tmp_path / "autotune.csv").write_text(
        "hierarchical_allreduce,hierarchical_allgather,cache_enabled,cycle_time_ms,"
        "tensor_fusion_threshold,score\n"
        "0,0,1,5.0,64,10.5\n0,1,1,12.5,31.6,200.25\n1,0,1,2.5,8,99.0\n0,0,1,1.0\n"
    )
    path = reduction.write_autotuned(Settings(run_dir=str(tmp_path)))
    assert [line for line in path.read_text().splitlines() if line.startswith("--")] == [
        "--noautotune",
        "--fusion_threshold_mb=32",
        "--cycle_time_ms=12.5",
        "--nohierarchical_allreduce",
        "--hierarchical_allgather",
    ]


def test_small_gradients_are_packed_in_order_and_large_ones_travel_alone():
    """Of at most 200 bytes, three in a pack: tf_cnn_benchmarks' small is "at most" too."""
    assert reduction.pack([200, 201, 4, 8, 16, 999, 0], 200, 3) == [[0, 2, 3], [4, 6]]
    assert reduction.pack([201], 200, 3) == []
