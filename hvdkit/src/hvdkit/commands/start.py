"""From a folder of data to a run: reads all of it, writes a flagfile with a reason per choice.

    hvdkit start ~/pets [--name=pets] [--yes] [--train]
    hvdkit start pets.csv --label=breed

It takes class folders, pictures with masks (images/ and masks/, labels/ or annotations/), with or
without splits, a table (CSV, Parquet) of pictures and their classes, VOC, Cityscapes, CIFAR and
packed sets. Tables of numbers and arrays are for a task of your own. It writes configs/NAME.cfg;
runs/NAME-sheet.png, samples as the model gets them; and, unless readers take the folder as it is,
datasets/NAME: links to its files, or the pictures that a table holds. The folder stays as it is. It
measures batch and learning rate, and asks one question.
"""

import contextlib
import math
import os
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvdkit import logs, whole_files
from hvdkit import settings as settings_lib
from hvdkit.commands import browse, start_listed, start_measured
from hvdkit.commands.start_choices import Data, Measured, choices, most
from hvdkit.data import arrangement, check, classes
from hvdkit.data.arrangement import Item
from hvdkit.data.labels import IGNORE
from hvdkit.data.readers import listing
from hvdkit.logs import join
from hvdkit.settings import project
from hvdkit.stop import DONE
from hvdkit.train import task as tasks

_TASKS = {"map": "segmentation", "class": "classification"}
_QUESTION = "Does a mirrored picture keep its label (letters, signs, left or right: n)? [Y/n] "
_SAMPLES = 32  # of the sheet


def _understood(root: Path, links: Path, own: Namespace) -> Data:
    """Reads all samples; ValueError says what is wrong with them."""
    folder, about = root, "splits as they are"
    layout = "" if root.is_file() or own.layout else check.layout_of(root)
    if layout in ("", "class_folders"):
        items = _recognized(root, layout, own, links=links)
        listing.check_once(os.fsencode(item.picture) for item in items)
        items, about = arrangement.with_splits(items)
        if items[0].mask or not (layout and (root / "val").is_dir()):
            arrangement.link(items, links)
            folder, layout = links, "folders" if items[0].mask else "class_folders"
    else:
        _refuse_label(own.label, root)
    faults: list[str] = []
    how = {"classes": 0, "tell": faults.append, "names": [], "read": []}
    train, val = (check.check(folder, split, layout, **how) for split in ("train", "val"))
    white = faults and all("--label_map=255:1" in fault for fault in faults)
    values = {IGNORE: 1} if white and classes.without_foreground(train.of + val.of) else {}
    if values:  # masks of 0 and 255, in both splits
        faults.clear()
        how |= {"values": values}
        train, val = (check.check(folder, split, layout, **how) for split in ("train", "val"))
    for fault in faults:  # a link's name says little, and a table's picture has no file
        real = re.sub(rf"{re.escape(str(links))}/\S+", lambda m: os.path.realpath(m[0]), fault)
        stored = rf"{re.escape(os.path.realpath(links))}/\.pictures/row0*(\d+)\.\w+"
        print(logs.printable(re.sub(stored, rf"row \1 of {root.name}", real)))
    if faults:
        raise ValueError(f"{root}: {len(faults)} fault(s), listed above: mend them, start again")
    if (task := _TASKS[train.kind]) not in tasks.available():
        raise ValueError(f"{root} is for --task={task}: make a fork that starts from that task")
    if layout == "folders":
        _check_masks(root, train.of + val.of)
    return Data(folder, layout, about, task, max(train.classes, val.classes), train, bool(values))


def _check_masks(root: Path, of: np.ndarray) -> None:
    """Raises ValueError where values do not look like classes; `of`: how many pixels have each."""
    used = np.flatnonzero(of[:IGNORE]).tolist()
    blurred = len(used) > 20 and of[1:IGNORE].sum() < of[IGNORE]  # what resizing leaves at edges
    if len(used) < 2 or math.gcd(*used) > 1 or 4 * len(used) < used[-1] or blurred:
        seen = logs.join(np.flatnonzero(of), 8)
        how = f"save them with 0, 1, 2, ... for classes, at least two; {IGNORE} means ignored"
        raise ValueError(f"{root}: the masks hold the values {seen}, and a value is a class: {how}")


def _refuse_label(label: str, root: Path) -> None:
    """Raises ValueError for a --label, as no table is read."""
    if label:
        what = f"--label={label} is a column of a table, and {root} is read without one"
        raise ValueError(f"{what}: leave it out, or give the table")


