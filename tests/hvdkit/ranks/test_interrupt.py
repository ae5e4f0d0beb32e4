"""Ctrl-C and other requests to stop, in a real terminal; under make: test_hosts.py."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import STAND_IN, wait_for
from terminal import CTRL_C, Terminal

from hvdkit.checkpoint import files
from ranks import ENVIRONMENT, PROJECT

# What a user has who has put .venv/bin on PATH, and nothing else.
PLAIN = dict.fromkeys(ENVIRONMENT) | {"PATH": ENVIRONMENT["PATH"]}
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
    time.sleep(0.01)
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
interrupt._ALONE = 2  # limits are in seconds
print(os.getpid(), flush=True)
while not stop.asked: time.sleep(0.05)
print(f"asked {stop.asked}, first {stop.number}", flush=True)
time.sleep(600)
"""


def python(*words: str) -> Terminal:
    return Terminal([sys.executable, *words], PROJECT, ENVIRONMENT)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_ctrl_c_is_answered_by_rank_0_and_the_second_ends_a_stuck_process(
    rank,
):
    with python("-c", LISTENS + STUCK, str(rank)) as terminal:
        terminal.wait_for("listening", 20)
        terminal.press(CTRL_C)
        if rank == 0:
            terminal.wait_for(re.escape(PROMISE), 5)
        time.sleep(2)  # two at once count as one press
        terminal.press(CTRL_C)
        assert terminal.wait(5) == 130
        assert terminal.shown.count("stopping") == (rank == 0)
        assert "Traceback" not in terminal.shown


