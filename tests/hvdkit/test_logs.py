"""Log lines and the rank in front of them; progress."""

import subprocess
import sys
from pathlib import Path

import pytest

import hvdkit
from hvdkit import logs

PROGRAM = """
from absl import app, logging
from hvdkit import logs, settings
import logging as python_logging
def work(config):
    logs.use()
    logging.info("%d %%", config.num_steps)
    logging.debug("hidden")
    python_logging.getLogger("library").info("hidden too")
    logging.warning("careful")
    logs.complain("wrong")
    open("done", "w")
app.run(work, flags_parser=lambda words: settings.from_command_line(words, settings.Settings))
"""


def run(folder: Path, words: str, **env: str) -> subprocess.CompletedProcess:
    (folder / "train.py").write_text(PROGRAM)
    command = f'"{sys.executable}" train.py --num_steps=5 {words}'
    env["PYTHONPATH"] = str(Path(hvdkit.__file__).parents[1])
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_lines_are_bare_text_on_rank_0_and_name_any_other(tmp_path):
    ended = run(tmp_path, "")
    assert (ended.stdout, ended.stderr) == ("5 %\n", "careful\nerror: wrong\n")
    ended = run(tmp_path, "", HOROVOD_RANK="3")
    assert (ended.stdout, ended.stderr) == (
        "rank 3: 5 %\n",
        "rank 3: careful\nerror: wrong\n",
    )
    assert "hidden\n" in run(tmp_path, "--verbosity=1").stdout
    assert run(tmp_path, "--verbosity=-1").stdout == ""


def test_a_log_that_nobody_reads_ends_no_run(tmp_path):
    ended = run(tmp_path, "> /dev/full")
    assert ended.returncode == 0 and (tmp_path / "done").exists()
    assert ended.stderr.count("note: standard output cannot be written") == 1, (
        ended.stderr
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_in_a_log_a_line_each_tenth(
    capsys, monkeypatch, terminal
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    for done in range(1, 251):
        logs.progress("samples", done, 250)
    text = capsys.readouterr().err
    if terminal:
        assert (
            text.count("\r") == 250
            and text.count("\n") == 1
            and text.endswith("250/250\n")
        )
        assert f"[{'#' * 15}{'-' * 15}] 125/250" in text
    else:
        assert text.splitlines() == [f"samples: {25 * n}/250" for n in range(1, 11)]
