"""hvdkit start: folders as people have them become flagfiles, or are refused in a sentence."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import readers
import tensorflow as tf
from PIL import Image
from pyarrow import parquet
from refusals import refused

from hvdkit import settings as settings_lib
from hvdkit.commands.start import measurements, start, tables
from hvdkit.data.open import open_sources
from hvdkit.data.prepare import arrangement
from hvdkit.settings import project
from ranks import PROJECT

# Pictures, masks, names of splits. {c}: class; {p}_{m}: two pictures each of ten patients.
LAYOUTS = {
    "classes": ("archive/{c}/IMG_{n:04}.JPG", "", ()),
    "splits": ("{s}/{c}/{n}.png", "", ("training", "validation")),
    "patients": (
        "images/patient{p:02}_{m}.png",
        "masks/patient{p:02}_{m}_mask.png",
        (),
    ),
    "above": ("{s}/images/{n}.jpg", "{s}/masks/{n}.png", ("train", "valid")),
    "below": ("img/{s}/town/{n}.png", "annotations/{s}/town/{n}.png", ("train", "val")),
}


def write(root: Path, layout: str, high: int = 1) -> None:
    """20 pictures whose shade is 100 times their label, 0 or 1 (in masks `high`)."""
    picture, mask, splits = LAYOUTS[layout]
    for n in range(20):
        names = {"n": n, "p": n // 2, "m": n % 2, "c": ("cat", "dog")[n % 2]}
        names["s"] = splits[n > 15] if splits else ""
        shown = np.full((40, 48, 3), 100 * (n % 2), np.uint8)
        label = np.full((40, 48), high * (n % 2), np.uint8)
        label[0, 0] = high - label[0, 0]
        readers.save(root / picture.format_map(names), shown)
        if mask:
            readers.save(root / mask.format_map(names), label)


@pytest.fixture
def fork(tmp_path, monkeypatch) -> Path:
    fork = tmp_path / "fork"
    shutil.copytree(PROJECT / "tasks", fork / "tasks")
    for name in ("train.py", "settings.py", "models.py", "configs/demo.cfg"):
        (fork / name).parent.mkdir(exist_ok=True)
        shutil.copy(PROJECT / name, fork / name)
    monkeypatch.setattr(project, "_folder", [fork])
    return fork


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_becomes_a_flagfile(fork, tmp_path, monkeypatch, layout):
    data = tmp_path / "my data"
    tried = layout == "patients"
    # White is usual in binary masks.
    write(data, layout, high=255 if layout == "patients" else 1)
    before = sorted(data.rglob("*"))
    # Enter says yes; where nobody answers, pictures are not mirrored.
    answer = {"patients": "n\n", "classes": ""}.get(layout, "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    monkeypatch.setattr(
        measurements, "rate", lambda flags: 0.02 if "my-data" in flags else None
    )
    words = ["hvdkit start", str(data)]
    assert start.main(words if tried else [*words, "--quick"]) == 0
    assert (
        sorted(data.rglob("*")) == before and (fork / "runs/my-data-sheet.png").exists()
    )
    config = settings_lib.parse(["", "--flagfile=configs/my-data.cfg"])
    assert config.task == ("segmentation" if LAYOUTS[layout][1] else "classification")
    assert config.base_lr == (0.02 if tried else 0.003)
    assert config.label_map == ("255:1" if layout == "patients" else "")
    assert config.num_classes == 2
    assert config.mirror == ("on" if answer == "\n" else "off")
    train, val = open_sources(config, config.data_format)
    assert len(train) == 16 and len(val) == 4
    for source in (train, val):
        for number in range(len(source)):
            sample = source.read(tf.constant(number, tf.int64))
            label = int(tf.reshape(sample["label"], [-1])[-1])
            assert round(int(sample["image"][-1, -1, 0]) / 100) == label
    if layout == "patients":
        assert not patients(train) & patients(val)  # each patient is in one split
    if tried:
        dry_run(fork, "my-data")


def patients(source) -> set[str]:
    return {source.picture_file(number).name[:9] for number in range(len(source))}


def dry_run(fork: Path, name: str) -> str:
    words = [sys.executable, "train.py", f"--flagfile=configs/{name}.cfg", "--dry_run"]
    ended = subprocess.run(words, cwd=fork, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and "dry run: it works" in ended.stdout, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("listed", ["{n:02}", "pictures/{n:02}.png"])
def test_a_table_of_pictures_becomes_a_flagfile(fork, tmp_path, listed):
    lines = [f"id,breed,subset\n{listed.format(n=20)},pug,test"]
    for n in range(21):
        shade = np.full((20, 20, 3), 100 * (n % 2), np.uint8)
        readers.save(tmp_path / "pets" / "pictures" / f"{n:02}.png", shade)
        if n < 20:
            breed = "husky" if n % 2 else "pug"
            split = "Training" if n < 12 else "valid"
            lines.append(f"{listed.format(n=n)},{breed},{split}")
    (tmp_path / "pets" / "labels.csv").write_text("\n".join(lines))
    assert start.main(["hvdkit start", str(tmp_path / "pets"), "--yes", "--quick"]) == 0
    config = settings_lib.parse(["", "--flagfile=configs/pets.cfg"])
    assert config.mirror == "off"
    train, val = open_sources(config, config.data_format)
    assert train.class_names == ["husky", "pug"] and (len(train), len(val)) == (12, 8)
    for number in range(12):
        sample = train.read(tf.constant(number, tf.int64))
        assert (sample["image"][0, 0, 0] == 0) == (sample["label"] == 1)


@pytest.mark.parametrize("kind", ["names of classes", "numbers of classes"])
def test_a_parquet_file_with_the_bytes_of_pictures_becomes_a_flagfile(
    fork, tmp_path, kind
):
    """As the package datasets writes it, which keeps names of classes in the file's metadata."""
    files = []
    for number in range(20):
        data = readers.encoded(np.full((20, 20, 3), 10 * number, np.uint8), "PNG")
        files.append({"bytes": data, "path": f"{number}.png"})
    table = pyarrow.table(
        {"image": files, "label": [number % 2 for number in range(20)]}
    )
    if kind == "names of classes":
        features = {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}
        text = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": text})
    parquet.write_table(table, tmp_path / "set.parquet")
    assert (
        start.main(["hvdkit start", str(tmp_path / "set.parquet"), "--yes", "--quick"])
        == 0
    )
    config = settings_lib.parse(["", "--flagfile=configs/set.cfg"])
    train, val = open_sources(config, config.data_format)
    assert train.class_names == (
        ["no", "yes"] if kind == "names of classes" else ["0", "1"]
    )
    assert len(train) == 16 and len(val) == 4
    for source in (train, val):
        for sample in readers.read_all(source):
            assert sample["image"][0, 0, 0] // 10 % 2 == sample["label"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no row"),
        ("a,b\n1,2\n3", "row 2 has 1 values, the line of names 2"),
        ("a,a\n1,2", "more than one column a"),
        ("p,b,c\n1,x,y", "which column holds the classes? Give --label=, of b, c"),
        (
            "p,label,y\n1,x,8\n2,y,9",
            "which column holds the classes? Give --label=, of label, y",
        ),
        ("p\n1\n2", "of no other column"),
        ("p,label\n1,x\n2,", "row 2 has no label in the column label"),
        (
            "p,label\n./1.png,x\nTMP/set/1.png,y",
            "in rows 1 and 2 (./1.png, TMP/set/1.png)",
        ),
        (
            "p,label\n1,x\n2,NA",
            "row 2 has NA as label, a class or nothing: write the class as a",
        ),
        ("p,label\n1,0.5\n2,0.7", "label is no class but a number: 0.5 in row 1"),
        ("p,label\n1,x\n2,x", "label is x in all rows"),
        (
            "p,label\n1,1\n2,1.0",
            "label: '1', '1.0' look like one class: give it one name",
        ),
        ("p,label\n1,01\n2,1", "label: '01', '1' look like one class"),
        ("p,label\n1,Cat\n2,cat", "label: 'Cat', 'cat' look like one class"),
        ("p,label\n1,\u00e9s\n2,e\u0301s", r"'e\u0301s', '\xe9s' look like one class"),
        ("p,label,split\n1,x,fold1\n2,y,fold2", "the column split holds fold1, fold2"),
        (
            "p,label\n1.png,x\n9.png,y",
            "p names 1 pictures not beside it or below, first 9.png",
        ),
        ("p,label\n7,x\n8,y", "first 7; '007' is spelled otherwise"),
        ("p,label\nK.png,x\n1.png,y", "first K.png; 'k.png' is spelled otherwise"),
        ("1.png,x\n2.png,y", "its first line must name the columns; 1.png is no name"),
        (
            "a,b,c\n90,80,70",
            "names no picture, and start is for pictures: `hvdkit example tabular`",
        ),
        ("p,label\n1,x\n1,y", "p has a picture twice"),
        (
            "p,label\n2.png,x\n2,y",
            "p has a picture twice, in rows 1 and 2 (2.png, 2), and one",
        ),
        (
            "p,label,split\nmore/4.png,x,train\n4,y,val",
            "in rows 1 and 2 (more/4.png, 4)",
        ),
        (
            "p,label\n1,x\nlinked,y",
            "set/1.png and TMP/set/linked.png are one picture under two",
        ),
        ("p,mask,label\n1,2,x\n2,1,y", "p and mask name pictures, and one column may"),
        ("p,label\n1,../x\n2,y", "'../x' cannot be a folder's name"),
        ("p,label\n2,x\n3,y", "3 may be each of "),
        ("given,b\n1,x\n2,y", "there is no column d. Give --label=, of b"),
    ],
)
def test_a_table_that_does_not_say_is_refused(fork, tmp_path, capfd, text, words):
    for name in (
        "1.png",
        "2.png",
        "3.png",
        "k.png",
        "007.png",
        "more/3.png",
        "more/4.png",
    ):
        readers.save(tmp_path / "set" / name, readers.noise(0))
    (tmp_path / "set" / "linked.png").hardlink_to(tmp_path / "set" / "1.png")
    (tmp_path / "set" / "of.csv").write_text(text.replace("TMP", str(tmp_path)))
    command = ["hvdkit start", str(tmp_path / "set" / "of.csv"), "--yes"]
    if text.startswith("given"):
        command.append("--label=d")
    assert start.main(command) == 2
    printed = capfd.readouterr()
    error = printed.err.replace(str(tmp_path), "TMP")
    assert words in error and printed.err.count("error: ") == 1, printed
    assert not [*(fork / "datasets").glob("*"), *(fork / "configs").glob("of*")]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0, 1, -1], "row 3 has -1, which is no class of 0 to 1, in the column label"),
        ([0, 1, 2], "row 3 has 2, which is no class of 0 to 1, in the column label"),
        ([0, 1, None], "row 3 has no label in the column label"),
        ([[0], [0, 1], [1]], "row 1 has [0], no single value, in the column label"),
        (
            [{"a": 0}, {"a": 1}, {"a": 0}],
            "row 1 has {'a': 0}, no single value, in the column",
        ),
    ],
)
def test_what_is_no_single_label_is_refused_by_row(tmp_path, labels: list, words: str):
    files = [
        {"bytes": readers.encoded(readers.noise(n), "PNG"), "path": None}
        for n in range(3)
    ]
    table = pyarrow.table({"image": files, "label": labels})
    text = json.dumps({"info": {"features": {"label": {"names": ["no", "yes"]}}}})
    file = tmp_path / "set.parquet"
    parquet.write_table(table.replace_schema_metadata({"huggingface": text}), file)
    refused(lambda: tables.understood(file, "", tmp_path / "links"), words)


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", '{"info": 1}'])
def test_what_a_table_says_of_its_columns_is_known_or_refused(tmp_path, text: str):
    """Text of `datasets`, which anybody may have written."""
    files = [
        {"bytes": readers.encoded(readers.noise(n), "PNG"), "path": None}
        for n in range(2)
    ]
    table = pyarrow.table({"image": files, "label": ["a", "b"]})
    file = tmp_path / "set.parquet"
    parquet.write_table(table.replace_schema_metadata({"huggingface": text}), file)
    if text.startswith("[["):
        refused(
            lambda: tables.understood(file, "", tmp_path / "links"), f"{file}: its text"
        )
    else:
        assert tables.understood(file, "", tmp_path / "links")


