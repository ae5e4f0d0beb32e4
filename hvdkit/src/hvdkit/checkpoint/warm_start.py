"""Weights to start from: of another run, a .keras file or a keras.applications backbone."""

import io
import math
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import h5py
import keras
import numpy as np

from hvdkit import logs
from hvdkit.checkpoint import files
from hvdkit.logs import join
from hvdkit.ranks.world import raw
from hvdkit.settings import Settings
from hvdkit.train import preprocessing
from hvdkit.train.state import Held, names_of_model

_SMALLEST = 1_100  # bytes in one: gzip reaches 1,032


def start(model: keras.Model, config: Settings) -> None:
    """Loads --init_from into the model and prints what it took from there."""
    path = Path(config.init_from)
    left = load(model, path, config.init_skip_mismatched, averages=config.init_ema)
    what = "averages of the weights" if config.init_ema else "weights"
    logs.say(f"starting from the {what} of {path}")
    if left:
        logs.say(f"note: not in it, or of another shape, so left as made: {_listed(left)}")


def load(model: keras.Model, path: Path, skip: bool, *, averages: bool = False) -> dict[str, str]:
    """Sets the model's weights to those of the same name; rank 0 alone needs to call it.

    Random layers keep their own state. Names are those of hvdkit/train/state.py, without
    Keras's counters.

    `path`: a checkpoint (a folder step-XXXXXXXX), a run's folder (its best checkpoint, or the
    newest where none has a score), or a .keras file. `skip`: leave a variable as it is
    where there is none of its name and shape. `averages`: take the moving averages of the weights;
    variables without one (batch norm's moving statistics) are taken as they are. Returns the
    variables that were left as they were, by name, and why. Raises ValueError: the path holds no
    weights, or no averages; none of them fit, or some do not and `skip` is off; the kind
    of pictures is not known. The message names them.
    """
    there = _unique(_read(path, averages))
    named = _unique(zip(names_of_model(model), model.variables))
    weights = {id(v) for v in model.weights}
    pairs = [(name, v) for name, v in named.items() if id(v) in weights]
    faults = {}
    for name, variable in pairs:
        if name not in there:
            faults[name] = "missing there"
        elif there[name].shape != tuple(variable.shape):
            faults[name] = f"{list(there[name].shape)} there, {list(variable.shape)} here"
        elif there[name].dtype.kind in "iu" and "int" not in variable.dtype:
            faults[name] = f"{there[name].dtype} there, of a quantized model, {variable.dtype} here"
        elif there[name].dtype.kind in "fV" and np.isnan(there[name]).any():
            faults[name] = "NaN there"
    if unused := [name for name in there if name not in named]:
        logs.say(f"note: of {path} is not used: {join(unused, 4)}")
    if len(faults) == len(pairs) or (faults and not skip):
        way_out = "--init_skip_mismatched leaves such variables as they are made"
        if len(faults) == len(pairs):
            way_out = "it is of another model altogether"
        raise ValueError(
            f"--init_from={path}: {len(faults)} of the model's {len(pairs)} variables do not fit: "
            f"{_listed(faults)}. {way_out}"
        )
    pixels = preprocessing.find(model)
    for name, variable in pairs:
        if name not in faults:
            raw(variable).assign(there[name].astype(raw(variable).dtype.as_numpy_dtype))
        elif pixels and variable is pixels.mode:
            raise ValueError(
                f"--init_from={path} does not say which pictures its weights were trained on "
                f"({name} is missing there)"
            )
    return faults


def load_held(held: Held, path: Path) -> None:
    """Sets what the task holds to a checkpoint's values. Raises ValueError where there is none."""
    there = files.read(path, ("task/", "table/"))
    for name, variable in held.variables.items():
        if name not in there or there[name].shape != tuple(variable.shape):
            raise ValueError(f"{path} holds no {name} of shape {list(variable.shape)}")
        raw(variable).assign(there[name])
    held.finalize()


def _read(path: Path, averages: bool) -> Iterable[tuple[str, np.ndarray]]:
    if path.suffix == ".keras" and path.is_file():
        return _read_keras(path, averages)
    folder = path if files.is_checkpoint(path) else _best(path)
    files.verify(folder)
    state = files.read(folder, ("model/", "ema/", "optimizer/"))
    if averages:
        # Before its first step an optimizer's averages are zeros.
        steps = [int(v) for name, v in state.items() if name.endswith("/iteration")]
        if not any(name.startswith("ema/") for name in state) or not all(steps):
            raise ValueError(
                f"--init_from={path}: {folder.name} holds no average of its weights. Leave out "
                "--init_ema, or name a run that was trained with --ema_decay"
            )
        state |= {f"model/{n[4:]}": value for n, value in state.items() if n.startswith("ema/")}
    # model/0012/conv2d/kernel: the position is of no use in another model.
    parts = {name: name.split("/", 2) for name in state if name.startswith("model/")}
    return [(part[2], state[name]) for name, part in parts.items() if len(part) > 2]


