"""Pictures as viewers show them, turned by EXIF or not, and parts of their files."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import readers
import tensorflow as tf
from PIL import Image, ImageOps

from hvdkit.data.augment import image_ops
from hvdkit.data.readers import pairs, pictures
from hvdkit.train.task import checks as task_checks

RNG = np.random.default_rng(0)
SHAPE = (61, 83)
SMOOTH = np.asarray(
    Image.fromarray(RNG.integers(0, 256, (9, 11, 3), np.uint8)).resize(SHAPE[::-1])
)

# In a graph, as tf.data has it.
whole = tf.function(
    pictures.decode_image, input_signature=[tf.TensorSpec([], tf.string)]
)
size = tf.function(pictures.size, input_signature=[tf.TensorSpec([], tf.string)])
part = tf.function(
    pictures.decode_part,
    input_signature=[tf.TensorSpec([], tf.string), tf.TensorSpec([4], tf.int32)],
)


def file(
    format: str,
    mode: str = "RGB",
    *,
    orientation: int = 0,
    order: str = ">",
    pixels: np.ndarray = SMOOTH,
    **options: object,
) -> bytes:
    """With an orientation, an EXIF of three entries; `order` of its bytes, as struct names it."""
    picture = Image.fromarray(pixels).convert(mode)
    out = io.BytesIO()
    if orientation:
        block = Image.Exif()
        block.endian = order
        block[0x010F] = "a maker of cameras"
        block[0x0112] = orientation
        block[0x0131] = "software"
        picture.save(out, format, exif=block.tobytes(), **options)
    else:
        picture.save(out, format, **options)
    return out.getvalue()


FILES = {
    "half the colours": file("JPEG"),
    "all colours": file("JPEG", subsampling=0),
    "progressive": file("JPEG", progressive=True),
    "grey": file("JPEG", "L"),
    "CMYK": file("JPEG", "CMYK"),
    "turned by EXIF": file("JPEG", orientation=6),
    "PNG": file("PNG"),
    "turned PNG": file("PNG", orientation=8),
    "WebP": file("WEBP", "RGBA", lossless=True),
    "turned WebP": file("WEBP", "RGBA", orientation=6),
}
# Colours are stored for pairs of columns: at a part's edges a neighbour is missing.
SPREAD = ("half the colours", "progressive", "CMYK")


@pytest.mark.parametrize("kind", FILES)
def test_a_part_has_the_pixels_of_the_whole(kind: str):
    data = tf.constant(FILES[kind])
    image = whole(data).numpy()
    assert image.shape[:2] == (SHAPE[::-1] if "turned" in kind else SHAPE)
    assert size(data).numpy().tolist() == list(image.shape[:2])
    for _ in range(60):
        high = int(RNG.integers(1, image.shape[0] + 1))
        wide = int(RNG.integers(1, image.shape[1] + 1))
        top = int(RNG.integers(0, image.shape[0] - high + 1))
        left = int(RNG.integers(0, image.shape[1] - wide + 1))
        cut = part(data, tf.constant([top, left, high, wide])).numpy()
        expected = image[top : top + high, left : left + wide]
        if kind in SPREAD:
            assert np.abs(cut.astype(int) - expected).max() < 64
            cut = cut[:, 1:-1]
            expected = expected[:, 1:-1]
        np.testing.assert_array_equal(cut, expected)


@pytest.mark.parametrize("reserved", [0, 0x40, 0x81])  # bits that readers must ignore
def test_an_animation_is_refused(tmp_path: Path, reserved: int):
    """It would be written beyond the memory of one picture."""
    frames = [Image.fromarray(readers.noise(seed)) for seed in range(3)]
    path = tmp_path / "moving.webp"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    data = bytearray(path.read_bytes())
    data[20] |= reserved
    path.write_bytes(data)
    with pytest.raises(tf.errors.OpError):
        whole(tf.constant(bytes(data)))
    assert pictures.refused(bytes(data)) == "is an animation: save one picture of it"


def test_where_only_a_part_is_cut_the_image_is_not_decoded():
    """Its file is cut off after the part, so that whoever decoded it would fail."""
    data = file("JPEG", quality=95)
    dataset = tf.data.Dataset.from_tensors(data[: len(data) * 2 // 3])

    def read(data: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"file": data, "image": pictures.decode_image(data)}

    def cut(data: tf.Tensor) -> tf.Tensor:
        return image_ops.cut(read(data), tf.constant([2, 3, 10, 20]))

    [part] = dataset.map(cut)
    np.testing.assert_array_equal(part, whole(tf.constant(data))[2:12, 3:23])
    with pytest.raises(tf.errors.OpError):
        list(dataset.map(lambda data: read(data)["image"]))


def test_a_file_that_is_not_the_images_is_refused():
    """Else a source that changes pictures would be trained on them as they were."""
    data = tf.constant(FILES["PNG"])
    task_checks.check_file({"image": tf.constant(SMOOTH), "file": data})
    for image in (SMOOTH ^ 1, SMOOTH[1:], SMOOTH[:, ::-1]):
        with pytest.raises(
            ValueError, match='code that changes "image" must remove "file"'
        ):
            task_checks.check_file({"image": tf.constant(image), "file": data})


def test_resized_is_rounded_and_smoothed_only_where_four_pixels_become_less_than_one():
    for side, smooth in ((40, False), (30, True)):
        expected = tf.image.resize(SMOOTH, [side, side], antialias=smooth).numpy()
        other = tf.image.resize(SMOOTH, [side, side], antialias=not smooth).numpy()
        resized = image_ops.resize(tf.constant(SMOOTH), [side, side]).numpy()
        assert (
            np.abs(resized - expected).max()
            <= 0.5 + 1e-3
            < np.abs(resized - other).max()
        )


ROWS, COLUMNS = np.mgrid[:24, :40]
# Turned, another.
RAMP = np.dstack([ROWS * 10, COLUMNS * 6, ROWS + COLUMNS]).astype(np.uint8)


def picture(orientation: int, format: str = "JPEG", order: str = ">") -> bytes:
    """With as little loss as the format has."""
    if format == "JPEG":
        return file(
            format,
            orientation=orientation,
            order=order,
            pixels=RAMP,
            subsampling=0,
            quality=100,
        )
    return file(
        format, orientation=orientation, order=order, pixels=RAMP, lossless=True
    )


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_every_orientation_as_pillow_turns_it(format):
    seen = set()
    for orientation in range(10):  # 0 and 9 mean nothing
        for order in "<>":
            data = picture(orientation, format, order)
            shown = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
            read = whole(data).numpy()
            shape = (40, 24, 3) if 5 <= orientation <= 8 else (24, 40, 3)
            assert read.shape == shown.shape == shape
            # Two decoders of JPEG round otherwise.
            assert np.abs(read.astype(int) - shown).max() <= 12, (orientation, order)
            assert pictures.orientation(data) == (
                orientation if 1 <= orientation <= 8 else 1
            )
            seen.add(read.tobytes())
    assert len(seen) == 8


def test_a_model_that_is_exported_can_turn_pictures():
    """Python stays behind: the orientation is found by operations of the graph."""
    spec = tf.TensorSpec([], tf.string)
    graph = (
        tf.function(pictures.decode_image)
        .get_concrete_function(spec)
        .graph.as_graph_def()
    )
    nodes = [*graph.node]
    for function in graph.library.function:
        nodes += function.node_def
    assert len(nodes) > 100 and not [node.name for node in nodes if "PyFunc" in node.op]


def test_segments_before_the_exif_are_passed():
    """JFIF's, a comment and a colour profile come before it in files of some programs."""
    data = picture(6)
    jfif, rest = data[2:20], data[20:]
    assert jfif[:2] == b"\xff\xe0" and rest[:2] == b"\xff\xe1"
    comment = b"\xff\xfe\x00\x09comment"
    profile = b"\xff\xe2\x10\x02" + bytes(4096)
    for before in (b"", jfif, jfif + comment + profile):
        assert pictures.orientation(data[:2] + before + rest) == 6
    # The name inside a comment begins no Exif segment.
    fake = b"\xff\xfe\x00\x12Exif\0\0II*\0\x08\0\0\0\0\0"
    assert pictures.orientation(data[:2] + fake + rest) == 6
    table = rest.index(b"\xff\xdb")
    plain = data[:20] + rest[table:]
    assert pictures.orientation(plain) == 1
    np.testing.assert_array_equal(whole(plain), pictures.decode_image(plain))


