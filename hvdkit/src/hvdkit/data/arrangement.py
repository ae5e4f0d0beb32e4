"""Recognizes how a folder of pictures is arranged: class folders, or pictures and their masks.

Masks lie in a folder of their own (masks/, labels/, ...). Splits (train/, valid/, ...) lie above or
below all else, or are missing.
"""

import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from hvdkit.data.readers import listing
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES, OTHER_SUFFIXES

_SPLITS = {"train": "train training", "val": "val valid validation dev", "test": "test testing"}
_IMAGE = "image images img imgs picture pictures photo photos input inputs rgb"
_MASK = "mask masks label labels labelids annotation annotations annot gt target targets "
_MASK += "groundtruth seg segmentation segmentations"
_WORDS = {**_SPLITS, "image": _IMAGE, "mask": _MASK}
_ROLE = {word: role for role, words in _WORDS.items() for word in words.split()}
_KINDS = "|".join(f"{_IMAGE} {_MASK}".split())
_AFFIX = re.compile(rf"^({_KINDS})[_\-. ]|[_\-. ]({_KINDS}|l)$", re.I)
_OF_MASK = re.compile(rf"[_\-. ]({'|'.join(_MASK.split())})$", re.I)
_LEAST_GROUPS = 5
_Found = dict[tuple[str, ...], Path]  # by split, folders, name


class Item(NamedTuple):
    """A picture: its split ("": not known), its name, its class or its mask."""

    split: str
    name: str
    picture: Path
    label: str = ""
    mask: Path | None = None


def recognized(root: Path) -> list[Item]:
    """All labelled pictures; ValueError, naming a file, where the folder does not say."""
    pictures: _Found = {}
    masks: _Found = {}
    others = []
    for path, folders in files(root):
        roles = set().union(*map(_roles, folders))
        if not path.name.lower().endswith((".png",) if "mask" in roles else IMAGE_SUFFIXES):
            others.append(path)
            continue
        split = min(roles & _SPLITS.keys(), default="")
        key = (split, *(name for name in folders if not _roles(name)), path.stem)
        other = (masks if "mask" in roles else pictures).setdefault(key, path)
        if other != path:
            raise ValueError(f"{other} and {path} would have one name: rename or remove one")
    endings = IMAGE_SUFFIXES + OTHER_SUFFIXES
    if unread := [path for path in others if path.name.lower().endswith(endings)]:
        rule = "pictures must be PNG, JPEG or WebP, masks PNG: convert it, or move it away"
        raise ValueError(f"{unread[0]} ({len(unread)} such files) is not read: {rule}")
    if masks and pictures:
        return _pairs(root, pictures, masks)
    for key, path in pictures.items():
        of = pictures.get((*key[:-1], _OF_MASK.sub("", key[-1])), path)
        if of != path:
            raise ValueError(
                f"{path} looks like the mask of {of}: put all masks into a folder masks/ beside a "
                "folder images/, with a folder of each class in both or in none"
            )
    bare = {k: path for k, path in pictures.items() if k[0] == "test" and len(k) == 2}
    if bare and not {"train", "val"} & {k[0] for k in pictures}:
        what = "a class or pictures without one: rename the folder, or move it away"
        raise ValueError(f"{min(bare.values()).parent} may be {what}")
    pictures = {k: path for k, path in pictures.items() if k not in bare}
    folders = [key[1:-1] for key in pictures]
    above = 1 + len([*takewhile(lambda names: len({*names}) == 1, zip(*folders))])
    if above > min(map(len, folders), default=0):
        beside = f" ({others[0].name} is not read)" if others else ""
        raise ValueError(
            f"{root} does not say what its {len(pictures)} pictures are{beside}: class folders, "
            "pictures with masks, VOC, Cityscapes, CIFAR and packed sets are recognized"
        )
    return [Item(k[0], "_".join(k[above + 1 :]), p, k[above]) for k, p in pictures.items()]


def split_of(word: str) -> str:
    """The split that a word means, train, val or test; "" for others."""
    return next((split for split, words in _SPLITS.items() if word.lower() in words.split()), "")


def files(
    folder: Path, inside: tuple[str, ...] = (), above: frozenset[Path] = frozenset()
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """All files of a folder and of those below, each with the names of the folders it is in."""
    if (real := folder.resolve()) in above:
        raise ValueError(f"{folder} leads to a folder that holds it: remove this link")
    for entry in listing.contents(folder, ())[1]:
        if entry.is_dir():
            yield from files(folder / entry.name, (*inside, entry.name), above | {real})
        else:
            yield folder / entry.name, inside


def _roles(folder: str) -> set[str]:
    """What a folder's name says of what is in it: {"train", "mask"} of train_masks; {} of cats."""
    words = re.split(r"[\W\d_]+", folder.lower().replace("ground_truth", "mask"))
    found = {_ROLE.get(word, "") for word in words if word}
    return set() if "" in found else found


def _pairs(root: Path, pictures: _Found, masks: _Found) -> list[Item]:
    """Pictures with the masks of their names, but for `_AFFIX` where names differ."""
    left_out = {"test"} - {split for split, *_ in masks}
    found = [{key: path for key, path in pictures.items() if key[0] not in left_out}, masks]
    if found[0].keys() != masks.keys():
        cut = [{(*k[:-1], _AFFIX.sub("", k[-1])): p for k, p in some.items()} for some in found]
        found = cut if [*map(len, cut)] == [*map(len, found)] else found  # none became one
    if alone := found[0].keys() ^ found[1].keys():
        first = (found[0] | found[1])[min(alone)]
        what = f"{len(alone)} files lack the mask or the picture of the same name"
        raise ValueError(f"{root}: {what}, the first of them {first}: add it, or move them away")
    return [Item(k[0], "/".join(filter(None, k)), p, mask=found[1][k]) for k, p in found[0].items()]


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
    """A name up to its first number where another follows, patient01 of patient01_03; or ""."""
    found = re.match(r"([^\d]*\d[^_\-. ]*)[_\-. ].*\d", item.name.split("/")[-1])
    return found[1] if found else ""


def link(items: list[Item], folder: Path) -> None:
    """Makes in a new folder what the readers "folders" or "class_folders" read, of links."""
    lists = defaultdict(list)
    for split, name, picture, label, mask in items:
        places = {folder / split / label: picture}
        if mask:
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
