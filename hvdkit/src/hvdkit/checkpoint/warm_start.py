"""Weights to start from: of another run, a .keras file or a keras.applications backbone."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdkit import logs, whole_files
from hvdkit.checkpoint import files, keras_weights, lora
from hvdkit.logs import join
from hvdkit.ranks.world import raw
from hvdkit.scores import MainMetric
from hvdkit.settings import Settings
from hvdkit.train.layers import preprocessing
from hvdkit.train.step.state import TaskState, names_of_model

_QUANTIZE_LATER = "whose numbers it cannot hold: load first, quantize afterwards"


def start(
    model: keras.Model,
    config: Settings,
    *,
    task_state: TaskState,
    metric: MainMetric,
    class_names: Sequence[str] = (),
) -> None:
    """Loads --init_from into the model and what the task holds; prints what it took from there.

    `metric`: the task's, by which a run's best checkpoint is chosen where its scores are of it.
    `class_names`: of this run's data; they may be others there, or in another order.
    """
    path = Path(config.init_from)
    is_run = not files.is_checkpoint(path) and path.suffix != ".keras"
    if is_run:
        path = _best(path, metric)
    faults = load(model, path, config.init_skip_mismatched, averages=config.init_ema)
    names_there = _card_of(path).get("class_names")
    if names_there and class_names and [*names_there] != [*class_names]:
        logs.say(
            f"note: classes are {join(class_names, 4)} here, and were {join(names_there, 4)} "
            "there: an output that was taken from there means another class"
        )
    if config.init_ema:
        logs.say(f"starting from the averages of the weights of {path}")
    else:
        logs.say(f"starting from the weights of {path}")
        was_scored = is_run and files.read_manifest(path).evaluated
        if was_scored and has_averages(path):
            logs.say(
                f"note: the scores of {config.init_from}, by which {path.name} was chosen, are of "
                "averages of its weights: --init_ema starts from these"
            )
    if faults:
        logs.say(
            f"note: not in it, or of another shape, so left as made: {_listed(faults)}"
        )
    _start_task(task_state, path, config.init_skip_mismatched)


def _card_of(path: Path) -> dict[str, Any]:
    """The data card of a checkpoint, or that which `hvdkit export` writes beside model.keras."""
    if path.suffix != ".keras":
        return files.card_of(path)
    file = path.with_name("card.json")
    # A person's own file may have this name.
    with contextlib.suppress(OSError, ValueError):
        text = whole_files.read(file, whole_files.JSON_BYTES)
        card = whole_files.from_json(text, file)
        if isinstance(card, dict) and isinstance(card.get("class_names"), list):
            return card
    return {}


def _start_task(task_state: TaskState, path: Path, skip: bool) -> None:
    """Sets what the task holds to a checkpoint's values; a .keras file has none.

    Optimizers, metrics and random numbers begin anew. Prints what is taken, what finds no value,
    and what is not used. Raises ValueError, unless `skip`: a value does not fit, or a lookup table
    is another one.
    """
    arrays = {}
    if path.suffix == ".keras":
        _check_tables(task_state, path, skip)
    else:
        arrays = files.read(path, ("task/", "table/"))
    tables = {
        name: digest for name, digest in arrays.items() if name.startswith("table/")
    }
    arrays = {
        name: value
        for name, value in arrays.items()
        if name not in tables and not _is_of_new_run(name, task_state)
    }
    known_tables = [
        int(v) for name, v in task_state.variables.items() if name.startswith("table/")
    ]
    other_tables = [
        name for name, digest in tables.items() if int(digest) not in known_tables
    ]
    state = {
        name: v
        for name, v in task_state.of_task.items()
        if not _is_of_new_run(name, task_state)
    }
    needed = {name: (tuple(v.shape), raw(v).dtype.name) for name, v in state.items()}
    faults = _faults(arrays, needed)
    unfit = {name: fault for name, fault in faults.items() if name in arrays}
    unfit |= dict.fromkeys(
        other_tables, "a vocabulary or boundaries that the model has not"
    )
    if unfit and not skip:
        raise ValueError(
            f"--init_from={path}: of its state does not fit: {_listed(unfit)}. "
            "--init_skip_mismatched leaves the task's own as it is made"
        )
    taken = [name for name in state if name not in faults]
    for name in taken:
        raw(state[name]).assign(
            arrays[name].astype(raw(state[name]).dtype.as_numpy_dtype)
        )
    unused = [name for name in [*arrays, *other_tables] if name not in needed]
    if taken:
        logs.say(f"of what the task holds, too: {join(taken, 4)}")
    if faults:
        logs.say(f"note: the task holds these, left as made: {_listed(faults)}")
    if unused:
        logs.say(f"note: of {path} is not used: {join(unused, 4)}")


def _check_tables(task_state: TaskState, path: Path, skip: bool) -> None:
    """Raises ValueError, unless `skip`, where a .keras file has another vocabulary or boundaries.

    Notes the layers whose table the file does not have, as those that the task alone holds.
    """
    if not task_state.tables:
        return
    try:
        there = keras_weights.tables(path)
    except ValueError as error:
        raise ValueError(f"--init_from={error}") from None
    here: set[str] = set()
    unknown = []
    for layer in task_state.tables:
        texts = keras_weights.texts_of_table(layer)
        here |= texts | keras_weights.special_words(layer.get_config())
        if not there & texts:
            unknown.append(layer.path or layer.name)
    if there - here and not skip:
        raise ValueError(
            f"--init_from={path} has a vocabulary, special words or boundaries that the model has "
            "not, so its weights are of other words or bins: give the layer those of the file. "
            "--init_skip_mismatched takes the weights all the same"
        )
    if unknown:
        logs.say(
            f"note: {path} does not have the vocabulary or boundaries of {join(unknown, 4)}: its "
            "weights fit only if they were trained with these"
        )


def _is_of_new_run(name: str, task_state: TaskState) -> bool:
    """Whether a new run begins with its own, as with random numbers and optimizers' slots."""
    if name.rpartition("/")[2].startswith("seed_generator"):
        return True
    return any(
        name == part or name.startswith(f"{part}/") for part in task_state.of_new_run
    )


