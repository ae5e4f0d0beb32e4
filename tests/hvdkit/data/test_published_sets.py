"""Sets as they are published, with their odd files: read right, or refused by name.

ImageNet's pictures are grey, CMYK and PNG here and there, all named .JPEG (its authors' and
others' lists of them: 22 CMYK files, and n02105855_2933.JPEG, a PNG).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import readers
import tensorflow as tf
from PIL import Image

from hvdkit.data.readers.cifar import Cifar
from hvdkit.data.readers.cityscapes import Cityscapes
from hvdkit.data.readers.class_folders import ClassFolders
from hvdkit.data.readers.pairs import ImageLabelFolder
from hvdkit.data.readers.voc import Voc

SIZE = (24, 16)  # width, height


def smooth() -> np.ndarray:
    """A picture that survives JPEG, uint8 [16, 24, 3]; its colours differ, so none is swapped."""
    across, down = np.meshgrid(np.linspace(0, 1, SIZE[0]), np.linspace(0, 1, SIZE[1]))
    return np.rint(np.dstack([60 + 120 * across, 200 - 90 * down, 30 + 60 * down])).astype(np.uint8)


def write_odd(folder: Path) -> dict[str, np.ndarray]:
    """Odd pictures by file name, and the colours, uint8 [16, 24, 3], that a viewer shows."""
    folder.mkdir(parents=True)
    rgb = Image.fromarray(smooth())
    grey = np.asarray(rgb.convert("L"))
    best = {"quality": 100, "subsampling": 0}
    rgb.save(folder / "usual.JPEG", **best)
    rgb.save(folder / "progressive.JPEG", progressive=True, **best)
    rgb.convert("L").save(folder / "grey.JPEG", quality=100)
    rgb.convert("CMYK").save(folder / "cmyk.JPEG", quality=100)
    rgb.save(folder / "png.JPEG", format="PNG")
    rgb.save(folder / "jpeg.png", format="JPEG", **best)
    Image.fromarray(np.dstack([smooth(), grey])).save(folder / "alpha.png")
    Image.fromarray(np.dstack([grey, grey]), "LA").save(folder / "grey_alpha.png")
    rgb.convert("P", palette=Image.Palette.ADAPTIVE, colors=256).save(folder / "palette.PNG")
    two = rgb.convert("1", dither=Image.Dither.NONE)
    two.save(folder / "two_colours.png")
    shown = {name: smooth() for name in ("usual.JPEG", "progressive.JPEG", "png.JPEG", "jpeg.png")}
    shown |= {name: smooth() for name in ("cmyk.JPEG", "alpha.png", "palette.PNG")}
    greys = np.dstack([grey] * 3)
    shown |= dict.fromkeys(("grey.JPEG", "grey_alpha.png"), greys)
    return shown | {"two_colours.png": np.asarray(two.convert("RGB"))}


def test_odd_pictures_are_read_as_a_viewer_shows_them(tmp_path: Path):
    shown = write_odd(tmp_path / "train" / "n02105855")
    source = ClassFolders(tmp_path, "train")
    samples = readers.read_all(source)
    names = [source.picture_file(index).name for index in range(len(source))]
    assert sorted(names) == sorted(shown)
    for name, sample in zip(names, samples):
        assert sample["image"].shape == (16, 24, 3) and sample["image"].dtype == np.uint8
        off = np.abs(sample["image"].astype(int) - shown[name].astype(int))
        assert off.max() <= (16 if name == "palette.PNG" else 5), (name, off.max())


def test_odd_pictures_have_labels_too(tmp_path: Path):
    shown = write_odd(tmp_path / "images")
    for name in shown:
        stem = name.split(".")[0]
        readers.save(tmp_path / "labels" / f"{stem}.png", np.zeros((16, 24), np.uint8))
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "train.txt").write_text("\n".join(n.split(".")[0] for n in shown))
    assert len(readers.read_all(ImageLabelFolder(tmp_path, "train", 2))) == len(shown)


def test_pictures_of_16_bits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of 12 bits in 16, as of X-rays and microscopes, decoders would show almost nothing."""
    path = tmp_path / "train" / "a" / "xray.png"
    path.parent.mkdir(parents=True)
    twelve = (np.arange(16 * 24, dtype=np.uint16) * 10).reshape(16, 24)
    words = ("has 16 bits a channel", "convert it to 8 bits, with the range")
    colours = tf.io.encode_png(np.dstack([twelve] * 3)).numpy()
    for content in (tf.io.encode_png(twelve[..., None]).numpy(), colours):
        path.write_bytes(content)
        readers.explained(ClassFolders(tmp_path, "train"), 0, path, *words)
    readers.save(tmp_path / "images" / "x.png", twelve)
    readers.save(tmp_path / "labels" / "x.png", np.zeros((16, 24), np.uint8))
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "train.txt").write_text("x")
    source = ImageLabelFolder(tmp_path, "train", 2)
    readers.explained(source, 0, tmp_path / "images" / "x.png", *words)