def test_an_exif_behind_a_pngs_pixels_counts():
    """As programs write it that add it to a finished file; a PNG without it is not searched."""
    turned = picture(6, "PNG")
    plain = picture(0, "PNG")
    assert plain[37:41] == b"IDAT" and plain[-8:-4] == b"IEND"
    start = turned.index(b"eXIf") - 4
    chunk = turned[start : turned.index(b"IDAT") - 4]
    behind = plain[:-12] + chunk + plain[-12:]
    assert [int(pictures.orientation(data)) for data in (plain, turned, behind)] == [
        1,
        6,
        6,
    ]


def write(
    root: Path, data: bytes, label: np.ndarray, exif: bytes = b""
) -> pairs.ImageLabelFolder:
    readers.write_pairs(root, {"a": (RAMP, label)})
    (root / "images" / "a.png").write_bytes(data)
    Image.fromarray(label).save(root / "labels" / "a.png", exif=exif)
    return pairs.ImageLabelFolder(root, "train", 5)


def test_a_label_belongs_to_the_picture_as_it_is_shown(tmp_path):
    """It lies on the turned picture; with an orientation of its own it is turned itself."""
    ids = np.random.default_rng(1).integers(0, 5, (24, 40), np.uint8)
    data = picture(8)
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    block = Image.Exif()
    block[0x0112] = 8
    stored = write(tmp_path, data, ids, exif=block.tobytes())
    shown = np.asarray(
        ImageOps.exif_transpose(Image.open(tmp_path / "labels" / "a.png"))
    )
    for source in (stored, write(tmp_path, data, shown)):
        (sample,) = readers.read_all(source)
        np.testing.assert_array_equal(sample["label"][..., 0], shown)
        assert np.abs(sample["image"].astype(int) - np.asarray(turned)).max() <= 12


