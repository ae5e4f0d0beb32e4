"""LoRA factors of weights to start from: multiplied into their kernels, as Keras saves them.

A LoRA layer computes with kernel + scale * (first factor @ second factor); Hu et al. 2021
(arXiv:2106.09685). A checkpoint holds the three apart, and the scale beside them.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import keras
import numpy as np

from hvdkit.ranks.world import raw
from hvdkit.train.state import Variable, lora_factors

_NUMERALS = "fV"  # kinds of types that can be merged: NumPy's floats, and bfloat16


class Names(NamedTuple):
    """Of a LoRA layer's weights, in a checkpoint or a model."""

    kernel: str
    first: str
    second: str


def names_of(first: str) -> Names:
    """`first`: the name of the first factor, as dense/lora_kernel_a, perhaps with a number."""
    before, kernel, number = re.fullmatch(r"(.*?)lora_(\w+)_a((?: #\d+)?)", first).groups()
    return Names(f"{before}{kernel}{number}", first, f"{before}lora_{kernel}_b{number}")


def scales_of(model: keras.Model, named: Mapping[str, Variable]) -> dict[str, float]:
    """Scales of the model's products, by the name of their first factor in `named`."""
    names = {id(raw(variable)): name for name, variable in named.items()}
    factors = lora_factors(model._flatten_layers())
    return {names[id(raw(first))]: scale for _, first, scale in factors}


def merged(
    there: Mapping[str, np.ndarray],
    scales: Mapping[str, float],
    own: Mapping[str, float],
    *,
    shapes: Mapping[str, tuple],
) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint, its factors multiplied into kernels where the model has others.

    `scales`, `own`: of the checkpoint and of the model; `shapes`: of the model's variables. What
    cannot be merged (a quantized kernel, layers that share a name) stays as it is.
    """
    found = dict(there)
    for first, scale in scales.items():
        names = names_of(first)
        parts = (first, names.second)
        fits = all(name in there and shapes.get(name) == there[name].shape for name in parts)
        if fits and own.get(first) == scale:
            continue
        is_known = all(name in there for name in names) and not _shared(names, there)
        if not is_known or there[names.kernel].dtype.kind not in _NUMERALS:
            continue
        a, b = (found.pop(name).astype(np.float64) for name in parts)
        kernel = there[names.kernel]
        found[names.kernel] = (kernel.astype(np.float64) + scale * (a @ b)).astype(kernel.dtype)
    return found


def new_factors(
    variables: Mapping[str, Variable], own: Mapping[str, float], there: Mapping[str, np.ndarray]
) -> list[str]:
    """The model's factors that a checkpoint lacks and that change nothing: one of them is 0."""
    found = []
    for first in own:
        _, _, second = names_of(first)
        is_new = first not in there and second not in there
        if is_new and not all(np.any(variables[name].numpy()) for name in (first, second)):
            found += [first, second]
    return found


def _shared(names: Names, there: Mapping[str, np.ndarray]) -> bool:
    """Whether other layers have the kernel's name, not all of them with factors."""
    kernel, first, _ = (re.sub(r" #\d+$", "", name) for name in names)
    counts = [sum(re.sub(r" #\d+$", "", n) == name for n in there) for name in (kernel, first)]
    return counts[0] != counts[1]
