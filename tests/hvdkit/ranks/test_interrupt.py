"""Ctrl-C and other requests to stop, in a real terminal; under make: test_hosts.py."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import wait_for
from terminal import CTRL_C, Terminal

from hvdkit.checkpoint import files
from ranks import ENVIRONMENT, PROJECT

SAYS = "stopping after this step: saving, then ending"
PROMISE = f"{SAYS}; Ctrl-C again ends at once"

LISTENS = """
import sys
sys.path.insert(0, ".")
from hvdkit.ranks.interrupt import StopSignal
stop = StopSignal(rank=int(sys.argv[1]))
print("listening", flush=True)
"""
# Waits in C code that no signal gets it out of, as in a collective that another rank never enters.
STUCK = """
import ctypes
lock = ctypes.create_string_buffer(64)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(lock)
"""
# Sends itself signals.
HEARD = """
import os, signal, time
for name in sys.argv[2:]:
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(0.1)
print(f"asked {stop.asked}, first {stop.number}", flush=True)
"""
# Forks a child and ends it.
FORKED = """
import multiprocessing, time
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
child.terminate()
child.join(10)
time.sleep(0.2)
print(f"asked {stop.asked}, child {child.exitcode}", flush=True)
"""


# A launcher that is killed once its rank listens; what the rank is told stands in a file.
KILLED = """
HOROVOD_RANK=0 "$0" -c "$1" 0 >"$2" &
until grep -q listening "$2"; do sleep 0.1; done
kill -KILL $$
"""
ORPHAN = """
import os, time
from hvdkit.ranks import interrupt
interrupt._ALONE = 2  # seconds
print(os.getpid(), flush=True)
while not stop.asked: time.sleep(0.05)
print(f"asked {stop.asked}, first {stop.number}", flush=True)
time.sleep(600)
"""


def python(*words: str) -> Terminal:
    return Terminal([sys.executable, *words], PROJECT, ENVIRONMENT)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_ctrl_c_is_answered_by_rank_0_and_the_second_ends_a_stuck_process(rank):
    with python("-c", LISTENS + STUCK, str(rank)) as terminal:
        terminal.wait_for("listening", 20)
        terminal.press(CTRL_C)
        if rank == 0:
            terminal.wait_for(re.escape(PROMISE), 5)
        time.sleep(0.6)
        terminal.press(CTRL_C)
        assert terminal.wait(5) == 130
        assert terminal.shown.count("stopping") == (rank == 0)
        assert "Traceback" not in terminal.shown


@pytest.mark.parametrize(
    "signals, answer",
    [
        (["SIGINT", "SIGINT"], PROMISE),  # from the terminal and from a launcher: one Ctrl-C
        (["SIGINT", "SIGTERM", "SIGTERM"], PROMISE),
        (["SIGTERM", "SIGINT"], SAYS),
        (["SIGUSR1"], None),  # its sender reports it
        (["SIGHUP"], None),  # nobody is there
    ],
)
def test_a_forwarded_signal_is_no_second_ctrl_c(signals: list[str], answer: str | None):
    with python("-c", LISTENS + HEARD, "0", *signals) as terminal:
        assert terminal.wait(20) == 0, terminal.shown
        first = getattr(signal, signals[0]).value
        assert f"asked True, first {first}" in terminal.shown
        lines = [line for line in terminal.shown.splitlines() if "stopping" in line]
        assert lines == ([answer] if answer else [])


def test_the_end_of_a_forked_child_does_not_stop_the_run():
    with python("-c", LISTENS + FORKED, "0") as terminal:
        assert terminal.wait(20) == 0, terminal.shown
        assert "asked False, child -15" in terminal.shown


@pytest.mark.parametrize(
    "words",
    ["train.py --flagfile=configs/demo.cfg", "-m hvdkit check --data_dir=datasets/demo"],
)
def test_ctrl_c_while_tensorflow_is_imported_ends_without_a_trace(words):
    with python(*words.split()) as terminal:
        end = time.monotonic() + 60
        maps = Path(f"/proc/{terminal.pid}/maps")
        while "libtensorflow" not in maps.read_text() and time.monotonic() < end:
            time.sleep(0.01)
        terminal.press(CTRL_C)
        assert terminal.wait(20) == 130
        assert terminal.shown.strip() == "^C"


@pytest.mark.slow  # under hosts.sh: test_hosts.py
def test_ctrl_c_under_horovodrun_saves_says_where_and_ends(tiny, tmp_path):
    """Steps and saves take milliseconds here: horovodrun gives ranks a few seconds."""
    words = ["horovodrun", "--gloo", "--disable-cache", "-np", "2", sys.executable, "train.py"]
    words += ["--flagfile=configs/demo.cfg", *tiny]
    words += ["--num_steps=100000", "--log_every=100"]
    with Terminal(words, PROJECT, ENVIRONMENT) as terminal:
        terminal.wait_for("step 100/", 240)
        terminal.press(CTRL_C)
        # It asks for its ranks' codes in two threads: 0 where the wrong one gets them.
        assert terminal.wait(60) in (1, 0) and not terminal.left_after(10), terminal.shown
        shown = terminal.shown
    step = re.search(r"saved at step (\d+)", shown)
    assert step and shown.count(SAYS) == 1, shown
    assert PROMISE not in shown  # it comes as SIGTERM
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == f"step-{int(step[1]):08}" and files.verify(saved)


def test_a_rank_whose_launcher_is_gone_saves_and_ends(tmp_path: Path):
    """It is asked to save, and ends some time later where it cannot."""
    file = tmp_path / "said"
    words = ["sh", "-c", KILLED, sys.executable, LISTENS + ORPHAN, str(file)]
    assert subprocess.run(words, cwd=PROJECT, timeout=60).returncode == -signal.SIGKILL
    wait_for(lambda: "asked True" in file.read_text(), "it was not asked", 30)
    process = Path(f"/proc/{file.read_text().split()[1]}")
    wait_for(lambda: not process.exists(), "it runs on", 30)
    assert f"first {int(signal.SIGUSR1)}" in file.read_text()
