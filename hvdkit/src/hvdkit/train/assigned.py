"""Which variables a traced function changes."""

from __future__ import annotations

import tensorflow as tf

_READS = {
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"),
    *("VarIsInitializedOp", "VarHandleOp"),
}


def assigned(graph: tf.Graph) -> list[tf.Tensor]:
    """Handles, outside of all graphs, of the variables that operations of `graph` may change."""
    found = {}
    for op in graph.get_operations():
        if op.type in _READS:
            continue
        try:
            # Of a call or a branch: which of its inputs are only read, by what it calls.
            only_read = op.get_attr("_read_only_resource_inputs")
        except ValueError:
            only_read = ()
        for place, tensor in enumerate(op.inputs):
            if tensor.dtype == tf.resource and place not in only_read:
                handle = _outside(tensor, graph)
                found[id(handle)] = handle
    return list(found.values())


def _outside(tensor: tf.Tensor, graph: tf.Graph) -> tf.Tensor:
    """What an argument of a graph stands for, through all graphs around it."""
    while hasattr(graph, "captures"):
        tensor = next((out for out, inner in graph.captures if inner is tensor), tensor)
        graph = graph.outer_graph
    return tensor
