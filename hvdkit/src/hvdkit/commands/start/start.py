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
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import tensorflow as tf

from hvdkit import logs, whole_files
from hvdkit import settings as settings_lib
from hvdkit.commands import browse
from hvdkit.commands.start import measurements, tables
from hvdkit.commands.start.choices import Data, Measured, choices, most
from hvdkit.data import classes
from hvdkit.data.labels import IGNORE
from hvdkit.data.prepare import arrangement, check
from hvdkit.data.prepare.arrangement import Item
from hvdkit.data.readers import listing
from hvdkit.logs import join
from hvdkit.settings import project
from hvdkit.stop import DONE
from hvdkit.train.task import protocol as tasks

_TASKS = {"map": "segmentation", "class": "classification"}
_QUESTION = (
    "Does a mirrored picture keep its label (letters, signs, left or right: n)? [Y/n] "
)
_SAMPLES = 32  # so many samples are on the sheet
_MANY_VALUES = 20  # masks with more may have values that resizing left at edges


def _read_data(root: Path, links: Path, arguments: Namespace) -> Data:
    """Reads all samples; ValueError says what is wrong with them."""
    folder = root
    about = "splits as they are"
    layout = ""
    if root.is_dir() and not arguments.layout:
        layout = check.layout_of(root)
    if layout in ("", "class_folders"):
        items = _recognized(root, layout, arguments, links=links)
        listing.check_once(os.fsencode(item.picture) for item in items)
        items, about = arrangement.with_splits(items)
        has_masks = bool(items[0].mask)
        if has_masks or not layout or not (root / "val").is_dir():
            arrangement.link(items, links)
            folder = links
            layout = "folders" if has_masks else "class_folders"
    else:
        _refuse_label(arguments.label, root)

    counts, faults = _check_splits(folder, layout)
    is_white = _is_white(counts, faults)
    if is_white:
        counts, faults = _check_splits(folder, layout, {IGNORE: 1})
    for fault in faults:
        print(logs.printable(_by_own_name(fault, root, links)))
    if faults:
        raise ValueError(
            f"{root}: {len(faults)} fault(s), listed above: mend them, start again"
        )
    train, val = counts
    task = _TASKS[train.kind]
    if task not in tasks.available():
        raise ValueError(
            f"{root} is for --task={task}: make a fork that starts from that task"
        )
    if layout == "folders":
        _check_masks(root, train.of + val.of)
    return Data(
        folder=folder,
        layout=layout,
        about=about,
        task=task,
        classes=max(train.classes, val.classes),
        train=train,
        is_white=is_white,
    )


def _check_splits(
    folder: Path, layout: str, values: Mapping[int, int] | None = None
) -> tuple[list[check.Counts], list[str]]:
    """Reads both splits: what they hold, and faults; `values`: as --label_map."""
    faults: list[str] = []
    checker = check.Checker(folder, layout, tell=faults.append, values=values)
    counts = [checker.check("train"), checker.check("val")]
    return counts, faults


def _is_white(counts: Sequence[check.Counts], faults: Sequence[str]) -> bool:
    """Whether masks hold 0 and 255 only, and nothing else is wrong."""
    if not faults or not all("--label_map=255:1" in fault for fault in faults):
        return False
    train, val = counts
    return bool(classes.without_foreground(train.of + val.of))


def _by_own_name(fault: str, root: Path, links: Path) -> str:
    """A fault that names a link's file instead of the link, and of a stored picture its row."""
    text = re.sub(
        rf"{re.escape(str(links))}/\S+", lambda match: os.path.realpath(match[0]), fault
    )
    stored = rf"{re.escape(os.path.realpath(links))}/\.pictures/row0*(\d+)\.\w+"
    return re.sub(stored, rf"row \1 of {root.name}", text)


def _check_masks(root: Path, pixels: np.ndarray) -> None:
    """Raises ValueError where values do not look like classes; `pixels`: how many have each."""
    used = np.flatnonzero(pixels[:IGNORE]).tolist()
    is_resized = len(used) > _MANY_VALUES and pixels[1:IGNORE].sum() < pixels[IGNORE]
    is_sparse = len(used) < 2 or math.gcd(*used) > 1 or 4 * len(used) < used[-1]
    if is_sparse or is_resized:
        raise ValueError(
            f"{root}: the masks hold the values {join(np.flatnonzero(pixels), 8)}, and a value is "
            f"a class: save them with 0, 1, 2, ... for classes, at least two; {IGNORE} means "
            "ignored"
        )


def _refuse_label(label: str, root: Path) -> None:
    """Raises ValueError for a --label, as no table is read."""
    if label:
        raise ValueError(
            f"--label={label} is a column of a table, and {root} is read without one: leave it "
            "out, or give the table"
        )


def _recognized(
    root: Path, layout: str, arguments: Namespace, *, links: Path
) -> list[Item]:
    """The samples of a folder, or of a table of pictures."""
    if not root.is_dir():
        tables.refuse_other(root)
        return tables.understood(root, arguments.label, links)
    try:  # a table beside what is recognized is a note
        items = arrangement.recognized(root, arguments.layout)
    except ValueError:
        table = None if layout or arguments.layout else tables.of(root)
        if not table:
            raise
        return tables.understood(table, arguments.label, links)
    _refuse_label(arguments.label, root)
    return items


