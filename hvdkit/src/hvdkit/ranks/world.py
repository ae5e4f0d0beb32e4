"""The ranks: one process each, one GPU each, and how they come to the same decision.

A rank never acts on what it alone saw. `World.fail_together` runs a piece of start-up on every
rank and ends all with one message when any of them failed; `World.broadcast_object` hands out a
decision of rank 0.
"""

import collections
import contextlib
import dataclasses
import faulthandler
import hashlib
import os
import random
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.eager import context
from tensorflow.python.util import _pywrap_determinism

from hvdkit import launcher, logs
from hvdkit.logs import join
from hvdkit.ranks import (
    devices,
    encoding,
    keras_defaults,
    messages,
    placement,
    proof,
    start,
)
from hvdkit.ranks.messages import heartbeat
from hvdkit.settings import Settings
from hvdkit.stop import BUG, NOT_NOW, WRONG_USE, Stop, passes

# Horovod 0.28.1 cannot broadcast these types.
_NOT_SENT = {tf.bfloat16, tf.complex64, tf.complex128, tf.uint32, tf.uint64}

# Beyond its cache of tensors (by default 1,024) Horovod negotiates each anew.
_CACHED = "8192"
_MOST_ROWS = 32  # The places of more ranks are printed as one line.
_OPEN_FILES = 65536  # Over Gloo a rank has a connection with each other one.