def test_what_lies_beside_a_table_and_is_not_read_is_said(tmp_path, capfd):
    for n in range(6):
        readers.save(tmp_path / f"{n}.png", readers.noise(n))
    for name in ("train.csv", "val.csv"):
        (tmp_path / name).write_text("p,label\n./0.png,x\n1,y")
    assert len(tables.understood(tmp_path / "train.csv", "", tmp_path / "links")) == 2
    printed = capfd.readouterr().out
    assert "not read: 1 tables beside it, as val.csv" in printed
    assert f"not read: 4 pictures that p does not name, as {tmp_path}/2.png" in printed
    refused(
        lambda: tables.of(tmp_path),
        "join them into one, or give one, without the others",
    )


def test_a_broken_picture_of_a_table_is_named_by_its_row(fork, tmp_path, capfd):
    whole = [readers.encoded(readers.noise(n), "PNG") for n in range(12)]
    whole[3] = whole[3][:-40]
    table = pyarrow.table({"image": whole, "label": [n % 2 for n in range(12)]})
    parquet.write_table(table, tmp_path / "set.parquet")
    assert start.main(["hvdkit start", str(tmp_path / "set.parquet"), "--yes"]) == 2
    printed = capfd.readouterr().out
    assert (
        "row 4 of set.parquet cannot be decoded" in printed
        and ".pictures" not in printed
    )