def load(
    model: keras.Model, path: Path, skip: bool, *, averages: bool = False
) -> dict[str, str]:
    """Sets the model's weights to those of the same name; rank 0 alone needs to call it.

    Random layers keep their own state. Names are those of hvdkit/train/step/state.py, without
    Keras's counters. LoRA factors are multiplied into their kernels where the model has not the
    same ones; new ones, whose product is 0, stay as they are.

    `path`: a checkpoint (a folder step-XXXXXXXX), a run's folder (its best checkpoint, or the
    newest where none has a score), or a .keras file. `skip`: leave a variable as it is
    where there is none of its name and shape, and leave out what the model lacks. `averages`:
    take the moving averages of the weights; variables without one (batch norm's moving statistics)
    are taken as they are. Returns the variables that were left as they were, by name, and why.
    Raises ValueError: the path holds no weights, or no averages; none of them fit; some do not, or
    have no place in the model, and `skip` is off; the kind of pictures is not known. The message
    names them.
    """
    if path.suffix == ".keras" and path.is_file():
        if averages:
            raise ValueError(
                f"--init_from={path}: a .keras file holds no average of its weights: leave out "
                "--init_ema"
            )
        return _load_keras_file(model, path, skip)
    arrays, scales = _read(path, averages)
    named = keras_weights.unique(zip(names_of_model(model), model.variables))
    shapes = {name: tuple(variable.shape) for name, variable in named.items()}
    weights = {id(variable) for variable in model.weights}
    variables = {
        name: variable for name, variable in named.items() if id(variable) in weights
    }
    model_scales = lora.scales_of(model, named)
    arrays = lora.merged(arrays, scales, model_scales, shapes=shapes)
    for name in lora.new_factors(variables, model_scales, arrays):
        del variables[name]
    needed = {
        name: (shapes[name], variable.dtype) for name, variable in variables.items()
    }
    faults = _faults(arrays, needed)
    numbered = _renumbered(arrays, needed)
    _check_faults(path, faults, count=len(needed), skip=skip, numbered=numbered)
    _check_unused(path, [name for name in arrays if name not in named], skip)
    pixels = preprocessing.find(model)
    for name, variable in variables.items():
        if name not in faults:
            raw(variable).assign(
                arrays[name].astype(raw(variable).dtype.as_numpy_dtype)
            )
        elif pixels and variable is pixels.mode:
            _refuse_unknown_pictures(path, name)
    return faults


