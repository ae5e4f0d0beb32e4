"""stage.py: one copy a host, verified, resumed, skipped."""

from __future__ import annotations

import os
import subprocess
import sys
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
        for name in stage.listing(source)
    )


def test_copies_then_skips_then_copies_what_changed(source: Path, tmp_path: Path):
    target = tmp_path / "local" / "data"
    assert "4 of 4 files copied, 3 MB" in stage.stage(source, target, 2)
    assert same(source, target)
    assert "up to date: 4 files" in stage.stage(source, target, 2)
    (source / "list").write_text("other")
    os.utime(source / "list", ns=(1, 1))
    assert "1 of 4 files copied" in stage.stage(source, target, 2)
    assert same(source, target)


def test_goes_on_after_an_interruption(source: Path, tmp_path: Path, monkeypatch):
    target = tmp_path / "local"
    copy = stage._copy_once

    def cut_off(path: Path, partial: Path) -> str:
        if path.name == "2.png":
            partial.write_bytes(b"half")
            raise OSError("power")
        return copy(path, partial)

    monkeypatch.setattr(stage, "_copy_once", cut_off)
    with pytest.raises(OSError, match="power"):
        stage.stage(source, target, 1)
    assert not (target / "a/2.png").exists()
    cut_off_by = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True).stdout
    [partial] = target.rglob("*.part")
    partial.rename(
        f"{str(partial).removesuffix('.part').rpartition('.')[0]}.{int(cut_off_by)}.part"
    )
    monkeypatch.undo()
    done = stage.stage(source, target, 1)
    assert "up to date" not in done
    assert same(source, target)
    assert not list(target.rglob("*.part")), "it would fill the disk, a little each time"


def test_a_copy_that_came_out_different_does_not_get_its_name(source, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "_sha256", lambda path: "0")
    with pytest.raises(ValueError, match="is that disk sound"):
        stage.stage(source, tmp_path / "local", 1)
    assert not list((tmp_path / "local").rglob("*.png"))


def test_a_target_that_was_emptied_is_filled_again(source: Path, tmp_path: Path):
    target = tmp_path / "local"
    stage.stage(source, target, 1)
    (target / "list").unlink()
    assert "1 of 4 files copied" in stage.stage(source, target, 1)


def test_a_full_disk_is_named_before_anything_is_copied(source, tmp_path, monkeypatch):
    usage = lambda path: type("usage", (), {"free": 1000})  # noqa: E731
    monkeypatch.setattr(stage.shutil, "disk_usage", usage)
    with pytest.raises(OSError, match=r"0\.0 GB free, 0\.0 GB are to be copied"):
        stage.stage(source, tmp_path / "local", 1)


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