def test_arrays_are_for_a_task_of_ones_own(fork, tmp_path, capfd):
    (tmp_path / "set").mkdir()
    np.savez(tmp_path / "set" / "x.npz", x_train=np.zeros(4))
    for source in ("set", "set/x.npz"):
        assert start.main(["hvdkit start", str(tmp_path / source), "--yes"]) == 2
        printed = capfd.readouterr().err
        assert (
            "holds arrays" in printed
            and "Arrays(image=np.load(" in printed
            and "Traceback" not in printed
        )


@pytest.mark.parametrize("layout", ["voc", "classes"])
def test_published_layouts_are_read_as_they_are(
    fork, tmp_path, monkeypatch, capfd, layout
):
    getattr(readers, f"write_{layout}")(tmp_path / "set")
    for name in ("sizes.csv", "sources.csv"):  # there are notes beside it
        (tmp_path / "set" / name).write_text("a,b\n1,2")
    words: list[str] = []
    monkeypatch.setattr(os, "execvp", lambda _, given: words.extend(given))
    command = ["hvdkit start", str(tmp_path / "set"), "--yes", "--quick", "--train"]
    assert (
        start.main([*command, "--label=a"]) == 2
        and "without one" in capfd.readouterr().err
    )
    (tmp_path / "set" / "x.odt").touch()
    assert start.main([*command[:1], str(tmp_path / "set" / "x.odt"), "--label=a"]) == 2
    assert "is no folder, and no table" in capfd.readouterr().err
    assert start.main(command) == 0
    assert words[-2:] == ["train", "ARGS=--flagfile=configs/set.cfg"]
    assert f"--data_dir={tmp_path}/set\n" in (fork / "configs" / "set.cfg").read_text()
    assert not (fork / "datasets").exists()


