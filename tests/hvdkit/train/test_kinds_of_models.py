"""Every kind of model on 1 and 2 real ranks ends with the same weights, or is refused."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from kinds_of_models import BY_RANK, EQUAL, KINDS, REFUSED

from hvdkit.stop import DONE
from ranks import CHECKS, run_checks

CHECKS = CHECKS / "checks_kinds_of_models.py"
EVERY_CHANGE = {
    "subclassed", "layers made in call", "outputs a dict", "frozen model inside",
    "state equal on all ranks", "dropout, subclassed",
    "state of the batch", "recurrent with state", "weight as tf.Variable", "layer out of sight",
    "draws without a generator", "batch norm in functions", "batch norm, masked",
}  # fmt: skip


@pytest.fixture(scope="module")
def kept(request, tmp_path_factory):
    """By number of ranks and name of the kind: what rank 0 kept of it."""
    folders = {ranks: tmp_path_factory.mktemp(f"kinds-{ranks}") for ranks in (1, 2)}
    chosen = [item for item in request.session.items if item.fspath == request.fspath]
    names = [
        item.callspec.params["name"] for item in chosen if hasattr(item, "callspec")
    ]

    def launch(ranks):
        env = {"KINDS_OF_MODELS": str(folders[ranks]), "KINDS": json.dumps(names)}
        return run_checks([CHECKS], ranks, timeout=1700, env=env)

    with ThreadPoolExecutor() as pool:
        outcomes = dict(zip(folders, pool.map(launch, folders)))
    arrays = {}
    for ranks, failed in outcomes.items():
        assert len(failed) == len(names) + 1
        for name, failure in failed.items():
            assert failure is None, f"{name} on {ranks} ranks: {failure}"
        for name in names:
            with np.load(folders[ranks] / f"{name}.npz") as file:
                arrays[ranks, name] = {key: file[key] for key in file.files}
    return arrays


# The first waits for both launches: minutes, of which most is tracing.
@pytest.mark.timeout(1900)
@pytest.mark.parametrize(
    "name",
    [
        name if name in EVERY_CHANGE else pytest.param(name, marks=pytest.mark.slow)
        for name in KINDS
    ],
)
def test_kind_of_model(name, kept):
    kind = KINDS[name]
    one = kept[1, name]
    two = kept[2, name]
    if kind.end in (EQUAL, BY_RANK):
        trained(kind, one)
        trained(kind, two)
        assert len(part(one, "anew/")) == 2
        far = difference(one, two)
        assert far <= kind.near if kind.end == EQUAL else far > 1e-6, far
        printed = str(two["printed"])
        assert ("by rank" in printed) == (kind.end == BY_RANK), printed
        return
    refused(kind, two)
    if kind.end == REFUSED:
        # Keras counts its layers over a process, and 1 rank has made more of them.
        on_one, on_two = (
            re.sub(r"_\d+", "", str(ended["message"])) for ended in (one, two)
        )
        assert on_one == on_two
    else:
        trained(kind, one)


def trained(kind, kept):
    """Every variable moved but those that must not; a model made anew evaluates to the same."""
    assert kept["code"] == DONE, kept["message"]
    for name, last in part(kept, "last/").items():
        moved = distance(kept[f"first/{name}"], last) > 1e-12
        if "seed_generator" in name:  # recurrent cells have one for dropout alone
            assert moved == (kind.end == BY_RANK), name
        else:
            assert moved != any(still in name for still in kind.still), name
    for name, figure in part(kept, "anew/").items():
        np.testing.assert_allclose(figure, kept[f"figure/{name}"], max(kind.near, 1e-9))


def refused(kind, kept):
    message = str(kept["message"])
    assert kept["code"] != DONE and all(word in message for word in kind.words), message
    assert message and "\n" not in message and len(message) < 700, message


def difference(one, two):
    ours = part(one, "last/") | part(one, "figure/")
    theirs = part(two, "last/") | part(two, "figure/")
    assert ours.keys() == theirs.keys()
    return max(distance(ours[name], theirs[name]) for name in ours)


def distance(one, other):
    # A weight whose true gradient is zero moves by rounding alone: not relative to that.
    size = max(np.max(np.abs(np.float64(one))), 1e-3)
    return float(np.max(np.abs(np.float64(one) - np.float64(other))) / size)


def part(kept, start):
    return {
        name[len(start) :]: value
        for name, value in kept.items()
        if name.startswith(start)
    }
