"""Every flag against every other, and against what it promises: pairs of values, on real ranks."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import combinations
import config as config_lib
import flag_values
from ranks import names_of_checks, run_checks

FILES = {kind: Path(__file__).parent / f"checks_{kind}.py" for kind in ("flags", "flag_facts")}
NAMES = [field.name for field in dataclasses.fields(config_lib.Config)]
CHECKS = {kind: names_of_checks(file) for kind, file in FILES.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By file and number of ranks: what failed, and lines of what was counted. All at once."""

    def launch(kind, ranks):
        counts = tmp_path_factory.mktemp("flags") / "counts"
        env = {"FLAGS_COUNTS": str(counts)}
        failed = run_checks([FILES[kind]], ranks, timeout=1700, env=env)
        return failed, counts.read_text() if counts.exists() else ""

    launches = list(itertools.product(FILES, (1, 2)))
    with ThreadPoolExecutor() as pool:
        return dict(zip(launches, pool.map(launch, *zip(*launches))))


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    path = tmp_path_factory.mktemp("flags") / "usual.cfg"
    path.write_text(flag_values.USUAL)
    return path


# The first waits for the launches: minutes, of which most is tracing.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind, name", [(kind, n) for kind in FILES for n in CHECKS[kind]])
def test_flags(kind, name, ranks, outcomes, record_property):
    failed, counts = outcomes[kind, ranks]
    if name == CHECKS[kind][-1]:
        record_property("flags", counts)
    failure = failed[name]
    assert failure is None, failure


def test_no_flag_is_forgotten():
    """A new flag has values to be tried with, or a reason why it has none."""
    tables = (flag_values.VALUES, flag_values.TASK_VALUES)
    tried = flag_values.fields_of(itertools.chain(*(v for t in tables for v in t.values())))
    assert set(NAMES) - tried == set(flag_values.LEFT_OUT)


def test_of_each_flag_it_is_said_whether_it_changes_the_weights():
    changes = flag_values.CHANGES + flag_values.CHANGES_ON_RANKS
    keeps = flag_values.KEEPS + flag_values.KEEPS_ON_ONE_RANK
    said = flag_values.fields_of(
        [value for _, values in changes for value in values]
        + [value for both in keeps for value in both]
    )
    assert set(NAMES) - said == {*flag_values.OF_TASKS, *flag_values.LEFT_OUT}


def test_each_contradiction_is_refused_in_one_sentence(usual):
    reached = set()
    for flags, part in flag_values.REFUSED.items():
        with pytest.raises(ValueError) as caught:
            config = config_lib.parse(["train.py", f"--flagfile={usual}", *flags.split()])
            config_lib.for_ranks(config, 2)
        assert part in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
        reached.add(traceback.extract_tb(caught.value.__traceback__)[-1].lineno)
    file = Path(combinations.__file__)
    raised = {n.lineno for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Raise)}
    assert raised <= reached, f"{file.name}: never tried: lines {sorted(raised - reached)}"


@pytest.mark.parametrize("field", dataclasses.fields(config_lib.Config), ids=lambda f: f.name)
def test_a_value_beyond_a_limit_is_refused_in_one_sentence(field, usual):
    meta = field.metadata
    bad = {"int": ["x", "1.5", "", str(2**31)], "float": ["x", "nan", "inf", ""]}
    bad = bad.get(field.type, ["2", "x"] if field.type == "bool" else ["two\nlines"])
    bad += [str(meta["low"] - 1)] if meta["low"] > -float("inf") else []
    bad += [str(meta["above"])] if meta["above"] > -float("inf") else []
    bad += [str(meta["below"])] if meta["below"] < float("inf") else []
    for value in bad:
        with pytest.raises(ValueError, match=f"--{field.name}") as caught:
            config_lib.parse(["train.py", f"--flagfile={usual}", f"--{field.name}={value}"])
        assert "\n" not in str(caught.value), str(caught.value)
