"""--trackers: what is there, what is not installed, and servers that are slow or gone."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import psutil
import pytest
from hvdkit.observe import telemetry, trackers
from hvdkit.ranks.world import World
from hvdkit.settings import Settings

from ranks import last_lines, launch

FLAGS = ["train.py", "--flagfile=configs/blank.cfg", "--num_steps=4", "--log_every=1"]


def test_weeks_of_logs_leave_memory_as_it_was(tmp_path):
    """As numbers of Python's, 20,000 steps and figures took 31 MB."""
    board = trackers.TensorBoard(tmp_path)
    memory = psutil.Process().memory_info
    for step in range(21_000):
        board.scalars(step, {"loss": 1.0 / (step + 1)})
        if step == 1000:
            before = memory().rss
    assert memory().rss - before < 5e6
    board.close()


def test_trackers_get_a_few_figures_of_thousands_of_ranks():
    few = telemetry._by_rank(range(16))
    assert few["loss_by_rank/7"] == 7 and len(few) == 20
    losses = np.arange(8192.0)
    losses[5] = np.nan
    assert len(telemetry._by_rank(losses)) == 4
    assert telemetry._by_rank(losses)["loss_by_rank/worst_rank"] == 5
    assert telemetry._by_rank([1.0, 4.0, 2.0])["loss_by_rank/median"] == 2


class Given:
    """A tracker of a test: keeps what it got."""

    name = "given"

    def __init__(self) -> None:
        self.got, self.wait, self.error, self.closed = [], threading.Event(), None, False
        self.wait.set()

    def scalars(self, step, values):
        self.wait.wait(20)
        if self.error:
            raise self.error
        self.got.append((step, values))

    def pictures(self, step, pictures):
        self.got.append((step, "pictures"))

    def flush(self): ...

    def close(self):
        self.closed = True


def test_calls_arrive_in_order_and_the_end_waits_for_them():
    inner = Given()
    tracker = trackers.OnThread(inner)
    values = {"loss": 1.0}
    for step in range(50):
        tracker.scalars(step, values)
    values["loss"] = 2.0  # what was given is what counts
    tracker.close()
    assert inner.got == [(step, {"loss": 1.0}) for step in range(50)] and inner.closed


def test_a_slow_server_keeps_nobody_waiting_and_what_it_lacks_is_told(monkeypatch):
    monkeypatch.setattr(trackers, "_QUEUED", 10)
    inner = Given()
    tracker = trackers.OnThread(inner)
    inner.wait.clear()
    start = time.monotonic()
    for step in range(30):
        tracker.scalars(step, {})
    assert time.monotonic() - start < 1
    threading.Timer(0.5, inner.wait.set).start()
    with pytest.raises(TimeoutError, match=r"too slow for (19|20) of the figures"):
        tracker.close()
    assert len(inner.got) in (10, 11)


def test_a_server_that_never_answers_does_not_keep_the_run(monkeypatch):
    monkeypatch.setattr(trackers, "_SECONDS_TO_END", 0.2)
    inner = Given()
    tracker = trackers.OnThread(inner)
    inner.wait.clear()
    tracker.scalars(1, {})
    with pytest.raises(TimeoutError, match="did not take the last figures"):
        tracker.close()
    inner.wait.set()


def test_what_it_raises_comes_out_once():
    inner = Given()
    inner.error = ConnectionError("gone")
    tracker = trackers.OnThread(inner)
    tracker.scalars(1, {})
    tracker._thread.join(0.3)
    with pytest.raises(ConnectionError, match="gone"):
        tracker.scalars(2, {})
    tracker.scalars(3, {})
    tracker.close()


def test_a_package_that_is_not_installed_is_refused_in_one_sentence(tmp_path):
    ended = launch(2, [*FLAGS, "--trackers=wandb", f"--run_dir={tmp_path}/run"], "mpirun")
    assert ended.code == 2, last_lines(ended.output)
    (error,) = ended.errors()
    assert "--trackers=wandb: the package wandb is not installed" in error


PACKAGE = '''
"""Stands for wandb, which needs a server: notes what it is asked."""
import json
class Run:
    id = "abc"
    def log(self, values, step):
        with open(FILE, "a") as file: file.write(json.dumps([step, sorted(values)]) + "\\n")
        if step == 3: raise RuntimeError("the server is gone")
    def finish(self): ...
def init(**given):
    with open(FILE, "a") as file: file.write(json.dumps(["init", given["id"]]) + "\\n")
    return Run()
'''


def test_a_tracker_that_fails_is_told_once_and_a_resumption_goes_on_with_its_run(tmp_path):
    told = tmp_path / "told.jsonl"
    (tmp_path / "wandb.py").write_text(f"FILE = {str(told)!r}\n{PACKAGE}")
    env = {"PYTHONPATH": str(tmp_path)}
    run = [*FLAGS, "--trackers=csv,wandb", f"--run_dir={tmp_path}/run"]
    first = launch(1, [*run, "--log_every=2"], env=env)
    assert first.code == 0, last_lines(first.output)
    second = launch(1, [*run, "--num_steps=8"], env=env)
    assert second.code == 0, last_lines(second.output)
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    assert [known for step, known in lines if step == "init"] == [None, "abc"]
    logged = [step for step, _ in lines if step != "init"]
    assert logged[:2] == [2, 4] and "train/loss" in lines[1][1]
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_mlflow_against_a_folder_and_a_resumption(tmp_path):
    store = f"file://{tmp_path}/store"
    env = {"MLFLOW_TRACKING_URI": store, "MLFLOW_ALLOW_FILE_STORE": "true"}
    run = [*FLAGS, "--trackers=mlflow", f"--run_dir={tmp_path}/run"]
    for steps in (4, 6):
        ended = launch(2, [*run, f"--num_steps={steps}"], "mpirun", env=env)
        assert ended.code == 0, last_lines(ended.output)
        assert "cannot be written" not in ended.output, last_lines(ended.output)
    (folder,) = (path.parent for path in (tmp_path / "store").glob("*/*/meta.yaml"))
    rows = (folder / "metrics" / "train" / "loss").read_text().splitlines()
    assert [int(row.split()[2]) for row in rows] == [1, 2, 3, 4, 5, 6]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    logged = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    assert [float(row.split()[1]) for row in rows] == logged
    assert (folder / "params" / "optimizer").read_text() == "adam"


def test_a_tracker_that_cannot_be_started_is_refused_in_one_sentence(tmp_path):
    words = [*FLAGS, "--trackers=mlflow", f"--run_dir={tmp_path}/run"]
    ended = launch(2, words, "mpirun", env={"MLFLOW_TRACKING_URI": "nosuch://x"})
    assert ended.code == 2 and "Traceback" not in ended.output, last_lines(ended.output)
    (error,) = ended.errors()
    assert "--trackers=mlflow cannot be started: " in error and "nosuch" in error


def test_speeds_of_weeks_are_a_bounded_list(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "_RATES", 50)
    monkeypatch.setattr(telemetry, "say", lambda *_: None)
    config = Settings(run_dir=str(tmp_path), trackers="")
    with telemetry.Telemetry(config, World(0, 1, 0, 1), 0, 100) as records:
        assert records.median_speed() is None
        for step in range(200):
            records.step(step, 8, {"loss": 1.0, "lr": 0.1}, [1.0], 0.0, {})
            assert (records.median_speed() is None) == (step == 0)  # which builds the graphs
        assert len(records._rates) == 50
