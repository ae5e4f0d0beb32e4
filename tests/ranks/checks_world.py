"""Holds hvdkit.ranks.world and .messages: how ranks wait, send and compare, by Gloo and mpi4py."""

from unittest import mock

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from refusals import differ

from hvdkit.ranks import encoding, messages


def check_the_carrier_and_who_shares_a_host_are_as_horovod_says(world):
    expected = messages.Mpi if hvd.mpi_enabled() else messages.Horovod
    assert type(world.carrier) is expected, world.carrier
    if hvd.mpi_enabled():  # the import of MPI's module initializes it
        # Threads must take turns.
        with mock.patch("mpi4py.MPI.Query_thread", return_value=2):
            assert type(messages.carrier()) is messages.Horovod
    assert (world.rank, world.size) == (hvd.rank(), hvd.size())
    assert (world.local_rank, world.local_size) == (hvd.local_rank(), hvd.local_size())


def check_one_rank_s_failure_is_reported_by_all(world):
    for failing in range(world.size):

        def reads(failing=failing):
            with world.fail_together("reading"):
                if world.rank >= failing:
                    raise ValueError(f"what rank {world.rank} lacks")

        message = str(differ(reads, f"reading: what rank {failing} lacks"))
        assert (f"(rank {failing} on " in message) == (failing > 0), message


def check_rank_0_reads_for_all_and_all_report_its_failure(world):
    asked = []

    def read(name):
        asked.append(world.rank)
        return {"name": name}

    def fail():
        raise OSError("the disk is away")

    assert world.from_chief("reading", read, "a") == {"name": "a"}
    assert asked == ([0] if world.is_chief else [])
    differ(
        lambda: world.from_chief("reading", fail),
        "reading: the disk is away (rank 0 on ",
    )


def check_a_broadcast_is_of_its_root(world):
    for root in range(world.size):
        assert world.broadcast_object({"rank": world.rank}, "roots", root) == {
            "rank": root
        }
    large = np.arange(9_000_000, dtype=np.uint8)
    assert np.array_equal(
        world.broadcast_object(large if world.is_chief else None, "8 MB"), large
    )


def check_objects_of_any_length_come_in_rank_order(world):
    texts = world.gather_objects("x" * (world.rank * 100_000), "uneven")
    assert [len(text) for text in texts] == [
        rank * 100_000 for rank in range(world.size)
    ]
    objects = world.gather_objects(
        {"own": np.full((2, world.rank), world.rank)}, "arrays"
    )
    assert [each["own"].shape for each in objects] == [
        (2, rank) for rank in range(world.size)
    ]
    flags = world.gather_alike(world.rank == 1, "one is not like the others")
    assert flags == [rank == 1 for rank in range(world.size)]


def check_ranks_at_different_places_are_reported_whatever_they_exchange(world):
    def one_fails():
        with world.fail_together("reading"):
            pass

    for other in (
        lambda: world.gather_objects(1, "hosts"),
        lambda: world.check_same("a", "weights"),
    ):
        differ(
            one_fails if world.rank == 0 else other,
            "rank 1 is at",
            "'fail_together.reading'",
        )


def check_a_malformed_message_is_reported_by_all_with_its_rank(world):
    value = {"names": ["a", 1.0]}
    sound = encoding.pack

    def replaced_by(text):
        return lambda message: np.frombuffer(text, np.uint8)

    changes = [lambda message: message * 0, lambda message: message[:-1]]
    for text in (
        b"",
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        b"{1",
        b"[" * 10_000,
        b"[]x",
        b'{"numpy.ndarray": 1}',
        b'{"numpy.ndarray": ["object", [1], "QUJDREVGR0g="]}',
        b'{"numpy.ndarray": ["int8", [2], "QQ=="]}',
        b'{"numpy.ndarray": ["int8", [1], "Q"]}',
    ):
        changes.append(replaced_by(text))
    for change in changes:
        for send in (
            lambda: world.gather_objects(value, "spoilt"),
            lambda: world.broadcast_object(value, "spoilt", 1),
        ):

            def pack(*arguments, change=change):
                message = sound(*arguments)
                return change(message) if world.rank == 1 else message

            with mock.patch.object(encoding, "pack", pack):
                differ(send, "rank 1 sent a malformed message as 'spoilt'")
            assert world.gather_objects(world.rank, "it goes on") == [
                *range(world.size)
            ]


def check_a_message_that_is_too_large_is_reported_by_all_with_its_rank(world):
    with mock.patch.object(messages, "MOST_GATHERED", 3000):
        value = "x" * 5000 if world.rank == 1 else ""
        differ(lambda: world.gather_objects(value, "much"), "rank 1 sends 5,002 bytes")


def check_variables_of_types_that_horovod_lacks_come_from_rank_0(world):
    value = tf.Variable(tf.cast([world.rank + 1, 1.5], tf.bfloat16))
    world.broadcast_variables([value])
    assert value.numpy().tolist() == [1, 1.5]


def check_fingerprints_that_differ_are_reported(world):
    differ(
        lambda: world.check_same(str(world.rank % 2), "the weights"),
        "the weights on rank 1",
    )
