"""Whether all ranks do the same: settings, code, gradients, collectives, state and weights.

Horovod matches collectives by name. A rank with another name waits for ever, one with another
shape fails in mid-step. So the traced steps are compared before the first one.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdkit.logs import join
from hvdkit.ranks import figures
from hvdkit.ranks import fingerprint as fingerprints
from hvdkit.ranks.world import World, hostname, say, weights_sha256
from hvdkit.settings import Settings, fields, project
from hvdkit.stop import BUG, WRONG_USE, Stop

Variables = Mapping[str, "keras.Variable | tf.Variable"]

# Positions in a step's votes: what each rank reports in every step, summed with the loss. So a rank
# that cannot read its data, or that received a stop signal, takes part in the step as always, and
# all learn of it at the same step. FAILED_SAVES: those of rank 0 in a row; others: 1 or 0 a rank.
DATA_FAILED, STOP_ASKED, FAILED_SAVES, REPLACED = range(4)
NUM_VOTES = 4
_MOVING = ("/moving_mean", "/moving_variance")
_OF_BATCH_NORM = (
    " What is made of a batch norm's moving statistics, which are each rank's own between two "
    "syncs, needs --bn_sync_every=1 or --bn_sync=full."
)


@functools.lru_cache  # Votes are mostly those of the step before.
def votes(
    *, data_failed=False, stop_asked=False, failed_saves=0, replaced=0
) -> tf.Tensor:
    """One rank's votes, float64 [NUM_VOTES]."""
    return tf.constant(
        [float(data_failed), float(stop_asked), failed_saves, replaced], tf.float64
    )


def check_settings(
    world: World, config: Settings, others: Mapping[str, Any] | None = None
) -> None:
    """Raises Stop on all ranks when they were given different settings, naming them.

    Another seed would be trained silently, another number of steps would wait for ever. Paths may
    differ: a host's data may lie elsewhere (it is compared), and rank 0 alone writes. `others`:
    flags that are no settings of a run, by name.
    """
    flags = {}
    known = fields.of(config)
    for name, value in dataclasses.asdict(config).items():
        if not fields.is_path(known[name], value):
            flags[f"--{name}"] = str(value)
    for name, value in (others or {}).items():
        flags[f"--{name}"] = value
    everyone, ranks = world.compare(flags, "agreement.settings")
    if ranks:
        raise Stop(
            WRONG_USE,
            f"the settings of rank {join(ranks)} differ from rank 0's: "
            f"{_differences(everyone, ranks[0])}: give every rank the same flags and flagfiles",
        )


def check_optimizer(world: World, described: Mapping[str, str]) -> None:
    """Raises Stop on all ranks when a task's optimizer has other hyperparameters on one of them."""
    everyone, ranks = world.compare(dict(described), "agreement.optimizer")
    if ranks:
        raise Stop(
            WRONG_USE,
            f"the hyperparameters of the task's optimizer of rank {join(ranks)} differ from rank "
            f"0's: {_differences(everyone, ranks[0])}: make it from the settings alone, the same "
            "on every rank",
        )


def _differences(everyone: list[dict[str, str]], rank: int) -> str:
    return join(fingerprints.differences(everyone[0], everyone[rank]), 3)


def fingerprint(world: World, config: Settings) -> dict[str, str]:
    """What the run's bits depend on besides its settings; call it after the device was chosen.

    Raises Stop on all ranks where packages differ, and with virtual ranks where anything does.
    """
    everyone, odd = world.compare(fingerprints.here(), "agreement.fingerprint")
    hosts = world.gather_objects(hostname(), "agreement.hosts") if odd else []
    first = everyone[0]
    # Only the first rank of each kind is named: of a thousand GPUs half may be of another.
    first_of_kind: dict[str, int] = {}
    for rank in odd:
        first_of_kind.setdefault(repr(everyone[rank]), rank)
    for rank in first_of_kind.values():
        other = everyone[rank]
        differences = "; ".join(fingerprints.differences(first, other))
        if any(first[name] != other[name] for name in fingerprints.PACKAGES):
            raise Stop(
                WRONG_USE,
                f"rank 0 and rank {rank} on {hosts[rank]} differ in {differences}: install the "
                "same packages on all hosts",
            )
        if config.virtual_ranks:
            raise Stop(
                WRONG_USE,
                f"--virtual_ranks needs ranks that compute alike, and rank 0 and rank {rank} on "
                f"{hosts[rank]} differ in {differences}: use hosts of one kind, set up alike, or "
                "leave out --virtual_ranks",
            )
        say(
            world,
            f"note: rank 0 and rank {rank} on {hosts[rank]} differ in {differences}",
        )
    return fingerprints.of_all(everyone)


def check_code(world: World) -> None:
    """Raises Stop on all ranks when a rank has other files of code."""
    with world.fail_together("reading the project's code"):
        digests = fingerprints.code(project.folder(), project.ENGINE)
    everyone, odd = world.compare(dict(sorted(digests.items())), "agreement.code")
    if odd:
        hosts = world.gather_objects(hostname(), "agreement.hosts")
        first = everyone[0]
        other = everyone[odd[0]]
        names = sorted({*first, *other})
        different = [name for name in names if other.get(name) != first.get(name)]
        raise Stop(
            WRONG_USE,
            f"{join(different, 3)} on {hosts[odd[0]]} (rank {odd[0]}) differ from rank 0's: "
            "copy the same code to all hosts, or keep it on a disk that they share",
        )


