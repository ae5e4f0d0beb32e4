"""Checks of traced functions: what would silently break a promise of the run is refused."""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework.auto_control_deps_utils import (
    get_read_write_resource_inputs,
)

from hvdkit.logs import join
from hvdkit.ranks.world import raw
from hvdkit.train.step import compression, losses
from hvdkit.train.step.state import State

# Operations that draw by a tf.random.Generator; of others that draw, seeds are attributes.
_DRAWS_BY_GENERATOR = re.compile(
    "Stateful(Standard|Truncated|Uniform|Random).*|RngReadAndSkip"
)
_SEEDS = ("seed", "seed2")
# These have seeds and do not draw: one takes all classes, the other compares what was drawn.
_NEVER_DRAWS = ("AllCandidateSampler", "ComputeAccidentalHits")
_DRAWS_WITH_KEY = re.compile("Stateless.*(Random|Normal|Multinomial).*")
_DRAWS_BY_PLACE = re.compile(
    "Stateless.*(Multinomial|Gamma|Binomial|Poisson|Shuffle|Param).*"
)
_ASSIGNS = re.compile(
    r"Assign(Add|Sub)?VariableOp|Resource(Scatter|Strided).*|Assign(Add|Sub)?"
)
_CHANGES_TABLE = re.compile(r"LookupTable(Insert|Remove|Import)(V2)?")
# What XLA compiles to nothing; a TensorArray that grows loses what is written beyond its end.
_LEFT_OUT = {"Assert", "CheckNumerics", "CheckNumericsV2"}
_GROWS = "resize_if_index_out_of_bounds"
# In XLA's messages.
_NO_KERNEL = re.compile(
    r"No registered '(\w+)' OpKernel .*? with node "
    r"(?:{{function_node [^}]+}})?{{node ([^}]+)}}"
)
# Names of the collectives of a step's figures and state; of synchronized batch norm and `gather`.
_OF_STEP = re.compile(r"(^|/)(step\.totals|state\.)")
_OF_ENGINE = re.compile(r"(\.batch|hvdkit\.gather)(\.gradient)?(_\d+)?$")
_OF_COMPRESSION = re.compile(rf"(^|/){re.escape(compression.NAME)}\d+$")


def check_draws(graph: tf.Graph, what: str, instead: str) -> None:
    """Raises ValueError where a graph, or a function it calls, draws without a key or seed."""
    drawn = join(sorted({node.op for node in nodes(graph) if _draws_by_state(node)}))
    if drawn:
        raise ValueError(
            f"{what} draws random numbers ({drawn}) that change with the number of ranks "
            f"and after an interruption: {instead}"
        )


def _draws_by_state(node: tf.compat.v1.NodeDef) -> bool:
    """Whether draws go on from a state inside the process, neither saved nor shared."""
    attributes = node.attr
    if any(name not in attributes for name in _SEEDS):
        return bool(_DRAWS_BY_GENERATOR.fullmatch(node.op))
    # Recurrent layers of cuDNN draw for their dropout alone.
    if "dropout" in attributes:
        return attributes["dropout"].f > 0
    # A fractional pooling that is deterministic draws its regions once, by its seeds.
    if "deterministic" in attributes:
        return not attributes["deterministic"].b
    return node.op not in _NEVER_DRAWS


def draws(graph: tf.Graph) -> bool:
    """Whether anything in it, or in its functions, draws random numbers."""
    return bool(_operations(graph, _DRAWS_WITH_KEY))


def draws_by_place(graph: tf.Graph) -> bool:
    """Whether a sample's place in its batch decides what it draws, also in a trial (dropout.py)."""
    return bool(_operations(graph, _DRAWS_BY_PLACE))


def check_stateless(graph: tf.Graph, what: str) -> None:
    """Raises ValueError where a graph, or a function it calls, changes a variable.

    Examples are made by several threads in any order, and the variable would not be saved.
    """
    changes = _operations(graph, _ASSIGNS)
    if changes:
        raise ValueError(
            f"{what} changes a variable ({changes}), which would depend on the order of "
            "threads, and be neither saved nor the same on all ranks: make each example from its "
            "sample and `key` alone"
        )


