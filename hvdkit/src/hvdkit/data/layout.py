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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from hvdkit.data import spelling
from hvdkit.data.readers import listing
from hvdkit.data.readers.listing import Packed, packed
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES, OTHER_SUFFIXES
from hvdkit.logs import join

ROLES = ("split", "kind", "class", "any")
_SPLITS = {"train": "train training", "val": "val valid validation dev", "test": "test testing"}
_IMAGE = "image images img imgs picture pictures photo photos input inputs rgb jpegimages"
MASKS = "mask masks label labels labelids annotation annotations annot gt target targets "
MASKS += "groundtruth ground_truth seg segmentation segmentations segmentationclass"
_SPLIT_OF = {word: split for split, words in _SPLITS.items() for word in words.split()}
_KIND_OF = dict.fromkeys(_IMAGE.split(), "image") | dict.fromkeys(MASKS.split(), "mask")
_NOTES = (".txt", ".md", ".csv", ".json", ".xml", ".html", ".pdf")  # which may lie beside pictures
_WORD = "|".join([*_SPLIT_OF, *_KIND_OF])
_NAME = re.compile(rf"[\W\d_]*({_WORD})(?:[\W\d_]*({_WORD}))?[\W\d_]*", re.IGNORECASE)


class Place(NamedTuple):
    """A folder, its pictures and its other files, and what the levels say of them ("": nothing)."""

    folder: Path
    split: str = ""
    kind: str = ""  # "image" or "mask"
    label: str = ""
    names: tuple[str, ...] = ()  # of `any` levels
    files: Packed = packed([])
    others: tuple[str, ...] = ()


def split_of(word: str) -> str:
    """The split that a word means, train, val or test; "" for others."""
    return _SPLIT_OF.get(word.lower(), "")


def said(name: str) -> tuple[str, str]:
    """The split and the kind that a folder's name says: ("train", "mask") of train_masks."""
    found = _NAME.fullmatch(name)
    words = [word.lower() for word in found.groups("")] if found else []
    splits = [_SPLIT_OF[word] for word in words if word in _SPLIT_OF]
    kinds = [_KIND_OF[word] for word in words if word in _KIND_OF]
    if len(splits) > 1 or len(kinds) > 1:
        return "", ""
    return "".join(splits), "".join(kinds)


def levels(text: str) -> list[str]:
    """The roles that a --layout names; ValueError where it names others."""
    roles = text.split("/") if text else []
    if unknown := [role for role in roles if role not in ROLES]:
        what = f"--layout={text}: {unknown[0]!r} is none of {join(ROLES)}"
        raise ValueError(f"{what}: say what the folders of each level are, as split/class")
    return roles


def arranged(root: Path, given: list[str], *, split: str = "") -> tuple[list[Place], list[Path]]:
    """All folders, by role, and those that are left out because no picture is in them.

    `given`: the roles of the levels, if they are known; `split`: only this split, which is a
    folder's name or a word for it. Raises ValueError, naming a folder, where no sentence fits.
    """
    roles: list[str] = []
    level = [Place(root)] if root.is_dir() else []
    if split and (root / split).is_dir():
        roles = ["split"]
        level = [Place(root / split, split=split)]
    depth = len(roles)
    found: list[Place] = []
    left_out: list[Path] = []
    splits: set[str] = set()
    with ThreadPoolExecutor(listing.THREADS) as pool:
        while level:
            listed = [*pool.map(_listed, level)]
            found += [place for place, _ in listed]
            below = [(place, name) for place, names in listed for name in names]
            # An empty class is refused, other folders without pictures are notes.
            if "kind" in roles or not {"split", "class"} & {*roles}:
                empty = [pair for pair in below if not any(said(pair[1])) and not _holds(*pair)]
                left_out += [place.folder / name for place, name in empty]
                below = [pair for pair in below if pair[0].folder / pair[1] not in left_out]
            if not below:
                break
            role = "any"
            if len(roles) - depth < len(given):
                role = given[len(roles) - depth]
            elif not given:
                role = _role(below, roles, known=bool(split))
            elif any(split for split, _ in _words(below).values()):
                first = below[0][0].folder / below[0][1]
                what = f"may be a split, below the levels of --layout={'/'.join(given)}"
                raise ValueError(f"{first} {what}: say what its level is, split or any")
            level = _named(below, role)
            if split and role == "split":
                splits = {place.split for place in level}
                level = [place for place in level if place.split == split_of(split)]
            roles.append(role)
    if split and ("split" not in roles or not any(place.split for place in found)):
        how = f"put a folder for each class there, or type hvdkit start {root}, which makes splits"
        if splits:
            how = f"there is {join(sorted(splits))}: name another by --train_split or --val_split"
        if "test" in splits and split_of(split) == "val":
            how = "--val_split=test scores on the test split"
        raise ValueError(f"{root / split} is missing; {how}")
    if "kind" in roles:  # what looked like classes above was part of the pictures' names
        found = [p._replace(label="", names=(*filter(None, [p.label]), *p.names)) for p in found]
    return found, left_out


