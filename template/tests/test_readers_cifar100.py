"""CIFAR-100's binary files: two labels, pixels, and what is said of files that are not right."""

from pathlib import Path

from hvdkit.data.readers.cifar100 import CLASS_NAMES, COARSE_NAMES, Cifar100

import readers


def test_reads_all_records(tmp_path: Path):
    written = readers.write_cifar100(tmp_path / "cifar-100-binary")
    assert len(set(CLASS_NAMES)) == 100 and list(CLASS_NAMES) == sorted(CLASS_NAMES)
    assert len(set(COARSE_NAMES)) == 20 and list(COARSE_NAMES) == sorted(COARSE_NAMES)
    for split, records in (("train", written[:15]), ("val", written[15:])):
        fine, coarse = Cifar100(tmp_path, split), Cifar100(tmp_path, split, coarse=True)
        assert (fine.num_classes, coarse.num_classes, len(fine)) == (100, 20, len(records))
        assert fine.fingerprint() != coarse.fingerprint()
        for sample, record in zip(readers.read_all(fine), records, strict=True):
            assert sample["label"] == record[1]
            for row, column, colour in ((0, 0, 0), (0, 1, 0), (1, 0, 1), (31, 31, 2)):
                value = record[2 + colour * 1024 + row * 32 + column]
                assert sample["image"][row, column, colour] == value


def test_files_that_are_not_right_are_named(tmp_path: Path):
    written = readers.write_cifar100(tmp_path)
    path = tmp_path / "train.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    readers.fails(lambda: Cifar100(tmp_path, "val"), path, "46109 bytes", "3074", "unpack")
    path.write_bytes(whole[:-3074])
    readers.fails(lambda: Cifar100(tmp_path, "val"), path, "14 records", "be 15", "has 50000)")
    path.unlink()
    readers.fails(lambda: Cifar100(tmp_path, "val"), path, "cifar-100-binary.tar.gz")
    for place, value in ((0, 20), (1, 100)):
        records = written[:15].copy()
        records[2, place] = value
        records.tofile(path)
        words = (path, "record 2", f"byte {6148 + place}", f"label {value}")
        readers.fails(lambda: Cifar100(tmp_path, "train"), *words)
