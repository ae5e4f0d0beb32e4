"""hvdkit check: everything that is wrong with a data set, by name."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import readers
import tensorflow as tf

from hvdkit import settings as settings_lib
from hvdkit.data.open import reader_of
from hvdkit.data.prepare import check, pack
from hvdkit.data.readers.class_folders import ClassFolders
from hvdkit.data.source import Arrays
from hvdkit.settings import project

COUNTED = (
    r"^[^:]+: (  |pictures: |the \d+ rarest|warning: \d+ class\(es\) never|to balance)"
)


@pytest.fixture
def run(capsys):
    """(exit code, what was printed) of the command: faults and verdicts, and what is counted."""

    def call(*flags: object, counts: bool = False) -> tuple[int, str]:
        code = check.main(["check", *(str(flag) for flag in flags)])
        lines = capsys.readouterr().out.splitlines(keepends=True)
        return code, "".join(
            line for line in lines if counts or not re.match(COUNTED, line)
        )

    return call


@pytest.mark.parametrize(
    ("layout", "write", "highest"),
    [
        ("voc", readers.write_voc, 20),
        ("cityscapes", readers.write_cityscapes, 18),
        ("class_folders", readers.write_classes, 2),
        ("cifar10", readers.write_cifar10, 9),
        ("cifar100", readers.write_cifar100, 90),
        ("idx", readers.write_idx, 3),
    ],
)
def test_a_sound_set_of_each_layout(
    tmp_path: Path, run, layout: str, write, highest: int
):
    write(tmp_path)
    code, printed = run(f"--data_dir={tmp_path}")
    assert code == 0, printed
    size = len(reader_of(layout)(tmp_path, "train", 0))
    train, val = printed.splitlines()
    assert (
        train == f"train: {size} samples, labels 0 to {highest} ({layout}): all is well"
    )
    assert val.startswith("val: ") and val.endswith(": all is well")


def test_every_bad_sample_is_named(tmp_path: Path, run):
    ids = [*range(8), 255]
    labels = [np.full((12, 16), n if n == 255 else n % 3, np.uint8) for n in ids]
    pairs = {str(n): (readers.noise(n), label) for n, label in enumerate(labels)}
    readers.write_pairs(tmp_path, pairs)
    assert run(f"--data_dir={tmp_path}", "--split=train", "--num_classes=3")[0] == 0
    (tmp_path / "images" / "2.png").write_bytes(b"no picture")
    (tmp_path / "labels" / "5.png").write_bytes(b"")
    readers.save(tmp_path / "labels" / "7.png", np.full((12, 16), 3, np.uint8))
    code, printed = run(f"--data_dir={tmp_path}", "--num_classes=3")
    lines = printed.splitlines()
    assert code == 1 and [str(tmp_path) in line for line in lines].count(True) == 4, (
        printed
    )
    assert "images/2.png is no PNG, JPEG or WebP" in lines[0]
    assert "labels/5.png" in lines[1] and "zero bytes" in lines[1]
    assert "labels/7.png cannot be read: label value 3" in lines[2]
    assert (
        lines[3]
        == "train: 9 samples, labels 0 to 1 (folders): 3 fault(s), listed above"
    )
    assert "splits/val.txt is missing" in lines[4] and lines[5].startswith(
        "val: not read"
    )
    # Without the number of classes, only what no label can hold is wrong.
    assert "labels 0 to 3" in run(f"--data_dir={tmp_path}", "--split=train")[1]
    for number in range(9):
        (tmp_path / "images" / f"{number}.png").write_bytes(b"no picture")
    printed = run(f"--data_dir={tmp_path}", "--split=train")[1]
    assert "9 samples, no label could be read (folders): 9 fault(s)" in printed


def test_the_command_ends_with_what_it_found(tmp_path: Path):
    readers.write_classes(tmp_path)
    command = [sys.executable, "-m", "hvdkit", "check", f"--data_dir={tmp_path}"]
    (tmp_path / "train" / "n02" / "bad.png").write_bytes(b"no picture")
    ended = subprocess.run(
        command, cwd=project.folder(), capture_output=True, text=True
    )
    assert (
        ended.returncode == 1 and "bad.png is no PNG, JPEG or WebP" in ended.stdout
    ), ended
    lines = ended.stderr.splitlines()  # TensorFlow prints none
    assert "samples: 5/5" in lines and all(
        line.startswith("samples: ") for line in lines
    ), ended


def test_classes_of_two_splits_are_compared(tmp_path: Path, run):
    """Of those that are asked for: others beside them may have other ones."""
    readers.write_classes(tmp_path)
    for name in ("n03", "n04"):
        readers.save(tmp_path / "val2" / name / "v.png", readers.noise(0))
    assert run(f"--data_dir={tmp_path}")[0] == 0
    for split in ("train", "val2"):
        pack.pack(ClassFolders(tmp_path, split), tmp_path / "out", split, shards=1)
    for where in (tmp_path, tmp_path / "out"):
        code, printed = run(f"--data_dir={where}", "--split=train", "--split=val2")
        assert (
            code == 1
            and printed.count(f"{where / 'val2'} has n03, n04, and the training") == 1
        )
        assert "it lacks n01, n02, n10:" in printed
        assert (
            "val2: 2 samples, labels 0 to 1" in printed and "1 fault(s)" in printed
        ), printed


def test_shards_are_read_whole(tmp_path: Path, run):
    readers.write_classes(tmp_path / "raw")
    source = ClassFolders(tmp_path / "raw", "train")
    folder = pack.pack(source, tmp_path / "out", "train", shards=2)
    code, printed = run(f"--data_dir={tmp_path / 'out'}", "--num_classes=2")
    assert code == 1 and "record of sample 3" in printed, printed
    assert "label 2 is no class" in printed, printed
    (tmp_path / "out" / "val").mkdir()  # this is no pack, so it is not read
    code, printed = run(f"--data_dir={tmp_path / 'out'}")
    assert (code, printed) == (
        0,
        "train: 4 samples, labels 0 to 2 (records): all is well\n",
    )
    shard = folder / "train-00001-of-00002.tfrecord"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    code, printed = run(f"--data_dir={tmp_path / 'out'}", "--data_format=records")
    lines = printed.splitlines()
    assert code == 1 and len(lines) == 2, printed
    assert f"{shard}, record of sample 2" in lines[0] and "checksum" in lines[0]


def test_wrong_flags(tmp_path: Path, run, capsys):
    with pytest.raises(SystemExit) as end:
        run(f"--data_dir={tmp_path}")
    assert end.value.code == 2
    assert f"--data_dir={tmp_path} does not show its layout" in capsys.readouterr().err


def test_classes_are_counted_and_the_flag_balances_them(tmp_path: Path, run):
    """Two pictures of 4 x 6: class 0 on 30 pixels, class 2 on 10, and 8 ignored."""
    labels = np.zeros((2, 4, 6), np.uint8)
    labels[0, :, :2] = 2
    labels[1, :1, :2] = 2
    labels[1, 3] = 255
    labels[1, 2, :2] = 255
    pairs = {
        str(n): (np.zeros((4, 6, 3), np.uint8), label) for n, label in enumerate(labels)
    }
    readers.write_pairs(tmp_path, pairs)
    code, printed = run(f"--data_dir={tmp_path}", "--split=train", counts=True)
    assert code == 0, printed
    assert re.search(r"  0 +30 pixels +75.000%", printed), printed
    assert re.search(r"  2 +10 pixels +25.000%", printed), printed
    assert re.search(r"  ignored +8 pixels", printed), printed
    assert (
        "1 class(es) never occur: 1" in printed
        and "all 4 x 6 (height x width)" in printed
    )
    assert not re.search(r"\b0 pixels", printed), (
        "a line of its own is for what is there"
    )
    flag = re.search(r"--class_weights=\S+", printed)[0]
    weights = settings_lib.parse(["", flag, "--num_classes=3"]).class_weight_list
    # N / (2 classes * count).
    assert weights == pytest.approx([40 / 60, 1, 2], rel=1e-3)
    assert (30 * weights[0] + 10 * weights[2]) / 40 == pytest.approx(1, rel=1e-3)
    # Of several splits, those of the one to train on.
    (tmp_path / "splits/a.txt").write_text("1\n")
    flags = (f"--data_dir={tmp_path}", "--split=a", "--num_classes=3")
    for more, balanced in (["--split=train"], "train"), ([], "a"):
        code, printed = run(*flags, *more, counts=True)
        assert code == 0 and re.findall(r"(\w+): to balance", printed) == [balanced], (
            printed
        )
    # None where a label is wrong.
    readers.save(tmp_path / "labels/1.png", np.full((4, 6), 7, np.uint8))
    code, printed = run(*flags, counts=True)
    assert code == 1 and "label value 7" in printed and "--class_weights" not in printed


def test_samples_of_classes_are_counted_by_name(tmp_path: Path, run):
    sizes = {"cat": [(5, 7), (9, 3)], "dog": [(20, 30)]}
    for name, shapes in sizes.items():
        for number, shape in enumerate(shapes):
            pixels = np.zeros((*shape, 3), np.uint8)
            readers.save(tmp_path / "train" / name / f"{number}.png", pixels)
    code, printed = run(
        f"--data_dir={tmp_path}",
        "--split=train",
        "--data_format=class_folders",
        counts=True,
    )
    assert code == 0, printed
    assert re.search(r"0 cat +2 samples +66.667%", printed), printed
    assert "pictures: 9 x 3 to 20 x 30, median 5 x 7" in printed
    assert "--class_weights=0.75,1.5" in printed


def test_labels_of_another_size_than_their_pictures(tmp_path: Path, run, monkeypatch):
    """As another tool may write it: pack itself refuses such pairs."""

    class Odd(Arrays):
        num_classes = 2

        def read(self, index):
            size = tf.where(index == 1, [4, 5], [4, 6])
            return {
                "image": tf.zeros([4, 6, 3], tf.uint8),
                "label": tf.zeros(size, tf.uint8),
            }

    monkeypatch.setattr(check, "reader_of", lambda _: lambda *_: Odd(x=np.arange(3)))
    code, printed = run(f"--data_dir={tmp_path}", "--split=a", "--data_format=voc")
    fault, verdict = printed.splitlines()
    assert code == 1 and f"sample 1 of {tmp_path / 'a'} is 4 x 5 pixels" in fault
    assert "its picture 4 x 6" in fault and "1 fault(s)" in verdict


def test_hashes_are_those_of_sha256sum(tmp_path: Path, run):
    readers.write_cifar10(tmp_path / "cifar")
    code, printed = run(f"--data_dir={tmp_path}/cifar", "--hash", "--split=train")
    assert code == 1 and "checksums in their fingerprint" in printed.splitlines()[0]
    readers.write_classes(tmp_path)

    def run_again() -> tuple[int, str]:
        return run(f"--data_dir={tmp_path}", "--hash", "--split=train")

    code, printed = run_again()
    file = next(tmp_path.rglob("train.sha256"))
    assert (
        code == 0
        and f"files are in {file}\n" in printed
        and ", as before" in run_again()[1]
    )
    command = ["sha256sum", "-c", "--quiet", "--strict", file.name]
    subprocess.run(command, cwd=file.parent, check=True)
    text = "".join(file.read_text().splitlines(keepends=True)[1:])
    file.write_text(text)  # a person's sha256sum writes no first line
    assert run_again()[0] == 2 and file.read_text() == text
