"""Reductions, steps and batch norm on real ranks: numbers, and what Horovod's timeline shows."""

import collections
import json
import re
from pathlib import Path

import pytest

from hvdkit.settings import Settings
from hvdkit.train import reduction
from ranks import CHECKS, HELPERS, launch_well, names_of_checks, run_checks

# All of a backend in one launch: ranks start slowly. Layers do not know what carries their sums.
PARTS = {("gloo", 3): ("reduction", "step", "batch_norm", "world"), ("mpi", 2): ("reduction",)}
FILES = {
    launch: [CHECKS / f"checks_{part}.py" for part in parts] for launch, parts in PARTS.items()
}
KNOBS = HELPERS / "knobs.py"
STEPS = 6


@pytest.fixture(scope="module")
def outcomes():
    """By backend and number of ranks; each launch runs all checks once."""
    return {}


@pytest.mark.parametrize(
    ("backend", "ranks", "name"),
    [
        pytest.param(*launch, name, marks=[pytest.mark.slow] * (launch[0] == "mpi"))
        for launch, files in FILES.items()
        for name in names_of_checks(*files)
    ],
)
def test_number(backend, ranks, name, outcomes):
    """Against plain references."""
    if (backend, ranks) not in outcomes:
        outcomes[backend, ranks] = run_checks(FILES[backend, ranks], ranks, backend, timeout=560)
    failure = outcomes[backend, ranks][name]
    assert failure is None, failure


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


def timeline(tmp_path, *flags, backend="gloo"):
    path = tmp_path / "timeline.json"
    env = {"HOROVOD_TIMELINE": str(path)}
    usual = [f"--num_steps={STEPS}", "--global_batch_size=4", f"--run_dir={tmp_path}"]
    launch_well(2, [KNOBS, *usual, *flags], backend, env=env)
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


def test_the_cache_holds_large_models_unless_it_is_set(monkeypatch):
    monkeypatch.delenv("HOROVOD_CACHE_CAPACITY", raising=False)
    assert reduction.environment(Settings(stall_shutdown_s=0)) == {"HOROVOD_CACHE_CAPACITY": "8192"}
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "77")
    assert reduction.environment(Settings(stall_shutdown_s=0)) == {}


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


def test_groups_and_backend(plain, tmp_path):
    """13 gradients as two groups, each one message, over MPI."""
    seen = timeline(tmp_path, "--gradient_groups=2", "--reduce_backend=mpi", backend="mpi")
    groups = {t for t in seen.tensors if t.startswith("grad_")}
    sizes = sorted(int(t.rsplit("of", 1)[1]) for t in groups if "_1of" in t)
    assert sizes == [6, 7]
    assert "GLOO_ALLREDUCE" in plain.activities and "MPI_ALLREDUCE" not in plain.activities
    assert "MPI_ALLREDUCE" in seen.activities and "GLOO_ALLREDUCE" not in seen.activities
