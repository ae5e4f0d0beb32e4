"""hvdkit sweep: trials that are pruned, fail, are killed; its flagfile trains to the same bits."""

import os
import re
import shlex
import signal
import sys
import threading
import time

import pytest

from hvdkit import whole_files
from hvdkit.commands.jobs import sweep, sweep_trials
from hvdkit.observe import records
from ranks import PROJECT, launch

# Stands for train.py: --model says what becomes of it, --base_lr is its score.
RUN = """
import json, pathlib, sys, time
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
folder, model = pathlib.Path(flags["run_dir"]), flags["model"]
again = folder.exists()
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.cfg").touch()
with open(folder / "starts.jsonl", "a") as file:
    start = {"step": 0, "time": 1.0, "score": "miou", "score_mode": "min" if model == "error" else "max"}
    if "label_smoothing" in flags:
        start["score"] = "loss"
    file.write(json.dumps(start) + "\\n")
if model in ("whole", "weak", "error", "tie", "nan", "missing"):
    line = {"step": 5, "eval_loss": 1.0, "eval_miou": float(flags["base_lr"]) * (model != "weak")}
    if model == "tie":
        line |= {"eval_loss": line["eval_miou"], "eval_miou": 0.5}
    if model in ("nan", "missing"):
        line["eval_acc"] = 1.0
        line["eval_miou"] = None
    if model == "missing":
        del line["eval_miou"]
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
    (folder / "summary.json").write_text(json.dumps({"step": 5, "exit_code": 0}))
time.sleep(60 * (model == "weak" and not again))
print({"crashes": "Traceback\\nKeyError: 0"}.get(model, "error: no such model"))
sys.exit({"diverges": 3, "stops": 75, "wrong": 2, "crashes": 1}.get(model, 0))
"""
# Before RUN: the disk is away while there is a file.
AWAY = """
import os, sys
if os.path.exists(sys.argv[1]):
    sys.exit(76)
del sys.argv[1]
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a sweep of RUN in this process, and returns its exit code."""
    (tmp_path / "base.cfg").write_text(
        "--task=blank\n--eval_every=5\n--num_classes=3\n"
    )
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(sweep_trials, "_INTERVAL", 0.1)
    monkeypatch.setattr(sweep_trials, "_PAUSE", 0.0)
    words = ["hvdkit sweep", f"{tmp_path}/base.cfg", f"--folder={tmp_path}/all"]
    words.append(f"--launch={shlex.join([sys.executable, '-c', RUN])}")
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in heard}
    yield lambda *more: sweep.main([*words, *more])
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_killed_sweep_resumes_and_its_flagfile_trains_to_the_same_bits(tmp_path):
    base = tmp_path / "base.cfg"
    folder = tmp_path / "all"
    base.write_text("--flagfile=configs/blank.cfg\n--num_steps=12\n--eval_every=4\n")
    words = [
        "-m",
        "hvdkit",
        "sweep",
        base,
        f"--folder={folder}",
        "--trials=3",
        "--jobs=2",
    ]
    words += [
        "--base_lr=1e-3:1e-1:log",
        "--global_batch_size=8:32",
        "--optimizer=adam,sgd",
    ]
    killed = launch(1, words, timeout=300, kill_when=(folder / "best.cfg").exists)
    before = {path: path.read_text() for path in folder.glob("trial-*/config.cfg")}
    ended = launch(1, words, timeout=300)
    assert (killed.code, ended.code) == (-9, 0), ended.output
    assert ended.output.count("/3: ") < 3
    assert all(path.read_text() == text for path, text in before.items())
    best = int(re.search(r", trial (\d+)", (folder / "best.cfg").read_text())[1])
    assert launch(1, ["train.py", f"--flagfile={folder}/best.cfg"]).code == 0
    runs = [records.read(folder / name) for name in (f"trial-{best:04}", "best")]
    assert len({run.summary["weights_sha256"] for run in runs}) == 1
    page = (folder / "sweep.html").read_text()
    assert len(re.findall("<td>(complete|pruned)</td>", page)) == 3
    figures = ("Settings and score", "Best accuracy so far")
    assert all(f'aria-label="{name}"' in page for name in figures)


def test_a_lock_that_a_killed_sweep_has_left_is_not_waited_for(start, tmp_path):
    folder = tmp_path / "all"
    words = ["--base_lr=0.1,0.2", "--model=whole"]
    assert start(*words, "--trials=1") == 0
    (folder / "journal.log.lock").symlink_to("runs/journal.log")
    assert start(*words, "--trials=2") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jobs=3"], "would share 2 GPU(s)"),
        (["--jobs=2", "--launch=hosts.sh -H a:2 train.py"], "GPUs of other hosts (-H"),
    ],
)
def test_trials_do_not_share_gpus(start, monkeypatch, capfd, words, message):
    monkeypatch.setattr(sweep_trials, "_gpus", lambda: ["0", "1"])
    assert start("--base_lr=0.1,0.2", *words) == 2
    assert message in capfd.readouterr().err


