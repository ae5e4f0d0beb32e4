"""hvdkit start: folders as people have them become flagfiles, or are refused in a sentence."""

import importlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pyarrow
import pytest
import readers
import tensorflow as tf
from PIL import Image
from projects import ROOT
from pyarrow import parquet
from refusals import refused

from hvdkit import settings as settings_lib
from hvdkit.commands import start, start_measured
from hvdkit.data import arrangement
from hvdkit.data.open import open_sources
from hvdkit.settings import project
from hvdkit.train import task as tasks
from ranks import PROJECT

# Pictures, masks, names of splits. {c}: class; {p}_{m}: two pictures each of ten patients.
LAYOUTS = {
    "classes": ("archive/{c}/IMG_{n:04}.JPG", "", ()),
    "splits": ("{s}/{c}/{n}.png", "", ("training", "validation")),
    "patients": ("images/patient{p:02}_{m}.png", "masks/patient{p:02}_{m}_mask.png", ()),
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
        for name, pixels in ((picture, shown), (mask, label)):
            if name:
                readers.save(root / name.format(**names), pixels)


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
    data, tried = tmp_path / "my data", layout == "patients"
    write(data, layout, high=255 if layout == "patients" else 1)  # white: the usual binary masks
    before = sorted(data.rglob("*"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n" if tried else "\n"))
    assert start.main(["hvdkit start", str(data), "--quick"]) == 0
    assert sorted(data.rglob("*")) == before and (fork / "runs/my-data-sheet.png").exists()
    config = settings_lib.parse(["", "--flagfile=configs/my-data.cfg"])
    assert config.task == ("segmentation" if LAYOUTS[layout][1] else "classification")
    assert config.label_map == ("255:1" if layout == "patients" else "")
    assert config.num_classes == 2 and config.mirror == ("off" if tried else "on")
    splits = open_sources(config, config.data_format)
    assert [*map(len, splits)] == [16, 4]
    for source in splits:
        read = [source.read(tf.constant(n, tf.int64)) for n in range(len(source))]
        labels = [int(tf.reshape(sample["label"], [-1])[-1]) for sample in read]
        assert [round(int(sample["image"][-1, -1, 0]) / 100) for sample in read] == labels
    names = [{s.picture_file(n).name[:9] for n in range(len(s))} for s in splits]
    assert layout != "patients" or not names[0] & names[1]  # each is in one split
    if tried:
        dry_run(fork, "my-data")


def dry_run(fork: Path, name: str) -> str:
    words = [sys.executable, "train.py", f"--flagfile=configs/{name}.cfg", "--dry_run"]
    ended = subprocess.run(words, cwd=fork, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and "dry run: it works" in ended.stdout, ended.stderr
    return ended.stdout


def people(rows: int = 200) -> list[list[object]]:
    """A number of rows, numbers of which some are missing, words, names, one value, the class."""
    kinds, names = ("red", "blue", ""), ("id", "size", "colour", "name", "one", "survived")
    sizes = [("", "NA")[n % 2] if n % 7 == 0 else n * 1.5 for n in range(rows)]
    found = [[n, sizes[n], kinds[n % 3], f"A {n}, B", 1, ("no", "yes")[n % 2]] for n in range(rows)]
    return [[*names], *found]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_of_features_becomes_a_flagfile(fork, tmp_path, monkeypatch, capfd, suffix):
    shutil.copy(ROOT / "examples/tabular/tabular.py", fork / "tasks")
    monkeypatch.setattr(importlib.import_module("tasks"), "__path__", [str(fork / "tasks")])
    rows, path = people(), tmp_path / f"people.{suffix}"
    if suffix == "csv":
        lines = "\n".join(";".join(map(str, row)) for row in rows)
        path.write_text("\ufeff" + lines.replace(".", ","))
    else:
        missing = [[None if value in ("", "NA") else value for value in row] for row in rows]
        columns = dict(zip(missing[0], map(list, zip(*missing[1:]))))
        parquet.write_table(pyarrow.table(columns), path)
    tried = suffix == "csv"
    monkeypatch.setattr(start_measured, "rate", lambda flags: 0.02 if "people" in flags else None)
    words = ["hvdkit start", str(path), "--label=survived", *["--quick"] * (not tried)]
    assert start.main(words) == 0
    config = settings_lib.parse(["", "--flagfile=configs/people.cfg"])
    assert config.base_lr == (0.02 if tried else 0.003) and config.num_classes == 2
    task = tasks.load(config)
    train, val = task.sources()
    assert len(train) == 4 * len(val) and train.class_names == val.class_names == ["no", "yes"]
    assert [*task.numbers] == ["size"] and task.words == {"colour": ["", "blue", "red"]}
    kept = np.array([x for n in range(len(train)) for x in train.read(n)["numbers"].numpy()])
    known, inputs = kept[~np.isnan(kept)], {"words": np.array([[1], [0], [3]])}
    model = task.build_model()
    sizes = np.array([[np.nan], [known.mean()], [known.mean() + known.std()]])
    read = keras.Model(model.inputs, model.layers[-4].output)(inputs | {"numbers": sizes})
    of = [[0, 1, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 1]]
    np.testing.assert_allclose(read, of, atol=1e-5)
    if tried:
        assert "name: left out: 200 words" in capfd.readouterr().out
        assert "by heart" in dry_run(fork, "people")


@pytest.mark.parametrize("listed", ["{n:02}", "pictures/{n:02}.png"])
def test_a_table_of_pictures_becomes_a_flagfile(fork, tmp_path, listed):
    lines = [f"id,breed,subset\n{listed.format(n=20)},pug,test"]
    for n in range(21):
        shade = np.full((20, 20, 3), 100 * (n % 2), np.uint8)
        readers.save(tmp_path / "pets" / "pictures" / f"{n:02}.png", shade)
        split = "Training" if n < 12 else "valid"
        lines += [f"{listed.format(n=n)},{('pug', 'husky')[n % 2]},{split}"] * (n < 20)
    (tmp_path / "pets" / "labels.csv").write_text("\n".join(lines))
    assert start.main(["hvdkit start", str(tmp_path / "pets"), "--yes", "--quick"]) == 0
    config = settings_lib.parse(["", "--flagfile=configs/pets.cfg"])
    train, val = open_sources(config, config.data_format)
    assert train.class_names == ["husky", "pug"] and (len(train), len(val)) == (12, 8)
    read = [train.read(tf.constant(n, tf.int64)) for n in range(12)]
    assert [int(r["image"][0, 0, 0] == 0) for r in read] == [int(r["label"]) for r in read]


def arrays(kind: str) -> dict[str, np.ndarray]:
    """24 samples of shade, or first feature, 10 times their label, 0 to 11."""
    labels = np.arange(24) % 12
    shades = np.broadcast_to(10 * labels[:, None, None], (24, 16, 20)).astype(np.uint8)
    if kind == "keras":
        return {"x_train": shades[:12], "y_train": labels[:12, None]} | {
            "x_test": shades[12:],
            "y_test": labels[12:, None],
        }
    if kind == "masks":
        images = np.repeat(shades[..., None], 3, 3).astype(np.int64)
        masks = np.where(np.arange(20) < 1, 1 - labels[:, None, None] % 2, shades // 10 % 2)
        return {"images": images, "masks": masks}
    if kind == "floats":
        images = np.repeat(shades[:, None] / 255, 3, 1)
        train = {"trainX": images[:12], "trainY": np.eye(12)[labels[:12]], "mean": np.zeros(3)}
        return train | {"valX": images[12:16], "valY": labels[12:16], "testX": images[16:]}
    rows = np.stack([10.0 * labels + 2**40, np.arange(24), np.ones(24)], 1)
    others = {"ids": labels, "class_names": labels, "n": np.array(3)}
    return {"x": rows, "label": labels.astype(str), **others}


@pytest.mark.parametrize("kind", ["keras", "masks", "floats", "rows"])
def test_arrays_become_a_flagfile(fork, tmp_path, monkeypatch, kind):
    shutil.copy(ROOT / "examples/tabular/tabular.py", fork / "tasks")
    monkeypatch.setattr(importlib.import_module("tasks"), "__path__", [str(fork / "tasks")])
    path = tmp_path / "my set"
    if kind == "keras":
        np.savez(path.with_suffix(".npz"), **arrays(kind))
    for name, array in {} if kind == "keras" else arrays(kind).items():
        path.mkdir(exist_ok=True)
        np.save(path / f"{name}.npy", array)
    given = path.with_suffix(".npz") if kind == "keras" else path
    assert start.main(["hvdkit start", str(given), "--yes", "--quick"]) == 0
    config = settings_lib.parse(["", "--flagfile=configs/my-set.cfg"])
    assert config.num_classes == (2 if kind == "masks" else 12)
    if kind == "rows":
        splits = tasks.load(config).sources()
    else:
        splits = open_sources(config, config.data_format)
    assert [*map(len, splits)] == {"floats": [12, 4], "masks": [20, 4]}.get(kind, [12, 12])
    if kind == "rows":  # float64 keeps what differs, and a column without a spread counts nothing
        model = tasks.load(config).build_model()
        read = keras.Model(model.inputs, model.layers[-4].output)
        first = read({"numbers": np.array([[2.0**40, 0, 2], [2.0**40 + 110, 0, 1]])}).numpy()
        assert np.ptp(first[:, 0]) > 3 and np.abs(first).max() < 9
    for source in splits:
        for number in range(len(source)):
            sample = source.read(tf.constant(number, tf.int64))
            label = int(tf.reshape(sample["label"], [-1])[-1])
            rows = kind == "rows"
            shade = sample["numbers"][0] - 2**40 if rows else sample["image"][-1, -1, 0]
            assert float(shade) / 10 % (2 if kind == "masks" else 99) == label


FOUR = {"x": np.zeros((4, 8, 8))}
LABELS = dict.fromkeys(("y_train", "y_val"), np.arange(4) % 2)
ONE_HOT = {"x_train": FOUR["x"], "x_val": FOUR["x"], "y_train": np.eye(4), "y_val": np.eye(4, 5)}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (FOUR, "no array of labels"),
        (FOUR | {"y": np.zeros(3, int)}, "4 samples and 3 labels"),
        (FOUR | {"x1": np.zeros(4), "y": np.zeros(4)}, "which of x and x1"),
        (FOUR | {"y": np.arange(4) / 2}, "labels are float64"),
        (FOUR | {"y": np.array([0, 1, 1, np.inf])}, "labels are float64"),
        (FOUR | {"y": np.zeros(4)}, "of one class: two are needed"),
        (FOUR | {"y": np.array(["a", "nan", "b", "a"])}, "row 2 has no label"),
        ({"x": np.zeros((30, 8, 8)), "y": np.arange(30) // 1.5}, "no classes but numbers"),
        (ONE_HOT, "labels of its splits have other widths"),
        (FOUR | {"y": np.array(["../x", "b"] * 2)}, "'../x' cannot be a folder"),
        ({"x": np.zeros((0, 8, 8)), "y": np.zeros(0)}, "an array of samples is empty"),
        ({"x": np.array([[np.inf]] * 4), "y": np.arange(4) % 2}, "features are finite numbers"),
        ({"x": np.full((4, 8, 8), "a"), "y": np.arange(4)}, "1 or 3 colours last or second"),
        ({"x": np.full((4, 8, 8), np.nan), "y": np.arange(4)}, "floats from 0 to 1; these are"),
        ({"x": np.zeros((4, 8, 8, 4)), "y": np.arange(4)}, "1 or 3 colours last or second"),
        (FOUR | {"y": np.zeros((4, 8, 9), int)}, "masks of shape (4, 8, 9), int64"),
        (FOUR | {"y": np.full((4, 8, 8), 300)}, "masks hold 300 to 300"),
        ({"x": np.array([{}]), "y": np.arange(1)}, "x.npy cannot be read as numbers"),
        (LABELS | {"x_train": np.zeros((4, 2)), "x_val": np.zeros((4, 3))}, "other shapes"),
    ],
)
def test_arrays_that_do_not_say_are_refused(fork, tmp_path, capfd, found, words):
    (data := tmp_path / "set").mkdir()
    for name, array in found.items():
        np.save(data / f"{name}.npy", array)
    command = ["hvdkit start", str(data), "--yes", "--quick"]
    assert start.main([*command, "--label=y"]) == 2 and "without one" in capfd.readouterr().err
    assert start.main(command) == 2
    printed = capfd.readouterr()
    assert words in printed.err and printed.err.count("error: ") == 1, printed
    assert not [*(fork / "datasets").glob("*"), *(fork / "configs").glob("set*")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no row"),
        ("a,b\n1,2\n3", "row 2 has 1 values, the line of names 2"),
        ("a,a\n1,2", "more than one column a"),
        ("a,b,c\n9,8,7", "Give --label=, of a, b, c"),
        ("a,label\n1,x\n2,", "row 2 has no label"),
        ("a,label\n1,x\n2,NaN", "row 2 has no label"),
        ("label,y\n7,x\n8,y", "y is the label: rename the column label"),
        ("a;label\n1,218;x\n819;y", "1,218 of a may be 1218 or 1.218: write one"),
        ("a,label\n1,0.5\n2,0.7", "label is no class but a number"),
        ("a;label\n9;0,5\n8;0,7", "label is no class but a number"),
        ("a,label\n9,x\n8,x", "label is x in all rows"),
        ("a,label,split\n9,x,fold1\n8,y,fold2", "the column split holds fold1, fold2"),
        (
            "p,label\n1.png,x\n9.png,y",
            "p names 1 pictures that are not beside it or below, first 9.png",
        ),
        ("5.1,3.5,x\n9,8,y", "its first line must name the columns; 5.1"),
        ("a,b,c\n9,8,7", "there is no column"),
        ("a,label\n9,x\n9,y", "no column but label tells rows apart"),
        ("p,label\n1,x\n1,y", "p has a picture twice"),
        ("p,label\n1,../x\n2,y", "'../x' cannot be a folder's name"),
        ("p,label\n2,x\n3,y", "3 may be each of "),
        (
            "a,label\n5,x\n6,y\n9,x\n8,y\n5,y\n5,x\n9,x\n9,y\n6,x\n7,y",
            "copy examples/tabular/tabular.py",
        ),
    ],
)
def test_a_table_that_does_not_say_is_refused(fork, tmp_path, capfd, text, words):
    for name in ("1.png", "2.png", "3.png", "more/3.png"):
        readers.save(tmp_path / "set" / name, readers.noise(0))
    (tmp_path / "set" / "of.csv").write_text(text)
    given = ["--label=d"] * words.startswith("there is no column")
    given = ["--label=y"] * words.startswith("y is the label") or given
    assert start.main(["hvdkit start", str(tmp_path / "set" / "of.csv"), "--yes", *given]) == 2
    printed = capfd.readouterr()
    assert words in printed.err and printed.err.count("error: ") == 1, printed
    assert not [*(fork / "datasets").glob("*"), *(fork / "configs").glob("of*")]


@pytest.mark.parametrize("layout", ["voc", "classes"])
def test_published_layouts_are_read_as_they_are(fork, tmp_path, monkeypatch, capfd, layout):
    getattr(readers, f"write_{layout}")(tmp_path / "set")
    for name in ("sizes.csv", "sources.csv"):  # notes beside it
        (tmp_path / "set" / name).write_text("a,b\n1,2")
    words: list[str] = []
    monkeypatch.setattr(os, "execvp", lambda _, given: words.extend(given))
    command = ["hvdkit start", str(tmp_path / "set"), "--yes", "--quick", "--train"]
    assert start.main([*command, "--label=a"]) == 2 and "without one" in capfd.readouterr().err
    other = [*command[:1], str(tmp_path / "set" / "x.odt"), "--label=a"]
    (tmp_path / "set" / "x.odt").touch()
    assert start.main(other) == 2 and "no table or arrays" in capfd.readouterr().err
    np.savez(tmp_path / "set.npz", FOUR["x"], np.arange(4))
    other = ["hvdkit start", str(tmp_path / "set.npz"), "--yes", "--quick"]
    assert start.main(other) == 2 and "no array's name says" in capfd.readouterr().err
    assert start.main(command) == 0
    assert words[-2:] == ["train", "ARGS=--flagfile=configs/set.cfg"]
    assert f"--data_dir={tmp_path}/set\n" in (fork / "configs" / "set.cfg").read_text()
    assert not (fork / "datasets").exists()


CAT = "archive/cat/IMG_0002."


@pytest.mark.parametrize(
    ("layout", "high", "broken", "words"),
    [
        ("patients", 7, {}, "the masks hold the values 0, 7, and a value is a class"),
        ("patients", 1, {"masks/new.png": "masks/patient03_1_mask.png"}, "2 files lack the mask"),
        ("classes", 1, {"rows.csv": "archive"}, r"rows.csv holds no row"),
        ("classes", 1, {"archive/x.JPG": f"{CAT}JPG"}, "what its 20 pictures are: class folders"),
        ("classes", 1, {f"{CAT}bmp": f"{CAT}JPG"}, "0002.bmp .* must be PNG, JPEG or WebP"),
        ("classes", 1, {f"{CAT}JPG": ""}, f"my data/{CAT}JPG is no PNG(.|\n)*1 fault"),
        ("classes", 1, {f"{CAT[:-1]}_mask.JPG": "archive/dog/IMG_0001.JPG"}, "looks like the mask"),
        ("classes", 1, {"archive/dog/c": "../cat", "archive/cat/d": "../dog"}, "leads to a folder"),
        (
            "classes",
            1,
            {"archive/cat/x_1.JPG": f"{CAT}JPG", "archive/cat/x/1.JPG": "archive/cat/IMG_0000.JPG"},
            "would have one name",
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
    items = [arrangement.Item("", stem, Path(label, stem), label) for label, stem in pairs]
    found, _ = arrangement.with_splits(items)
    return dict(Counter(item.label for item in found if item.split == "val"))


@pytest.mark.parametrize(
    ("names", "held"),
    [
        ([f"{c}/{n:03}" for c, k in {"cat": 100, "rare": 8}.items() for n in range(k)], (20, 1)),
        ([f"all/s{g}_{n}" for g in range(5) for n in range(60 if g == 3 else 1)], (4,)),
        ([f"{c}/n02{c}5_{n}" for c in "123456" for n in range(10)], (2,) * 6),
        ([f"{c}/p{n % 20}_{n}" for c, k in (("a", 100), ("b", 900)) for n in range(k)], (20, 180)),
    ],
)
def test_of_each_class_a_fifth_is_held_back(names: list[str], held: tuple[int, ...]):
    """Same names in classes are no groups; a large group is trained on; a group that is a class;
    groups that have pictures of both classes."""
    assert tuple(held_back(names).values()) == held


def test_too_few_pictures_are_refused():
    refused(lambda: held_back(["cat/1", "dog/1"]), "2 samples are too few")


def test_pictures_in_a_folder_test_are_no_class_without_a_word(tmp_path):
    for name in ("cat/1.png", "dog/1.png", "test/1.png"):
        readers.save(tmp_path / name, readers.noise(1))
    refused(lambda: arrangement.recognized(tmp_path), "test may be a class or pictures without one")
    (tmp_path / "train").mkdir()
    for name in ("cat", "dog"):
        (tmp_path / name).rename(tmp_path / "train" / name)
    assert {item.label for item in arrangement.recognized(tmp_path)} == {"cat", "dog"}


def test_values_that_one_split_alone_calls_white_are_classes_of_the_other(fork, tmp_path, capfd):
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
