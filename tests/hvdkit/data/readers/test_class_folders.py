"""A folder a class: samples, labels, and errors about what is missing or wrong."""

import contextlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import readers
import tensorflow as tf
from refusals import refused

from hvdkit.data import source
from hvdkit.data.open import open_sources, trained_on_too
from hvdkit.data.prepare import pack
from hvdkit.data.readers.class_folders import ClassFolders
from hvdkit.settings import Settings
from tasks import classification


@pytest.fixture
def root(tmp_path: Path) -> Path:
    readers.write_classes(tmp_path)
    (tmp_path / "train" / "n01" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "train" / "n01" / "notes.txt").write_bytes(b"x")
    return tmp_path


def test_the_pictures_of_an_evaluation_have_the_names_of_classes(root, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        classification, "_tile", lambda *shown: drawn.append(shown[1:]) or tile
    )
    tile = np.zeros([4, 4, 3], np.uint8)
    config = Settings(data_dir=str(root), data_format="class_folders", num_classes=3)
    task = classification.Task(config)
    task.sources()
    inputs = {"image": tf.zeros([2, 8, 8, 3])}
    task.draw(inputs, tf.constant([0, 2]), tf.one_hot([1, 2], 3))
    assert drawn == [("n01", "n02"), ("n10", "n10")]


def fails(root: Path, *parts: object):
    refused(lambda: ClassFolders(root, "train"), *parts)


def test_a_class_without_pictures_of_a_split_is_refused(tmp_path: Path):
    """Where classes come before splits, as where splits come before classes."""
    for name, count in (("ant", 1), ("bee", 1), ("zebra", 0)):
        (tmp_path / name / "train").mkdir(parents=True)
        for number in range(count):
            readers.save(tmp_path / name / "train" / f"{number}.png", readers.noise(1))
    # No class: a run's logs, which lie in folders of these names.
    (tmp_path / "logs" / "train").mkdir(parents=True)
    (tmp_path / "logs" / "train" / "events.out").write_bytes(b"x")
    fails(tmp_path, "zebra/train has no picture", "move zebra away")
    (tmp_path / "zebra" / "train").rename(tmp_path / "zebra" / "training")
    fails(tmp_path, "zebra/training has no picture")
    shutil.rmtree(tmp_path / "zebra")
    assert ClassFolders(tmp_path, "train").class_names == ["ant", "bee"]


def test_pictures_that_are_also_trained_on_are_counted_where_val_lacks_a_class(root):
    for folder in sorted((root / "train").iterdir())[:2]:
        shutil.rmtree(root / "val" / folder.name, ignore_errors=True)
    folder = root / "val" / "n10"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "train" / "n10", folder)
    config = Settings(data_dir=str(root), data_format="class_folders", num_classes=3)
    train, val = open_sources(config, "class_folders")
    assert trained_on_too(train, val) == len(val) > 0


def test_a_packed_set_that_names_its_classes_has_so_many(root, tmp_path):
    out = tmp_path / "packed"
    for split in ("train", "val"):
        source = ClassFolders(root, split)
        pack.pack(source, out, split, shards=1, packed_from="folders")
    config = Settings(data_dir=str(out), data_format="records", num_classes=5)
    refused(lambda: open_sources(config, "class_folders"), "give --num_classes=3")


def test_samples_are_ordered_by_class_and_name(root: Path):
    source = ClassFolders(root, "train")
    assert source.class_names == ["n01", "n02", "n10"] and source.num_classes == 3
    names = [str(source.picture_file(i).relative_to(root)) for i in range(len(source))]
    assert names == [
        "train/n01/z.jpg",
        "train/n02/a.png",
        "train/n02/b.JPEG",
        "train/n10/c.jpeg",
    ]
    samples = readers.read_all(source)
    assert [int(sample["label"]) for sample in samples] == [0, 1, 1, 2]
    np.testing.assert_array_equal(samples[1]["image"], readers.noise(2, 9, 30))
    assert tf.data.Dataset.range(1).map(source.read).element_spec == {
        "image": tf.TensorSpec([None, None, 3], tf.uint8),
        "label": tf.TensorSpec([], tf.int32),
        "file": tf.TensorSpec([], tf.string),
    }
    assert [int(s["label"]) for s in readers.read_all(ClassFolders(root, "val"))] == [
        0,
        1,
        2,
    ]


