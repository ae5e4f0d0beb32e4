"""Virtual ranks: one run's bits on 1, 2 and 3 real ranks, and across interruptions."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from hvdkit import settings as settings_lib
from hvdkit.checkpoint.checkpoints import changes
from hvdkit.checkpoint.files import Manifest
from hvdkit.observe import compare
from hvdkit.train.step.combine import Rule, from_ordered, to_ordered
from hvdkit.train.virtual import passes
from ranks import CHECKS, PROJECT, names_of_checks, run_checks

FILE = CHECKS / "checks_virtual.py"
# In this order: what 2 ranks began is ended by 3.
LAUNCHES = {"1-alone": (1, "alone"), "2-mpirun": (2, "mpirun"), "3-gloo": (3, "gloo")}
SLOW = ("float16", "bfloat16", "jit", "gathers")


@pytest.fixture(scope="module")
def launches(request, tmp_path_factory):
    """By launch what failed, and what its runs left; and their folder."""
    folder = tmp_path_factory.mktemp("virtual")
    names = {"sgd", "adam"} | {
        item.callspec.params.get("run")
        for item in request.session.items
        if item.fspath == request.fspath and hasattr(item, "callspec")
    }
    failures = {}
    left = {}
    for name, (ranks, backend) in LAUNCHES.items():
        runs = names - {None}
        if ranks == 3:
            runs &= {"sgd", "bfloat16", "gathers"}
        env = {
            "VIRTUAL_RUNS": str(folder),
            "VIRTUAL_LAUNCH": name,
            "VIRTUAL_NAMES": json.dumps(sorted(runs)),
        }
        failures[name] = run_checks([FILE], ranks, backend, timeout=500, env=env)
        outcome = folder / f"{name}.json"
        left[name] = json.loads(outcome.read_text()) if outcome.exists() else {}
    return failures, left, folder


# The first waits for all launches: a minute each, and several on a busy machine.
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", names_of_checks(FILE))
@pytest.mark.parametrize("place", LAUNCHES)
def test_on_ranks(place, name, launches):
    failure = launches[0][place][name]
    assert failure is None, failure


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "run",
    ["sgd", "adam", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
def test_weights_and_records_are_the_same_bits_on_any_number_of_ranks(run, launches):
    alone, two, three = launches[1].values()
    assert alone[run] == two[run] == three.get(run, alone[run])
    # Handed on from 2 ranks to 3 it is the run that nobody interrupted.
    if run == "adam":
        assert three["handed on"] == alone[run]
    assert (run in three) == (run in ("sgd", "bfloat16", "gathers"))


def compared(one: Path, other: Path, capsys) -> tuple[int, str]:
    code = compare.main(["hvdkit compare", str(one), str(other)])
    return code, "".join(capsys.readouterr())


@pytest.fixture
def whole(launches) -> Path:
    return launches[2] / "2-mpirun-sgd"


@pytest.mark.parametrize(
    ("name", "old", "new", "code", "words"),
    [
        (
            "summary.json",
            '"weights_sha256": "',
            '"weights_sha256": "0',
            1,
            "different weights",
        ),
        (
            "summary.json",
            '"step": 4',
            '"step": 3',
            1,
            "ended at different steps: 4 and 3",
        ),
        (
            "metrics.jsonl",
            '{"step": 3, "loss": ',
            '{"step": 3, "loss": 1',
            1,
            "first at step 3",
        ),
        (
            "metrics.jsonl",
            '{"step": 3, "loss": ',
            '{"loss": ',
            2,
            "lines that no run writes",
        ),
        ("metrics.jsonl", None, "", 1, "and 0 lines"),
        (
            "metrics.jsonl",
            '"samples_per_second": ',
            '"samples_per_second": 1',
            0,
            "the same",
        ),
        ("summary.json", '"threads": "1"', '"threads": "2"', 2, "threads (1; 2)"),
        ("summary.json", '"fingerprint"', '"other"', 2, "no summary of a run"),
        ("summary.json", "{", "", 2, "folders of runs that have ended"),
    ],
)
def test_how_runs_differ_is_named(whole, capsys, tmp_path, name, old, new, code, words):
    other = tmp_path / "other"
    shutil.copytree(whole, other)
    text = (other / name).read_text()
    old = text if old is None else old
    assert old in text
    (other / name).write_text(text.replace(old, new, 1))
    exit_code, printed = compared(whole, other, capsys)
    assert exit_code == code and words in printed, printed


def test_folders_that_cannot_be_compared_are_named(whole, tmp_path, capsys):
    code, printed = compared(whole, tmp_path, capsys)
    assert code == 2 and f"{tmp_path} is no run's folder" in printed
    (tmp_path / "config.cfg").write_text("--seed=2\n")
    code, printed = compared(whole, tmp_path, capsys)
    assert code == 2 and f"{tmp_path}/summary.json is no summary of a run" in printed
    code, printed = compared(whole, whole / ".." / whole.name, capsys)
    assert code == 2 and "one folder" in printed


def parse(*flags):
    demo = f"--flagfile={PROJECT}/configs/demo.cfg"
    return settings_lib.parse(["train.py", demo, "--virtual_ranks=4", *flags])


def test_it_brings_determinism_and_one_thread_and_says_so():
    config = parse()
    assert config.deterministic and config.cpu_threads == 1
    assert parse("--cpu_threads=2").cpu_threads == 2
    assert any(
        "sets --deterministic --cpu_threads=1" in note for note in config.notes()
    )
    config = parse("--bn_sync=full")  # fewer ranks are refused: test_fields.py
    assert config.for_ranks(4) == config


def test_a_resume_names_what_makes_other_bits_but_not_the_number_of_ranks():
    before = Manifest(5, 0, 0, dataclasses.asdict(parse()), 2, "", "", {})
    assert changes(before, parse(), ranks=3, has_batch_norm=True) == []
    config = parse("--virtual_ranks=6", "--cpu_threads=2")
    assert changes(before, config, ranks=3, has_batch_norm=True) == [
        "--virtual_ranks was 4, is 6",
        "--cpu_threads was 1, is 2",
    ]


@pytest.mark.parametrize(
    "values",
    [
        tf.constant([-(2**62) - 1, -1, 0, 2**62 + 1], tf.int64),
        tf.constant([-np.inf, -1.5, -1e-300, 0.0, 2.0, np.inf], tf.float64),
        tf.constant([-1.5, 0.0, 2.0], tf.bfloat16),
    ],
    ids=lambda values: values.dtype.name,
)
@pytest.mark.parametrize("kind", ["max", "min", "concatenate"])
def test_numbers_of_state_are_in_its_order_and_give_it_back(values, kind):
    rule = Rule(kind)
    numbers = to_ordered(rule, values)
    back = from_ordered(rule, tf.zeros_like(values), numbers)
    np.testing.assert_array_equal(back.numpy(), values.numpy())
    steps = np.diff(numbers.numpy().astype(object))
    assert all(step < 0 if kind == "min" else step > 0 for step in steps)


def test_state_that_virtual_ranks_change_each_in_its_own_way_ends_the_run():
    variable = tf.Variable([1.0, np.nan], name="projection")
    passes._check_same(variable, tf.constant([1.0, np.nan]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="projection"):
        passes._check_same(variable, tf.constant([0.5, np.nan]))
