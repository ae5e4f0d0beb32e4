"""How a folder of pictures is arranged: what the folders of each level are, by all their names.

    split    each name says train, val or test (training, valid, dev, testing, ...)
    kind     each name says pictures or masks (images, photos; masks, labels, annotations, ...),
             alone or with a split (train_masks; train beside trainannot), and both are there
    class    each folder is a class
    any      names that say nothing: the only folder of its level, patients or towns of a kind

A set is a sentence of levels from the top; `any` may stand everywhere if its level has one folder:

    [split] class [split]                    pictures of classes
    [any] split, kind in any order [any]     pictures and masks of the same names

What all names of a level begin with (ISIC_Training_) says nothing. What fits no sentence, or two,
is refused with the folder's name: a split beside other folders, folders in classes (domains,
patients), a third folder beside images and masks, names without a number (cat, dog) in or above
images and masks. `--layout=any/class` says what the levels are.
`hvdkit start` and the reader of class folders both read by this module; to the reader, which knows
that they are classes, a word of ours among other names is a class.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from hvdkit.data import spelling
from hvdkit.data.readers import listing
from hvdkit.data.readers.listing import Packed, packed
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES, OTHER_SUFFIXES
from hvdkit.logs import join

ROLES = ("split", "kind", "class", "any")
# fmt: off
_IMAGE_WORDS = (
    "image", "images", "img", "imgs", "picture", "pictures", "photo", "photos", "input", "inputs",
    "rgb", "jpegimages",
)
MASK_WORDS = (
    "mask", "masks", "label", "labels", "labelids", "annotation", "annotations", "annot", "gt",
    "target", "targets", "groundtruth", "ground_truth", "seg", "segmentation", "segmentations",
    "segmentationclass",
)
# fmt: on
_SPLIT_OF = (
    dict.fromkeys(("train", "training"), "train")
    | dict.fromkeys(("val", "valid", "validation", "dev"), "val")
    | dict.fromkeys(("test", "testing"), "test")
)
_KIND_OF = dict.fromkeys(_IMAGE_WORDS, "image") | dict.fromkeys(MASK_WORDS, "mask")
# Files with these endings may lie beside pictures.
_NOTES = (".txt", ".md", ".csv", ".json", ".xml", ".html", ".pdf")
_WORD = "|".join([*_SPLIT_OF, *_KIND_OF])
_NAME = re.compile(rf"[\W\d_]*({_WORD})(?:[\W\d_]*({_WORD}))?[\W\d_]*", re.IGNORECASE)


class Place(NamedTuple):
    """A folder, its pictures and its other files, and what the levels say of them ("": nothing)."""

    folder: Path
    split: str = ""
    kind: str = ""  # "image" or "mask"
    label: str = ""
    names: tuple[str, ...] = ()  # the names of its `any` levels
    files: Packed = packed([])
    others: tuple[str, ...] = ()

    @property
    def picture_count(self) -> int:
        return len(self.files[1])


class Subfolder(NamedTuple):
    """A folder of the next level, whose role is not known yet."""

    parent: Place
    name: str

    @property
    def path(self) -> Path:
        return self.parent.folder / self.name


class Meaning(NamedTuple):
    """What a folder's name says ("": nothing)."""

    split: str
    kind: str


def split_of(word: str) -> str:
    """The split that a word means, train, val or test; "" for others."""
    return _SPLIT_OF.get(word.lower(), "")


def _meaning(name: str) -> Meaning:
    """The split and the kind that a folder's name says: ("train", "mask") of train_masks."""
    match = _NAME.fullmatch(name)
    words = [word.lower() for word in match.groups("")] if match else []
    splits = [_SPLIT_OF[word] for word in words if word in _SPLIT_OF]
    kinds = [_KIND_OF[word] for word in words if word in _KIND_OF]
    if len(splits) > 1 or len(kinds) > 1:
        return Meaning("", "")
    return Meaning("".join(splits), "".join(kinds))