def _load_keras_file(model: keras.Model, path: Path, skip: bool) -> dict[str, str]:
    """What `load` does for a .keras file."""
    pixels = preprocessing.find(model)
    layers = {layer.name: layer for layer in model._flatten_layers()}
    try:
        arrays = keras_weights.read(path)
    except ValueError as error:
        raise ValueError(f"--init_from={error}") from None
    with keras_weights.written(model) as file:
        entries = keras_weights.entries(file)
        needed = {}
        for name, entry in entries.items():
            values = keras_weights.array_of(entry.values)
            needed[name] = (values.shape, values.dtype.name)
        faults = _faults(arrays, needed)
        labels = {name: _label(name, entry, layers) for name, entry in entries.items()}
        labelled = {labels[name]: fault for name, fault in faults.items()}
        numbered = _renumbered(arrays, needed)
        _check_faults(path, labelled, count=len(needed), skip=skip, numbered=numbered)
        _check_unused(path, [name for name in arrays if name not in entries], skip)
        for name, entry in entries.items():
            if name not in faults:
                keras_weights.assign(entry.values, arrays[name])
            elif pixels and entry.layer == pixels.name:
                _refuse_unknown_pictures(path, labels[name])
    assigned = {name: arrays[name] for name in entries if name not in faults}
    _check_shared(path, model, assigned, labels)
    return labelled


def _check_shared(
    path: Path,
    model: keras.Model,
    assigned: Mapping[str, np.ndarray],
    labels: Mapping[str, str],
) -> None:
    """Raises ValueError where a variable of two layers took the values of the other layer.

    Keras writes and reads it with each of them; `assigned`: arrays of the file, by entry.
    """
    counts: Counter[int] = Counter()
    for layer in model._flatten_layers():
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        counts.update(id(variable) for variable in own)
    if max(counts.values(), default=0) < 2:
        return
    others = []
    with keras_weights.written(model) as file:
        for name, entry in keras_weights.entries(file).items():
            values = keras_weights.array_of(entry.values)
            if name in assigned and not np.array_equal(
                values, assigned[name].astype(values.dtype)
            ):
                others.append(labels[name])
    if others:
        raise ValueError(
            f"--init_from={path}: {join(others, 4)} is a variable of another layer too, for which "
            "the file has other values or none: let that layer hold the layer, not its variable, "
            "or start from a checkpoint"
        )


def _label(
    name: str, entry: keras_weights.Entry, layers: Mapping[str, keras.layers.Layer]
) -> str:
    """body/kernel for body/0: the file knows a variable by its number in the layer only."""
    layer = layers.get(entry.layer)
    if layer is None:
        return name
    variables = [*layer._trainable_variables, *layer._non_trainable_variables]
    if entry.number >= len(variables):
        return name
    return name.replace(f"/{entry.number}", f"/{variables[entry.number].name}")


def _faults(
    arrays: Mapping[str, np.ndarray], needed: Mapping[str, tuple[tuple, str]]
) -> dict[str, str]:
    """Why a variable cannot be set, by its name. `needed`: shape and type by name."""
    faults = {}
    for name, (shape, dtype) in needed.items():
        array = arrays.get(name)
        if array is None:
            faults[name] = "missing there"
        elif array.shape != shape:
            faults[name] = f"{list(array.shape)} there, {list(shape)} here"
        elif array.dtype.kind in "iu" and "int" not in dtype:
            faults[name] = f"{array.dtype} there, of a quantized model, {dtype} here"
        elif array.dtype.kind in "fV" and "int" in dtype:
            faults[name] = f"{array.dtype} there, {dtype} here, {_QUANTIZE_LATER}"
        elif array.dtype.kind in "fV" and np.isnan(array).any():
            faults[name] = "NaN there"
    return faults


