"""Holds hvdkit.ranks.exchange on real ranks: Horovod's sums, in one order, and what ends it."""

import contextlib
import dataclasses
import fcntl
import io
import os
import signal
import stat
import subprocess
from pathlib import Path
from unittest import mock

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras import layers

from hvdkit.ranks import exchange, messages
from hvdkit.ranks.peers import left_alone
from hvdkit.ranks.world import raw
from hvdkit.train.layers import batch_norm

ROW = (5, 5, 3)


def ways(world):
    """How ranks may exchange here: in shared memory, and over MPI where there is one."""
    return [True, False] if isinstance(world.carrier, messages.Mpi) else [True]


def started(world, one_host=True, seconds=60):
    if not one_host:
        world = dataclasses.replace(world, local_size=1)
    exchange.start(world, seconds)
    assert exchange.in_use, f"make setup compiles {exchange.library_file()}"


def is_ours(function, *tensors):
    graph = function.get_concrete_function(*tensors).graph
    return "HorovodOrderedAllreduce" in {op.type for op in graph.get_operations()}


def summing(name):
    return tf.function(lambda x: exchange.over_ranks(x, name), autograph=False)


def check_sums_have_the_bits_of_horovod_s_on_two_ranks_and_of_the_order_of_ranks(world):
    draws = np.random.default_rng(world.rank).normal(size=700)
    own = tf.constant(draws * 10.0 ** (draws * 9))
    exchange.in_use = None
    of_horovod = exchange.over_ranks(own, "of_horovod").numpy()
    in_order = 0.0
    for row in hvd.allgather(own[None], name="all").numpy():
        in_order = in_order + row
    for one_host in ways(world):
        started(world, one_host)
        function = summing("sum")
        assert is_ours(function, own)
        for found in (exchange.over_ranks(own, "sum"), function(own)):
            np.testing.assert_allclose(found, of_horovod, rtol=1e-12, atol=1e-9)
            if world.size == 2:
                np.testing.assert_array_equal(found, of_horovod)
            if one_host:
                np.testing.assert_array_equal(found, in_order)


def check_what_the_operation_does_not_take_is_left_to_horovod(world):
    started(world)
    large = tf.zeros([exchange._MOST + 1], tf.float64)
    for number, own in enumerate((large[1:], large, tf.ones([3]))):
        function = summing(f"left.{number}")
        assert is_ours(function, own) == (number == 0)
        np.testing.assert_array_equal(function(own), own * world.size)


class Twins(keras.Model):
    """Two batch norms beside each other, in functions and computed twice for the gradient."""

    def __init__(self, around):
        super().__init__()
        self.one = layers.BatchNormalization(name="one")
        self.two = layers.BatchNormalization(name="two")
        self.around = around

    def build(self, shape):
        self.one.build(shape)
        self.two.build(shape)

    def call(self, x, training=False):
        def both(x):
            y = self.one(x, training=training) * self.two(tf.sin(x), training=training)
            return y + self.two(x, training=training)

        return self.around(both)(x)


def nested(function):
    inner = tf.function(function, autograph=False)
    return tf.function(lambda x: inner(x) + inner(2 * x), autograph=False)


def trained(around, x):
    """Gradients, after a loop over parts of a batch, and moving statistics of a model."""
    keras.utils.set_random_seed(1)
    model = Twins(around)
    model.build((None, *ROW))
    batch_norm.synchronize(model)
    weights = [raw(weight) for weight in model.trainable_variables]

    @tf.function(autograph=False)
    def passes(x):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.sin(model(x, training=True)))
        return tape.gradient(value, weights)

    def add(number, total):
        more = passes(x * tf.cast(number, x.dtype))
        return number + 1, [one + other for one, other in zip(total, more)]

    @tf.function(autograph=False)
    def run(x):
        start = (tf.constant(1), passes(x))
        return tf.while_loop(lambda number, _: number < 3, add, start)[1]

    for _ in range(3):
        gradients = run(x)
    return [*gradients, *model.get_weights()]


