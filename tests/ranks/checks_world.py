"""On real ranks: how they meet, send and compare, and in how many collectives of what size.

Numbers of collectives and bytes are those that this rank gives to Horovod.
"""

from __future__ import annotations

import contextlib

import numpy as np
import tensorflow as tf
from hvdkit.stop import Stop
from shared_checks import differ

from hvdkit.ranks import messages


@contextlib.contextmanager
def counted():
    """Bytes of each collective that begins in the block, by kind, in order."""
    found, real = [], {}
    for kind in ("allreduce", "allgather", "broadcast"):
        real[kind] = getattr(messages.hvd, kind)

        def call(value, *args, kind=kind, **how):
            found.append((kind, np.asarray(value).nbytes))
            return real[kind](value, *args, **how)

        setattr(messages.hvd, kind, call)
    try:
        yield found
    finally:
        for kind, function in real.items():
            setattr(messages.hvd, kind, function)


MEETS = ("allreduce", 32)


def check_what_all_ranks_did_well_takes_one_small_collective(world):
    with counted() as found:
        with world.together("all is well"):
            pass
        world.check_same("the same" * 1000, "long texts")
        assert world.gather_alike({"a": [1.5]}, "alike") == [{"a": [1.5]}] * world.size
        world.meet("the end")
    assert found == [MEETS] * 4, found


def check_one_rank_s_failure_is_told_by_all(world):
    for failing in range(world.size):
        with counted() as found:
            try:
                with world.together("reading"):
                    if world.rank >= failing:
                        raise ValueError(f"what rank {world.rank} lacks")
            except Stop as stop:
                said = str(stop)
        assert f"reading: what rank {failing} lacks" in said
        assert (f"(rank {failing} on " in said) == (failing > 0), said
        assert [kind for kind, _ in found] == ["allreduce", "allreduce", "broadcast"]


def check_a_broadcast_is_one(world):
    for root in range(world.size):
        own = {"rank": world.rank, "text": "x" * 5000}
        with counted() as found:
            assert world.broadcast_object(own, "the largest", root)["rank"] == root
        assert [kind for kind, _ in found] == ["allreduce", "broadcast"], found
        assert 5000 < found[1][1] < 6000
    large = np.arange(9_000_000, dtype=np.uint8)
    assert np.array_equal(world.broadcast_object(large if world.is_chief else None, "8 MB"), large)


def check_objects_of_any_length_come_in_rank_order(world):
    everyone = world.gather_objects("x" * world.rank * 100_000, "uneven")
    assert [len(text) for text in everyone] == [r * 100_000 for r in range(world.size)]
    everyone = world.gather_alike(world.rank == 1, "one is not like the others")
    assert everyone == [rank == 1 for rank in range(world.size)]


def check_ranks_at_different_places_are_told_whatever_they_exchange(world):
    def one_fails():
        with world.together("reading"):
            pass

    def another_sends():
        world.gather_objects(1, "hosts")

    def a_third_looks():
        world.check_same("a", "weights")

    for other in (another_sends, a_third_looks):
        differ(one_fails if world.rank == 0 else other, "rank 1 is at", "'together.reading'")


def check_variables_of_types_that_horovod_lacks_come_from_rank_0(world):
    value = tf.Variable(tf.cast([world.rank + 1, 1.5], tf.bfloat16))
    world.broadcast_variables([value])
    assert value.numpy().tolist() == [1, 1.5]


def check_fingerprints_that_differ_are_told(world):
    differ(lambda: world.check_same(str(world.rank % 2), "the weights"), "the weights on rank 1")
