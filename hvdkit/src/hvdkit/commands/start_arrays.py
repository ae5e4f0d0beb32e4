"""What `hvdkit start` understands of arrays: an .npz file, or .npy and .npz files of a folder.

Names say what they are: x_train and y_train, images and labels, trainX. What has no word of
`_LABELS` or `_SAMPLES` is not read, unless it is all there is beside labels. Pictures and masks
become PNG files, rows of features a table.
"""

import re
import zipfile
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
from PIL import Image

from hvdkit.commands.start_tables import LABELS, Table, checked
from hvdkit.data import arrangement, tables
from hvdkit.data.arrangement import Item
from hvdkit.logs import join, printable

SUFFIXES = (".npy", ".npz")
_LABELS = {*LABELS, "targets", "mask", "masks", "gt", "seg", "segmentation", "annotations"}
_SAMPLES = {"x", "image", "images", "img", "imgs", "picture", "pictures", "data", "samples"}
_SAMPLES |= {"features", "inputs"}
_DARK = 64  # the brightest shade of pictures that somebody may have meant otherwise
_FAULTS = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)


def files(root: Path) -> list[Path]:
    """Those of a folder and of the folders in it."""
    found = [*root.glob("[!.]*"), *root.glob("[!.]*/[!.]*")] if root.is_dir() else []
    return sorted(file for file in found if file.suffix.lower() in SUFFIXES)


def understood(root: Path, folder: Path) -> tuple[list[Item], Table]:
    """Pictures, written below `folder`, with classes or masks, and {}; or rows, as of a table.

    ([], {}) where there are no arrays; ValueError where one does not say what it is.
    """
    if root.suffix.lower() == ".npy":
        raise ValueError(f"{root}: give the folder in which its labels are too")
    found = _pairs(root)
    if len({labels.shape[1:] for _, labels in found.values() if labels.ndim == 2}) > 1:
        raise ValueError(f"{root}: labels of its splits have other widths: give one width to all")
    pairs = {split: _pair(root, *both) for split, both in found.items()}
    classes = {split: labels for split, (_, labels) in pairs.items() if labels.ndim == 1}
    rows = {split for split in classes if pairs[split][0].ndim == 2}
    if len({*map(len, (pairs, rows or pairs, classes or pairs))}) > 1:
        raise ValueError(f"{root}: its splits are not of one kind (pictures, masks, rows)")
    names = _names(root, classes)
    items: list[Item] = []
    table: Table = defaultdict(list)
    for split, (samples, labels) in pairs.items():
        if not rows:
            shown = _shades(root, samples)
            labels = names.get(split) or _masks(root, shown, labels)
            items += _written(split, folder, pictures=shown, labels=labels)
            continue
        if samples.dtype.kind not in "fiub" or np.isinf(samples).any():
            raise ValueError(f"{root}: features are finite numbers; these are {samples.dtype}")
        numbers = map(str, range(len(table["label"]), len(table["label"]) + len(labels)))
        items += [Item(split, n, Path(n), label) for n, label in zip(numbers, names[split])]
        for number, column in enumerate(samples.T):
            table[f"x{number}"] += map(str, column.tolist())
        table["label"] += names[split]
    if len({len(column) for column in table.values()}) > 1:
        raise ValueError(f"{root}: samples of training and validation have other shapes")
    return items, dict(table)


