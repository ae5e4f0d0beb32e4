"""Sets as published, with odd files (ImageNet's grey, CMYK and PNG ones): read, or refused."""

from pathlib import Path

import numpy as np
import pytest
import readers
import tensorflow as tf
from PIL import Image
from refusals import refused

from hvdkit.data.open import doubt, reader_of
from hvdkit.data.prepare import check, pack
from hvdkit.data.readers import voc as voc_reader
from hvdkit.data.readers.cifar import Cifar100
from hvdkit.data.readers.cityscapes import CLASS_NAMES, NUM_CLASSES, Cityscapes
from hvdkit.data.readers.class_folders import ClassFolders
from hvdkit.data.readers.pairs import ImageLabelFolder
from hvdkit.data.readers.voc import Voc
from hvdkit.data.source import Source

# Ids and train ids as the authors' table pairs them, written down a second time and by name.
TRAIN_IDS = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole",
    19: "traffic light", 20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky",
    24: "person", 25: "rider", 26: "car", 27: "truck", 28: "bus", 31: "train", 32: "motorcycle",
    33: "bicycle",
}  # fmt: skip
SIZE = (24, 16)  # width, height


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    readers.write_voc(tmp_path / "VOC2012")
    return tmp_path / "VOC2012"


@pytest.fixture
def city(tmp_path: Path) -> Path:
    readers.write_cityscapes(tmp_path / "cityscapes")
    return tmp_path / "cityscapes"


def smooth() -> np.ndarray:
    """A picture that survives JPEG, uint8 [16, 24, 3]; its colours differ, so none is swapped."""
    across, down = np.meshgrid(np.linspace(0, 1, SIZE[0]), np.linspace(0, 1, SIZE[1]))
    return np.rint(
        np.dstack([60 + 120 * across, 200 - 90 * down, 30 + 60 * down])
    ).astype(np.uint8)


def write_odd(folder: Path) -> dict[str, np.ndarray]:
    """Odd pictures by file name, and the colours, uint8 [16, 24, 3], that a viewer shows."""
    folder.mkdir(parents=True)
    rgb = Image.fromarray(smooth())
    grey = np.asarray(rgb.convert("L"))
    rgb.save(folder / "usual.JPEG", quality=100, subsampling=0)
    rgb.save(folder / "progressive.JPEG", progressive=True, quality=100, subsampling=0)
    rgb.convert("L").save(folder / "grey.JPEG", quality=100)
    rgb.convert("CMYK").save(folder / "cmyk.JPEG", quality=100)
    rgb.save(folder / "png.JPEG", format="PNG")
    rgb.save(folder / "jpeg.png", format="JPEG", quality=100, subsampling=0)
    Image.fromarray(np.dstack([smooth(), grey])).save(folder / "alpha.png")
    Image.fromarray(np.dstack([grey, grey]), "LA").save(folder / "grey_alpha.png")
    rgb.convert("P", palette=Image.Palette.ADAPTIVE, colors=256).save(
        folder / "palette.PNG"
    )
    two = rgb.convert("1", dither=Image.Dither.NONE)
    two.save(folder / "two_colours.png")
    shown = dict.fromkeys((file.name for file in folder.iterdir()), smooth())
    shown["grey.JPEG"] = np.dstack([grey] * 3)
    shown["grey_alpha.png"] = shown["grey.JPEG"]
    shown["two_colours.png"] = np.asarray(two.convert("RGB"))
    return shown


def test_odd_pictures_are_read_as_a_viewer_shows_them(tmp_path: Path):
    shown = write_odd(tmp_path / "train" / "n02105855")
    source = ClassFolders(tmp_path, "train")
    samples = readers.read_all(source)
    names = [source.picture_file(index).name for index in range(len(source))]
    assert sorted(names) == sorted(shown)
    for name, sample in zip(names, samples):
        assert (
            sample["image"].shape == (16, 24, 3) and sample["image"].dtype == np.uint8
        )
        off = np.abs(sample["image"].astype(int) - shown[name].astype(int))
        assert off.max() <= (16 if name == "palette.PNG" else 5), (name, off.max())