@dataclasses.dataclass(frozen=True)
class World:
    """Who this process is among all of them. Made by `connect`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    carrier: messages.Carrier = dataclasses.field(
        default_factory=messages.Horovod, repr=False
    )
    # The secret that all ranks know, and nobody else.
    key: bytes = dataclasses.field(default=b"", repr=False)
    threads: int = 1  # This rank's share of its host's cores.

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def fail_together(
        self, what: str, *, path: str | Path = "", by_host: bool = False
    ) -> Iterator[None]:
        """Runs the block on every rank; a ValueError or OSError on any of them ends them all.

        Every rank must come here with the same `what`: it names the collective. A `path`, which may
        differ by host, follows it in messages. Raises Stop with the lowest failing rank's message:
        WRONG_USE, or NOT_NOW where it `passes`.

        `by_host`: what the block looks at is each host's own, so an error on some hosts alone is
        their fault, not wrong use: NOT_NOW.
        """
        error = None
        try:
            yield
        except (ValueError, OSError) as caught:
            code = NOT_NOW if passes(caught) else WRONG_USE
            error = (f"{what}{path}: {caught}", hostname(), code)
        rank_or_size = self.rank if error else self.size
        largest, any_succeeded = self.barrier_max(
            f"fail_together.{what}", -rank_or_size, not error
        )
        failed_rank = -largest
        if failed_rank == self.size:
            return
        text, host, code = self.broadcast_object(error, f"error.{what}", failed_rank)
        if not any_succeeded:
            raise Stop(code, text)
        raise Stop(
            NOT_NOW if by_host else code, f"{text} (rank {failed_rank} on {host})"
        )

    def from_chief(
        self,
        what: str,
        make: Callable[..., Any],
        *arguments: Any,
        path: str | Path = "",
    ) -> Any:
        """What `make(*arguments)` returns on rank 0, which alone calls it, on every rank.

        Every rank must come here with the same `what`. Raises Stop as `fail_together` does, with
        `what` and `path`. What is returned is of types as of `gather_objects`.
        """
        value = None
        with self.fail_together(what, path=path):
            if self.is_chief:
                value = make(*arguments)
        return self.broadcast_object(value, what)

    def barrier_max(self, name: str, *numbers: int) -> list[int]:
        """Waits for all ranks; the largest over them of the first number, and of the second.

        `name` says where in the program the call stands; `numbers`: none, one or two, each below
        2^63. Where ranks call it with different names, all raise Stop: their numbers mean different
        things.
        """
        whole_numbers = [int(number) for number in numbers]
        if self.size == 1:
            return whole_numbers
        digest = _digest(name.encode(errors="surrogateescape"))
        # Every call sends four numbers, so that calls of different places still meet in one
        # collective. There the largest -digest is minus the smallest digest.
        sent = [digest, -digest, *whole_numbers, 0, 0][:4]
        largest, negative_least, *maxima = self.carrier.largest(sent)
        if largest != -negative_least:
            names = self._gather(encoding.pack(name, name), "the place")
            for rank, other in enumerate(names):
                if other != names[0]:
                    raise Stop(
                        BUG,
                        f"rank {rank} is at {other!r} while rank 0 is at {names[0]!r}",
                    )
        return maxima[: len(numbers)]

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank: for few and small ones.

        Of the types that `hvdkit.ranks.encoding` sends; tuples arrive as lists. Raises Stop on all
        ranks where one's is too large or malformed.
        """
        message = encoding.pack(value, name)
        if self.size == 1:
            return [encoding.unpack(message)]
        (longest,) = self.barrier_max(name, message.size)
        most = messages.MOST_GATHERED // self.size
        if longest > most:
            lengths = self.gather_numbers([message.size], "gather_objects.lengths")
            raise Stop(
                BUG,
                f"rank {int(lengths.argmax())} sends {longest:,} bytes as {name!r}, more than "
                f"{most:,}, which {self.size} ranks may exchange at once",
            )
        return self._gather(message, name)

    def gather_alike(self, value: Any, name: str) -> list[Any]:
        """`gather_objects` of what is usually the same on all ranks: then nothing is sent."""
        message = encoding.pack(value, name)
        digest = _digest(message.tobytes())
        negative_least, most = self.barrier_max(name, -digest, digest)
        if -negative_least != most:
            return self.gather_objects(value, name)
        received = encoding.unpack(message)
        return [received for _ in range(self.size)]

    def compare(self, value: Any, name: str) -> tuple[list[Any], list[int]]:
        """`gather_alike`, and the ranks whose value differs from rank 0's."""
        everyone = self.gather_alike(value, name)
        return everyone, [
            rank for rank, other in enumerate(everyone) if other != everyone[0]
        ]

    def gather_numbers(self, values: Sequence[float], name: str) -> np.ndarray:
        """Every rank's few numbers, float64 [size, n], in rank order, on every rank."""
        row = tf.constant([values], tf.float64)
        rows = row if self.size == 1 else hvd.allgather(row, name=name)
        heartbeat.beat()
        return rows.numpy()

    def broadcast_object(self, value: Any, name: str, root: int = 0) -> Any:
        """Rank `root`'s `value` on every rank, of types as of `gather_objects`; it may be large."""
        own = self.rank == root
        message = encoding.pack(value, name) if own else np.empty(0, np.uint8)
        (length,) = self.barrier_max(name, message.size)
        if not own:
            message = np.empty(length, np.uint8)
        if self.size > 1:
            messages.fill(self.carrier, message, root=root, own=own)
        return _unpacked(message, root, name)

    def _gather(self, message: np.ndarray, name: str) -> list[Any]:
        everyone = self.carrier.gather(message, self.size)
        return [_unpacked(sent, rank, name) for rank, sent in enumerate(everyone)]

    def broadcast_variables(
        self, variables: Sequence[keras.Variable | tf.Variable]
    ) -> None:
        """Overwrites the variables with those of rank 0; same ones and order on all ranks."""
        if self.size == 1:
            return
        tensors = [raw(variable) for variable in variables]
        with unoptimized():
            sent = [tensor for tensor in tensors if tensor.dtype not in _NOT_SENT]
            hvd.broadcast_variables(sent, root_rank=0)
        others = [tensor for tensor in tensors if tensor.dtype in _NOT_SENT]
        if others:
            values = None
            if self.is_chief:
                values = [np.asarray(tensor.numpy()) for tensor in others]
            values = self.broadcast_object(values, "broadcast.others")
            for tensor, value in zip(others, values):
                tensor.assign(value)

    def check_same(self, fingerprint: str, what: str) -> None:
        """Raises Stop on every rank when `fingerprint` is not the same on all of them."""
        _, ranks = self.compare(fingerprint, f"same.{what}")
        if ranks:
            raise Stop(BUG, f"{what} on rank {join(ranks)} differ from those on rank 0")


