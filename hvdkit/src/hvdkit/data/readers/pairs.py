"""Pairs of a picture and a label PNG: common to the readers of segmentation sets.

A reader lists the files (ImageLabelFolder here, voc.py, cityscapes.py), `PicturePairs` reads and
explains them.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf
from PIL import Image

from hvdkit.data import shared_listing, source
from hvdkit.data.labels import IGNORE
from hvdkit.data.pipeline import reason_of
from hvdkit.data.readers import listing, pictures
from hvdkit.data.readers.listing import Names, Packed, packed
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES
from hvdkit.data.scenes import MARKER
from hvdkit.logs import join


class PicturePairs:
    """Listed files as a `source.Source`.

    Reads to {"image": uint8 [H, W, 3], "label": uint8 [H, W, 1], "file": the picture's bytes}.
    Label values are below `num_classes`, or IGNORE. No file is opened here. Pictures are turned by
    their EXIF orientation; labels belong to the turned picture, as viewers show it.

    `files`: paths of the pictures and of their labels, relative to root; labels are 8-bit grey or
    palette PNGs. A reader lists them in `shared_listing.found`, on rank 0. `table`: uint8 [256],
    the class of each value in the files; None if the values are classes. An invalid value maps to a
    class that is neither below `num_classes` nor IGNORE. `way_out`: how to fix a value that is no
    class.
    """

    kind = "map"

    def __init__(
        self,
        root: Path,
        files: Sequence[Packed],
        num_classes: int,
        *,
        table: np.ndarray | None = None,
        way_out: str = "map the values, or raise num_classes",
    ):
        self.root, self.num_classes = root, num_classes
        self._images, self._labels = (Names(*names) for names in files)
        self._table, self._way_out = table, way_out
        self._folder = os.fsencode(os.path.join(root, ""))
        names = str(root), self._images.digest(), self._labels.digest()
        self._sizes = listing.sizes(names, self._looked_at)

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        """Raises tf.errors.InvalidArgumentError (when it runs) for a file that cannot be decoded,
        sizes that differ, and label values that are no class; `explain` says which and why.
        """
        image_path = tf.strings.join([self._folder, self._images.at(index)])
        label_path = tf.strings.join([self._folder, self._labels.at(index)])
        file = tf.io.read_file(image_path)
        label = pictures.decode_label(tf.io.read_file(label_path), label_path)
        sizes = pictures.size(file), tf.shape(label)[:2]
        pictures.require(tf.reduce_all(sizes[0] == sizes[1]), "sizes differ", image_path, *sizes)
        if self._table is not None:
            label = tf.gather(tf.constant(self._table), tf.cast(label, tf.int32))
        if self.num_classes < 256:
            known = (label < self.num_classes) | (label == IGNORE)
            pictures.require(tf.reduce_all(known), "a label value is no class", label_path)
        return {"image": pictures.decode_image(file), "label": label, "file": file}

    def explain(self, index: int) -> str | None:
        image_path, label_path = self.picture_file(index), self.root / self._labels[index]
        try:
            image = pictures.load(image_path)
            label = pictures.load(label_path, deep=True)  # check_label_kind explains more
            pictures.check_label_kind(label_path, label)
            _check_sizes({image_path: image, label_path: label})
            self._check_values(label_path, np.asarray(label))
            self.read(tf.constant(index, tf.int64))
        except ValueError as problem:
            return str(problem)
        except tf.errors.OpError as error:  # unknown to the checks above: TensorFlow's words
            return f"{image_path} or {label_path} cannot be read: {reason_of(error)}; replace it"
        return None

    def picture_file(self, index: int) -> Path:
        return self.root / self._images[index]

    def sample_names(self) -> Iterator[bytes]:
        """Each picture's path."""
        return iter(self._images)

    def shared_with(self, other: "PicturePairs") -> int:
        """How many pictures are in both splits."""
        found = {*other._images}.intersection(self._images)
        return len(found) if self.root == other.root else 0

    def fingerprint(self) -> str:
        """SHA-256 over the files' names, and the sizes of at most 1,000 pairs spread over them."""
        names = [(names.digest(), 0) for names in (self._images, self._labels)]
        return source.digest([*names, (str(self._sizes.tolist()), 0)])

    def _looked_at(self) -> list[Path]:
        indices = source.sampled(len(self))
        names = [*self._images.pick(indices), *self._labels.pick(indices)]
        return [self.root / name for name in names]

    def _check_values(self, path: Path, label: np.ndarray) -> None:
        ids = label if self._table is None else self._table[label]
        wrong = (ids >= self.num_classes) & (ids != IGNORE)
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            values = np.unique(label[wrong]).tolist()
            raise ValueError(
                f"{path}: label value {label[row, column]} at row {row}, column {column} is no "
                f"class ({np.count_nonzero(wrong)} such pixels, values {join(values)}); "
                f"classes are 0..{self.num_classes - 1} and {IGNORE} is ignored: {self._way_out}"
            )


def _check_sizes(pair: dict[Path, Image.Image]) -> None:
    """Raises ValueError if a picture and its label have different sizes when both are turned."""
    sizes = {}
    for path, picture in pair.items():
        turned = pictures.swaps(pictures.orientation(path.read_bytes()))
        sizes[path] = "{}x{}".format(*(picture.size[::-1] if turned else picture.size))
    (image_path, shown), (label_path, there) = sizes.items()
    if shown == there:
        return
    if there == "{}x{}".format(*pair[image_path].size):
        raise ValueError(
            f"{label_path} fits {image_path} as it is stored, {there}; its EXIF orientation turns "
            f"that picture to {shown}, as viewers show it: turn the label too, or remove the "
            "orientation from all pictures of the set"
        )
    raise ValueError(
        f"{image_path} is {shown} and {label_path} is {there} (width x height); make them one size "
        "(labels without interpolation)"
    )


class ImageLabelFolder(PicturePairs):
    """One split of a layout that most segmentation sets can be converted to, as a `source.Source`.

    ROOT/images/NAME.png            8-bit colour or grey pictures; .jpg, .jpeg and .webp too
    ROOT/labels/NAME.png            class ids: 8-bit grey PNG, or palette PNG (the indices)
    ROOT/splits/SPLIT.txt           one NAME a line; a NAME may have folders in it

    The files are listed once, here; none is opened. `is_demo` says whether data/scenes.py made
    them, which its marker file shows, also in a copy.

    Raises ValueError, naming folder, file or line, when a part of the layout is missing or empty,
    a listed name lacks its image or label, or a name is listed twice.
    """

    def __init__(self, root: Path, split: str, num_classes: int = 0):
        root = Path(root)
        files = shared_listing.found(("folders", str(root), split), lambda: _list(root, split))
        super().__init__(root, files, num_classes or 256)
        self.is_demo: bool = shared_listing.found(("demo", str(root)), (root / MARKER).is_file)

    def fingerprint(self) -> str:
        """That of `PicturePairs`; the demo's marker changes it."""
        files = super().fingerprint()
        return source.digest([(files, 0), (MARKER, 0)]) if self.is_demo else files


def _list(root: Path, split: str) -> tuple[Packed, Packed]:
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; give the one that holds images/ and labels/")
    for name, content in (("images", "pictures"), ("labels", "label PNGs"), ("splits", "lists")):
        listing.check_folder(root / name, content)
    names = listing.read_names(root / "splits" / f"{split}.txt")
    images = listing.find(root / "images", names, IMAGE_SUFFIXES)
    return packed(images), packed(listing.find(root / "labels", names, (".png",)))
