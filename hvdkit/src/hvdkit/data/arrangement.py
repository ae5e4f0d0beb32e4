"""The samples of a folder of pictures, by the grammar of layout.py; splits; links for readers."""

import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hvdkit.data import layout, spelling
from hvdkit.data.layout import Place
from hvdkit.data.readers import listing
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES, OTHER_SUFFIXES
from hvdkit.logs import join, printable

_OF_MASK = re.compile(rf"[_\-. ]({'|'.join(layout.MASKS.split())})$", re.I)
_LEAST_GROUPS = 5
_Found = dict[tuple[str, ...], Path]  # by split, names of folders, name


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
    _check_others(places)
    unread = [f"{place.folder / name}" for place in places for name in place.others]
    unread += [f"{folder} (no picture)" for folder in left_out]
    if unread:
        print(printable(f"  not read: {join(unread)}"))
    with_files = [place for place in places if len(place.files[1])]
    if any(place.kind for place in with_files):
        return _pairs(root, with_files)
    layout.by_class(places)
    return _classes(root, with_files)


def _check_others(places: list[Place]) -> None:
    """Raises ValueError for pictures of a format that is not read."""
    endings = IMAGE_SUFFIXES + OTHER_SUFFIXES
    files = [place.folder / name for place in places for name in place.others]
    if unread := [file for file in files if file.name.lower().endswith(endings)]:
        rule = "pictures must be PNG, JPEG or WebP, masks PNG: convert it, or move it away"
        raise ValueError(f"{unread[0]} ({len(unread)} such files) is not read: {rule}")


def _classes(root: Path, places: list[Place]) -> list[Item]:
    """Pictures by class; of a test split those without a class are left out."""
    classes = sorted({place.label for place in places} - {""})
    tests = [place for place in places if not place.label and place.split == "test"]
    loose = [place for place in places if not place.label and place.split != "test"]
    if loose or not classes:
        of = [name for place in places for name in listing.unpacked(place.files)]
        where = loose[0].folder if loose and classes else root
        raise ValueError(
            f"{where} does not say what its {len(of)} pictures are ({join(of, 2)}): class folders, "
            "pictures with masks, VOC, Cityscapes, CIFAR and packed sets are recognized"
        )
    for place in tests:
        number = len(place.files[1])
        print(printable(f"  not read: {number:,} pictures without a class, in {place.folder}"))
    spelling.check_classes(classes, root)
    items = []
    for place in places:
        if place not in tests:
            items += _items(place)
    return items


def _items(place: Place) -> list[Item]:
    """The pictures of a class's folder; ValueError where a mask lies beside one."""
    files = listing.unpacked(place.files)
    by_stem = {Path(name).stem: name for name in files}
    items = []
    for name in files:
        stem = Path(name).stem
        of = _OF_MASK.sub("", stem)
        if of != stem and of in by_stem:
            raise ValueError(
                f"{place.folder / name} looks like the mask of {by_stem[of]}: put all masks into a "
                "folder masks/ beside a folder images/"
            )
        full = "_".join((*place.names, stem))
        items.append(Item(place.split, full, place.folder / name, place.label))
    return items


def _pairs(root: Path, places: list[Place]) -> list[Item]:
    """Pictures with the masks of their names, which may all have one beginning or end of their own.

    Pictures of a test split without any mask are left out.
    """
    found: dict[str, _Found] = {"image": {}, "mask": {}}
    for place in places:
        for name in listing.unpacked(place.files):
            path = place.folder / name
            if not place.kind:
                raise ValueError(f"{path} is in no folder of images or masks: move it away")
            stem = spelling.composed(path.stem)
            other = found[place.kind].setdefault((place.split, *place.names, stem), path)
            if other != path:
                raise ValueError(f"{other} and {path} would have one name: rename or remove one")
    pictures = found["image"]
    masks = found["mask"]
    if "test" not in {key[0] for key in masks}:
        tests = [path for key, path in pictures.items() if key[0] == "test"]
        pictures = {key: path for key, path in pictures.items() if key[0] != "test"}
        if tests:
            print(printable(f"  not read: {len(tests):,} pictures of test, which have no mask"))
    if pictures.keys() != masks.keys():
        cut_pictures, own = _without_affix(pictures)
        cut_masks, others = _without_affix(masks)
        if cut_pictures.keys() == cut_masks.keys() and own == others:
            pictures = cut_pictures
            masks = cut_masks
    if alone := pictures.keys() ^ masks.keys():
        key = min(alone)
        near = spelling.near(key[-1], [other[-1] for other in alone if other != key])
        what = f"{len(alone)} files lack the mask or the picture of the same name"
        first = []
        for side in (pictures, masks):
            first += sorted(side[key] for key in alone & side.keys())[:1]
        raise ValueError(f"{root}: {what}, first {join(first)}{near}: add it, or move them away")
    items = []
    for key, path in pictures.items():
        items.append(Item(key[0], "/".join(filter(None, key)), path, mask=masks[key]))
    return items


