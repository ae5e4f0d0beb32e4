"""1 and 3 real ranks end with the same weights; benchmarks/equivalence.py tries more ranks."""

import shutil
from pathlib import Path

import pytest

import equivalence
from ranks import launch_well

# Rounding only; where a true gradient is zero, Adam divides rounding by rounding: measured.
LIMITS = {"float64": 1e-12, "float32 sgd": 1e-5, "float32 adam": 1e-2}
# `make slow-test` trains the others too, and on 1 rank what shows that each flag counts.
EVERY_CHANGE = ["float64 sgd accumulation"]
EQUAL = [name for name in equivalence.SETTINGS if "local batch norm" not in name]


@pytest.fixture(scope="module")
def weights(request, tiny_data, tmp_path_factory) -> Path:
    """A folder RANKS/SETTING.npz for 1 and 3 ranks."""
    root = tmp_path_factory.mktemp("weights")
    items = [item for item in request.session.items if item.fspath == request.fspath]
    whole = any(item.get_closest_marker("slow") for item in items)
    names = EQUAL if whole else EVERY_CHANGE
    for ranks in (1, 3):
        (root / str(ranks)).mkdir()
        worker = [Path(equivalence.__file__), tiny_data, root / str(ranks), "tiny"]
        more = equivalence.WITHOUT if whole and ranks == 1 else ()
        launch_well(ranks, [*worker, *names, *more], "gloo", timeout=560)
    return root


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in EVERY_CHANGE)) for n in EQUAL]
)
def test_same_weights_as_one_rank(name, weights):
    limit = next(limit for start, limit in LIMITS.items() if name.startswith(start))
    files = [weights / str(n) / f"{name}.npz" for n in (1, 3)]
    assert equivalence.largest_difference(*files) <= limit


@pytest.mark.slow
def test_settings_lead_to_different_weights(weights):
    """Else the comparison above would compare nothing."""
    assert {file.stem for file in (weights / "1").iterdir()} >= set(equivalence.CONTRASTS)
    assert equivalence.same(weights / "1") == []


def test_a_flag_that_were_ignored_would_be_found(weights, tmp_path):
    for name in ("float64 sgd", EVERY_CHANGE[0]):
        shutil.copy(weights / "1" / f"{EVERY_CHANGE[0]}.npz", tmp_path / f"{name}.npz")
    assert equivalence.same(tmp_path) == ["float64 sgd accumulation: float64 sgd"]
