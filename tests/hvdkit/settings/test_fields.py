"""Flags in any combination, against what each promises: few rows of values, many where it is
slow."""

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import traceback
from pathlib import Path

import flag_values
import pytest
from refusals import refused

from hvdkit import settings as settings_lib
from ranks import CHECKS, ROOT, names_of_checks, run_checks

FILE = CHECKS / "checks_flags.py"
NAMES = [field.name for field in dataclasses.fields(settings_lib.Settings)]
# What the settings themselves make something else of.
READ_AS_ANOTHER_NAME = {
    "batch_per_rank": "global_batch_size",
    "class_weights": "class_weight_list",
    "colour_range": "colour_limits",
    "eval_scales": "eval_scale_list",
    "lr_boundaries": "boundary_steps",
    "rand_augment": "random_operations",
    "scale_range": "scale_limits",
    "trackers": "tracker_names",
}


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
        *[(2, 2, name) for name in names_of_checks(FILE)],
        *[
            pytest.param(1, 4, name, marks=pytest.mark.slow)
            for name in names_of_checks(FILE)
        ],
        pytest.param(1, 40, "check_rows_of_flags", marks=pytest.mark.slow),
    ],
)
def test_flags(ranks, rows, name):
    failure = outcomes(ranks, rows)[name]
    assert failure is None, failure


def test_every_flag_has_values_and_facts():
    tried = flag_values.fields_of(itertools.chain(*flag_values.VALUES.values()))
    left_out = {*flag_values.OF_TASKS, *flag_values.LEFT_OUT}
    assert set(NAMES) - tried == left_out
    changes = [v for _, v in flag_values.CHANGES + flag_values.CHANGES_ON_RANKS]
    keeps = itertools.chain(*flag_values.KEEPS, *flag_values.KEEPS_ON_ONE_RANK)
    assert (
        set(NAMES) - flag_values.fields_of([*itertools.chain(*changes), *keeps])
        == left_out
    )


def test_every_flag_is_read_by_code():
    """As an attribute, and not by the settings alone."""
    files = [
        *(ROOT / "hvdkit/src").rglob("*.py"),
        *(ROOT / "template/tasks").glob("*.py"),
    ]
    read = set()
    for file in files:
        if file.parent.name != "settings":
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    read.add(node.attr)
    assert set(NAMES) - read == READ_AS_ANOTHER_NAME.keys()
    assert read >= set(READ_AS_ANOTHER_NAME.values())


def test_each_contradiction_is_refused_in_one_sentence(usual):
    reached = set()
    for flags, part in flag_values.REFUSED.items():
        with pytest.raises(ValueError) as caught:
            config = settings_lib.parse(
                ["train.py", f"--flagfile={usual}", *flags.split()]
            )
            config.for_ranks(2)
        assert part in str(caught.value) and "\n" not in str(caught.value), str(
            caught.value
        )
        last = traceback.extract_tb(caught.value.__traceback__)[-1]
        reached.add((Path(last.filename).name, last.lineno))
    for file in {
        Path(inspect.getfile(room)) for room in settings_lib.Settings.__mro__[:-2]
    }:
        raised = set()
        for part in ast.parse(file.read_text()).body:
            if isinstance(part, ast.ClassDef):
                lines = [
                    node.lineno
                    for node in ast.walk(part)
                    if isinstance(node, ast.Raise)
                ]
                raised.update((file.name, line) for line in lines)
        assert raised <= reached, f"never tried: {sorted(raised - reached)}"


@pytest.mark.parametrize(
    "field", dataclasses.fields(settings_lib.Settings), ids=lambda f: f.name
)
def test_a_value_beyond_a_limit_is_refused_in_one_sentence(field, usual):
    meta = field.metadata
    bad_values = {
        "int": ["x", "1.5", "", str(2**31)],
        "float": ["x", "nan", "inf", ""],
        "bool": ["2", "x"],
    }
    values = bad_values.get(field.type, ["two\nlines"])
    if math.isfinite(meta["low"]):
        values.append(str(meta["low"] - 1))
    if math.isfinite(meta["above"]):
        values.append(str(meta["above"]))
    if math.isfinite(meta["below"]):
        values.append(str(meta["below"]))
    for value in values:
        words = ["train.py", f"--flagfile={usual}", f"--{field.name}={value}"]
        refused(lambda words=words: settings_lib.parse(words), f"--{field.name}")
