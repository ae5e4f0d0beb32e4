"""What other tools packed: samples as written, and what is missing, damaged or of another form."""

import io
import os
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import readers
import tensorflow as tf

from hvdkit.data.prepare import pack
from hvdkit.data.readers.records import Records


def command(layout: str, root: Path, out: Path) -> None:
    flags = [f"--from={layout}", f"--root={root}", "--split=train", f"--out={out}"]
    pack.main(["pack", *flags, "--shards=2"])


KINDS = ("PNG", "JPEG", "WEBP")
PICTURES = [readers.encoded(readers.noise(n), kind) for n, kind in enumerate(KINDS)]
IMAGENET = ("image/encoded", "image/class/label")
TFDS = ("image", "label")


def write_tars(
    root: Path, endings=(".png", ".JPG", ".webp"), texts=("2", " 0\n", "7")
) -> Path:
    for name, first, end in (("in-train-000.tar", 0, 2), ("in-train-001.tar", 2, 3)):
        with tarfile.open(root / name, "w") as tar:
            for n in range(first, end):
                parts = {
                    endings[n]: PICTURES[n],
                    ".json": b"{}",
                    ".cls": texts[n].encode(),
                }
                for ending, data in parts.items():
                    member = tarfile.TarInfo(f"a.b/s{n}{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return root / "in-train-001.tar"


def write_examples(root: Path, names=IMAGENET, labels=(3, 1, 8)) -> Path:
    for number, part in enumerate(np.array_split(np.arange(3), 2)):
        path = root / f"train-{number:05d}-of-00002"
        with tf.io.TFRecordWriter(os.fsencode(path)) as writer:
            for n in part.tolist():
                image = tf.train.Feature(
                    bytes_list=tf.train.BytesList(value=[PICTURES[n]])
                )
                label = tf.train.Feature(
                    int64_list=tf.train.Int64List(value=[labels[n]])
                )
                features = tf.train.Features(feature=dict(zip(names, (image, label))))
                writer.write(tf.train.Example(features=features).SerializeToString())
    return path


@pytest.mark.parametrize(
    ("layout", "write"),
    [
        ("webdataset", write_tars),
        ("tfrecords", write_examples),
        ("tfrecords", lambda root: write_examples(root, TFDS, (2, 0, 7))),
    ],
)
def test_what_other_tools_packed_is_packed_or_refused(
    tmp_path: Path, capsys, layout: str, write
):
    last = write(tmp_path)
    (tmp_path / "train_notes.txt").write_text("neither is read")
    command(layout, tmp_path, tmp_path / "packed")
    samples = readers.read_all(Records(tmp_path / "packed", "train"))
    assert [int(sample["label"]) for sample in samples] == [2, 0, 7]
    assert [sample["file"] for sample in samples] == PICTURES

    def fails(words: str) -> None:
        with pytest.raises(SystemExit, match="2"):
            command(layout, tmp_path, tmp_path / "again")
        assert re.search(words, capsys.readouterr().err), words

    whole = last.read_bytes()
    flipped = bytearray(whole)
    # In a picture, or in a header.
    place = len(whole) - 200 if layout == "tfrecords" else 10
    flipped[place] ^= 1
    last.write_bytes(flipped)
    fails("corrupted record" if layout == "tfrecords" else f"{last} cannot be read")
    last.write_bytes(whole[:-40] if layout == "tfrecords" else whole.rstrip(b"\0"))
    fails(f"{last} cannot be read: its .*cut off|{last} cannot be read: unexpected end")
    if layout == "webdataset":  # the archive ends between two files
        last.write_bytes(whole[: 512 * (len(whole.rstrip(b"\0")) // 512 + 1)])
        fails(f"{last} cannot be read: it is damaged or cut off")
        last.rename(last.with_name("in-train-002.tar"))
    else:
        last.unlink()
    fails("1 files are missing, number 1 first")


def damaged(tar: Path) -> None:
    """One bit of its last header, which tarfile takes for the end."""
    whole = bytearray(tar.read_bytes())
    whole[whole.rindex(b"s2.cls")] ^= 1
    tar.write_bytes(whole)


def with_header(root: Path, *, record: bytes, times: int) -> None:
    """Before the first file come headers that say more of it."""
    tar = write_tars(root)
    header = tarfile.TarInfo("more")
    header.type = tarfile.XHDTYPE
    header.size = len(record)
    block = header.tobuf(tarfile.GNU_FORMAT) + record.ljust(512, b"\0")
    tar.write_bytes(times * block + tar.read_bytes())


@pytest.mark.parametrize(
    ("layout", "write", "words"),
    [
        (
            "webdataset",
            lambda root: write_tars(root, (".png", ".gif", ".webp")),
            "s1 has .gif, .j",
        ),
        (
            "webdataset",
            lambda root: write_tars(root, texts=("1", "cat", "2")),
            "holds b'cat'",
        ),
        (
            "tfrecords",
            lambda root: write_examples(root, labels=(1, 0, 2)),
            r"\[0\] as image/class",
        ),
        (
            "tfrecords",
            lambda root: shutil.copy(
                write_examples(root), root / "train-00001-of-00003"
            ),
            "in 00002 and in 00003 files",
        ),
        (
            "webdataset",
            lambda root: damaged(write_tars(root, texts="123")),
            "is damaged",
        ),
        (
            "webdataset",
            lambda root: with_header(root, record=b"9 a=bcde\n", times=3000),
            "train-001.tar cannot be read: a header is damaged: maximum recursion",
        ),
        (
            "webdataset",
            lambda root: with_header(
                root, record=b"26 GNU.sparse.map=1,2,no\n", times=1
            ),
            "train-001.tar cannot be read: a header is damaged: invalid literal",
        ),
        (
            "tfrecords",
            lambda root: write_examples(root, ("image", "y")),
            "has image, y: image/enc",
        ),
    ],
)
def test_samples_of_another_form_are_refused(
    tmp_path: Path, capsys, layout, write, words: str
):
    write(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        command(layout, tmp_path, tmp_path / "packed")
    assert re.search(words, capsys.readouterr().err)
