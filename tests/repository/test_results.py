"""make bench: what benchmarks print goes into one file, also when one of them fails."""

import re
import subprocess
import sys

import by_path
import pytest
from hosts import ROOT

FOLDER = ROOT / "benchmarks"
LATE = """
import time
try:
    print("| begun |", flush=True)
    time.sleep(60)
finally:  # as where a launch takes its ranks with it
    open({left!r}, "w").close()
"""


@pytest.fixture
def results(tmp_path, monkeypatch):
    module = by_path.benchmark("results")
    (tmp_path / "well.py").write_text("import sys; print('| well |', *sys.argv[1:])")
    (tmp_path / "ill.py").write_text("print('| half |'); raise SystemExit('no')")
    (tmp_path / "late.py").write_text(LATE.format(left=str(tmp_path / "left")))
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "TIMEOUT", 2)
    return module


def parts(results, *names: str) -> dict:
    return {n: results.Part(f"The {n}", f"{n}.py --rows=2", n == "well", "Why.") for n in names}


def test_all_that_was_printed_is_in_the_file(results, tmp_path, capfd):
    out, torch = tmp_path / "RESULTS.md", tmp_path / "python"
    torch.write_text("#!/bin/sh\necho 2.0 0.15\n")
    torch.chmod(0o755)
    assert results.run_all(parts(results, "well"), str(torch), out) == 0
    text = out.read_text()
    assert "## The well\n\n`python benchmarks/well.py --rows=2`: done after 0 min 0 s. Why." in text
    assert f"\n\n| well | --rows=2 --torch={torch}\n" in text
    assert re.search(r"^- date: 20\d\d-\d\d-\d\d \d\d:\d\d UTC, commit \w+", text, re.MULTILINE)
    assert re.search(r"^- machine: .+, \d+ cores, \d+ GiB, Linux \d.*; load", text, re.MULTILINE)
    assert re.search(r"Python 3\.\d+\.\d+, tensorflow\S* 2\.\d+.*, horovod \d.*, torch 2.0", text)
    assert "| well |" in capfd.readouterr().out, "shown while it runs"


def test_what_fails_or_hangs_is_told_and_the_others_run(results, tmp_path):
    out = tmp_path / "RESULTS.md"
    assert results.run_all(parts(results, "ill", "late", "well"), None, out) == 1
    text = out.read_text()
    assert "**failed with exit code 1** after 0 min 0 s. Why.\n\n| half |" in text
    assert re.search(r"failed with exit code -2\*\* after 0 min 2 s\. Why\.\n\n\| begun \|", text)
    assert "| well | --rows=2\n" in text
    assert (tmp_path / "left").exists(), "it could clean up"


def test_a_part_that_was_not_reached_is_said_to_be_missing(results, tmp_path):
    there = parts(results, "well", "ill")
    found = {"well": results.Outcome(0, "| well |\n", 61.0)}
    text = results.text(there, found, ["- date: today"])
    assert (
        "done after 1 min 1 s" in text and "`python benchmarks/ill.py --rows=2`: not run." in text
    )


@pytest.mark.slow
def test_the_bare_loop_and_train_py_take_the_same_steps():
    command = [FOLDER / "peers.py", "--rounds=1", "--windows=1", "bare", "template"]
    said = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    rows = [line.split(" | ") for line in said.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == [
        "| this project, constant batch",
        "| bare Horovod loop, constant batch",
    ]
    for row in rows:
        milliseconds, rate = float(row[1]), float(row[2])
        assert rate == pytest.approx(16e3 / milliseconds, rel=0.02)
    assert re.fullmatch(r"(\d\.\d{3}) \(\1 to \1\) \|", rows[1][3])


def test_benchmarks_have_the_flags_that_make_bench_gives(results):
    for part in results.PARTS.values():
        file, *flags = part.command.partition(" -- ")[0].split() + ["--torch"] * part.torch
        said = subprocess.run(
            [sys.executable, FOLDER / file, "--help"], capture_output=True, text=True, check=True
        ).stdout
        assert not {flag.partition("=")[0] for flag in flags} - {*re.findall(r"--\w+", said)}, file