def test_pictures_of_16_bits_are_refused(tmp_path: Path):
    """Of 12 bits in 16, as of X-rays and microscopes, decoders would show almost nothing."""

    def is_explained(source: Source, path: Path) -> None:
        readers.explained(source, 0, path, "16 bits a channel", "convert it to 8 bits")

    path = tmp_path / "train" / "a" / "xray.png"
    path.parent.mkdir(parents=True)
    grey = (np.arange(16 * 24, dtype=np.uint16) * 10).reshape(16, 24, 1)
    colours = np.dstack([grey] * 3)
    for pixels in (grey, colours):
        path.write_bytes(tf.io.encode_png(pixels).numpy())
        is_explained(ClassFolders(tmp_path, "train"), path)
    readers.write_pairs(tmp_path, {"x": (grey[..., 0], np.zeros((16, 24), np.uint8))})
    is_explained(ImageLabelFolder(tmp_path, "train", 2), tmp_path / "images" / "x.png")


def test_four_colours_that_do_not_say_how_are_refused(tmp_path: Path):
    """Without Adobe's segment some decoders invert them."""
    path = tmp_path / "train" / "a" / "print.jpg"
    path.parent.mkdir(parents=True)
    Image.fromarray(smooth()).convert("CMYK").save(path)
    whole = path.read_bytes()
    source = ClassFolders(tmp_path, "train")
    assert len(readers.read_all(source)) == 1
    segment = whole.index(b"Adobe") - 4
    path.write_bytes(whole[:segment] + whole[segment + 16 :])
    readers.explained(
        source, 0, path, "is a JPEG of four colours without Adobe's", "as RGB"
    )


def test_reads_pictures_and_palette_indices_in_the_order_of_the_list(voc: Path):
    assert len(voc_reader.CLASS_NAMES) == voc_reader.NUM_CLASSES == 21
    samples = readers.read_all(Voc(voc, "train"))
    for sample, number in zip(samples, (2, 0, 1), strict=True):
        assert sample["image"].shape == (12, 16, 3) and sample["label"].shape == (
            12,
            16,
            1,
        )
        assert (sample["label"][0] == 255).all() and (
            sample["label"][1, :3] == 20
        ).all()
        assert (sample["label"][2:] == number).all()
        # Noise does not survive JPEG, but two pictures of it stay far from each other.
        off = np.abs(sample["image"].astype(int) - readers.noise(number)).mean()
        assert (
            off < np.abs(sample["image"].astype(int) - readers.noise(number + 1)).mean()
        )
    assert len(Voc(voc, "val")) == 1
    other = voc / "devkit"
    (other / "VOC2007").mkdir(parents=True)
    refused(lambda: Voc(other, "train"), "VOC2007: give the folder of one year")
    assert Voc(voc.parent, "train").fingerprint() == Voc(voc, "train").fingerprint()
    assert Voc(voc, "val").fingerprint() != Voc(voc, "train").fingerprint()


def test_augmented_labels_belong_to_aug_splits(voc: Path):
    lists = voc / "ImageSets" / "Segmentation"
    (lists / "trainaug.txt").write_text("2007_000003\n2007_000001\n")
    refused(lambda: Voc(voc, "trainaug"), voc / "SegmentationClassAug", "has no file")
    for number, value in ((3, 7), (1, 8)):
        path = voc / "SegmentationClassAug" / f"2007_00{number:04d}.png"
        readers.save(path, np.full((12, 16), value, np.uint8))
    labels = [sample["label"] for sample in readers.read_all(Voc(voc, "trainaug"))]
    assert (labels[0] == 7).all() and (labels[1] == 8).all()


def test_labels_become_train_ids(city: Path):
    assert NUM_CLASSES == len(CLASS_NAMES) == 19
    sample = readers.read_all(Cityscapes(city, "val"))[0]
    expected = readers.noise(len("val/lindau/lindau_000000_000019"))
    np.testing.assert_array_equal(sample["image"], expected)
    ids = np.arange(12 * 16).reshape(12, 16) % 34
    for value in range(34):
        expected = CLASS_NAMES.index(TRAIN_IDS[value]) if value in TRAIN_IDS else 255
        assert (sample["label"][ids == value] == expected).all(), value
    assert sample["label"].dtype == np.uint8 and sample["label"].shape == (12, 16, 1)