def levels(text: str) -> list[str]:
    """The roles that a --layout names; ValueError where it names others."""
    roles = text.split("/") if text else []
    for role in roles:
        if role not in ROLES:
            raise ValueError(
                f"--layout={text}: {role!r} is none of {join(ROLES)}: say what the folders of each "
                "level are, as split/class"
            )
    return roles


def arranged(
    root: Path, given_roles: Sequence[str] = (), *, split: str = ""
) -> tuple[list[Place], list[Path]]:
    """All folders, by role, and those that are left out because no picture is in them.

    `given_roles`: the roles of the levels, if they are known; `split`: only this split, which is a
    folder's name or a word for it. Raises ValueError, naming a folder, where no sentence fits.
    """
    roles: list[str] = []
    level = [Place(root)] if root.is_dir() else []
    if split and (root / split).is_dir():
        roles = ["split"]
        level = [Place(root / split, split=split)]

    places: list[Place] = []
    left_out: list[Path] = []
    splits: set[str] = set()
    with ThreadPoolExecutor(listing.THREADS) as pool:
        while level:
            below = []
            for place, names in pool.map(_listed, level):
                places.append(place)
                below += [Subfolder(place, name) for name in names]
            # An empty class is refused; other folders without pictures are notes.
            if "kind" in roles or not ("split" in roles or "class" in roles):
                empty = _without_pictures(below)
                left_out += empty
                below = [folder for folder in below if folder.path not in empty]
            if not below:
                break

            role = _role(below, roles, given_roles, are_classes=bool(split))
            level = _with_role(below, role)
            if split and role == "split":
                splits = {place.split for place in level}
                level = [place for place in level if place.split == split_of(split)]
            roles.append(role)

    if split and ("split" not in roles or not any(place.split for place in places)):
        raise _missing(root, split, splits)
    if "kind" in roles:
        # What looked like classes above images and masks is part of the pictures' names.
        for number, place in enumerate(places):
            if place.label:
                places[number] = place._replace(
                    label="", names=(place.label, *place.names)
                )
    return places, left_out


def _missing(root: Path, split: str, splits: set[str]) -> ValueError:
    """An error about a split that is not there; `splits`: those that are."""
    way_out = f"put a folder for each class there, or type hvdkit start {root}, which makes splits"
    if "test" in splits and split_of(split) == "val":
        way_out = "--val_split=test scores on the test split"
    elif splits:
        way_out = f"there is {join(sorted(splits))}: name another by --train_split or --val_split"
    return ValueError(f"{root / split} is missing; {way_out}")


def by_class(places: list[Place]) -> dict[tuple[str, str], list[Place]]:
    """The folders that hold the pictures of a split and a class, which lie in it or in one below.

    Raises ValueError for a class without pictures, and for files that would be left out.
    """
    folders_of = defaultdict(list)
    for place in places:
        if place.label:
            _check_others(place)
            folders_of[place.split, place.label].append(place)

    with_pictures = {}
    split_up = {label for split, label in folders_of if split}
    for (split, label), folders in folders_of.items():
        full = [place for place in folders if place.picture_count]
        if label in split_up and not split:  # the splits are folders in the class
            if full:
                raise ValueError(
                    f"{folders[0].folder} holds pictures beside its splits: move them into one"
                )
        elif full:
            with_pictures[split, label] = full
        else:
            raise ValueError(
                f"{folders[-1].folder} holds no picture ({', '.join(IMAGE_SUFFIXES)}); add some, "
                "or remove the class from every split"
            )
    return with_pictures


def _check_others(place: Place) -> None:
    """Raises ValueError for files of a class that would be left out."""
    others = [name for name in place.others if not name.lower().endswith(_NOTES)]
    if others:
        raise _left_out(place, others)


def _left_out(place: Place, names: list[str]) -> ValueError:
    return ValueError(
        f"{place.folder} holds {join(names)}, which would be left out: move pictures of folders "
        f"up, make others {' or '.join(IMAGE_SUFFIXES)}, and remove the rest"
    )


