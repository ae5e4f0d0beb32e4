"""CIFAR-10's binary files: pixels, labels, and what is said of files that are not right."""

from pathlib import Path

import numpy as np
import tensorflow as tf
from hvdkit.data.readers.cifar10 import CLASS_NAMES, Cifar10

import readers


def test_reads_all_records_of_all_files(tmp_path: Path):
    written = readers.write_cifar10(tmp_path / "cifar-10-batches-bin")
    assert len(CLASS_NAMES) == Cifar10.num_classes == 10
    for split, records in (("train", written[:5]), ("val", written[5:])):
        records = records.reshape(-1, 3073)
        source = Cifar10(tmp_path, split)
        samples = readers.read_all(source)
        assert len(source) == len(records)
        for sample, record in zip(samples, records, strict=True):
            assert sample["label"] == record[0] and sample["label"].dtype == np.int32
            # All red values come first, row by row; then green, then blue.
            for row, column, colour in ((0, 0, 0), (0, 1, 0), (1, 0, 1), (31, 30, 2)):
                value = record[1 + colour * 1024 + row * 32 + column]
                assert sample["image"][row, column, colour] == value
    assert tf.data.Dataset.range(1).map(source.read).element_spec == {
        "image": tf.TensorSpec([32, 32, 3], tf.uint8),
        "label": tf.TensorSpec([], tf.int32),
    }


def test_fingerprint_tells_contents(tmp_path: Path):
    written = readers.write_cifar10(tmp_path)
    first = Cifar10(tmp_path, "train").fingerprint()
    assert Cifar10(tmp_path, "train").fingerprint() == first
    written[2, 1, 77] ^= 1
    written[2].tofile(tmp_path / "data_batch_3.bin")
    assert Cifar10(tmp_path, "train").fingerprint() != first


def test_files_that_are_not_right_are_named(tmp_path: Path):
    written = readers.write_cifar10(tmp_path)
    readers.fails(lambda: Cifar10(tmp_path, "test"), "'test'", "train", "val")
    path = tmp_path / "data_batch_4.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    readers.fails(lambda: Cifar10(tmp_path, "val"), path, "9218 bytes", "3073", "unpack it again")
    path.write_bytes(whole[:-3073])
    readers.fails(lambda: Cifar10(tmp_path, "train"), path, "2 records", "be 3", "has 10000)")
    path.write_bytes(b"")
    readers.fails(lambda: Cifar10(tmp_path, "train"), path, "0 bytes")
    path.unlink()
    readers.fails(lambda: Cifar10(tmp_path, "train"), path, "is missing", "cifar-10-binary.tar.gz")
    written[3, 2, 0] = 10
    written[3].tofile(path)
    readers.fails(lambda: Cifar10(tmp_path, "train"), path, "record 2", "byte 6146", "label 10")
    assert len(Cifar10(tmp_path, "val")) == 3


def test_files_of_the_original_size(tmp_path: Path):
    count = 10_000
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    for name in names:
        with (tmp_path / name).open("wb") as file:
            file.truncate(count * 3073)  # 30,730,000 bytes each, as the archive's; all zero
    assert len(Cifar10(tmp_path, "val")) == count
    source = Cifar10(tmp_path, "train")
    assert len(source) == 5 * count and int(source.read(tf.constant(49_999))["label"]) == 0
