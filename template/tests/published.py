"""Files of weights as Keras has published and written them, for test_pretrained.py."""

from __future__ import annotations

from pathlib import Path

import h5py
import keras
import numpy as np

FORMS = ("h5", "whole.h5", "weights.h5", "keras")


def write(model: keras.Model, folder: Path, form: str) -> Path:
    """The model's weights in one of FORMS; h5 is what Keras 2 wrote and keras.applications has."""
    path = folder / f"{model.name}.{form}"
    if form == "h5":
        keras_2(model, path)
    elif form == "weights.h5":
        model.save_weights(path)
    else:
        model.save(path)
    return path


def keras_2(model: keras.Model, path: Path, scope: str = "") -> None:
    """As Keras 2 wrote it; what TensorFlow 1 made of a second layer's name ends with `scope`."""
    with h5py.File(path, "w") as file:
        file.attrs["layer_names"] = [layer.name.encode() for layer in model.layers]
        file.attrs["backend"], file.attrs["keras_version"] = b"tensorflow", b"2.2.4"
        for layer in model.layers:
            group = file.create_group(layer.name)
            names = [v.path.replace(layer.name, layer.name + scope, 1) for v in layer.weights]
            names = [f"{name}:0" for name in names]
            group.attrs["weight_names"] = [name.encode() for name in names]
            for name, variable in zip(names, layer.weights):
                group[name] = variable.numpy()


def resnet50(size: tuple[int, int]) -> keras.Model:
    """keras.applications' with its top for 10 classes; statistics, gamma and biases drawn."""
    model = keras.applications.ResNet50(weights=None, input_shape=(*size, 3), classes=10)
    rng = np.random.default_rng(1)
    for variable in model.variables:
        if variable.name != "kernel":
            low = 0.5 if variable.name in ("gamma", "moving_variance") else -0.2
            variable.assign(rng.uniform(low, low + 0.5, variable.shape))
    return model
