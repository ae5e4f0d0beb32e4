"""Pairs of a picture and a label PNG: common to the readers of segmentation sets.

A reader lists the files (ImageLabelFolder here, voc.py, cityscapes.py), `PicturePairs` reads and
explains them.
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from hvdkit.data import contents, shared_listing, source
from hvdkit.data.readers import listing, pictures
from hvdkit.data.readers.listing import Names, Packed, packed

# The demo's set has this file. It is written last: without it the set is not finished.
MARKER = "scenes.json"

_PALETTES = 32  # so many labels have theirs compared


class PicturePairs:
    """Listed files as a `source.Source`.

    Reads to {"image": uint8 [H, W, 3], "label": uint8 [H, W, 1], "file": the picture's bytes}.
    Label values are below `num_classes`, or IGNORE. No file is opened here. Pictures are turned by
    their EXIF orientation; labels belong to the turned picture, as viewers show it. They are 8-bit
    grey or palette PNGs.
    """

    kind = "map"
    num_classes: int

    def __init__(self, root: Path, split: str, _: int = 0):
        key = (type(self).__name__, str(root), split)
        folder, images, labels = shared_listing.found(
            key, lambda: self.listed(Path(root), split)
        )
        self.root = Path(folder)
        self._images = Names(*images)
        self._labels = Names(*labels)
        self._folder = os.fsencode(os.path.join(folder, ""))
        self._sizes = listing.sizes(key, self._sampled_files)
        self.contents = contents.known(self.root, split)

    @staticmethod
    def listed(root: Path, split: str) -> tuple[str, Packed, Packed]:
        """The folder, and the paths of pictures and labels in it; called on rank 0."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: tf.Tensor) -> source.Parts:
        """Raises tf.errors.InvalidArgumentError (when it runs) for a file that cannot be decoded,
        sizes that differ, and label values that are no class; `explain` names the files.
        """
        image_path = tf.strings.join([self._folder, self._images.at(index)])
        label_path = tf.strings.join([self._folder, self._labels.at(index)])
        file = tf.io.read_file(image_path)
        label = pictures.decode_label(tf.io.read_file(label_path))
        size = pictures.size(file)
        label_size = tf.shape(label)[:2]
        pictures.require(
            tf.reduce_all(size == label_size),
            "the label must be as large as the picture is shown (turned by EXIF), height, width",
            size,
            "and not",
            label_size,
        )
        image = pictures.decode_image(file)
        return {"image": image, "label": self.classes_of(label), "file": file}

    def classes_of(self, label: tf.Tensor) -> tf.Tensor:
        """The class of each value of a label file, or IGNORE: uint8 [H, W, 1]."""
        if self.num_classes < 256:
            pictures.require_classes(label, self.num_classes)
        return label

    def explain(self, index: int) -> str | None:
        return pictures.explained(
            self.read, index, self.picture_file(index), self.label_file(index)
        )

    def picture_file(self, index: int) -> Path:
        return self.root / self._images[index]

    def doubt_of_palettes(self) -> str:
        """Why the indices of some palette labels, spread over all, are no class ids; or ""."""
        places = range(0, len(self), max(1, len(self) // _PALETTES))
        return pictures.doubt_of_palettes(self.label_file(place) for place in places)

    def label_file(self, index: int) -> Path:
        return self.root / self._labels[index]

    def sample_names(self) -> Iterator[bytes]:
        """Each picture's path."""
        return iter(self._images)

    picture_files = sample_names

    def files(self) -> Iterator[bytes]:
        """Each file's path."""
        return itertools.chain(self._images, self._labels)

    def shared_with(self, other: "PicturePairs") -> int:
        """How many pictures are in both splits."""
        if self.root != other.root:
            return 0
        return len(set(other._images).intersection(self._images))

    def fingerprint(self) -> str:
        """SHA-256 over the files' names, and the sizes of at most 1,000 pairs spread over them."""
        parts = (
            self._images.digest(),
            self._labels.digest(),
            str(self._sizes.tolist()),
        )
        return source.digest((part, 0) for part in parts)

    def _sampled_files(self) -> list[Path]:
        indices = source.sampled(len(self))
        names = [*self._images.pick(indices), *self._labels.pick(indices)]
        return [self.root / name for name in names]


class ImageLabelFolder(PicturePairs):
    """One split of a layout that most segmentation sets can be converted to, as a `source.Source`.

    ROOT/images/NAME.png            8-bit colour or grey pictures; .jpg, .jpeg and .webp too
    ROOT/labels/NAME.png            class ids: 8-bit grey PNG, or palette PNG (the indices)
    ROOT/splits/SPLIT.txt           one NAME a line; a NAME may have folders in it

    `is_demo` says whether the set is the demo's, which its marker file shows, also in a copy.

    Raises ValueError, naming folder, file or line, when a part of the layout is missing or empty,
    a listed name lacks its image or label, or a name is listed twice.
    """

    def __init__(self, root: Path, split: str, num_classes: int = 0):
        self.num_classes = num_classes or 256
        super().__init__(root, split)
        self.is_demo: bool = shared_listing.found(
            ("demo", str(root)), (self.root / MARKER).is_file
        )

    @staticmethod
    def listed(root: Path, split: str) -> tuple[str, Packed, Packed]:
        names = listing.read_names(root / "splits" / f"{split}.txt")
        images = listing.find(root / "images", names, pictures.IMAGE_SUFFIXES)
        labels = listing.find(root / "labels", names, (".png",))
        return str(root), packed(images), packed(labels)

    def fingerprint(self) -> str:
        """That of `PicturePairs`; the demo's marker changes it."""
        files = super().fingerprint()
        return source.digest([(files, 0), (MARKER, 0)]) if self.is_demo else files
