"""A backbone to begin with: published weights by the names of their layers, and their pictures."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import keras
import numpy as np
from keras.src.applications import resnet

from hvdkit import logs
from hvdkit.checkpoint import weight_files
from hvdkit.ranks.world import raw
from hvdkit.settings import Settings
from hvdkit.train import preprocessing, variable_names
from hvdkit.words import some

# By MD5, what keras.applications.resnet.preprocess_input does for its files.
_PUBLISHED = dict.fromkeys(resnet.WEIGHTS_HASHES["resnet50"], "caffe")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Names of layers: those that were set, the model's other ones, the file's other ones."""

    set: list[str]
    left: list[str]
    unused: list[str]
    mode: str  # one of preprocessing.MODES: what the weights were trained on


def start(model: keras.Model, config: Settings) -> None:
    """Loads --backbone_weights into the model and tells a person what it took and what not."""
    path = Path(config.backbone_weights)
    loaded = load(model, path, config.backbone_preprocessing)
    logs.say(
        f"starting from the backbone in {path}: {len(loaded.set)} layers, {loaded.set[0]} to "
        f"{loaded.set[-1]}, trained on {preprocessing.MEANING[loaded.mode]} "
        f"({loaded.mode})"
    )
    left, unused = (", ".join(names) or "none" for names in (loaded.left, loaded.unused))
    logs.say(
        f"note: layers with new weights (not in that file, or a head of another shape): {left}; "
        f"not used from the file: {unused}"
    )


def load(model: keras.Model, path: Path, mode: str = "") -> Loaded:
    """Sets the layers that the file has by name, with their moving statistics, and the mode.

    The model's last layer, its head, is left as made where the file's has another shape: that is
    of other classes. Rank 0 alone needs to call it.

    Args:
      path: a .keras, .weights.h5 or .h5 file of Keras (hvdkit/checkpoint/weight_files.py).
      mode: of preprocessing.MODES; empty: that of the file, if it holds one or is known.
    Raises:
      ValueError: nothing fits, a layer has other weights there than here, only a part of a group
        of layers is on both sides, or the mode is not known or cannot be had. The message says
        what. The model is then as it was.
    """
    here = f"--backbone_weights={path}"
    layers, pixels = _layers(model), preprocessing.find(model)
    try:
        there = weight_files.read(path, known=layers)
    except ValueError as error:
        raise ValueError(f"{here}: {error}") from None
    carried = {}
    if pixels:
        name = next(name for name, variables in layers.items() if variables[0] is pixels.mode)
        del layers[name]
        carried = there.pop(name, {})
    shared = [name for name in layers if name in there]
    head = next(reversed(layers), None)
    if head in shared and _shapes_differ(layers[head], there[head]):
        shared.remove(head)
    _check(here, model.name, layers, there, shared)
    mode = _mode(path, mode, carried)
    as_made = preprocessing.is_scaled(model) or not preprocessing.takes_pictures(model)
    if not pixels and not (mode == "tf" and as_made):
        raise ValueError(
            f"{here} was trained on {preprocessing.MEANING[mode]}, but {model.name} does not "
            "convert pictures to that: put an hvdkit.train.preprocessing.Preprocess layer first"
        )
    if pixels:
        pixels.mode.assign(preprocessing.MODES.index(mode))
    for name in shared:
        for variable, value in zip(layers[name], _ordered(layers[name], there[name])):
            raw(variable).assign(value.astype(raw(variable).dtype.as_numpy_dtype))
    left, unused = ([name for name in names if name not in shared] for names in (layers, there))
    return Loaded(shared, left, unused, mode)


