"""ImageNet's flat val: the same samples as when it is sorted into folders, or what is needed."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hvdkit.data.readers import flat
from hvdkit.data.readers.class_folders import ClassFolders
from scipy.io import savemat

import readers


@pytest.fixture
def root(tmp_path: Path) -> Path:
    synsets = readers.write_flat(tmp_path)
    (tmp_path / flat.SYNSETS).write_text("\n".join(synsets) + "\n\n")
    return tmp_path


def write_devkit(root: Path, numbers: list[int]) -> None:
    """As ILSVRC2012_devkit_t12: numbers of leaves in an order that is not the synsets'."""
    synsets = ["n01443537", "n01484850", "n01440764", "n00001740"]
    kinds = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object)]
    table = np.array([(i + 1, wnid, "a, b") for i, wnid in enumerate(synsets)], kinds)
    folder = root / flat.DEVKIT
    folder.mkdir(parents=True)
    savemat(folder / flat.META, {"synsets": table[:, None]})
    (folder / flat.TRUTH).write_text("".join(f"{number}\n" for number in numbers))


def test_flat_and_sorted_are_the_same_set(root: Path, tmp_path: Path):
    source = ClassFolders(root, "val")
    assert [int(sample["label"]) for sample in readers.read_all(source)] == [0, 1, 2, 2]
    names = [source.picture_file(index).name[-6:-5] for index in range(4)]
    assert names == ["2", "4", "1", "3"]
    assert ClassFolders(root, "train").class_names == source.class_names
    sorted_root = tmp_path / "sorted"
    shutil.copytree(root / "train", sorted_root / "train")
    for index in range(4):
        label = source.class_names[int(source.read(np.int64(index))["label"])]
        target = sorted_root / "val" / label / source.picture_file(index).name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.picture_file(index), target)
    assert readers.same(source, ClassFolders(sorted_root, "val"))
    # Another split's folders are the classes where that is trained on; train's do not matter then.
    (root / "train").rename(root / "usual")
    (root / "train" / "n09999999").mkdir(parents=True)
    other = ClassFolders(root, "val", train_split="usual")
    assert readers.same(source, other) and other.class_names == source.class_names
    readers.fails(lambda: ClassFolders(root, "val"), "no folder of", root / "train")
    shutil.rmtree(root / "train")
    assert ClassFolders(root, "val").class_names == source.class_names


def test_the_devkits_numbers_are_not_the_order_of_synsets(root: Path):
    by_list = ClassFolders(root, "val")
    (root / flat.SYNSETS).unlink()
    write_devkit(root, [2, 3, 2, 1])
    assert readers.same(by_list, ClassFolders(root, "val"))
    lists = (root / flat.DEVKIT / flat.TRUTH, root / flat.SYNSETS)
    synsets = [by_list.class_names[i] for i in (2, 0, 2, 1)]
    lists[1].write_text("\n".join(synsets))
    assert readers.same(by_list, ClassFolders(root, "val"))
    lists[1].write_text("\n".join(reversed(synsets)))
    readers.fails(lambda: ClassFolders(root, "val"), *lists, "do not say the same")
    lists[1].write_text("\n".join(synsets))
    lists[0].write_text("2\n3\n9\n1\n")  # not to be read: the other list will do
    assert readers.same(by_list, ClassFolders(root, "val"))
    lists[1].unlink()
    readers.fails(lambda: ClassFolders(root, "val"), "does not know: 9", flat.META)
    (root / flat.DEVKIT / flat.META).write_bytes(b"not MATLAB's")
    readers.fails(lambda: ClassFolders(root, "val"), root / flat.DEVKIT / flat.META, "cannot be")
    (root / flat.DEVKIT / flat.META).unlink()
    readers.fails(lambda: ClassFolders(root, "val"), "is missing", "unpack the devkit whole")


def test_what_is_needed_is_named(root: Path):
    (root / flat.SYNSETS).rename(root / "aside")
    words = (root / "val", "4 pictures", root / flat.SYNSETS, root / flat.DEVKIT)
    readers.fails(lambda: ClassFolders(root, "val"), *words)
    assert len(ClassFolders(root, "train")) == 3
    (root / "aside").rename(root / flat.SYNSETS)
    whole = (root / flat.SYNSETS).read_text()
    (root / flat.SYNSETS).write_text(whole.replace("n01443537", "n09999999"))
    readers.fails(lambda: ClassFolders(root, "val"), "no folder of: n09999999", root / "train")
    (root / flat.SYNSETS).write_text(whole.replace("\n", " 1\n", 1))
    readers.fails(lambda: ClassFolders(root, "val"), "line 1", "not one word")
    (root / flat.SYNSETS).write_text(whole.strip() + "\nn01443537\n")
    readers.fails(lambda: ClassFolders(root, "val"), "4 pictures", "5 lines")
    # As many lines as pictures, and yet all labels after the gap would be the next one's.
    (root / "val" / "ILSVRC2012_val_00000002.JPEG").unlink()
    (root / flat.SYNSETS).write_text("\n".join(whole.split()[:3]))
    readers.fails(lambda: ClassFolders(root, "val"), "val_00000003.JPEG", "line 2")


def test_other_pictures_do_not_get_the_validation_labels(root: Path):
    """As many as the list has lines, with names that end in the lines' numbers."""
    for split, name in (("test", "ILSVRC2012_test"), ("val", "ILSVRC2010_val"), ("test", "img")):
        (root / "val").rename(root / "aside")
        for number in range(1, 5):
            path = root / split / f"{name}_{number:08d}.JPEG"
            path.parent.mkdir(exist_ok=True)
            shutil.copy(root / "aside" / f"ILSVRC2012_val_{number:08d}.JPEG", path)
        words = (root / split, root / flat.SYNSETS, "4 of 4", f"{name}_00000001.JPEG", "sort the")
        readers.fails(lambda s=split: ClassFolders(root, s), *words)
        shutil.rmtree(root / split)
        (root / "aside").rename(root / "val")
    (root / "val").rename(root / "holdout")  # a split's name says nothing
    assert len(ClassFolders(root, "holdout")) == 4