def _listed(place: Place) -> tuple[Place, list[str]]:
    """The place with its files, and the names of the folders in it.

    Of the folders in a class, the empty ones are left out.
    """
    folders = []
    others = []
    endings = (".png",) if place.kind == "mask" else IMAGE_SUFFIXES
    files, rest = listing.names_and_rest(place.folder, endings)
    for entry in rest:
        if not entry.is_dir():
            listing.check_link(entry)
            others.append(entry.name)
            continue
        if entry.is_symlink():
            _check_leads_elsewhere(entry.path, place.folder)
        if not place.label or listing.entries(Path(entry.path)):
            folders.append(entry.name)
    return place._replace(files=packed(files), others=tuple(others)), folders


def _check_leads_elsewhere(link: str, folder: Path) -> None:
    """Raises ValueError for a link to a folder that holds the link: its levels would not end."""
    target = Path(link).resolve()
    for above in (folder, *folder.parents):
        if above.resolve().is_relative_to(target):
            raise ValueError(
                f"{link} leads to a folder that holds it: remove this link"
            )


def _without_pictures(folders: list[Subfolder]) -> list[Path]:
    """The folders whose names say nothing, and that hold no picture, nor do those below."""
    endings = IMAGE_SUFFIXES + OTHER_SUFFIXES
    empty = []
    for folder in folders:
        if not any(_meaning(folder.name)):
            files = listing.files(folder.path)
            if not any(file.name.lower().endswith(endings) for file in files):
                empty.append(folder.path)
    return empty


def _meanings(below: list[Subfolder]) -> dict[str, Meaning]:
    """What each name of a level says, if need be without what all begin with."""
    names = sorted({folder.name for folder in below})
    start = re.sub(r"[^\W_]*$", "", spelling.common_start(names))
    whole = {name: _meaning(name) for name in names}
    without_start = {name: _meaning(name.removeprefix(start)) for name in names}
    for meanings in (whole, without_start):
        if all(any(meaning) for meaning in meanings.values()):
            return meanings
    return whole


def _role(
    below: list[Subfolder],
    roles: list[str],
    given_roles: Sequence[str],
    *,
    are_classes: bool,
) -> str:
    """The role of a level, by the names of its folders and the roles above it.

    `are_classes`: the folders are known to be classes, so a word of ours among other names is one.
    """
    meanings = _meanings(below)
    if len(roles) < len(given_roles):
        return given_roles[len(roles)]
    if given_roles:
        if any(meaning.split for meaning in meanings.values()):
            raise ValueError(
                f"{below[0].path} may be a split, below the levels of "
                f"--layout={'/'.join(given_roles)}: say what its level is, split or any"
            )
        return "any"

    paths = {folder.name: folder.path for folder in reversed(below)}
    if _are_images_and_masks(paths, meanings, roles, are_classes=are_classes):
        _check_once(below, meanings)
        labels = {folder.parent.label: folder.parent.folder for folder in below}
        _check_no_classes(labels, "/".join([*roles, "kind"]).replace("class", "any"))
        return "kind"
    if "split" not in roles and all(meaning.split for meaning in meanings.values()):
        _check_once(below, meanings)
        return "split"
    if "kind" in roles:
        _check_no_classes(paths, "/".join([*roles, "any"]))
        return "any"
    if "class" in roles:
        _check_below_classes(below, roles)
        return "any"
    if len(paths) == 1:
        if are_classes and "split" in roles:
            pictures, _ = listing.names_and_rest(below[0].path, IMAGE_SUFFIXES)
            return "class" if pictures else "any"
        return "any"
    if "split" not in roles:
        _check_no_split(paths, meanings, roles)
    return "class"


