"""PASCAL VOC's layout: what is read, and what is said when it cannot be."""

from pathlib import Path

import numpy as np
import pytest
import readers

from hvdkit.data.readers.voc import CLASS_NAMES, NUM_CLASSES, Voc


@pytest.fixture
def root(tmp_path: Path) -> Path:
    readers.write_voc(tmp_path / "VOC2012")
    return tmp_path / "VOC2012"


def test_reads_pictures_and_palette_indices_in_the_order_of_the_list(root: Path):
    assert len(CLASS_NAMES) == NUM_CLASSES == 21
    samples = readers.read_all(Voc(root, "train"))
    for sample, number in zip(samples, (2, 0, 1), strict=True):
        assert sample["image"].shape == (12, 16, 3) and sample["label"].shape == (12, 16, 1)
        assert (sample["label"][0] == 255).all() and (sample["label"][1, :3] == 20).all()
        assert (sample["label"][2:] == number).all()
        # Noise does not survive JPEG, but two pictures of it stay far from each other.
        off = np.abs(sample["image"].astype(int) - readers.noise(number)).mean()
        assert off < np.abs(sample["image"].astype(int) - readers.noise(number + 1)).mean()
    assert len(Voc(root, "val")) == 1


def test_the_folder_above_will_do(root: Path):
    assert Voc(root.parent, "train").fingerprint() == Voc(root, "train").fingerprint()
    assert Voc(root, "val").fingerprint() != Voc(root, "train").fingerprint()


def test_augmented_labels_belong_to_aug_splits(root: Path):
    lists = root / "ImageSets" / "Segmentation"
    (lists / "trainaug.txt").write_text("2007_000003\n2007_000001\n")
    readers.fails(lambda: Voc(root, "trainaug"), root / "SegmentationClassAug", "is missing")
    for number, value in ((3, 7), (1, 8)):
        path = root / "SegmentationClassAug" / f"2007_00{number:04d}.png"
        readers.save(path, np.full((12, 16), value, np.uint8))
    labels = [sample["label"] for sample in readers.read_all(Voc(root, "trainaug"))]
    assert (labels[0] == 7).all() and (labels[1] == 8).all()


def test_lists_of_pairs_of_paths(root: Path):
    """As a list of trainaug is often passed on: paths from VOC2012, and labels of any folder."""
    path = root / "ImageSets" / "Segmentation" / "trainaug.txt"
    readers.save(root / "SegmentationClassAug/2007_000003.png", np.full((12, 16), 7, np.uint8))
    whole = (
        "/JPEGImages/2007_000003.jpg /SegmentationClassAug/2007_000003.png \r\n"
        "JPEGImages/2007_000001.jpg\tSegmentationClass/2007_000001.png\n"
    )
    path.write_text(whole)
    source = Voc(root, "trainaug")
    labels = [sample["label"] for sample in readers.read_all(source)]
    assert (labels[0] == 7).all() and (labels[1][2:] == 1).all()
    assert source.picture_file(1) == root / "JPEGImages" / "2007_000001.jpg"
    for line, words in (
        ("/JPEGImages/2007_000002.jpg", ("is not a picture and its label",)),
        ("2007_000002", ("is not a picture and its label",)),
        ("/JPEGImages/2007_000003.jpg /S/x.png", ("stands on line 1 already",)),
        ("/JPEGImages//2007_000003.jpg /S/x.png", ("stands on line 1 already",)),
        ("./JPEGImages/2007_000003.jpg /S/x.png", ("stands on line 1 already",)),
        ("/JPEGImages/2009_1.jpg /S/x.png", (root / "JPEGImages" / "2009_1.jpg", "is missing")),
        ("/JPEGImages/2007_000002.jpg /S/x.png", (root / "S" / "x.png", "is missing")),
    ):
        path.write_text(whole + line)
        readers.fails(lambda: Voc(root, "trainaug"), f"{path}, line 3", *words)
    # Pictures may share a label: copies in other weather, a camera of another kind.
    path.write_text(whole + "JPEGImages/2007_000002.jpg SegmentationClass/2007_000001.png\n")
    labels = [sample["label"] for sample in readers.read_all(Voc(root, "trainaug"))]
    assert len(labels) == 3 and np.array_equal(labels[1], labels[2])


def test_missing_parts_are_named(root: Path):
    readers.fails(lambda: Voc(root / "gone", "train"), root / "gone", "VOCdevkit")
    lists = root / "ImageSets" / "Segmentation"
    readers.fails(lambda: Voc(root, "test"), lists / "test.txt", "there are: train, val")
    (lists / "train.txt").write_text("2007_000000\n2007_000009\n")
    readers.fails(lambda: Voc(root, "train"), root / "JPEGImages", "2007_000009", "line 2")
    (lists / "train.txt").write_text("2007_000000\n")
    (root / "SegmentationClass" / "2007_000000.png").unlink()
    readers.fails(lambda: Voc(root, "train"), root / "SegmentationClass", "2007_000000", "line 1")
    for part in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / part).rename(root / "aside")
        readers.fails(lambda: Voc(root, "val"), root / part, "is missing", "put the")
        (root / "aside").rename(root / part)


def test_broken_files_are_explained(root: Path):
    source = Voc(root, "train")
    label = root / "SegmentationClass" / "2007_000002.png"
    readers.save(label, np.full((12, 16), 21, np.uint8), bytes(768))
    readers.explained(source, 0, label, "label value 21", "0..20", "VOC's own")
    readers.save(label, readers.noise(0))  # colours, as a viewer would save it
    readers.explained(source, 0, label, "3 channels")
    picture = root / "JPEGImages" / "2007_000000.jpg"
    picture.write_bytes(picture.read_bytes()[:300])
    readers.explained(source, 1, picture, "cannot be decoded")
