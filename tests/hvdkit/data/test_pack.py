"""Packed sets: same samples under the same ids, whole or not there, and how damage is reported."""

import fcntl
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import readers
import tensorflow as tf
from hosts import run
from refusals import refused
from small_checkpoints import save

from hvdkit.data import pack
from hvdkit.data.open import reader_of
from hvdkit.data.readers import records
from hvdkit.data.readers.class_folders import ClassFolders
from hvdkit.data.readers.pairs import ImageLabelFolder
from hvdkit.data.readers.records import Records
from hvdkit.data.source import Arrays


def packed(demo: Path, out: Path, shards: int = 3) -> Path:
    return pack.pack(ImageLabelFolder(demo, "train", 11), out, "train", shards=shards)


def command(*flags: object) -> None:
    pack.main(["pack", *map(str, flags)])


@pytest.mark.parametrize(
    ("layout", "write"),
    [
        ("cityscapes", readers.write_cityscapes),
        ("class_folders", readers.write_classes),
        ("cifar10", readers.write_cifar10),
    ],
)
def test_packed_samples_are_those_of_the_source(tmp_path: Path, capsys, layout: str, write):
    root, out = tmp_path / "raw", tmp_path / "deep" / "packed"
    write(root)
    for split in ("train", "val"):
        flags = (f"--from={layout}", f"--root={root}", f"--split={split}", f"--out={out}")
        command(*flags, "--shards=2")
        source, found = reader_of(layout)(root, split, 0), Records(out, split)
        assert readers.same(source, found) and len(found) == len(source)
        assert found.kind == ("map" if layout == "cityscapes" else "class")
        labels = [sample["label"] for sample in readers.read_all(found)]
        assert found.num_classes == 1 + max(int(x[x != 255].max()) for x in labels)
        spec = tf.data.Dataset.range(1).map(found.read).element_spec
        assert spec["label"].dtype == (tf.uint8 if found.kind == "map" else tf.int32)
        assert spec["image"].shape.as_list() == [None, None, 3]
        file = readers.read_all(source)[0].get("file", b"")  # goes in as it is
        assert any(file in path.read_bytes() for path in (out / split).glob("*.tfrecord"))
    printed = capsys.readouterr().err
    assert re.search(r"^packed: (\d+)/\1$", printed, re.M)
    assert re.search(r"^verified: (\d+)/\1$", printed, re.M)
    assert sorted(p.name for p in out.iterdir()) == ["train", "val"]  # and nothing half done


def test_a_shuffled_pack_holds_each_sample_once_in_another_order(tmp_path: Path, capsys):
    readers.write_classes(tmp_path / "raw")
    flags = ("--from=class_folders", f"--root={tmp_path / 'raw'}", "--split=train")
    found = []
    for more in ((), ("--shuffle=1",), ("--shuffle=2",)):
        command(*flags, f"--out={tmp_path}", f"--as={len(found)}", "--shards=2", *more)
        packs = Records(tmp_path, f"{len(found)}")
        assert packs.is_shuffled == bool(more) and sum(packs.shard_sizes) == len(packs)
        found.append([(int(s["label"]), s["image"].tobytes()) for s in readers.read_all(packs)])
    assert found[0] != found[1] != found[2] != found[0]
    assert sorted(found[0]) == sorted(found[1]) == sorted(found[2])
    with pytest.raises(SystemExit):
        command(*flags, f"--out={tmp_path}", "--as=d", "--shuffle=-1")
    assert "--shuffle=-1: give a seed" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command(*flags, "--out=s3://some/set")
    assert "--out=s3://some/set is a URL" in capsys.readouterr().err


BLACK = np.zeros((2, 12, 16, 3), np.uint8)


@pytest.mark.parametrize(
    ("image", "label", "words"),
    [
        (BLACK, np.array([0.5, 1.7]), "float64 ()"),  # before: packed as 0 and 1
        (BLACK, np.zeros((2, 3), np.int64), "int64 (3,)"),
        (BLACK, BLACK, "with uint8 (12, 16, 3)"),  # before: packed as its brightness
        (BLACK, np.zeros((2, 12, 16, 1), np.int32), "int32 (12, 16, 1)"),
        (BLACK[..., :1], np.zeros(2, np.int64), "not uint8 (12, 16, 1)"),
        (BLACK / 255, np.zeros(2, np.int64), "not float64 (12, 16, 3)"),
    ],
)
def test_what_a_record_cannot_hold_is_refused(tmp_path: Path, image, label, words: str):
    refused(lambda: pack.pack(Arrays(image=image, label=label), tmp_path, "train"), words)