def _layers(model: keras.Model) -> dict[str, list[keras.Variable]]:
    """The variables of each layer in the order that Keras saves them in.

    A layer inside another has that one's name before its own; models inside the model do not count.
    """
    found: dict[str, list[keras.Variable]] = {}
    seen = set()

    def visit(layer: keras.Layer, name: str, within: str) -> None:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        if own := [*layer._trainable_variables, *layer._non_trainable_variables]:
            if name in found:
                raise ValueError(
                    f"--backbone_weights matches layers by name, and two layers have the name "
                    f"{name}: rename one"
                )
            found[name] = own
        for child in layer._flatten_layers(include_self=False, recursive=False):
            below = within if variable_names.is_plain_model(child) else f"{within}{child.name}/"
            visit(child, within + child.name, below)

    visit(model, model.name, "")
    return found


def _shapes_differ(variables: list[keras.Variable], arrays: weight_files.Weights) -> bool:
    values = _ordered(variables, arrays)
    return values is None or any(a.shape != tuple(v.shape) for v, a in zip(variables, values))


def _check(
    here: str,
    model: str,
    layers: dict[str, list[keras.Variable]],
    there: dict[str, weight_files.Weights],
    shared: list[str],
) -> None:
    """Raises ValueError where nothing is on both sides, or what is there is not one network's."""
    way_out = "Give weights of the same network"
    if not shared:
        raise ValueError(
            f"{here} has no layer of {model}: the file has {some(there)}, the model "
            f"{some(layers)}. {way_out}"
        )
    faults = [f"{n} ({why})" for n in shared if (why := _fault(layers[n], there[n]))]
    if faults:
        raise ValueError(f"{here} does not fit {len(faults)} layers: {some(faults, 3)}. {way_out}")
    # conv4_block7_1_conv belongs to conv4: a deeper network has all layers of ResNet-50 and more.
    groups = {name.split("_")[0] for name in shared}
    odd = [
        some([n for n in one if n not in other and n.split("_")[0] in groups], 3)
        for one, other in ((there, layers), (layers, there))
    ]
    if any(odd):
        raise ValueError(
            f"{here} is of another network: only the file has {odd[0] or 'none'}, only the model "
            f"{odd[1] or 'none'}, though they share other layers. {way_out}"
        )


def _fault(variables: list[keras.Variable], arrays: weight_files.Weights) -> str:
    values = _ordered(variables, arrays)
    if values is None:
        return f"{', '.join(sorted(arrays))} there, {', '.join(v.name for v in variables)} here"
    for variable, value in zip(variables, values):
        if value.shape != tuple(variable.shape):
            return f"{variable.name} {list(value.shape)} there, {list(variable.shape)} here"
        if not np.isfinite(value).all():
            return f"{variable.name} holds values that are not finite"
    return ""


def _ordered(
    variables: list[keras.Variable], arrays: weight_files.Weights
) -> list[np.ndarray] | None:
    """The arrays of a layer in the order of its variables; None where they are not the same."""
    for names in ([v.name for v in variables], list(map(str, range(len(variables))))):
        if set(names) == set(arrays):
            return [arrays[name] for name in names]
    return None


def _mode(path: Path, asked: str, carried: weight_files.Weights) -> str:
    """What the weights were trained on: asked for, carried by the file, or known of it.

    Raises:
      ValueError: none says it, or two contradict each other.
    """
    if carried:
        place = carried.get("mode", carried.get("0"))
        if place is None or place.shape or int(place) not in range(len(preprocessing.MODES)):
            raise ValueError(
                f"--backbone_weights={path}: its layer preprocess holds {', '.join(carried)}, "
                "which this code does not know: remove that layer from the file"
            )
        known = preprocessing.MODES[int(place)]
    else:
        digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        known = _PUBLISHED.get(digest, "")
    if asked and known and asked != known:
        raise ValueError(
            f"--backbone_preprocessing={asked}: the weights in {path} were trained on "
            f"{preprocessing.MEANING[known]}: leave it out, or write {known}"
        )
    if not asked and not known:
        meanings = "; ".join(f"{name}: {text}" for name, text in preprocessing.MEANING.items())
        raise ValueError(
            f"--backbone_weights={path} does not say which pictures it was trained on: add "
            f"--backbone_preprocessing= ({meanings}); keras.applications' ResNet-50 has caffe"
        )
    return asked or known