def check_gradients(
    world: World, variables: list[keras.Variable], connected: list[bool]
) -> None:
    """Raises Stop on all ranks when a variable has a gradient, is `connected`, on some only."""
    everyone = world.gather_alike(connected, "agreement.gradients")
    for variable, flags in zip(variables, zip(*everyone)):
        without = [rank for rank, is_connected in enumerate(flags) if not is_connected]
        if 0 < len(without) < world.size:
            raise Stop(
                BUG,
                f"{variable.path} has no gradient on rank {join(without)} only: every rank's loss "
                "must depend on the same variables (to leave one out, multiply by 0)",
            )


def check_same_state(world: World, named: Variables, step: int) -> None:
    """Raises Stop on all ranks when a variable differs between them, by its name.

    Weights get the same update everywhere, so nothing else compares them: a bit that flips in one
    rank's memory would be trained on for weeks, and checkpoints hold rank 0's. Where all are alike,
    32 bytes travel.
    """
    if world.size == 1:
        return
    digests = {name: weights_sha256([variable]) for name, variable in named.items()}
    everyone, ranks = world.compare(digests, f"state.{step}")
    if ranks:
        hosts = world.gather_objects(hostname(), "state.hosts")
        hosts_of_ranks = join(sorted({hosts[rank] for rank in ranks}))
        names: dict[str, None] = {}
        for of_rank in everyone:
            names |= dict.fromkeys(of_rank)
        odd = [
            name
            for name in names
            if len({of_rank.get(name) for of_rank in everyone}) > 1
        ]
        of_batch_norm = any(name.endswith(_MOVING) for name in odd)
        more = _OF_BATCH_NORM if of_batch_norm else ""
        raise Stop(
            BUG,
            f"at step {step} {join(odd, 3)} on rank {join(ranks)} ({hosts_of_ranks}) differ from "
            "rank 0's, which checkpoints hold. Every rank must change what is not trained in the "
            "same way, or its layer must say how the ranks' values come together (`combines`, "
            f"hvdkit/train/step/combine.py).{more} Where that is so, memory or a device "
            "may be faulty: a rerun resumes from the newest checkpoint",
        )


def check_collectives(
    world: World, step: tf.types.experimental.ConcreteFunction
) -> None:
    """Raises Stop on all ranks when the traced step's collectives differ from rank 0's."""
    of_step = sorted(collectives(step.graph.as_graph_def(add_shapes=True)))
    everyone, ranks = world.compare(of_step, "agreement.collectives")
    if ranks:
        first = set(everyone[0])
        other = set(everyone[ranks[0]])
        raise Stop(
            BUG,
            f"the step's collectives differ: rank {join(ranks)} would run "
            f"{join(sorted(other - first)) or 'nothing'} where rank 0 runs "
            f"{join(sorted(first - other)) or 'nothing'}. Names, types and shapes must be the "
            "same on every rank",
        )


def check_constants(
    world: World, step: tf.types.experimental.ConcreteFunction, *, near: float
) -> None:
    """Raises Stop on all ranks where the traced step holds other tables of numbers on one of them.

    `near`: relative difference that hosts of another kind may have.
    """
    if world.size == 1:
        return
    tables = sorted(figures.figures_of(values) for values in _tables(step))
    everyone, ranks = world.compare(tables, "agreement.constants")
    for rank in ranks:
        if not _are_the_same(everyone[0], everyone[rank], near=near):
            raise Stop(
                BUG,
                f"the step of rank {rank} computes with other constants than rank 0's: each rank "
                "would train another model. Usual causes are the order of a Python set (use "
                "sorted), and numbers that are drawn without a seed while the task or the model "
                "is made",
            )


def _are_the_same(
    tables: Sequence[list[float]], others: Sequence[list[float]], *, near: float
) -> bool:
    """Whether these are the figures of the same tables.

    In any order: TensorFlow's depends on what a process has traced before, and hosts that round
    otherwise sort tables otherwise.
    """
    rest = list(others)
    for table in tables:
        for other in rest:
            if not figures.differ(table, other, near=near):
                rest.remove(other)
                break
        else:
            return False
    return not rest


def _tables(step: tf.types.experimental.ConcreteFunction) -> Iterable[np.ndarray]:
    """The step's floating constants of several, not all equal, numbers."""
    graph = step.graph.as_graph_def()
    inner = (function.node_def for function in graph.library.function)
    for node in itertools.chain(graph.node, *inner):
        if node.op == "Const" and tf.as_dtype(node.attr["dtype"].type).is_floating:
            values = tf.make_ndarray(node.attr["value"].tensor)
            if values.size > 1 and (values != values.flat[0]).any():
                yield values
    for tensor, _ in step.graph.captures:
        if tensor.dtype.is_floating and hasattr(tensor, "numpy"):
            values = tensor.numpy()
            if values.size > 1:
                yield values


def collectives(graph: tf.compat.v1.GraphDef) -> Iterable[str]:
    """Name, type and shape of each Horovod operation in a graph and the functions it calls."""
    inner = (function.node_def for function in graph.library.function)
    for node in itertools.chain(graph.node, *inner):
        if node.op.startswith("Horovod"):
            name = node.attr["tensor_name"].s.decode() or node.name
            shapes = []
            for shape in node.attr["_output_shapes"].list.shape:
                sizes = [dimension.size for dimension in shape.dim]
                shapes.append(str(sizes).replace("-1", "?"))
            type_number = node.attr["T"].type
            dtype = tf.as_dtype(type_number).name if type_number else ""
            yield f"{name} ({node.op.removeprefix('Horovod')}, {dtype} {' '.join(shapes)})"
