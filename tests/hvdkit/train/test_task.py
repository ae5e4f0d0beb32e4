"""Tasks are complete, or say what they lack."""

import dataclasses
import importlib.util
import re
import sys
import types

import pytest
from absl import flags
from refusals import refused

from hvdkit import settings as settings_lib
from hvdkit.ranks import fingerprint
from hvdkit.settings import Settings, project
from hvdkit.train.task import protocol as base

FLAGS = flags.FLAGS

COMPLETE = """
class Task:
    main_metric = "accuracy"
    def __init__(self, config): self.config = config
    def prepare(self): ...
    def sources(self): ...
    def training_example(self, sample, key): ...
    def evaluation_example(self, sample): ...
    def build_model(self): ...
    def loss(self, outputs, targets): ...
    def sums(self, outputs, targets): ...
    def metrics(self, sums): ...
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a task from the text of its file."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").touch()
    monkeypatch.setattr(project, "_folder", [tmp_path])

    def load(text: str, name: str = "mine", **settings) -> base.Task:
        file = tmp_path / "tasks" / f"{name}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(f"tasks.{name}", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setitem(sys.modules, f"tasks.{name}", module)
        return base.load_task(dataclasses.replace(Settings(), task="mine", **settings))

    return load


def test_an_editors_lock_is_no_code_and_any_encoding_is_read(load, tmp_path):
    load(COMPLETE)
    tasks = tmp_path / "tasks"
    (tasks / ".#mine.py").symlink_to("me@host.1234:5678")
    (tasks / "latin.py").write_bytes(
        b"# -*- coding: latin-1 -*-\n# \xe9\nclass Task: ...\n"
    )
    assert base.available() == ["latin", "mine"]
    # Python imports also from a folder without __init__.py.
    (tasks / "me").symlink_to(tasks)
    names = ("losses/dice.py", ".hidden/a.py", "data/cat/a.jpg", "tests/test_a.py")
    for name in (*names, "docs/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    files = fingerprint.code(tmp_path, project.ENGINE).keys()
    of_project = {name for name in files if not name.startswith("hvdkit/")}
    assert of_project == {
        "docs/__init__.py",
        "losses/dice.py",
        "tasks/__init__.py",
        "tasks/latin.py",
        "tasks/mine.py",
    }
    assert "hvdkit/train/task/protocol.py" in files


@pytest.mark.parametrize("name", [*base._REQUIRED, "main_metric"])
def test_what_is_missing_is_named(name, load):
    lines = [
        line
        for line in COMPLETE.splitlines()
        if not re.match(rf" +(def )?{name}\b", line)
    ]
    refused(lambda: load("\n".join(lines)), f"tasks/mine.py: class Task has no {name}:")


def test_an_error_without_a_mode_is_refused_by_the_tasks_file(load):
    text = COMPLETE.replace('"accuracy"', '"val_mae"')
    refused(
        lambda: load(text), 'tasks/mine.py: main_metric = "val_mae" may be an error'
    )
    assert load(
        text.replace("    def prepare", '    main_metric_mode = "min"\n    def prepare')
    )


def test_functions_that_are_only_inherited_from_the_protocol_are_missing(load):
    text = COMPLETE.replace(
        "class Task:", "from hvdkit.train import task\nclass Task(task.Task):"
    )
    assert load(text).config.task == "mine"
    with pytest.raises(ValueError, match="class Task has no loss, sums:"):
        load(text.replace("def loss", "def los").replace("def sums", "sum = 1 #"))


def test_a_name_without_a_task_gets_the_list_of_those_there_are(load):
    refused(lambda: load(COMPLETE, name="other"), "--task=mine", "['other']")
    refused(lambda: load("MODELS = {}"), "--task=mine", "['other']")


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        ("", "data_dir", "elsewhere"),
        ("", "dropout", 0.5),
        ("", "class_weights", "1,2,3,4,5,6,7,8,9,10,11"),
        ("", "scale_range", "1,2"),
        ("", "eval_flip", True),
        ("schedule", "base_lr", 0.5),
        ("optimizer", "momentum", 0.5),
        ("optimizer", "adam_beta1", 0.5),
        ("optimizer", "nesterov", True),
    ],
)
def test_a_setting_that_the_task_does_not_read_is_refused(function, name, value, load):
    def load_reading(body: str) -> base.Task:
        """A task with the function, or with build_model, of this body."""
        lines = f"    def {function or 'build_model'}(self, config=None): {body}\n"
        return load(COMPLETE + lines, **{name: value})

    config = Settings(task="mine", **{name: value})
    if function:  # it stands in the place of what reads the flag
        base.check_read(load(COMPLETE, **{name: value}), config)
    with pytest.raises(
        ValueError, match=rf"--{name}={value}: .*--task=mine does not read it"
    ):
        base.check_read(load_reading("..."), config)
    attributes = {"class_weights": "class_weight_list", "scale_range": "scale_limits"}
    task = load_reading(f"(config or self.config).{attributes.get(name, name)}")
    if function:
        base.optional(task, function)(base.settings_of(task, config))
    else:
        task.build_model()
    base.check_read(task, config)


@pytest.mark.parametrize("names", [["dropout"], ["dropout", "eval_flip"]])
def test_what_only_the_default_flagfile_gives_is_passed_over_with_a_note(names, load):
    config = Settings(task="mine", dropout=0.5, eval_flip=True)
    object.__setattr__(
        config, "came_with_file", dict.fromkeys(names, "configs/default.cfg")
    )
    task = load(COMPLETE, dropout=0.5, eval_flip=True)
    if "eval_flip" not in names:
        refused(
            lambda: base.check_read(task, config),
            "--eval_flip=True: --task=mine does not",
        )
        return
    (note,) = base.check_read(task, config)
    assert "--task=mine does not read all of configs/default.cfg" in note
    assert "passed over: --dropout=0.5, --eval_flip=True" in note


def test_steps_that_are_given_in_epochs_are_not_read_before_they_are_counted():
    config = settings_lib.load(["", "--epochs=2", "--task=mine"], Settings)
    task = types.SimpleNamespace(_watched=config.watched())
    refused(lambda: FLAGS.num_steps, "is read before its data are counted")
    counted = base.counted(task, config, 64)
    assert counted.num_steps == task._watched.num_steps == FLAGS.num_steps == 4
    with pytest.raises(
        ValueError, match=r"tasks/mine.py reads config.num_steps before its data"
    ):
        base.counted(task, config, 64)


def test_a_task_reads_the_batch_of_all_ranks_from_absl(load):
    config = settings_lib.load(["", "--batch_per_rank=4", "--task=mine"], Settings)
    refused(lambda: FLAGS.global_batch_size, "is read before its ranks are counted")
    size = config.for_ranks(2).global_batch_size
    noted = (
        "    def __init__(self, config): self.size = flags.FLAGS.global_batch_size\n"
    )
    task = load(f"from absl import flags\n{COMPLETE}{noted}", global_batch_size=size)
    assert task.size == FLAGS.global_batch_size == 8
