"""Names held once, what one rank looks for in place of all, and disks that differ."""

import os
from pathlib import Path

import pytest
import readers
import tensorflow as tf
from refusals import refused

from hvdkit.data import shared_listing
from hvdkit.data.readers.cityscapes import Cityscapes
from hvdkit.data.readers.class_folders import ClassFolders
from hvdkit.data.readers.listing import Names, packed
from hvdkit.data.readers.pairs import ImageLabelFolder
from hvdkit.data.readers.voc import Voc
from hvdkit.ranks import encoding


@pytest.mark.parametrize("limit", [2**32, 0])  # offsets have 4 bytes, then 8
def test_names_are_what_they_were(limit: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hvdkit.data.readers.listing._NARROW", limit)
    words = [
        "a.jpg",
        "",
        "Pr\u00fcfung/\u4e2d.png",
        os.fsdecode(b"\xff\x00.jpg"[:1]),
        "x" * 300,
    ]
    held = Names(*packed(words))
    assert [held[i] for i in range(len(held))] == words
    read = tf.data.Dataset.range(len(words)).map(held.at)
    assert list(read.as_numpy_iterator()) == [os.fsencode(word) for word in words]
    assert Names(*packed(["ab", "c"])).digest() != Names(*packed(["a", "bc"])).digest()


def open_all(root: Path) -> list:
    """A split of each set whose files are listed; all but the first have pairs."""
    classes = ClassFolders(root / "classes", "train")
    pairs = [Voc(root / "voc", "train"), Cityscapes(root / "cityscapes", "train")]
    return [classes, *pairs, ImageLabelFolder(root / "folders", "train", 256)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    readers.write_classes(tmp_path / "classes")
    readers.write_voc(tmp_path / "voc")
    readers.write_cityscapes(tmp_path / "cityscapes")
    pair = readers.noise(1), readers.noise(1)[..., 0]
    readers.write_pairs(tmp_path / "folders", {"a": pair, "b": pair})
    return tmp_path


def test_one_rank_looks_for_all(root: Path, monkeypatch: pytest.MonkeyPatch):
    """What rank 0 found is all that another rank needs: it asks the disk for nothing."""
    found: dict = {}
    with shared_listing.kept(found):
        first = open_all(root)
    found = encoding.unpack(encoding.pack(found, "listings"))  # another rank gets it so
    with shared_listing.awaited():
        open_all(root)
        raise AssertionError("it did not wait for rank 0")

    def asked(path, *_):
        raise AssertionError(f"asked for {path}")

    with (
        monkeypatch.context() as patch,
        shared_listing.received(found, checks_disk=False),
    ):
        for name in ("scandir", "listdir", "stat", "lstat"):
            patch.setattr(os, name, asked)
        second = open_all(root)
    for one, other in zip(first, second, strict=True):
        assert one.fingerprint() == other.fingerprint() and readers.same(one, other)


def test_another_hosts_disk_is_looked_at(root: Path):
    found: dict = {}
    with shared_listing.kept(found):
        open_all(root)
    with shared_listing.received(found, checks_disk=True):
        assert len(open_all(root)) == 4
    for path in ("classes/train/n01/z.jpg", "voc/SegmentationClass/2007_000002.png"):
        whole = (root / path).read_bytes()
        (root / path).write_bytes(whole[:-1])
        with shared_listing.received(found, checks_disk=True):
            refused(
                lambda: open_all(root),
                root / path,
                f"has {len(whole) - 1} bytes",
                f"{len(whole)} on rank 0's",
            )
        with shared_listing.received(found, checks_disk=False):
            assert len(open_all(root)) == 4
        (root / path).unlink()
        with shared_listing.received(found, checks_disk=True):
            refused(lambda: open_all(root), root / path, "No such file")
        (root / path).write_bytes(whole)


def test_what_rank_0_did_not_look_for(root: Path):
    """As where a task opens other data on some ranks: each looks for its own."""
    found: dict = {}
    with shared_listing.kept(found):
        ClassFolders(root / "classes", "train")
    with shared_listing.received(found, checks_disk=False):
        other = ClassFolders(root / "classes", "val")
    assert readers.same(other, ClassFolders(root / "classes", "val"))
