"""What has its final name is on the disk, not only in memory: a power cut loses none of it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from small_checkpoints import save

from hvdkit.data import pack, source


@pytest.fixture
def unsafe(monkeypatch):
    """By the name that a rename gave: what of it was not flushed when it got that name."""
    flushed: dict[tuple[int, int], int] = {}  # of each file and folder: its size when it was
    found: dict[str, list[str]] = {}
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        about = os.fstat(descriptor)
        flushed[about.st_dev, about.st_ino] = about.st_size

    def check(move):
        def renamed(path: Path, target: Path):
            inside = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
            late = [
                p.name
                for p in inside
                if flushed.get((p.stat().st_dev, p.stat().st_ino)) != p.stat().st_size
            ]
            found[Path(target).name] = late
            moved = move(path, target)
            flushed.pop((target.parent.stat().st_dev, target.parent.stat().st_ino), None)
            return moved

        return renamed

    monkeypatch.setattr(os, "fsync", watched)
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, check(getattr(Path, name)))
    found["flushed"] = flushed
    return found


def test_a_checkpoint(kept, unsafe):
    flushed = unsafe.pop("flushed")
    path = save(kept, 7)
    assert unsafe == {"manifest.json": [], "step-00000007": []}
    parent = kept.folder.stat()  # which holds the new name
    assert path.parent == kept.folder and (parent.st_dev, parent.st_ino) in flushed


def test_a_packed_split(tmp_path, unsafe):
    unsafe.pop("flushed")
    samples = source.Arrays(
        image=np.zeros((3, 8, 8, 3), np.uint8), label=np.array([0, 1, 2], np.int32)
    )
    pack.pack(samples, tmp_path, "train", shards=2)
    assert unsafe["train"] == []
