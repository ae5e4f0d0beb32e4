"""Speeds are of training alone: by a clock that the test turns."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from config import Config
from engine.telemetry import Telemetry
from engine.world import World


@pytest.fixture
def clock(monkeypatch):
    """`clock[0]` is the time, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_speed_is_of_the_steps_since_the_last_line_without_evaluation(tmp_path, clock):
    config = dataclasses.replace(Config(), run_dir=str(tmp_path), num_steps=100, trackers="")
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
