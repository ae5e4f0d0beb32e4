"""--data_format: what is refused, and readers of a fork's own."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import readers
from refusals import refused

from hvdkit import settings as settings_lib
from hvdkit.data import open as open_lib
from hvdkit.data.prepare import check, pack
from hvdkit.data.readers import records
from hvdkit.data.source import Arrays, Source
from hvdkit.run import context as run_lib
from hvdkit.settings.data import READERS, add_reader


def open_one(config: settings_lib.Settings, split: str, default: str) -> Source:
    config = dataclasses.replace(config, train_split=split, val_split=split)
    return open_lib.open_sources(config, default)[0]


def settings(
    root: Path, format: str, classes: int, *flags: str
) -> settings_lib.Settings:
    command = [
        "train.py",
        f"--data_dir={root}",
        f"--data_format={format}",
        f"--num_classes={classes}",
        "--task=segmentation",
        *flags,
    ]
    return settings_lib.parse(command)


def sizes(sources: tuple[Source, Source]) -> tuple[int, int]:
    """Samples for training and for validation."""
    train_source, val_source = sources
    return len(train_source), len(val_source)


@pytest.mark.parametrize(
    ("format", "write", "classes", "default", "other"),
    [
        ("cityscapes", readers.write_cityscapes, 19, "folders", "class_folders"),
        ("class_folders", readers.write_classes, 3, "class_folders", "folders"),
    ],
)
def test_data_have_the_number_and_kind_of_classes_that_flags_say(
    tmp_path: Path, format: str, write, classes: int, default: str, other: str
):
    write(tmp_path)
    source = open_one(settings(tmp_path, format, classes), "train", default)
    for wrong in (classes - 1, classes + 1):
        config = settings(tmp_path, format, wrong)
        refused(
            lambda c=config: open_one(c, "val", default),
            f"--num_classes={wrong}",
            tmp_path,
            f"give --num_classes={classes}",
        )
    config = settings(tmp_path, format, classes)
    refused(
        lambda: open_one(config, "val", other),
        f"--data_format={format}",
        "--task=segmentation takes",
    )

    pack.pack(source, tmp_path / "packed", "train", shards=1)
    config = settings(tmp_path / "packed", "records", classes)
    assert isinstance(open_one(config, "train", default), records.Records)
    refused(lambda: open_one(config, "train", other), "--data_format=records")
    config = dataclasses.replace(config, num_classes=1)
    refused(lambda: open_one(config, "train", default), "--num_classes=1", "give")


@pytest.mark.parametrize("name", sorted({*READERS} - {"digits"}))
def test_a_folder_that_is_not_there_does_not_exist(tmp_path: Path, name: str):
    config = settings(tmp_path / "none", name, 3)
    refused(
        lambda: open_one(config, "train", name),
        f"--data_dir={tmp_path}/none does not exist",
    )


def test_255_is_no_class_of_a_label_picture(tiny_data: Path):
    config = settings(tiny_data, "folders", 256)
    refused(
        lambda: open_one(config, "train", "folders"),
        "--num_classes=256",
        "255",
        "at most 255 classes",
    )


def test_splits_of_any_name(tmp_path: Path):
    readers.write_voc(tmp_path)

    def opened(*flags: str) -> tuple[Source, Source]:
        return open_lib.open_sources(settings(tmp_path, "voc", 21, *flags), "folders")

    train_source, val_source = opened()
    assert sizes((train_source, val_source)) == (3, 1)
    assert open_lib.trained_on_too(train_source, val_source) == 0
    assert sizes(opened("--train_split=val", "--val_split=train")) == (1, 3)
    with open_lib.one_split.set(True):
        assert sizes(opened("--train_split=none")) == (1, 1)
    (tmp_path / "ImageSets/Segmentation/trainval.txt").write_text(
        "2007_000000\n2007_000003\n"
    )
    both_source, val_source = opened("--train_split=trainval")
    assert open_lib.trained_on_too(both_source, val_source) == 1
    assert open_lib.trained_on_too(val_source, both_source) == 1
    [note] = notes("trainval", both_source, val_source)
    assert "1 of the 1 validation pictures" in note
    assert "--train_split=trainval, --val_split=val" in note
    # A note of the settings says it, see below.
    assert notes("val", val_source, val_source) == []
    refused(
        lambda: opened("--train_split=trainaug"),
        "trainaug.txt is missing",
        "there are: train, trainval, val",
    )
    assert "both val" in " ".join(
        settings(tmp_path, "voc", 21, "--train_split=val").notes()
    )


def notes(train_split: str, train_source: Source, val_source: Source) -> list[str]:
    """The notes of a run on these sources about validation pictures."""
    context = SimpleNamespace(
        config=settings_lib.Settings(train_split=train_split),
        train_source=train_source,
        val_source=val_source,
        world=SimpleNamespace(is_chief=True, size=1),
        model=SimpleNamespace(
            compiled=False, trainable_variables=[], _flatten_layers=list
        ),
    )
    return [note for note in run_lib.notes(context) if "validation pictures" in note]


@pytest.mark.parametrize("kind", ["link", "hard link", "link to a folder", "spelling"])
def test_one_picture_under_two_names_is_refused(tmp_path: Path, kind: str):
    """In one class or split, in two, and by the check of the data too."""
    readers.write_classes(tmp_path)
    first = tmp_path / "train/n02/a.png"
    second = tmp_path / "val/n10/x.png"
    if kind == "link":
        second.symlink_to(first)
    elif kind == "hard link":
        second.hardlink_to(first)
    elif kind == "spelling":
        first = tmp_path / "train/n02/e\u0301.png"
        second = tmp_path / "train/n02/\u00e9.png"
        readers.save(first, readers.noise(1))
        readers.save(second, readers.noise(2))
    else:
        second = tmp_path / "train/n01/z.jpg"
        first = tmp_path / "val/n01/z.jpg"
        shutil.rmtree(first.parent)
        first.parent.symlink_to(second.parent)
    config = settings(tmp_path, "class_folders", 3)
    refused(
        lambda: open_lib.open_sources(config, "class_folders"),
        first,
        second,
        "are one picture under two names: remove one",
    )
    faults = faults_of(tmp_path, "train", "val")
    assert str(first) in faults[0] and str(second) in faults[0], faults


def faults_of(root: Path, *splits: str) -> list[str]:
    """What `hvdkit check` says against these splits of class folders."""
    faults: list[str] = []
    checker = check.Checker(root, "class_folders", tell=faults.append)
    for split in splits:
        checker.check(split, has_same_classes=False)
    return faults


def test_pairs_of_one_picture_are_refused_and_may_share_a_mask(tmp_path: Path):
    label = np.zeros((12, 16), np.uint8)
    readers.write_pairs(tmp_path, {"a": (readers.noise(1), label)}, "train", "val")
    config = settings(tmp_path, "folders", 2)
    (tmp_path / "splits/train.txt").write_text("b")
    (tmp_path / "labels/b.png").symlink_to("a.png")
    readers.save(tmp_path / "images/b.png", readers.noise(2))
    open_lib.open_sources(config, "folders")
    (tmp_path / "images/b.png").unlink()
    (tmp_path / "images/b.png").symlink_to("a.png")
    refused(
        lambda: open_lib.open_sources(config, "folders"),
        tmp_path / "images/a.png",
        tmp_path / "images/b.png",
        "under two names",
    )


def test_splits_of_other_names_have_the_same_classes(tmp_path: Path):
    readers.write_classes(tmp_path)
    (tmp_path / "train").rename(tmp_path / "large")
    (tmp_path / "val").rename(tmp_path / "small")

    def opened(classes: int) -> tuple[Source, Source]:
        config = settings(
            tmp_path,
            "class_folders",
            classes,
            "--train_split=large",
            "--val_split=small",
        )
        return open_lib.open_sources(config, "class_folders")

    assert sizes(opened(3)) == (4, 3)

    readers.save(tmp_path / "small" / "n03" / "v.png", readers.noise(0))
    for classes in (4, 3):  # neither number would do
        refused(
            lambda number=classes: opened(number),
            "split small of",
            "has n03, and the training split has no such class",
        )


def test_one_class_is_refused(tmp_path: Path):
    readers.save(tmp_path / "train" / "all" / "a.png", readers.noise(0))
    config = settings(tmp_path, "class_folders", 2)
    refused(
        lambda: open_one(config, "train", "class_folders"),
        tmp_path / "train",
        "holds one class only",
        "--data_dir one level too deep",
    )
    [fault] = faults_of(tmp_path, "train")
    assert "holds one class only" in fault


def test_a_fork_adds_a_reader_by_one_file_and_one_line(tmp_path: Path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "squares.py").write_text(SQUARES)
    (tmp_path / "settings.py").write_text(
        'import hvdkit\nhvdkit.add_reader("squares", "squares.Squares")\n'
        "class Settings(hvdkit.Settings): ...\n"
    )

    def run(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    opened = run("train.py", "--data_format=squares")
    assert opened.stdout.split() == ["4", "3"], opened.stderr
    packed = run(
        "-m",
        "hvdkit",
        "pack",
        "--from=squares",
        "--split=train",
        "--out=out",
        "--root=.",
    )
    assert "4 samples, labels below 3" in packed.stdout, packed.stderr
    wrong = run("train.py", "--data_format=circles")
    assert wrong.returncode == 2 and "records, squares" in wrong.stderr


SQUARES = """
import numpy as np
from hvdkit.data.source import Arrays