def _without_affix(found: _Found) -> tuple[_Found, str]:
    """Without the beginning and the end that all names have, and the digits in these."""
    stems = [key[-1] for key in found]
    start = spelling.common_start(stems)
    end = spelling.common_start([stem[len(start) :][::-1] for stem in stems])[::-1]
    cut = {}
    for key, path in found.items():
        stem = key[-1].removeprefix(start).removesuffix(end)
        cut[(*key[:-1], stem)] = path
    return cut, re.sub(r"\D", "", f"{start} {end}")


def with_splits(items: list[Item]) -> tuple[list[Item], str]:
    """All with split "train" or "val", and how that came about; ValueError for other splits.

    Where there are no splits a fifth of each class is held back: whole groups where names have
    them and a class has several, else by a hash of names, the same on every machine.
    """
    there = {item.split for item in items}
    if "train" in there and (val := "val" if "val" in there else "test") in there:
        new = {"train": "train", val: "val"}
        found = [i._replace(split=new[i.split]) for i in items if i.split in new]
        left = len(items) - len(found)
        return found, f"scored on {val}" + (f"; {left:,} of test are left out" if left else "")
    if len(there) > 1:
        raise ValueError(f"samples are for {sorted(there)}, not for train and val: rename folders")
    groups = [_group(item) for item in items]
    grouped = _LEAST_GROUPS <= len({*groups} - {""}) < len(items)
    of_label, units = defaultdict(set), defaultdict(list)
    for item, group in zip(items, groups):
        of_label[item.label].add(group)
    for item, group in zip(items, groups):
        whole = grouped and group and len(of_label[item.label]) > 1
        units[group if whole else f"{item.label}/{item.name}"].append(item)
    by_hash = sorted(units, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    held = _held_back([units[name] for name in by_hash])
    if not held:
        raise ValueError(f"{len(items)} samples are too few to hold any back to score: add more")
    kept = {item.picture for item in held}
    found = [i._replace(split="val" if i.picture in kept else "train") for i in items]
    how = f"whole groups as {next(filter(None, groups))}" if grouped else "a hash of names"
    return found, f"scored on {len(held):,} of {len(items):,} that are held back, by {how}"


def _held_back(units: list[list[Item]]) -> list[Item]:
    """Of each class at most a fifth of its pictures; else its smallest unit that leaves some."""
    counts, held, found = Counter(item.label for unit in units for item in unit), Counter(), []

    def fits(unit: list[Item], most: Callable[[int], int]) -> bool:
        own = Counter(item.label for item in unit)
        return all(held[label] + n <= most(counts[label]) for label, n in own.items())

    def hold(unit: list[Item]) -> None:
        found.extend(unit)
        held.update(item.label for item in unit)

    for unit in units:
        if fits(unit, lambda count: count // 5):
            hold(unit)
    for label in counts:
        if not held[label]:
            own = [unit for unit in units if label in {item.label for item in unit}]
            if own := [unit for unit in own if fits(unit, lambda count: count - 1)]:
                hold(min(own, key=len))
    return found


def _group(item: Item) -> str:
    """The folder, or a name up to its first number where another follows, patient01 of
    patient01_03; or ""."""
    folder, _, name = item.name.rpartition("/")
    if folder:
        return folder
    found = re.match(r"([^\d]*\d[^_\-. ]*)[_\-. ].*\d", name)
    return found[1] if found else ""


def _check_listable(name: str, picture: Path) -> None:
    """Raises ValueError for a name that cannot be a line of a split's list."""
    as_text = os.fsencode(name).decode("utf-8", "replace")
    if as_text != name or name != name.strip() or "\n" in name:
        what = (
            "cannot stand in a list of names: it has a line break, a space at an end, or no UTF-8"
        )
        raise ValueError(f"{str(picture)!a}: the name {what}: rename it, and its mask")


def link(items: list[Item], folder: Path) -> None:
    """Makes in a new folder what the readers "folders" or "class_folders" read, of links."""
    lists = defaultdict(list)
    for split, name, picture, label, mask in items:
        places = {folder / split / label: picture}
        if mask:
            _check_listable(name, picture)
            places = {folder / "images": picture, folder / "labels": mask}
            lists[f"{split}.txt"].append(f"{name}\n")
        for place, path in places.items():
            to = place / f"{name}{path.suffix}"
            to.parent.mkdir(parents=True, exist_ok=True)
            if to.is_symlink():
                both = f"{to.readlink()} and {path}"
                raise ValueError(f"{both} would have one name: rename or remove one")
            to.symlink_to(path)
    for file, names in lists.items():
        (folder / "splits").mkdir(exist_ok=True)
        (folder / "splits" / file).write_text("".join(names), "utf-8")
