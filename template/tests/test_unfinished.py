"""The hidden folder that a pack is written in: whose it is, and when it goes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hvdkit.data import unfinished

import readers

_KILLED = """
import os, pathlib, signal, sys
from data import unfinished
with unfinished.folder(pathlib.Path(sys.argv[1]), "train") as work:
    (work / "shard").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def hidden(out: Path) -> list[str]:
    return sorted(entry for entry in os.listdir(out) if entry.startswith("."))


def test_what_a_kill_left_goes_at_the_next_start(tmp_path: Path):
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    project = Path(unfinished.__file__).parents[1]
    assert subprocess.run(command, cwd=project).returncode == -9
    assert len(hidden(tmp_path)) == 2 and list(tmp_path.rglob("shard"))
    begun(tmp_path / ".test.packing-0123abcd")  # whose lock is gone
    with unfinished.folder(tmp_path, "val") as work:  # of another split too
        assert hidden(tmp_path) == [work.name, ".val.packing.lock"]
        (work / "shard").write_bytes(b"")
    assert not hidden(tmp_path)


def begun(folder: Path) -> None:
    folder.mkdir()
    (folder / ".packing").write_text(unfinished._SIGN)


def test_what_others_put_there_stays(tmp_path: Path):
    for name in (".train.other", ".train.packing-notes", ".holiday.packing-list", ".val.packing-"):
        begun(tmp_path / name)  # their names are none that are made here
    (tmp_path / ".train.packing-0123abcd").mkdir()  # no sign in it
    (tmp_path / ".train.packing-0123abcd" / "notes").write_text("mine")
    (tmp_path / ".train.packing-file0123").write_text(unfinished._SIGN)
    begun(tmp_path / "elsewhere")
    (tmp_path / ".train.packing-link0123").symlink_to("elsewhere")
    before = sorted(tmp_path.rglob("*"))
    with unfinished.folder(tmp_path, "train"):
        pass
    assert sorted(tmp_path.rglob("*")) == before
    for mine in (b"a text of mine", b"\xff\xfe, and no text"):
        (tmp_path / ".train.packing.lock").write_bytes(mine)
        words = (tmp_path / ".train.packing.lock", "no pack made it", "--as")
        readers.fails(lambda: unfinished.folder(tmp_path, "train").__enter__(), *words)
        assert (tmp_path / ".train.packing.lock").read_bytes() == mine


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "train.packing-2", ".packing"])
def test_names_that_no_pack_can_have(name: str):
    readers.fails(lambda: unfinished.check_name(name), repr(name), "--as")


def test_one_at_a_time_and_two_of_two_names(tmp_path: Path):
    def second() -> None:
        with unfinished.folder(tmp_path, "train"):
            pass

    with unfinished.folder(tmp_path, "train") as train:
        (train / "shard").write_bytes(b"")
        pid = f"process {os.getpid()} on {os.uname().nodename}"
        readers.fails(second, tmp_path / "train", "is being written by", pid, "--out")
        with unfinished.folder(tmp_path, "val"):  # which leaves the other's alone
            pass
        assert (train / "shard").exists()
    second()
    assert not hidden(tmp_path)


@pytest.mark.parametrize("locks", [True, False])
def test_a_living_process_of_another_host_is_left_alone(tmp_path: Path, monkeypatch, locks: bool):
    """Where hosts that share a disk do not share its locks, or it has none."""
    if not locks:
        monkeypatch.setattr(fcntl, "flock", _no_locks)
    lock, left = tmp_path / ".train.packing.lock", tmp_path / ".train.packing-0123abcd"
    begun(left)
    lock.write_text("another-machine node7 12")

    def pack() -> None:
        with unfinished.folder(tmp_path, "train"):
            pass

    readers.fails(pack, "process 12 on node7", "0 s ago", "try again")
    with unfinished.folder(tmp_path, "val"):
        pass
    assert left.exists()
    then = time.time() - 2 * unfinished._SILENCE
    os.utime(lock, (then, then))
    pack()
    assert not hidden(tmp_path)


def _no_locks(*_: object) -> None:
    raise OSError("no locks here")


def test_a_process_that_lives_says_so(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(unfinished, "_TOUCHED_EVERY", 0.02)
    with unfinished.folder(tmp_path, "train"):
        lock = tmp_path / ".train.packing.lock"
        os.utime(lock, (1, 1))
        end = time.monotonic() + 20
        while lock.stat().st_mtime == 1 and time.monotonic() < end:
            time.sleep(0.02)
        assert lock.stat().st_mtime > 1


def test_a_lock_that_its_owner_removes_meanwhile_is_none(tmp_path: Path, monkeypatch):
    """Between opening it and locking it, its owner ends, and a third process begins."""
    flock, stack = fcntl.flock, contextlib.ExitStack()
    first = contextlib.ExitStack()
    first.enter_context(unfinished.folder(tmp_path, "train"))

    def late(file: object, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.close()
        stack.enter_context(unfinished.folder(tmp_path, "train"))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with (
        stack,
        pytest.raises(ValueError, match="is being written"),
        unfinished.folder(tmp_path, "train"),
    ):
        pass
    assert not hidden(tmp_path)
