"""Layouts of public sets: read by their levels, or refused with a folder's name."""

import itertools
import os
import random
import re
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import readers
from refusals import refused

from hvdkit.data.prepare import arrangement
from hvdkit.data.readers.class_folders import ClassFolders

PICTURE = np.zeros((8, 8, 3), np.uint8)
CATS = ("cat", "dog")


def write(root: Path, names: list[str]) -> Path:
    """Pictures, and files of other endings, at these paths."""
    for name in names:
        path = root / name
        if path.suffix in (".png", ".jpg"):
            readers.save(path, PICTURE)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("notes")
    return root


def files(pattern: str, *more: str, ending: str = "jpg", **values: tuple) -> list[str]:
    """Two files for each way to fill the pattern's {names}, numbered over all, and `more`."""
    paths = []
    for words in itertools.product(*values.values()):
        folder = pattern.format(**dict(zip(values, words)))
        paths.append(f"{folder}/{len(paths)}.{ending}")
        paths.append(f"{folder}/{len(paths)}.{ending}")
    return [*paths, *more]


CLASSES = {
    "ImageNet": (files("{s}/{c}", s=("train", "val"), c=CATS), {"train", "val"}),
    "imagenette": (files("{s}/{c}", "noisy.csv", s=("train", "val"), c=CATS), {"train", "val"}),
    "Food-101": (files("images/{c}", "meta/train.txt", "meta/a.json", c=CATS), {""}),
    "chest X-rays": (files("x/{s}/{c}", s=("train", "val", "test"), c=CATS), {"train", "val", "test"}),
    "Tiny ImageNet": (files("{s}/{c}/images", "train/cat/boxes.txt", s=("train", "val"), c=CATS), {"train", "val"}),
    "test without classes": (files("{s}/{c}", "test/1.jpg", s=("train", "val"), c=CATS), {"train", "val"}),
    "splits in classes": (files("{c}/{s}", c=CATS, s=("train", "test")), {"train", "test"}),
    "file servers": (
        files("{c}", "Thumbs.db", c=(*CATS, "#recycle", "$RECYCLE.BIN", "@eaDir", "lost+found",
                                     "System Volume Information", ".Trash-1000", "__MACOSX",
                                     ".ipynb_checkpoints")),
        {""},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_classes_are_found_alike_by_start_and_by_the_reader(tmp_path, name):
    paths, splits = CLASSES[name]
    items = arrangement.recognized(write(tmp_path, paths))
    assert {item.label for item in items} == {*CATS}
    assert {item.split for item in items} == splits
    for split in splits - {""}:
        pictures = sorted(str(item.picture) for item in items if item.split == split)
        source = ClassFolders(tmp_path, split)
        assert source.class_names == [*CATS]
        assert [str(source.picture_file(n)) for n in range(len(source))] == pictures
        assert [
            os.fsdecode(tmp_path) + "/" + os.fsdecode(file) for file in source.files()
        ] == pictures


@pytest.mark.parametrize("name", ["a0 ", "a\n0", os.fsdecode(b"caf\xe9")])
def test_names_that_no_list_can_hold_are_refused(tmp_path, name):
    write(tmp_path, [f"images/{name}.png", f"masks/{name}.png"])
    items = [item._replace(split="train") for item in arrangement.recognized(tmp_path)]
    refused(
        lambda: arrangement.link(items, tmp_path / "links"),
        "cannot stand in a list of names",
    )


def test_links_that_hold_each_other_are_refused(tmp_path):
    write(tmp_path, PAIRS["VOC without lists"])
    (tmp_path / "JPEGImages" / "x").symlink_to("../SegmentationClass")
    (tmp_path / "SegmentationClass" / "x").symlink_to("../JPEGImages")
    refused(
        lambda: arrangement.recognized(tmp_path), "x leads to a folder that holds it"
    )


def test_splits_below_the_levels_that_are_given_are_refused(tmp_path):
    write(tmp_path, files("{c}/{s}", c=CATS, s=("train", "val")))
    words = "train may be a split, below the levels of --layout=class: say what its level is"
    refused(lambda: arrangement.recognized(tmp_path, "class"), words)
    assert {item.split for item in arrangement.recognized(tmp_path, "class/any")} == {
        ""
    }


PAIRS = {
    "Oxford pets": [
        *files("images"), *files("annotations/trimaps", ending="png"), "annotations/xmls/0.xml",
        "annotations/list.txt",
    ],
    "CamVid of fastai": ["images/a0.png", "images/a1.png", "labels/a0_P.png", "labels/a1_P.png", "codes.txt"],
    "CamVid of SegNet": [*files("{s}{k}", ending="png", s=("train",), k=("",)), "trainannot/0.png", "trainannot/1.png"],
    "ADE20K": files("images/{s}", s=("training", "validation"))
    + files("annotations/{s}", ending="png", s=("training", "validation")),
    "COCO-Stuff": files("images/{s}", s=("train2017", "val2017"))
    + files("labels/{s}", ending="png", s=("train2017", "val2017")),
    "ISIC": ["ISIC_Training_Input/I_1.jpg", "ISIC_Training_Input/I_2.jpg",
             "ISIC_Training_GroundTruth/I_1_segmentation.png",
             "ISIC_Training_GroundTruth/I_2_segmentation.png"],
    "patients": files("images/{p}", p=("p1", "p2")) + files("masks/{p}", ending="png", p=("p1", "p2")),
    "patients above": ["p1/images/1.jpg", "p1/masks/1.png", "p2/images/1.jpg", "p2/masks/1.png"],
    "VOC without lists": ["JPEGImages/1.jpg", "JPEGImages/2.jpg", "SegmentationClass/1.png",
                          "SegmentationClass/2.png"],
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_pictures_have_the_masks_of_their_names(tmp_path, name):
    items = arrangement.recognized(write(tmp_path, PAIRS[name]))
    pictures = [path for path in PAIRS[name] if path.endswith((".jpg", ".png"))]
    assert 2 * len(items) == len(pictures)
    for item in items:
        stem = item.picture.stem
        assert item.mask.stem.startswith(stem) and item.mask != item.picture
        assert item.picture.parent.name[:2] != "p1" or item.mask.parent.name == "p1"


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (files("{d}/{c}", d=("art", "cartoon", "photo"), c=CATS), "art and cat in it may both be classes"),
        (files("{d}/{c}", d=(8863, 8864), c=(0, 1)), "8863 and 0 in it may both be classes"),
        (files("{c}/{p}", c=CATS, p=("p1", "p2")), "cat and p1 in it may both be classes"),
        (files("{c}", c=("bus", "car", "train")), "train may be a split or a class, beside bus, car"),
        (files("{c}", c=(*CATS, "test")), "test may be a split or a class, beside cat, dog"),
        (files("{s}/{c}", s=("train", "val"), c=("car", "label", "photo")), "--layout=split/class"),
        (files("{s}/{c}/{p}", s=("train", "val"), c=CATS, p=("a", "b")), "--layout=split/class/any or --layout=split/any/class"),
        (files("{s}/{c}", s=("train", "test", "extra"), c=CATS), "test may be a split or a class"),
        (files("{k}", ending="png", k=("images", "masks", "overlays")), "overlays lies beside images, masks"),
        (files("{k}", ending="png", k=("scans", "masks")), "scans lies beside masks, which may be masks"),
        (files("{s}/{c}", s=("train", "val", "valid"), c=CATS), "say the same, val: remove one"),
        (files("{c}", "cat/more/9.jpg", c=CATS), "cat holds more, which would be left out"),
        (files("{c}/{s}", "cat/9.jpg", c=CATS, s=("train", "val")), "cat holds pictures beside its splits"),
        (files("train/{c}", "train/ant/a.txt", c=CATS), "ant holds no picture"),
        (files("images/{c}", c=CATS) + files("masks/{c}", ending="png", c=CATS), "--layout=kind/any trains on the masks"),
        (files("{c}/images", c=CATS) + files("{c}/masks", ending="png", c=CATS), "--layout=any/kind trains on the masks"),
        (files("{c}", "cover.jpg", c=CATS), "does not say what its 5 pictures are (cover.jpg"),
        (files("{s}", "annotations/of.json", s=("train2017", "val2017")), "4 files lack the mask"),
        (files("images", "groundTruth/0.mat"), "2 files lack the mask"),
        ([*files("{c}", ending="png", c=CATS), "cat/0_mask.png"], "0_mask.png looks like the mask of 0"),
        (["images/001.png", "masks/1.png"], "'1' is spelled otherwise"),
        (["images/S1.png", "images/s2.png", "masks/s1.png", "masks/s2.png"], "'s1' is spelled otherwise"),
        (["images/100.png", "images/101.png", "masks/200.png", "masks/201.png"], "4 files lack the mask"),
        (files("{c}", c=("1", "01")), "'01', '1' look like one class"),
        (files("{c}", c=("1", "1.0")), "'1', '1.0' look like one class"),
        (files("{c}", c=("Cat", "cat")), "'Cat', 'cat' look like one class"),
        (files("{c}", c=("\u00e9t", unicodedata.normalize("NFD", "\u00e9t"))), "look like one class"),
    ],
)  # fmt: skip
def test_what_a_layout_does_not_say_is_refused(tmp_path, paths, words):
    refused(lambda: arrangement.recognized(write(tmp_path, paths)), words)


def test_classes_of_one_letter_or_called_na_are_classes(tmp_path):
    items = arrangement.recognized(write(tmp_path, files("{c}", c=("A", "a", "NA"))))
    assert {item.label for item in items} == {"A", "a", "NA"}


def test_classes_with_masks_are_segmented_when_the_layout_says_so(tmp_path):
    names = [f"{kind}/{name}/1.png" for kind in ("images", "masks") for name in CATS]
    items = arrangement.recognized(write(tmp_path, names), "kind/any")
    assert len(items) == 2 and all(item.mask and not item.label for item in items)


def test_a_missing_validation_split_is_not_guessed(tmp_path):
    write(tmp_path, files("{s}/{c}", s=("train", "test"), c=CATS))
    refused(
        lambda: ClassFolders(tmp_path, "val"),
        "val is missing",
        "--val_split=test scores on",
    )


@pytest.mark.parametrize(
    ("layout", "classes"), [("any/class", {*CATS}), ("class/any", {"art", "photo"}), ("class", {"art", "photo"})]
)  # fmt: skip
def test_a_layout_says_what_the_levels_are(tmp_path, layout, classes):
    write(tmp_path, files("{d}/{c}", d=("art", "photo"), c=CATS))
    items = arrangement.recognized(tmp_path, layout)
    assert {item.label for item in items} == classes and len(items) == 8
    assert len({(item.label, item.name) for item in items}) == 8
    refused(
        lambda: arrangement.recognized(tmp_path, "split/class"), "art says no split"
    )
    refused(
        lambda: arrangement.recognized(tmp_path, "domain"),
        "'domain' is none of split, kind",
    )


def test_words_of_ours_are_classes_below_a_split(tmp_path):
    words = ("car", "label", "mask", "photo", "test", "train", "val")
    write(tmp_path, files("{s}/{c}", s=("train", "val"), c=words))
    for split in ("train", "val"):
        assert ClassFolders(tmp_path, split).class_names == [*words]
    items = arrangement.recognized(tmp_path, "split/class")
    assert {item.label for item in items} == {*words}


def test_pictures_and_masks_are_no_classes(tmp_path):
    write(tmp_path, files("train/{k}", ending="png", k=("images", "masks")))
    refused(
        lambda: ClassFolders(tmp_path, "train"), "are pictures and masks, no classes"
    )


def test_names_of_classes_and_of_files_may_be_composed_otherwise(tmp_path):
    """macOS stores an accent as a character of its own."""
    both = [unicodedata.normalize(form, "\u00e9t") for form in ("NFC", "NFD")]
    write(tmp_path, [f"images/{both[0]}.png", f"masks/{both[1]}.png"])
    (item,) = arrangement.recognized(tmp_path)
    assert [item.picture.stem, item.mask.stem] == both


def test_patients_in_folders_are_in_one_split(tmp_path):
    patients = [f"p{number}" for number in range(10)]
    paths = files("images/{p}", p=patients) + files(
        "masks/{p}", ending="png", p=patients
    )
    items, _ = arrangement.with_splits(arrangement.recognized(write(tmp_path, paths)))
    splits = {item.picture.parent.name: set() for item in items}
    for item in items:
        splits[item.picture.parent.name].add(item.split)
    assert all(len(splits_of_patient) == 1 for splits_of_patient in splits.values())
    assert {"train", "val"} == set().union(*splits.values())


def tree(draws: random.Random) -> list[str]:
    """Paths of a set by chance: splits above or in classes or none, words of ours, things
    beside."""
    splits = draws.choice([(), ("train", "val"), ("train", "test"), ("train", "val", "test"),
                           ("training", "valid"), ("Train", "Val", "extra"), ("train",)])  # fmt: skip
    words = ("cat", "dog", "bus", "label", "photo", "mask", "train", "n01", "1", "test")
    levels = [draws.sample(words, draws.randint(1, 4))]
    if splits:
        levels.insert(draws.randint(0, 1), [*splits])
    for more in (["x"], ["p1", "p2"], ["images", "masks"], ["art", "photo"]):
        if draws.random() < 0.15:
            levels.insert(draws.randint(0, len(levels)), more)
    folders = ["/".join(parts) for parts in itertools.product(*levels)]
    paths = []
    for number, folder in enumerate(folders):
        name = 0 if draws.random() < 0.1 else number
        paths += [f"{folder}/{name}.png", f"{folder}/{name}b.png"]
        if draws.random() < 0.03:
            paths[-2:] = [f"{folder}/notes.txt"]
    for beside in (
        "cover.png",
        "notes.txt",
        "docs/notes.txt",
        "@eaDir/1.png",
        "test/loose.png",
    ):
        if draws.random() < 0.1:
            paths.append(beside)
    return paths


def by_start(root: Path, layout: str = "") -> dict[str, set] | str:
    """Class and picture of each split as `hvdkit start` finds them, "" for no split; or why not."""
    try:
        items = arrangement.recognized(root, layout)
    except ValueError as error:
        return str(error)
    pictures = {"train": set(), "val": set(), "test": set(), "": set()}
    for item in items:
        pictures[item.split].add((item.label, str(item.picture), str(item.mask or "")))
    return pictures


def by_reader(root: Path, split: str) -> set | str:
    try:
        source = ClassFolders(root, split)
    except ValueError as error:
        return str(error)
    labels = np.repeat(source.class_names, source.class_counts())
    return {
        (str(labels[n]), str(source.picture_file(n)), "") for n in range(len(source))
    }


@pytest.mark.parametrize("seed", range(60))
def test_start_and_the_reader_find_the_same_or_refuse(seed, tmp_path):
    readers.save(tmp_path / "one.png", PICTURE)
    root = tmp_path / "set"
    for path in tree(random.Random(seed)):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "one.png", root / path)
    by_split = by_start(root)
    read = {split: by_reader(root, split) for split in ("train", "val", "test")}
    if isinstance(by_split, str) and not isinstance(read["train"], str):
        # It asks where the reader was told that they are classes.
        layouts = re.findall(r"--layout=([a-z/]+/class)\b", by_split)
        if layouts:
            by_split = by_start(root, layouts[-1])
    if isinstance(by_split, str):
        asks = "--layout=" in by_split
        refused_too = isinstance(read["train"], str) or isinstance(read["val"], str)
        assert asks or refused_too or "is missing" not in read["test"], by_split
    elif by_split[""]:
        assert f"type hvdkit start {root}" in read["train"]
    elif any(item[2] for item in set.union(*by_split.values())):
        assert "no classes" in read["train"]
    else:
        for split in ("train", "val", "test"):
            assert by_split[split] == read[split] or (
                not by_split[split] and "missing" in read[split]
            )
        if not by_split["val"] and by_split["test"]:
            assert "--val_split=test" in read["val"]
