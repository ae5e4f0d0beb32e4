"""Weights in files that Keras writes, by the names of their layers."""

from __future__ import annotations

import io
import itertools
import json
import re
import zipfile
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import h5py
import numpy as np

# Arrays by name (kernel, bias), or by place ("0", "1") in the order that Keras 3 saves them in.
Weights = dict[str, np.ndarray]
# Where a layer lies, outermost first: the names that each part of its path may have. "" is among
# them where the part may be a model, which counts for nothing.
Place = list[tuple[str, ...]]


def read(path: Path, known: Container[str] = ()) -> dict[str, Weights]:
    """The weights of each layer in a .weights.h5, a .keras or a Keras 2 .h5 (whole, or weights).

    Args:
      known: names of layers in the form below. What else a file may mean, it means these.
    Returns:
      By the layer's own name, behind those of the layers that it is in (attention/query; models
      do not count): its arrays by name (kernel), or by place ("0", "1", ...) in a file of Keras 3.
      Layers without weights, and the optimizer, are left out.
    Raises:
      ValueError: it is no such file, or is damaged; it holds two layers of one name, or no names.
    """
    if not path.is_file():
        raise ValueError("there is no such file")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                content = io.BytesIO(archive.read("model.weights.h5"))
        else:
            content = path
        with h5py.File(content, "r") as file:
            return _read(file, known)
    except (OSError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"it is no .h5 or .keras file of Keras, or is damaged ({why})") from None


def _read(file: h5py.File, known: Container[str]) -> dict[str, Weights]:
    root = file.get("model_weights", file)  # in a whole model's file of Keras 2
    layers = _of_keras_2(root) if list(_texts(root, "layer_names")) else _of_keras_3(root)
    places: dict[tuple[tuple[str, ...], ...], Weights] = {}
    for place, variable, array in layers:
        if variable in places.setdefault(tuple(place), {}):
            raise ValueError(f"it holds two layers of the name {_names(place)[0]}")
        places[tuple(place)][variable] = array
    found: dict[str, Weights] = {}
    # First those that can have one name only.
    for place in sorted(places, key=lambda place: len(_names(place))):
        names = _names(place)
        shortest = min(names, key=lambda name: name.count("/"))
        name = next((name for name in names if name in known), shortest)
        if name in found and name not in known:
            name = names[0]  # nobody asks for it, so it must not be in the way
        if name in found:
            raise ValueError(f"it holds two layers of the name {name}")
        found[name] = places[place]
    if not found:
        raise ValueError("it holds no layers by name (write it with this project's Keras)")
    return found


def _names(place: Iterable[tuple[str, ...]]) -> list[str]:
    """All that the place may be called, the longest first."""
    return ["/".join(filter(None, parts)) for parts in itertools.product(*place)]


def _of_keras_2(root: h5py.Group) -> Iterator[tuple[Place, str, np.ndarray]]:
    """A group is a layer of the model; its arrays have their paths at the time they were made."""
    models = set(_models(json.loads(root.parent.attrs.get("model_config", "{}"))))
    for group in _texts(root, "layer_names"):
        for path in _texts(root[group], "weight_names"):
            *layers, variable = path.split("/")
            array = np.asarray(root[group][path])
            yield _place(group, layers, models), variable.partition(":")[0], array


def _models(config: object) -> Iterator[str]:
    """Names of the models in a model's configuration, itself and those inside it."""
    if isinstance(config, dict):
        if "layers" in config and "name" in config:
            yield config["name"]
        config = list(config.values())
    for part in config if isinstance(config, list) else ():
        yield from _models(part)


def _place(group: str, layers: list[str], models: set[str]) -> Place:
    layers = [*(name for name in layers[:-1] if name not in models), *layers[-1:]]
    # TensorFlow 1 may have made conv1_conv_1/kernel:0 of conv1_conv/kernel:0.
    its_name = re.compile(rf"{re.escape(group)}(_\d+)?")
    at = next((n for n, name in enumerate(layers) if its_name.fullmatch(name)), None)
    if at is None:  # made before what they are in now: a model, or a layer that was given them
        return [(group, "") if layers else (group,), *((name,) for name in layers)]
    if inner := [(name,) for name in layers[at + 1 :]]:
        return [(group,), *inner]
    return [tuple(dict.fromkeys((group, layers[at])))]


def _of_keras_3(root: h5py.Group) -> Iterator[tuple[Place, str, np.ndarray]]:
    """Groups are named after classes (layers/conv2d_5/vars); the layer's name is an attribute."""
    groups: dict[str, h5py.Group] = {}

    def visit(path: str, item: h5py.Group | h5py.Dataset) -> None:
        # Neither the optimizer's nor those of a layer that draws.
        if path.endswith("/vars") and not {"optimizer", "seed_generator"} & set(path.split("/")):
            groups[path.removesuffix("/vars")] = item

    root.visititems(visit)
    for path, group in groups.items():
        if "name" in group.attrs:
            parts = path.split("/")
            above = [groups.get("/".join(parts[:end])) for end in range(1, len(parts))]
            place = [
                # What a model holds lies in its `layers`; a layer may call its own ones so, too.
                (name, "") if inner == "layers" else (name,)
                for outer, inner in zip(above, parts[1:])
                if outer is not None and (name := str(outer.attrs.get("name", "")))
            ]
            for variable in group:
                array = np.asarray(group[variable])
                yield [*place, (str(group.attrs["name"]),)], variable, array


def _texts(group: h5py.Group, name: str) -> Iterator[str]:
    """A list of texts among the attributes, which Keras cuts into NAME0, NAME1, ... if long."""
    numbered = (f"{name}{number}" for number in itertools.count())
    cut = itertools.takewhile(lambda part: part in group.attrs, numbered)
    for part in [name] if name in group.attrs else cut:
        for text in group.attrs[part]:
            yield text.decode() if isinstance(text, bytes) else str(text)