def test_vocs_border_and_palette(tmp_path: Path):
    """Labels as VOC's: its colour map, indices 0 .. 20, and 255 where an object ends."""
    readers.write_voc(tmp_path)
    label = np.arange(12 * 16, dtype=np.uint8).reshape(12, 16) % 21
    label[:2] = 255
    readers.save(tmp_path / "SegmentationClass" / "2007_000003.png", label, voc_colours())
    assert Image.open(tmp_path / "SegmentationClass" / "2007_000003.png").mode == "P"
    (sample,) = readers.read_all(Voc(tmp_path, "val"))
    np.testing.assert_array_equal(sample["label"][..., 0], label)
    # The same label as a viewer exports it: the colours, no longer the classes.
    coloured = Image.open(tmp_path / "SegmentationClass" / "2007_000003.png").convert("RGB")
    coloured.save(tmp_path / "SegmentationClass" / "2007_000003.png")
    readers.explained(Voc(tmp_path, "val"), 0, "2007_000003.png", "3 channels", "8-bit grey PNG")


def voc_colours() -> bytes:
    """VOC's colour map: the bits of an index, three at a time, from each colour's highest down."""
    colours = np.zeros((256, 3), np.uint8)
    for index in range(256):
        for bit in range(8):
            for channel in range(3):
                colours[index, channel] |= ((index >> (3 * (bit % 3) + channel)) & 1) << (7 - bit)
    return colours.tobytes()


@pytest.mark.parametrize(
    ("taken", "words"),
    [("instanceIds", ("1 channels of 16 bits",)), ("color", ("4 channels",))],
)
def test_cityscapes_other_files_are_no_labels(tmp_path: Path, taken: str, words: tuple):
    """Under a label's name, 16-bit instance ids and RGBA colours are refused, not averaged."""
    readers.write_cityscapes(tmp_path)
    start = tmp_path / "gtFine" / "val" / "lindau" / "lindau_000000_000019_gtFine"
    assert len(readers.read_all(Cityscapes(tmp_path, "val"))) == 1  # they lie beside it unread
    Path(f"{start}_{taken}.png").replace(f"{start}_labelIds.png")
    readers.explained(Cityscapes(tmp_path, "val"), 0, f"{start}_labelIds.png", *words)


def test_what_unpacking_leaves_behind_is_not_read(tmp_path: Path):
    """Resource forks of macOS' tar, thumbnails of file managers."""
    readers.write_cityscapes(tmp_path)
    city = tmp_path / "leftImg8bit" / "train" / "aachen"
    (city / "._aachen_000000_000019_leftImg8bit.png").write_bytes(b"\x00\x05\x16\x07")
    (tmp_path / "leftImg8bit" / "train" / ".DS_Store").write_bytes(b"x")
    assert len(readers.read_all(Cityscapes(tmp_path, "train"))) == 3
    readers.write_classes(tmp_path / "classes")
    (tmp_path / "classes" / "train" / "n01" / "._z.jpg").write_bytes(b"\x00\x05\x16\x07")
    (tmp_path / "classes" / "train" / "n01" / "Thumbs.db").write_bytes(b"x")
    assert len(readers.read_all(ClassFolders(tmp_path / "classes", "train"))) == 4