def check_calls_have_one_order_in_functions_loops_and_recomputed_parts(world):
    """Gradients and statistics are those of Horovod's sums, which any order gives."""
    draws = np.random.default_rng(world.rank)
    x = tf.constant(draws.normal(size=(4, *ROW)), tf.float32)
    for around in (tf.recompute_grad, nested):
        exchange.in_use = None
        expected = trained(around, x)
        for one_host in ways(world):
            started(world, one_host)
            for ordered, plain in zip(trained(around, x), expected):
                np.testing.assert_allclose(ordered, plain, rtol=2e-5, atol=1e-6)


def refusal(call):
    try:
        call()
    except tf.errors.OpError as error:
        return error
    raise AssertionError("it was not refused")


def check_ranks_that_differ_are_told_and_nothing_is_added_up(world):
    for one_host in ways(world):
        own = tf.ones([4 + world.rank], tf.float64)
        for name, numbers in ((f"of.{world.rank}", own[:4]), ("same", own)):
            started(world, one_host)
            exchange.over_ranks(tf.ones([4], tf.float64), "before")
            error = refusal(lambda n=numbers, w=name: exchange.over_ranks(n, w))
            assert isinstance(error, tf.errors.InvalidArgumentError), error
            assert not left_alone(error)
            assert f"rank {world.rank} exchanges {numbers.shape[0]} numbers" in str(
                error
            )
            assert name in str(error)


def check_a_rank_that_does_not_come_or_has_ended_is_named(world):
    last = world.size - 1
    started(world, seconds=5)
    if world.rank != last:
        error = refusal(lambda: exchange.over_ranks(tf.ones([4], tf.float64), "alone"))
        assert (
            f"rank {last} did not come within 5 s while rank {world.rank}"
            in left_alone(error)
        )
        assert "4 numbers of alone" in left_alone(error)
    world.barrier_max("alone")

    started(world)
    child = 0
    if world.rank == last:
        # A process that it forks lives on, and does not hold the others up.
        child = os.fork()
        if not child:
            signal.pause()
        for file in memory_files():
            fcntl.lockf(file, fcntl.LOCK_UN)  # as the end of a process does
    else:
        error = refusal(lambda: exchange.over_ranks(tf.ones([4], tf.float64), "gone"))
        assert f"rank {last} has ended while rank {world.rank}" in left_alone(error)
    world.barrier_max("gone")
    if child:
        os.kill(child, 9)
        os.waitpid(child, 0)


def memory_files():
    """The shared memory's files that this rank has open; older runs' too."""
    numbers = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(link).startswith("/memfd:hvdkit "):
                numbers.append(int(link.name))
        except OSError:
            continue
    return numbers


def check_the_memory_has_no_name_and_is_its_user_s_alone(world):
    started(world)
    files = memory_files()
    assert files
    for file in files:
        status = os.fstat(file)
        assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_nlink == 0
        assert not os.get_inheritable(file)
        if os.getuid() == 0:
            words = ["head", "-c1", f"/proc/{os.getpid()}/fd/{file}"]
            ended = subprocess.run(words, user=65534, capture_output=True, check=False)
            assert ended.returncode == 1 and b"Permission denied" in ended.stderr
    world.barrier_max("looked")


def check_a_variable_switches_it_off_on_all_ranks(world):
    """Also where one rank alone cannot use it; a note says why."""
    said = io.StringIO()
    chosen = {"HVDKIT_EXCHANGE": "horovod"} if world.rank == world.size - 1 else {}
    with mock.patch.dict(os.environ, chosen), contextlib.redirect_stdout(said):
        exchange.start(world, 60)
    assert exchange.in_use is None
    sums = exchange.over_ranks(tf.ones([2], tf.float64), "after")
    np.testing.assert_array_equal(sums, [world.size] * 2)
    note = "Horovod sums batch norm's statistics: HVDKIT_EXCHANGE=horovod"
    assert (note in said.getvalue()) == world.is_chief
