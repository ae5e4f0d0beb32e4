"""Weights in files that Keras writes, by the names of their layers."""

from __future__ import annotations

import io
import itertools
import zipfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

# Arrays by name (kernel, bias), or by place ("0", "1") in the order that Keras 3 saves them in.
Weights = dict[str, np.ndarray]


def read(path: Path) -> dict[str, Weights]:
    """The weights of each layer in a .weights.h5, a .keras or a Keras 2 .h5 (whole, or weights).

    Returns:
      By the layer's own name: its arrays by name (kernel), or by place ("0", "1", ...) in a file
      of Keras 3. Layers without weights, and the optimizer, are left out.
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
            return _read(file)
    except (OSError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"it is no .h5 or .keras file of Keras, or is damaged ({why})") from None


def _read(file: h5py.File) -> dict[str, Weights]:
    root = file.get("model_weights", file)  # in a whole model's file of Keras 2
    found: dict[str, Weights] = {}
    layers = _of_keras_2(root) if list(_texts(root, "layer_names")) else _of_keras_3(root)
    for layer, variable, array in layers:
        if variable in found.setdefault(layer, {}):
            raise ValueError(f"it holds two layers of the name {layer}")
        found[layer][variable] = array
    if not found:
        raise ValueError("it holds no layers by name (write it with this project's Keras)")
    return found


def _of_keras_2(root: h5py.Group) -> Iterator[tuple[str, str, np.ndarray]]:
    for group in _texts(root, "layer_names"):
        for path in _texts(root[group], "weight_names"):
            *layers, variable = path.split("/")
            # TensorFlow 1 may have made conv1_conv_1/kernel:0 of it; a group that is a model inside
            # the model has layers of other names.
            own = not layers or layers[-1].startswith(group)
            yield (
                group if own else layers[-1],
                variable.partition(":")[0],
                np.asarray(root[group][path]),
            )


def _of_keras_3(root: h5py.Group) -> Iterator[tuple[str, str, np.ndarray]]:
    """Groups are named after classes (layers/conv2d_5/vars); the layer's name is an attribute."""
    groups: list[h5py.Group] = []

    def visit(path: str, item: h5py.Group | h5py.Dataset) -> None:
        # Neither the optimizer's nor those of a layer that draws.
        if path.endswith("/vars") and not {"optimizer", "seed_generator"} & set(path.split("/")):
            groups.append(item)

    root.visititems(visit)
    for group in groups:
        if "name" in group.attrs:
            for place in group:
                yield str(group.attrs["name"]), place, np.asarray(group[place])


def _texts(group: h5py.Group, name: str) -> Iterator[str]:
    """A list of texts among the attributes, which Keras cuts into NAME0, NAME1, ... if long."""
    numbered = (f"{name}{number}" for number in itertools.count())
    cut = itertools.takewhile(lambda part: part in group.attrs, numbered)
    for part in [name] if name in group.attrs else cut:
        for text in group.attrs[part]:
            yield text.decode() if isinstance(text, bytes) else str(text)