def by_class(places: list[Place]) -> dict[tuple[str, str], list[Place]]:
    """The folders that hold the pictures of a split and a class, which lie in it or in one below.

    Raises ValueError for a class without pictures, and for files that would be left out.
    """
    found = defaultdict(list)
    for place in places:
        if not place.label:
            continue
        if others := [name for name in place.others if not name.lower().endswith(_NOTES)]:
            how = f"make others {' or '.join(IMAGE_SUFFIXES)}, and remove the rest"
            what = f"{join(others)}, which would be left out: move pictures of folders up"
            raise ValueError(f"{place.folder} holds {what}, {how}")
        found[place.split, place.label].append(place)
    full = {}
    split_up = {label for split, label in found if split}
    for key, folders in found.items():
        full[key] = [place for place in folders if len(place.files[1])]
        if key[1] in split_up and not key[0]:  # its splits are folders in it
            if full.pop(key):
                what = "holds pictures beside its splits: move them into one"
                raise ValueError(f"{folders[0].folder} {what}")
        elif not full[key]:
            what = f"no picture ({', '.join(IMAGE_SUFFIXES)})"
            how = "add some, or remove the class from every split"
            raise ValueError(f"{folders[-1].folder} holds {what}; {how}")
    return full


def _listed(place: Place) -> tuple[Place, list[str]]:
    """With its files, and the names of the folders in it; of those in a class the empty ones are
    left out."""
    folders = []
    others = []
    endings = (".png",) if place.kind == "mask" else IMAGE_SUFFIXES
    files, rest = listing.contents(place.folder, endings)
    for entry in rest:
        if not entry.is_dir():
            listing.check_link(entry)
            others.append(entry.name)
            continue
        target = Path(entry.path).resolve() if entry.is_symlink() else None
        above = [place.folder, *place.folder.parents] if target else []
        if any(folder.resolve().is_relative_to(target) for folder in above):
            raise ValueError(f"{entry.path} leads to a folder that holds it: remove this link")
        if not place.label or any(listing.contents(Path(entry.path), ())):
            folders.append(entry.name)
    return place._replace(files=packed(files), others=tuple(others)), folders


def _holds(place: Place, name: str) -> bool:
    """Whether there is a picture in a folder or below."""
    endings = IMAGE_SUFFIXES + OTHER_SUFFIXES
    there = listing.files(place.folder / name)
    return any(file.name.lower().endswith(endings) for file in there)


def _words(below: list[tuple[Place, str]]) -> dict[str, tuple[str, str]]:
    """What each name of a level says, if need be without what all begin with."""
    names = sorted({name for _, name in below})
    words = {name: said(name) for name in names}
    if all(map(any, words.values())):
        return words
    start = re.sub(r"[^\W_]*$", "", spelling.common_start(names))
    without = {name: said(name.removeprefix(start)) for name in names}
    return without if all(map(any, without.values())) else words


