"""The data card: what a model's outputs mean and what it was trained on.

It is in the manifest of each checkpoint, and beside an exported model. The names of the training
samples are in RUN_DIR/samples-HASH.z, so that a resume can say which ones changed.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import whole_files
from hvdkit.data import classes
from hvdkit.data.source import Source
from hvdkit.logs import join, printable
from hvdkit.settings import Settings

Card = Mapping[str, Any]
_MOST_NAMES, _MOST_BYTES = 5_000_000, 2**31  # that are kept; of more, their number only


def made(config: Settings, train: Source, val: Source, *, augmentation: Card) -> dict[str, Any]:
    """The card of a run, as JSON; `augmentation`: what the task says that it does to samples."""
    splits = {"train": (config.train_split, train), "val": (config.val_split, val)}
    about = {}
    for part, (name, source) in splits.items():
        about[part] = {"split": name, "samples": len(source), "fingerprint": source.fingerprint()}
        if contents := getattr(source, "contents", ""):  # where `hvdkit check --hash` found them
            about[part]["contents"] = contents
    return about | {
        "class_names": classes.of(train),
        "num_classes": config.num_classes,
        "label_map": config.label_map,
        "colour_order": "RGB, 0 to 255",
        "image_size": config.image_size,
        "augmentation": json.loads(json.dumps(whole_files.without_nan(dict(augmentation)))),
    }


def keep_names(run_dir: Path, card: Card, source: Source) -> None:
    """Writes the names of the training samples into a run's folder, where they have names."""
    file = _file(run_dir, card)
    names = getattr(source, "sample_names", None)
    if names is None or len(source) > _MOST_NAMES or file.exists():
        return
    with whole_files.written(file) as partial:
        partial.write_bytes(zlib.compress(b"\0".join(names()), 1))


def check(
    checkpoint: Path, before: Card, now: Card, *, source: Source | None, accepted: bool
) -> list[str]:
    """How the training data differ from those of a checkpoint, in words; [] where they do not.

    `before`, `now`: the checkpoint's card and this run's; `source`: the training samples now;
    `accepted`: whether they may differ, else ValueError.
    """
    was, there = before.get("train"), now.get("train")
    if not was or not there:
        return []
    # Contents are known where `hvdkit check --hash` was called, then and now.
    contents = was.get("contents"), there.get("contents")
    if was["fingerprint"] != there["fingerprint"]:
        old = _kept(_file(checkpoint.resolve().parent.parent, before))
        what = _changed(old, before, now, source)
    elif all(contents) and contents[0] != contents[1]:
        what = f"the same {there['samples']:,} samples have files of other contents, by --hash"
    else:
        return []
    if not accepted:
        ways = "give --accept_changed_data, or begin anew with --resume=never or another --run_dir"
        since = f"the training data changed since {checkpoint.name} ({what})"
        raise ValueError(f"{since}: put them back, {ways}")
    return [f"the training data changed: {what}"]


def _changed(old: list[bytes] | None, before: Card, now: Card, source: Source) -> str:
    """What changed; `old`: the names of the samples of `before`, if they are known."""
    was, there = before["train"], now["train"]
    counts = f"{was['samples']:,} samples then, {there['samples']:,} now"
    if before.get("class_names") != now.get("class_names"):
        return f"{counts}, other classes"
    new = getattr(source, "sample_names", None)
    if old is None or new is None:
        return f"{counts}; which ones changed is not known"
    new = list(new())
    gone, added = sorted({*old} - {*new}), sorted({*new} - {*old})
    if not gone and not added:
        what = "in another order" if old != new else "of other sizes, or with other labels"
        return f"the same {len(new):,} files {what}"
    return f"{counts}: {len(gone):,} gone{_named(gone)}, {len(added):,} added{_named(added)}"


def lacking(name: str, source: Source) -> str:
    """A note about classes of which a split (train or val) has no sample, as far as is known."""
    names, counts = classes.of(source), getattr(source, "class_counts", tuple)
    missing = [names[n] for n in np.flatnonzero(np.equal(counts(), 0)) if n < len(names)]
    return f"the {name} split has no sample of {join(missing)}" if missing else ""


def _named(names: list[bytes]) -> str:
    return f" ({join([printable(os.fsdecode(name)) for name in names], 3)})" if names else ""


def _file(run_dir: Path, card: Card) -> Path:
    # A source's fingerprint may be any text.
    name = hashlib.sha256(card["train"]["fingerprint"].encode()).hexdigest()[:16]
    return run_dir / f"samples-{name}.z"


def _kept(file: Path) -> list[bytes] | None:
    """The names in a file of `keep_names`; None where it cannot be read."""
    try:
        data = zlib.decompressobj().decompress(whole_files.read(file, _MOST_BYTES), _MOST_BYTES)
    except (OSError, ValueError, zlib.error):
        return None
    return data.split(b"\0")
