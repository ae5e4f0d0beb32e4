"""PASCAL VOC's layout for segmentation (Everingham et al., http://host.robots.ox.ac.uk/pascal/VOC).

VOC2012/JPEGImages/NAME.jpg
VOC2012/SegmentationClass/NAME.png              palette PNG: 0 background, 1..20, 255 the border
VOC2012/SegmentationClassAug/NAME.png           grey PNGs, for splits whose name ends in "aug"
VOC2012/ImageSets/Segmentation/SPLIT.txt        train, val, trainval: one NAME a line, or a pair of
                                                paths: /JPEGImages/NAME.jpg /FOLDER/NAME.png

The labels for "aug" splits (usually called trainaug: 10,582 pictures instead of 1,464) are those of
Hariharan et al. 2011, "Semantic Contours from Inverse Detectors", which others converted to ids.
Lists of them exist in both forms; a pair names its label file itself.
"""

from pathlib import Path

from hvdkit.data import shared_listing
from hvdkit.data.readers import listing
from hvdkit.data.readers.listing import Packed, packed
from hvdkit.data.readers.pairs import PicturePairs
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES

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

    def __init__(self, root: Path, split: str, _: int = 0):
        key, way_out = ("voc", str(root), split), "take VOC's own label PNG, not a changed one"
        year, *files = shared_listing.found(key, lambda: _list(Path(root), split))
        super().__init__(Path(year), files, NUM_CLASSES, way_out=way_out)


def _list(root: Path, split: str) -> tuple[str, Packed, Packed]:
    """The year's folder, pictures and labels."""
    if (root / "VOC2012").is_dir():
        root = root / "VOC2012"
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; give VOCdevkit's VOC2012")
    lists = root / "ImageSets" / "Segmentation"
    listing.check_folder(root / "JPEGImages", "pictures (VOCtrainval's JPEGImages)")
    listing.check_folder(lists, "lists of names")
    path = lists / f"{split}.txt"
    names = listing.read_names(path)
    first = next(iter(names))
    if first.startswith("/") or len(first.split()) > 1:
        return str(root), *map(packed, _pairs(root, path, names))
    folder = "SegmentationClassAug" if split.endswith("aug") else "SegmentationClass"
    listing.check_folder(root / folder, "label PNGs")
    images = listing.find(root / "JPEGImages", names, IMAGE_SUFFIXES)
    labels = listing.find(root / folder, names, (".png",))
    return str(root), packed(images), packed(labels)


def _pairs(root: Path, path: Path, lines: dict[str, int]) -> tuple[list[str], list[str]]:
    """Pictures and labels of a list of pairs, relative to root.

    Raises ValueError for a line that is no pair, a picture listed twice, and missing files.
    """
    images: list[str] = []
    labels: list[str] = []
    known: dict[str, int] = {}
    for line, number in lines.items():
        pair = [part.lstrip("/") for part in line.split()]
        if len(pair) != 2:
            raise ValueError(
                f"{path}, line {number}: {line!r} is not a picture and its label, as "
                "/JPEGImages/2007_000032.jpg /SegmentationClassAug/2007_000032.png"
            )
        listing.check_new(known, pair[0], line=number, where=path)  # pictures may share a label
        images.append(pair[0])
        labels.append(pair[1])
    for paths in (images, labels):
        listing.check_there(root, paths, lines.values(), where=path)
    return images, labels
