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

from hvdkit.data.open import reader_of
from hvdkit.data.prepare import pack
from hvdkit.data.readers.class_folders import ClassFolders
from hvdkit.data.readers.pairs import ImageLabelFolder
from hvdkit.data.readers.records import META, Records
from hvdkit.data.source import Arrays


def packed(demo: Path, out: Path, shards: int = 3) -> Path:
    return pack.pack(ImageLabelFolder(demo, "train", 11), out, "train", shards=shards)


def command(
    root: Path, out: object, *flags: str, layout: str = "class_folders"
) -> None:
    """hvdkit pack, of the training split."""
    pack.main(
        [
            "pack",
            f"--from={layout}",
            f"--root={root}",
            "--split=train",
            f"--out={out}",
            *flags,
        ]
    )


@pytest.mark.parametrize(
    ("layout", "write"),
    [
        ("cityscapes", readers.write_cityscapes),
        ("class_folders", readers.write_classes),
        ("cifar10", readers.write_cifar10),
    ],
)
def test_packed_samples_are_those_of_the_source(
    tmp_path: Path, capsys, layout: str, write
):
    root = tmp_path / "raw"
    out = tmp_path / "deep" / "packed"
    write(root)
    for split in ("train", "val"):
        command(root, out, f"--split={split}", "--shards=2", layout=layout)
        source = reader_of(layout)(root, split, 0)
        records = Records(out, split)
        assert readers.same(source, records) and len(records) == len(source)
        assert records.kind == ("map" if layout == "cityscapes" else "class")
        labels = [sample["label"] for sample in readers.read_all(records)]
        assert records.num_classes == 1 + max(int(x[x != 255].max()) for x in labels)
        spec = tf.data.Dataset.range(1).map(records.read).element_spec
        assert spec["label"].dtype == (tf.uint8 if records.kind == "map" else tf.int32)
        assert spec["image"].shape.as_list() == [None, None, 3]
        # The file goes in unchanged.
        file = readers.read_all(source)[0].get("file", b"")
        assert any(
            file in path.read_bytes() for path in (out / split).glob("*.tfrecord")
        )
    printed = capsys.readouterr().err
    assert re.search(r"^packed: (\d+)/\1$", printed, re.M)
    assert re.search(r"^verified: (\d+)/\1$", printed, re.M)
    # Nothing half done is left.
    assert sorted(p.name for p in out.iterdir()) == ["train", "val"]


def test_a_shuffled_pack_holds_each_sample_once_in_another_order(
    tmp_path: Path, capsys
):
    root = tmp_path / "raw"
    readers.write_classes(root)

    def samples(name: str, *flags: str) -> list[tuple[int, bytes]]:
        command(root, tmp_path, f"--as={name}", "--shards=2", *flags)
        records = Records(tmp_path, name)
        assert records.is_shuffled == bool(flags) and sum(records.shard_sizes) == len(
            records
        )
        return [
            (int(s["label"]), s["image"].tobytes()) for s in readers.read_all(records)
        ]

    plain = samples("plain")
    first = samples("first", "--shuffle=1")
    second = samples("second", "--shuffle=2")
    assert plain != first != second != plain
    assert sorted(plain) == sorted(first) == sorted(second)
    with pytest.raises(SystemExit):
        command(root, tmp_path, "--as=d", "--shuffle=-1")
    assert "--shuffle=-1: give a seed" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command(root, "s3://some/set")
    assert "--out: s3://some/set: this is a URL" in capsys.readouterr().err


BLACK = np.zeros((2, 12, 16, 3), np.uint8)


@pytest.mark.parametrize(
    ("image", "label", "words"),
    [
        (BLACK, np.array([0.5, 1.7]), "float64 ()"),  # they were packed as 0 and 1 once
        (BLACK, np.zeros((2, 3), np.int64), "int64 (3,)"),
        (BLACK, BLACK, "with uint8 (12, 16, 3)"),  # its brightness was packed once
        (BLACK, np.zeros((2, 12, 16, 1), np.int32), "int32 (12, 16, 1)"),
        (BLACK[..., :1], np.zeros(2, np.int64), "not uint8 (12, 16, 1)"),
        (BLACK / 255, np.zeros(2, np.int64), "not float64 (12, 16, 3)"),
    ],
)
def test_what_a_record_cannot_hold_is_refused(tmp_path: Path, image, label, words: str):
    refused(
        lambda: pack.pack(Arrays(image=image, label=label), tmp_path, "train"), words
    )


