"""A backbone to begin with: a file of keras.applications, and the pictures it was trained on."""

from __future__ import annotations

from pathlib import Path

import h5py
import keras
import numpy as np

from hvdkit import logs
from hvdkit.settings import Settings
from hvdkit.train import preprocessing


class _Backbone(keras.Model):
    """What such a file holds the weights of: no layer of ours before it."""

    @property
    def layers(self) -> list[keras.Layer]:
        return [x for x in super().layers if not isinstance(x, preprocessing.Preprocess)]


def start(model: keras.Model, config: Settings) -> None:
    """Loads --backbone_weights into the model, and says so."""
    path, mode = Path(config.backbone_weights), config.backbone_preprocessing
    load(model, path, mode)
    logs.say(
        f"starting from the backbone in {path}, up to {model.backbone}, trained on "
        f"{preprocessing.MEANING[mode]} ({mode})"
    )


def load(model: keras.Model, path: Path, mode: str) -> None:
    """Sets all layers up to the one that `model.backbone` names, and the kind of pictures.

    The file has exactly these layers, in their order, as Keras's own loading checks. Where
    `model.backbone` is the last layer of the whole network, that is a file with the top, else one
    without it. Rank 0 alone needs to call it.

    Args:
      path: a .h5 file as keras.applications publishes them.
      mode: of preprocessing.MODES.
    Raises:
      ValueError: the model names no backbone, or the file does not fit it.
    """
    here = f"--backbone_weights={path}"
    pixels, last = preprocessing.find(model), getattr(model, "backbone", "")
    if not (pixels and last):
        raise ValueError(
            f"{here}: {model.name} has no backbone that such a file fits: begin the model with "
            "hvdkit.train.preprocessing.Preprocess and name its last layer, model.backbone = 'NAME'"
        )
    if path.suffix != ".h5" or path.name.endswith(".weights.h5") or not path.is_file():
        raise ValueError(f"{here} is no .h5 file of keras.applications (others: --init_from)")
    backbone = _Backbone(model.inputs, model.get_layer(last).output)
    try:
        _refuse_other_files(path)
        backbone.load_weights(path)
    except Exception as error:  # what Keras raises at a file is as wide as what files may hold
        why = " ".join(str(error).split())
        raise ValueError(f"{here} does not fit {model.name} up to {last}: {why}") from None
    for layer in backbone.layers:
        if not all(np.isfinite(values).all() for values in layer.get_weights()):
            raise ValueError(f"{here}: {layer.name} holds values that are not finite")
    pixels.mode.assign(preprocessing.MODES.index(mode))


def _refuse_other_files(path: Path) -> None:
    """Raises ValueError where HDF5 would read values from another file: not every Keras does."""

    def elsewhere(name: str, link: object) -> str | None:
        there = file.get(name) if isinstance(link, h5py.HardLink) else None
        dataset = isinstance(there, h5py.Dataset) and (there.external or there.is_virtual)
        return name if dataset or isinstance(link, h5py.ExternalLink) else None

    with h5py.File(path) as file:
        if name := file.visititems_links(elsewhere):  # an exception in there would be lost
            raise ValueError(f"{name} is in another file, which is not allowed")