def _are_images_and_masks(
    paths: dict[str, Path],
    meanings: dict[str, Meaning],
    roles: list[str],
    *,
    are_classes: bool,
) -> bool:
    """Whether the folders of a level are those of images and of masks.

    Raises ValueError where they may be, and one of them is neither.
    """
    kinds = {meaning.kind for meaning in meanings.values()}
    if "kind" in roles or "mask" not in kinds:
        return False
    others = [name for name, meaning in meanings.items() if not any(meaning)]
    if not others:
        return "image" in kinds or ("train", "") in meanings.values()
    if (
        not are_classes
        and "class" not in roles
        and ("image" in kinds or len(paths) == 2)
    ):
        beside = [name for name, meaning in meanings.items() if meaning.kind]
        raise ValueError(
            f"{paths[others[0]]} lies beside {join(beside)}, which may be masks: move it away, or "
            f"say what the levels are, as --layout={'/'.join([*roles, 'class'])}"
        )
    return False


def _check_no_split(
    paths: dict[str, Path], meanings: dict[str, Meaning], roles: list[str]
) -> None:
    """Raises ValueError where a folder among classes may be a split."""
    others = [name for name, meaning in meanings.items() if not any(meaning)]
    for name, meaning in meanings.items():
        if meaning.split:
            raise ValueError(
                f"{paths[name]} may be a split or a class, beside {join(others)}: rename it or "
                f"move it away, or give --layout={'/'.join([*roles, 'class'])}"
            )


def _check_once(below: list[Subfolder], meanings: dict[str, Meaning]) -> None:
    """Raises ValueError for two folders in one that say the same."""
    first_with: dict[tuple[Path, Meaning], Subfolder] = {}
    for folder in below:
        meaning = meanings[folder.name]
        other = first_with.setdefault((folder.parent.folder, meaning), folder)
        if other.name != folder.name:
            raise ValueError(
                f"{other.path} and {folder.path} say the same, {' '.join(meaning).rstrip()}: "
                "remove one"
            )


def _check_no_classes(folders: dict[str, Path], levels: str) -> None:
    """Raises ValueError where a set of pictures and masks may as well be one of classes.

    Names with a number (patient01, 2019) are no classes.
    """
    names = sorted(folders)
    if len(names) > 1 and not any(re.search(r"\d", name) for name in names):
        raise ValueError(
            f"{folders[names[0]]} and {names[1]} beside it may be classes, and there are masks: "
            f"--layout={levels} trains on the masks; for classes move the masks away"
        )


def _check_below_classes(below: list[Subfolder], roles: list[str]) -> None:
    """Raises ValueError unless the folders in classes say nothing: one name, and all pictures."""
    for parent, name in below:
        if parent.picture_count:
            raise _left_out(parent, [name])
    if len({folder.name for folder in below}) > 1:
        upper = "/".join([*roles, "any"])
        lower = "/".join([*roles, "class"]).replace("class", "any", 1)
        parent, name = below[0]
        raise ValueError(
            f"{parent.folder} and {name} in it may both be classes: give hvdkit start "
            f"--layout={upper} or --layout={lower}"
        )


def _with_role(below: list[Subfolder], role: str) -> list[Place]:
    """The folders of a level with what its role says of them."""
    meanings = _meanings(below)
    names_of_kind = defaultdict(set)
    for parent, name in below:
        names_of_kind[parent.kind].add(name)

    places = []
    for folder in below:
        place = folder.parent._replace(folder=folder.path)
        if role == "class":
            place = place._replace(label=folder.name)
        elif role == "any":
            if len(names_of_kind[place.kind]) > 1:
                place = place._replace(names=(*place.names, folder.name))
        else:
            split, kind = meanings[folder.name]
            if not split and (role == "split" or not kind):
                raise ValueError(
                    f"{place.folder} says no {role}, as --layout= has it: rename it"
                )
            if role == "kind" and not kind:  # train beside trainannot holds pictures
                kind = "image"
            place = place._replace(split=split or place.split, kind=kind or place.kind)
        places.append(place)
    return places
