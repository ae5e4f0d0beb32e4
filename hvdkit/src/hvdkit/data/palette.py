"""Colours of classes, to show labels of pixels."""

from __future__ import annotations

import colorsys

import numpy as np

from hvdkit.data.labels import IGNORE


def _colours() -> np.ndarray:
    """A colour a class, uint8 [256, 3]: background grey, neighbours far apart in hue."""
    turns = (np.arange(256) * 0.618034) % 1.0
    colours = [colorsys.hsv_to_rgb(t, 0.75, 1.0 - 0.35 * (i % 2)) for i, t in enumerate(turns)]
    colours[0], colours[IGNORE] = (0.25, 0.25, 0.25), (1.0, 1.0, 1.0)
    return (np.array(colours) * 255).astype(np.uint8)


COLOURS = _colours()
