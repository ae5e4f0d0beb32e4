"""PASCAL VOC's layout for segmentation (Everingham et al., http://host.robots.ox.ac.uk/pascal/VOC).

VOC2012/JPEGImages/NAME.jpg
VOC2012/SegmentationClass/NAME.png              palette PNG: 0 background, 1..20, 255 the border
VOC2012/SegmentationClassAug/NAME.png           grey PNGs, for splits whose name ends in "aug"
VOC2012/ImageSets/Segmentation/SPLIT.txt        train, val, trainval: one NAME a line

The labels for "aug" splits (usually called trainaug: 10,582 pictures instead of 1,464) are those of
Hariharan et al. 2011, "Semantic Contours from Inverse Detectors", which others converted to ids.
"""

from pathlib import Path

from data.readers import listing
from data.readers.pairs import PicturePairs
from data.readers.pictures import IMAGE_SUFFIXES

NUM_CLASSES = 21
CLASS_NAMES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair",
    "cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa",
    "train", "tvmonitor",
)  # fmt: skip


class Voc(PicturePairs):
    """One split, as a `source.Source`; what is read is said in `PicturePairs`.

    `root` is the year's folder (VOC2012), or a folder with VOC2012 in it (VOCdevkit).
    Raises ValueError as `ImageLabelFolder` does.
    """

    def __init__(self, root: Path, split: str):
        root = Path(root)
        if (root / "VOC2012").is_dir():
            root = root / "VOC2012"
        if not root.is_dir():
            raise ValueError(f"{root} is not a folder; give VOCdevkit's VOC2012")
        folder = "SegmentationClassAug" if split.endswith("aug") else "SegmentationClass"
        listing.check_folder(root / "JPEGImages", "pictures (VOCtrainval's JPEGImages)")
        listing.check_folder(root / folder, "label PNGs")
        listing.check_folder(root / "ImageSets" / "Segmentation", "lists of names")
        names = listing.read_names(root / "ImageSets" / "Segmentation" / f"{split}.txt")
        images = listing.find(root / "JPEGImages", names, IMAGE_SUFFIXES)
        labels = listing.find(root / folder, names, (".png",))
        super().__init__(
            root, images, labels, NUM_CLASSES, way_out="take VOC's own label PNG, not a changed one"
        )
