"""How far something is, on a terminal and in a log."""

import sys

from hvdkit.ranks import live


def shown(capsys, monkeypatch, terminal: bool) -> str:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    for done in range(1, 21):
        live.progress("packed", done, 20)
    return capsys.readouterr().err


def test_on_a_terminal_one_line_is_drawn_over_and_ended_once(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, terminal=True)
    assert text.count("\r") == 20 and text.count("\n") == 1 and text.endswith("20/20\n")
    assert f"[{'#' * 15}{'-' * 15}] 10/20" in text


def test_in_a_log_a_line_each_tenth(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, terminal=False)
    assert text.splitlines() == [f"packed: {done}/20" for done in range(2, 21, 2)]