def directory(
    value: int, *, order: str, place: int = 8, kind: int = 3, before: int = 1
) -> bytes:
    """An EXIF block: `place` of its directory, `kind` and entries `before` the orientation."""
    code, size = {1: ("B", 1), 3: ("H", 2), 4: ("I", 4), 7: ("B", 1), 8: ("h", 2)}[kind]
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, place)
    entries = [
        struct.pack(f"{order}HHII", 0x0100 + n, 4, 1, 2**30 + n) for n in range(before)
    ]
    entry = struct.pack(f"{order}HHI{code}", 0x0112, kind, 1, value) + bytes(4 - size)
    number = struct.pack(f"{order}H", before + 1)
    return head + bytes(place - 8) + number + b"".join(entries) + entry + bytes(4)


def jpeg_with(*segments: bytes, after: int = 20) -> bytes:
    """A JPEG with these segments behind its JFIF segment, or from another byte on."""
    plain = picture(0)
    return plain[:after] + b"".join(segments) + plain[after:]


def segment(kind: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, kind, len(content) + 2) + content


def chunk(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(name + content)
    return (
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)
    )


def png_with(part: bytes, *, behind: bool) -> bytes:
    plain = picture(0, "PNG")
    place = len(plain) - 12 if behind else 33
    return plain[:place] + part + plain[place:]


