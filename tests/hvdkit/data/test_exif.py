"""Pictures are turned by their EXIF orientation as Pillow turns them, and labels with them."""

import io
from pathlib import Path

import numpy as np
import pytest
import readers
import tensorflow as tf
from PIL import Image, ImageOps

from hvdkit.data.readers import exif, pairs, pictures

ROWS, COLUMNS = np.mgrid[:24, :40]
SMOOTH = np.dstack([ROWS * 10, COLUMNS * 6, ROWS + COLUMNS]).astype(np.uint8)  # turned, another

# In a graph, as tf.data has it.
graph = {"input_signature": [tf.TensorSpec([], tf.string)], "autograph": False}
decode, found = tf.function(pictures.decode_image, **graph), tf.function(exif._found, **graph)


def picture(orientation: int, format: str = "JPEG", order: str = ">", **also) -> bytes:
    """A file of SMOOTH with an EXIF of three entries; `order` of its bytes, as struct names it."""
    block, file = Image.Exif(), io.BytesIO()
    block.endian = order
    block[0x010F], block[0x0112], block[0x0131] = "a maker of cameras", orientation, "software"
    kind = {"subsampling": 0, "quality": 100} if format == "JPEG" else {}
    Image.fromarray(SMOOTH).save(file, format, exif=block.tobytes(), **kind, **also)
    return file.getvalue()


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_every_orientation_as_pillow_turns_it(format):
    seen = set()
    for orientation in range(10):  # 0 and 9 mean nothing
        for order in "<>":
            data = picture(orientation, format, order)
            shown = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
            read = decode(data).numpy()
            assert read.shape == shown.shape == ((40, 24, 3) if 5 <= orientation <= 8
                                                 else (24, 40, 3))  # fmt: skip
            # Two decoders of JPEG round otherwise.
            assert np.abs(read.astype(int) - shown).max() <= 12, (orientation, order)
            assert exif.orientation(data) == (orientation if 1 <= orientation <= 8 else 1)
            seen.add(read.tobytes())
    assert len(seen) == 8


def test_segments_before_the_exif_are_passed():
    """JFIF's, a comment and a colour profile come before it in files of some programs."""
    data = picture(6)
    jfif, rest = data[2:20], data[20:]
    assert jfif[:2] == b"\xff\xe0" and rest[:2] == b"\xff\xe1"
    for before in (
        b"",
        jfif,
        jfif + b"\xff\xfe\x00\x09comment" + b"\xff\xe2\x10\x02" + bytes(4096),
    ):
        assert exif.orientation(data[:2] + before + rest) == 6
    # It is looked for in the first 16 KiB: 10 bytes of heads come before its 6-byte name.
    for size, found in ((2**14 - 16, 6), (2**14 - 15, 1)):
        comment = b"\xff\xfe" + (size + 2).to_bytes(2, "big") + bytes(size)
        assert exif.orientation(data[:2] + comment + rest) == found, size
    # The name inside a comment begins no Exif segment.
    fake = b"\xff\xfe\x00\x12Exif\0\0II*\0\x08\0\0\0\0\0"
    assert exif.orientation(data[:2] + fake + rest) == 6
    table = rest.index(b"\xff\xdb")
    plain = data[:20] + rest[table:]
    assert exif.orientation(plain) == 1
    np.testing.assert_array_equal(decode(plain), pictures.decode_image(plain))


def test_what_cannot_be_understood_counts_as_none():
    """Cut and changed headers: an orientation or none, and never an error of the parser's."""
    rng, seen = np.random.default_rng(0), set()
    for whole in (picture(6), picture(6, "PNG")):
        for _ in range(100):
            data = bytearray(whole[: rng.integers(0, 250)])
            for place in rng.integers(0, 250, rng.integers(0, 5)):
                data[place : place + 1] = rng.bytes(1)
            seen.add(int(found(bytes(data))))
    assert {1, 6} <= seen <= set(range(1, 9))


def write(root: Path, data: bytes, label: np.ndarray, **also) -> pairs.ImageLabelFolder:
    for folder in ("images", "labels", "splits"):
        (root / folder).mkdir(exist_ok=True)
    (root / "images" / "a.jpg").write_bytes(data)
    Image.fromarray(label).save(root / "labels" / "a.png", **also)
    (root / "splits" / "train.txt").write_text("a\n")
    return pairs.ImageLabelFolder(root, "train", 5)


def test_a_label_belongs_to_the_picture_as_it_is_shown(tmp_path):
    """It lies on the turned picture; with an orientation of its own it is turned itself."""
    ids = np.random.default_rng(1).integers(0, 5, (24, 40), np.uint8)
    for orientation in (8,):
        data = picture(orientation)
        turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        block = Image.Exif()
        block[0x0112] = orientation
        stored = write(tmp_path, data, ids, exif=block.tobytes())
        shown = np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / "labels" / "a.png")))
        for source in (stored, write(tmp_path, data, shown)):
            (sample,) = readers.read_all(source)
            np.testing.assert_array_equal(sample["label"][..., 0], shown)
            assert np.abs(sample["image"].astype(int) - np.asarray(turned)).max() <= 12


def test_a_label_that_fits_the_stored_picture_alone_is_refused(tmp_path):
    source = write(tmp_path, picture(6), np.zeros((24, 40), np.uint8))
    words = (
        "a.png fits",
        "a.jpg as it is stored, 40x24",
        "orientation 6",
        "24x40",
        "turn the label",
    )
    readers.explained(source, 0, *words)
    source = write(tmp_path, picture(6), np.zeros((24, 24), np.uint8))
    readers.explained(source, 0, "a.jpg is 24x40", "a.png is 24x24", "make them one size")
