"""The samples of a folder of pictures, by the grammar of layout.py; splits; links for readers."""

import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hvdkit.data import spelling
from hvdkit.data.readers import layout, listing
from hvdkit.data.readers.layout import Place
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES, OTHER_SUFFIXES
from hvdkit.logs import join, printable

_END_OF_MASK = re.compile(rf"[_\-. ]({'|'.join(layout.MASK_WORDS)})$", re.I)
_LEAST_GROUPS = 5
# By split, names of folders and the file's name, in one tuple.
_Paths = dict[tuple[str, ...], Path]


class Item(NamedTuple):
    """A picture: its split ("": not known), its name, its class or its mask."""

    split: str
    name: str
    picture: Path
    label: str = ""
    mask: Path | None = None


def recognized(root: Path, levels: str = "") -> list[Item]:
    """All labelled pictures; ValueError, naming a file, where the folder does not say.

    `levels`: as --layout gives them. Prints what is not read.
    """
    places, left_out = layout.arranged(root, layout.levels(levels))
    unread = []
    for place in places:
        unread += [place.folder / name for name in place.others]
    _check_formats(unread)
    if unread or left_out:
        without_picture = [f"{folder} (no picture)" for folder in left_out]
        print(printable(f"  not read: {join([*unread, *without_picture])}"))

    with_files = [place for place in places if place.picture_count]
    if any(place.kind for place in with_files):
        return _pairs(root, with_files)
    layout.by_class(places)
    return _classes(root, with_files)


def _check_formats(files: list[Path]) -> None:
    """Raises ValueError for pictures of a format that is not read."""
    endings = IMAGE_SUFFIXES + OTHER_SUFFIXES
    pictures = [file for file in files if file.name.lower().endswith(endings)]
    if pictures:
        raise ValueError(
            f"{pictures[0]} ({len(pictures)} such files) is not read: pictures must be PNG, JPEG "
            "or WebP, masks PNG: convert it, or move it away"
        )


def _classes(root: Path, places: list[Place]) -> list[Item]:
    """Pictures by class; of a test split those without a class are left out."""
    labelled = [place for place in places if place.label]
    loose = [place for place in places if not place.label]
    unknown = [place for place in loose if place.split != "test"]
    if unknown or not labelled:
        names = []
        for place in places:
            names += listing.unpacked(place.files)
        folder = unknown[0].folder if unknown and labelled else root
        raise ValueError(
            f"{folder} does not say what its {len(names)} pictures are ({join(names, 2)}): class "
            "folders, pictures with masks, VOC, Cityscapes, CIFAR and packed sets are recognized"
        )
    for place in loose:
        print(
            printable(
                f"  not read: {place.picture_count:,} pictures without a class, in {place.folder}"
            )
        )
    spelling.check_classes(sorted({place.label for place in labelled}), root)
    items = []
    for place in labelled:
        items += _items(place)
    return items


def _items(place: Place) -> list[Item]:
    """The pictures of a class's folder; ValueError where a mask lies beside one."""
    files = listing.unpacked(place.files)
    file_of = {Path(name).stem: name for name in files}
    items = []
    for file in files:
        stem = Path(file).stem
        without_end = _END_OF_MASK.sub("", stem)
        if without_end != stem and without_end in file_of:
            raise ValueError(
                f"{place.folder / file} looks like the mask of {file_of[without_end]}: put all "
                "masks into a folder masks/ beside a folder images/"
            )
        name = "_".join((*place.names, stem))
        items.append(Item(place.split, name, place.folder / file, place.label))
    return items


def _pairs(root: Path, places: list[Place]) -> list[Item]:
    """Pictures with the masks of their names, which may all have one beginning or end of their own.

    Pictures of a test split without any mask are left out.
    """
    pictures = _paths(places, "image")
    masks = _paths(places, "mask")
    if not any(split == "test" for split, *_ in masks):
        tests = [key for key in pictures if key[0] == "test"]
        for key in tests:
            del pictures[key]
        if tests:
            print(
                printable(
                    f"  not read: {len(tests):,} pictures of test, which have no mask"
                )
            )

    if pictures.keys() != masks.keys():
        cut_pictures, picture_digits = _without_affix(pictures)
        cut_masks, mask_digits = _without_affix(masks)
        if cut_pictures.keys() == cut_masks.keys() and picture_digits == mask_digits:
            pictures = cut_pictures
            masks = cut_masks
    if pictures.keys() != masks.keys():
        _refuse_unpaired(root, pictures, masks)

    items = []
    for key, picture in pictures.items():
        name = "/".join(part for part in key if part)
        items.append(Item(key[0], name, picture, mask=masks[key]))
    return items