CAT = "archive/cat/IMG_0002."


@pytest.mark.parametrize(
    ("layout", "high", "broken", "words"),
    [
        ("patients", 7, {}, "the masks hold the values 0, 7, and a value is a class"),
        (
            "patients",
            1,
            {"masks/new.png": "masks/patient03_1_mask.png"},
            "40 files lack the mask or .*first .*/images/patient00_0.png, .*/masks/new.png: add",
        ),
        ("classes", 1, {"rows.csv": "archive"}, r"rows.csv holds no row"),
        (
            "classes",
            1,
            {"archive/x.JPG": f"{CAT}JPG"},
            "archive does not say what its 20 pictures are",
        ),
        (
            "classes",
            1,
            {f"{CAT}bmp": f"{CAT}JPG"},
            "0002.bmp .* must be PNG, JPEG or WebP",
        ),
        ("classes", 1, {f"{CAT}JPG": ""}, f"my data/{CAT}JPG is no PNG(.|\n)*1 fault"),
        (
            "classes",
            1,
            {f"{CAT[:-1]}_mask.JPG": "archive/dog/IMG_0001.JPG"},
            "looks like the mask",
        ),
        ("classes", 1, {"archive/dog/c": "../../archive"}, "leads to a folder"),
        (
            "classes",
            1,
            {"archive/kat": "../archive/cat"},
            "cat/IMG_0000.JPG and .*kat/IMG_0000.JPG",
        ),
        (
            "classes",
            1,
            {
                "archive/cat/x_1.JPG": f"{CAT}JPG",
                "archive/cat/x/1.JPG": "archive/cat/IMG_0000.JPG",
            },
            "cat holds x, which would be left out: move pictures",
        ),
    ],
)
def test_what_cannot_be_told_is_refused_and_leaves_nothing(
    fork, tmp_path, capfd, layout, high, broken, words
):
    """`broken`: new names of files; a file of no picture where that is empty."""
    data = tmp_path / "my data"
    write(data, layout, high)
    for new, old in broken.items():
        (data / new).parent.mkdir(exist_ok=True)
        if old.startswith(".."):
            (data / new).symlink_to(old)
            continue
        if (data / old).is_file():
            (data / old).rename(data / new)
            continue
        shutil.rmtree(data / "archive") if old else None
        (data / new).write_text("no picture")
    assert start.main(["hvdkit start", str(data), "--yes"]) == 2
    printed = capfd.readouterr()
    assert re.search(words, printed.out + printed.err), printed
    assert printed.err.count("error: ") == 1 and "Traceback" not in printed.err
    assert not [*(fork / "datasets").glob("*"), *(fork / "configs").glob("my*")]