def names(graph: tf.Graph) -> set[str]:
    """Of its operations and of the functions that it calls."""
    definition = graph.as_graph_def()
    functions = {function.signature.name for function in definition.library.function}
    return functions | {node.name for node in definition.node}


def check_collectives(graph: tf.Graph, what: str, before: Container[str] = ()) -> None:
    """Raises ValueError where a graph, or a function it calls, holds collectives of the task's own.

    `before`: `names` of the graph before the task's.
    """
    definition = graph.as_graph_def()
    new = [node for node in definition.node if node.name not in before]
    for function in definition.library.function:
        if function.signature.name not in before:
            new += function.node_def
    of_task = set()
    for node in new:
        if node.op.startswith("Horovod") and not _OF_ENGINE.search(node.name):
            of_task.add(node.op)
    if of_task:
        raise ValueError(
            f"{what} calls Horovod ({join(sorted(of_task))}), whose gradient is a mean over ranks, "
            "and in evaluation ranks have different numbers of batches: use "
            "hvdkit.train.across.gather"
        )


def check_state(
    graph: tf.Graph, state: State, what: str, *, trains: bool = False
) -> None:
    """Raises ValueError where a traced function uses state that nobody trains or saves.

    Keras does not find a tf.Variable in a layer, nor layers that are no attributes of layers.
    Where it `trains`, what the task holds must be frozen (a teacher), or changed by the function.
    """
    changes = _operations(graph, _CHANGES_TABLE)
    if changes:
        raise ValueError(
            f"{what} changes a lookup table ({changes}), which is neither saved nor the same "
            "on all ranks: keep numbers in a tf.Variable of the task, trainable=False"
        )
    handles = {id(raw(v).handle) for v in state.variables.values()}
    if trains:
        changed = {id(handle) for handle in assigned_handles(graph)}
        for variable in state.task_state.of_task.values():
            handle = id(raw(variable).handle)
            if variable.trainable and handle not in changed:
                handles.discard(handle)
    names_by_handle = {id(v.handle): v.name for v in graph.variables}
    unknown = []
    for tensor, inner in graph.captures:
        if id(tensor) not in handles and _is_used(inner) and _of_variable(tensor):
            unknown.append(names_by_handle.get(id(tensor), "one without a name"))
    if unknown:
        raise ValueError(
            f"{what} uses variables that the model does not hold: {join(unknown)}. They would be "
            "neither trained nor saved. Make weights with add_weight, keep layers (and a "
            "keras.random.SeedGenerator for random functions) as attributes of the model or of its "
            "layers, a frozen model, or state with trainable=False, as one of the task, built "
            "before the first step; use tf.constant for fixed numbers. Keras does not count its "
            "metrics as variables of a model: compute them in the task's sums"
        )


def check_weights(
    tape: tf.GradientTape, weights: list[tf.Tensor], trained: list[tf.Variable]
) -> None:
    """Raises ValueError where weights of a loss depend on what is trained.

    They also divide the loss, over all ranks; the step's gradient takes them for constants.
    """
    if any(g is not None for g in tape.gradient(weights, trained)):
        raise ValueError(
            "the task's loss returns weights that depend on the model's outputs: put them through "
            "tf.stop_gradient, or multiply them into the losses and return weights of their own"
        )


def check_gradients(
    gradients: Sequence[Any], variables: Sequence[keras.Variable]
) -> None:
    """Raises ValueError where `update` would apply a gradient to another variable, or a mean."""
    shapes = [None if gradient is None else gradient.shape for gradient in gradients]
    fit = len(shapes) == len(variables)
    for shape, variable in zip(shapes, variables):
        fit = fit and (shape is None or variable.value.shape.is_compatible_with(shape))
    if not fit:
        raise ValueError(
            "run.update takes a gradient for each of run.weights, in their order and shapes, and "
            f"None where there is none: not {len(shapes)} of {[str(shape) for shape in shapes]} "
            f"for {len(variables)} weights"
        )
    for gradient in gradients:
        if tf.is_symbolic_tensor(gradient):
            operation = losses.origin(gradient).op
            if (
                operation.type.startswith("Horovod")
                and "reduce_op" in operation.node_def.attr
            ):
                _check_sum(operation.node_def)


