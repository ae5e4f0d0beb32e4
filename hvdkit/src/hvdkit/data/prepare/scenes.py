"""The demo data set: scanned handwritten digits on photographs, to be segmented.

It is made where it is first needed from data/shipped: scans of handwritten digits and two
photographs. Training and validation share neither a scan nor a pixel of a photograph. The layout is
that of readers/pairs.py. Pixels depend on the settings only; bytes also on the version of Pillow.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageFilter

from hvdkit import logs
from hvdkit.data import shipped
from hvdkit.data.labels import IGNORE
from hvdkit.data.readers.pairs import MARKER

# Each split has its own columns of both photographs, 640 wide, and its own digits, shipped.ROWS.
COLUMNS = {"train": range(480), "val": range(480, 640)}

Place = tuple[slice, slice]  # rows, columns
_INK = 0.45  # share of full ink above which a pixel belongs to the digit
_TRIES = 30  # a digit for which so many tries find no place is left out
# Range of the contrast of digit and background; 1 is black on white.
_CONTRAST = (0.3, 0.7)
_OVERLAP = 0.1  # a later digit may cover this share of a digit


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a demo set is made of; equal settings make equal pixels."""

    train: int = 6000  # scenes
    val: int = 400  # scenes
    size: int = 64  # pixels, height and width
    # Fewest and most in a scene (fewer where no room is found).
    digits: tuple[int, int] = (2, 5)
    # Pixels, side of the square that a scan is scaled to.
    box: tuple[int, int] = (18, 32)
    seed: int = 0


class Scene(NamedTuple):
    """One sample, and what it was made from."""

    image: np.ndarray  # uint8 [size, size, 3]
    label: np.ndarray  # uint8 [size, size], class ids and IGNORE
    scans: tuple[int, ...]  # rows of shipped.digits
    # Number of the photograph; left column, top row and side of the crop.
    photo: tuple[int, int, int, int]


def scene(settings: Settings, split: str, index: int) -> Scene:
    """Draws one scene; it depends on (seed, split, index), not on the number of scenes."""
    rng = np.random.default_rng([settings.seed, list(COLUMNS).index(split), index])
    canvas, photo = _background(rng, settings.size, COLUMNS[split])
    label = np.zeros((settings.size, settings.size), np.uint8)
    owner = np.zeros_like(label)  # 1 + which digit a pixel shows, 0 for none
    used = []
    for _ in range(rng.integers(*settings.digits, endpoint=True)):
        scan = int(rng.choice(shipped.ROWS[split]))
        ink, digit, ring = _shape(scan, int(rng.integers(*settings.box, endpoint=True)))
        place = _free_place(rng, owner, digit | ring)
        if place is None:
            continue
        used.append(scan)
        class_id = shipped.digits()[1][scan] + 1
        label[place] = np.where(digit, class_id, np.where(ring, IGNORE, label[place]))
        owner[place] = np.where(digit, len(used), np.where(ring, 0, owner[place]))
        _paint(rng, canvas[place], ink)
    return Scene(np.rint(canvas * 255).astype(np.uint8), label, tuple(used), photo)


def ensure_demo(root: Path, settings: Settings = Settings()) -> None:
    """Makes the set in `root`, whole or not at all, unless it holds a finished one.

    Several processes may call it at once: each writes its own folder, the first to finish renames
    its folder to `root`, and the others remove theirs. ValueError if `root` holds anything else.
    """
    if (root / MARKER).is_file():
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    # It is made beside `root`: only a rename inside one file system is atomic.
    with tempfile.TemporaryDirectory(
        dir=root.parent, prefix=f".{root.name}.making-"
    ) as scratch:
        work = Path(scratch, "set")
        for folder in ("images", "labels", "splits"):
            (work / folder).mkdir(parents=True)
        for split in COLUMNS:
            _write_split(work, split, settings)
        (work / MARKER).write_text(
            json.dumps(dataclasses.asdict(settings), indent=2) + "\n"
        )
        try:
            work.rename(root)  # this fails where `root` holds anything
        except OSError as error:
            if not (root / MARKER).is_file():
                raise ValueError(
                    f"{root} cannot become a demo set ({error.strerror}): give another folder, or "
                    "remove this one"
                ) from None