def test_a_disk_that_is_away_ends_no_trial(start, tmp_path, capfd):
    launch_away = shlex.join([sys.executable, "-c", AWAY + RUN, f"{tmp_path}/away"])
    words = ["--base_lr=0.1:1.0", "--model=whole", f"--launch={launch_away}"]
    (tmp_path / "away").touch()
    assert start(*words, "--trials=2") == 76
    assert "trial-0001.log says what is away" in capfd.readouterr().err
    (tmp_path / "away").unlink()
    assert start(*words, "--trials=2") == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["trial 1/2", "trial 2/2"]


def test_weak_trials_are_pruned_and_others_fail(start, tmp_path, capfd):
    models = "--model=whole,weak,diverges,stops,wrong"
    assert start("--base_lr=0.1:1.0", models, "--trials=6", "--seed=10") == 0
    *trials, last = capfd.readouterr().out.splitlines()
    ends = {re.search(r"model=(\w+)", line)[1]: line for line in trials}
    assert re.fullmatch(
        r"trial 1/6: miou 0\.\d+ \(best .*, trial 1\): base_lr=.*", ends["whole"]
    )
    assert "pruned at evaluation 1, miou 0.0000 (best 0." in ends["weak"]
    codes = {model: line.partition("exit code ")[2][:2] for model, line in ends.items()}
    assert codes == {
        "whole": "",
        "weak": "",
        "diverges": "3 ",
        "stops": "75",
        "wrong": "2 ",
    }
    starts = tmp_path / f"all/trial-000{ends['stops'][6]}/starts.jsonl"
    assert len(starts.read_text().splitlines()) == 4
    assert f"{tmp_path}/all/best.cfg" in last and f"{tmp_path}/all/sweep.html" in last
    assert start("--base_lr=0.1:0.9", models) == 2
    assert "only that one has --base_lr=0.1:1.0" in capfd.readouterr().err
    assert (
        start("--base_lr=0.1:1.0", "--model=wrong", f"--folder={tmp_path}/wrong") == 2
    )
    assert (
        capfd.readouterr().err
        == f"error: {tmp_path}/wrong/trial-0001.log: no such model\n"
    )
    assert (
        start("--base_lr=0.1:1.0", "--model=crashes", f"--folder={tmp_path}/crashes")
        == 1
    )
    assert (
        capfd.readouterr().err
        == f"error: {tmp_path}/crashes/trial-0003.log: KeyError: 0\n"
    )


def test_the_lowest_error_is_the_best(start, tmp_path, capfd):
    assert start("--base_lr=0.1,0.5,0.9", "--model=error", "--trials=5") == 0
    *trials, _ = capfd.readouterr().out.splitlines()
    scores = []
    bests = []
    for line in trials:
        match = re.search(
            r"miou (0\.\d+) \(best (0\.\d+), trial \d\): base_lr=(\S+);", line
        )
        score, best, rate = (float(number) for number in match.groups())
        assert score == rate
        scores.append(score)
        if "pruned" not in line:
            bests.append(best)
    assert len(scores) == 5 and len({*scores}) > 1
    assert bests[-1] == min(scores)
    about = (tmp_path / "all/best.cfg").read_text().splitlines()
    assert (
        about[0].startswith(f"# miou {min(scores):g}, ")
        and f"--base_lr={min(scores)}" in about
    )
    table = re.findall(
        r"<td>\d</td><td>(0\.\d+)</td>", (tmp_path / "all/sweep.html").read_text()
    )
    assert float(table[0]) == min(scores)


def test_losses_of_other_settings_are_not_compared(start, tmp_path, capfd):
    words = ["--label_smoothing=0.0,0.1", "--model=whole", "--base_lr=0.1"]
    assert start(*words, "--trials=4") == 2
    message = "the main metric is the loss, which --label_smoothing changes"
    assert capfd.readouterr().err.count(message) == 1
    assert not (tmp_path / "all" / "best.cfg").exists()


def test_of_equal_scores_the_lower_loss_is_the_best(start, tmp_path, capfd):
    ties = f"--folder={tmp_path}/ties"
    assert start("--base_lr=0.9,0.5,0.1", "--model=tie", "--trials=4", ties) == 0
    rates = re.findall(r"complete|miou 0.5000 .*base_lr=(\S+);", capfd.readouterr().out)
    assert (
        f"--base_lr={min(rates)}"
        in (tmp_path / "ties/best.cfg").read_text().splitlines()
    )
    assert len({*rates}) > 1 and rates[0] != min(rates)


