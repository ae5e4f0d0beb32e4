"""hvdkit.testing in a fork: its own flags, its default.cfg, a train.py without make_step."""

import math
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hvdkit import testing
from hvdkit.settings import project
from ranks import PROJECT


@pytest.fixture
def fork(tmp_path):
    """A project of the blank task, with settings that float64 and full batch norm exclude."""
    for name in ("train.py", "settings.py", "tasks/blank.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(PROJECT / name, tmp_path / name)
    (tmp_path / "configs").mkdir()
    lines = "--task=blank\n--num_classes=3\n--global_batch_size=8\n--virtual_ranks=2\n--jit\n"
    lines += "--early_stop_evals=2\n"
    (tmp_path / "configs/default.cfg").write_text(lines)
    project.use(tmp_path)
    yield tmp_path
    project.use(PROJECT)


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_flags_of_a_fork_are_read_and_its_default_settings_overruled(fork):
    defined = 'from absl import flags\n\nflags.DEFINE_integer("units", 32, "")\n\n\ndef make_step'
    replace(fork / "train.py", "def make_step", defined)
    replace(fork / "tasks/blank.py", "Dense(32,", "Dense(flags.FLAGS.units,")
    replace(
        fork / "tasks/blank.py",
        "import keras\n",
        "import keras\nfrom absl import flags\n",
    )
    testing.assert_learns_one_batch("--units=8", steps=2, factor=9.0)
    testing.assert_same_weights("--units=8", ranks=(1,), steps=1)


def test_a_train_py_without_make_step_is_refused_in_one_sentence(fork):
    replace(fork / "train.py", "make_step", "another_step")
    with pytest.raises(
        AssertionError, match=r"^train.py has no make_step\(run\): [^\n]+$"
    ):
        testing.assert_learns_one_batch()


WHERE = """from hvdkit import testing

def test_where():
    assert testing.launch(1, ["train.py"]).output == "{name}\\n"
"""


def test_a_test_is_of_the_project_that_it_lies_in(tmp_path):
    """In two folders of a larger repository, called from its root, from the other, by a link."""
    for name in ("one", "two"):
        (tmp_path / "models" / name / "tasks").mkdir(parents=True)
        (tmp_path / "models" / name / "tests").mkdir()
        (tmp_path / "models" / name / "train.py").write_text(f"print({name!r})")
        (tmp_path / f"models/{name}/tests/test_{name}.py").write_text(
            WHERE.format(name=name)
        )
    (tmp_path / "link").symlink_to(tmp_path / "models" / "one")
    called = {".": "models", "models/two": "../one", "models/one": "../../link/tests"}
    for folder, tests in called.items():
        words = [sys.executable, "-m", "pytest", "-q", tests]
        ended = subprocess.run(
            words, cwd=tmp_path / folder, capture_output=True, text=True
        )
        count = 2 if tests == "models" else 1
        assert f"{count} passed" in ended.stdout, (folder, ended.stdout)


def test_weights_are_compared_by_weights_not_by_seeds_or_masks():
    """A seed's state is a large number, by which any weights would be near each other."""
    seed = np.array([909925048, 3])
    weight = np.array([0.1, -0.2])
    assert testing._largest(seed) == 0.0
    difference = partial(testing._relative_difference, least_scale=1e-30)
    assert difference(weight, weight * [1, 1 + 5e-6]) == pytest.approx(5e-6)
    assert difference(seed, seed + 1) == math.inf

    mask = np.array([0.0, -np.inf])
    assert difference(mask, mask) == 0.0
    assert difference(mask, np.zeros(2)) == math.inf
    flags = np.array([True, False])
    assert difference(flags, flags) == 0.0
    assert difference(flags, ~flags) == math.inf