def start(root: Path, name: str, arguments: Namespace) -> str:
    """Writes all files, and returns the flag that trains with them.

    Raises ValueError, and leaves nothing, where the data do not say how to train on them.
    """
    fork = project.folder()
    flag = f"--flagfile=configs/{name}.cfg"
    cfg = fork / "configs" / f"{name}.cfg"
    sheet = fork / "runs" / f"{name}-sheet.png"
    links = fork / "datasets" / name
    if links == root:
        links = links.with_name(f"{name}-links")
    _check_paths(root, cfg, links, run_dir=fork / "runs" / name)
    whole_files.refuse_other(sheet, browse.SIGN)
    with contextlib.ExitStack() as undone:
        undone.callback(shutil.rmtree, links, ignore_errors=True)
        data = _read_data(root, links, arguments)
        print(
            f"{data.task}: {len(data.train.sizes):,} pictures to train on; {data.about}"
        )
        mirror = not arguments.yes and _may_mirror()
        undone.callback(cfg.unlink, missing_ok=True)

        def write(measured: Measured) -> settings_lib.Settings:
            lines = [
                f"# {root}, by hvdkit start: horovodrun -np 2 python train.py {flag}"
            ]
            for reason, choice in choices(name, data, measured, mirror=mirror):
                lines += [f"# {reason}", choice]
            with whole_files.written(cfg) as partial:
                text = "".join(f"{logs.printable(line)}\n" for line in lines)
                partial.write_text(text, "utf-8")
            return settings_lib.load(
                ["start", flag], settings_lib.of_project()
            ).for_ranks(1)

        config = write(Measured())
        examples, names = browse.samples(config, _SAMPLES)
        sheet.parent.mkdir(exist_ok=True)
        browse.write(sheet, browse.sheet(examples, names))
        print(logs.printable(f"written: {sheet}, samples to look at"))
        if not arguments.quick:
            print(
                "measuring batch and learning rate, a minute or two; --quick: neither",
                flush=True,
            )
            batch, speeds = measurements.batch(flag, most(data))
            measured = Measured(batch, speeds)
            write(measured)
            write(measured._replace(rate=measurements.rate(flag)))
        undone.pop_all()
    print(logs.printable(f"written: {cfg}, with reasons"))
    print(
        logs.printable(f"to train, in {fork}: horovodrun -np 2 python train.py {flag}")
    )
    return flag


def _check_paths(root: Path, cfg: Path, links: Path, *, run_dir: Path) -> None:
    """Raises ValueError: there are no data, or what would be written is there.

    An old run in `run_dir` would be resumed, with what it has learned of other data.
    """
    if not root.exists():
        raise ValueError(
            f"{root} does not exist: give the folder with the pictures, or a table of them"
        )
    if links.is_relative_to(root):
        raise ValueError(
            f"{root} holds {links.parent}, of all data sets: give the folder of one"
        )
    for path in (cfg, links, run_dir):
        if path.exists():
            raise ValueError(f"{path} exists: give another --name, or remove it")


@contextlib.contextmanager
def _signals_end() -> Iterator[None]:
    """A signal ends what is inside as an error does, so that what was written goes."""

    def end(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    handled = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            handled[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)


def _may_mirror() -> bool:
    """The answer; where nobody can give one, no: mirrored letters would be wrong in silence."""
    print(_QUESTION, end="", flush=True)
    answer = sys.stdin.readline()
    if not answer:
        print("nobody answers: not mirrored")
    return bool(answer) and not answer.strip().lower().startswith("n")


@logs.explained
def main(argv: list[str]) -> int:
    """Returns the exit code, 0 done or 2 wrong use; with --train that of make."""
    parser = logs.parser(__doc__)
    add = parser.add_argument
    add("data", type=Path, help="folder of the pictures, or a table of them")
    add("--name", help="of the new files; by default the data's")
    add("--label", default="", help="column of a table that holds the classes")
    add("--layout", default="", help="roles of the folders' levels: any/split/class")
    add("--yes", action="store_true", help="ask nothing: pictures are not mirrored")
    add("--quick", action="store_true", help="usual batch and rate, not measured")
    add("--train", action="store_true", help="train, on all GPUs or two ranks")
    arguments = parser.parse_args(argv[1:])
    root = Path(os.path.abspath(arguments.data))
    name = arguments.name or (root.stem if root.is_file() else root.name)
    name = re.sub(r"[^\w.]+", "-", name, flags=re.ASCII).strip("-.") or "mine"
    # TensorFlow would hold the GPU memory that the trials need.
    tf.config.set_visible_devices([], "GPU")
    with _signals_end():
        flag = start(root, name, arguments)
    if arguments.train:
        sys.stdout.flush()
        command = measurements.train(flag)
        os.execvp(command[0], command)
    return DONE
