"""ImageNet's validation pictures as their archive has them: one folder, classes in a list.

ROOT/val/ILSVRC2012_val_00000001.JPEG ...       number N at the end: line N of the list

The list is one of these; where both are there they must agree:

ROOT/imagenet_2012_validation_synset_labels.txt         one synset (n01440764) a line
ROOT/ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt
                                                        one number a line, of meta.mat beside it
"""

import re
from pathlib import Path

from hvdkit.data.readers import listing
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES
from hvdkit.words import some

SYNSETS = "imagenet_2012_validation_synset_labels.txt"
DEVKIT = Path("ILSVRC2012_devkit_t12", "data")
TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"


def by_class(root: Path, split: str, train_split: str) -> tuple[list[str], list[list[str]]]:
    """Sorted classes, and the names of each one's pictures, sorted.

    Classes are the folders of the split to train on, or those of the list where it has none.

    Raises ValueError when there is no list, or it does not fit the pictures or the classes.
    """
    names = listing.file_names(root / split, IMAGE_SUFFIXES)
    path, labels = _labels(root, root / split, names)
    _check_numbers(root / split, names, path, labels)
    train = root / train_split
    classes = listing.folder_names(train) if train.is_dir() else []
    classes = classes or sorted(set(labels))
    if unknown := sorted(set(labels) - set(classes)):
        raise ValueError(f"{path} has classes that {train} has no folder of: {some(unknown)}")
    pictures: dict[str, list[str]] = {name: [] for name in classes}
    for name, label in zip(names, labels, strict=True):
        pictures[label].append(name)
    return classes, list(pictures.values())


def _labels(root: Path, folder: Path, names: list[str]) -> tuple[Path, list[str]]:
    """The list, and the class in each of its lines."""
    found = [
        (path, _words(path)) for there in (root, folder) if (path := there / SYNSETS).is_file()
    ]
    for path in (there / TRUTH for there in (root / DEVKIT, root) if (there / TRUTH).is_file()):
        try:
            found.append((path, _synsets(path, path.with_name(META))))
        except ValueError:
            if not found:  # else a list of synsets says all that is needed
                raise
    for path, labels in found[1:]:
        if labels != found[0][1]:
            raise ValueError(
                f"{found[0][0]} and {path} do not say the same of the pictures' classes; take away "
                "the one that is wrong"
            )
    if found:
        return found[0]
    what = f"{len(names)} pictures and no" if names else "neither pictures nor"
    raise ValueError(
        f"{folder} holds {what} class folders: sort its pictures into one folder a class; "
        f"ImageNet's validation pictures may stay as they are with {root / SYNSETS} (line N: the "
        f"synset of picture N) or the devkit, {root / DEVKIT}"
    )


def _synsets(truth: Path, meta: Path) -> list[str]:
    """The synset of each number in the devkit's ground truth."""
    if not meta.is_file():
        raise ValueError(
            f"{truth} holds numbers, and {meta}, which says what they mean, is missing; unpack the "
            f"devkit whole, or give {SYNSETS} (one synset a line)"
        )
    try:
        from scipy.io import loadmat  # scikit-learn brings it
    except ImportError:
        raise ValueError(
            f"{meta} is read with SciPy, which is not installed; install it, or give {SYNSETS} "
            "(one synset a line)"
        ) from None
    try:
        table = loadmat(meta, squeeze_me=True)["synsets"]
        synset = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table}
    except Exception as error:  # whatever a damaged file makes of a reader
        raise ValueError(f"{meta} cannot be read ({error!r}); unpack the devkit again") from None
    numbers = _words(truth)
    known = {str(number) for number in synset}
    if unknown := [number for number in numbers if number not in known]:
        raise ValueError(f"{truth} has numbers that {meta} does not know: {some(unknown)}")
    return [synset[int(number)] for number in numbers]


def _words(path: Path) -> list[str]:
    """One word a line. Raises ValueError for a line of another number of words."""
    lines = [line.split() for line in listing.read_lines(path)]
    while lines and not lines[-1]:
        lines.pop()
    for number, words in enumerate(lines, start=1):
        if len(words) != 1:
            raise ValueError(
                f"{path}, line {number}: {' '.join(words)!r} is not one word; a line is the class "
                "of one picture"
            )
    return [words[0] for words in lines]


def _check_numbers(folder: Path, names: list[str], path: Path, labels: list[str]) -> None:
    """Raises ValueError unless picture N is the one of line N: a gap would shift all labels.

    The lists are of ILSVRC2012's validation pictures: others, such as test's or another year's,
    may be as many.
    """
    numbers = [re.fullmatch(r"ILSVRC2012_val_(\d+)\.\w+", name) for name in names]
    if strange := [name for name, number in zip(names, numbers) if number is None]:
        raise ValueError(
            f"{folder} has no class folders, and {path} is of ImageNet's validation pictures only, "
            f"which have names as ILSVRC2012_val_00000001.JPEG: {len(strange)} of {len(names)} do "
            f"not, such as {strange[0]}; sort the pictures into one folder a class"
        )
    if len(names) != len(labels):
        raise ValueError(
            f"{folder} has {len(names)} pictures and {path} {len(labels)} lines; they must be as "
            "many, picture N on line N"
        )
    for line, (name, number) in enumerate(zip(names, numbers), start=1):
        if int(number[1]) != line:
            raise ValueError(
                f"{folder / name} would be of line {line} of {path}: names must end in the "
                "number of their line, as ILSVRC2012_val_00000001.JPEG does"
            )
