"""Recognizes how a folder of pictures is arranged: class folders, or pictures and their masks.

Masks lie in a folder of their own (masks/, labels/, annotations/, ...) or are called NAME_mask.png.
Splits (train/, valid/, ...) may lie above or below all else, or be missing.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from hvdkit.data.readers import listing
from hvdkit.data.readers.pictures import IMAGE_SUFFIXES, OTHER_SUFFIXES
from hvdkit.logs import join

KNOWN = "class folders, pictures with masks, VOC, Cityscapes, CIFAR and packed sets are recognized"
_ROLES = {
    "train": "train training",
    "val": "val valid validation dev eval",
    "test": "test testing",
    "image": "image images img imgs picture pictures photo photos input inputs rgb",
    "mask": "mask masks label labels annotation annotations annot gt ground truth groundtruth seg "
    "target targets segmentation segmentations labelids",
}
_ROLE = {word: role for role, words in _ROLES.items() for word in words.split()}
_SPLITS = {"train", "val", "test"}
_WORDS = "|".join(word for word, role in _ROLE.items() if role not in _SPLITS)
_AFFIX = re.compile(rf"^({_WORDS})[_\-. ]|[_\-. ]({_WORDS})$", re.I)
_HELD_BACK = 0.2  # of the pictures, where there are no splits
_LEAST_GROUPS = 5


class Item(NamedTuple):
    """A picture: its split ("": not known), its name, and its class or the path of its mask."""

    split: str
    name: str
    picture: Path
    label: str | Path


class _File(NamedTuple):
    path: Path
    folders: tuple[str, ...]  # in the data set

    def roles(self) -> set[str]:
        name = {"mask"} if re.search(r"[_\-]mask$", self.path.stem, re.I) else set()
        return name.union(*map(_roles, self.folders))

    def split(self) -> str:
        return min(self.roles() & _SPLITS, default="")

    def inner(self, dropped: set[str]) -> tuple[str, ...]:
        """Its folders but those whose names only say what is in them."""
        return tuple(f for f in self.folders if not _roles(f) or _roles(f) - dropped)


def recognized(root: Path) -> list[Item]:
    """All labelled pictures; ValueError, naming files, where this folder does not say."""
    every = [*_walk(root, ())]
    files = [file for file in every if file.path.name.lower().endswith(IMAGE_SUFFIXES)]
    others = [file.path.name for file in every if file not in files]
    if not files:
        raise ValueError(f"{root} holds {join(others) or 'nothing'} and no PNG or JPEG: {KNOWN}")
    masks = [file for file in files if "mask" in file.roles()]
    has_masks = 0 < len(masks) < len(files)
    unread = [name for name in others if name.lower().endswith(OTHER_SUFFIXES)]
    unread += [f.path.name for f in masks if f.path.suffix.lower() != ".png" and has_masks]
    if unread:
        raise ValueError(
            f"{root}: {join(unread)}: pictures must be PNG or JPEG, masks PNG: convert them, or "
            "move them away"
        )
    return _pairs(root, files, masks) if has_masks else _classes(root, files, others)


def _walk(folder: Path, inside: tuple[str, ...]) -> Iterator[_File]:
    for entry in listing.contents(folder, ())[1]:
        if entry.is_dir():
            yield from _walk(folder / entry.name, (*inside, entry.name))
        else:
            yield _File(folder / entry.name, inside)


def _roles(folder: str) -> set[str]:
    """What a folder's name says of what is in it: {"train", "mask"} of train_masks; {} of cats."""
    found = {_ROLE.get(word, "") for word in re.split(r"[\W_]+", folder.lower()) if word}
    return set() if "" in found else found


def _pairs(root: Path, files: list[_File], masks: list[_File]) -> list[Item]:
    """Pictures and masks of one name, but for `_AFFIX` where names differ."""
    kinds: list[dict[tuple[str, str], Path]] = []
    for affix in (re.compile("$^"), _AFFIX):
        kinds = [{}, {}]
        for file in files:
            name = "/".join((*file.inner({*_ROLES}), affix.sub("", file.path.stem)))
            kind = kinds[file in masks]
            if (other := kind.setdefault((file.split(), name), file.path)) != file.path:
                raise ValueError(f"{other} and {file.path} have one name: leave one of them")
        if kinds[0].keys() >= kinds[1].keys():
            break
    pictures, labels = kinds
    labelled = {split for split, _ in labels}  # others, as a test split without masks, are left out
    alone = [path for key, path in pictures.items() if key not in labels and key[0] in labelled]
    if alone := [*alone, *(labels[key] for key in labels.keys() - pictures.keys())]:
        raise ValueError(
            f"{root}: {len(alone)} files lack a mask or a picture of the same name "
            f"({join(sorted(alone), 2)}): add it, or move them away"
        )
    return [
        Item(split, f"{split}/{name}" if split else name, pictures[split, name], label)
        for (split, name), label in labels.items()
    ]