def _check_sum(node: tf.compat.v1.NodeDef) -> None:
    if node.attr["reduce_op"].i != hvd.Sum:
        raise ValueError(
            "Horovod averages gradients unless told otherwise, and run.update divides by the "
            "global batch: give it op=hvd.Sum"
        )


def check_sums(graph: tf.Graph, ranks: int) -> None:
    """Raises ValueError where gradients of `ranks` are not summed, which `update` counts on.

    And where they are summed as float16 without a scale, in which small ones are zeros.
    """
    exchanges = [node for node in nodes(graph) if node.op.startswith("Horovod")]
    sums = [node for node in exchanges if not _OF_COMPRESSION.search(node.name)]
    in_float16 = 0
    for node in sums:
        if "Tape_Allreduce" in node.name and "reduce_op" in node.attr:
            _check_sum(node)
        if (
            "reduce_op" in node.attr
            and node.attr["T"].type == tf.float16.as_datatype_enum
        ):
            in_float16 += node.attr["num_tensors"].i or 1  # a group has several tensors
    # Compression exchanges an exponent before each.
    if in_float16 > len(exchanges) - len(sums):
        raise ValueError(
            "the step sums float16 over ranks as it is, where small gradients become zeros and "
            "large ones infinite: give the tape **run.reduction alone, and --compression=fp16 "
            "(float16 weights: make them float32)"
        )
    used = set()
    for node in sums:
        if not node.attr["ignore_name_scope"].b or _OF_ENGINE.search(node.name):
            continue
        name = node.name.rpartition("/")[2]
        if name in used:
            raise ValueError(
                f"the step sums two gradients over ranks by one name ({name}), which Horovod "
                "mistakes for each other: leave out use_generic_names=True where a step takes "
                "more than one gradient"
            )
        used.add(name)
    if ranks > 1 and all(
        _OF_STEP.search(n.name) or _OF_ENGINE.search(n.name) for n in sums
    ):
        raise ValueError(
            "the step sums no gradients over ranks, whose weights would drift apart: wrap its "
            "tape, tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **run.reduction)"
        )


def check_compiled_sums(graph: tf.Graph) -> None:
    """Raises ValueError where a part that the model compiles by itself sums over ranks."""
    library = {f.signature.name: f for f in graph.as_graph_def().library.function}
    for function in library.values():
        if not function.attr["_XlaMustCompile"].b:
            continue
        for node in _nodes_of(function, library):
            if node.op.startswith("Horovod"):
                raise ValueError(
                    f"a tf.function with jit_compile=True sums over ranks ({node.name}), which XLA "
                    "cannot compile: leave out jit_compile=True, or --bn_sync=full"
                )


def _nodes_of(function: Any, library: Mapping[str, Any]) -> list[tf.compat.v1.NodeDef]:
    """Those of a function's definition, and of the functions of the library that it calls."""
    called = [function]
    names = {function.signature.name}
    found = []
    for each in called:  # The list grows meanwhile.
        found += each.node_def
        for node in each.node_def:
            for attribute in node.attr.values():
                name = attribute.func.name
                if name in library and name not in names:
                    names.add(name)
                    called.append(library[name])
    return found


def check_compiles(functions: Iterable[tf.types.experimental.ConcreteFunction]) -> None:
    """Raises ValueError where XLA cannot compile a traced function, or would leave a part out."""
    for function in functions:
        if fault := xla_fault(function, "the model or the loss"):
            raise ValueError(f"--jit: XLA {fault}, or leave out --jit")