# Whether TensorFlow started within `arithmetic_as_written`.
_starts_as_written = False


@contextlib.contextmanager
def arithmetic_as_written(config: Settings) -> Iterator[None]:
    """With --deterministic sums are added up as they are written, inside; call it before `connect`.

    TensorFlow's optimizer of graphs makes one AddN of a + b + c + d, which begins with whatever
    addend has a buffer to reuse: that depends on threads, and op determinism knows nothing of it.
    Pipelines of data take the option that was set when TensorFlow started: a note says so where it
    has started without it.
    """
    global _starts_as_written
    if not config.deterministic:
        yield
        return
    has_started = context.context()._context_handle is not None
    if has_started and not _starts_as_written and launcher.launch_rank() == 0:
        print(
            "note: TensorFlow was used before this run, so sums in its data pipeline may differ "
            "from run to run: start it in a new process",
            flush=True,
        )
    _starts_as_written = _starts_as_written or not has_started
    with _optimizer_option("arithmetic_optimization", False, default=True):
        yield


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """For what runs once: TensorFlow takes longer to optimize its graph than to run it."""
    with _optimizer_option("disable_meta_optimizer", True, default=False):
        yield


@contextlib.contextmanager
def _optimizer_option(name: str, value: bool, *, default: bool) -> Iterator[None]:
    """Inside, TensorFlow's optimizer of graphs has another option; afterwards its own again."""
    before = tf.config.optimizer.get_experimental_options().get(name, default)
    tf.config.optimizer.set_experimental_options({name: value})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: before})


def connect(limit: int = 0) -> World:
    """Starts Horovod: from here on this is one of the ranks.

    Each wait for others ends the process after `limit` seconds; 0: never.
    Raises Stop where Horovod sees fewer ranks than were started together, or Gloo cannot listen.
    """
    os.environ.setdefault("HOROVOD_CACHE_CAPACITY", _CACHED)
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(soft, min(most, _OPEN_FILES)), most)
    )
    started, variable = launcher.launched_ranks()
    if not launcher.is_launched():
        os.environ |= start.carrier_of_one()
    elif messages.in_mpi_world():
        start.tell_networks()
        start.start_mpi(limit)
    elif launcher.in_mpi_world():
        raise Stop(
            WRONG_USE,
            "HOROVOD_CONTROLLER=gloo, but MPI started the ranks: unset it, or start with "
            "horovodrun --gloo",
        )
    elif fault := start.gloo_fault():
        raise Stop(WRONG_USE, fault)
    with start.waiting("all ranks to start Horovod", limit):
        hvd.init()
    # faulthandler runs before MPI's own handlers, which then name the host.
    faulthandler.enable(2)
    if hvd.size() < started:
        # Each would train alone, all into one folder.
        raise Stop(
            WRONG_USE,
            f"{variable} says that {started} processes were started together, but Horovod sees "
            f"{hvd.size()}: they know nothing of each other, or their MPI is not the one that "
            "Horovod was built with. Use horovodrun, that MPI's own mpirun, or srun --mpi=pmix; to "
            f"run this one alone, unset {variable}",
        )
    return World(
        rank=hvd.rank(),
        size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
        carrier=messages.carrier(),
    )