def _classes(root: Path, files: list[_File], beside: list[str]) -> list[Item]:
    """The class is the first folder below what all files have in common."""
    dropped = _SPLITS if all(file.split() for file in files) else set()
    dropped |= {"image"} if all("image" in file.roles() for file in files) else set()
    inner = [file.inner(dropped) for file in files]
    above = len([*takewhile(lambda same: len({*same}) == 1, zip(*inner))])
    found = []
    for file, folders in zip(files, inner):
        if len(folders) == above:
            raise ValueError(
                f"{root}: {file.path} lies in no class's folder, so its class is unknown"
                f"{f' ({join(beside, 2)}: not read)' if beside else ''}: {KNOWN}"
            )
        name = "_".join((*folders[above + 1 :], file.path.stem))
        found.append(
            Item(file.split() if dropped & _SPLITS else "", name, file.path, folders[above])
        )
    return found


def with_splits(items: list[Item]) -> tuple[list[Item], str]:
    """All with split "train" or "val", and how that came about, in words.

    Where there are no splits a fifth of each class is held back: whole groups where names have
    them, else by a hash of names, the same on every machine. Raises ValueError for other splits.
    """
    there = {item.split for item in items}
    if "train" in there and (val := "val" if "val" in there else "test") in there:
        kept = [item for item in items if item.split in ("train", val)]
        kept = [item._replace(split="train" if item.split == "train" else "val") for item in kept]
        return kept, f"trained on train, scored on {val}, as they are"
    if len(there) > 1:
        raise ValueError(
            f"pictures lie in splits {join(map(repr, sorted(there)))}, none to train on"
        )
    groups = [_group(item) for item in items]
    grouped = _LEAST_GROUPS <= len({*groups}) < len(items)
    units = defaultdict(list)
    for item, group in zip(items, groups):
        label = item.label if isinstance(item.label, str) else ""
        units[group if grouped else f"{label}/{item.name}"].append(item)
    strata = defaultdict(list)
    for key in sorted(units, key=lambda key: hashlib.sha256(os.fsencode(key)).digest()):
        classes = {item.label for item in units[key] if isinstance(item.label, str)}
        strata[frozenset(classes)].append(units[key])
    found = []
    for stratum in strata.values():
        left = _HELD_BACK * sum(map(len, stratum)) * (len(stratum) > 1)
        for unit in stratum:
            found += [item._replace(split="val" if left > 0 else "train") for item in unit]
            left -= len(unit)
    how = f"whole groups as {groups[0]}" if grouped else "a hash of names"
    return found, f"a fifth of the pictures is held back to score, by {how}"


def _group(item: Item) -> str:
    """A name up to its first number where another follows: patient01 of patient01_03."""
    words = re.split(r"([_\-. ]+)", item.name.split("/")[-1])
    places = [n for n, word in enumerate(words) if re.search(r"\d", word)]
    return "".join(words[: places[0] + 1]) if len(places) > 1 else item.name


def link(items: list[Item], folder: Path) -> None:
    """Makes in a new folder what the readers "folders" or "class_folders" read, of links."""
    for item in items:
        if is_class := isinstance(item.label, str):
            places = [(item.picture, folder / item.split / item.label)]
        else:
            places = [(item.picture, folder / "images"), (item.label, folder / "labels")]
        for path, place in places:
            to = place / f"{item.name}{path.suffix}"
            to.parent.mkdir(parents=True, exist_ok=True)
            to.symlink_to(path)
        if not is_class:
            (folder / "splits").mkdir(exist_ok=True)
            with open(folder / "splits" / f"{item.split}.txt", "a", encoding="utf-8") as file:
                file.write(f"{item.name}\n")
