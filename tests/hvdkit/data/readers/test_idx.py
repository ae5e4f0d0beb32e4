"""MNIST's files: read as written, packed or not; damaged ones are named."""

import dataclasses
import gzip
from pathlib import Path

import numpy as np
import pytest
import readers
from refusals import refused

from hvdkit.data import open as open_lib
from hvdkit.data.open import reader_of
from hvdkit.data.prepare import pack
from hvdkit.data.readers.idx import Idx
from settings import Settings
from tasks import classification

IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_reads_what_was_written(tmp_path: Path, ending: str):
    written = readers.write_idx(tmp_path, ending=ending)
    for split, (images, labels) in written.items():
        source = reader_of("idx")(tmp_path, split, 0)
        assert source.num_classes == 4
        samples = readers.read_all(source)
        assert [int(sample["label"]) for sample in samples] == labels.tolist()
        for sample, image in zip(samples, images, strict=True):
            assert sample["image"].dtype == np.uint8
            np.testing.assert_array_equal(sample["image"], np.dstack([image] * 3))


SOUND = np.zeros((6, 5, 7), np.uint8)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (IMAGES, None, f"{IMAGES}.gz is missing, and so is {IMAGES}"),
        (
            IMAGES,
            b"",
            f"{IMAGES} is damaged, or no IDX file of bytes in 3 dimension(s)",
        ),
        (IMAGES, readers.idx(SOUND)[:-1], "is damaged"),
        (IMAGES, readers.idx(SOUND) + b"\0", "is damaged"),
        (IMAGES, readers.idx(SOUND[0]), "is damaged"),
        (IMAGES, b"\0\0\x08\x03" + b"\xff" * 12, "is damaged"),
        (IMAGES, readers.idx(SOUND[:5]), "5 pictures and 6 labels"),
        (LABELS, b"\0\0\x0d\x01" + b"\0\0\0\1" + b"\0" * 4, f"{LABELS} is damaged"),
        (f"{LABELS}.gz", b"no gzip", f"{LABELS}.gz is damaged"),
        (
            f"{LABELS}.gz",
            gzip.compress(readers.idx(SOUND[0, 0]), mtime=0)[:-9],
            f"{LABELS}.gz is damaged",
        ),
    ],
)
def test_files_that_are_not_right_are_named(tmp_path: Path, name, content, words):
    readers.write_idx(tmp_path)
    (tmp_path / name.removesuffix(".gz")).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    refused(lambda: Idx(tmp_path, "train"), tmp_path, words)


def test_a_split_may_lack_the_last_class(tmp_path: Path):
    readers.write_idx(tmp_path)
    name = "t10k-labels-idx1-ubyte"
    labels = readers.write_idx(tmp_path)["val"][1]
    (tmp_path / name).write_bytes(readers.idx(np.minimum(labels, 2).astype(np.uint8)))
    assert [Idx(tmp_path, split).num_classes for split in ("train", "val")] == [4, 4]


def test_nothing_says_whether_these_pictures_may_be_mirrored(tmp_path: Path):
    """Nor where they are packed."""
    readers.write_idx(tmp_path)
    for split in ("train", "val"):
        pack.pack(Idx(tmp_path, split), tmp_path / "packed", split)
    for format_, folder in (("idx", tmp_path), ("records", tmp_path / "packed")):
        settings = dataclasses.replace(
            Settings(), data_format=format_, data_dir=str(folder), num_classes=4
        )
        task = classification.Task(settings)
        refused(task.sources, "--mirror=auto", "--mirror=off")
        with open_lib.one_split.set(True):  # as a command that only scores
            task.sources()
        task = classification.Task(dataclasses.replace(settings, mirror="on"))
        task.sources()
        assert task.mirror


def test_another_split_is_refused(tmp_path: Path):
    refused(lambda: Idx(tmp_path, "test"), "no split 'test', only train and val")
