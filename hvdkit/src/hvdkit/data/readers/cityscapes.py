"""Cityscapes' layout (Cordts et al. 2016, arXiv:1604.01685).

ROOT/leftImg8bit/SPLIT/CITY/NAME_leftImg8bit.png
ROOT/gtFine/SPLIT/CITY/NAME_gtFine_labelIds.png         SPLIT: train or val, fine annotations
ROOT/gtCoarse/SPLIT/CITY/NAME_gtCoarse_labelIds.png     SPLIT: train_extra, which has only coarse

The instance ids (16 bits), colours and polygons beside them are not read. Labels of test were
never published.
"""

from pathlib import Path

import numpy as np

from hvdkit.data import shared_listing
from hvdkit.data.labels import IGNORE
from hvdkit.data.readers import listing
from hvdkit.data.readers.listing import Packed, packed
from hvdkit.data.readers.pairs import PicturePairs
from hvdkit.logs import join

CLASS_NAMES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign",
    "vegetation", "terrain", "sky", "person", "rider", "car", "truck", "bus", "train",
    "motorcycle", "bicycle",
)  # fmt: skip
NUM_CLASSES = len(CLASS_NAMES)
# The id in labelIds files of each train id, from the authors' own table: cityscapesScripts,
# cityscapesscripts/helpers/labels.py (github.com/mcordts/cityscapesScripts), columns id, trainId.
IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
LAST_ID = 33  # the others from 0 on (ego vehicle, parking, caravan, ...) are ignored
_UNKNOWN = 254  # an id that the table does not have

SPLITS = ("train", "val", "train_extra")
_IMAGE = "_leftImg8bit.png"


class Cityscapes(PicturePairs):
    """One split, as a `source.Source`, labels as train ids; see `PicturePairs` for what is read.

    Raises ValueError, naming folder and files, when there is no such split with labels, a part of
    the layout is missing or empty, or a picture or a label lacks the other.
    """

    class_names = CLASS_NAMES

    def __init__(self, root: Path, split: str, _: int = 0):
        root = Path(root)
        files = shared_listing.found(("cityscapes", str(root), split), lambda: _list(root, split))
        way_out = f"these files hold ids 0..{LAST_ID}; take the original labelIds (a 255 in them "
        way_out += "says that they were made train ids already)"
        super().__init__(root, files, NUM_CLASSES, table=train_ids(), way_out=way_out)


def train_ids() -> np.ndarray:
    """The train id of each value in a labelIds file, uint8 [256]; 254 for invalid values."""
    table = np.full(256, _UNKNOWN, np.uint8)
    table[: LAST_ID + 1] = IGNORE
    table[list(IDS)] = np.arange(NUM_CLASSES)
    return table


def _list(root: Path, split: str) -> tuple[Packed, Packed]:
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; give the one with leftImg8bit/ and gtFine/")
    if split not in SPLITS:
        why = f"there is no split {split!r}"
        if split == "test":
            why = "labels of test were never published, so it can neither train nor score"
        raise ValueError(f"Cityscapes, {root}: {why}; choose one of {', '.join(SPLITS)}")
    kind = "gtCoarse" if split == "train_extra" else "gtFine"
    ending = f"_{kind}_labelIds.png"
    images, labels = _names(root / "leftImg8bit", split, _IMAGE), _names(root / kind, split, ending)
    for lacking, lack in ((ending, images - labels), (_IMAGE, labels - images)):
        if lack:
            raise ValueError(
                f"{root}, split {split}: no *{lacking} for {join(sorted(lack))}; unpack the "
                f"archives of leftImg8bit and {kind} that have this split whole"
            )
    names = sorted(images)
    return (
        packed(f"leftImg8bit/{split}/{name}{_IMAGE}" for name in names),
        packed(f"{kind}/{split}/{name}{ending}" for name in names),
    )


def _names(folder: Path, split: str, ending: str) -> set[str]:
    """CITY/NAME of all files of the split with this ending."""
    listing.check_folder(folder, f"splits ({split}/CITY/*{ending})")
    if not (folder / split).is_dir():
        there = [name for name in listing.folder_names(folder) if name in SPLITS]
        raise ValueError(
            f"{folder / split} is missing; unpack it there, or choose another split (there are: "
            f"{join(there) or 'none'})"
        )
    names = {
        f"{city}/{entry[: -len(ending)]}"
        for city in listing.folder_names(folder / split)
        for entry in listing.contents(folder / split / city, (ending.lower(),))[0]
    }
    if not names:
        raise ValueError(f"{folder / split} has no CITY/*{ending}; unpack the archive there again")
    return names