class Squares(Arrays):
    def __init__(self, root, split, num_classes):
        count = {"train": 4, "val": 3}[split]
        super().__init__(image=np.zeros((count, 8, 8, 3), np.uint8), label=np.arange(count) % 3)
"""
TRAIN = """
import sys, settings
from hvdkit.settings import from_command_line
config = from_command_line([*sys.argv, "--num_classes=3"], settings.Settings)
from hvdkit.data.open import open_sources
print(*map(len, open_sources(config, "digits")))
"""


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        ("gone.Reader", "cannot be imported: No module named 'gone'"),
        (
            "hvdkit.data.source.Gone",
            "cannot be imported: module 'hvdkit.data.source' has no",
        ),
        ("hvdkit.data.labels.IGNORE", "is neither a class nor a function"),
        (f"{__name__}.sounds", "samples need an image and a label"),
    ],
)
def test_a_reader_that_does_not_fit_is_named(
    tmp_path, monkeypatch, capsys, reader, words
):
    monkeypatch.setitem(READERS, "mine", reader)
    is_opened = reader == f"{__name__}.sounds"
    check_command = [
        "check",
        "--data_format=mine",
        "--split=train",
        f"--data_dir={tmp_path}",
        "--num_classes=3",
    ]
    assert check.main(check_command) == (2 if is_opened else 1)
    with pytest.raises(SystemExit) as end:
        pack.main(
            f"pack --from=mine --split=train --root={tmp_path} --out={tmp_path}".split()
        )
    printed = "".join(capsys.readouterr())
    assert end.value.code == 2 and printed.count(words) == 2, printed
    if not is_opened:
        assert printed.count(f"--data_format=mine: its reader {reader}") == 2


def sounds(*_: object) -> Arrays:
    return Arrays(sound=np.zeros([3, 8]), label=np.arange(3))


@pytest.mark.parametrize(("name", "reader"), [
    ("voc", "mine.Voc"), ("mine", "Mine"), ("mine", ".Mine"), ("mine", "a.b-c"),
])  # fmt: skip
def test_a_reader_needs_a_name_of_its_own_and_its_module(
    name: str, reader: str, capsys
):
    with pytest.raises(SystemExit) as end:
        add_reader(name, reader)
    [line] = capsys.readouterr().err.splitlines()
    assert (
        end.value.code == 2
        and f"add_reader({name!r}, {reader!r}): give a new name" in line
    )
