"""A segmentation's scores in plain NumPy, one picture at a time: what the run's must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Model = Callable[[np.ndarray], np.ndarray]  # [H, W, 3] -> logits [H, W, classes]


def probabilities(
    model: Model,
    image: np.ndarray,
    stride: int,
    window: int = 0,
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
) -> np.ndarray:
    """float64 [H, W, classes] of an image [H, W, 3] in [0, 255]."""
    height, width = image.shape[:2]
    found = []
    for scale in scales:
        for turned in (False, True) if flip else (False,):
            seen = image[:, ::-1] if turned else image
            seen = resized(seen, max(round(height * scale), 1), max(round(width * scale), 1))
            part = resized(in_windows(model, seen, stride, window), height, width)
            found.append(part[:, ::-1] if turned else part)
    return np.mean(found, axis=0)


def in_windows(model: Model, image: np.ndarray, stride: int, window: int) -> np.ndarray:
    height, width = image.shape[:2]
    side = window or max(height, width)
    total, count = 0.0, np.zeros((height, width, 1))
    for top in starts(height, side):
        for left in starts(width, side):
            place = np.s_[top : top + side, left : left + side]
            found = softmax(padded(model, image[place], stride))
            total = np.zeros((height, width, found.shape[-1])) + total
            total[place] += found
            count[place] += 1
    return total / count


def starts(length: int, side: int) -> list[int]:
    """Two thirds of a window apart, the last one as far as there is room."""
    found = [0]
    while found[-1] + side < length:
        found.append(min(found[-1] + 2 * side // 3, length - side))
    return found


def padded(model: Model, image: np.ndarray, stride: int) -> np.ndarray:
    height, width = image.shape[:2]
    below, right = -height % stride, -width % stride
    beside = [(0, below), (0, right), (0, 0)]
    return model(np.pad(image, beside, constant_values=128))[:height, :width]


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear, pixel centres at one half."""

    def weights(old: int, new: int) -> np.ndarray:
        centres = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        return np.maximum(1 - np.abs(centres[:, None] - np.arange(old)), 0)

    rows, columns = weights(image.shape[0], height), weights(image.shape[1], width)
    return np.einsum("yh,xw,hwc->yxc", rows, columns, image, optimize=True)


def miou(labels: list[np.ndarray], predictions: list[np.ndarray], classes: int) -> float:
    """Mean over the classes that occur in labels or predictions; 255 is not counted."""
    label, found = (np.concatenate([np.ravel(a) for a in many]) for many in (labels, predictions))
    found = found[label != 255]
    label = label[label != 255]
    scores = []
    for c in range(classes):
        union = np.count_nonzero((label == c) | (found == c))
        if union:
            scores.append(np.count_nonzero((label == c) & (found == c)) / union)
    return float(np.mean(scores))
