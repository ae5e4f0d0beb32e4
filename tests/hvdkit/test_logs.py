"""Log lines and the rank in front of them; the status line of a terminal; progress."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import Terminal

import hvdkit
from hvdkit import logs
from ranks import ENVIRONMENT, PROJECT

PROGRAM = """
from absl import app, logging
from hvdkit import logs, settings
import logging as python_logging
def work(found):
    logs.use()
    logging.info("%d %%", found.num_steps)
    logging.debug("hidden")
    python_logging.getLogger("library").info("hidden too")
    logging.warning("careful")
    logs.complain("wrong")
    open("done", "w")
app.run(work, flags_parser=lambda words: settings.from_command_line(words, settings.Settings))
"""


def run(folder: Path, words: str, **env: str) -> subprocess.CompletedProcess:
    """PROGRAM, by a line of bash."""
    (folder / "train.py").write_text(PROGRAM)
    command = f'"{sys.executable}" train.py --num_steps=5 {words}'
    env["PYTHONPATH"] = str(Path(hvdkit.__file__).parents[1])
    how = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": 60}
    return subprocess.run(["bash", "-c", command], **how)


def test_lines_are_bare_text_on_rank_0_and_name_any_other(tmp_path):
    ended = run(tmp_path, "")
    assert (ended.stdout, ended.stderr) == ("5 %\n", "careful\nerror: wrong\n")
    ended = run(tmp_path, "", HOROVOD_RANK="3")
    assert (ended.stdout, ended.stderr) == ("rank 3: 5 %\n", "rank 3: careful\nerror: wrong\n")
    assert "hidden\n" in run(tmp_path, "--verbosity=1").stdout
    assert run(tmp_path, "--verbosity=-1").stdout == ""


def test_a_log_that_nobody_reads_ends_no_run(tmp_path):
    ended = run(tmp_path, "> /dev/full")
    assert ended.returncode == 0 and (tmp_path / "done").exists()
    assert ended.stderr.count("note: standard output cannot be written") == 1, ended.stderr


def test_on_a_terminal_one_line_is_written_over_and_others_stay(tmp_path):
    flags = ["--flagfile=configs/blank.cfg", "--num_steps=6", "--log_every=1", "--eval_every=3"]
    words = [sys.executable, "train.py", *flags, f"--run_dir={tmp_path}/run"]
    with Terminal(words, PROJECT, ENVIRONMENT | {"TERM": "xterm"}) as terminal:
        assert terminal.wait(200) == 0, terminal.shown
        shown = terminal.shown
    steps = re.findall(r"\r\x1b\[K((?:\[[#-]{5,20}\] )?step (\d)/6 [^\r\n]*)", shown)
    assert [int(step) for _, step in steps] == [1, 2, 3, 4, 5, 6], shown
    assert steps[0][0].startswith("[#-") and all(len(line) < 80 for line, _ in steps)
    stays = shown.replace("\r\n", "\n").splitlines()
    assert any(line.startswith("step 3/6  evaluated: loss") for line in stays), shown


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_in_a_log_a_line_each_tenth(
    capsys, monkeypatch, terminal
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    for done in range(1, 251):
        logs.progress("samples", done, 250)
    text = capsys.readouterr().err
    if terminal:
        assert text.count("\r") == 250 and text.count("\n") == 1 and text.endswith("250/250\n")
        assert f"[{'#' * 15}{'-' * 15}] 125/250" in text
    else:
        assert text.splitlines() == [f"samples: {25 * n}/250" for n in range(1, 11)]
