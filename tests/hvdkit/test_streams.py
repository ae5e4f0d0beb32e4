"""Output that nobody reads, or that cannot be written: the program goes on, and its files are
whole."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hvdkit

# A run that writes a file while it prints more than a pipe holds.
RUN = """
import sys
import hvdkit.streams as streams
streams.hold()
if sys.argv[2] == "run":
    streams.never_wait()
with open(sys.argv[1], "w") as file:
    for number in range(20_000):
        print(f"line {number}")
        print("progress", file=sys.stderr)
        file.write(f"{number}\\n")
print("last")
sys.exit(7 if streams.is_lost() else 0)
"""
WHOLE = "".join(f"{number}\n" for number in range(20_000))


def started(words: list[str], **options) -> subprocess.Popen:
    options["env"] = os.environ | {"PYTHONPATH": str(Path(hvdkit.__file__).parents[1])}
    return subprocess.Popen(words, **options)


@pytest.mark.parametrize(
    ("output", "code"),
    [
        (">&-", 0),
        ("2>&-", 0),
        (">&- 2>&- <&-", 0),
        ("> /dev/full 2> /dev/full", 7),
        ("2>&1 | head -1", 7),
        ("| true", 7),
    ],
)
@pytest.mark.parametrize("kind", ["run", "command"])
def test_the_program_goes_on_and_its_file_is_whole(tmp_path: Path, output, code, kind):
    command = f'"{sys.executable}" -c "$RUN" {tmp_path}/file {kind} {output}; exit ${{PIPESTATUS[0]}}'
    words = ["env", f"RUN={RUN}", "bash", "-c", command]
    process = started(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert (tmp_path / "file").read_text() == WHOLE
    assert "Error" not in shown + errors and "Traceback" not in shown + errors
    assert errors.count("note: standard output cannot be written") <= 1


@pytest.mark.parametrize("kind", ["run", "command"])
def test_a_pipe_that_does_not_wait_loses_nothing(tmp_path: Path, kind: str):
    """As another program may leave a terminal that it shares."""
    reading, writing = os.pipe()
    # The limit is less than what is written.
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    process = started(
        [sys.executable, "-c", RUN, str(tmp_path / "file"), kind], stdout=writing
    )
    os.close(writing)
    time.sleep(1)
    with open(reading) as pipe:
        lines = pipe.read().splitlines()
    assert process.wait(60) == 0
    assert lines == [*(f"line {number}" for number in range(20_000)), "last"]


@pytest.mark.parametrize(
    "program", ["-m hvdkit --help", "train.py --help", "train.py --nothing"]
)
def test_programs_begin_with_a_closed_output(program: str):
    """They end with an exit code of their own."""
    template = Path(__file__).parents[2] / "template"
    words = ["bash", "-c", f'"{sys.executable}" {program} >&- 2>&- <&-']
    code = started(words, cwd=template).wait(60)
    assert code == (2 if "nothing" in program else 0)


def test_a_run_waits_for_no_reader_and_its_lines_come_later(tmp_path: Path):
    """A pipe of one page, as `| less` is when its first page is full."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    words = [sys.executable, "-c", RUN, f"{tmp_path}/file", "run"]
    process = started(words, stdout=writer, stderr=subprocess.DEVNULL)
    os.close(writer)
    file = tmp_path / "file"
    end = time.monotonic() + 60
    while not (file.exists() and file.read_text() == WHOLE):
        assert time.monotonic() < end, "the run waits for its reader"
        time.sleep(0.05)
    with os.fdopen(reader) as pipe:
        lines = pipe.read().splitlines()
    assert process.wait(60) == 0
    assert lines == [*(f"line {number}" for number in range(20_000)), "last"]


def test_a_run_whose_reader_never_comes_ends(tmp_path: Path):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    words = [
        sys.executable,
        "-c",
        f"import hvdkit.streams as s; s._AT_END = 1.0\n{RUN}",
    ]
    process = started([*words, f"{tmp_path}/file", "run"], stdout=writer, stderr=writer)
    os.close(writer)
    assert process.wait(60) == 0
    os.close(reader)
    assert (tmp_path / "file").read_text() == WHOLE
