"""Each example ends with equal weights on 1 and 2 ranks, as a project that holds its files."""

import json
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest
from projects import ROOT
from refusals import refused

import hvdkit
from hvdkit import testing
from hvdkit.commands import example as command
from hvdkit.settings import project
from ranks import launch_well

# make slow-test trains the others: the rules they show have tests of their own.
QUICK = {"gan"}
ELSEWHERE = {"multilabel", "regression"}  # tests/examples/test_outputs.py trains them
FLAGS = {
    "tabular": ["--data_dir=tables", "--num_classes=2"],
    "text": ["--num_classes=2"],
    "forecast": ["--data_dir=series"],
    "segformer": ["--synthetic_data", "--image_size=64", "--eval_crop=64"],
}
# keras-hub asks for a second TensorFlow, so the packages come without what they ask for.
OF_KERAS_HUB = [
    "keras-hub==0.32.0",
    "regex==2026.11.19",
    "tokenizers==0.23.3",
    "sentencepiece==0.2.3",
]
EXAMPLES = [
    pytest.param(
        path.parent.name, marks=[pytest.mark.slow] * (path.parent.name not in QUICK)
    )
    for path in sorted((ROOT / "examples").glob("*/task.py"))
    if path.parent.name not in ELSEWHERE
]
HEAD = "id,age,hours,job,income"
ROWS = ["1,20,1.5,baker,low", "2,40,,,high", "3,30,1e9,baker,low", "4,30,1.5,cook,high"]


def write_tables(folder):
    folder.mkdir(exist_ok=True)
    for split in ("train", "val"):
        (folder / f"{split}.csv").write_text("\n".join(["\ufeff" + HEAD, *ROWS]))


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """A project with the examples, and none of their tasks yet."""
    for name in ("train.py", "settings.py", "models.py", "tasks"):
        copy = shutil.copytree if name == "tasks" else shutil.copy
        copy(ROOT / "template" / name, tmp_path / name)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    write_tables(tmp_path / "tables")
    monkeypatch.setattr(project, "_folder", [tmp_path])
    return tmp_path


@pytest.fixture
def keras_hub(tmp_path_factory, monkeypatch):
    """The package, installed as examples/segformer says, in a folder of its own."""
    folder = tmp_path_factory.mktemp("keras_hub")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
    command_line = [*pip, "--target", str(folder), *OF_KERAS_HUB]
    subprocess.run(command_line, check=True, timeout=300)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_equal_weights_on_1_and_2_ranks(name, fork, request, capsys):
    if name == "segformer":
        request.getfixturevalue("keras_hub")
    assert command.main(["hvdkit example", name]) == 0
    printed = capsys.readouterr().out
    assert (
        f"python train{'_gan' * (name == 'gan')}.py" in printed
        and f"--task={name}" in printed
    )
    lines = len((fork / "tasks" / f"{name}.py").read_text().splitlines())
    if name == "gan":
        loop = (fork / "train_gan.py").replace(fork / "train.py")
        lines += len(loop.read_text().splitlines())
    assert lines <= 150
    flags = [
        f"--task={name}",
        "--global_batch_size=9",
        "--trackers=",
        *FLAGS.get(name, []),
    ]
    testing.assert_same_weights(*flags, steps=4)


def test_an_example_is_listed_and_never_replaces_a_file(fork, capsys):
    assert command.main(["hvdkit example"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert listed == {
        path.parent.name for path in (ROOT / "examples").glob("*/task.py")
    }
    (fork / "train_gan.py").write_text("mine")
    (fork / "tasks/forecast.py").symlink_to(fork / "nowhere.py")
    for name, words in (
        ("gan", f"{fork}/train_gan.py is there"),
        ("forecast", f"{fork}/tasks/forecast.py is there"),
        ("nets", "has byol, contrast"),
    ):
        assert command.main(["hvdkit example", name]) == 2
        assert words in capsys.readouterr().err
    assert (fork / "train_gan.py").read_text() == "mine" and not (
        fork / "tasks/gan.py"
    ).exists()


ASKED = {
    "forecast": {"past": [50.0 + hour % 24 for hour in range(336)]},
    "tabular": {"age": 41, "hours": 1.5, "job": "baker"},
    "text": {"text": "The value is a list of names."},
}
COMMANDS = """
import json, sys
import tensorflow as tf
import hvdkit
from hvdkit.commands import export, predict
name, asked = sys.argv[1:]
for command, words in ((predict, [asked]), (export, [f"--check={asked}"])):
    assert command.main([command.__name__, "--run_dir=run", "--out=out", *words]) == 0
model = hvdkit.load("run")
example = json.loads(open(asked).read())
inputs = {name: tf.constant([example[name]], tensor.dtype) for name, tensor in model.input.items()}
print(json.dumps(model(inputs).numpy()[0].tolist()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_it_is_predicted_exported_and_loaded_with_equal_outputs(name, fork):
    assert command.main(["hvdkit example", name]) == 0
    flags = [f"--task={name}", "--run_dir=run", "--num_steps=4", *FLAGS[name]]
    launch_well(1, ["train.py", *flags, "--trackers=", "--global_batch_size=4"])
    (fork / "asked.jsonl").write_text(json.dumps(ASKED[name]))
    ended = launch_well(1, ["-c", COMMANDS, name, "asked.jsonl"])
    assert "equal outputs" in ended.output
    outputs = json.loads(ended.output.splitlines()[-1])
    predicted = json.loads((fork / "out" / "predictions.jsonl").read_text())
    if name == "forecast":
        np.testing.assert_allclose(predicted["next"], outputs, rtol=1e-5)
    else:
        assert predicted["classes"] == np.argmax(outputs)
        softmax = np.exp(outputs) / np.sum(np.exp(outputs))
        np.testing.assert_allclose(predicted["probabilities"], softmax, rtol=1e-4)


@pytest.fixture
def tabular(tmp_path, monkeypatch):
    """The example's module, as a project's, with tables to change."""
    monkeypatch.syspath_prepend(ROOT / "examples/tabular")
    monkeypatch.delitem(sys.modules, "task", raising=False)
    write_tables(tmp_path)
    import task

    return task


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

    # Weights of a run keep its scaling, whatever the table holds later.
    with open(tmp_path / "train.csv", "a") as table:
        table.write("\n5,90,1,baker,low")
    later = tabular.Task(settings(tmp_path)).build_model()
    later.set_weights(model.get_weights())
    for layer in later.layers:
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()
    row = {name: sample[name][None] for name in ("age", "hours", "job")}
    np.testing.assert_allclose(later(row), model(row), rtol=1e-6)


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
