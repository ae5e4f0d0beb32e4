"""Speeds are of training alone: by a clock that the test turns."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from hvdkit.observe.telemetry import Telemetry
from hvdkit.ranks.world import World
from hvdkit.settings import Settings


@pytest.fixture
def clock(monkeypatch):
    """`clock[0]` is the time, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_speed_is_of_the_steps_since_the_last_line_without_evaluation(tmp_path, clock):
    config = dataclasses.replace(Settings(), run_dir=str(tmp_path), num_steps=100, trackers="")
    figures = {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0}
    telemetry = Telemetry(config, World(0, 1, 0, 1), first_step=10, epoch=50)
    with telemetry:
        clock[0] += 20.0
        telemetry.step(20, 8, figures, [1.0], waited=5.0, times={})  # 80 samples in 20 s
        with telemetry.not_training():
            clock[0] += 300.0
        clock[0] += 5.0
        telemetry.step(25, 8, figures, [1.0], waited=0.0, times={})  # 40 samples in 5 s
        clock[0] += 10.0
        telemetry.step(30, 8, figures, [1.0], waited=10.0, times={})  # 40 samples in 10 s
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["samples_per_second"] for line in lines] == [4.0, 8.0, 4.0]
    assert [line["data_wait"] for line in lines] == [0.25, 0.0, 1.0]
    assert telemetry.median_speed() == 6.0  # of 8 and 4: the first interval holds the start


def test_a_folder_that_is_removed_meanwhile_begins_anew_and_says_so(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.cfg").write_text("--num_steps=9\n")
    config = dataclasses.replace(Settings(), run_dir=str(run), trackers="")
    figures = {"loss": 1.0, "lr": 0.1}
    with Telemetry(config, World(0, 1, 0, 1), first_step=0, epoch=50) as telemetry:
        for step in range(1, 5):
            if step == 3:
                shutil.rmtree(run)
            telemetry.step(step, 8, figures, [1.0], waited=0.0, times={})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 4]
    assert (run / "config.cfg").read_text() == "--num_steps=9\n"
    assert capsys.readouterr().out.count(f"note: {run}/metrics.jsonl was removed or moved") == 1


def test_figures_of_each_layer_and_the_norm_of_all(tmp_path):
    """To gradients.jsonl and to trackers; NaN is null, as JSON has none."""
    config = dataclasses.replace(Settings(), run_dir=str(tmp_path), num_steps=9, trackers="")
    telemetry = Telemetry(config, World(0, 1, 0, 1), first_step=0, epoch=50)
    shown = []
    tracker = SimpleNamespace(name="t", scalars=None, close=lambda: None)
    tracker.scalars = lambda step, values: shown.append((step, values))
    telemetry._trackers = [tracker]
    with telemetry:
        telemetry.gradients(4, ["a", "b"], np.array([[1.0, 3.0, 0.0], [np.nan, 4.0, 0.5]]))
    (line,) = (tmp_path / "gradients.jsonl").read_text().splitlines()
    layers = {
        "a": {"sum": 1.0, "norm": 3.0, "nonfinite": 0.0},
        "b": {"sum": None, "norm": 4.0, "nonfinite": 0.5},
    }
    assert json.loads(line) == {"step": 4, "global_norm": 5.0, "layers": layers}
    (step, values), *_ = shown
    assert step == 4 and values["gradient_norm/b"] == 4.0 and len(values) >= 5


def test_pictures_of_an_evaluation_stand_below_each_other_and_large_enough(tmp_path):
    config = dataclasses.replace(Settings(), run_dir=str(tmp_path), num_steps=9, trackers="")
    pictures = np.zeros((2, 30, 40, 3), np.uint8)
    pictures[1] = 200
    with Telemetry(config, World(0, 1, 0, 1), first_step=0, epoch=50) as telemetry:
        telemetry.evaluation(4, {"loss": 1.5, "miou": 0.25}, "miou", pictures)
    sheet = np.asarray(Image.open(tmp_path / "predictions.png"))
    assert sheet.shape == (2 * 30 * 16, 640, 3)  # 16 times as wide as 40
    assert sheet[:480].max() == 0 and sheet[480:].min() == 200
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["step"], found["eval_loss"], found["eval_miou"]) == (4, 1.5, 0.25)
