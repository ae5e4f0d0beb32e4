"""1 and 3 real ranks end with the same weights; benchmarks/equivalence.py tries more ranks."""

from pathlib import Path

import pytest

import equivalence
from ranks import launch_well

# Rounding only; where a true gradient is zero, Adam divides rounding by rounding: measured.
LIMITS = {"float64": 1e-12, "float32 sgd": 1e-5, "float32 adam": 1e-2}
# `make slow-test` trains the others. That each flag counts: checks_flags.py.
EVERY_CHANGE = "float64 sgd accumulation"
EQUAL = [name for name in equivalence.SETTINGS if "local batch norm" not in name]


@pytest.fixture(scope="module")
def weights(request, tiny_data, tmp_path_factory) -> Path:
    """A folder RANKS/SETTING.npz for 1 and 3 ranks, of the settings that were chosen."""
    root = tmp_path_factory.mktemp("weights")
    items = [item for item in request.session.items if item.fspath == request.fspath]
    names = [item.callspec.params["name"] for item in items]
    for ranks in (1, 3):
        (root / str(ranks)).mkdir()
        worker = [Path(equivalence.__file__), tiny_data, root / str(ranks), "tiny"]
        launch_well(ranks, [*worker, *names], "gloo", timeout=560)
    return root


@pytest.mark.parametrize(
    "name",
    [
        name if name == EVERY_CHANGE else pytest.param(name, marks=pytest.mark.slow)
        for name in EQUAL
    ],
)
def test_same_weights_as_one_rank(name, weights):
    limit = next(limit for start, limit in LIMITS.items() if name.startswith(start))
    files = [weights / str(n) / f"{name}.npz" for n in (1, 3)]
    assert equivalence.largest_difference(*files) <= limit