def _recognized(root: Path, layout: str, own: Namespace, *, links: Path) -> list[Item]:
    """The samples of a folder, or of a table of pictures."""
    if not root.is_dir():
        if root.suffix.lower() not in start_listed.TABLES:
            kinds = join(start_listed.TABLES)
            other = start_listed.refused(root) or f"{root} is no folder, and no table ({kinds})"
            raise ValueError(other)
        return start_listed.understood(root, own.label, links)
    try:  # a table beside what is recognized is a note
        found = arrangement.recognized(root, own.layout)
    except ValueError:
        table = None if layout or own.layout else start_listed.of(root)
        if not table:
            raise
        return start_listed.understood(table, own.label, links)
    _refuse_label(own.label, root)
    return found


def start(root: Path, name: str, own: Namespace) -> str:
    """Writes all files, and returns the flag that trains with them.

    Raises ValueError, and leaves nothing, where the data do not say how to train on them.
    """
    here, flag = project.folder(), f"--flagfile=configs/{name}.cfg"
    cfg, links = here / "configs" / f"{name}.cfg", here / "datasets" / name
    links = links.with_name(f"{name}-links") if links == root else links
    if not root.exists():
        what = "the folder with the pictures, or a table of them"
        raise ValueError(f"{root} does not exist: give {what}")
    if links.is_relative_to(root):
        raise ValueError(f"{root} holds {links.parent}, of all data sets: give the folder of one")
    sheet = here / "runs" / f"{name}-sheet.png"
    whole_files.refuse_other(sheet, browse.SIGN)
    if there := [path for path in (cfg, links) if path.exists()]:
        raise ValueError(f"{there[0]} exists: give another --name, or remove it")
    with contextlib.ExitStack() as undone:
        undone.callback(shutil.rmtree, links, ignore_errors=True)
        data = _understood(root, links, own)
        print(f"{data.task}: {len(data.read.sizes):,} pictures to train on; {data.about}")
        ask = not own.yes
        print(_QUESTION * ask, end="", flush=True)
        mirror = not (ask and sys.stdin.readline().strip().lower().startswith("n"))
        undone.callback(cfg.unlink, missing_ok=True)

        def write(measured: Measured) -> settings_lib.Settings:
            lines = [f"# {root}, by hvdkit start: horovodrun -np 2 python train.py {flag}", ""]
            for why, choice in choices(name, data, measured, mirror=mirror):
                lines[-1:] = [f"# {why}", choice, ""]
            with whole_files.written(cfg) as partial:
                partial.write_text("\n".join(map(logs.printable, lines)), "utf-8")
            return settings_lib.load(["start", flag], settings_lib.of_project()).for_ranks(1)

        config = write(Measured())
        examples, names = browse.samples(config, _SAMPLES)
        sheet.parent.mkdir(exist_ok=True)
        browse.write(sheet, browse.sheet(examples, names))
        print(logs.printable(f"written: {sheet}, samples to look at"))
        if not own.quick:
            about = "measuring batch and learning rate, a minute or two; --quick: neither"
            print(about, flush=True)
            measured = Measured(*start_measured.batch(flag, most(data)))
            write(measured)
            write(measured._replace(rate=start_measured.rate(flag)))
        undone.pop_all()
    print(logs.printable(f"written: {cfg}, with reasons"))
    print(logs.printable(f"to train, in {here}: horovodrun -np 2 python train.py {flag}"))
    return flag


@logs.explained
def main(argv: list[str]) -> int:
    """Returns the exit code, 0 done or 2 wrong use; with --train that of make."""
    made = logs.parser(__doc__)
    made.add_argument("data", type=Path, help="folder of the pictures, or a table of them")
    made.add_argument("--name", help="of the new files; by default the data's")
    made.add_argument("--label", default="", help="column of a table that holds the classes")
    made.add_argument("--layout", default="", help="roles of the folders' levels: any/split/class")
    made.add_argument("--yes", action="store_true", help="ask nothing: mirror pictures")
    made.add_argument("--quick", action="store_true", help="usual batch and rate, not measured")
    made.add_argument("--train", action="store_true", help="train, on all GPUs or two ranks")
    own = made.parse_args(argv[1:])
    root = Path(os.path.abspath(own.data))
    name = own.name or (root.stem if root.is_file() else root.name)
    name = re.sub(r"[^\w.]+", "-", name, flags=re.ASCII).strip("-.") or "mine"
    tf.config.set_visible_devices([], "GPU")  # it would hold the memory that the trials need
    flag = start(root, name, own)
    if own.train:
        sys.stdout.flush()
        words = start_measured.train(flag)
        os.execvp(words[0], words)
    return DONE
