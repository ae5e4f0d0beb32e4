"""Each example ends with equal weights on 1 and 2 ranks, as a project that holds its files."""

import shutil
import sys

import keras
import numpy as np
import pytest
from projects import ROOT
from refusals import refused

import hvdkit
from hvdkit import testing
from hvdkit.settings import project

# make slow-test trains the others: the rules they show have tests of their own.
QUICK = {"gan"}
EXAMPLES = [
    pytest.param(path.parent, id=name, marks=[pytest.mark.slow] * (name not in QUICK))
    for path in sorted((ROOT / "examples").glob("*/task.py"))
    if (name := path.parent.name)
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_has_equal_weights_on_1_and_2_ranks(example, tmp_path, monkeypatch):
    lines = sum(len(file.read_text().splitlines()) for file in example.glob("*.py"))
    assert lines <= 150
    monkeypatch.setattr(project, "_folder", [tmp_path])
    for file in ("train.py", "settings.py"):
        shutil.copy(ROOT / "template" / file, tmp_path)
    shutil.copytree(example, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "task.py").rename(tmp_path / "tasks" / f"{example.name}.py")
    flags = [f"--task={example.name}", "--global_batch_size=9", "--trackers="]
    testing.assert_same_weights(*flags, steps=4)


HEAD = "id,age,hours,job,income"
ROWS = ["1,20,1.5,baker,low", "2,40,,,high", "3,30,1e9,baker,low", "4,30,1.5,cook,high"]


@pytest.fixture
def tabular(tmp_path, monkeypatch):
    """The example's module, as a project's, with tables to change."""
    monkeypatch.syspath_prepend(ROOT / "examples/tabular")
    monkeypatch.delitem(sys.modules, "tabular", raising=False)
    for split in ("train", "val"):
        (tmp_path / f"{split}.csv").write_text("\n".join(["\ufeff" + HEAD, *ROWS]))
    import tabular

    return tabular


def settings(folder):
    return hvdkit.Settings(data_dir=str(folder), num_classes=2)


def test_a_table_is_read_by_the_columns_that_the_example_names(tabular, tmp_path):
    task = tabular.Task(settings(tmp_path))
    train, val = task.sources()
    assert train.class_names == val.class_names == ["high", "low"] and len(train) == 4
    sample = train.read(1)
    assert (sample["age"], sample["job"], int(sample["income"])) == (40, b"", 0)
    assert np.isnan(sample["hours"])
    model = task.build_model()
    ready = keras.Model(model.input, model.layers[-4].output)
    found = ready({name: sample[name][None] for name in ("age", "hours", "job")})
    scaled = (40 - 30) / np.std([20, 40, 30, 30])
    np.testing.assert_allclose(found, [[scaled, 0, 0, 1, 0, 1, 0, 0]], atol=1e-5)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("5,x,1,baker,low", "column age: could not convert string to float: 'x'"),
        ("5,inf,1,baker,low", "column age must hold numbers, and finite ones"),
        ("5,20,1,baker,", "row 5 has no income"),
        ("5,20,1,baker", "has no value of column income in each row"),
        ("5,20,1,baker,middle", "'middle' is no income of the training table"),
    ],
)
def test_a_row_that_the_example_cannot_read_is_named(tabular, tmp_path, row, words):
    (tmp_path / "val.csv").write_text("\n".join([HEAD, *ROWS, row]))
    refused(tabular.Task(settings(tmp_path)).sources, words)
