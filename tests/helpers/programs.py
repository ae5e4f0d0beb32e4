"""What of a traced step runs outside of the programs that XLA compiles."""

from collections import Counter

import tensorflow as tf


def programs_and_others(graph: tf.Graph) -> tuple[int, Counter[str]]:
    """How many programs a step's graph calls; its other operations that run, by their types.

    Those run that an output depends on, or that change something. A branch counts as one.
    Arguments and identities do not count: TensorFlow takes them out before it runs a graph.
    """
    compiled = set()
    for function in graph.as_graph_def().library.function:
        if function.attr["_XlaMustCompile"].b:
            compiled.add(function.signature.name)
    left = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
    seen = set()
    programs = 0
    others: Counter[str] = Counter()
    while left:
        operation = left.pop()
        if operation in seen or operation.type == "Placeholder":
            continue
        seen.add(operation)
        left += [tensor.op for tensor in operation.inputs]
        left += operation.control_inputs
        called = operation.node_def.attr["f"].func.name
        if called in compiled:
            programs += 1
        elif operation.type != "Identity":
            others[operation.type] += 1
    return programs, others
