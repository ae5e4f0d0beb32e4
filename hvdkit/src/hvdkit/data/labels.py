"""What labels mean, the same for readers, augmentation and tasks; colours to show them."""

import colorsys

import numpy as np

IGNORE = 255  # loss and metrics leave out pixels with this label


def one_class(folder: object) -> str:
    """A message about a data set where `folder` holds a single class."""
    return (
        f"{folder} holds one class only, so there is nothing to classify: is --data_dir one level "
        "too deep, or too high? A split holds a folder for each class"
    )


# Each class has a colour, uint8 [256, 3]: background grey, neighbours far apart in hue.
_HSV = [((i * 0.618034) % 1.0, 0.75, 1.0 - 0.35 * (i % 2)) for i in range(256)]
COLOURS = (np.array([colorsys.hsv_to_rgb(*hsv) for hsv in _HSV]) * 255).astype(np.uint8)
COLOURS[0], COLOURS[IGNORE] = 63, 255