def _paths(places: list[Place], kind: str) -> _Paths:
    """The files of a kind; ValueError for two of one name, and for files in no folder of a kind."""
    paths: _Paths = {}
    for place in places:
        for name in listing.unpacked(place.files):
            path = place.folder / name
            if not place.kind:
                raise ValueError(
                    f"{path} is in no folder of images or masks: move it away"
                )
            if place.kind == kind:
                key = (place.split, *place.names, spelling.composed(path.stem))
                other = paths.setdefault(key, path)
                if other != path:
                    _refuse_one_name(other, path)
    return paths


def _refuse_one_name(path: Path, other: Path) -> None:
    raise ValueError(f"{path} and {other} would have one name: rename or remove one")


def _refuse_unpaired(root: Path, pictures: _Paths, masks: _Paths) -> None:
    alone = pictures.keys() ^ masks.keys()
    key = min(alone)
    near = spelling.near(key[-1], [other[-1] for other in alone if other != key])
    first = []
    for paths in (pictures, masks):
        first += sorted(paths[key] for key in alone & paths.keys())[:1]
    raise ValueError(
        f"{root}: {len(alone)} files lack the mask or the picture of the same name, first "
        f"{join(first)}{near}: add it, or move them away"
    )


def _without_affix(paths: _Paths) -> tuple[_Paths, str]:
    """Without the beginning and the end that all names have, and the digits in these."""
    stems = [key[-1] for key in paths]
    start = spelling.common_start(stems)
    end = spelling.common_start([stem[len(start) :][::-1] for stem in stems])[::-1]
    cut = {}
    for key, path in paths.items():
        stem = key[-1].removeprefix(start).removesuffix(end)
        cut[(*key[:-1], stem)] = path
    return cut, re.sub(r"\D", "", f"{start} {end}")


def with_splits(items: list[Item]) -> tuple[list[Item], str]:
    """All with split "train" or "val", and how that came about; ValueError for other splits.

    Where there are no splits a fifth of each class is held back: whole groups where names have
    them and a class has several, else by a hash of names, the same on every machine.
    """
    splits = {item.split for item in items}
    scored = "val" if "val" in splits else "test"
    if {"train", scored} <= splits:
        chosen = [item for item in items if item.split in ("train", scored)]
        about = f"scored on {scored}"
        left_out = len(items) - len(chosen)
        if left_out:
            about += f"; {left_out:,} of test are left out"
        return _with_val(
            chosen, [item for item in chosen if item.split == scored]
        ), about
    if len(splits) > 1:
        raise ValueError(
            f"samples are for {sorted(splits)}, not for train and val: rename folders"
        )

    units, group = _units(items)
    held = _held_back(units)
    if not held:
        raise ValueError(
            f"{len(items)} samples are too few to hold any back to score: add more"
        )
    torn = _torn(items, held)
    rule = "a hash of names"
    if group and group not in torn:
        rule = f"whole groups as {group}"
    if torn:
        rule += f"; pictures of one group ({join(torn, 2)}) are in both splits"
    about = f"scored on {len(held):,} of {len(items):,} that are held back, by {rule}"
    return _with_val(items, held), about


def _torn(items: list[Item], held: list[Item]) -> list[str]:
    """Groups of which some pictures are held back and some are not.

    None where names tell no groups apart but those of the classes.
    """
    groups_of = defaultdict(set)
    for item in items:
        groups_of[item.label].add(_group(item))
    if all(len(groups - {""}) <= 1 for groups in groups_of.values()):
        return []
    held_pictures = {item.picture for item in held}
    scored: set[str] = set()
    trained: set[str] = set()
    for item in items:
        split = scored if item.picture in held_pictures else trained
        split.add(_group(item))
    return sorted((scored & trained) - {""})