def _read_keras(path: Path, averages: bool) -> Iterable[tuple[str, np.ndarray]]:
    if averages:
        raise ValueError(
            f"--init_from={path}: a .keras file holds no average of its weights: leave out "
            "--init_ema"
        )
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            files.check_zip(archive, file)
            for name in archive.namelist():
                if name.endswith(".npz"):  # arrays in arrays, that Keras does not check
                    raise ValueError(f"it holds {name}: weights are read from .h5 only")
                if name.endswith(".h5"):
                    _check_values(io.BytesIO(archive.read(name)))
        saved = keras.models.load_model(path, compile=False, safe_mode=True)
    except Exception as error:  # Keras raises any kind at a damaged file
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"--init_from={path} cannot be read: {why}") from None
    return zip(names_of_model(saved), [raw(v).numpy() for v in saved.variables])


def _best(run_dir: Path) -> Path:
    """A run's checkpoint with the best score of the newest measure; else the newest sound one."""
    folder = run_dir / "checkpoints"
    best = files.best(files.scored(files.candidates(folder))) or files.newest_sound(folder)[0]
    if not best:
        raise ValueError(
            f"--init_from={run_dir} is no .keras file, no checkpoint (step-XXXXXXXX), and no "
            "folder of a run with a sound checkpoint in checkpoints/"
        )
    return best


def _unique(pairs: Iterable[tuple[str, object]]) -> dict:
    """By name; of variables that share one, the second gets " #2"."""
    seen, unique = Counter(), {}
    for name, value in pairs:
        seen[name] += 1
        unique[name if seen[name] == 1 else f"{name} #{seen[name]}"] = value
    return unique


def _listed(faults: dict[str, str]) -> str:
    return join([f"{name} ({why})" for name, why in faults.items()], most=4)


def load_backbone(model: keras.Model, config: Settings) -> None:
    """Sets all layers up to the one that `model.backbone` names, and the kind of pictures; says so.

    The file must have exactly these layers, in their order (Keras checks it): with the top where
    `model.backbone` is the network's last layer. Rank 0 alone needs to call it.

    --backbone_weights: a .h5 file as keras.applications publishes them. --backbone_preprocessing:
    of preprocessing.MODES. Raises ValueError: the model names no backbone, or it does not fit.
    """
    path, mode = Path(config.backbone_weights), config.backbone_preprocessing
    here = f"--backbone_weights={path}"
    pixels, last = preprocessing.find(model), getattr(model, "backbone", "")
    if not (pixels and last):
        raise ValueError(
            f"{here}: {model.name} has no backbone that such a file fits: begin the model with "
            "hvdkit.train.preprocessing.Preprocess and name its last layer, model.backbone = 'NAME'"
        )
    if path.suffix != ".h5" or path.name.endswith(".weights.h5") or not path.is_file():
        raise ValueError(f"{here} is no .h5 file of keras.applications (others: --init_from)")
    try:
        backbone = keras.Model(pixels.output, model.get_layer(last).output)
        _check_values(path)
        backbone.load_weights(path)
    except Exception as error:  # of any kind
        why = " ".join(str(error).split())
        raise ValueError(f"{here} does not fit {model.name} up to {last}: {why}") from None
    for layer in backbone.layers:
        if not all(np.isfinite(values).all() for values in layer.get_weights()):
            raise ValueError(f"{here}: {layer.name} holds values that are not finite")
    pixels.mode.assign(preprocessing.MODES.index(mode))
    kind = f"trained on {preprocessing.MEANING[mode]} ({mode})"
    logs.say(f"starting from the backbone in {path}, up to {last}, {kind}")


def _check_values(path: Path | IO[bytes]) -> None:
    """Raises ValueError where HDF5 would read from another file, or values that are not stored."""

    def fault(name: str, link: object) -> str | None:
        there = file.get(name) if isinstance(link, h5py.HardLink) else None
        there = there if isinstance(there, h5py.Dataset) else None
        if isinstance(link, h5py.ExternalLink) or (there and (there.external or there.is_virtual)):
            return f"{name} is in another file, which is not allowed"
        if there:
            stored, chunk = there.id.get_storage_size(), math.prod(there.chunks or [0])
            if there.nbytes > _SMALLEST * stored:
                return f"{name} claims {there.nbytes:,} bytes, of which {stored:,} are stored"
            # HDF5 unpacks whole chunks, also for one value.
            if chunk > 2 * there.size + 2**20:
                return f"{name} holds {there.size:,} values in a chunk of {chunk:,}"
        return None

    with h5py.File(path) as file:
        if found := file.visititems_links(fault):  # an exception in there would be lost
            raise ValueError(found)