def held_back(names: list[str]) -> dict[str, int]:
    """By class how many of these CLASS/NAME are kept to score; no group is in both splits."""
    pairs = [name.split("/") for name in names]
    items = [
        arrangement.Item("", stem, Path(label, stem), label) for label, stem in pairs
    ]
    split_items, _ = arrangement.with_splits(items)
    return dict(Counter(item.label for item in split_items if item.split == "val"))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        # The one group of a class has to be divided.
        (
            [f"A/patient{n:02}_{m}" for n in range(6) for m in range(5)]
            + [f"B/patient77_{m}" for m in range(10)],
            r"by whole groups as patient0\d; pictures of one group \(patient77\)",
        ),
        (
            [f"A/patient{n:02}_{m}" for n in range(4) for m in range(10)],
            r"by a hash of names; pictures of one group \(patient00, .*are in both splits",
        ),
        # A class's own prefix is no group.
        (
            [f"{c}/{c}_{m:04}" for c in ("001", "002", "003") for m in range(10)],
            "by a hash of names$",
        ),
    ],
)
def test_groups_in_both_splits_are_told(names, words):
    pairs = [name.split("/") for name in names]
    items = [
        arrangement.Item("", stem, Path(label, stem), label) for label, stem in pairs
    ]
    _, about = arrangement.with_splits(items)
    assert re.search(words, about), about


