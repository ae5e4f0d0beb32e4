"""Colours of classes: what a person tells apart."""

import numpy as np

from hvdkit.data.labels import COLOURS


def test_background_is_dark_grey_ignored_white_and_no_two_classes_alike():
    assert COLOURS.shape == (256, 3) and COLOURS.dtype == np.uint8
    assert COLOURS[0].tolist() == [63, 63, 63] and COLOURS[255].tolist() == [255, 255, 255]
    apart = COLOURS[:22].astype(int)
    distances = np.abs(apart[:, None] - apart[None]).sum(-1) + 999 * np.eye(22, dtype=int)
    assert distances.min() > 20