def test_corrupt_records_are_named(tiny_data: Path, tmp_path: Path):
    folder = packed(tiny_data, tmp_path)
    source = Records(tmp_path, "train")
    assert source.is_demo  # how it is augmented
    path = folder / "train-00001-of-00003.tfrecord"  # samples 8 to 16
    whole = path.read_bytes()
    for place in (12, 100, len(whole) // 12):  # of its first sample
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        readers.explained(source, 8, path, "sample 8 (bytes 12 to", "checksum", "pack again")
        assert source.explain(9) is None and source.explain(7) is None
    path.write_bytes(whole[:-50])  # the end of the last sample
    readers.explained(source, 16, path, "sample 16", "pack again")
    path.write_bytes(b"")
    readers.explained(source, 12, path, "sample 12", "pack again")
    path.unlink()
    readers.explained(source, 12, path, "sample 12", "pack again")
    (folder / "index.bin").write_bytes(b"")  # under a set that is open
    readers.explained(source, 12, path, "sample 12", folder / "index.bin", "was cut")


def test_broken_sets_are_named(tiny_data: Path, tmp_path: Path):
    def open_it() -> Records:
        return Records(tmp_path, "train")

    refused(open_it, tmp_path / "train" / "pack.json", "hvdkit pack", "none")
    folder = packed(tiny_data, tmp_path)
    refused(lambda: Records(tmp_path, "val"), tmp_path / "val", "packed in", "train")
    meta, index, shard = folder / "pack.json", folder / "index.bin", next(folder.glob("*2-of*"))
    for path, damages in (
        (meta, {b"": "damaged", b"[]": "damaged", b'{"version": 1}': "version is not"}),
        (index, {b"": "0 bytes", index.read_bytes()[::-1]: "checksum", None: "is missing"}),
        (shard, {b"cut": "3 bytes where", None: "is missing"}),
    ):
        whole = path.read_bytes()
        for damage, words in damages.items():
            path.unlink() if damage is None else path.write_bytes(damage)
            refused(open_it, path, words, "again")
            path.write_bytes(whole)
    meta.write_text(meta.read_text().replace('"map"', '"class"', 1))
    refused(open_it, meta, "its checksum differs", "pack again")


def test_a_set_is_written_whole_or_not_at_all(tiny_data: Path, tmp_path: Path, capsys):
    readers.write_classes(tmp_path / "raw")
    bad = tmp_path / "raw" / "train" / "n02" / "a.png"
    bad.write_bytes(bad.read_bytes()[:60])
    out = tmp_path / "out"
    flags = ("--from=class_folders", f"--root={tmp_path / 'raw'}", "--split=train")
    with pytest.raises(SystemExit) as end:
        command(*flags, f"--out={out}")
    assert end.value.code == 2 and f"{bad} cannot be decoded" in capsys.readouterr().err
    assert not any(out.iterdir())

    folder = packed(tiny_data, out)
    refused(lambda: packed(tiny_data, out), folder, "is there already", "--out")
    assert [path.name for path in out.iterdir()] == ["train"]
    refused(lambda: packed(tiny_data, tmp_path / "b", -1), "--shards=-1")
    for name in ("", ".", "..", "a/b", ".train"):
        with pytest.raises(SystemExit):
            command(*flags, f"--out={tmp_path / 'b'}", f"--as={name}")
        assert f"{name!r} cannot be the name of a packed split" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def killed_at(monkeypatch, owner: object, function: str, call: int) -> list[object]:
    """The calls so far; that one is interrupted before it does anything."""
    calls, real = [], getattr(owner, function)

    def once(*args, **how):
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*args, **how)

    monkeypatch.setattr(owner, function, once)
    return calls


