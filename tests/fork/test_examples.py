"""Each example ends with equal weights on 1 and 2 ranks, as a project that holds its files."""

import shutil

import pytest
from projects import ROOT

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
