"""A rank that hangs or ends: the run ends by itself, and one line names the rank and its host."""

import math
import os
import re
import time

import pytest
import tensorflow as tf

from hvdkit.ranks import messages, peers
from hvdkit.ranks.world import World
from ranks import HELPERS, last_lines, launch

WAITS = HELPERS / "waits.py"
HOST = os.uname().nodename


@pytest.mark.parametrize(
    "backend, wait, ending",
    [
        ("mpirun", "sum", "stop"),
        pytest.param("gloo", "sum", "hang", marks=pytest.mark.slow),
        pytest.param("mpirun", "message", "hang", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_is_named(backend: str, wait: str, ending: str):
    ended = launch(3, [WAITS, ending, 5, wait], backend, timeout=200)
    assert ended.code != 0
    (message,) = ended.errors()
    words = {
        "stop": [
            f"rank 1 on {HOST} has not answered for 5 s",
            "its process was stopped",
        ],
        "hang": [f"rank 1 on {HOST}", "at waits.py, line", "(fail)"],
    }
    assert all(word in message for word in words[ending]), message
    assert not re.search(r">:Traceback", ended.output), last_lines(ended.output)


@pytest.mark.parametrize("ending", ["raise", "exit"])
def test_what_ends_one_rank_ends_those_that_wait_for_it(ending: str):
    """Python's own way out would wait in MPI's finalize for them, and not answer them."""
    ended = launch(2, [WAITS, ending, 600, "message"], "mpirun", timeout=100)
    assert ended.code == 1 and "only here" in ended.output, last_lines(ended.output)
    assert "does not answer" not in ended.output, last_lines(ended.output)


# A training whose rank 1 hangs, or is killed, within its tenth step; limits are seconds here.
HANGS = """
import os, sys, time
sys.path.insert(0, os.getcwd())
import hvdkit
from settings import Settings
how = sys.argv.pop(1)
hvdkit.check_flags(Settings)
import tensorflow as tf
import train
from hvdkit.ranks import messages
from hvdkit.launcher import launch_rank
messages._LEAST_PATIENCE, messages._STEPS, steps = 4, 8, []
def pass_on(numbers):
    steps.append(1)
    if len(steps) == 10 and launch_rank() == 1:
        if how == "killed": os.kill(os.getpid(), 9)
        time.sleep(1000)
    return numbers
class Run(hvdkit.Run):
    def loss(self, batch):
        (name, inputs), *others = batch["inputs"].items()
        passed = tf.ensure_shape(tf.numpy_function(pass_on, [inputs], inputs.dtype), inputs.shape)
        return super().loss(batch | {"inputs": dict(others) | {name: passed}})
from hvdkit.run import main
main.Run = Run
sys.exit(hvdkit.main(train.train, Settings))
"""


def test_a_rank_that_hangs_within_a_step_is_named_in_the_time_of_some_steps(tiny):
    """All wait in the same line of train.py: what differs is that its own part is not done."""
    flags = [*tiny, "--num_steps=1000", "--eval_every=0", "--log_every=1"]
    ended = launch(2, ["-c", HANGS, "hangs", *flags], "mpirun", timeout=250)
    (message,) = ended.errors()
    assert ended.code == 1 and "step 9/" in ended.output, last_lines(ended.output)
    assert "its own part of the step not done: its GPU, driver or code hangs" in message
    assert f"hangs: rank 1 on {HOST}" in message


def test_a_rank_that_is_killed_while_others_wait_in_an_exchange_is_named_at_once(tiny):
    """They wait in the memory that they share, of which Horovod knows nothing."""
    flags = [*tiny, "--num_steps=1000", "--eval_every=0", "--bn_sync=full"]
    start = time.monotonic()
    ended = launch(3, ["-c", HANGS, "killed", *flags], "gloo", timeout=250)
    endings = [error for error in ended.errors() if "the run ends" in error]
    assert len(endings) == 1 and ended.code != 0, last_lines(ended.output)
    message = endings[0]
    assert f"rank 1 on {HOST} ended before the others" in message
    assert re.search(
        r"rank 1 has ended while rank \d waited in exchange \d+ \(", message
    )
    assert ".batch" in message, message
    assert time.monotonic() - start < 200


# A training whose rank 1 reads from a disk of its own, which hangs once step 3 was made: whoever
# opens a file there waits. Of a hard mount without its server, it is the same; and a process that
# waits there stays when it has ended, and answers nobody: here it stops itself instead.
HANGS_IN_A_READ = """
import os, pathlib, shutil, signal, sys
sys.path.insert(0, os.getcwd())
import hvdkit
from settings import Settings
from hvdkit.launcher import launch_rank
own = pathlib.Path(sys.argv.pop(1))
if launch_rank() == 1:
    [given] = [word for word in sys.argv if word.startswith("--data_dir=")]
    shutil.copytree(given.removeprefix("--data_dir="), own)
    sys.argv.append(f"--data_dir={own}")
hvdkit.check_flags(Settings)
import train
from hvdkit.ranks import messages
from hvdkit.run import actions
messages._LEAST_PATIENCE = 4
log = actions.Log.__call__
def log_and_hang(self, step, result):
    log(self, step, result)
    if step == 3 and launch_rank() == 1:
        for picture in own.rglob("*.png"):
            picture.unlink()
            os.mkfifo(picture)
        os._exit = lambda code: os.kill(os.getpid(), signal.SIGSTOP)
actions.Log.__call__ = log_and_hang
sys.exit(hvdkit.main(train.train, Settings))
"""


def test_a_read_that_hangs_is_part_of_a_step_and_ends_the_run_as_a_disk_that_is_away(
    tiny, tmp_path
):
    flags = [*tiny, "--num_steps=1000", "--eval_every=0", "--log_every=1"]
    ended = launch(
        2, ["-c", HANGS_IN_A_READ, tmp_path / "own", *flags], "mpirun", timeout=250
    )
    # The other rank is told to save, and cannot.
    (message,) = [error for error in ended.errors() if "the run ends" in error]
    assert ended.code == 76 and "step 3/" in ended.output, last_lines(ended.output)
    assert f"the run ends: rank 1 on {HOST} has waited " in message
    assert "s for a batch of data: its disk, mount or file server hangs" in message


def test_how_long_a_rank_may_be_still(monkeypatch: pytest.MonkeyPatch):
    """Limits: 600 s until the first step has ended, 1,800 s elsewhere."""
    now = [0.0]
    monkeypatch.setattr(messages.time, "monotonic", lambda: now[0])
    heartbeat = messages.Heartbeat()

    def in_steps(*lengths: float) -> float:
        """Each reads and computes for half of so many seconds; patience in the next one."""
        for seconds in lengths:
            for leave in (heartbeat.pause_step, heartbeat.leave_step):
                heartbeat.enter_step()
                now[0] += seconds / 2
                leave()
                now[0] += 500  # time of actions, or of code between the parts
                assert heartbeat.patience(600, 1800) in (600, 1800)
        heartbeat.enter_step()
        return heartbeat.patience(600, 1800)

    assert in_steps() == 600
    assert in_steps(1) == 60, "step 2"
    assert in_steps(90) == 60, "one of the first was slow"
    assert in_steps(40, 40, 40) == 600, "steps of the first ten"
    assert in_steps(*[40] * 20) == 1200
    # After a return to an older checkpoint the step is traced, and compiled, anew.
    heartbeat.begin()
    assert heartbeat.patience(600, 1800) == 600
    assert heartbeat.patience(7200, 1800) == 7200, "--start_limit_s may be longer"


@pytest.mark.parametrize(
    "words",
    [
        "Horovod has been shut down. This was caused by an exception",
        "[/x/gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:45992",
        "[/x/gloo/transport/tcp/unbound_buffer.cc:82] Timed out waiting 30000ms for recv",
        "NCCL async error: unhandled system error",
        "rank 1 has ended while rank 0 waited in exchange 37 (24 numbers of a.batch)",
    ],
)
def test_words_of_a_rank_that_others_left_alone(words: str):
    """Also those of Gloo and NCCL in the middle of a sum, which do not name Horovod."""
    error = tf.errors.UnknownError(None, None, f"{words} [[{{{{node Horovod}}}}]]")
    assert peers.left_alone(error)
    other = tf.errors.UnknownError(None, None, "no such file [[{{node HorovodX}}]]")
    assert not peers.left_alone(other)


def test_a_rank_that_cannot_be_asked_may_move(monkeypatch: pytest.MonkeyPatch):
    """Where a firewall is between, no run ends because the others are silent."""
    watch = peers.Peers(World(0, 1, 0, 1), 0)
    watch._places = watch._places * 3
    monkeypatch.setattr(peers.heartbeat, "still", lambda: 1e4)
    still = peers._Answer("", "a.py, line 1", 1e4, left=-1e3)
    answers = {1: still, 2: still}
    monkeypatch.setattr(watch, "_ask_all", lambda: answers)
    watch._limits = (60, 60)
    assert "no rank has moved" in watch._stuck()
    answers[2] = peers._Answer("silent", "", math.inf)
    assert watch._stuck() == ""


@pytest.mark.slow
def test_a_stopped_rank_is_not_reported_as_ended():
    """Where Gloo gives up by itself, after 30 s by default."""
    short = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}
    (message,) = launch(
        3, [WAITS, "stop", 0, "sum"], "gloo", timeout=200, env=short
    ).errors()
    assert f"rank 1 on {HOST} does not answer" in message
