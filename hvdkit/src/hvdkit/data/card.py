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

from hvdkit import whole_files
from hvdkit.data import classes
from hvdkit.data.source import Source
from hvdkit.logs import join, printable
from hvdkit.settings import Settings

Card = Mapping[str, Any]
# Limits of the file of names. Beyond them only the number of samples is kept.
_MOST_NAMES = 5_000_000
_MOST_BYTES = 2**31


def made(
    config: Settings, train: Source, val: Source, *, augmentation: Card
) -> dict[str, Any]:
    """The card of a run, as JSON; `augmentation`: what the task says that it does to samples."""
    return {
        "train": _split_card(config.train_split, train),
        "val": _split_card(config.val_split, val),
        "class_names": classes.of(train),
        "num_classes": config.num_classes,
        "label_map": config.label_map,
        "colour_order": "RGB, 0 to 255",
        "image_size": config.image_size,
        "augmentation": json.loads(
            json.dumps(whole_files.without_nan(dict(augmentation)))
        ),
    }


def _split_card(name: str, source: Source) -> dict[str, Any]:
    card = {"split": name, "samples": len(source), "fingerprint": source.fingerprint()}
    # A source has `contents` where `hvdkit check --hash` found them.
    if contents := getattr(source, "contents", ""):
        card["contents"] = contents
    return card


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
    train_before = before.get("train")
    train_now = now.get("train")
    if not train_before or not train_now:
        return []
    # Contents are known where `hvdkit check --hash` was called, then and now.
    contents_before = train_before.get("contents")
    contents_now = train_now.get("contents")
    if train_before["fingerprint"] != train_now["fingerprint"]:
        old_names = _kept_names(_file(checkpoint.resolve().parent.parent, before))
        change = _change(old_names, before, now, source)
    elif contents_before and contents_now and contents_before != contents_now:
        samples = train_now["samples"]
        change = f"the same {samples:,} samples have files of other contents, by --hash"
    else:
        return []
    if not accepted:
        raise ValueError(
            f"the training data changed since {checkpoint.name} ({change}): put them back, give "
            "--accept_changed_data, or begin anew with --resume=never or another --run_dir"
        )
    return [f"the training data changed: {change}"]


def _change(
    old_names: list[bytes] | None, before: Card, now: Card, source: object
) -> str:
    """What changed; `old_names`: those of the samples of `before`, if they are known."""
    old_count = before["train"]["samples"]
    count = now["train"]["samples"]
    if before.get("class_names") != now.get("class_names"):
        return f"{old_count:,} samples then, {count:,} now, other classes"
    sample_names = getattr(source, "sample_names", None)
    if old_names is None or sample_names is None:
        return f"{old_count:,} samples then, {count:,} now; which ones changed is not known"

    names = list(sample_names())
    gone = set(old_names).difference(names)
    added = set(names).difference(old_names)
    if gone or added:
        return (
            f"{old_count:,} samples then, {count:,} now: {len(gone):,} gone{_shown(gone)}, "
            f"{len(added):,} added{_shown(added)}"
        )
    if old_names != names:
        return f"the same {len(names):,} files in another order"
    return f"the same {len(names):,} files of other sizes, or with other labels"


def lacking(name: str, source: Source) -> str:
    """A note about classes of which a split (train or val) has no sample, as far as is known."""
    class_counts = getattr(source, "class_counts", tuple)
    counts = zip(classes.of(source), class_counts())
    missing = [class_name for class_name, count in counts if count == 0]
    return f"the {name} split has no sample of {join(missing)}" if missing else ""


def _shown(names: set[bytes]) -> str:
    """The first of these names, in brackets; "" for none."""
    first = [printable(os.fsdecode(name)) for name in sorted(names)]
    return f" ({join(first, 3)})" if names else ""


def _file(run_dir: Path, card: Card) -> Path:
    # A source's fingerprint may be any text, and its hash is a file's name.
    name = hashlib.sha256(card["train"]["fingerprint"].encode()).hexdigest()[:16]
    return run_dir / f"samples-{name}.z"


def _kept_names(file: Path) -> list[bytes] | None:
    """The names in a file of `keep_names`; None where it cannot be read."""
    try:
        data = zlib.decompressobj().decompress(
            whole_files.read(file, _MOST_BYTES), _MOST_BYTES
        )
    except (OSError, ValueError, zlib.error):
        return None
    return data.split(b"\0")
