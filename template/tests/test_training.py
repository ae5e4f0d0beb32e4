"""Whole runs with real ranks, through every way of starting them."""

import json
import re

import numpy as np
import pytest
from PIL import Image
from ranks import last_lines, train

from engine import checkpoint


def run(ranks, flags, **how):
    ended = train(ranks, *flags, **how)
    assert ended.code == 0, last_lines(ended.output)
    return ended


def summary(tmp_path):
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def lines(tmp_path):
    return [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("backend", "ranks"), [("alone", 1), ("gloo", 2), ("mpi", 2), ("mpirun", 2)]
)
def test_a_run_starts_trains_and_leaves_its_records(backend, ranks, tiny, tmp_path):
    ended = run(ranks, tiny, backend=backend)
    folder = tmp_path / "run"
    steps = [x for x in lines(tmp_path) if "loss" in x]
    assert [x["step"] for x in steps] == [1, 2, 3, 4]
    assert {"loss", "lr", "samples_per_second", "grad_norm"} <= set(steps[0])
    assert 0 < lines(tmp_path)[-1]["eval_miou"] < 1
    assert summary(tmp_path)["exit_reason"] == "done" and summary(tmp_path)["ranks"] == ranks
    assert re.fullmatch(r"[0-9a-f]{64}", summary(tmp_path)["weights_sha256"])
    assert checkpoint.fault(folder / "checkpoints" / "step-00000004") is None
    assert list((folder / "tensorboard").glob("events*"))
    picture = Image.open(folder / "predictions.png")
    assert picture.width > picture.height / 4 and str(folder / "predictions.png") in ended.output
    # The chief alone speaks, a line a step, and TensorFlow's start-up lines stay away.
    own = [x for x in ended.output.splitlines() if re.search(r"(^|>:)step \d/4 .* ETA", x)]
    assert len(own) == 4
    if backend in ("alone", "mpirun"):  # horovodrun itself imports TensorFlow
        assert "oneDNN" not in ended.output and "absl" not in ended.output


def test_eight_ranks_oversubscribed(tiny, tmp_path):
    run(8, [*tiny, "--global_batch_size=9", "--num_steps=2"], timeout=280)
    assert summary(tmp_path)["ranks"] == 8 and summary(tmp_path)["step"] == 2


def test_evaluation_figures_do_not_depend_on_the_number_of_ranks(tiny, tmp_path):
    """10 samples in batches of 4: 3 batches, which 2 ranks share unevenly, the last one short.

    A finished run that is started again evaluates its checkpoint and does nothing else.
    """
    run(1, [*tiny, "--num_steps=6", "--base_lr=0.01"], backend="alone")
    figures = {}
    for ranks in (1, 2, 3):
        run(ranks, [*tiny, "--num_steps=6"])
        figures[ranks] = {k: v for k, v in lines(tmp_path)[-1].items() if k.startswith("eval_")}
    assert len(figures[1]) == 14 and figures[1]["eval_miou"] > 0
    assert figures[2] == pytest.approx(figures[1], rel=1e-12, nan_ok=True)
    assert figures[3] == pytest.approx(figures[1], rel=1e-12, nan_ok=True)


def test_a_killed_run_goes_on_and_ends_with_the_weights_of_an_uninterrupted_one(tiny, tmp_path):
    flags = [*tiny, "--deterministic", "--checkpoint_every=3", "--num_steps=8", "--keep=1"]
    run(2, [*flags, f"--run_dir={tmp_path / 'whole'}"])
    checkpoints = tmp_path / "run" / "checkpoints"
    train(2, *flags, kill_when=lambda: (checkpoints / "step-00000003").exists())
    assert not (tmp_path / "run" / "summary.json").exists(), "killed too late"
    ended = run(2, flags)
    assert "going on from" in ended.output
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary(tmp_path)["weights_sha256"] == whole["weights_sha256"]
    assert [x["step"] for x in lines(tmp_path) if "loss" in x] == list(range(1, 9))
    assert len(list(checkpoints.iterdir())) <= 2  # the newest, and the best if it is another


def test_a_run_can_be_run_again_from_its_own_config(tiny, tmp_path):
    run(1, [*tiny, "--deterministic"], backend="alone")
    first = summary(tmp_path)["weights_sha256"]
    again = ["--flagfile=" + str(tmp_path / "run" / "config.cfg"), "--resume=never"]
    run(1, again, backend="alone")
    assert summary(tmp_path)["weights_sha256"] == first


def test_loss_falls(tiny, tmp_path):
    run(2, [*tiny, "--num_steps=40", "--global_batch_size=8", "--log_every=5"])
    losses = [x["loss"] for x in lines(tmp_path) if "loss" in x]
    assert np.mean(losses[-2:]) < 0.8 * losses[0]