def _pairs(root: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Samples and labels by split ("": not known); says what is not read."""
    arrays, unread = _read(root), []
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in arrays:
        parted = re.sub(r"(?i)^([xy])(?=train|val|test)", r"\1_", name)
        words = [w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", parted)]
        split = next(filter(None, map(arrangement.split_of, words)), "")
        label = bool({*words} & _LABELS) and not {*words} & {"name", "names"}
        role = "labels" if label else "samples" if {*words} & _SAMPLES else f"others {name}"
        other = found[split].setdefault(role, name)
        if other != name:
            raise ValueError(f"{root}: which of {other} and {name} are the {role}?")
    for split, of in [*found.items()]:
        others = [name for role, name in of.items() if role.startswith("others")]
        if "samples" not in of and "labels" in of and len(others) == 1:
            of["samples"] = others.pop()
        unread += others
        if "labels" not in of and (split == "test" or "samples" not in of):
            unread += [of["samples"]] if "samples" in of else []
            del found[split]
        elif lacks := [role for role in ("samples", "labels") if role not in of]:
            words = sorted(_LABELS if lacks == ["labels"] else _SAMPLES)
            beside = f" beside {next(iter(of.values()))}; it is known by a word of its name"
            raise ValueError(f"{root}: no array of {lacks[0]}{beside}: {join(words, 99)}")
    if found and unread:
        print(printable(f"  not read: {join(unread)}"))
    return {split: (arrays[of["samples"]], arrays[of["labels"]]) for split, of in found.items()}


def _read(root: Path) -> dict[str, np.ndarray]:
    """All arrays by their name, with those of file and folder where there are several."""
    found, there = {}, [root] if root.is_file() else files(root)
    for file in there:
        own = " ".join(file.relative_to(root).with_suffix("").parts) if root.is_dir() else ""
        try:
            read = np.load(file, mmap_mode="r", allow_pickle=False)
            if isinstance(read, np.ndarray):
                found[own] = read
                continue
            arrays = {name: read[name] for name in read}
        except _FAULTS as error:
            why = "objects or text" if "allow_pickle" in str(error) else error
            raise ValueError(f"{file} cannot be read as numbers: {why}") from None
        prefix = f"{own} " if len(there) > 1 else ""
        found |= {prefix + n: x for n, x in arrays.items() if isinstance(x, np.ndarray)}
    return {name: array for name, array in found.items() if array.ndim}


def _pair(root: Path, samples: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """With labels [number] or [number, height, width], whole numbers or text."""
    if labels.dtype.kind == "f" and np.isfinite(labels).all() and (labels == np.rint(labels)).all():
        labels = labels.astype(np.int64)
    if labels.ndim == 4 and 1 in (labels.shape[1], labels.shape[3]):
        labels = labels.squeeze(1 if labels.shape[1] == 1 else 3)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 2 and labels.dtype.kind in "iub" and labels.max(initial=0) == 1:
        one = (np.count_nonzero(labels, 1) == 1).all() and labels.min() == 0
        labels = labels.argmax(1) if one else labels
    if len(samples) != len(labels) or not samples.size:
        what = f"{len(samples)} samples and {len(labels)} labels"
        raise ValueError(f"{root}: {what if samples.size else 'an array of samples is empty'}")
    if labels.ndim not in (1, 3):
        raise ValueError(f"{root}: labels of shape {labels.shape} are neither classes nor masks")
    return samples, labels


def _names(root: Path, classes: dict[str, np.ndarray]) -> dict[str, list[str]]:
    """Labels as text by split, whole numbers filled up with zeros so that they sort by size."""
    names, width = {}, 1
    for split, labels in classes.items():
        if labels.dtype.kind not in "iubU":
            raise ValueError(f"{root}: labels are {labels.dtype}: give whole numbers or texts")
        names[split] = [x if isinstance(x, str) else int(x) for x in labels.tolist()]
        width = max([width, *(len(str(x)) for x in names[split] if not isinstance(x, str))])
    texts = {
        split: [x.strip() if isinstance(x, str) else f"{x:0{width}}" for x in of]
        for split, of in names.items()
    }
    different = tables.classes(everyone := [x for of in texts.values() for x in of])
    if classes and len(checked(root, everyone)) < 2:
        raise ValueError(f"{root}: all samples are of one class: two are needed")
    if 2 * len(different) > len(everyone) > 20:
        raise ValueError(f"{root}: its labels are no classes but numbers: see examples/regression")
    return texts


def _masks(root: Path, pictures: np.ndarray, masks: np.ndarray) -> np.ndarray:
    if masks.shape != pictures.shape[:3] or masks.dtype.kind not in "iub":
        shapes = f"masks of shape {masks.shape}, {masks.dtype}, for pictures of {pictures.shape}"
        raise ValueError(f"{root}: {shapes}: they are whole numbers [number, height, width]")
    if not 0 <= masks.min() <= masks.max() <= 255:
        raise ValueError(f"{root}: masks hold {masks.min()} to {masks.max()}: 0 to 255 is read")
    return masks


def _written(
    split: str, folder: Path, *, pictures: np.ndarray, labels: list[str] | np.ndarray
) -> list[Item]:
    """A PNG file of each picture and mask, out of the readers' sight."""
    items, width = [], len(str(len(pictures)))
    for number, (picture, label) in enumerate(zip(pictures, labels)):
        name, text = f"{split}{number:0{width}}", isinstance(label, str)
        file, mask = (folder / ".arrays" / part / f"{name}.png" for part in ("images", "masks"))
        for path, array in ((file, picture), *[(mask, label)] * (not text)):
            path.parent.mkdir(parents=True, exist_ok=True)
            shown = array[..., 0] if array.shape[2:] == (1,) else array
            Image.fromarray(np.ascontiguousarray(shown, np.uint8)).save(path)
        items.append(Item(split, name, file, label if text else "", None if text else mask))
    return items


def _shades(root: Path, samples: np.ndarray) -> np.ndarray:
    """[number, height, width, 1 or 3], whole shades."""
    if samples.ndim == 4 and samples.shape[1] in (1, 3) and samples.shape[3] not in (1, 3):
        samples = samples.transpose(0, 2, 3, 1)
    samples = samples[..., None] if samples.ndim == 3 else samples
    if samples.ndim != 4 or samples.shape[3] not in (1, 3) or samples.dtype.kind not in "fiub":
        raise ValueError(
            f"{root}: samples of shape {samples.shape}, {samples.dtype}: pictures are numbers "
            "[number, height, width], with 1 or 3 colours last or second, rows [number, features]"
        )
    low, high = samples.min(), samples.max()
    most = 1 if samples.dtype.kind in "fb" or high == 1 else 255
    if not 0 <= low <= high <= most:
        rule = "pictures are whole numbers from 0 to 255, or floats from 0 to 1"
        raise ValueError(f"{root}: {rule}; these are {samples.dtype} from {low:g} to {high:g}")
    if most == 1 and samples.dtype.kind != "f":
        print("  shades 0 and 1 become black and white")
    if high < _DARK and most == 255:
        print(f"  the brightest shade is {high} of 255: such pictures are nearly black")
    if samples.dtype == np.uint8 and most == 255:
        return samples
    return np.rint(samples * np.float64(255 / most)).astype(np.uint8)