@pytest.mark.parametrize(("place", "calls_of_both"), [
    ((pack, "_verify", 2), 4), ((Path, "rename", 6), 8),
])  # fmt: skip
def test_after_a_kill_the_next_try_goes_on(tiny_data, tmp_path, monkeypatch, place, calls_of_both):
    """In the second of three shards, and when two of the three were put into the whole."""
    calls = killed_at(monkeypatch, *place)
    with pytest.raises(KeyboardInterrupt):
        packed(tiny_data, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".train.packing"]
    packed(tiny_data, tmp_path)
    assert len(calls) == calls_of_both
    monkeypatch.undo()
    once = packed(tiny_data, tmp_path / "once")
    files = sorted(path.name for path in once.iterdir())
    assert [path.name for path in tmp_path.glob("*/.*")] == []
    assert files == sorted(path.name for path in (tmp_path / "train").iterdir())
    for name in files:
        assert (once / name).read_bytes() == (tmp_path / "train" / name).read_bytes()


def test_a_shard_that_was_cut_after_it_was_finished_is_not_joined(tiny_data, tmp_path, monkeypatch):
    killed_at(monkeypatch, pack, "_join", 1)
    with pytest.raises(KeyboardInterrupt):
        packed(tiny_data, tmp_path)
    shard = tmp_path / ".train.packing" / "00001" / "shard"
    os.truncate(shard, shard.stat().st_size // 2)
    refused(lambda: packed(tiny_data, tmp_path), "bytes where", f"remove {tmp_path}/.train.packing")


def test_ranks_share_the_work(tmp_path: Path):
    """Three shards by two ranks, one late; by itself, one: a shard takes about 256 MB."""
    readers.write_classes(tmp_path / "raw")
    tool = Path(sys.executable).with_name("mpirun")
    words = [tool, "-np", "2", "--oversubscribe", "sh", "-c"]
    words += ['sleep $((4 * OMPI_COMM_WORLD_RANK)); exec "$@"', "late"]
    words += [sys.executable, "-m", "hvdkit", "pack"]
    words += ["--from=class_folders", f"--root={tmp_path / 'raw'}", "--split=train"]
    ended = run([*words, f"--out={tmp_path}", "--as=three", "--shards=3"], 120)
    assert ended.code == 0 and ended.output.count("found the same") == 1, ended.output
    assert ended.output.count("waits for other ranks' shards 00001\n") == 1, ended.output
    command(*words[-3:], f"--out={tmp_path}", "--as=one")
    source = ClassFolders(tmp_path / "raw", "train")
    for name, shards in (("one", 1), ("three", 3)):
        assert len([*(tmp_path / name).glob("*.tfrecord")]) == shards
        assert readers.same(source, Records(tmp_path, name))


def test_a_rank_that_nobody_counts_is_refused(tiny_data: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PMIX_RANK", "1")
    refused(lambda: packed(tiny_data, tmp_path), "no launcher started it", "unset PMIX_RANK")
    monkeypatch.setenv("PMIX_SERVER_URI2", "of a launcher")
    refused(lambda: packed(tiny_data, tmp_path), "rank 1, and not of how many")


def test_what_reads_back_otherwise_is_noticed(tiny_data: Path, tmp_path: Path):
    class Changing(ImageLabelFolder):
        def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
            first = super().read(tf.constant(0, tf.int64))["file"]
            sample = super().read(index)
            return {**sample, "file": tf.where(index == 7, first, sample["file"])}

    source = Changing(tiny_data, "train", 11)
    with pytest.raises(ValueError, match="sample 7 differs from what was packed of it"):
        pack.pack(source, tmp_path, "train", shards=2)
    assert [path.name for path in tmp_path.iterdir()] == [".train.packing"]


def test_a_set_with_256_classes(tmp_path: Path):
    """Only in a label picture does 255 mean ignored."""
    images = np.stack([readers.noise(number) for number in range(3)])
    source = Arrays(image=images, label=np.array([0, 255, 254], np.int32))
    pack.pack(source, tmp_path, "train", shards=1)
    found = Records(tmp_path, "train")
    assert found.num_classes == 256
    assert [int(sample["label"]) for sample in readers.read_all(found)] == [0, 255, 254]


@pytest.mark.parametrize(("layout", "side"), [("voc", 5), ("class_folders", 9)])
def test_larger_pictures_are_scaled_once(tmp_path: Path, layout: str, side: int):
    """To the short side asked for, with labels on them; smaller ones go in as they are."""
    root, out = tmp_path / "raw", tmp_path / "packed"
    {"voc": readers.write_voc, "class_folders": readers.write_classes}[layout](root)
    flags = (f"--from={layout}", f"--root={root}", "--split=train", f"--out={out}")
    command(*flags, "--shards=2", f"--short_side={side}", "--quality=95", "--as=small")
    source = readers.read_all(reader_of(layout)(root, "train", 0))
    for small, whole in zip(readers.read_all(Records(out, "small")), source, strict=True):
        sizes = np.array(whole["image"].shape[:2])
        shape = np.round(sizes * min(1, side / sizes.min())).astype(int)
        assert small["image"].shape[:2] == tuple(shape) and shape.min() == side
        if sizes.min() == side:
            np.testing.assert_array_equal(small["image"], whole["image"])
        expected = tf.image.resize(whole["image"], shape, antialias=True)
        assert np.abs(small["image"] - expected).mean() < 25, "but for JPEG's loss"
        if layout == "class_folders":
            assert small["label"] == whole["label"]
        else:
            places = (((np.arange(n) + 0.5) * m / n).astype(int) for n, m in zip(shape, sizes))
            np.testing.assert_array_equal(small["label"], whole["label"][np.ix_(*places)])
    packed_from = json.loads((out / "small" / records.META).read_text())["packed_from"]
    assert packed_from.endswith(f"split train, short side {side}, quality 95")
    for wrong in (["--short_side=5", "--quality=0"], ["--quality=50"]):  # the last: of what?
        with pytest.raises(SystemExit):
            command(*flags, "--as=wrong", *wrong)
    assert not (out / "wrong").exists()


def test_an_unfinished_pack_is_of_one_set_and_one_process(tmp_path: Path, monkeypatch):
    def other(key: str = "key") -> None:
        with pack._unfinished(tmp_path, "train", key, rank=0) as work:
            assert (work / "00000").exists() == (key == "key")

    mine, work = tmp_path / "mine", tmp_path / ".train.packing"
    mine.mkdir()
    (mine / "file").write_bytes(b"")
    with pack._unfinished(tmp_path, "train", "key", rank=0) as folder:
        assert folder == work
        (work / "00000").mkdir()
        (work / "link").symlink_to(mine)
        refused(other, tmp_path / "train", "is being written by another process", "--as")
        with pack._unfinished(tmp_path, "val", "key", rank=0):  # which leaves the other's alone
            pass
        with pack._unfinished(tmp_path, "train", "key", rank=1):
            pass
    # Some disks have no locks.
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError("no locks here")))
    other()
    other("of other samples")
    assert {path.name for path in work.iterdir()} == {".lock", "of other samples"}
    assert (mine / "file").exists()
    shutil.rmtree(work)
    work.symlink_to(mine)
    with pytest.raises(OSError):
        other()


