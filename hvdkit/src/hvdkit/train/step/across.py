"""Rows of all ranks, for a loss that compares a sample with others of the global batch.

def loss(self, outputs, targets):       # [n, d]: this rank's n samples
    logits = outputs @ tf.transpose(across.gather(targets))  # [n, global batch]
    places = across.places(outputs)     # [n]: the places of this rank's samples among them
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(places, logits)
    return losses, tf.ones_like(losses)  # [n]: only of this rank's samples
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import control_flow_v2_func_graphs as graphs

from hvdkit.data.sampler import share
from hvdkit.train.step.losses import above, at_least_float32

_NAME = "hvdkit.gather"
_BRANCH_OR_LOOP = (graphs.CondBranchFuncGraph, graphs.WhileBodyFuncGraph)


class Turn:
    """A virtual rank's turn, while its loss is traced: its rows are `size` from `first` on.

    Attributes:
      own: its rows, of each call of `gather`; the rows of all are given once they are known.
    """

    def __init__(
        self, first: tf.Tensor, size: int, everyone: Sequence[tf.Tensor] = ()
    ) -> None:
        self.first = first
        self.size = size
        self._everyone = everyone
        self.own: list[tf.Tensor] = []
        self._graph = tf.compat.v1.get_default_graph()
        self._unknown: set[tf.Operation] = set()

    def gather(self, x: tf.Tensor, rows: int) -> tf.Tensor:
        x = tf.identity(x)
        if x.graph is not self._graph or above(x) & self._unknown:
            raise ValueError(
                "with --virtual_ranks gather (hvdkit.train.across) is called in the loss itself, "
                "not in a tf.function in it, and not on what comes from gathered rows: leave out "
                "--virtual_ranks"
            )
        self.own.append(x)
        if self._everyone:
            everyone = self._everyone[len(self.own) - 1]
            return _without_own(everyone, x) if x.dtype.is_floating else everyone
        unknown = tf.zeros(tf.concat([[rows], tf.shape(x)[1:]], 0), x.dtype)
        self._unknown.add(unknown.op)
        return tf.ensure_shape(unknown, [rows, *x.shape[1:]])


@tf.custom_gradient
def _without_own(everyone: tf.Tensor, own: tf.Tensor):
    """`everyone`, without a gradient by `own`: gathered.py adds it later."""

    def backward(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        batch = _batch.get()
        if batch and batch.turn:  # the loss has a tape inside
            raise ValueError(
                "with --virtual_ranks a loss has no gradient of its own by what it gathers "
                "(hvdkit.train.across): leave out --virtual_ranks"
            )
        return upstream, tf.zeros_like(own)

    return tf.identity(everyone), backward


class Batch(NamedTuple):
    """A global batch while its loss is traced on `rank` of `size`, or in a virtual rank's turn."""

    rows: int
    rank: int
    size: int
    refused: str = ""  # why its rows cannot be gathered, and what to do
    turn: Turn | None = None


used = False  # whether a training step gathers rows
_batch: ContextVar[Batch | None] = ContextVar("batch", default=None)


@contextlib.contextmanager
def training(batch: Batch | None) -> Iterator[None]:
    """Inside, `gather` is over all ranks; outside, as in evaluation, it changes nothing."""
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


def gather(x: tf.Tensor) -> tf.Tensor:
    """Rows [n, ...] of this rank's samples -> those of the global batch, in the order of ranks.

    The order is that of one rank. Floats come as float32 at least, and are differentiable: the
    gradient is that of the sum of all ranks' losses (Horovod's own allgather has the mean). In
    evaluation the batch is this rank's, of --eval_batch_size on any number of ranks.

    Raises:
      ValueError: in a training step, where x does not have a row for each sample; with
        --accumulation_steps, where the parts of a batch come one after the other; in a loop or a
        branch of the graph, and outside of `run.loss`.
    """
    x = tf.convert_to_tensor(x)
    batch = _batch.get()
    x = at_least_float32(x) if x.dtype.is_floating else x
    if batch is None:
        return x
    global used
    sizes = _rows(x, batch)
    used = True
    if batch.turn:
        return batch.turn.gather(x, batch.rows)
    if batch.size == 1:
        return x

    @tf.custom_gradient
    def gathered(own: tf.Tensor):
        def backward(upstream: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
            # Each rank gets the gradients of its rows and adds them up in the order of ranks.
            upstream = tf.convert_to_tensor(upstream)
            parts, _ = hvd.alltoall(upstream, splits=sizes, name=f"{_NAME}.gradient")
            return tf.reduce_sum(tf.reshape(parts, [batch.size, *own.shape]), 0)

        everyone = hvd.allgather(own, name=_NAME)
        return tf.ensure_shape(everyone, [batch.rows, *own.shape[1:]]), backward

    return gathered(x)


def places(x: tf.Tensor) -> tf.Tensor:
    """int64 [n]: the places of x's n rows, a row a sample of this rank, in gather(x)."""
    x = tf.convert_to_tensor(x)
    batch = _batch.get()
    first = 0
    if batch and _rows(x, batch):
        first = (
            batch.turn.first
            if batch.turn
            else share(batch.rows, batch.rank, batch.size)[0]
        )
    return tf.range(tf.shape(x, tf.int64)[0]) + first


def _rows(x: tf.Tensor, batch: Batch) -> list[int]:
    """Rows of each rank; ValueError where they cannot be gathered."""
    if batch.refused:
        raise ValueError(f"gather (hvdkit.train.across): {batch.refused}")
    if in_branch_or_loop():
        raise ValueError(
            "gather (hvdkit.train.across) is called in a branch or a loop of the graph, where "
            "ranks may take other turns: call it before"
        )
    sizes = []
    for rank in range(batch.size):
        first, last = share(batch.rows, rank, batch.size)
        sizes.append(last - first)
    samples = batch.turn.size if batch.turn else sizes[batch.rank]
    if not x.shape.rank or x.shape[0] != samples:
        raise ValueError(
            f"gather (hvdkit.train.across) of shape {x.shape}: it needs a row for each of this "
            f"rank's {samples} samples"
        )
    return sizes


def in_branch_or_loop() -> bool:
    """Whether what is traced may run another number of times than its surroundings."""
    # tf.vectorized_map runs its body under this scope, for all elements at once.
    looped = "loop_body" in tf.get_current_name_scope().split("/")
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, func_graph.FuncGraph):
        looped = looped or isinstance(graph, _BRANCH_OR_LOOP)
        graph = graph.outer_graph
    return looped