def set_up(world: World, config: Settings) -> World:
    """One GPU for this process, and its share of the cores (--cpu_threads, --nobind).

    Then ranks prove that they are of one launch: not before, as TensorFlow may carry that.
    Raises Stop on all ranks where a host has too few GPUs, or TensorFlow does not see them.
    """
    # TensorFlow must not start here. Over Gloo, on one host, all ranks see the same.
    view = encoding.pack(placement.see(devices.gpus(config.device)), "placement")
    seen = [encoding.unpack(message) for message in world.carrier.beside(view)]
    with world.fail_together("choosing a device", by_host=True):
        nccl = hvd.nccl_built() and config.reduce_backend in ("auto", "nccl")
        place = placement.place(seen, world.local_rank, nccl=nccl)
        if config.bind:
            placement.bind(place)
        # Once chosen, TensorFlow's number of threads stays as it is.
        threads = config.cpu_threads or devices.threads() or place.threads
        devices.choose(config.device, place.gpu, threads, must=config.cpu_threads > 0)
    if config.device == "auto":
        _check_devices_alike(world)
    # Programs that ranks start do not get the secret.
    secret = os.environ.pop("LAUNCH_SECRET", "").encode()
    key = proof.prove(world.carrier, world.rank, world.size, secret=secret)
    if world.size > 1 and not secret and launcher.over_gloo():
        say(world, proof.OPEN)
    _report_places(world, place if config.bind else place._replace(cpus=[]))
    return dataclasses.replace(world, key=key, threads=place.threads)


def _report_places(world: World, place: placement.Place) -> None:
    """Rank 0 prints all places as a table, or, of many, a line; every rank must call it."""
    if world.size <= _MOST_ROWS:
        text = placement.table(world.gather_objects(placement.row(place), "places"))
    else:
        is_far = placement.is_far(place)
        least, most = world.barrier_max("places.threads", -place.threads, place.threads)
        some_far, some_free = world.barrier_max("places", is_far, not place.cpus)
        text = f"placement: {-least} to {most} cores a rank"
        if some_far:
            text += ", some far from their GPU"
        if some_free:
            text += ", some not bound"
    if world.size > 1:
        say(world, text)


def _check_devices_alike(world: World) -> None:
    """Raises Stop, NOT_NOW, where some ranks have a GPU and others none: a host lost its GPUs."""
    have_gpu, odd = world.compare(bool(gpu()), "devices.alike")
    if not odd:
        return
    hosts = world.gather_objects(hostname(), "devices.hosts")
    without = [rank for rank, has in enumerate(have_gpu) if not has]
    names = sorted({hosts[rank] for rank in without})
    raise Stop(
        NOT_NOW,
        f"choosing a device: {join(names)} has no GPU, the other hosts have: look at its driver, "
        f"or give --device=cpu (rank {without[0]} on {hosts[without[0]]})",
    )


def gpu() -> str:
    """TensorFlow's name of this rank's GPU; empty where it has none."""
    return "/GPU:0" if tf.config.get_visible_devices("GPU") else ""


def set_numbers(config: Settings) -> None:
    """Seed, determinism and precision of what is made from now on, within `kept_numbers`."""
    keras_defaults.apply()
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    set_precision(config.precision)


@contextlib.contextmanager
def kept_numbers() -> Iterator[None]:
    """After the block, what `set_numbers` or a task's code set in this process is as before.

    So a process may make several runs, of other types and settings, and the user's own code, as in
    a notebook, goes on as if there had been none.
    """
    before = [(put, get()) for get, put in _KEPT]
    try:
        yield
    finally:
        for put, value in before:
            put(value)


@contextlib.contextmanager
def names_of_a_new_process() -> Iterator[None]:
    """Inside, Keras numbers layers without a name as in a process that has made none.

    SampleDropout draws by its name: what a notebook has made before must not change what a run
    that resumes drops. Afterwards numbers go on after both, so that names stay unique.
    """
    before = _counts_of_names()
    global_state.set_global_attribute(_NAMES_OF_KERAS, collections.defaultdict(int))
    try:
        yield
    finally:
        counts = _counts_of_names()
        for name, count in before.items():
            counts[name] = max(count, counts[name])