def test_order_does_not_depend_on_the_file_system(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    def reverse(path):
        entries = sorted(scandir(path), key=lambda e: e.name, reverse=True)
        return contextlib.nullcontext(iter(entries))

    first, scandir = ClassFolders(root, "train"), os.scandir
    monkeypatch.setattr(os, "scandir", reverse)
    assert ClassFolders(root, "train").fingerprint() == first.fingerprint()


def test_fingerprint_tells_names_and_sizes(root: Path, monkeypatch: pytest.MonkeyPatch):
    def fingerprint(split: str = "train") -> str:
        return ClassFolders(root, split).fingerprint()

    def longer(name: str) -> None:
        with (root / "train" / name).open("ab") as file:
            file.write(b"x")

    first = fingerprint()
    assert first == fingerprint() != fingerprint("val")
    longer("n01/z.jpg")
    second = fingerprint()
    (root / "train/n01/z.jpg").rename(root / "train/n01/y.jpg")
    assert len({first, second, fingerprint()}) == 3
    # The names of files count whose sizes are not read.
    monkeypatch.setattr(source, "_MOST_SAMPLED", 1)
    first = fingerprint()
    longer("n10/c.jpeg")
    assert fingerprint() == first
    (root / "train/n10/c.jpeg").rename(root / "train/n10/d.jpeg")
    assert fingerprint() != first


def test_missing_parts_are_named(root: Path):
    refused(lambda: ClassFolders(root / "gone", "train"), root / "gone", "is missing")
    refused(lambda: ClassFolders(root, "test"), root / "test", "is missing")
    (root / "train/n10/c.jpeg").unlink()
    fails(root, root / "train" / "n10", "no picture")
    for path in list((root / "val").rglob("*.png")):
        path.rename(root / "val" / f"{path.parent.name}.png")
        path.parent.rmdir()
    refused(lambda: ClassFolders(root, "val"), root / "val", "a folder for each class")


def test_what_would_be_left_out_is_named(root: Path):
    for name in ("x.jpg", "x.gif"):
        readers.save(root / "train" / name, readers.noise(0))
        fails(root, root / "train", "beside them", name)
        (root / "train" / name).unlink()
    folder = root / "train" / "n01"
    for inside in ("more/x.jpg", "more/deep/x.jpg", "more/x.txt"):
        (folder / inside).parent.mkdir(parents=True)
        (folder / inside).write_bytes(b"")
        fails(root, folder, "holds more, which would be left out", "move")
        shutil.rmtree(folder / "more")
    for ending in (".bmp", ".dng", ".npy", "", ".jpg "):
        (folder / f"a{ending}").write_bytes(b"")
        (folder / f"b{ending.upper()}").write_bytes(b"")
        fails(
            root, folder, f"holds a{ending}, b{ending.upper()}, which would be left out"
        )
        (folder / f"a{ending}").unlink()
        (folder / f"b{ending.upper()}").unlink()
    (folder / "notes.txt").write_bytes(b"")
    for left_out in (
        "Thumbs.db",
        "._z.jpg",
        "more/.DS_Store",
        "__MACOSX/more/._z.jpg",
        ".a/z.jpg",
    ):
        (folder / left_out).parent.mkdir(parents=True, exist_ok=True)
        (folder / left_out).write_bytes(b"")
    assert len(ClassFolders(root, "train")) == 4
    (folder / "d.jpg").mkdir()
    fails(root, folder / "d.jpg", "is a folder")
    (folder / "d.jpg").rmdir()
    os.mkfifo(folder / "d.jpg")  # reading it would never end
    fails(root, "d.jpg", "no regular file")


def test_validation_pictures_that_are_trained_on_too_are_counted(root: Path):
    """By their bytes: another picture may have the name."""
    readers.save(root / "val" / "n01" / "w.png", readers.noise(7))
    for name, pixels in (("v.png", readers.noise(5)), ("w.png", readers.noise(8))):
        readers.save(root / "train" / "n01" / name, pixels)
    train = ClassFolders(root, "train")
    val = ClassFolders(root, "val")
    assert trained_on_too(train, val) == 1 == trained_on_too(val, train)


def test_links(root: Path):
    folder = root / "train" / "n01"
    (folder / "z.jpg").rename(root / "elsewhere.jpg")
    (folder / "z.jpg").symlink_to(root / "elsewhere.jpg")
    before = readers.read_all(ClassFolders(root, "train"))
    (root / "train" / "n10").rename(root / "n10")
    (root / "train" / "n10").symlink_to(root / "n10")
    after = readers.read_all(ClassFolders(root, "train"))
    assert all(
        np.array_equal(a["image"], b["image"])
        for a, b in zip(before, after, strict=True)
    )
    for target in (root / "gone.jpg", "z.jpg"):  # links to nowhere and to itself
        (folder / "z.jpg").unlink()
        (folder / "z.jpg").symlink_to(target)
        fails(root, folder / "z.jpg", "though its folder lists it")
    (root / "train" / "n02").rename(root / "n02")
    # Leaving it out would lose a class.
    (root / "train" / "n02").symlink_to(root / "nowhere")
    fails(root, root / "train" / "n02", "is a link that leads nowhere")


def test_names_that_are_not_utf8(root: Path):
    samples = readers.read_all(ClassFolders(root, "train"))
    for folder in ("train/n10", "val/n10"):
        os.rename(root / folder, os.fsencode(root / folder) + b"\xe9")
    path = os.fsencode(root / "train" / "n01") + b"/z\xff.jpg"
    os.rename(root / "train/n01/z.jpg", path)
    source = ClassFolders(root, "train")
    assert source.class_names[2] == os.fsdecode(b"n10\xe9") and source.fingerprint()
    for one, other in zip(readers.read_all(source), samples, strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])
    os.truncate(path, 20)
    readers.explained(source, 0, os.fsdecode(path), "no PNG, JPEG or WebP")
