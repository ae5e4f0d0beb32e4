"""Folders of images and labels: what is read, and errors that explain what cannot be."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import readers
import tensorflow as tf
from PIL import Image
from refusals import refused

from hvdkit.data import open as open_lib
from hvdkit.data.readers import pairs

CLASSES = 5


def write(root: Path, name: str, image: np.ndarray, label: np.ndarray):
    readers.save(root / "images" / f"{name}.png", image)
    readers.save(root / "labels" / f"{name}.png", label)


def list_names(root: Path, *names: str, split: str = "train"):
    (root / "splits").mkdir(exist_ok=True)
    (root / "splits" / f"{split}.txt").write_text("\n".join(names))


@pytest.fixture
def pixels() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    label = rng.integers(0, CLASSES, (30, 40), dtype=np.uint8)
    label[3, 4] = 255
    return rng.integers(0, 256, (30, 40, 3), dtype=np.uint8), label


@pytest.fixture
def root(tmp_path: Path, pixels: tuple[np.ndarray, np.ndarray]) -> Path:
    readers.write_pairs(tmp_path, dict.fromkeys("abc", pixels))
    list_names(tmp_path, "b", "", "a")
    return tmp_path


def opened(root: Path, split: str = "train") -> pairs.ImageLabelFolder:
    return pairs.ImageLabelFolder(root, split, CLASSES)


def fails(root: Path, *parts: object, split: str = "train"):
    refused(lambda: opened(root, split), *parts)


def explained(root: Path, *parts: object):
    """Sample 0 fails to read, and the explanation holds the parts."""
    readers.explained(opened(root), 0, *parts)
    assert opened(root).explain(1) is None


def test_reads_in_the_order_of_the_list(
    root: Path, pixels: tuple[np.ndarray, np.ndarray]
):
    other_image = np.zeros((8, 9, 3), np.uint8)
    other_label = np.ones((8, 9), np.uint8)
    write(root, "a", other_image, other_label)
    source = opened(root)
    assert len(source) == 2
    dataset = tf.data.Dataset.range(2).map(source.read, num_parallel_calls=2)
    assert dataset.element_spec == {
        "image": tf.TensorSpec([None, None, 3], tf.uint8),
        "label": tf.TensorSpec([None, None, 1], tf.uint8),
        "file": tf.TensorSpec([], tf.string),
    }
    written = (pixels, (other_image, other_label))
    for read, (image, label) in zip(dataset, written, strict=True):
        np.testing.assert_array_equal(read["image"], image)
        np.testing.assert_array_equal(read["label"][..., 0], label)


@pytest.mark.parametrize("colours", [2, 4, 16, 256])
@pytest.mark.parametrize("transparency", [None, 0, b"\x00\x80"])
def test_reads_the_indices_of_palette_labels(
    tmp_path: Path, colours: int, transparency
):
    rng = np.random.default_rng(colours)
    ids = rng.integers(0, colours, (13, 17), dtype=np.uint8)
    write(tmp_path, "a", np.zeros((13, 17, 3), np.uint8), ids)
    picture = Image.fromarray(ids)
    picture.putpalette(rng.integers(0, 256, 3 * colours, dtype=np.uint8).tobytes())
    options = {} if transparency is None else {"transparency": transparency}
    picture.save(tmp_path / "labels" / "a.png", **options)
    assert (tmp_path / "labels" / "a.png").read_bytes()[25] == 3
    list_names(tmp_path, "a")
    source = pairs.ImageLabelFolder(tmp_path, "train", 256)
    np.testing.assert_array_equal(
        source.read(tf.constant(0, tf.int64))["label"][..., 0], ids
    )
    assert source.explain(0) is None


def test_palettes_that_differ_between_files_are_no_class_ids(tmp_path: Path):
    """As `quantize` makes them: index 1 is red in one file, and green in the other."""
    colours = {"a": [0, 0, 0, 255, 0, 0], "b": [0, 0, 0, 0, 255, 0]}
    for is_alike in (True, False):
        for name, palette in colours.items():
            ids = np.eye(8, dtype=np.uint8)
            write(tmp_path, name, np.zeros((8, 8, 3), np.uint8), ids)
            picture = Image.fromarray(ids)
            picture.putpalette(colours["a"] if is_alike else palette)
            picture.save(tmp_path / "labels" / f"{name}.png")
        list_names(tmp_path, "a", "b")
        source = pairs.ImageLabelFolder(tmp_path, "train", 2)
        fault = open_lib.doubt(source)
        assert fault == source.doubt_of_palettes()
        assert is_alike == (not fault)
    assert "index 1 is the colour (255, 0, 0) in" in fault and "grey PNGs" in fault


def test_fingerprint_tells_names_order_and_sizes(root: Path, tmp_path_factory):
    first = opened(root).fingerprint()
    assert re.fullmatch("[0-9a-f]{64}", first)
    copy = shutil.copytree(root, tmp_path_factory.mktemp("elsewhere") / "copy")
    assert opened(copy).fingerprint() == first
    with (copy / "labels" / "a.png").open("ab") as file:
        file.write(b"x")
    assert opened(copy).fingerprint() != first
    list_names(root, "a", "b")
    assert opened(root).fingerprint() != first


def test_missing_or_empty_parts_are_named(root: Path):
    fails(root / "nowhere", root / "nowhere", "splits/train.txt is missing")
    fails(root, root / "splits" / "test.txt", "train", split="test")
    list_names(root, "", " ", split="empty")
    fails(root, root / "splits" / "empty.txt", "lists no name", split="empty")
    list_names(root, "a", "../../home/me", split="out")
    fails(
        root,
        root / "splits" / "out.txt",
        "line 2: '../../home/me' leads out",
        split="out",
    )
    (root / "splits" / "binary.txt").write_bytes(b"\xff\xfea\x00")
    fails(root, root / "splits" / "binary.txt", "UTF-8", split="binary")
    words = {"images": "has no file", "labels": "has no file", "splits": "is missing"}
    for name, why in words.items():
        with readers.without(root / name):
            fails(root, root / name, why)
            (root / name).mkdir()
            fails(root, root / name, why)
            (root / name).rmdir()
    opened(root)


def test_names_without_files_are_named_and_counted(root: Path):
    (root / "labels" / "c.png").unlink()
    lost = [f"lost{number}" for number in range(8)]
    for names, words in (
        (lost, ("images", "lost0, lost1, lost2, lost3, lost4 and 3 more", "line 2")),
        (["c", "b"], ("labels", "for c ", "line 2")),
        (["b.png"], ("images", "for b.png ", "no ending")),
        (["nowhere/b"], ("images", "for nowhere/b ")),
    ):
        list_names(root, "a", *names)
        fails(root, root / words[0], *words[1:])


def test_names_end_with_their_line_only(
    root: Path, pixels: tuple[np.ndarray, np.ndarray]
):
    """`str.splitlines` would make the two other samples of it."""
    write(root, "a\u2028b", *pixels)
    (root / "splits" / "train.txt").write_bytes("a\u2028b\r\nc\n".encode())
    source = opened(root)
    assert len(source) == 2 and source.picture_file(0).name == "a\u2028b.png"


def test_names_and_images_that_come_twice_are_named(root: Path):
    list_names(root, "a", "b", "", "a")
    fails(root, root / "splits" / "train.txt", "line 4", "a is on line 1")
    for again in ("./a", ".//a", "x/../a"):
        list_names(root, "a", "b", again)
        fails(root, "line 3", f"{again} is on line 1")
    list_names(root, "a", "b")
    (root / "images" / "b.jpg").write_bytes((root / "images" / "b.png").read_bytes())
    fails(root, root / "images", "b.jpg and b.png")


def test_sizes_that_differ_are_explained(
    root: Path, pixels: tuple[np.ndarray, np.ndarray]
):
    for label, size in ((pixels[1][:, :39], "30 39"), (pixels[1].T.copy(), "40 30")):
        write(root, "b", pixels[0], label)
        explained(
            root, root / "labels" / "b.png", f"height, width 30 40 and not {size}"
        )


def test_labels_of_another_kind_are_explained(root: Path):
    path = root / "labels" / "b.png"
    for mode in ("RGB", "RGBA", "I;16", "1"):
        Image.new(mode, (40, 30)).save(path)
        words = (
            "has 16 bits a channel"
            if "16" in mode
            else "an 8-bit grey or a palette PNG"
        )
        explained(root, path, words)
    palette = Image.fromarray(np.full((30, 40), 9, np.uint8))
    palette.putpalette(bytes(range(30)))
    palette.save(path)
    explained(root, path, "label value 9 is no class of 0 to 4 or 255")
    Image.new("L", (40, 30)).save(path, format="JPEG")
    explained(root, path, "must be an 8-bit grey or a palette PNG")
    # A comment that puts the bytes of an 8-bit grey PNG's header where they are looked for.
    comment = (
        b"\xff\xfe" + (32).to_bytes(2, "big") + bytes(18) + b"\x08\x00" + bytes(10)
    )
    path.write_bytes(path.read_bytes()[:2] + comment + path.read_bytes()[2:])
    explained(root, path, "must be an 8-bit grey or a palette PNG")


def test_files_are_found_however_their_accents_and_endings_are_spelled(tmp_path: Path):
    """A list from one system, files from another; a name may have folders in it."""
    both = (readers.noise(0, 4, 4), np.ones((4, 4), np.uint8))
    readers.write_pairs(tmp_path, {"a.1/zoe\u0308": both, "b": both})
    (tmp_path / "splits" / "train.txt").write_text("a.1/zo\u00eb\nb\n")
    for folder in ("images", "labels"):
        (tmp_path / folder / "b.png").rename(tmp_path / folder / "b.PNG")
    assert len(readers.read_all(pairs.ImageLabelFolder(tmp_path, "train"))) == 2