def _with_val(items: list[Item], scored: list[Item]) -> list[Item]:
    """The items with split "val" for those that are scored, "train" for the others."""
    pictures = {item.picture for item in scored}
    split = {True: "val", False: "train"}
    return [item._replace(split=split[item.picture in pictures]) for item in items]


def _units(items: list[Item]) -> tuple[list[list[Item]], str]:
    """What is held back whole, in the order of a hash of names; and the first group, or ""."""
    groups = [_group(item) for item in items]
    names = [group for group in groups if group]
    grouped = _LEAST_GROUPS <= len(set(names)) < len(items)
    groups_of = defaultdict(set)
    for item, group in zip(items, groups):
        groups_of[item.label].add(group)

    units = defaultdict(list)
    for item, group in zip(items, groups):
        whole = grouped and group and len(groups_of[item.label]) > 1
        units[group if whole else f"{item.label}/{item.name}"].append(item)
    by_hash = sorted(units, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    whole_groups = sorted(units.keys() & set(names))
    return [units[name] for name in by_hash], whole_groups[0] if whole_groups else ""


def _held_back(units: list[list[Item]]) -> list[Item]:
    """Of each class at most a fifth of its pictures; else its smallest unit that leaves some."""
    counts: Counter[str] = Counter()
    units_of = defaultdict(list)
    for unit in units:
        labels = Counter(item.label for item in unit)
        counts.update(labels)
        for label in labels:
            units_of[label].append(unit)

    held: list[Item] = []
    held_counts: Counter[str] = Counter()

    def hold(unit: list[Item]) -> None:
        held.extend(unit)
        held_counts.update(item.label for item in unit)

    fifths = {label: count // 5 for label, count in counts.items()}
    for unit in units:
        if _fits(unit, held_counts, fifths):
            hold(unit)
    all_but_one = {label: count - 1 for label, count in counts.items()}
    for label in counts:
        if not held_counts[label]:
            fitting = [
                unit
                for unit in units_of[label]
                if _fits(unit, held_counts, all_but_one)
            ]
            if fitting:
                hold(min(fitting, key=len))
    return held


def _fits(unit: list[Item], held: Mapping[str, int], most: Mapping[str, int]) -> bool:
    """Whether, with the unit, at most so many of each of its classes are held back."""
    counts = Counter(item.label for item in unit)
    return all(held[label] + count <= most[label] for label, count in counts.items())


def _group(item: Item) -> str:
    """The folder, or a name up to its first number where another follows, patient01 of
    patient01_03; or ""."""
    folder, _, name = item.name.rpartition("/")
    if folder:
        return folder
    match = re.match(r"([^\d]*\d[^_\-. ]*)[_\-. ].*\d", name)
    return match[1] if match else ""


def _check_listable(item: Item) -> None:
    """Raises ValueError for a name that cannot be a line of a split's list."""
    name = item.name
    as_text = os.fsencode(name).decode("utf-8", "replace")
    if as_text != name or name != name.strip() or "\n" in name:
        raise ValueError(
            f"{str(item.picture)!a}: the name cannot stand in a list of names: it has a line "
            "break, a space at an end, or no UTF-8: rename it, and its mask"
        )


def link(items: list[Item], folder: Path) -> None:
    """Makes in a new folder what the readers "folders" or "class_folders" read, of links."""
    names_of = defaultdict(list)
    for item in items:
        if item.mask:
            _check_listable(item)
            _link(item.picture, folder / "images", item.name)
            _link(item.mask, folder / "labels", item.name)
            names_of[item.split].append(f"{item.name}\n")
        else:
            _link(item.picture, folder / item.split / item.label, item.name)
    for split, names in names_of.items():
        (folder / "splits").mkdir(exist_ok=True)
        (folder / "splits" / f"{split}.txt").write_text("".join(names), "utf-8")


def _link(path: Path, folder: Path, name: str) -> None:
    place = folder / f"{name}{path.suffix}"
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink():
        _refuse_one_name(place.readlink(), path)
    place.symlink_to(path)
