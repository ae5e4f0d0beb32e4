"""PASCAL VOC's layout for segmentation (Everingham et al., http://host.robots.ox.ac.uk/pascal/VOC).

VOC2012/JPEGImages/NAME.jpg
VOC2012/SegmentationClass/NAME.png              palette PNG: 0 background, 1..20, 255 the border
VOC2012/SegmentationClassAug/NAME.png           grey PNGs, for splits whose name ends in "aug"
VOC2012/ImageSets/Segmentation/SPLIT.txt        train, val, trainval: one NAME a line

The labels for "aug" splits (usually called trainaug: 10,582 pictures instead of 1,464) are those of
Hariharan et al. 2011, "Semantic Contours from Inverse Detectors", which others converted to ids.
Of a list of pairs (/JPEGImages/NAME.jpg /SegmentationClassAug/NAME.png) keep the names alone.
"""

from pathlib import Path

from hvdkit.data.readers import listing
from hvdkit.data.readers.listing import Packed, packed
from hvdkit.data.readers.pairs import PicturePairs
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES
from hvdkit.logs import join

NUM_CLASSES = 21
CLASS_NAMES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair",
    "cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa",
    "train", "tvmonitor",
)  # fmt: skip


class Voc(PicturePairs):
    """One split, as a `source.Source`; for what is read, see `PicturePairs`.

    `root` is the year's folder (VOC2012), or a folder with VOC2012 in it (VOCdevkit).
    Raises ValueError as `ImageLabelFolder` does.
    """

    class_names = CLASS_NAMES
    num_classes = NUM_CLASSES

    @staticmethod
    def listed(root: Path, split: str) -> tuple[str, Packed, Packed]:
        if (root / "VOC2012").is_dir():
            root = root / "VOC2012"
        elif not (root / "ImageSets").is_dir():
            years = sorted(root.glob("VOC20??"))
            if years:
                raise ValueError(
                    f"{root} holds {join(years)}: give the folder of one year"
                )
        names = listing.read_names(root / "ImageSets" / "Segmentation" / f"{split}.txt")
        folder = (
            "SegmentationClassAug" if split.endswith("aug") else "SegmentationClass"
        )
        images = listing.find(root / "JPEGImages", names, IMAGE_SUFFIXES)
        labels = listing.find(root / folder, names, (".png",))
        return str(root), packed(images), packed(labels)
