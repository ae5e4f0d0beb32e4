"""Folders of images and labels: a layout that most segmentation sets can be converted to.

ROOT/images/NAME.png            8-bit colour or grey pictures; .jpg and .jpeg too
ROOT/labels/NAME.png            class ids: 8-bit grey PNG, or palette PNG (the indices)
ROOT/splits/SPLIT.txt           one NAME a line; a NAME may have folders in it
"""

from pathlib import Path

from hvdkit.data import shared_listing, source
from hvdkit.data.demo.scenes import MARKER
from hvdkit.data.labels import IGNORE
from hvdkit.data.packed_strings import Names
from hvdkit.data.readers import listing
from hvdkit.data.readers.pairs import PicturePairs, listed
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES

_CONTENT = {"images": "pictures", "labels": "label PNGs", "splits": "lists"}


class ImageLabelFolder(PicturePairs):
    """One split of a folder, as a `source.Source`; for what is read, see `PicturePairs`.

    The files are listed once, here; none is opened. `is_demo` says whether data/demo/scenes.py made
    them, which its marker file shows, also in a copy.

    Raises ValueError, naming folder, file or line, when a part of the layout is missing or empty,
    a listed name lacks its image or label, or a name is listed twice.
    """

    def __init__(self, root: Path, split: str, num_classes: int, ignore_label: int = IGNORE):
        if not (1 <= num_classes <= 256 and 0 <= ignore_label <= 255):
            raise ValueError(
                f"num_classes={num_classes} and ignore_label={ignore_label}: labels have 8 bits, "
                "so give 1 to 256 classes and a label to ignore from 0 to 255"
            )
        root = Path(root)
        images, labels = shared_listing.found(
            ("folders", str(root), split), lambda: _list(root, split)
        )
        super().__init__(root, images, labels, num_classes, ignore_label)
        self.is_demo: bool = shared_listing.found(("demo", str(root)), (root / MARKER).is_file)

    def fingerprint(self) -> str:
        """That of `PicturePairs`; the demo's marker changes it."""
        files = super().fingerprint()
        return source.digest([(files, 0), (MARKER, 0)]) if self.is_demo else files


def _list(root: Path, split: str) -> tuple[Names, Names]:
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; give the one that holds images/ and labels/")
    for name, content in _CONTENT.items():
        listing.check_folder(root / name, content)
    names = listing.read_names(root / "splits" / f"{split}.txt")
    images = listing.find(root / "images", names, IMAGE_SUFFIXES)
    return listed(images, listing.find(root / "labels", names, (".png",)))
