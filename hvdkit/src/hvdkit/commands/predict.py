"""Predicts on pictures with the model of a trained run.

    hvdkit predict --run_dir=runs/demo --out=predicted photo.jpg folder_of_photos

Segmentation: for each picture, OUT/labels has a PNG of its classes, at the picture's own size, and
OUT/overlays the picture with the classes drawn over it. Classification: OUT/predictions.csv has the
five most probable classes of each picture, by name where the checkpoint's data card has names. What
else a task's `decode` returns is in OUT/predictions.jsonl, a line a picture.
Pictures can be PNG, JPEG, BMP, GIF, JPEG 2000, PPM, TGA, TIFF or WebP. Files that cannot be read
are listed and skipped, and the exit code is 1. With horovodrun, the ranks share the pictures. Flags
of train.py may follow (--eval_flip, ...).
"""

import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps, UnidentifiedImageError

from hvdkit import logs, whole_files
from hvdkit.checkpoint import files
from hvdkit.data.labels import COLOURS
from hvdkit.data.pipeline import reason_of
from hvdkit.data.readers import pictures
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.world import World, say
from hvdkit.run import load_run
from hvdkit.settings import Settings
from hvdkit.settings.typed import path_argument
from hvdkit.stop import BUG, PREEMPTED, Stop
from hvdkit.train import task_checks
from hvdkit.train.task import Task

_OTHERS = ("BMP", "GIF", "JPEG2000", "PPM", "TGA", "TIFF")  # EPS would start Ghostscript
WRITTEN = ("labels", "overlays", "predictions.csv", "predictions.jsonl")  # in --out
# Of predictions.csv: file, then classes and probabilities in turn; of predictions.jsonl: file, dict
Row = list[Any]
Drawn = tuple[Image.Image, Image.Image]  # classes, overlay
OutputsOf = Callable[[np.ndarray], dict[str, np.ndarray]]  # of a picture


def predict(config: Settings, world: World, stop_signal: StopSignal, *, own: Any) -> None:
    """Every rank must call it. Raises Stop, on all ranks, where not all pictures were predicted."""
    with world.fail_together("making the model"):
        task, model, path, decode = load_run.model_of(config, own.checkpoint, own.ema)
        found = listed(own.pictures, own.out)
        own.out.mkdir(parents=True, exist_ok=True)
    world.check_same(world_lib.weights_sha256(model.variables), f"the weights of {path.name}")
    world.check_same(repr(list(found)), "the names of the pictures")

    outputs_of = of_picture(task, model, decode)
    say(world, f"{len(found)} pictures, by {path}")
    found_rows: list[Row] = []
    faults: list[str] = []
    stopped = False
    mine = list(found.items())[world.rank :: world.size]
    for done, (name, file) in enumerate(mine, start=1):
        if stopped := stop_signal.asked:
            break
        try:  # an error ends no rank here: the others wait for it below
            image = load(file)
            found_rows += write(own.out, name, image=image, outputs=outputs_of(image))
        except tf.errors.ResourceExhaustedError:
            faults.append(f"{file} does not fit into memory; for segmentation try --eval_window")
        except tf.errors.OpError as error:
            faults.append(f"{file}: {reason_of(error)}")
        except (ValueError, OSError) as error:
            faults.append(str(error))
        if world.is_chief:
            logs.progress("pictures", done, len(mine))
    everyone = world.gather_objects((found_rows, faults, stopped), "predict.rows")
    found_rows = sorted((x for theirs, _, _ in everyone for x in theirs), key=lambda row: row[0])
    faults = [fault for _, theirs, _ in everyone for fault in theirs]
    with world.fail_together(f"writing {own.out}"):
        if world.is_chief:
            record(own.out, found_rows, files.read_manifest(path).card.get("class_names", []))
    for fault in faults:
        say(world, f"skipped: {fault}")
    say(world, f"written: {own.out}")
    if any(stopped for _, _, stopped in everyone):
        raise Stop(PREEMPTED, "stopped before the end")
    if faults:
        raise Stop(BUG, f"{len(faults)} of {len(found)} files were skipped, see above")


