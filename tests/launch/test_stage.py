"""stage.py: one complete copy per host, with its modes; what must not be copied is refused."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import ROOT, Ended, Hosts, run

STAGE = [sys.executable, str(ROOT / "launch" / "stage.py")]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name, size in (("a/1.png", 10), ("a/2.png", 3_000_000), ("b/deep/3.txt", 0), ("list", 5)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    (folder / "again").symlink_to("a/1.png")
    (folder / "b" / "up").symlink_to("..")
    return folder


def stage(source: object, target: object, **env: str) -> Ended:
    return run([*STAGE, str(source), str(target)], timeout=60, env=os.environ | env)


def tree(folder: Path) -> dict[str, tuple]:
    """By path: mode, and bytes or a link's target."""
    found = {}
    for path in folder.rglob("*"):
        about = os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        found[str(path.relative_to(folder))] = (path.lstat().st_mode, about)
    return found


def test_a_copy_is_whole_keeps_modes_and_copies_only_what_changed(source: Path, tmp_path: Path):
    target = tmp_path / "new" / "data"
    (source / "list").chmod(0o600)
    (source / os.fsdecode(b"caf\xe9")).write_text("of no character set")
    source.chmod(0o700)
    assert "data: 5 files copied" in stage(source, target).output
    assert tree(source) == tree(target) and target.stat().st_mode & 0o777 == 0o700
    assert "data is up to date" in stage(source, target).output
    (source / "a" / "1.png").write_text("other")
    (source / "b" / "deep" / "3.txt").unlink()
    (target / "extra").write_text("another set")
    (target / "a" / "2.png").write_text("cut short")
    assert "data: 2 files copied" in stage(source, target).output
    assert tree(source) == tree(target)


def test_a_link_in_the_target_never_leads_back(source: Path, tmp_path: Path):
    (tmp_path / "disk").mkdir()
    for name, to in (("disk/a", source / "b"), ("disk/list", source / "list"), ("local", "disk")):
        (tmp_path / name).symlink_to(to)
    before = tree(source)
    assert stage(source, tmp_path / "local").code == 0
    assert tree(source) == before == tree(tmp_path / "disk")


def link(to: str) -> Callable[[Path], None]:
    return lambda source: (source / "b" / "link").symlink_to(to)


WRONG = {
    "into the source": (lambda s: None, "source/a/local", "is in"),
    "a parent": (lambda s: None, ".", "name a target beside the source"),
    "through a link": (lambda s: (s.parent / "to").symlink_to(s / "a"), "to/local", "is in"),
    "a link out": (link("../../secret"), "x", "leads out of"),
    "out and in again": (link("../../source/list"), "x", "leads out of"),
    "an absolute link": (link("/etc/passwd"), "x", "link leads out of"),
    "a pipe": (lambda s: os.mkfifo(s / "pipe"), "x", "pipes and devices are not copied"),
    "no source": (lambda s: s.rename(s.parent / "moved"), "x", "No such file or directory"),
    "another set": (lambda s: None, "home", "holds another set (letter): name an empty folder"),
    "nothing to copy": (lambda s: subprocess.run(["rm", "-r", *s.iterdir()]), "x", "no files"),
    "no name": (lambda s: None, "", "a name is empty"),
}


@pytest.mark.parametrize("make, target, said", WRONG.values(), ids=WRONG)
def test_what_would_be_wrong_is_refused_in_one_sentence(source, tmp_path, make, target, said):
    for name in ("secret", "home/letter"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    make(source)
    before = tree(tmp_path)
    ended = stage(source, f"{tmp_path}/{target}" if target else "")
    assert ended.code == (1 if target else 2) and said in ended.output, ended.output
    assert ended.output.count("error: ") == 1 and "Traceback" not in ended.output
    after = {name: what for name, what in tree(tmp_path).items() if name.split("/")[0] != "x"}
    assert after == before and not (tmp_path / "x" / "b" / "link").is_symlink()


def test_rsync_that_is_missing_is_named(source: Path, tmp_path: Path):
    ended = stage(source, tmp_path / "x", PATH="/nowhere")
    assert ended.code == 1 and "rsync is not installed here: install it" in ended.output


def test_damaged_bytes_are_found(source: Path, tmp_path: Path):
    """The copy is read again: here another file gets that size and time."""
    (fake := tmp_path / "bin" / "rsync").parent.mkdir()
    damage = f"printf wrong >{tmp_path}/x/list; touch -r {source}/list {tmp_path}/x/list"
    real = f'{shutil.which("rsync")} "$@"'
    fake.write_text(f'#!/bin/sh\n{real}; case "$*" in *--fsync*) {damage};; esac\n')
    fake.chmod(0o755)
    ended = stage(source, tmp_path / "x", PATH=f"{fake.parent}:{os.environ['PATH']}")
    assert ended.code == 1 and " list): stage again" in ended.output, ended.output


def test_a_second_staging_waits_for_the_first(source: Path, tmp_path: Path):
    (target := tmp_path / "x").mkdir()
    lock = os.open(target, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    process = subprocess.Popen([*STAGE, source, target])
    time.sleep(1)
    assert process.poll() is None and not os.listdir(target)
    os.close(lock)
    assert process.wait(30) == 0 and (target / "list").exists()


def test_one_of_a_hosts_ranks_copies_and_all_end_alike(source: Path, tmp_path: Path):
    mpirun = ["mpirun", "-np", "3", "--oversubscribe", "sh", "-c", '"$@"; echo code-$?', "sh"]
    ended = run([*mpirun, *STAGE, str(source), str(tmp_path / "x")], timeout=60)
    assert ended.output.count("code-0") == 3, ended.output
    assert ended.output.count("4 files copied") == 1 and "up to date" not in ended.output
    ended = run([*mpirun, *STAGE, str(source), str(source)], timeout=60)
    assert ended.output.count("code-1") == 3 and ended.output.count("error: ") == 1, ended.output


@pytest.mark.timeout(200)
def test_one_rank_on_each_host_copies(hosts: Hosts, source: Path, tmp_path: Path):
    """Each host has a disk of its own at the same path."""
    local = tmp_path / "local"
    local.mkdir()
    for host in hosts:
        host.sh(f"mount -t tmpfs tmpfs {local}")
    try:
        words = ["-H", "node1:2,node2:2,node3:1", "-p", "2222", "--interface", "eth0"]
        command = [*STAGE, str(source), str(local / "data")]
        ended = hosts[1].run(str(ROOT / "launch/hosts.sh"), *words, *command, timeout=90)
        assert ended.code == 0, ended.output
        for host in hosts:
            assert ended.output.count(f"{host.name}: {local}/data: 4 files copied") == 1
            assert host.sh(f"cd {local}/data && find . -name '*.png' | wc -l").strip() == "2"
    finally:
        for host in hosts:
            host.sh(f"umount {local}")