@pytest.mark.parametrize(
    "signals, answer",
    [
        # One Ctrl-C comes from the terminal and from a launcher.
        (["SIGINT", "SIGINT"], PROMISE),
        (["SIGINT", "SIGTERM", "SIGTERM"], PROMISE),
        (["SIGTERM", "SIGINT"], SAYS),
        (["SIGUSR1"], None),  # the sender reports it
        (["SIGHUP"], None),  # nobody reads the output
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
        "train.py --flagfile=configs/demo.cfg",
        "-m hvdkit check --data_dir=datasets/demo",
    ],
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


LAUNCHERS = ("--mpi", "--gloo")
WAYS = ("Ctrl-C", "timeout")
CASES = [*itertools.product((2, 8), LAUNCHERS, WAYS)]
ENDLESS = ["--global_batch_size=8", "--num_steps=100000", "--log_every=20"]


def stop(folder: Path, flags: list[str], case: tuple[int, str, str]) -> float:
    """A run that is stopped has saved, says where, ends with 75 and leaves nothing; seconds."""
    ranks, launcher, way = case
    words = ["horovodrun", launcher, "-np", str(ranks), "python", "train.py"]
    words += ["--flagfile=configs/demo.cfg", *flags, *ENDLESS]
    if way == "timeout":  # SIGTERM stands for the end of its time
        words = ["timeout", "1000", *words]
    with Terminal(words, PROJECT, PLAIN) as terminal:
        terminal.wait_for("step 20/", 240)
        pressed = time.monotonic()
        if way == "Ctrl-C":
            terminal.press(CTRL_C)
        else:
            os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.wait(60) == 75, terminal.shown
        seconds = time.monotonic() - pressed
        assert not terminal.left_after(10), terminal.shown
        shown = terminal.shown
    assert shown.count("stopping after") == shown.count(SAYS) == 1, shown
    assert shown.count(PROMISE) == (way == "Ctrl-C") and "Traceback" not in shown, shown
    step = re.search(r"saved at step (\d+); rerun to resume", shown)
    assert step, shown
    (saved,) = (folder / "checkpoints").iterdir()
    assert saved.name == f"step-{int(step[1]):08}" and files.verify(saved)
    return seconds


@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_a_stop_under_horovodrun_saves(
    case: tuple, tiny: list[str], tmp_path: Path
) -> None:
    stop(tmp_path / "run", tiny, case)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_twenty_stops_under_horovodrun(
    number: int, tiny: list[str], tmp_path: Path
) -> None:
    """The prompt is back within 12 s, where nothing else runs."""
    case = CASES[number % len(CASES)]
    seconds = stop(tmp_path / "run", tiny, case)
    print(f"{case}: {seconds:.1f} s")
    assert seconds < 12


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_second_ctrl_c_ends_what_horovodrun_started(launcher: str, tmp_path: Path):
    words = [
        "horovodrun",
        launcher,
        "-np",
        "2",
        *STAND_IN,
        f"--run_dir={tmp_path}",
        "--deaf",
    ]
    with Terminal([*words, "--steps=100000"], PROJECT, PLAIN) as terminal:
        terminal.wait_for("step 2", 60)
        terminal.press(CTRL_C)
        terminal.wait_for(re.escape(PROMISE), 10)
        time.sleep(0.6)
        terminal.press(CTRL_C)
        assert terminal.wait(10) == 130 and not terminal.left_after(5), terminal.shown
        assert "Traceback" not in terminal.shown


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("key", [CTRL_C, b""])
def test_ranks_without_a_handler_end_by_one_stop(
    key: bytes, launcher: str, tmp_path: Path
):
    """There is nothing yet to save: as after a save. Without a key: the terminal goes."""
    rank = "import time; print('begins', flush=True); time.sleep(600)"
    words = ["horovodrun", launcher, "-np", "2", sys.executable, "-c", rank]
    with Terminal(words, PROJECT, PLAIN) as terminal:
        terminal.wait_for("begins", 60)
        if key:
            terminal.press(key)
            assert terminal.wait(20) == 75, terminal.shown
            assert "Traceback" not in terminal.shown
        else:
            terminal.hang_up()
        assert not terminal.left_after(20)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nothing_is_left_of_a_horovodrun_that_is_killed(launcher: str, tmp_path: Path):
    words = ["horovodrun", launcher, "-np", "2", *STAND_IN, f"--run_dir={tmp_path}"]
    folder = tmp_path / "tmp"
    folder.mkdir()
    own_folder = {"TMPDIR": str(folder)}
    with Terminal([*words, "--steps=100000"], PROJECT, PLAIN | own_folder) as terminal:
        terminal.wait_for("step 2", 60)
        assert [
            path.stat().st_mode & 0o777 for path in folder.glob("horovodrun-*")
        ] == [0o700]
        os.kill(terminal.pid, signal.SIGKILL)
        assert not terminal.left_after(20)
    wait_for(lambda: not any(folder.glob("horovodrun-*")), "its folder is left", 5)
    assert sorted(path.name for path in tmp_path.glob("told-*")) == ["told-0", "told-1"]


def test_mpirun_of_the_environment_gives_ranks_time_to_save(tmp_path: Path):
    """Its SIGTERM comes 5 s after Ctrl-C, and the end 5 s after that: no end within 9 s."""
    words = ["mpirun", "-np", "2", *STAND_IN, f"--run_dir={tmp_path}", "--steps=100000"]
    own_wait = {"OMPI_MCA_odls_base_sigkill_timeout": None}
    with Terminal(
        [*words, "--slow_rank=1"], PROJECT, ENVIRONMENT | own_wait
    ) as terminal:
        terminal.wait_for("step 2", 60)
        terminal.press(CTRL_C)
        assert terminal.wait(20) == 1 and not terminal.left_after(5), terminal.shown
    signals = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    assert signals == [f"[{signal.SIGTERM:d}]"] * 2


# mpirun's signals, a second apart instead of five; then it is late, or has saved.
KILLED_BY_MPIRUN = """
import os, signal, time
stop.saved = sys.argv[2] == "saved"
os.kill(os.getpid(), signal.SIGCONT)
time.sleep(1)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
"""


@pytest.mark.parametrize("state", ["late", "saved"])
def test_a_rank_of_mpirun_says_how_long_it_has_and_what_is_lost(state: str):
    words = [sys.executable, "-c", LISTENS + KILLED_BY_MPIRUN, "0", state]
    env = {"OMPI_COMM_WORLD_RANK": "0"}
    with Terminal(words, PROJECT, ENVIRONMENT | env) as terminal:
        assert terminal.wait(20) == 0, terminal.shown
    assert f"{SAYS}; mpirun kills it in 1 s" in terminal.shown
    assert ("error: not saved: that takes longer" in terminal.shown) == (
        state == "late"
    )


def test_a_rank_whose_launcher_is_gone_saves_and_ends(tmp_path: Path):
    """It is asked to save, and ends some time later where it cannot."""
    file = tmp_path / "said"
    words = ["sh", "-c", KILLED, sys.executable, LISTENS + ORPHAN, str(file)]
    assert subprocess.run(words, cwd=PROJECT, timeout=60).returncode == -signal.SIGKILL
    wait_for(lambda: "asked True" in file.read_text(), "it was not asked", 30)
    process = Path(f"/proc/{file.read_text().split()[1]}")
    wait_for(lambda: not process.exists(), "it runs on", 30)
    assert f"first {int(signal.SIGUSR1)}" in file.read_text()
