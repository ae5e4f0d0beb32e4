"""`hvdkit evaluate` on a trained run: the run's own figures, on any number of ranks."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from hvdkit.commands import evaluate as command
from hvdkit.evaluate.evaluator import Evaluation
from hvdkit.run import load_run
from ranks import last_lines, launch

DIGITS = ["--flagfile=configs/digits.cfg", "--num_steps=20", "--eval_every=10", "--log_every=10"]
DIGITS += ["--checkpoint_every=10", "--global_batch_size=32", "--ema_decay=0.9", "--warmup_steps=0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("evaluate") / "run"
    ended = launch(2, ["train.py", *DIGITS, f"--run_dir={run}"], "gloo")
    assert ended.code == 0, last_lines(ended.output)
    return run


def evaluate(run, *flags, ranks=1):
    words = ["-m", "hvdkit", "evaluate", f"--run_dir={run}", *flags]
    return launch(ranks, words, "gloo" if ranks > 1 else "alone")


def evaluated(folder):
    return json.loads((folder / "evaluation.json").read_text())


def logged(run, step):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (record,) = [line for line in lines if line["step"] == step and "eval_loss" in line]
    return {n.removeprefix("eval_"): v for n, v in record.items() if n.startswith("eval_")}


def test_the_figures_are_the_runs_own_to_the_last_digit(trained, tmp_path):
    ended = evaluate(trained, "--checkpoint=10", f"--out={tmp_path}/out", ranks=3)
    assert ended.code == 0, last_lines(ended.output)
    found = evaluated(tmp_path / "out")
    assert found["figures"] == logged(trained, 10)
    assert found["step"] == 10 and found["averaged"] and found["samples"] == 359


def test_by_default_it_is_the_best_and_goes_into_the_runs_folder(trained):
    assert evaluate(trained).code == 0
    best = max((10, 20), key=lambda step: logged(trained, step)["accuracy"])
    found = evaluated(trained / "evaluation" / f"step-{best:08d}-val")
    assert found["step"] == best and found["figures"] == logged(trained, best)


def test_each_class_and_the_worst_samples(trained, tmp_path):
    ended = evaluate(trained, "--checkpoint=last", f"--out={tmp_path}", "--worst=3", ranks=2)
    assert ended.code == 0, last_lines(ended.output)
    with (tmp_path / "confusion.csv").open() as file:
        head, *rows = csv.reader(file)
    confusion = np.array([row[1:] for row in rows], int)
    assert head[1:] == [str(n) for n in range(10)] == [row[0] for row in rows]
    assert confusion.sum() == 359
    figures = logged(trained, 20)
    assert np.trace(confusion) / 359 == pytest.approx(figures["accuracy"], abs=1e-12)
    with (tmp_path / "classes.csv").open() as file:
        _, *rows = csv.reader(file)
    recall = [float(row[2]) for row in rows]
    np.testing.assert_allclose(recall, np.diag(confusion) / confusion.sum(1))
    found = evaluated(tmp_path)
    assert found["figures"] == figures
    worst = found["worst"]
    assert len(worst) == 3 and worst[0]["loss"] >= worst[1]["loss"] >= worst[2]["loss"] > 1
    assert len({one["sample"] for one in worst}) == 3
    sheets = sorted((tmp_path / "worst").iterdir())
    assert len(sheets) == 3 and f"sample-{worst[0]['sample']}-" in sheets[0].name
    assert Image.open(sheets[0]).size[0] >= 96
    assert Image.open(tmp_path / "confusion.png").size == (640, 640)

    # Another evaluation replaces these files; weights as trained are not the averaged ones.
    ended = evaluate(trained, "--checkpoint=last", f"--out={tmp_path}", "--worst=0", "--no-ema")
    assert ended.code == 0 and not list((tmp_path / "worst").iterdir())
    found = evaluated(tmp_path)
    assert not found["averaged"] and found["figures"]["loss"] != figures["loss"]


def test_labels_are_printed_as_whole_numbers(tmp_path, capsys):
    counts = np.array([[1_234_567, 0], [0, 89]])
    found = Evaluation({"loss": 1.0}, {"confusion": counts}, None)
    run = SimpleNamespace(val_source=SimpleNamespace(class_names=["sky", "car"]))
    command.write(run, tmp_path, about={}, found=found, worst=[])
    assert "sky    1234567  " in capsys.readouterr().out


def test_the_matrix_is_drawn_as_shares_of_each_label():
    """From light, nothing, to dark, all of a label's; each cell as many pixels."""
    drawn = command.drawn(np.array([[8, 2, 0], [4, 1, 0], [0, 0, 0]]), side=9)
    light, dark = np.array([245, 247, 250]), np.array([20, 40, 90])
    assert drawn.shape == (9, 9, 3)
    for row, column, share in ((0, 0, 0.8), (1, 0, 0.8), (1, 1, 0.2), (2, 2, 0.0)):
        cell = drawn[3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
        expected = light + share * (dark - light)
        np.testing.assert_allclose(cell, np.broadcast_to(expected, (3, 3, 3)), atol=1)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--num_classes=12", "the digits have 10 classes"),
        ("--out=/dev/null/x", "writing /dev/null"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_sentence(trained, flag, words):
    ended = evaluate(trained, flag)
    assert ended.code == 2, last_lines(ended.output)
    (error,) = ended.errors()
    assert words in error and "Traceback" not in ended.output and "batches: " not in ended.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nonsense=1"], "no flag --nonsense"),
        (["--worst=-3"], "-3 is not a number of samples"),
        (["--run_dir=/no/such"], "is no run's folder: it holds no config.cfg"),
        ([], "required: --run_dir"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_sentence(trained, flags, words, capsys):
    run = [f"--run_dir={trained}"] if flags else []
    with pytest.raises(SystemExit, match="2"):
        command.main(["hvdkit evaluate", *run, *flags])
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_outside_a_fork_it_says_where_to_run_it(tmp_path):
    words = [sys.executable, "-m", "hvdkit", "evaluate", "--run_dir=run"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr == (
        "error: hvdkit evaluate: run it in your fork, the folder that holds train.py and tasks/\n"
    )


@pytest.mark.parametrize(
    ("which", "words"),
    [("15", "none of step 15"), ("/no/such", "/no/such is no checkpoint")],
)
def test_a_checkpoint_that_is_not_there_is_named(trained, which, words):
    with pytest.raises(ValueError, match=words):
        load_run.chosen(trained / "checkpoints", which)


@pytest.mark.parametrize("which", ["best", "last"])
def test_a_folder_without_checkpoints_is_refused(tmp_path, which):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        load_run.chosen(tmp_path, which)


@pytest.mark.parametrize(
    ("flag", "words"),
    [("--no-ema", "give every rank the same flags"), ("--run_dir=/no/such", "no run's folder")],
)
def test_ranks_with_different_flags_are_refused_before_they_wait(trained, tmp_path, flag, words):
    script = (
        "import os, sys; from hvdkit.commands import evaluate\n"
        f"own = [{flag!r}] if os.environ['OMPI_COMM_WORLD_RANK'] == '1' else []\n"
        "sys.exit(evaluate.main([*sys.argv, *own]))"
    )
    run = ["-c", script, f"--run_dir={trained}", f"--out={tmp_path}/out"]
    ended = launch(2, run, "mpirun", timeout=120)
    assert ended.code == 2, last_lines(ended.output)
    (error,) = ended.errors()
    assert "rank 1" in error and words in error
