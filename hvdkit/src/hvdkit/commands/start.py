"""From a folder of pictures to a run: reads all of it, writes a flagfile with a reason per choice.

    hvdkit start ~/pets [--name=pets] [--yes] [--train]

It takes class folders, pictures with masks (images/ and masks/, labels/ or annotations/), with or
without splits, VOC, Cityscapes, CIFAR and packed sets. It writes configs/NAME.cfg;
runs/NAME-sheet.png, samples as the model gets them; and, unless readers take the folder as it is,
datasets/NAME with links to its files. The folder stays as it is. It asks one question.
"""

import contextlib
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from PIL import Image

from hvdkit import logs, whole_files
from hvdkit import settings as settings_lib
from hvdkit.commands import browse
from hvdkit.data import arrangement, check
from hvdkit.data.labels import IGNORE
from hvdkit.settings import project
from hvdkit.stop import DONE
from hvdkit.train import task as tasks

_TASKS = {"map": "segmentation", "class": "classification"}
_MANY = 2000  # pictures: with fewer a large network learns little
_QUESTION = "Does a mirrored picture keep its label (letters, signs, left or right: n)? [Y/n] "


class _Data(NamedTuple):
    """The folder and layout to read, about its splits, what was read of the one to train on."""

    folder: Path
    layout: str
    about: str
    task: str
    classes: int
    read: check.Counts
    white: bool  # label pictures hold 0 and 255 only


def _understood(root: Path, links: Path) -> _Data:
    """Reads all samples; ValueError says what is wrong with them."""
    folder, about, layout = root, "splits as they are", check.layout_of(root)
    if layout in ("", "class_folders"):
        items, about = arrangement.with_splits(arrangement.recognized(root))
        if items[0].mask or not (layout and (root / "val").is_dir()):
            arrangement.link(items, links)
            folder, layout = links, "folders" if items[0].mask else "class_folders"
    faults: list[str] = []
    how = {"classes": 0, "tell": faults.append, "names": []}
    train, val = (check.check(folder, split, layout, **how) for split in ("train", "val"))
    white = faults and all("--label_map=255:1" in fault for fault in faults)
    values = {IGNORE: 1} if white and check.without_foreground(train.of + val.of) else {}
    if values:  # masks of 0 and 255, in both splits
        faults.clear()
        how |= {"values": values}
        train, val = (check.check(folder, split, layout, **how) for split in ("train", "val"))
    for fault in faults:  # a link's name says little
        real = re.sub(rf"{re.escape(str(links))}/\S+", lambda m: os.path.realpath(m[0]), fault)
        print(logs.printable(real))
    if faults:
        raise ValueError(f"{root}: {len(faults)} fault(s), listed above: mend them, start again")
    if (task := _TASKS[train.kind]) not in tasks.available():
        raise ValueError(f"{root} is for --task={task}: make a fork that starts from that task")
    of = train.of + val.of
    used = np.flatnonzero(of[:IGNORE]).tolist()
    blurred = len(used) > 20 and of[1:IGNORE].sum() < of[IGNORE]  # what resizing leaves at edges
    odd = len(used) < 2 or math.gcd(*used) > 1 or 4 * len(used) < used[-1] or blurred
    if layout == "folders" and odd:
        seen = logs.join(np.flatnonzero(of), 8)
        raise ValueError(
            f"{root}: the masks hold the values {seen}, and a value is a class: save them with 0, "
            f"1, 2, ... for classes, at least two; {IGNORE} means ignored"
        )
    return _Data(folder, layout, about, task, max(train.classes, val.classes), train, bool(values))


