"""stage.py: one copy a host, verified, resumed, skipped."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts import ROOT, Hosts, hosts, run  # noqa: F401

sys.path.insert(0, str(ROOT / "launch"))
import stage

STAGE = str(ROOT / "launch" / "stage.py")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name, size in (("a/1.png", 10), ("a/2.png", 3_000_000), ("b/deep/3.txt", 0), ("list", 5)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    return folder


def same(source: Path, target: Path) -> bool:
    return all(
        (target / name).read_bytes() == (source / name).read_bytes()
        for name in stage.listing(source).files
    )


def test_copies_then_skips_then_copies_what_changed(source: Path, tmp_path: Path):
    target = tmp_path / "local" / "data"
    assert "4 of 4 files copied, 3.0 MB" in stage.stage(source, target, 2)
    assert same(source, target)
    assert "up to date: 4 files" in stage.stage(source, target, 2)
    (source / "list").write_text("other")
    os.utime(source / "list", ns=(1, 1))
    assert "1 of 4 files copied" in stage.stage(source, target, 2)
    assert same(source, target)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_every_file_is_looked_at(tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "local"
    source.mkdir()
    for number in range(1000):
        (source / f"{number}").write_text(f"{number:04d}")
    stage.stage(source, target)
    for number in range(0, 800, 2):
        (target / f"{number}").unlink()
    (target / "801").write_text("0")
    (target / "803").write_text("0000")
    (target / "805").unlink()
    (target / "805").symlink_to(source / "805")
    assert "403 of 1,000 files copied" in stage.stage(source, target)
    assert same(source, target) and not (target / "805").is_symlink()
    assert "up to date: 1,000 files" in stage.stage(source, target)


def test_files_of_any_name_are_copied(tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "local"
    source.mkdir()
    names = [b"a.part", b"a.node.1.part", b"caf\xe9.png", b".staged.json", b"two\nlines"]
    for name in names:
        Path(os.fsdecode(os.fsencode(source) + b"/" + name)).write_bytes(name)
    assert "5 of 5" in stage.stage(source, target)
    assert set(map(os.fsencode, os.listdir(target))) == set(names)


_KILLED = """
import os, pathlib, signal, sys
sys.path.insert(0, sys.argv[1])
import stage
stage._sha256 = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
stage.stage(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))
"""


def test_what_a_kill_left_is_removed(source: Path, tmp_path: Path):
    target = tmp_path / "local"
    command = [sys.executable, "-c", _KILLED, str(ROOT / "launch"), str(source), str(target)]
    assert subprocess.run(command).returncode == -9
    assert files(target) and all(name.startswith(".staging/") for name in files(target))
    # Of this machine before it was started anew, and of another one that is copying.
    for name, age in (("dead.1", 500), ("living.1", 5)):
        partial = target / ".staging" / name / "0"
        partial.parent.mkdir()
        partial.write_bytes(bytes(1000))
        then = time.time() - age
        os.utime(partial.parent, (then, then))
    assert "4 of 4 files copied" in stage.stage(source, target)
    assert same(source, target)
    assert files(target) - set(stage.listing(source).files) == {".staging/living.1/0"}
    os.utime(target / ".staging" / "living.1", (1, 1))
    (target / ".staging" / "mine").mkdir()  # nothing that a staging makes
    (target / ".staging" / "mine" / "notes").write_bytes(b"")
    os.utime(target / ".staging" / "mine", (1, 1))
    assert "up to date" in stage.stage(source, target)
    assert files(target) - set(stage.listing(source).files) == {".staging/mine/notes"}
    shutil.rmtree(target / ".staging" / "mine")
    assert "up to date" in stage.stage(source, target)
    assert files(target) == set(stage.listing(source).files) and not (target / ".staging").exists()


def test_what_another_users_kill_left_is_in_nobodys_way(source, tmp_path, monkeypatch):
    """Root may do all, and runs these tests: the system's answer is made up."""
    target, utime = tmp_path / "local", os.utime
    left = target / ".staging" / "dead.1" / "0"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"")

    def closed(path, *others, **more):
        if path == target / ".staging":
            raise PermissionError(13, "Permission denied", str(path))
        utime(path, *others, **more)

    monkeypatch.setattr(stage.os, "utime", closed)
    assert "4 of 4 files copied" in stage.stage(source, target)
    assert "up to date" in stage.stage(source, target) and left.exists()