# Writer, classes, place of the label among a record's bytes, bytes before the pixels.
KINDS = [
    (readers.write_cifar10, "cifar-10-batches-bin", 10, 0, 1),
    (readers.write_cifar100, "cifar-100-binary", 20, 0, 2),
    (readers.write_cifar100, "cifar-100-binary", 100, 1, 2),
]


@pytest.mark.parametrize(("write", "folder", "classes", "place", "before"), KINDS)
def test_reads_all_records_of_all_files(write, folder, classes, place, before, tmp_path: Path):
    written = write(tmp_path / folder).reshape(-1, before + 3072)
    for split, records in (("train", written[:15]), ("val", written[15:])):
        source = Cifar(tmp_path, split, classes)
        assert len(source) == len(records)
        assert len(source.class_names) == source.num_classes == classes
        for sample, record in zip(readers.read_all(source), records, strict=True):
            assert sample["label"] == record[place] and sample["label"].dtype == np.int32
            # All red values come first, row by row; then green, then blue.
            planes = record[before:].reshape(3, 32, 32)
            np.testing.assert_array_equal(sample["image"], np.moveaxis(planes, 0, -1))
    assert tf.data.Dataset.range(1).map(source.read).element_spec == {
        "image": tf.TensorSpec([32, 32, 3], tf.uint8),
        "label": tf.TensorSpec([], tf.int32),
    }


def test_fingerprint_tells_contents_and_kind_of_label(tmp_path: Path):
    written = readers.write_cifar100(tmp_path)
    first = Cifar(tmp_path, "train", 100).fingerprint()
    assert Cifar(tmp_path, "train", 100).fingerprint() == first
    assert Cifar(tmp_path, "train", 20).fingerprint() != first
    written[2, 77] ^= 1
    written[:15].tofile(tmp_path / "train.bin")
    assert Cifar(tmp_path, "train", 100).fingerprint() != first


@pytest.mark.parametrize(
    ("classes", "name", "change", "words"),
    [
        (10, "data_batch_4.bin", lambda b: b[:-1], "data_batch_4.bin or the val split was cut"),
        (10, "data_batch_4.bin", lambda b: b[:-3073], "or the val split was cut"),
        (10, "test_batch.bin", lambda b: b[:-3073], "or the val split was cut"),
        (10, "data_batch_4.bin", lambda b: b"", "or the val split was cut"),
        (10, "data_batch_4.bin", None, "is missing: unpack the archive again"),
        (10, "batches.meta.txt", None, "is missing: unpack the archive again"),
        (10, "data_batch_4.bin", lambda b: b"\x0a" + b[1:], "record 0: its label is above 9"),
        (100, "train.bin", lambda b: b[:-3074], "or the val split was cut"),
        (100, "train.bin", lambda b: b"\x14" + b[1:], "record 0: its label is above 19"),
        (20, "train.bin", lambda b: b[:1] + b"\x64" + b[2:], "record 0: its label is above 99"),
    ],
)
def test_files_that_are_not_right_are_named(classes, name, change, words, tmp_path: Path):
    (readers.write_cifar10 if classes == 10 else readers.write_cifar100)(tmp_path)
    path = tmp_path / name
    if change:
        path.write_bytes(change(path.read_bytes()))
    else:
        path.unlink()
    readers.fails(lambda: Cifar(tmp_path, "train", classes), words)
    readers.fails(lambda: Cifar(tmp_path, "test", classes), "'test'", "train", "val")


@pytest.mark.parametrize("left", [0, 3072])
def test_files_that_are_all_cut_alike_are_refused(left, tmp_path: Path):
    readers.write_cifar10(tmp_path)
    for path in tmp_path.glob("*.bin"):
        path.write_bytes(path.read_bytes()[:left])
    readers.fails(lambda: Cifar(tmp_path, "val", 10), "data_batch_1.bin or the val split was cut")
