"""Ctrl-C and other requests to stop: in a real terminal, alone and under each launcher."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest
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

LAUNCHERS = {
    "alone": [],
    "gloo": ["horovodrun", "--gloo", "--disable-cache", "-np", "2"],
    "mpi": ["horovodrun", "--mpi", "--disable-cache", "-np", "2"],
    "mpirun": ["mpirun", "-np", "2", "--bind-to", "none"],
}
# A shell's code for SIGINT; what horovodrun and mpirun carry is theirs.
CODES = {"alone": 75, "gloo": 1, "mpi": 130, "mpirun": 1}


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
        (["SIGINT"], PROMISE),
        (["SIGINT", "SIGINT"], PROMISE),  # from the terminal and from a launcher: one Ctrl-C
        (["SIGINT", "SIGTERM", "SIGTERM"], PROMISE),
        (["SIGTERM", "SIGINT"], SAYS),
        (["SIGTERM"], SAYS),
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
    [
        ["train.py", "--flagfile=configs/demo.cfg"],
        ["-m", "hvdkit", "evaluate", "--run_dir=runs/demo"],
        ["-m", "hvdkit", "predict", "--run_dir=runs/demo", "--out=predicted", "photo.jpg"],
        ["-m", "hvdkit", "export", "--run_dir=runs/demo", "--out=exported"],
        ["-m", "hvdkit", "check", "--data_dir=datasets/demo"],
    ],
    ids=lambda words: words[1] if words[0] == "-m" else words[0],
)
def test_ctrl_c_while_tensorflow_is_imported_ends_without_a_trace(words):
    with python(*words) as terminal:
        end = time.monotonic() + 60
        maps = Path(f"/proc/{terminal.pid}/maps")
        while "libtensorflow" not in maps.read_text() and time.monotonic() < end:
            time.sleep(0.01)
        terminal.press(CTRL_C)
        assert terminal.wait(20) == 130
        assert terminal.shown.strip() == "^C"


@pytest.mark.parametrize(
    # Over MPI it may take three tries; tests/launch presses Ctrl-C under hosts.sh's mpirun.
    "launcher",
    [pytest.param(n, marks=[pytest.mark.slow] * n.startswith("mpi")) for n in LAUNCHERS],
)
def test_ctrl_c_saves_says_where_and_ends(tiny, tmp_path, launcher):
    """Steps and saves take milliseconds here: horovodrun and mpirun give ranks a few seconds.

    Over MPI horovodrun kills mpirun five seconds after Ctrl-C, whatever its ranks do, and mpirun
    its ranks after a while (hosts.sh does neither). On a busy machine that can be too few: of three
    tries one has to do.
    """
    tries = 3 if launcher.startswith("mpi") else 1
    for left in reversed(range(tries)):
        shown, code = ended_by_ctrl_c(launcher, [*tiny, f"--run_dir={tmp_path}/run{left}"])
        step = re.search(r"saved at step (\d+)", shown)
        if step:
            break
    assert step, shown
    assert shown.count(SAYS) == 1, shown
    assert (PROMISE in shown) == (launcher == "alone")  # elsewhere it comes as SIGTERM
    assert code == CODES[launcher], shown
    saved = list((tmp_path / f"run{left}" / "checkpoints").iterdir())
    assert [path.name for path in saved] == [f"step-{int(step[1]):08}"]
    assert files.fault(saved[0]) is None


def ended_by_ctrl_c(launcher: str, flags: list[str]) -> tuple[str, int]:
    """What a run in a terminal showed that got Ctrl-C after 200 steps, and its exit code."""
    train = [sys.executable, "train.py", "--flagfile=configs/demo.cfg", *flags]
    # mpirun reads nothing while it waits: a rank that goes on printing would stand still.
    words = [*LAUNCHERS[launcher], *train, "--num_steps=100000", "--log_every=200"]
    # mpirun waits so long before SIGTERM, and again before SIGKILL; one second if not told. But
    # horovodrun kills an mpirun that has not ended in five seconds, and its last lines are lost.
    seconds = "2" if launcher == "mpi" else "8"
    env = ENVIRONMENT | {"OMPI_MCA_odls_base_sigkill_timeout": seconds}
    with Terminal(words, PROJECT, env) as terminal:
        terminal.wait_for("step 200/", 240)
        terminal.press(CTRL_C)
        code = terminal.wait(60)
        assert not terminal.left_after(10)
        return terminal.shown, code