@pytest.fixture
def unsafe(monkeypatch):
    """By the name that a rename gave: what of it was not flushed when it got that name."""
    flushed: dict[int, int] = {}  # by inode of a file or folder: its size when it was flushed
    found: dict[str, list[str]] = {}
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        flushed[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def check(move, path: Path, target: Path):
        about = {p.name: p.stat() for p in (path, *path.rglob("*")) if p.is_file()}
        found[target.name] = [n for n, x in about.items() if flushed.get(x.st_ino) != x.st_size]
        flushed.pop(target.parent.stat().st_ino, None)
        return move(path, target)

    monkeypatch.setattr(os, "fsync", watched)
    for move in (Path.rename, Path.replace):
        monkeypatch.setattr(Path, move.__name__, lambda *paths, move=move: check(move, *paths))
    return found, flushed


def test_a_checkpoint_is_flushed(kept, unsafe):
    found, flushed = unsafe
    path = save(kept, 7)
    assert found == {"manifest.json": [], "step-00000007": []}
    assert path.parent == kept.folder
    assert kept.folder.stat().st_ino in flushed  # which holds the new name


def test_a_packed_split_is_flushed(tmp_path, unsafe):
    samples = {"image": np.zeros((3, 8, 8, 3), np.uint8), "label": np.array([0, 1, 2], np.int32)}
    pack.pack(Arrays(**samples), tmp_path, "train", shards=2)
    assert unsafe[0]["train"] == []