def xla_fault(function: tf.types.experimental.ConcreteFunction, what: str) -> str:
    """Why XLA cannot compile a traced function, `what`, as it is; "" where it can."""
    left_out = set()
    for node in nodes(function.graph):
        if node.op in _LEFT_OUT or node.attr[_GROWS].b:
            left_out.add(f"{node.op} ({node.name})")
    if left_out:
        return (
            f"silently leaves out {join(sorted(left_out))}: check values in training_example, "
            "give a TensorArray its size"
        )
    captured = []
    for tensor in function.captured_inputs:
        # A loss may use a tensor of the step, which has no value yet.
        is_unknown = tf.is_symbolic_tensor(tensor)
        captured.append(tf.zeros(tensor.shape, tensor.dtype) if is_unknown else tensor)
    try:
        for tensor in function.captured_inputs:
            if tensor.dtype == tf.resource and not _of_variable(tensor):
                raise ValueError("it takes no lookup table")
        context.context().get_compiler_ir(
            device_name=None,
            platform_name="GPU" if tf.config.get_visible_devices("GPU") else "CPU",
            function_name=function.name,
            flat_args=tf.nest.flatten(function.structured_input_signature),
            captured_inputs=captured,
            stage="hlo",
        )
    except (ValueError, tf.errors.OpError) as error:
        return f"cannot compile {what}: {_of_xla(str(error))}. Use other operations"
    return ""


def _of_xla(message: str) -> str:
    """XLA's message on one line."""
    missing = sorted({f"{op} ({node})" for op, node in _NO_KERNEL.findall(message)})
    if missing:
        return f"it has no {join(missing)}"
    first_line = message.removeprefix("Failed getting HLO text: '").split("\n")[0]
    return first_line.rstrip(" .'")[:400]


def nodes(graph: tf.Graph) -> list[tf.compat.v1.NodeDef]:
    """The nodes of a graph and of the functions that it calls, compiled or not."""
    definition = graph.as_graph_def()
    found = list(definition.node)
    for function in definition.library.function:
        found += function.node_def
    return found


def _operations(graph: tf.Graph, types: re.Pattern) -> str:
    """The types of its operations, and of the functions that it calls, that match; "" for none."""
    return join(sorted({node.op for node in nodes(graph) if types.fullmatch(node.op)}))


def read(variable: tf.Variable) -> tf.Tensor:
    """As read_value, without an identity that runs even if nothing uses it."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def read_all(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """The variables' values, by one operation; it is no use of those that nothing takes."""

    @tf.function(autograph=False)
    def values_at_the_start():
        return [read(variable) for variable in variables]

    return values_at_the_start()


def _is_used(resource: tf.Tensor) -> bool:
    """Whether a graph does more with this argument than read what nothing uses."""
    for op in resource.consumers():
        values = list(op.outputs)
        if "values_at_the_start" in op.node_def.attr["f"].func.name:
            # It gives the values in the order of its arguments.
            places = [
                place for place, tensor in enumerate(op.inputs) if tensor is resource
            ]
            values = [values[place] for place in places]
        elif op.type != "ReadVariableOp":
            return resource.dtype == tf.resource
        if any(value.consumers() for value in values):
            return resource.dtype == tf.resource
    return False


def _of_variable(handle: tf.Tensor) -> bool:
    """Whether a resource is a variable: only its handle has a shape and a type."""
    data = getattr(handle, "_handle_data", None)
    return bool(data is not None and data.is_set and data.shape_and_type)


def assigned_handles(
    graph: tf.Graph, operations: Iterable[tf.Operation] | None = None
) -> list[tf.Tensor]:
    """Handles, outside of all graphs, of the variables that operations of `graph` may change.

    `operations`: some of its operations, instead of all.
    """
    handles = {}
    for op in graph.get_operations() if operations is None else operations:
        _, changed = get_read_write_resource_inputs(op)
        for tensor in changed:
            handle = _outside(tensor, graph)
            handles[id(handle)] = handle
    return list(handles.values())


def _outside(tensor: tf.Tensor, graph: tf.Graph) -> tf.Tensor:
    """The tensor outside of all graphs that an argument of `graph` stands for."""
    while hasattr(graph, "captures"):
        tensor = next((out for out, inner in graph.captures if inner is tensor), tensor)
        graph = graph.outer_graph
    return tensor