def of_picture(task: Task, model: keras.Model, decode: load_run.Decode) -> OutputsOf:
    """The function from a picture, uint8 [height, width, 3], to what its outputs mean, by name."""

    @tf.function(input_signature=[tf.TensorSpec([None, None, 3], tf.uint8)], autograph=False)
    def outputs_of(image: tf.Tensor) -> dict[str, tf.Tensor]:
        inputs = tf.nest.map_structure(lambda part: part[None], task.picture_inputs(image))
        decoded = decode(task_checks.outputs(task, model, inputs))
        return {name: value[0] for name, value in decoded.items()}

    return lambda image: {n: x.numpy() for n, x in outputs_of(tf.constant(image)).items()}


def listed(named: Sequence[Path], out: Path) -> dict[str, Path]:
    """The files to predict on by the name of their output; of folders all but what is in `out`."""
    found: dict[str, Path] = {}
    written = tuple(f"{os.path.realpath(out / name)}/" for name in WRITTEN)
    for path in named:
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        inside = [path]
        if path.is_dir():
            inside = [p for p in _inside(path) if not f"{os.path.realpath(p)}/".startswith(written)]
        for file in inside:
            name = str(file.relative_to(path) if path.is_dir() else Path(file.name))
            if found.setdefault(name, file) != file:
                raise ValueError(f"{found[name]} and {file} would both be written as {name}")
    if not found:
        raise ValueError(f"no files in {', '.join(map(str, named))}")
    return found


def _inside(path: Path, above: tuple[str, ...] = ()) -> list[Path]:
    """All but hidden files, in linked folders too; with dead links, which are reported later."""
    real, found = os.path.realpath(path), []
    for inner in sorted(path.iterdir()) if real not in above else ():  # links may lead in a circle
        if not inner.name.startswith("."):
            found += _inside(inner, (*above, real)) if inner.is_dir() else [inner]
    return found


def load(file: Path) -> np.ndarray:
    """The picture as viewers show it, uint8 [H, W, 3]; what training takes is decoded as there.

    Raises ValueError or OSError, naming the file and what is wrong with it.
    """
    if file.exists() and not file.is_file():  # reading a pipe would block
        raise ValueError(f"{file} is no regular file")
    return decoded(file.read_bytes(), file)


def decoded(data: bytes, file: object) -> np.ndarray:
    """The picture in a file's bytes, as `load` returns it; `file` is named where it raises."""
    fault = pictures.refused(data)
    try:
        if not fault and (tf.io.is_jpeg(data) | pictures.is_webp(data) or data[:4] == b"\x89PNG"):
            return pictures.decode_image(tf.constant(data)).numpy()
        if not fault:
            with Image.open(io.BytesIO(data), formats=_OTHERS) as picture:
                fault = pictures.too_large(*picture.size)
                # Of a TIFF's colours of 16 bits Pillow would keep the high 8.
                bits = picture.tag_v2.get(258, (1,)) if picture.format == "TIFF" else (1,)
                if not fault and picture.mode[0] not in "IF" and max(bits) <= 8:
                    return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
            fault = fault or "has more than 8 bits a channel: convert it to 8 bits"
    except tf.errors.OpError:
        fault = "is damaged: it cannot be decoded"
    except UnidentifiedImageError:
        fault = "is no picture in a format that is read"
    except Image.DecompressionBombError:  # of twice the limit, before its size is known here
        fault = f"has more pixels than --max_pixels={pictures.most_pixels}"
    # Whatever Pillow raises at damaged files: RuntimeError, struct.error, ZeroDivisionError, ...
    except Exception as error:
        fault = f"cannot be read: {error}"
    raise ValueError(f"{file} {fault}")


