"""Flags in any combination, against what each promises: few rows of values, many where it is slow."""

import ast
import dataclasses
import functools
import inspect
import traceback
from pathlib import Path

import flag_values
import pytest
from refusals import refused

from hvdkit import settings as settings_lib
from ranks import CHECKS, names_of_checks, run_checks

FILE = CHECKS / "checks_flags.py"


@functools.cache
def outcomes(ranks, rows):
    """Of all checks, in one launch."""
    return run_checks([FILE], ranks, timeout=1700, env={"FLAGS_ROWS": str(rows)})


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    path = tmp_path_factory.mktemp("flags") / "usual.cfg"
    path.write_text(flag_values.USUAL)
    return path


# The first waits for its launch: minutes, of which most is tracing.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "ranks, rows, name",
    [
        *[(2, 3, name) for name in names_of_checks(FILE)],
        *[pytest.param(1, 4, name, marks=pytest.mark.slow) for name in names_of_checks(FILE)],
        pytest.param(1, 40, "check_rows_of_flags", marks=pytest.mark.slow),
    ],
)
def test_flags(ranks, rows, name):
    failure = outcomes(ranks, rows)[name]
    assert failure is None, failure


def test_each_contradiction_is_refused_in_one_sentence(usual):
    reached = set()
    for flags, part in flag_values.REFUSED.items():
        with pytest.raises(ValueError) as caught:
            config = settings_lib.parse(["train.py", f"--flagfile={usual}", *flags.split()])
            config.for_ranks(2)
        assert part in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
        last = traceback.extract_tb(caught.value.__traceback__)[-1]
        reached.add((Path(last.filename).name, last.lineno))
    for file in {Path(inspect.getfile(room)) for room in settings_lib.Settings.__mro__[:-2]}:
        rooms = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef)]
        nodes = [node for room in rooms for node in ast.walk(room)]
        raised = {(file.name, node.lineno) for node in nodes if isinstance(node, ast.Raise)}
        assert raised <= reached, f"never tried: {sorted(raised - reached)}"


@pytest.mark.parametrize("field", dataclasses.fields(settings_lib.Settings), ids=lambda f: f.name)
def test_a_value_beyond_a_limit_is_refused_in_one_sentence(field, usual):
    meta = field.metadata
    bad = {"int": ["x", "1.5", "", str(2**31)], "float": ["x", "nan", "inf", ""]}
    bad = bad.get(field.type, ["2", "x"] if field.type == "bool" else ["two\nlines"])
    bad += [str(meta["low"] - 1)] if meta["low"] > -float("inf") else []
    bad += [str(meta["above"])] if meta["above"] > -float("inf") else []
    bad += [str(meta["below"])] if meta["below"] < float("inf") else []
    for value in bad:
        words = ["train.py", f"--flagfile={usual}", f"--{field.name}={value}"]
        refused(lambda words=words: settings_lib.parse(words), f"--{field.name}")