def _counts_of_names() -> collections.defaultdict[str, int]:
    return global_state.get_global_attribute(
        _NAMES_OF_KERAS, default=collections.defaultdict(int), set_to_default=True
    )


def _seed_of_tensorflow() -> tuple[int | None, Any]:
    eager = context.context()
    # The context has a generator once a seed was set.
    return eager._seed, getattr(eager, "_rng", None)


def _set_seed_of_tensorflow(seed_and_generator: tuple[int | None, Any]) -> None:
    seed, generator = seed_and_generator
    tf.random.set_seed(seed)  # This begins the seed's sequence anew.
    if generator:
        context.context()._rng = generator


def _seed_of_keras() -> list[Any]:
    return [global_state.get_global_attribute(name) for name in _SEEDS_OF_KERAS]


def _set_seed_of_keras(values: list[Any]) -> None:
    for name, value in zip(_SEEDS_OF_KERAS, values, strict=True):
        global_state.set_global_attribute(name, value)


_NAMES_OF_KERAS = "object_name_uids"
_SEEDS_OF_KERAS = ("global_random_seed", "global_seed_generator")
# Pairs of functions: what reads a number or state, and what sets it.
_KEPT: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (keras.config.floatx, keras.config.set_floatx),
    (keras.config.dtype_policy, keras.config.set_dtype_policy),
    (keras.config.epsilon, keras.config.set_epsilon),
    (keras.config.image_data_format, keras.config.set_image_data_format),
    (_pywrap_determinism.is_enabled, _pywrap_determinism.enable),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (_seed_of_tensorflow, _set_seed_of_tensorflow),
    (_seed_of_keras, _set_seed_of_keras),
)


def finish(world: World) -> None:
    """Waits for every rank, so that no launcher kills a slower one that is still writing."""
    world.barrier_max("finish")
    hvd.shutdown()


def describe(world: World) -> str:
    """One line for a person: ranks, hosts, devices and what carries the gradients."""
    hosts = sorted(set(world.gather_objects(hostname(), "hosts")))
    ranks = "ranks" if world.size > 1 else "rank"
    carrier = "MPI" if hvd.mpi_enabled() else "Gloo"
    line = f"{world.size} {ranks} on {len(hosts)} host(s) ({join(hosts, 4)})"
    if not gpu():
        # There is no number where TensorFlow had started before.
        threads = devices.threads() or os.cpu_count()
        return line + f", {threads} CPU thread(s) each, {carrier}"
    if hvd.nccl_built():
        return line + f", one GPU each, NCCL, set up over {carrier}"
    return line + f", one GPU each, {carrier}"


def hostname() -> str:
    return os.uname().nodename


def raw(variable: keras.Variable | tf.Variable) -> tf.Variable:
    """The tf.Variable inside a Keras 3 variable: what Horovod's functions take."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def weights_sha256(variables: Sequence[keras.Variable | tf.Variable]) -> str:
    """SHA-256 over the variables' bytes, in order."""
    digest = hashlib.sha256()
    for variable in variables:
        digest.update(np.ascontiguousarray(raw(variable).numpy()).tobytes())
    return digest.hexdigest()


def _unpacked(message: np.ndarray, rank: int, name: str) -> Any:
    try:
        return encoding.unpack(message)
    except ValueError as error:
        raise Stop(
            BUG, f"rank {rank} sent a malformed message as {name!r}: {error}"
        ) from None


def _digest(content: bytes) -> int:
    """63 bits of a hash; those of two contents differ but for one case in 10^19."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1


def set_precision(precision: str) -> None:
    """Compute type of the layers made from now on; variables stay float32 unless float64."""
    policy, floatx = types_of(precision)
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)


def types_of(precision: str) -> list[str]:
    """Keras's policy and its floatx."""
    mixed = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
    return [
        mixed.get(precision, precision),
        "float64" if precision == "float64" else "float32",
    ]


def say(world: World, text: str) -> None:
    """A line of progress, from rank 0 only."""
    if world.is_chief:
        logs.say(text)
