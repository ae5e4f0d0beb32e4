"""Weights to begin with, from another run or a Keras file."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import keras
import numpy as np

from config import Config
from engine import checkpoint
from engine.world import raw


def start(model: keras.Model, config: Config) -> None:
    """Loads --init_from into the model and tells a person what it took from there."""
    path = Path(config.init_from)
    left = load(model, path, config.init_skip_mismatched)
    print(f"starting from the weights of {path}", flush=True)
    if left:
        print(f"note: not there, or of another shape, so left as made: {_some(left)}", flush=True)


def load(model: keras.Model, path: Path, skip_mismatched: bool) -> dict[str, str]:
    """Sets the model's variables to those of the same name; rank 0 alone needs to call it.

    Args:
      path: a checkpoint (a folder step-XXXXXXXX), a run's folder (its best checkpoint, or the
        newest where none has a score), or a .keras file.
      skip_mismatched: leave a variable as it is where there is none of its name and shape.
    Returns:
      The variables that were left as they were, by name, and why.
    Raises:
      ValueError: the path holds no weights, none of them fit, or some do not and are not to be
        skipped; the message names them.
    """
    there = _unique(_read(path))
    pairs = list(_unique((v.path, v) for v in model.variables).items())
    faults = {name: why for name, v in pairs if (why := _fault(there.get(name), v))}
    if len(faults) == len(pairs) or (faults and not skip_mismatched):
        way_out = (
            "--init_skip_mismatched leaves such variables as they are made"
            if len(faults) < len(pairs)
            else "it is of another model altogether"
        )
        raise ValueError(
            f"--init_from={path}: {len(faults)} of the model's {len(pairs)} variables do not fit: "
            f"{_some(faults)}. {way_out}"
        )
    for name, variable in pairs:
        if name not in faults:
            raw(variable).assign(there[name].astype(raw(variable).dtype.as_numpy_dtype))
    return faults


def _read(path: Path) -> Iterable[tuple[str, np.ndarray]]:
    if path.suffix == ".keras" and path.is_file():
        try:
            saved = keras.models.load_model(path, compile=False)
        except (zipfile.BadZipFile, KeyError, TypeError) as error:
            raise ValueError(f"--init_from={path} cannot be read: {error}") from None
        return [(v.path, raw(v).numpy()) for v in saved.variables]
    folder = path if path.name.startswith("step-") else _best(path)
    if why := checkpoint.fault(folder):
        raise ValueError(f"--init_from={path}: {why}")
    with np.load(folder / "state.npz") as state:
        # model/0012/conv2d/kernel: the position is of no use in another model.
        names = [n for n in state.files if n.startswith("model/")]
        return [(n.split("/", 2)[2], state[n]) for n in names]


def _best(run_dir: Path) -> Path:
    """The sound checkpoint of a run with the highest score; the newest where none has one."""
    sound = [p for p in run_dir.glob("checkpoints/step-????????") if not checkpoint.fault(p)]
    if not sound:
        raise ValueError(
            f"--init_from={run_dir} is no .keras file, no checkpoint (step-XXXXXXXX), and no "
            "folder of a run with a sound checkpoint in checkpoints/"
        )
    return checkpoint.best(sound) or max(sound)


def _unique(pairs: Iterable[tuple[str, object]]) -> dict:
    """Two layers may share a path: the second is told apart by its number."""
    seen, unique = Counter(), {}
    for name, value in pairs:
        seen[name] += 1
        unique[name if seen[name] == 1 else f"{name} #{seen[name]}"] = value
    return unique


def _fault(value: np.ndarray | None, variable: keras.Variable) -> str | None:
    if value is None:
        return "missing there"
    if value.shape != tuple(variable.shape):
        return f"{list(value.shape)} there, {list(variable.shape)} here"
    return None


def _some(faults: dict[str, str], most: int = 4) -> str:
    shown = [f"{name} ({why})" for name, why in list(faults.items())[:most]]
    return ", ".join(shown) + (f" and {len(faults) - most} more" if len(faults) > most else "")