def test_a_signal_leaves_nothing_half_copied(tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "local"
    source.mkdir()
    with open(source / "large", "wb") as file:
        file.truncate(1 << 40)  # no test could wait for its end
    ended = subprocess.Popen([sys.executable, "-c", _UNBOUNDED, STAGE, source, target])
    try:
        while not list(target.glob(".staging/*/*")):
            time.sleep(0.02)
        ended.send_signal(signal.SIGTERM)
        assert ended.wait(60) == 143
    finally:
        ended.kill()
    assert not any(target.iterdir())


# A disk of the size of that file is not at hand.
_UNBOUNDED = """
import sys
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
import stage
stage._check_space = lambda *_: None
sys.exit(stage.main(sys.argv[2:]))
"""


def fails(call: Callable[[], object], *parts: object) -> None:
    with pytest.raises((ValueError, OSError)) as error:
        call()
    assert "\n" not in str(error.value)
    assert all(str(part) in str(error.value) for part in parts), str(error.value)


def test_what_cannot_be_copied_is_named(source: Path, tmp_path: Path):
    target = tmp_path / "local"

    def refused(*parts: object) -> None:
        fails(lambda: stage.stage(source, target), *parts)
        assert not files(target)

    (source / "b" / "loop").symlink_to("..")
    refused(source, "b/loop leads back to a folder that it is in")
    (source / "b" / "loop").unlink()
    for number in range(5):
        (source / f"gone{number}.png").symlink_to("/nowhere")
    refused(source, "gone0.png is a link to /nowhere, which is not there", "and 2 more")
    for number in range(5):
        (source / f"gone{number}.png").unlink()
    (source / "self").symlink_to("self")
    refused("self is a link to self")
    (source / "self").unlink()
    (source / "into").symlink_to(target)
    refused("into leads to")
    (source / "into").unlink()
    os.mkfifo(source / "pipe")
    refused("pipe is neither a file nor a folder")
    (source / "pipe").unlink()
    (source / ".staging").mkdir()
    refused(".staging is there: a staging into this folder runs or was cut off")
    (source / ".staging").rmdir()
    (source / "again").symlink_to("a")  # a link to a folder beside is none of these
    assert "6 of 6 files copied" in stage.stage(source, target)


def test_places_that_hold_each_other(source: Path, tmp_path: Path):
    (tmp_path / "other").symlink_to(source)
    inside = "stage into a folder beside the source"
    fails(lambda: stage.stage(source, source / "a" / "local"), "lies in", inside)
    fails(lambda: stage.stage(source, tmp_path), "lies in", inside)
    fails(lambda: stage.stage(source, tmp_path / "other"), inside)
    fails(lambda: stage.stage(source / "list", tmp_path / "x"), "is not a folder")
    assert set(os.listdir(source)) == {"a", "b", "list"}
    (tmp_path / "local" / "list").mkdir(parents=True)
    fails(lambda: stage.stage(source, tmp_path / "local"), "list is a folder", "remove it")


def test_links_in_the_target_are_refused_before_anything_is_written(source: Path, tmp_path: Path):
    target, elsewhere = tmp_path / "local", tmp_path / "mine"
    (elsewhere / "deep").mkdir(parents=True)
    (target / "b").mkdir(parents=True)
    for way, to in (("a", source / "b"), ("a", elsewhere), ("b/deep", elsewhere / "deep")):
        (target / way).symlink_to(to)
        whole = {path: path.read_bytes() for path in source.rglob("*.*")}
        fails(lambda: stage.stage(source, target), target / way, f"is a link to {to}", "remove")
        assert whole == {path: path.read_bytes() for path in source.rglob("*.*")}
        assert not files(elsewhere) and files(target) <= {way}
        (target / way).unlink()
    (elsewhere / "deep" / "0").write_bytes(b"")
    os.utime(elsewhere / "deep", (1, 1))
    (target / ".staging").symlink_to(elsewhere)  # where what a kill left is removed
    fails(lambda: stage.stage(source, target), target / ".staging", "is a link to", "remove")
    (target / ".staging").unlink()
    assert files(elsewhere) == {"deep/0"}
    (target / "a").write_bytes(b"")
    fails(lambda: stage.stage(source, target), target / "a", "is no folder", "remove")
    (target / "a").unlink()
    (tmp_path / "disk").symlink_to(target)  # the target itself may be one
    assert "4 of 4 files copied" in stage.stage(source, tmp_path / "disk") and same(source, target)


def test_what_the_source_does_not_hold_makes_another_set(source: Path, tmp_path: Path):
    target = tmp_path / "local"
    (source / "b" / "none").mkdir()
    stage.stage(source, target)
    assert (target / "b" / "none").is_dir()  # readers refuse it, so they do in the copy
    (source / "a" / "1.png").rename(source / "b" / "1.png")
    (source / "b" / "none").rmdir()
    words = (f"{target} holds 2 files and folders that {source} does not", "first: a/1.png")
    for _ in range(2):
        fails(lambda: stage.stage(source, target), *words, "empty folder")
        assert not (target / "b" / "1.png").exists()
    (target / "a" / "1.png").unlink()
    (target / "b" / "none").rmdir()
    for name in ("lost+found/0", "a/Thumbs.db", "b/.nfs000012ab", ".staging/mine"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(b"")
    assert "1 of 4 files copied" in stage.stage(source, target)
    assert "up to date" in stage.stage(source, target) and same(source, target)


def test_a_file_that_changes_while_it_is_copied(source: Path, tmp_path: Path, monkeypatch):
    once = stage._copy_once

    def growing(path: Path, *others: object) -> str:
        with open(path, "ab") as file:
            file.write(b"more")
        return once(path, *others)

    monkeypatch.setattr(stage, "_copy_once", growing)
    fails(lambda: stage.stage(source, tmp_path / "local"), source, "changed meanwhile")
    assert not files(tmp_path / "local")


def test_the_second_of_two_stagings_waits_for_the_first(source: Path, tmp_path: Path):
    target = tmp_path / "local"
    stage.stage(source, target)
    with stage._alone(target):
        command = [sys.executable, STAGE, source, target]
        second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert f"waiting for another staging into {target}" in second.stdout.readline()
    assert "up to date" in second.stdout.readline() and second.wait(10) == 0


def test_a_copy_that_came_out_different_does_not_get_its_name(source, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "_sha256", lambda *_: "0")
    fails(lambda: stage.stage(source, tmp_path / "local", 1), "is that disk sound")
    assert not any((tmp_path / "local").rglob("*.png"))


def test_a_full_disk_is_named(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        usage = types.SimpleNamespace(f_bavail=1, f_frsize=900, f_files=0, f_favail=0)
        patch.setattr(stage.os, "statvfs", lambda _: usage)
        words = ("x has 900 bytes free, 3.0 MB are to come", "3.0 MB too little")
        fails(lambda: stage.stage(source, tmp_path / "x"), *words)
        usage.f_bavail, usage.f_files, usage.f_favail = 10**6, 9, 3
        fails(lambda: stage.stage(source, tmp_path / "x"), "x has room for 3 files, 4 are to come")

    def full(_: int) -> None:  # another program took the space
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stage.os, "fsync", full)
    fails(lambda: stage.stage(source, tmp_path / "x"), "No space left on device", tmp_path / "x")
    assert not files(tmp_path / "x")


def test_one_rank_says_what_is_wrong_and_all_end(source: Path, tmp_path: Path):
    Path(os.fsdecode(os.fsencode(source) + b"/caf\xe9")).symlink_to("/nowhere")
    command = [sys.executable, STAGE, source, tmp_path / "x"]
    mpirun = ["mpirun", "-np", "3", "sh", "-c", '"$@"; echo code-$?', "sh"]
    ended = run([*mpirun, *command], timeout=60)
    assert ended.output.count("code-1") == 3, ended.output
    assert ended.output.count("error: ") == 1 and "Traceback" not in ended.output, ended.output
    assert "caf\\udce9 is a link to /nowhere" in ended.output
    assert run([*command, "--workers=0"], timeout=30).code == 2
    assert run([*command[:-1], ""], timeout=30).code == 2


def test_no_source(tmp_path: Path):
    ended = run([sys.executable, STAGE, tmp_path / "none", tmp_path / "x"], timeout=30)
    assert ended.code == 1
    assert "No such file or directory" in ended.output


@pytest.mark.timeout(200)
@pytest.mark.parametrize("via", ["gloo", "mpi"])
def test_one_rank_on_each_host_copies(hosts: Hosts, source: Path, tmp_path: Path, via: str):  # noqa: F811
    """Each host has a disk of its own at the same path."""
    local = tmp_path / "local"
    local.mkdir()
    for host in hosts:
        host.sh(f"mount -t tmpfs tmpfs {local}")
    try:
        words = ["-H", "node1:2,node2:2,node3:1", f"--{via}", "-p", "2222", "--interface", "eth0"]
        command = [sys.executable, STAGE, str(source), str(local / "data")]
        ended = hosts[1].run(str(ROOT / "launch/hosts.sh"), *words, *command, timeout=90)
        assert ended.code == 0, ended.output
        for host in hosts:
            assert ended.output.count(f"{host.name}: {local}/data: 4 of 4 files copied") == 1
            assert host.sh(f"cd {local}/data && find . -name '*.png' | wc -l").strip() == "2"
    finally:
        for host in hosts:
            host.sh(f"umount {local}")


def test_what_is_copied_is_flushed_before_it_gets_its_name(source, tmp_path, monkeypatch):
    """A power cut must not leave a file of the right name, size and time without its bytes."""
    flushed, seen, fsync, rename = {}, {}, os.fsync, Path.rename

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        about = os.fstat(descriptor)
        flushed[about.st_ino] = about.st_size

    def renamed(path: Path, target: Path) -> Path:
        about = path.stat()
        seen[target.name] = flushed.get(about.st_ino) == about.st_size
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(Path, "rename", renamed)
    stage.stage(source, tmp_path / "local", 1)
    assert seen == {"1.png": True, "2.png": True, "3.txt": True, "list": True}