def test_order_is_by_city_and_name(city: Path):
    # Resource forks of macOS' tar and files of file managers are not read.
    folder = city / "leftImg8bit" / "train"
    (folder / "aachen" / "._aachen_000000_000019_leftImg8bit.png").write_bytes(
        b"\x00\x05\x16\x07"
    )
    (folder / ".DS_Store").write_bytes(b"x")
    source = Cityscapes(city, "train")
    names = [source.picture_file(index).name.split("_left")[0] for index in range(3)]
    assert names == [
        "aachen_000000_000019",
        "aachen_000001_000019",
        "bochum_000000_000313",
    ]
    assert len(readers.read_all(source)) == 3
    assert source.fingerprint() != Cityscapes(city, "val").fingerprint()


def test_missing_parts_of_cityscapes_are_named(city: Path):
    refused(lambda: Cityscapes(city / "gone", "val"), city / "gone", "leftImg8bit/")
    missing = city / "leftImg8bit" / "val"
    with readers.without(missing):
        refused(lambda: Cityscapes(city, "val"), missing, "unpack the archive")
    name = "aachen/aachen_000001_000019"
    for part, ending in (
        ("leftImg8bit", "_leftImg8bit.png"),
        ("gtFine", "_gtFine_labelIds.png"),
    ):
        with readers.without(city / part / "train" / f"{name}{ending}"):
            refused(
                lambda: Cityscapes(city, "train"), city, f"no *{ending} for {name};"
            )
        with readers.without(city / part):
            refused(
                lambda: Cityscapes(city, "train"), city / part, "unpack the archive"
            )
    refused(
        lambda: Cityscapes(city, "test"), "no labels of split 'test'", "train or val"
    )


def test_unknown_ids_are_explained(city: Path):
    source = Cityscapes(city, "train")
    path = city / "gtFine/train/aachen/aachen_000001_000019_gtFine_labelIds.png"
    for value, word in ((34, "value 34"), (255, "already train ids")):
        label = np.full((12, 16), 7, np.uint8)
        label[3, 4] = value
        readers.save(path, label)
        readers.explained(source, 1, path, word, "0 to 33")
    assert source.explain(0) is None


@pytest.mark.parametrize("values", [19, 20])  # 20 has a value for ignored pixels
def test_train_ids_in_the_place_of_ids_are_refused(city: Path, values: int):
    ids = np.arange(12 * 16, dtype=np.uint8).reshape(12, 16) % values
    for path in (city / "gtFine" / "val").rglob("*_labelIds.png"):
        readers.save(path, ids)

    def faults_of(split: str) -> list[str]:
        faults: list[str] = []
        check.Checker(city, "cityscapes", tell=faults.append).check(split)
        return faults

    assert not faults_of("train") and not doubt(Cityscapes(city, "train"))
    [fault] = faults_of("val")
    for message in (fault, doubt(Cityscapes(city, "val"))):
        assert "no label id above 19" in message and "train ids already" in message
    words = [
        "hvdkit pack",
        "--from=cityscapes",
        f"--root={city}",
        f"--out={city}/packed",
    ]
    assert pack.main([*words, "--split=train"]) == 0
    with pytest.raises(SystemExit) as ended:
        pack.main([*words, "--split=val"])
    assert ended.value.code == 2 and not (city / "packed" / "val").exists()


PAIR = readers.noise(0), readers.noise(1)[..., 0]


