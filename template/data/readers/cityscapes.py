"""Cityscapes' layout (Cordts et al. 2016, arXiv:1604.01685), fine annotations.

ROOT/leftImg8bit/SPLIT/CITY/NAME_leftImg8bit.png
ROOT/gtFine/SPLIT/CITY/NAME_gtFine_labelIds.png         SPLIT: train or val
"""

import os
from pathlib import Path

import numpy as np

from data.labels import IGNORE
from data.readers import listing
from data.readers.pairs import PicturePairs
from engine.words import some

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

_IMAGE, _LABEL = "_leftImg8bit.png", "_gtFine_labelIds.png"


class Cityscapes(PicturePairs):
    """One split, as a `source.Source`, labels as train ids; see `PicturePairs` for what is read.

    Raises ValueError, naming folder and files, when a part of the layout is missing or empty, or
    a picture or a label lacks the other.
    """

    def __init__(self, root: Path, split: str):
        root = Path(root)
        if not root.is_dir():
            raise ValueError(f"{root} is not a folder; give the one of leftImg8bit/ and gtFine/")
        images = _names(root / "leftImg8bit", split, _IMAGE)
        labels = _names(root / "gtFine", split, _LABEL)
        for ending, lack in ((_LABEL, images - labels), (_IMAGE, labels - images)):
            if lack:
                raise ValueError(
                    f"{root}, split {split}: no *{ending} for {some(sorted(lack))}; "
                    "unpack both archives (leftImg8bit_trainvaltest, gtFine_trainvaltest) whole"
                )
        names = sorted(images)
        super().__init__(
            root,
            [f"leftImg8bit/{split}/{name}{_IMAGE}" for name in names],
            [f"gtFine/{split}/{name}{_LABEL}" for name in names],
            NUM_CLASSES,
            IGNORE,
            table=train_ids(),
            way_out=f"these files hold ids 0..{LAST_ID}; take the original labelIds (a 255 in "
            "them says that they were made train ids already)",
        )


def train_ids() -> np.ndarray:
    """The train id of each value in a labelIds file, uint8 [256]; 254 for values that are none."""
    table = np.full(256, _UNKNOWN, np.uint8)
    table[: LAST_ID + 1] = IGNORE
    table[list(IDS)] = np.arange(NUM_CLASSES)
    return table


def _names(folder: Path, split: str, ending: str) -> set[str]:
    """CITY/NAME of all files of the split with this ending."""
    listing.check_folder(folder, f"splits ({split}/CITY/*{ending})")
    if not (folder / split).is_dir():
        there = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        raise ValueError(
            f"{folder / split} is missing; unpack it there, or choose another split (there are: "
            f"{some(there) or 'none'})"
        )
    cities = sorted(entry.name for entry in (folder / split).iterdir() if entry.is_dir())
    names = {
        f"{city}/{entry.removesuffix(ending)}"
        for city in cities
        for entry in os.listdir(folder / split / city)
        if entry.endswith(ending)
    }
    if not names:
        raise ValueError(f"{folder / split} has no CITY/*{ending}; unpack the archive there again")
    return names