def _background(
    rng: np.random.Generator, size: int, columns: range
) -> tuple[np.ndarray, tuple[int, int, int, int]]:
    """A crop of a photograph, float32 [size, size, 3] in [0, 1], and where it was taken."""
    which = int(rng.integers(len(shipped.photographs())))
    photo = shipped.photographs()[which]
    largest = min(2 * size, photo.height, len(COLUMNS["val"]))
    side = int(rng.integers(min(size, largest), largest, endpoint=True))
    left = int(rng.integers(columns.start, columns.stop - side, endpoint=True))
    top = int(rng.integers(photo.height - side, endpoint=True))
    # The crop comes before resizing, whose filter must not read columns of the other split.
    crop = photo.crop((left, top, left + side, top + side))
    pixels = (
        np.array(crop.resize((size, size), Image.Resampling.BILINEAR), np.float32) / 255
    )
    if rng.random() < 0.5:
        pixels = pixels[:, ::-1].copy()
    return pixels, (which, left, top, side)


def _shape(scan: int, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A scan scaled up: shares of ink [side, side], masks of the digit and of a ring around it."""
    picture = Image.fromarray((shipped.digits()[0][scan] / 16).astype(np.float32))
    ink = np.asarray(picture.resize((side - 2, side - 2), Image.Resampling.BICUBIC))
    ink = np.pad(np.clip(ink, 0, 1), 1)
    digit = ink >= _INK
    near = Image.fromarray(digit.astype(np.uint8)).filter(ImageFilter.MaxFilter(3))
    return ink, digit, np.asarray(near) > digit


def _free_place(
    rng: np.random.Generator, owner: np.ndarray, covers: np.ndarray
) -> Place | None:
    """Rows and columns where a digit hides little of earlier ones; None if none is found."""
    areas = np.bincount(owner.ravel())[1:]
    side = len(covers)
    for _ in range(_TRIES):
        top, left = rng.integers(len(owner) - side, size=2, endpoint=True)
        place = slice(top, top + side), slice(left, left + side)
        hidden = np.bincount(owner[place][covers], minlength=len(areas) + 1)[1:]
        if (hidden <= _OVERLAP * areas).all():
            return place
    return None


def _paint(rng: np.random.Generator, patch: np.ndarray, ink: np.ndarray) -> None:
    """Lays ink on `patch` (float32 [H, W, 3] in [0, 1], in place), darker or brighter than it."""
    contrast = float(rng.uniform(*_CONTRAST))
    under = float(patch[ink >= _INK].mean())
    rooms = {-1: under, 1: 1 - under}
    fitting = [sign for sign, room in rooms.items() if room >= contrast]
    sign = int(rng.choice(fitting)) if fitting else max(rooms, key=rooms.__getitem__)
    colour = np.clip(under + sign * contrast + rng.uniform(-0.12, 0.12, size=3), 0, 1)
    # Opaque inside the mask, transparent at the outer edge of the ignored ring.
    alpha = np.clip((ink - 0.2) / (_INK - 0.2), 0, 1)[..., None]
    patch += alpha * (colour - patch)


def _write_split(work: Path, split: str, settings: Settings) -> None:
    names = [f"{split}-{index:05d}" for index in range(getattr(settings, split))]
    for index, name in enumerate(names):
        drawn = scene(settings, split, index)
        for folder, pixels in (("images", drawn.image), ("labels", drawn.label)):
            # Level 1 is four times as fast as the default, with files little larger.
            Image.fromarray(pixels).save(
                work / folder / f"{name}.png", compress_level=1
            )
        logs.progress(f"demo scenes, {split}", index + 1, len(names))
    (work / "splits" / f"{split}.txt").write_text(
        "".join(f"{name}\n" for name in names)
    )
