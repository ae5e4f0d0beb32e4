"""LoRA factors of weights to start from: multiplied into their kernels, as Keras saves them.

A LoRA layer computes with kernel + scale * (first factor @ second factor); Hu et al. 2021
(arXiv:2106.09685). A checkpoint holds the three apart, and the scale beside them.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import keras
import numpy as np

from hvdkit.ranks.world import raw
from hvdkit.train.step.state import Variable, lora_factors

# Kernels of these types can be merged: NumPy's floats, and bfloat16.
_FLOAT_KINDS = "fV"


class Names(NamedTuple):
    """The names of a LoRA layer's weights, in a checkpoint or a model."""

    kernel: str
    first: str
    second: str


def names_of(first: str) -> Names:
    """`first`: the name of the first factor, as dense/lora_kernel_a, perhaps with a number."""
    match = re.fullmatch(r"(.*?)lora_(\w+)_a((?: #\d+)?)", first)
    if not match:
        raise ValueError(f"{first!r} is not the name of a first factor of LoRA")
    layer, kernel, number = match.groups()
    return Names(f"{layer}{kernel}{number}", first, f"{layer}lora_{kernel}_b{number}")


def scales_of(model: keras.Model, named: Mapping[str, Variable]) -> dict[str, float]:
    """Scales of the model's products, by the name of their first factor in `named`."""
    names = {id(raw(variable)): name for name, variable in named.items()}
    factors = lora_factors(model._flatten_layers())
    return {names[id(raw(first))]: scale for _, first, scale in factors}


def merged(
    arrays: Mapping[str, np.ndarray],
    scales: Mapping[str, float],
    model_scales: Mapping[str, float],
    *,
    shapes: Mapping[str, tuple],
) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint, its factors multiplied into kernels where the model has others.

    `scales`: those of the checkpoint; `shapes`: of the model's variables. What cannot be merged (a
    quantized kernel, layers that share a name) stays as it is.
    """
    result = dict(arrays)
    for first, scale in scales.items():
        names = names_of(first)
        factors = (first, names.second)
        fits = all(
            name in arrays and shapes.get(name) == arrays[name].shape
            for name in factors
        )
        if fits and model_scales.get(first) == scale:
            continue
        is_known = all(name in arrays for name in names) and not _is_shared(
            names, arrays
        )
        if not is_known or arrays[names.kernel].dtype.kind not in _FLOAT_KINDS:
            continue
        a = result.pop(first).astype(np.float64)
        b = result.pop(names.second).astype(np.float64)
        kernel = arrays[names.kernel]
        result[names.kernel] = (kernel.astype(np.float64) + scale * (a @ b)).astype(
            kernel.dtype
        )
    return result


def new_factors(
    variables: Mapping[str, Variable],
    model_scales: Mapping[str, float],
    arrays: Mapping[str, np.ndarray],
) -> list[str]:
    """The model's factors that a checkpoint lacks and that change nothing: one of them is 0."""
    new = []
    for first in model_scales:
        second = names_of(first).second
        is_new = first not in arrays and second not in arrays
        if is_new and not all(
            np.any(variables[name].numpy()) for name in (first, second)
        ):
            new += [first, second]
    return new


def _is_shared(names: Names, arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether other layers have the kernel's name, not all of them with factors."""
    counts = Counter(_without_number(name) for name in arrays)
    return counts[_without_number(names.kernel)] != counts[_without_number(names.first)]


def _without_number(name: str) -> str:
    return re.sub(r" #\d+$", "", name)
