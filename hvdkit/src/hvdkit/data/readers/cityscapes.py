"""Cityscapes' layout (Cordts et al. 2016, arXiv:1604.01685).

ROOT/leftImg8bit/SPLIT/CITY/NAME_leftImg8bit.png
ROOT/gtFine/SPLIT/CITY/NAME_gtFine_labelIds.png         SPLIT: train or val

The instance ids (16 bits), colours and polygons beside them are not read. Labels of test were
never published.
"""

from pathlib import Path

import numpy as np
import tensorflow as tf

from hvdkit.data.labels import IGNORE
from hvdkit.data.readers import listing, pictures
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
_CLASSES_TO_19 = 7  # how many of these ids are at most 19, as all train ids are
LAST_ID = 33  # the other ids from 0 on (ego vehicle, parking, caravan, ...) are ignored

_IMAGE = "_leftImg8bit.png"
_LABEL = "_gtFine_labelIds.png"


class Cityscapes(PicturePairs):
    """One split, as a `source.Source`, labels as train ids; see `PicturePairs` for what is read.

    Raises ValueError, naming folder and files, when there is no such split with labels, a part of
    the layout is missing or empty, or a picture or a label lacks the other.
    """

    class_names = CLASS_NAMES
    num_classes = NUM_CLASSES

    @staticmethod
    def listed(root: Path, split: str) -> tuple[str, Packed, Packed]:
        # The label files of test hold nothing to learn.
        if split not in ("train", "val"):
            raise ValueError(
                f"Cityscapes has no labels of split {split!r}: choose train or val"
            )
        images = _names(root / "leftImg8bit" / split, _IMAGE)
        labels = _names(root / "gtFine" / split, _LABEL)
        for ending, unpaired in ((_LABEL, images - labels), (_IMAGE, labels - images)):
            if unpaired:
                raise ValueError(
                    f"{root}, split {split}: no *{ending} for {join(sorted(unpaired))}; unpack the "
                    "archives of leftImg8bit and gtFine that have this split whole"
                )
        names = sorted(images)
        image_paths = [f"leftImg8bit/{split}/{name}{_IMAGE}" for name in names]
        label_paths = [f"gtFine/{split}/{name}{_LABEL}" for name in names]
        return str(root), packed(image_paths), packed(label_paths)

    @staticmethod
    def doubt(counts: np.ndarray) -> str:
        """Why label pictures with so many pixels of each class are none of ids; "" for others."""
        if counts[_CLASSES_TO_19:NUM_CLASSES].any() or not counts.any():
            return ""
        return (
            f"*{_LABEL} hold no label id above 19 (no vegetation, sky or car), so they may be "
            "train ids already: take the original labelIds"
        )

    def classes_of(self, label: tf.Tensor) -> tf.Tensor:
        highest = tf.reduce_max(label)
        pictures.require(
            highest <= LAST_ID,
            "label value",
            highest,
            f"is no id of 0 to {LAST_ID}: take the original labelIds (255: already train ids)",
        )
        train_ids = np.full(256, IGNORE, np.uint8)
        train_ids[list(IDS)] = np.arange(NUM_CLASSES)
        return tf.gather(tf.constant(train_ids), tf.cast(label, tf.int32))


def _names(folder: Path, ending: str) -> set[str]:
    """CITY/NAME of all files of a split's folder with this ending."""
    names: set[str] = set()
    for city in listing.folder_names(folder) if folder.is_dir() else ():
        files, _ = listing.names_and_rest(folder / city, (ending.lower(),))
        names.update(f"{city}/{file[: -len(ending)]}" for file in files)
    if not names:
        raise ValueError(f"{folder} has no CITY/*{ending}; unpack the archive there")
    return names
