"""Parts of files: the pixels of the whole picture, and of a JPEG no more than them decoded."""

import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from hvdkit.data import image_ops
from hvdkit.data.readers import pictures
from hvdkit.train import task_checks

RNG = np.random.default_rng(0)
SHAPE = (61, 83)
SMOOTH = np.asarray(Image.fromarray(RNG.integers(0, 256, (9, 11, 3), np.uint8)).resize(SHAPE[::-1]))

# In a graph, as tf.data has it.
whole = tf.function(pictures.decode_image, input_signature=[tf.TensorSpec([], tf.string)])
size = tf.function(pictures.size, input_signature=[tf.TensorSpec([], tf.string)])
part = tf.function(
    pictures.decode_part,
    input_signature=[tf.TensorSpec([], tf.string), tf.TensorSpec([4], tf.int32)],
)


def file(format: str, mode: str = "RGB", orientation: int = 0, **how) -> bytes:
    out = io.BytesIO()
    if orientation:
        block = Image.Exif()
        block[0x0112] = orientation
        how["exif"] = block.tobytes()
    Image.fromarray(SMOOTH).convert(mode).save(out, format, **how)
    return out.getvalue()


FILES = {
    "half the colours": file("JPEG"),
    "half of them in rows only": file("JPEG", subsampling=1),
    "all colours": file("JPEG", subsampling=0),
    "progressive": file("JPEG", progressive=True),
    "grey": file("JPEG", "L"),
    "CMYK": file("JPEG", "CMYK"),
    "upright by EXIF": file("JPEG", orientation=1),
    "turned by EXIF": file("JPEG", orientation=6),
    "PNG": file("PNG"),
    "palette": file("PNG", "P"),
    "turned PNG": file("PNG", orientation=8),
    "BMP": file("BMP"),
}
# Colours are stored for pairs of columns: at a part's edges a neighbour is missing.
SPREAD = ("half the colours", "half of them in rows only", "progressive", "CMYK", "upright by EXIF")


@pytest.mark.parametrize("kind", FILES)
def test_a_part_has_the_pixels_of_the_whole(kind: str):
    data = tf.constant(FILES[kind])
    image = whole(data).numpy()
    assert image.shape[:2] == (SHAPE[::-1] if "turned" in kind else SHAPE)
    assert size(data).numpy().tolist() == list(image.shape[:2])
    for _ in range(60):
        high, wide = (int(RNG.integers(1, length + 1)) for length in image.shape[:2])
        top = int(RNG.integers(0, image.shape[0] - high + 1))
        left = int(RNG.integers(0, image.shape[1] - wide + 1))
        found = part(data, tf.constant([top, left, high, wide])).numpy()
        expected = image[top : top + high, left : left + wide]
        if kind in SPREAD:
            assert np.abs(found.astype(int) - expected).max() < 64
            found, expected = found[:, 1:-1], expected[:, 1:-1]
        np.testing.assert_array_equal(found, expected)


def test_where_only_a_part_is_cut_the_image_is_not_decoded():
    """Its file is cut off after the part, so that whoever decoded it would fail."""
    data = file("JPEG", quality=95)
    dataset = tf.data.Dataset.from_tensors(data[: len(data) * 2 // 3])

    def read(data: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"file": data, "image": pictures.decode_image(data)}

    def cut(data: tf.Tensor) -> tf.Tensor:
        return image_ops.cut(read(data), tf.constant([2, 3, 10, 20]))

    [found] = dataset.map(cut)
    np.testing.assert_array_equal(found, whole(tf.constant(data))[2:12, 3:23])
    with pytest.raises(tf.errors.OpError):
        list(dataset.map(lambda data: read(data)["image"]))


def test_without_a_file_the_image_is_cut():
    sample = {"image": tf.constant(SMOOTH)}
    assert image_ops.size(sample).numpy().tolist() == list(SHAPE)
    np.testing.assert_array_equal(image_ops.cut(sample, [5, 7, 20, 30]), SMOOTH[5:25, 7:37])


def test_a_file_that_is_not_the_images_is_refused():
    """Else a source that changes pictures would be trained on them as they were."""
    data = tf.constant(FILES["PNG"])
    task_checks.check_file({"image": tf.constant(SMOOTH), "file": data})
    for image in (SMOOTH ^ 1, SMOOTH[1:], SMOOTH[:, ::-1]):
        with pytest.raises(ValueError, match='code that changes "image" must remove "file"'):
            task_checks.check_file({"image": tf.constant(image), "file": data})


def test_resized_is_rounded_and_smoothed_only_where_four_pixels_become_less_than_one():
    for side, smooth in ((40, False), (30, True)):
        expected = tf.image.resize(SMOOTH, [side, side], antialias=smooth).numpy()
        other = tf.image.resize(SMOOTH, [side, side], antialias=not smooth).numpy()
        found = image_ops.resize(tf.constant(SMOOTH), [side, side]).numpy()
        assert np.abs(found - expected).max() <= 0.5 + 1e-3 < np.abs(found - other).max()


def test_mirrored():
    for turn in (False, True):
        found = image_ops.mirrored(tf.constant(SMOOTH), tf.constant(turn))
        np.testing.assert_array_equal(found, SMOOTH[:, ::-1] if turn else SMOOTH)


def test_what_only_begins_like_a_label_at_two_bytes_is_refused():
    """Depth 8 and colour grey where a PNG has them, in a file that is none."""
    data = b"x" * 24 + bytes([8, 0]) + b"x" * 40
    with pytest.raises(tf.errors.InvalidArgumentError, match="8-bit grey or a palette PNG"):
        pictures.decode_label(tf.constant(data), tf.constant("a.png"))