def _renumbered(there: Iterable[str], here: Iterable[str]) -> str:
    """Which layers that Keras has numbered (dense, dense_1) are more or fewer here; or ""."""
    layers_there = _numbered(there)
    layers_here = _numbered(here)
    differ = []
    for kind in layers_here.keys() & layers_there.keys():
        count_there = len(layers_there[kind])
        count_here = len(layers_here[kind])
        if kind in layers_there[kind] and count_there != count_here:
            differ.append(f"{count_there} {kind} there, {count_here} here")
    if not differ:
        return ""
    return (
        f". Layers that Keras has numbered are matched by number ({join(sorted(differ))}): one "
        "that was put in between takes the weights of the next; give layers names"
    )


def _numbered(names: Iterable[str]) -> dict[str, set[str]]:
    """Layers by their name without a number, of variables' names: dense for dense_1/kernel."""
    layers: dict[str, set[str]] = {}
    for name in names:
        layer = name.rpartition("/")[0]
        layers.setdefault(re.sub(r"_\d+$", "", layer), set()).add(layer)
    return layers


def _check_faults(
    path: Path, faults: dict[str, str], *, count: int, skip: bool, numbered: str
) -> None:
    """Raises ValueError where none of the model's `count` variables fit, or some do not.

    `numbered`: what `_renumbered` says.
    """
    if len(faults) == count:
        raise ValueError(
            f"--init_from={path}: {count} of the model's {count} variables do not fit: "
            f"{_listed(faults)}. it is of another model altogether"
        )
    if any(_QUANTIZE_LATER in fault for fault in faults.values()):
        raise ValueError(
            f"--init_from={path}: {len(faults)} of the model's {count} variables do not fit: "
            f"{_listed(faults)}"
        )
    if faults and not skip:
        raise ValueError(
            f"--init_from={path}: {len(faults)} of the model's {count} variables do not fit: "
            f"{_listed(faults)}. --init_skip_mismatched leaves such variables as they are made"
            f"{numbered}"
        )
    if faults and numbered:
        logs.say(f"note: --init_from={path}{numbered}")


def _check_unused(path: Path, names: list[str], skip: bool) -> None:
    """Raises ValueError where weights of a file have no place here; with `skip` says so."""
    unused = [
        name
        for name in names
        if not name.rpartition("/")[2].startswith("seed_generator")
    ]
    if unused and not skip:
        raise ValueError(
            f"--init_from={path}: the model has no place for {join(unused, 4)}. "
            "--init_skip_mismatched leaves such weights out"
        )
    if unused:
        logs.say(f"note: of {path} is not used: {join(unused, 4)}")


def _refuse_unknown_pictures(path: Path, name: str) -> None:
    raise ValueError(
        f"--init_from={path} does not say which pictures its weights were trained on ({name} is "
        "missing there)"
    )


def load_task_state(task_state: TaskState, path: Path) -> None:
    """Sets what the task holds to a checkpoint's values. Raises ValueError where there is none."""
    arrays = files.read(path, ("task/", "table/", "lora/"))
    for name, variable in task_state.variables.items():
        if name not in arrays or arrays[name].shape != tuple(variable.shape):
            raise ValueError(f"{path} holds no {name} of shape {list(variable.shape)}")
        raw(variable).assign(arrays[name])
    task_state.finalize()


def has_averages(path: Path) -> bool:
    """Whether a checkpoint holds averages of weights; before their first update, they are zeros."""
    return any(files.read(path, ("ema_updates/",)).values())


