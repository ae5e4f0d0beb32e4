"""CIFAR's binary files: pixels, labels, names, and what is said of files that are not right."""

from pathlib import Path

import numpy as np
import pytest
import readers
import tensorflow as tf

from hvdkit.data.readers.cifar import Cifar

# Writer, classes, place of the label among a record's bytes, bytes before the pixels.
KINDS = [
    (readers.write_cifar10, "cifar-10-batches-bin", 10, 0, 1),
    (readers.write_cifar100, "cifar-100-binary", 20, 0, 2),
    (readers.write_cifar100, "cifar-100-binary", 100, 1, 2),
]


@pytest.mark.parametrize(("write", "folder", "classes", "place", "before"), KINDS)
def test_reads_all_records_of_all_files(write, folder, classes, place, before, tmp_path: Path):
    written = write(tmp_path / folder).reshape(-1, before + 3072)
    for split, records in (("train", written[:15]), ("val", written[15:])):
        source = Cifar(tmp_path, split, classes)
        assert len(source) == len(records)
        assert len(source.class_names) == source.num_classes == classes
        for sample, record in zip(readers.read_all(source), records, strict=True):
            assert sample["label"] == record[place] and sample["label"].dtype == np.int32
            # All red values come first, row by row; then green, then blue.
            planes = record[before:].reshape(3, 32, 32)
            np.testing.assert_array_equal(sample["image"], np.moveaxis(planes, 0, -1))
    assert tf.data.Dataset.range(1).map(source.read).element_spec == {
        "image": tf.TensorSpec([32, 32, 3], tf.uint8),
        "label": tf.TensorSpec([], tf.int32),
    }


def test_fingerprint_tells_contents_and_kind_of_label(tmp_path: Path):
    written = readers.write_cifar100(tmp_path)
    first = Cifar(tmp_path, "train", 100).fingerprint()
    assert Cifar(tmp_path, "train", 100).fingerprint() == first
    assert Cifar(tmp_path, "train", 20).fingerprint() != first
    written[2, 77] ^= 1
    written[:15].tofile(tmp_path / "train.bin")
    assert Cifar(tmp_path, "train", 100).fingerprint() != first


@pytest.mark.parametrize(
    ("classes", "name", "change", "words"),
    [
        (10, "data_batch_4.bin", lambda b: b[:-1], "data_batch_4.bin or the val split was cut"),
        (10, "data_batch_4.bin", lambda b: b[:-3073], "or the val split was cut"),
        (10, "test_batch.bin", lambda b: b[:-3073], "or the val split was cut"),
        (10, "data_batch_4.bin", lambda b: b"", "or the val split was cut"),
        (10, "data_batch_4.bin", None, "is missing: unpack the archive again"),
        (10, "batches.meta.txt", None, "is missing: unpack the archive again"),
        (10, "data_batch_4.bin", lambda b: b"\x0a" + b[1:], "record 0: its label is above 9"),
        (100, "train.bin", lambda b: b[:-3074], "or the val split was cut"),
        (100, "train.bin", lambda b: b"\x14" + b[1:], "record 0: its label is above 19"),
        (20, "train.bin", lambda b: b[:1] + b"\x64" + b[2:], "record 0: its label is above 99"),
    ],
)
def test_files_that_are_not_right_are_named(classes, name, change, words, tmp_path: Path):
    (readers.write_cifar10 if classes == 10 else readers.write_cifar100)(tmp_path)
    path = tmp_path / name
    if change:
        path.write_bytes(change(path.read_bytes()))
    else:
        path.unlink()
    readers.fails(lambda: Cifar(tmp_path, "train", classes), words)
    readers.fails(lambda: Cifar(tmp_path, "test", classes), "'test'", "train", "val")


@pytest.mark.parametrize("left", [0, 3072])
def test_files_that_are_all_cut_alike_are_refused(left, tmp_path: Path):
    readers.write_cifar10(tmp_path)
    for path in tmp_path.glob("*.bin"):
        path.write_bytes(path.read_bytes()[:left])
    readers.fails(lambda: Cifar(tmp_path, "val", 10), "data_batch_1.bin or the val split was cut")
