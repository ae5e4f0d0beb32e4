"""The hidden folder that a pack is written in: whose it is, and when it goes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import readers

from hvdkit.data import pack
from ranks import PROJECT

_KILLED = """
import os, pathlib, signal, sys
from hvdkit.data import pack
with pack.hidden_folder(pathlib.Path(sys.argv[1]), "train") as work:
    (work / "shard").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_kill_left_goes_at_the_next_start(tmp_path: Path):
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    project = PROJECT
    assert subprocess.run(command, cwd=project).returncode == -9
    assert list(tmp_path.rglob("shard"))
    with pack.hidden_folder(tmp_path, "train") as work:
        assert not list(work.iterdir())
        (work / "shard").write_bytes(b"")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "train.packing-2", ".packing"])
def test_names_that_no_pack_can_have(name: str):
    readers.fails(lambda: pack._check_name(name), repr(name), "--as")


def test_one_at_a_time_and_two_of_two_names(tmp_path: Path):
    def second() -> None:
        with pack.hidden_folder(tmp_path, "train"):
            pass

    with pack.hidden_folder(tmp_path, "train") as train:
        (train / "shard").write_bytes(b"")
        readers.fails(second, tmp_path / "train", "is being written by another process", "--as")
        with pack.hidden_folder(tmp_path, "val"):  # which leaves the other's alone
            pass
        assert (train / "shard").exists()
    second()
    assert not list(tmp_path.iterdir())


def test_links_are_not_followed(tmp_path: Path):
    mine = tmp_path / "mine"
    (mine / "inner").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".train.packing").symlink_to(mine)
    with pytest.raises(OSError), pack.hidden_folder(tmp_path / "out", "train"):
        pass
    (tmp_path / "out" / ".val.packing").mkdir()
    (tmp_path / "out" / ".val.packing" / "link").symlink_to(mine)
    with pack.hidden_folder(tmp_path / "out", "val"):
        pass
    assert (mine / "inner").is_dir()


def test_a_disk_without_locks_will_do(tmp_path: Path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pack.hidden_folder(tmp_path, "train") as work:
        assert os.listdir(tmp_path) == [work.name]
