"""evaluate.py on a trained run: the run's own figures, on any number of ranks."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest
from PIL import Image

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
    command = ["-m", "hvdkit", "evaluate", f"--run_dir={run}", *flags]
    return launch(ranks, command, "gloo" if ranks > 1 else "alone")


def logged(run, step):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (record,) = [line for line in lines if line["step"] == step and "eval_loss" in line]
    return {n.removeprefix("eval_"): v for n, v in record.items() if n.startswith("eval_")}


@pytest.mark.parametrize("ranks, step", [(1, 20), (2, 10), (3, 20)])
def test_the_figures_are_the_runs_own_to_the_last_digit(trained, tmp_path, ranks, step):
    ended = evaluate(trained, f"--checkpoint={step}", f"--out={tmp_path}/out", ranks=ranks)
    assert ended.code == 0, last_lines(ended.output)
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert found["figures"] == logged(trained, step)
    assert found["step"] == step and found["averaged"] and found["samples"] == 359


def test_each_class_and_the_worst_samples(trained, tmp_path):
    ended = evaluate(trained, "--checkpoint=last", f"--out={tmp_path}", "--worst=3", ranks=2)
    assert ended.code == 0, last_lines(ended.output)
    with (tmp_path / "confusion.csv").open() as file:
        head, *rows = csv.reader(file)
    confusion = np.array([row[1:] for row in rows], int)
    assert head[1:] == [str(n) for n in range(10)] == [row[0] for row in rows]
    assert confusion.sum() == 359
    accuracy = logged(trained, 20)["accuracy"]
    assert np.trace(confusion) / 359 == pytest.approx(accuracy, abs=1e-12)
    with (tmp_path / "classes.csv").open() as file:
        _, *rows = csv.reader(file)
    recall = [float(row[2]) for row in rows]
    np.testing.assert_allclose(recall, np.diag(confusion) / confusion.sum(1))
    found = json.loads((tmp_path / "evaluation.json").read_text())["worst"]
    assert len(found) == 3 and found[0]["loss"] >= found[1]["loss"] >= found[2]["loss"] > 1
    assert len({one["sample"] for one in found}) == 3
    sheets = sorted((tmp_path / "worst").iterdir())
    assert len(sheets) == 3 and f"sample-{found[0]['sample']}-" in sheets[0].name
    assert Image.open(sheets[0]).size[0] >= 96
    assert Image.open(tmp_path / "confusion.png").size == (640, 640)
    ended = evaluate(trained, "--checkpoint=last", f"--out={tmp_path}", "--worst=0")
    assert ended.code == 0 and not list((tmp_path / "worst").iterdir()), "of the one before"


def test_weights_as_trained_are_others_than_averaged_ones(trained, tmp_path):
    assert evaluate(trained, "--no-ema", f"--out={tmp_path}").code == 0
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert not found["averaged"] and found["figures"]["loss"] != logged(trained, 20)["loss"]


def test_by_default_the_best_and_into_the_runs_folder(trained):
    assert evaluate(trained).code == 0
    best = max((10, 20), key=lambda step: logged(trained, step)["accuracy"])
    out = trained / "evaluation" / f"step-{best:08d}-val"
    assert json.loads((out / "evaluation.json").read_text())["step"] == best


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--checkpoint=15"], "none of step 15"),
        (["--checkpoint=/no/such"], "/no/such is no checkpoint"),
        (["--num_classes=12"], "the digits have 10 classes"),
        (["--nonsense=1"], "no flag --nonsense"),
        (["--out=/dev/null/x"], "writing /dev/null/x"),
        (["--worst=-3"], "-3 is not a number of samples"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(trained, flags, said):
    ended = evaluate(trained, *flags)
    assert ended.code == 2, last_lines(ended.output)
    (error,) = ended.errors()
    assert said in error, error
    assert "Traceback" not in ended.output and "batches: " not in ended.output


def told_where_rank_1_has(flag, trained, out):
    """The one error of two ranks, where the second has a flag that the first has not."""
    script = (
        "import os, sys; from hvdkit.commands import evaluate\n"
        f"own = [{flag!r}] if os.environ['OMPI_COMM_WORLD_RANK'] == '1' else []\n"
        "sys.exit(evaluate.main([*sys.argv, *own]))"
    )
    command = ["-c", script, f"--run_dir={trained}", f"--out={out}"]
    ended = launch(2, command, "mpirun", timeout=120)
    assert ended.code == 2, last_lines(ended.output)
    (error,) = ended.errors()
    return error


@pytest.mark.parametrize("flag", ["--eval_batch_size=3", "--no-ema"])
def test_ranks_with_other_flags_are_told_before_they_wait_for_each_other(trained, tmp_path, flag):
    error = told_where_rank_1_has(flag, trained, tmp_path / "out")
    assert "on rank 1" in error and "give every rank the same flags" in error


def test_one_rank_alone_says_what_only_it_was_given(trained, tmp_path):
    error = told_where_rank_1_has(f"--run_dir={tmp_path}", trained, tmp_path / "out")
    assert "rank 1 on " in error and f"{tmp_path} is no run's folder" in error


def test_a_missing_flag_is_said_by_one_rank():
    ended = launch(2, ["-m", "hvdkit", "evaluate"], "mpirun")
    assert ended.code == 2, last_lines(ended.output)
    (error,) = ended.errors()
    assert "--run_dir" in error


def test_a_folder_that_is_no_run_and_one_without_checkpoints(trained, tmp_path):
    (error,) = evaluate(tmp_path).errors()
    assert "is no run's folder: it holds no config.cfg" in error
    shutil.copy(trained / "config.cfg", tmp_path)
    (error,) = evaluate(tmp_path).errors()
    assert "holds no checkpoint" in error