def test_a_trial_whose_metric_has_another_direction_has_no_score(
    start, tmp_path, capfd
):
    two = f"--folder={tmp_path}/two"
    assert start("--base_lr=0.1:1.0", "--model=whole,error", "--trials=4", two) == 0
    printed = capfd.readouterr().out
    assert (
        "failed, its score is of miou" in printed
        and "the lowest is the best" in printed
    )


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("nan", "miou of its last evaluation is NaN or infinite"),
        ("missing", "miou is missing in its last evaluation, of acc"),
    ],
)
def test_a_sweep_without_a_score_says_why(model, why, start, tmp_path, capfd):
    for failed in (2, 0):  # a second start has nothing left to try
        assert start("--base_lr=0.1:1.0", f"--model={model}", "--trials=2") == 1
        printed = capfd.readouterr()
        assert printed.err.startswith("error: no trial has a score: ")
        assert f"{tmp_path}/all/trial-0002: {why}; " in printed.err
        assert (
            f"{tmp_path}/all/trial-*.log" in printed.err
            and printed.err.count("\n") == 1
        )
        assert "signal" not in printed.out and "exit code" not in printed.out
        assert printed.out.count(f"failed, {tmp_path}/all/trial-000") == failed


def test_a_stopped_sweep_goes_on_with_the_same_trial(start, tmp_path, capfd):
    run = tmp_path / "all/trial-0001"

    def stop() -> None:
        while not (run / "metrics.jsonl").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    def start_weak() -> int:
        return start("--base_lr=0.1:1.0", "--model=weak", "--trials=1")

    threading.Thread(target=stop, daemon=True).start()
    assert start_weak() == 75
    assert start_weak() == 0
    assert len((run / "starts.jsonl").read_text().splitlines()) == 2
    assert "trial 1/1: miou 0.0000 (best 0.0000, trial 1)" in capfd.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        ("--lr=1e-4:1e-2", "did you mean --base_lr"),
        ("--base_lr=1e-2:1e-4", "LOW < HIGH"),
        ("--base_lr=0:1:log", "above 0"),
        ("--num_steps=5:5", "write whole numbers"),
        ("--ema_decay=0.5:1.5", "--ema_decay=1.5: must be"),
        ("--optimizer=adam,adamm", "--optimizer=adamm: must be one of"),
        ("--run_dir=a,b", "--folder is for all runs"),
        ("--base_lr", "--NAME=VALUES"),
        ("--seed=1,2", "invalid int value"),
        ("--base_lr=0.1", "nothing to search"),
        ("--base_lr=0.1,0.2 --eval_every=0", "no evaluations"),
        ("--base_lr=0.1,0.2 --jobs=0", "1 or more"),
        ("--base_lr=0.1,0.2 --resume=runs/other", "--init_from= takes first weights"),
        ("--base_lr=0.1,0.2 --find_lr=true", "--find_lr gives no score"),
    ],
)
def test_wrong_use_is_refused_before_the_first_trial(
    start, tmp_path, words, message, capfd
):
    try:
        code = start(*words.split())
    except SystemExit as ended:
        code = ended.code
    error = capfd.readouterr().err
    assert code == 2 and message in error and error.count("\n") == 1, error
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize("flag", ["--num_steps=5", "-num_steps=5"])
def test_settings_in_launch_are_refused(start, tmp_path, flag, capfd):
    """Flags of the flagfile would stand after them, and best.cfg would lack them."""
    launch_flag = f"--launch=mpirun -np 2 --x python train.py {flag}"
    assert start("--base_lr=0.1,0.2", launch_flag) == 2
    assert f"--launch has {flag} after the script: give" in capfd.readouterr().err
    assert not (tmp_path / "all").exists()


def test_a_folder_with_a_persons_files_is_refused(start, tmp_path, capfd):
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "best.cfg").write_text("--base_lr=0.1\n")
    assert start("--base_lr=0.1,0.2") == 2
    assert "all has best.cfg of no sweep" in capfd.readouterr().err
    assert (tmp_path / "all" / "best.cfg").read_text() == "--base_lr=0.1\n"
    for text, why in (
        ("[" * 100_000, "is no JSON that can be read"),
        ("5", "holds no lines of"),
    ):
        (tmp_path / "all" / "sweep.json").write_text(text)
        assert start("--base_lr=0.1,0.2") == 2
        assert f"all/sweep.json {why}" in capfd.readouterr().err


def test_a_launcher_that_is_not_there_is_named(start, capfd):
    assert start("--base_lr=0.1,0.2", "--launch=/no/such") == 2
    assert capfd.readouterr().err.count("/no/such") == 1


def test_without_optuna_it_says_how_to_install_it(start, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "hvdkit.commands.jobs.sweep_trials")
    with pytest.raises(SystemExit, match="2"):
        start("--base_lr=0.1:1.0")
    assert "pip install optuna" in capfd.readouterr().err


def test_a_disk_without_locks_is_told(start, monkeypatch, capsys):
    def no_locks(path):
        raise whole_files.NoLocks(38, "Function not implemented")

    monkeypatch.setattr(whole_files, "lock", no_locks)
    assert start("--base_lr=0.1:1.0", "--model=whole", "--trials=1") == 0
    assert "has no locks: start one sweep there only" in capsys.readouterr().out
