"""When gradients are ready during the backward pass: the profiles in launch/planner/tables.py.

    python benchmarks/profiles.py

Of networks in keras.applications: layers from the last to the first, each after a share of the
backward pass as large as its share of the multiplications of all layers. Twenty points each:
(share of the backward pass that is done, share of all bytes that is ready then and was not before).
"""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import math
from collections.abc import Iterator

import keras

NETWORKS = {"ResNet50": 224, "ResNet101": 224, "InceptionV3": 299, "VGG16": 224}
NETWORKS |= {"EfficientNetB4": 380}
POINTS = 20
_MULTIPLIES = (keras.layers.Dense, keras.layers.Conv2D, keras.layers.DepthwiseConv2D)


def main() -> None:
    for name, size in NETWORKS.items():
        build = getattr(keras.applications, name)
        model = build(weights=None, input_shape=(size, size, 3))
        parameters = sum(math.prod(v.shape) for v in model.trainable_variables)
        print(f'    "{name.lower()}": (  # {parameters:,} parameters')
        print("".join(f"        {pair},\n" for pair in points(model)) + "    ),")


def points(model: keras.Model) -> Iterator[tuple[float, float]]:
    layers = [layer for layer in model.layers if layer.trainable_variables][::-1]
    sizes = [sum(math.prod(v.shape) for v in layer.trainable_variables) for layer in layers]
    work = [multiplications(layer) for layer in layers]
    done, groups = 0.0, [[0.0, 0.0] for _ in range(POINTS)]
    for size, own in zip(sizes, work):
        done += own / sum(work)
        group = groups[min(POINTS - 1, int(done * POINTS))]
        group[0] = min(done, 1.0)  # the last of the group
        group[1] += size / sum(sizes)
    yield from ((round(at, 3), round(share, 4)) for at, share in groups if share)


def multiplications(layer: keras.layers.Layer) -> float:
    """Of one sample; 0 for layers that only scale."""
    if not isinstance(layer, _MULTIPLIES):
        return 0.0
    kernel = layer.trainable_variables[0].shape
    places = math.prod(layer.output.shape[1:3]) if len(kernel) > 2 else 1
    return math.prod(kernel) * places


if __name__ == "__main__":
    main()
