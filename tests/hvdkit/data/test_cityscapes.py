"""Cityscapes' layout: train ids, order, and what is said when something is missing or wrong."""

from pathlib import Path

import numpy as np
import pytest
import readers

from hvdkit.data.readers.cityscapes import CLASS_NAMES, NUM_CLASSES, Cityscapes

# Ids and train ids as the authors' table pairs them, written down a second time and by name.
TRAIN_IDS = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole",
    19: "traffic light", 20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky",
    24: "person", 25: "rider", 26: "car", 27: "truck", 28: "bus", 31: "train", 32: "motorcycle",
    33: "bicycle",
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    readers.write_cityscapes(tmp_path)
    return tmp_path


def test_labels_become_train_ids(root: Path):
    assert NUM_CLASSES == len(CLASS_NAMES) == 19
    sample = readers.read_all(Cityscapes(root, "val"))[0]
    np.testing.assert_array_equal(sample["image"], readers.noise(len("lindau_000000_000019")))
    ids = np.arange(12 * 16).reshape(12, 16) % 34
    for value in range(34):
        expected = CLASS_NAMES.index(TRAIN_IDS[value]) if value in TRAIN_IDS else 255
        assert (sample["label"][ids == value] == expected).all(), value
    assert sample["label"].dtype == np.uint8 and sample["label"].shape == (12, 16, 1)


def test_order_is_by_city_and_name(root: Path):
    source = Cityscapes(root, "train")
    names = [source.picture_file(index).name.split("_left")[0] for index in range(3)]
    assert names == ["aachen_000000_000019", "aachen_000001_000019", "bochum_000000_000313"]
    assert len(readers.read_all(source)) == 3
    assert source.fingerprint() != Cityscapes(root, "val").fingerprint()


def test_missing_parts_are_named(root: Path):
    readers.fails(lambda: Cityscapes(root / "gone", "val"), root / "gone", "leftImg8bit/")
    (root / "leftImg8bit" / "val").rename(root / "aside")
    missing = root / "leftImg8bit" / "val"
    readers.fails(lambda: Cityscapes(root, "val"), missing, "there are: train, train_extra)")
    (root / "aside").rename(root / "leftImg8bit" / "val")
    name = "aachen/aachen_000001_000019"
    for part, ending in (("leftImg8bit", "_leftImg8bit.png"), ("gtFine", "_gtFine_labelIds.png")):
        path = root / part / "train" / f"{name}{ending}"
        path.rename(root / "aside")
        readers.fails(lambda: Cityscapes(root, "train"), root, f"no *{ending} for {name};")
        (root / "aside").rename(path)
        (root / part).rename(root / "aside")
        readers.fails(lambda: Cityscapes(root, "train"), root / part, "is missing")
        (root / "aside").rename(root / part)
    for path in (root / "gtFine" / "val").rglob("*_labelIds.png"):
        path.unlink()
    readers.fails(lambda: Cityscapes(root, "val"), root / "gtFine" / "val", "_labelIds.png")


def test_splits_without_fine_labels(root: Path):
    sample = readers.read_all(Cityscapes(root, "train_extra"))[0]
    assert (sample["label"] == CLASS_NAMES.index("car")).all()
    readers.fails(lambda: Cityscapes(root, "test"), "never published", "train, val, train_extra")
    readers.fails(lambda: Cityscapes(root, "coarse"), "no split 'coarse'", "train, val")
    (root / "gtCoarse").rename(root / "aside")
    readers.fails(lambda: Cityscapes(root, "train_extra"), root / "gtCoarse", "is missing")


@pytest.mark.parametrize(("value", "word"), [(34, "value 34"), (255, "made train ids")])
def test_unknown_ids_are_explained(root: Path, value: int, word: str):
    source = Cityscapes(root, "train")
    path = root / "gtFine/train/aachen/aachen_000001_000019_gtFine_labelIds.png"
    label = np.full((12, 16), 7, np.uint8)
    label[3, 4] = value
    readers.save(path, label)
    readers.explained(source, 1, path, word, "row 3, column 4", "0..33")
    assert source.explain(0) is None


def test_broken_files_are_explained(root: Path):
    source = Cityscapes(root, "val")
    path = root / "gtFine/val/lindau/lindau_000000_000019_gtFine_labelIds.png"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    readers.explained(source, 0, path, "cannot be decoded")
    readers.save(path, np.zeros((12, 15), np.uint8))
    readers.explained(source, 0, path, "15x12", "16x12")