def _choices(name: str, data: _Data, *, mirror: bool) -> Iterator[tuple[str, str]]:
    """Reason and flag of each choice."""
    maps, gpus = data.task == "segmentation", len(tf.config.list_physical_devices("GPU"))
    count = len(data.read.sizes)
    side = sorted(map(min, data.read.sizes))[count // 2]
    large = gpus and count >= _MANY and side > 64 and not maps
    crop = min(side, (256 if gpus else 128) if maps else 224 if large else 56)
    batch = min(16 if maps and not gpus else 32, 2 ** int(math.log2(max(16, count)) - 2))
    batch = max(batch, gpus)
    epochs = max(30, 400 * batch // count)
    own = project.folder()
    where = data.folder.relative_to(own) if data.folder.is_relative_to(own) else data.folder
    yield "A label for each pixel" if maps else "A label for each picture", f"--task={data.task}"
    yield f"{count:,} pictures to train on; {data.about}", f"--data_dir={where}"
    yield "How they lie there", f"--data_format={data.layout}"
    if data.white:
        yield "The masks hold 0 and 255, which would mean ignored", f"--label_map={IGNORE}:1"
    yield "Results; given again, the run resumes", f"--run_dir=runs/{name}"
    yield "The highest label, and 1 more", f"--num_classes={data.classes}"
    why = "Many photographs and a GPU" if large else "Large ones need many photographs and a GPU"
    yield why, f"--model={'resnet50' if large else 'small'}"
    yield "Whether a mirrored picture keeps its label", f"--mirror={'on' if mirror else 'off'}"
    yield f"Pixels of a crop; half of all have {side} or more", f"--image_size={max(8, crop & ~7)}"
    yield "Samples a step, over all ranks", f"--global_batch_size={batch}"
    yield "Passes over the data; at least 400 steps", f"--epochs={epochs}"
    yield "Forgives a rate that is not tuned", "--optimizer=adam"
    yield "Usual with it; --find_lr suggests another", f"--base_lr={0.001 if large else 0.003}"
    yield "Adam's first steps are rough", f"--warmup_steps={epochs / 10:g}epochs"
    yield "Against learning by heart", "--weight_decay=0.0001"
    yield "Between evaluations", f"--eval_every={epochs / 5:g}epochs"
    yield "Between checkpoints", f"--checkpoint_every={epochs / 5:g}epochs"
    yield "Without its first #, rare classes count as much as others", f"# {data.read.weights()}"


def start(root: Path, name: str, *, ask: bool) -> str:
    """Writes all files, and returns what `make` is to be told to train.

    Raises ValueError, and leaves nothing, where the folder does not say how to train on it.
    """
    here, flagfile = project.folder(), f"--flagfile=configs/{name}.cfg"
    cfg, links = here / "configs" / f"{name}.cfg", here / "datasets" / name
    links = links.with_name(f"{name}-links") if links == root else links
    sheet = here / "runs" / f"{name}-sheet.png"
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder: give the one with the pictures")
    if links.is_relative_to(root):
        raise ValueError(f"{root} holds {links.parent}, of all data sets: give the folder of one")
    if there := [path for path in (cfg, links) if path.exists()]:
        raise ValueError(f"{there[0]} exists: give another --name, or remove it")
    with contextlib.ExitStack() as undone:
        undone.callback(shutil.rmtree, links, ignore_errors=True)
        data = _understood(root, links)
        print(f"{data.task}: {len(data.read.sizes):,} pictures to train on; {data.about}")
        print(_QUESTION * ask, end="", flush=True)
        mirror = not (ask and sys.stdin.readline().strip().lower().startswith("n"))
        lines = [f"# {root}, by hvdkit start; make -o setup train ARGS={flagfile}", ""]
        for why, flag in _choices(name, data, mirror=mirror):
            lines[-1:] = [f"# {why}", flag, ""]
        undone.callback(cfg.unlink, missing_ok=True)
        with whole_files.written(cfg) as partial:
            partial.write_text("\n".join(map(logs.printable, lines)), "utf-8")
        config = settings_lib.load(["start", flagfile], settings_lib.of_project())
        samples = browse.samples(config.for_ranks(1), 32)
        sheet.parent.mkdir(exist_ok=True)
        Image.fromarray(browse.sheet(*samples)).save(sheet)
        undone.pop_all()
    print(logs.printable(f"written: {cfg}, with reasons; {sheet}, samples to look at"))
    print(logs.printable(f"to train, in {here}: make -o setup train ARGS={flagfile}"))
    return f"ARGS={flagfile}"


@logs.explained
def main(argv: list[str]) -> int:
    """Returns the exit code, 0 done or 2 wrong use; with --train that of make."""
    made = logs.parser(__doc__)
    made.add_argument("data", type=Path, help="folder of the pictures")
    made.add_argument("--name", help="of the new files; by default the folder's")
    made.add_argument("--yes", action="store_true", help="ask nothing: mirror pictures")
    made.add_argument("--train", action="store_true", help="train, on all GPUs or two ranks")
    own = made.parse_args(argv[1:])
    root = Path(os.path.abspath(own.data))
    name = re.sub(r"[^\w.]+", "-", own.name or root.name, flags=re.ASCII).strip("-.") or "mine"
    flags = start(root, name, ask=not own.yes)
    if own.train:
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        sys.stdout.flush()
        os.execvp("make", ["make", "-sC", str(project.folder()), "-o", "setup", "train", flags])
    return DONE
