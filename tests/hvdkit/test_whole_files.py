"""Files that are whole under their name, or as they were; and locks that end with their process."""

import json
import math
import subprocess
import sys

import pytest

from hvdkit import whole_files


def test_a_file_is_new_or_as_it_was_and_nothing_is_left(tmp_path):
    file = tmp_path / "a"
    with whole_files.written(file) as partial:
        partial.write_text("whole")
        assert not file.exists()
    with pytest.raises(KeyboardInterrupt), whole_files.written(file) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert file.read_text() == "whole" and list(tmp_path.iterdir()) == [file]


def test_a_copy_keeps_modes_and_leaves_out_links(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/private").write_text("x")
    (tmp_path / "a/private").chmod(0o600)
    (tmp_path / "a/link").symlink_to("private")
    whole_files.copy(tmp_path / "a", tmp_path / "b")
    (copied,) = (tmp_path / "b").iterdir()
    assert copied.read_text() == "x" and copied.stat().st_mode & 0o777 == 0o600


def test_what_json_has_no_word_for_is_null(tmp_path):
    whole_files.write_json(tmp_path / "a", {"x": [math.nan, (1.5, -math.inf)], "y": {"z": "nan"}})
    assert json.loads((tmp_path / "a").read_text()) == {"x": [None, [1.5, None]], "y": {"z": "nan"}}


def test_a_lock_is_one_processs_until_it_ends(tmp_path):
    script = "import sys; from pathlib import Path; from hvdkit import whole_files\n"
    script += "lock = whole_files.lock(Path(sys.argv[1])); print('has it', flush=True); input()"
    command = [sys.executable, "-c", script, str(tmp_path / "lock")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        assert other.stdout.readline() == b"has it\n"
        with pytest.raises(BlockingIOError):
            whole_files.lock(tmp_path / "lock")
        other.kill()
    whole_files.lock(tmp_path / "lock").close()