def _role(below: list[tuple[Place, str]], roles: list[str], *, known: bool) -> str:
    """The role of a level, by the names of its folders and the roles above it.

    `known`: they are folders of classes, so a word of ours among other names is a class.
    """
    first = {name: place.folder / name for place, name in reversed(below)}
    words = _words(below)
    others = [name for name, word in words.items() if not any(word)]
    kinds = {kind for _, kind in words.values()}
    as_classes = "/".join([*roles, "class"])
    if "kind" not in roles and "mask" in kinds:
        bare_splits = ("train", "") in words.values()
        in_doubt = "image" in kinds or len(first) == 2
        if in_doubt and others and not known and "class" not in roles:
            rule = f"move it away, or say what the levels are, as --layout={as_classes}"
            beside = join(name for name, (_, kind) in words.items() if kind)
            raise ValueError(f"{first[others[0]]} lies beside {beside}, which may be masks: {rule}")
        if not others and ("image" in kinds or bare_splits):
            _check_once(below, words)
            labels = {place.label: place.folder for place, _ in below}
            _check_parts(labels, "/".join([*roles, "kind"]).replace("class", "any"))
            return "kind"
    if "split" not in roles and all(split for split, _ in words.values()):
        _check_once(below, words)
        return "split"
    if "kind" in roles:
        _check_parts(first, "/".join([*roles, "any"]))
        return "any"
    if "class" in roles:
        _check_below_classes(below, first, roles)
        return "any"
    if len(first) == 1:
        folder = below[0][0].folder / below[0][1]
        is_class = known and "split" in roles and listing.contents(folder, IMAGE_SUFFIXES)[0]
        return "class" if is_class else "any"
    if "split" not in roles:
        for name, (split, _) in words.items():
            if split:
                what = "may be a split or a class"
                rule = f"rename it or move it away, or give --layout={as_classes}"
                raise ValueError(f"{first[name]} {what}, beside {join(others)}: {rule}")
    return "class"


def _check_once(below: list[tuple[Place, str]], words: dict[str, tuple[str, str]]) -> None:
    """Raises ValueError for two folders in one that say the same."""
    names: dict[tuple[Path, tuple[str, str]], str] = {}
    for place, name in below:
        split, kind = words[name]
        other = names.setdefault((place.folder, (split, kind)), name)
        if other != name:
            both = f"{place.folder / other} and {place.folder / name}"
            raise ValueError(f"{both} say the same, {split} {kind}".rstrip() + ": remove one")


def _check_parts(folders: dict[str, Path], levels: str) -> None:
    """Raises ValueError where a set of pictures and masks may as well be one of classes.

    Names with a number (patient01, 2019) are no classes.
    """
    names = sorted(folders)
    if len(names) > 1 and not any(re.search(r"\d", name) for name in names):
        what = f"{folders[names[0]]} and {names[1]} beside it may be classes, and there are masks"
        how = f"--layout={levels} trains on the masks; for classes move the masks away"
        raise ValueError(f"{what}: {how}")


def _check_below_classes(
    below: list[tuple[Place, str]], first: dict[str, Path], roles: list[str]
) -> None:
    """Raises ValueError unless the folders in classes say nothing: one name, and all pictures."""
    for place, name in below:
        if len(place.files[1]):
            what = f"holds {name}, which would be left out: move pictures of folders up"
            raise ValueError(f"{place.folder} {what}, and remove the rest")
    if len(first) > 1:
        place, name = below[0]
        both = f"{place.folder} and {name} in it may both be classes"
        upper = "/".join([*roles, "any"])
        lower = "/".join([*roles, "class"]).replace("class", "any", 1)
        raise ValueError(f"{both}: give hvdkit start --layout={upper} or --layout={lower}")


def _named(below: list[tuple[Place, str]], role: str) -> list[Place]:
    """The folders of a level with what its role says of them."""
    words = _words(below)
    of_kind = defaultdict(set)
    for place, name in below:
        of_kind[place.kind].add(name)
    found = []
    for place, name in below:
        new = place._replace(folder=place.folder / name)
        split, kind = words[name]
        if role in ("split", "kind") and not (split if role == "split" else split or kind):
            raise ValueError(f"{new.folder} says no {role}, as --layout= has it: rename it")
        if role == "class":
            new = new._replace(label=name)
        elif role != "any":
            kind = kind or ("image" if role == "kind" else "")
            new = new._replace(split=split or place.split, kind=kind or place.kind)
        elif len(of_kind[place.kind]) > 1:
            new = new._replace(names=(*place.names, name))
        found.append(new)
    return found