@pytest.mark.parametrize(
    ("layout", "write", "path", "index"),
    [
        ("voc", readers.write_voc, "JPEGImages/2007_000000.jpg", 1),
        ("class_folders", readers.write_classes, "train/n02/a.png", 1),
        ("folders", lambda root: readers.write_pairs(root, dict.fromkeys("abc", PAIR)),
         "labels/b.png", 1),
    ],
)  # fmt: skip
def test_broken_files_are_explained(
    tmp_path: Path, layout: str, write, path: str, index: int
):
    write(tmp_path)
    source = reader_of(layout)(tmp_path, "train", 256)
    file = tmp_path / path
    whole = file.read_bytes()
    place = len(whole) // 2
    changed = whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :]
    for content, words in (
        (whole[: len(whole) // 2], "cannot be decoded"),
        (changed, ""),
        # Pillow reads it without its end, TensorFlow does not.
        (whole[:-12], "cannot be read"),
        (b"", "zero bytes"),
        (b"<html>No such page</html> and more of it", "no PNG, JPEG or WebP"),
        (None, ""),
    ):
        if file.suffix == ".jpg" and content in (changed, whole[:-12]):
            continue  # decoders make a picture of these
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        readers.explained(source, index, file, words)
    assert [source.explain(n) for n in range(3) if n != index] == [None] * 2


# Bytes of a record before its pixels; the last of them is the label.
KINDS = [
    ("cifar10", "cifar-10-batches-bin", 10, 1),
    ("cifar100", "cifar-100-binary", 100, 2),
]


@pytest.mark.parametrize(("layout", "folder", "classes", "before"), KINDS)
def test_reads_all_records_of_all_files(
    layout, folder, classes, before, tmp_path: Path
):
    write = readers.write_cifar10 if layout == "cifar10" else readers.write_cifar100
    written = write(tmp_path / folder).reshape(-1, before + 3072)
    for split, records in (("train", written[:15]), ("val", written[15:])):
        source = reader_of(layout)(tmp_path, split, classes)
        assert len(source) == len(records)
        assert len(source.class_names) == source.num_classes == classes
        for sample, record in zip(readers.read_all(source), records, strict=True):
            assert (
                sample["label"] == record[before - 1]
                and sample["label"].dtype == np.int32
            )
            # All red values come first, row by row; then green, then blue.
            planes = record[before:].reshape(3, 32, 32)
            np.testing.assert_array_equal(sample["image"], np.moveaxis(planes, 0, -1))
    assert tf.data.Dataset.range(1).map(source.read).element_spec == {
        "image": tf.TensorSpec([32, 32, 3], tf.uint8),
        "label": tf.TensorSpec([], tf.int32),
    }


def test_fingerprint_tells_contents(tmp_path: Path):
    written = readers.write_cifar100(tmp_path)
    first = Cifar100(tmp_path, "train").fingerprint()
    assert Cifar100(tmp_path, "train").fingerprint() == first
    written[2, 77] ^= 1
    written[:15].tofile(tmp_path / "train.bin")
    assert Cifar100(tmp_path, "train").fingerprint() != first


@pytest.mark.parametrize(
    ("classes", "name", "change", "words"),
    [
        (
            10,
            "data_batch_4.bin",
            lambda b: b[:-1],
            "data_batch_4.bin or the val split was cut",
        ),
        (10, "test_batch.bin", lambda b: b[:-3073], "or the val split was cut"),
        (10, "*.bin", lambda b: b[:3072], "data_batch_1.bin or the val split was cut"),
        (10, "data_batch_4.bin", None, "is missing: unpack the archive again"),
        (10, "batches.meta.txt", None, "is missing: unpack the archive again"),
        (
            10,
            "data_batch_4.bin",
            lambda b: b"\x0a" + b[1:],
            "record 0: its label is above 9",
        ),
        (
            100,
            "train.bin",
            lambda b: b[:1] + b"\x64" + b[2:],
            "record 0: its label is above 99",
        ),
    ],
)
def test_files_that_are_not_right_are_named(
    classes, name, change, words, tmp_path: Path
):
    write = readers.write_cifar10 if classes == 10 else readers.write_cifar100
    write(tmp_path)
    for path in tmp_path.glob(name):
        if change:
            path.write_bytes(change(path.read_bytes()))
        else:
            path.unlink()
    reader = reader_of(f"cifar{classes}")
    refused(lambda: reader(tmp_path, "train", 0), words)
    refused(lambda: reader(tmp_path, "test", 0), "'test'", "train", "val")
