"""What `hvdkit start` understands of arrays: an .npz file, or .npy files in one folder.

Names say what they are (x_train and y_train, images and labels): a label's array has a word of
`_LABELS`, the other holds samples. Pictures and masks become PNG files, all else a table.
"""

import re
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from PIL import Image

from hvdkit.commands.start_tables import LABELS, Table
from hvdkit.data import arrangement
from hvdkit.data.arrangement import Item
from hvdkit.logs import join

SUFFIXES = (".npy", ".npz")
_LABELS = {*LABELS, "targets", "mask", "masks", "annotations", "segmentation"}


def understood(root: Path, folder: Path) -> tuple[list[Item], Table]:
    """Pictures, written below `folder`, with classes or masks, and {}; or rows, as of a table.

    ([], {}) where there are no arrays; ValueError where one does not say what it is.
    """
    items: list[Item] = []
    table: Table = defaultdict(list)
    for split, (samples, labels) in _pairs(root).items():
        if labels.ndim == 2 and 1 in labels.shape:
            labels = labels.reshape(-1)
        if len(samples) != len(labels):
            raise ValueError(f"{root}: {len(samples)} samples and {len(labels)} labels {split}")
        if samples.ndim == 2 and labels.ndim == 1 and np.issubdtype(samples.dtype, np.number):
            first = len(table["label"])
            for number, column in enumerate(samples.T):
                table[f"x{number}"] += map(str, column.tolist())
            table["label"] += (names := _names(root, labels))
            numbers = map(str, range(first, first + len(names)))
            items += [Item(split, n, Path(n), label) for n, label in zip(numbers, names)]
        else:
            items += _written(root, split, folder, samples=samples, labels=labels)
    if table and len({len(column) for column in table.values()}) > 1:
        raise ValueError(f"{root}: samples of training and validation have other shapes")
    return items, dict(table)


def _pairs(root: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Samples and labels by split ("": not known)."""
    found: dict[str, dict[bool, str]] = defaultdict(dict)
    arrays = _read(root)
    for name in arrays:
        words = {*re.split(r"[\W_\d]+", name.lower())}
        split = next(filter(None, map(arrangement.split_of, sorted(words))), "")
        other = found[split].setdefault(bool(words & _LABELS), name)
        if other != name:
            raise ValueError(f"{root}: which of {other} and {name} holds labels? Call it labels")
    for names in found.values():
        if len(names) < 2:
            what = "samples" if True in names else f"labels ({join(sorted(_LABELS))})"
            raise ValueError(f"{root}: no array of {what} beside {next(iter(names.values()))}")
    return {split: (arrays[of[False]], arrays[of[True]]) for split, of in found.items()}


def _read(root: Path) -> dict[str, np.ndarray]:
    found = {}
    for file in [root] if root.is_file() else sorted(root.glob("[!.]*.np[yz]")):
        try:
            read = np.load(file, mmap_mode="r", allow_pickle=False)
            one = isinstance(read, np.ndarray)
            found |= {file.stem: read} if one else {f"{file.stem} {n}": read[n] for n in read}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{file} cannot be read as numbers: {error}") from None
    return found


def _names(root: Path, labels: np.ndarray) -> list[str]:
    """Labels as text, whole numbers filled up with zeros so that they sort by size."""
    if labels.dtype.kind in "US":
        return labels.astype(str).tolist()
    if labels.dtype.kind not in "iub":
        raise ValueError(f"{root}: labels are {labels.dtype}: give whole numbers or texts")
    whole = labels.astype(int).tolist()
    width = len(str(max(whole, default=0)))
    return [f"{label:0{width}}" for label in whole]


def _written(
    root: Path, split: str, folder: Path, *, samples: np.ndarray, labels: np.ndarray
) -> list[Item]:
    """A PNG file of each picture and mask, out of the readers' sight."""
    pictures = _shades(root, samples)
    masks = labels.reshape(labels.shape[:3]) if labels.shape[3:] in ((), (1,)) else labels
    if labels.ndim > 1 and (masks.shape != pictures.shape[:3] or masks.dtype.kind not in "iub"):
        raise ValueError(f"{root}: labels of shape {labels.shape} are neither classes nor masks")
    if labels.ndim > 1 and not 0 <= masks.min() <= masks.max() <= 255:
        raise ValueError(f"{root}: masks hold {masks.min()} to {masks.max()}: 0 to 255 is read")
    items, width = [], len(str(len(pictures)))
    names = _names(root, labels) if labels.ndim == 1 else [""] * len(pictures)
    for number, (picture, label) in enumerate(zip(pictures, names)):
        name = f"{split}{number:0{width}}"
        file, mask = (folder / ".arrays" / part / f"{name}.png" for part in ("images", "masks"))
        for path, array in ((file, picture), *[(mask, masks[number])] * (not label)):
            path.parent.mkdir(parents=True, exist_ok=True)
            shown = array[..., 0] if array.shape[2:] == (1,) else array
            Image.fromarray(np.ascontiguousarray(shown, np.uint8)).save(path)
        items.append(Item(split, name, file, label, None if label else mask))
    return items


def _shades(root: Path, samples: np.ndarray) -> np.ndarray:
    """[number, height, width, 1 or 3], whole shades."""
    if samples.ndim == 4 and samples.shape[1] in (1, 3) and samples.shape[3] not in (1, 3):
        samples = samples.transpose(0, 2, 3, 1)
    samples = samples[..., None] if samples.ndim == 3 else samples
    if samples.ndim != 4 or samples.shape[3] not in (1, 3):
        raise ValueError(
            f"{root}: samples of shape {samples.shape}: pictures are [number, height, width], with "
            "1 or 3 colours last or second, rows of features [number, features]"
        )
    if samples.dtype == np.uint8:
        return samples
    most = 1 if samples.dtype.kind == "f" else 255
    if samples.dtype.kind not in "fiub" or not 0 <= samples.min() <= samples.max() <= most:
        raise ValueError(
            f"{root}: pictures are whole numbers from 0 to 255, or floats from 0 to 1; these are "
            f"{samples.dtype} from {samples.min():g} to {samples.max():g}"
        )
    return np.rint(samples * (255 / most)).astype(np.uint8)