def test_of_each_class_a_fifth_is_held_back():
    """Same names in several classes are no groups."""
    cats = [f"cat/{number:03}" for number in range(100)]
    rare = [f"rare/{number:03}" for number in range(8)]
    assert held_back(cats + rare) == {"cat": 20, "rare": 1}


def test_a_large_group_is_trained_on():
    small = [f"all/s{group}_0" for group in (0, 1, 2, 4)]
    large = [f"all/s3_{number}" for number in range(60)]
    assert held_back(small + large) == {"all": 4}


def test_a_group_that_is_a_class_is_divided():
    names = []
    for label in "123456":
        names += [f"{label}/n02{label}5_{number}" for number in range(10)]
    assert held_back(names) == dict.fromkeys("123456", 2)


def test_groups_may_have_pictures_of_both_classes():
    names = [f"a/p{number % 20}_{number}" for number in range(100)]
    names += [f"b/p{number % 20}_{number}" for number in range(900)]
    assert held_back(names) == {"a": 20, "b": 180}


def test_too_few_pictures_are_refused():
    refused(lambda: held_back(["cat/1", "dog/1"]), "2 samples are too few")


def test_pictures_in_a_folder_test_are_no_class_without_a_word(tmp_path):
    for name in ("cat/1.png", "dog/1.png", "test/1.png"):
        readers.save(tmp_path / name, readers.noise(1))
    refused(
        lambda: arrangement.recognized(tmp_path),
        "test may be a split or a class, beside cat, dog",
    )
    (tmp_path / "train").mkdir()
    for name in ("cat", "dog"):
        (tmp_path / name).rename(tmp_path / "train" / name)
    assert {item.label for item in arrangement.recognized(tmp_path)} == {"cat", "dog"}


def test_values_that_one_split_alone_calls_white_are_classes_of_the_other(
    fork, tmp_path, capfd
):
    write(tmp_path / "set", "above")
    for name, high in (("train", 1), ("valid", 255)):
        for mask in (tmp_path / "set" / name / "masks").glob("*"):
            pixels = np.full((40, 48), high, np.uint8)
            pixels[0], pixels[1] = 0, 255
            Image.fromarray(pixels).save(mask)
    assert start.main(["hvdkit start", str(tmp_path / "set"), "--yes"]) == 2
    assert "fault(s), listed above" in capfd.readouterr().err


def test_a_folder_of_the_project_itself_stays_as_it_is(fork):
    pets = fork / "datasets" / "pets"
    write(pets, "classes")
    before = sorted(pets.rglob("*"))
    assert start.main(["hvdkit start", str(pets), "--yes", "--quick"]) == 0
    assert sorted(pets.rglob("*")) == before and (fork / "datasets/pets-links").is_dir()
    assert start.main(["hvdkit start", str(fork / "datasets"), "--yes"]) == 2


def test_a_run_of_the_same_name_is_not_resumed_on_other_data(fork, tmp_path, capfd):
    write(tmp_path / "pets", "classes")
    (fork / "runs" / "pets").mkdir(parents=True)
    assert start.main(["hvdkit start", str(tmp_path / "pets"), "--yes"]) == 2
    assert "runs/pets exists: give another --name" in capfd.readouterr().err


def test_a_stop_signal_leaves_nothing(fork, tmp_path, monkeypatch):
    write(tmp_path / "pets", "classes")

    def stopped(*flags: object) -> None:
        assert (fork / "configs/pets.cfg").exists()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(measurements, "batch", stopped)
    with pytest.raises(SystemExit) as ended:
        start.main(["hvdkit start", str(tmp_path / "pets"), "--yes"])
    assert ended.value.code == 128 + signal.SIGINT
    assert not (fork / "configs/pets.cfg").exists()
    assert not (fork / "datasets").exists() or not any((fork / "datasets").iterdir())