def _averages(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Averages by the names of their weights, model/0003/dense/kernel (see train/step/state.py)."""
    averages = {}
    for name, value in state.items():
        if name.startswith("ema/"):
            _, number, place = name.split("/", 2)
            if state[f"ema_updates/{number}"]:
                averages[f"model/{place}"] = value
    return averages


def _read(path: Path, averages: bool) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Weights by name, and the scales of LoRA's products by the name of their first factor."""
    folder = path if files.is_checkpoint(path) else _best(path)
    files.verify(folder)
    state = files.read(folder, ("model/", "ema/", "ema_updates/", "lora/"))
    if averages:
        averaged = _averages(state)
        if not averaged:
            raise ValueError(
                f"--init_from={path}: {folder.name} holds no average of its weights. Leave out "
                "--init_ema, or name a run that was trained with --ema_decay"
            )
        state |= averaged
    scales = {
        name: float(value) for name, value in _without_places(state, "lora").items()
    }
    return _without_places(state, "model"), scales


def _without_places(
    state: Mapping[str, np.ndarray], kind: str
) -> dict[str, np.ndarray]:
    """conv2d/kernel for model/0012/conv2d/kernel: the place is of no use in another model."""
    placed = []
    for name, value in state.items():
        if match := re.fullmatch(rf"{kind}/(\d+)/(.+)", name):
            place = int(match[1])
            placed.append((place, match[2], value))
    placed.sort(key=lambda item: item[0])
    return keras_weights.unique((name, value) for _, name, value in placed)


def _best(run_dir: Path, metric: MainMetric | None = None) -> Path:
    """A run's checkpoint with the best score of the newest measure; else the newest sound one.

    `metric`: where the scores are of it, its mode decides, else their own.
    """
    folder = run_dir / "checkpoints"
    scored = files.scored(files.candidates(folder), files.telling(logs.say))
    measure = files.newest_measure(scored)
    if metric and measure.get("main_metric") == metric.name:
        measure = {**measure, "main_metric_mode": metric.mode}
    best = files.best(scored, measure) or files.newest_sound(folder)[0]
    if not best:
        if not run_dir.exists():
            raise ValueError(f"--init_from={run_dir} does not exist")
        raise ValueError(
            f"--init_from={run_dir} is no .keras file, no checkpoint (step-XXXXXXXX), and no "
            "folder of a run with a sound checkpoint in checkpoints/"
        )
    return best


def _listed(faults: dict[str, str]) -> str:
    return join([f"{name} ({fault})" for name, fault in faults.items()], most=4)


def load_backbone(model: keras.Model, config: Settings) -> None:
    """Sets all layers up to the one that `model.backbone` names, and the kind of pictures; says so.

    The file must have exactly these layers, in their order (Keras checks it): with the top where
    `model.backbone` is the network's last layer. Rank 0 alone needs to call it.

    --backbone_weights: a .h5 file as keras.applications publishes them. --backbone_preprocessing:
    of preprocessing.MODES. Raises ValueError: the model names no backbone, or it does not fit.
    """
    path = Path(config.backbone_weights)
    mode = config.backbone_preprocessing
    pixels = preprocessing.find(model)
    last = getattr(model, "backbone", "")
    if not (pixels and last):
        raise ValueError(
            f"--backbone_weights={path}: {model.name} has no backbone that such a file fits: begin "
            "the model with hvdkit.train.preprocessing.Preprocess and name its last layer, "
            "model.backbone = 'NAME'"
        )
    if path.suffix != ".h5" or path.name.endswith(".weights.h5") or not path.is_file():
        raise ValueError(
            f"--backbone_weights={path} is no .h5 file of keras.applications (others: --init_from)"
        )
    try:
        backbone = keras.Model(pixels.output, model.get_layer(last).output)
        keras_weights.check_values(path)
        backbone.load_weights(path)
    except Exception as error:  # Keras and h5py raise many kinds.
        raise ValueError(
            f"--backbone_weights={path} does not fit {model.name} up to {last}: "
            f"{logs.one_line(error)}"
        ) from None
    for layer in backbone.layers:
        if not all(np.isfinite(values).all() for values in layer.get_weights()):
            raise ValueError(
                f"--backbone_weights={path}: {layer.name} holds values that are not finite"
            )
    pixels.mode.assign(preprocessing.MODES.index(mode))
    logs.say(
        f"starting from the backbone in {path}, up to {last}, trained on "
        f"{preprocessing.MEANING[mode]} ({mode})"
    )