def test_corrupt_records_are_named(tiny_data: Path, tmp_path: Path):
    folder = packed(tiny_data, tmp_path)
    source = Records(tmp_path, "train")
    assert source.is_demo  # augmentation depends on it
    path = folder / "train-00001-of-00003.tfrecord"  # samples 8 to 16
    whole = path.read_bytes()
    for place in (12, 100, len(whole) // 12):  # places in its first sample
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        readers.explained(
            source, 8, path, "sample 8 (bytes 12 to", "checksum", "pack again"
        )
        assert source.explain(9) is None and source.explain(7) is None
    path.write_bytes(whole[:-50])  # the end of the last sample is cut
    readers.explained(source, 16, path, "sample 16", "pack again")
    path.write_bytes(b"")
    readers.explained(source, 12, path, "sample 12", "pack again")
    path.unlink()
    readers.explained(source, 12, path, "sample 12", "pack again")
    (folder / "index.bin").write_bytes(b"")  # the set is open already
    readers.explained(source, 12, path, "sample 12", folder / "index.bin", "was cut")


def test_broken_sets_are_named(tiny_data: Path, tmp_path: Path):
    def open_it() -> Records:
        return Records(tmp_path, "train")

    refused(open_it, tmp_path / "train" / "pack.json", "hvdkit pack", "none")
    folder = packed(tiny_data, tmp_path)
    refused(lambda: Records(tmp_path, "val"), tmp_path / "val", "packed in", "train")
    meta = folder / "pack.json"
    index = folder / "index.bin"
    [shard] = folder.glob("*2-of*")
    for path, damage, words in (
        (meta, b"", "damaged"),
        (meta, b"[]", "damaged"),
        (meta, b'{"version": 1}', "version is not"),
        (index, b"", "0 bytes"),
        (index, index.read_bytes()[::-1], "checksum"),
        (index, None, "is missing"),
        (shard, b"cut", "3 bytes where"),
        (shard, None, "is missing"),
    ):
        whole = path.read_bytes()
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        refused(open_it, path, words, "again")
        path.write_bytes(whole)
    meta.write_text(meta.read_text().replace('"map"', '"class"', 1))
    refused(open_it, meta, "its checksum differs", "pack again")


def test_a_set_is_written_whole_or_not_at_all(tiny_data: Path, tmp_path: Path, capsys):
    root = tmp_path / "raw"
    readers.write_classes(root)
    bad = root / "train" / "n02" / "a.png"
    bad.write_bytes(bad.read_bytes()[:60])
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as end:
        command(root, out)
    assert end.value.code == 2 and f"{bad} cannot be decoded" in capsys.readouterr().err
    assert not any(out.iterdir())

    folder = packed(tiny_data, out)
    refused(lambda: packed(tiny_data, out), folder, "is there already", "--out")
    assert [path.name for path in out.iterdir()] == ["train"]
    refused(lambda: packed(tiny_data, tmp_path / "b", -1), "--shards=-1")
    for name in ("", ".", "..", "a/b", ".train"):
        with pytest.raises(SystemExit):
            command(root, tmp_path / "b", f"--as={name}")
        assert (
            f"{name!r} cannot be the name of a packed split" in capsys.readouterr().err
        )
    assert not (tmp_path / "b").exists()


def killed_at(monkeypatch, owner: object, function: str, call: int) -> list[object]:
    """The calls so far; that one is interrupted before it does anything."""
    calls = []
    real = getattr(owner, function)

    def once(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*arguments, **keywords)

    monkeypatch.setattr(owner, function, once)
    return calls


@pytest.mark.parametrize(
    ("owner", "function", "call", "calls_of_both"),
    [(pack, "_verify", 2, 4), (Path, "rename", 6, 8)],
)
def test_after_a_kill_the_next_try_goes_on(
    tiny_data, tmp_path, monkeypatch, owner, function, call, calls_of_both
):
    """In the second of three shards, and when two of the three were put into the whole."""
    calls = killed_at(monkeypatch, owner, function, call)
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


def test_a_shard_that_was_cut_after_it_was_finished_is_not_joined(
    tiny_data, tmp_path, monkeypatch
):
    killed_at(monkeypatch, pack, "_join", 1)
    with pytest.raises(KeyboardInterrupt):
        packed(tiny_data, tmp_path)
    shard = tmp_path / ".train.packing" / "00001" / "shard"
    os.truncate(shard, shard.stat().st_size // 2)
    refused(
        lambda: packed(tiny_data, tmp_path),
        "bytes where",
        f"remove {tmp_path}/.train.packing",
    )


def test_ranks_share_the_work(tmp_path: Path):
    """Three shards by two ranks, one late; by itself, one: a shard takes about 256 MB."""
    root = tmp_path / "raw"
    readers.write_classes(root)
    words = [Path(sys.executable).with_name("mpirun"), "-np", "2", "--oversubscribe"]
    words += ["sh", "-c", 'sleep $((4 * OMPI_COMM_WORLD_RANK)); exec "$@"', "late"]
    words += [sys.executable, "-m", "hvdkit", "pack"]
    words += ["--from=class_folders", f"--root={root}", "--split=train"]
    words += [f"--out={tmp_path}", "--as=three", "--shards=3"]
    ended = run(words, 120)
    assert ended.code == 0 and ended.output.count("found the same") == 1, ended.output
    assert ended.output.count("waits for other ranks' shards 00001\n") == 1, (
        ended.output
    )
    command(root, tmp_path, "--as=one")
    source = ClassFolders(root, "train")
    for name, shards in (("one", 1), ("three", 3)):
        assert len([*(tmp_path / name).glob("*.tfrecord")]) == shards
        assert readers.same(source, Records(tmp_path, name))


def test_a_rank_that_nobody_counts_is_refused(
    tiny_data: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("PMIX_RANK", "1")
    refused(
        lambda: packed(tiny_data, tmp_path), "no launcher started it", "unset PMIX_RANK"
    )
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
    records = Records(tmp_path, "train")
    assert records.num_classes == 256
    assert [int(sample["label"]) for sample in readers.read_all(records)] == [
        0,
        255,
        254,
    ]


@pytest.mark.parametrize(
    ("layout", "write", "side"),
    [("voc", readers.write_voc, 5), ("class_folders", readers.write_classes, 9)],
)
def test_larger_pictures_are_scaled_once(tmp_path: Path, layout: str, write, side: int):
    """To the short side asked for, with labels on them; smaller ones go in as they are."""
    root = tmp_path / "raw"
    out = tmp_path / "packed"
    write(root)

    def command_of(*flags: str) -> None:
        command(root, out, *flags, layout=layout)

    command_of("--shards=2", f"--short_side={side}", "--quality=95", "--as=small")
    source = readers.read_all(reader_of(layout)(root, "train", 0))
    for small, whole in zip(
        readers.read_all(Records(out, "small")), source, strict=True
    ):
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
            rows, columns = (
                ((np.arange(after) + 0.5) * before / after).astype(int)
                for after, before in zip(shape, sizes)
            )
            np.testing.assert_array_equal(
                small["label"], whole["label"][np.ix_(rows, columns)]
            )
    packed_from = json.loads((out / "small" / META).read_text())["packed_from"]
    assert packed_from.endswith(f"split train, short side {side}, quality 95")
    with pytest.raises(SystemExit):
        command_of("--as=wrong", "--short_side=5", "--quality=0")
    with pytest.raises(SystemExit):
        command_of("--as=wrong", "--quality=50")  # nothing is encoded again
    assert not (out / "wrong").exists()


def test_an_unfinished_pack_is_of_one_set_and_one_process(tmp_path: Path, monkeypatch):
    def other(key: str = "key") -> None:
        with pack._unfinished(tmp_path, "train", key, rank=0) as work:
            assert (work / "00000").exists() == (key == "key")

    def no_locks(*arguments: object) -> None:
        raise OSError("no locks here")

    mine = tmp_path / "mine"
    work = tmp_path / ".train.packing"
    mine.mkdir()
    (mine / "file").write_bytes(b"")
    with pack._unfinished(tmp_path, "train", "key", rank=0) as folder:
        assert folder == work
        (work / "00000").mkdir()
        (work / "link").symlink_to(mine)
        refused(
            other, tmp_path / "train", "is being written by another process", "--as"
        )
        with pack._unfinished(tmp_path, "val", "key", rank=0):
            pass  # it leaves the other split's folder alone
        with pack._unfinished(tmp_path, "train", "key", rank=1):
            pass
    # Some disks have no locks.
    monkeypatch.setattr(fcntl, "flock", no_locks)
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
    """By the name that a rename gave: the files that were not flushed when they got that name."""
    flushed: dict[int, int] = {}  # size at the flush, by inode of a file or folder
    unflushed: dict[str, list[str]] = {}
    fsync = os.fsync

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        flushed[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def check(path: Path, target: Path) -> None:
        names = []
        for file in (path, *path.rglob("*")):
            if (
                file.is_file()
                and flushed.get(file.stat().st_ino) != file.stat().st_size
            ):
                names.append(file.name)
        unflushed[target.name] = names
        flushed.pop(target.parent.stat().st_ino, None)

    def watched(move):
        def checked(path: Path, target: Path) -> Path:
            check(path, target)
            return move(path, target)

        return checked

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched(Path.rename))
    monkeypatch.setattr(Path, "replace", watched(Path.replace))
    return unflushed, flushed


def test_a_checkpoint_is_flushed(kept, unsafe):
    unflushed, flushed = unsafe
    path = save(kept, 7)
    assert unflushed == {"manifest.json": [], "step-00000007": []}
    assert path.parent == kept.folder
    assert kept.folder.stat().st_ino in flushed  # the folder that holds the new name


def test_a_packed_split_is_flushed(tmp_path, unsafe):
    unflushed, _ = unsafe
    source = Arrays(
        image=np.zeros((3, 8, 8, 3), np.uint8),
        label=np.array([0, 1, 2], np.int32),
    )
    pack.pack(source, tmp_path, "train", shards=2)
    assert unflushed["train"] == []
