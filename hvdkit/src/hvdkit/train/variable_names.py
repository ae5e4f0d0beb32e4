"""Names of a model's and an optimizer's variables that come from their structure alone.

Keras counts the layers that it names itself over the whole process (conv2d_5, seed_generator_7),
so its paths depend on what else was made before. A copied or loaded model has other paths again.
The names here are the same for every model of the same structure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import keras
from keras.src.utils.naming import to_snake_case


def of_model(model: keras.Model) -> list[str]:
    """A name for each of `model.variables`, in their order: its layers' names, outermost first.

    A layer that Keras named (its class and perhaps a number) is numbered anew among its
    neighbours; a name that a person gave stays. Functional and sequential models do not appear, so
    a network has the same names alone and inside another. Layers of one given name share names.
    """
    names: dict[int, str] = {}

    def visit(layer: keras.Layer, prefix: str, counts: Counter) -> None:
        if not is_plain_model(layer):
            prefix, counts = f"{prefix}{_renumbered(layer, counts)}/", Counter()
        children = layer._flatten_layers(include_self=False, recursive=False)
        below = {id(v) for child in children for v in child.variables}
        own_counts: Counter = Counter()
        for variable in layer.variables:
            if id(variable) not in below:
                names.setdefault(id(variable), prefix + _renumbered(variable, own_counts))
        for child in children:
            if child.variables:  # or it takes no number: one more activation changes no name
                visit(child, prefix, counts)

    visit(model, "", Counter())
    return [names[id(v)] for v in model.variables]


def of_optimizer(
    optimizer: keras.optimizers.Optimizer, model_names: Mapping[int, str]
) -> list[str]:
    """A name for each of `optimizer.variables`: adam/iteration, adam/dense/kernel/momentum.

    Args:
      model_names: names of the model's variables by their id().
    """
    own = _renumbered(optimizer, Counter())
    owners: dict[str, list[str]] = {}
    for variable in optimizer._trainable_variables:
        start = variable.path.replace("/", "_")  # of a slot's name
        owners.setdefault(start, []).append(model_names[id(variable)])
    seen: Counter = Counter()
    return [f"{own}/{_slot(v.name, owners, seen)}" for v in optimizer.variables]


def is_plain_model(layer: keras.Layer) -> bool:
    """Functional (it knows its operations) or sequential."""
    return isinstance(layer, keras.Sequential) or (
        isinstance(layer, keras.Model) and hasattr(layer, "operations")
    )


def _renumbered(named: keras.Layer | keras.Variable, counts: Counter) -> str:
    # All base classes, because a layer may be exchanged for one of a subclass under its old name.
    for kind in type(named).__mro__:
        base = to_snake_case(kind.__name__)
        # keras.layers.Bidirectional names its two copies after the layer that it is given.
        match = re.fullmatch(rf"((?:forward_|backward_)?{re.escape(base)})(_\d+)?", named.name)
        if match:
            number = counts[match[1]]
            counts[match[1]] += 1
            return f"{match[1]}_{number}" if number else match[1]
    return named.name


def _slot(name: str, owners: Mapping[str, list[str]], seen: Counter) -> str:
    """dense_5_kernel_momentum: the longest beginning that is a variable's path says whose it is.

    Paths may repeat; then slots come in the order of their variables.
    """
    head = name
    while "_" in head:
        head = head.rpartition("_")[0]
        if head in owners:
            owner = owners[head][seen[name] % len(owners[head])]
            seen[name] += 1
            return f"{owner}/{name[len(head) + 1 :]}"
    return name
