"""Reductions, steps and batch norm on real ranks, by numbers; what Horovod is told."""

import pytest

from hvdkit.settings import Settings
from hvdkit.train import reduction
from ranks import CHECKS, names_of_checks, run_checks

# All of a backend in one launch: ranks start slowly. Layers do not know what carries their sums.
PARTS = {("gloo", 3): ("reduction", "step", "batch_norm", "world"), ("mpi", 2): ("reduction",)}
FILES = {
    launch: [CHECKS / f"checks_{part}.py" for part in parts] for launch, parts in PARTS.items()
}


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