def webp_with(block: bytes) -> bytes:
    out = io.BytesIO()
    Image.fromarray(RAMP).save(
        out, "WEBP", lossless=True, exif=block, icc_profile=bytes(500)
    )
    return out.getvalue()


def placed(block: bytes) -> dict[str, bytes]:
    """Files that hold an EXIF block in places of all kinds."""
    exif = segment(0xE1, b"Exif\0\0" + block)
    profile = segment(0xE2, b"ICC_PROFILE\0\1\2" + bytes(60_000))
    comment = segment(0xFE, b"Exif\0\0II*\0\x08\0\0\0\0\0")
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="%d"/>'
    table = picture(0).index(b"\xff\xc0")
    digits = f"\nexif\n{len(block):8}\n{block.hex()}\n".encode()
    packed = b"\0" + zlib.compress(digits)
    text = b"Raw profile type exif\0"
    other = png_with(chunk(b"eXIf", directory(3, order="<")), behind=False)
    return {
        "JPEG": jpeg_with(exif),
        "JPEG, without JFIF": picture(0)[:2] + exif + picture(0)[20:],
        "JPEG, behind a profile": jpeg_with(profile, profile, exif),
        "JPEG, behind a comment that looks like one": jpeg_with(comment, exif),
        "JPEG, behind a table": jpeg_with(exif, after=table),
        "JPEG, in two segments": jpeg_with(
            segment(0xE1, b"Exif\0\0" + block[:20]),
            segment(0xE1, b"Exif\0\0" + block[20:]),
        ),
        "JPEG, named twice": jpeg_with(segment(0xE1, b"Exif\0\0Exif\0\0" + block)),
        "JPEG, filled": jpeg_with(b"\xff\xff" + exif),
        "JPEG, and XMP": jpeg_with(segment(0xE1, xmp % 3), exif),
        "JPEG, XMP alone": jpeg_with(segment(0xE1, xmp % 8)),
        "PNG": png_with(chunk(b"eXIf", block), behind=False),
        "PNG, behind its pixels": png_with(chunk(b"eXIf", block), behind=True),
        "PNG, twice": other[:-12] + chunk(b"eXIf", block) + picture(0, "PNG")[-12:],
        "PNG, behind a profile": png_with(
            chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(20_000), 0))
            + chunk(b"eXIf", block),
            behind=False,
        ),
        "PNG, as text": png_with(chunk(b"tEXt", text + digits), behind=False),
        "PNG, as packed text": png_with(chunk(b"zTXt", text + packed), behind=True),
        "WebP": webp_with(block),
        "WebP, named": webp_with(b"Exif\0\0" + block),
    }


def as_pillow(data: bytes) -> np.ndarray:
    """As Pillow shows it; as stored where it finds the block broken."""
    stored = Image.open(io.BytesIO(data))
    try:
        return np.asarray(ImageOps.exif_transpose(stored).convert("RGB"))
    except (SyntaxError, struct.error):
        return np.asarray(stored.convert("RGB"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of broken blocks
@pytest.mark.parametrize("where", placed(directory(6, order="<")))
def test_an_orientation_is_found_wherever_pillow_finds_it(where):
    """Wherever it lies, in either order, in whatever form."""
    usual = directory(6, order="<")
    odd_place = directory(6, order="<", place=9)
    blocks = [
        directory(8, order="<", before=40),
        directory(300, order=">"),
        b"XX" + usual[2:],
        usual[:4] + b"\xff" * 4 + usual[8:],
    ]
    for order in "<>":
        blocks += [directory(6, order=order, place=place) for place in (8, 9, 70)]
        blocks += [directory(5, order=order, kind=kind) for kind in (1, 4, 7, 8)]
    for end in (4, 12, 24, 32, 36):
        blocks += [usual[:end], odd_place[:end]]
    for block in blocks:
        data = placed(block)[where]
        read = whole(data).numpy()
        shown = as_pillow(data)
        assert read.shape == shown.shape, (where, block)
        assert np.abs(read.astype(int) - shown).max() <= 12, (where, block)