def write(out: Path, name: str, *, image: np.ndarray, outputs: dict[str, Any]) -> list[Row]:
    """Writes what can be drawn; returns the rows of anything else."""
    pictures_of = drawn(name, image=image, outputs=outputs)
    for folder, picture in zip(("labels", "overlays"), pictures_of or ()):
        file = out / folder / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_files.written(file) as partial:
            picture.save(partial, "PNG")
    return rows(name, outputs, drawn=bool(pictures_of))


def drawn(name: str, *, image: np.ndarray, outputs: dict[str, Any]) -> Drawn | None:
    """ "classes" [height, width] at the picture's size, and drawn over it; None: there are none."""
    classes, chances = outputs.get("classes"), outputs.get("probabilities")
    if classes is not None and chances is not None and np.any(chances != chances):
        raise ValueError(f"{name}: the model's outputs are no numbers (NaN), so it has no class")
    if np.ndim(classes) != 2:
        return None
    if classes.max(initial=0) >= len(COLOURS) or np.shape(chances)[2:] > (len(COLOURS),):
        raise ValueError(f"{name}: more than {len(COLOURS)} classes: a PNG of labels holds 256")
    classes = Image.fromarray(classes.astype(np.uint8), "P")
    classes = classes.resize(image.shape[1::-1], Image.Resampling.NEAREST)
    classes.putpalette(COLOURS.tobytes())
    return classes, Image.blend(Image.fromarray(image), classes.convert("RGB"), 0.5)


def rows(name: str, outputs: dict[str, Any], *, drawn: bool) -> list[Row]:
    """The five most probable classes, unless they are `drawn`; then the other outputs by name."""
    classes, chances, found = outputs.get("classes"), outputs.get("probabilities"), []
    if np.ndim(classes) == 0 and classes is not None and np.ndim(chances) == 1:
        first = np.argsort(-chances, kind="stable")[:5]
        found = [[name, *(x for c in first for x in (int(c), float(chances[c])))]]
    told = ("classes", "probabilities") if drawn or found else ()
    others = {part: _plain(value) for part, value in outputs.items() if part not in told}
    return found + [[name, others]] * bool(others)


def _plain(value: Any) -> Any:
    """Numbers and texts, in lists; NaN and infinity become null, as in the run's records."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.ndarray) and value.ndim:
        return [_plain(part) for part in value]
    return whole_files.without_nan(value.item() if hasattr(value, "item") else value)


def record(out: Path, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Writes and prints the rows; `names` of the classes, if any."""
    if listed := [row for row in rows if not isinstance(row[1], dict)]:
        table(out / "predictions.csv", listed, names)
    if others := [row for row in rows if isinstance(row[1], dict)]:
        with whole_files.written(out / "predictions.jsonl") as partial:
            partial.write_text("".join(json.dumps({"file": n} | x) + "\n" for n, x in others))
    for name, found in others:
        print(logs.printable(f"{name}: {json.dumps(found):.200}"))


def table(out: Path, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Writes and prints the rows; `names` of the classes may be empty."""
    name_of = {str(number): name for number, name in enumerate(names)}
    named = [[file, *(name_of.get(str(x), x) for x in pairs)] for file, *pairs in rows]
    head = [f"{x}_{i + 1}" for i in range(len(rows[0]) // 2) for x in ("class", "p")]
    whole_files.write_csv(out, [["file", *head], *named])
    for file, *pairs in named:
        likeliest = (f"{c} {p:.1%}" for c, p in zip(pairs[::2], pairs[1::2]))
        print(logs.printable(f"{file}: {'  '.join(likeliest)}"))


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 files were skipped, 2 wrong use, 75 stopped."""
    made = load_run.parser(__doc__)
    made.add_argument("--out", type=path_argument, required=True, help="output folder")
    made.add_argument("pictures", nargs="+", type=Path, metavar="FILE_OR_FOLDER")
    own, flags = made.parse_known_args(argv[1:])
    config = load_run.settings(own.run_dir, ["--eval_crop=0", *flags])
    return load_run.on_ranks(config, own, predict)
