"""From a source to batches: stateless order and augmentation, read on several threads.

It keeps no state: the batch of step k depends on k and on where the run began with such batches.
"""

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import tensorflow as tf
from tensorflow.python.util import _pywrap_determinism

from hvdkit.data.sampler import Sampler, partner
from hvdkit.data.source import Parts, Source, fetched
from hvdkit.logs import join, say
from hvdkit.ranks.messages import heartbeat
from hvdkit.settings import project
from hvdkit.stop import passes

Example = dict[str, Any]
Transform = Callable[[Example, tf.Tensor], Example] | Callable[[Example], Example]

# The second: TensorFlow's message names a file whose name is not UTF-8.
_READ_ERRORS = (tf.errors.OpError, UnicodeDecodeError)

_PAUSES = (1, 2, 4, 8, 16)  # seconds before the disk is tried again

# Samples that a ReadAhead fetches at a time, at most, and their bytes; and how often at once.
_FETCHED, _FETCHED_BYTES, _FETCHES = 32, 2**25, 2

# Lines that TensorFlow prints before the reason of a failure.
_NO_REASON = re.compile(
    r"\s*$|Graph execution error|Detected at node|<stack traces|\s+File \"|\d+ root error"
    r"|Exception encountered when calling"  # Keras's
)

# AutoGraph is off: converting every function, so that `if` and `for` accept tensors, would take
# more time at start-up than everything else.
as_written = tf.autograph.experimental.do_not_convert


class Reader(NamedTuple):
    """How a sample of a source becomes an example; made by `reader`."""

    # Of the index, int64, of what `ahead` returns for it, if anything, and of a key if `keyed`.
    read: tf.types.experimental.ConcreteFunction
    parts: frozenset[str]  # of the sample
    ahead: Callable[[tf.Tensor], Parts] | None  # the source's, if it is a ReadAhead
    at_once: int  # samples that it fetches then
    paired: int = 0  # of so many samples, another one is read beside each
    line: str = ""  # where the function begins that makes the example

    def one(self, index: int, *key: tf.Tensor) -> Example:
        """An example by itself; raises what TensorFlow does where it cannot be read."""
        place = tf.constant(index, tf.int64)
        if not self.ahead:
            return self.read(place, *key)
        parts = {name: part[0] for name, part in self.ahead(place[None]).items()}
        return self.read(place, parts, *key)

    def reads(self, index: int, *key: tf.Tensor) -> list[int]:
        """The samples that an example is made of."""
        place = tf.constant(index, tf.int64)
        return [index, *([int(partner(place, *key, self.paired))] if self.paired else [])]

    def examples(self, samples: tf.data.Dataset, workers: int) -> tf.data.Dataset:
        """Of each index, or index and key; `workers` threads decode, others wait for disks."""
        if self.ahead:

            def fetch(index: tf.Tensor, *key: tf.Tensor) -> tuple[Any, ...]:
                return index, self.ahead(index), *key

            many = samples.batch(self.at_once).map(as_written(fetch), _FETCHES, deterministic=True)
            samples = many.prefetch(1).unbatch()
        return samples.map(as_written(self.read), workers, deterministic=True)

    def options(self, workers: int) -> tf.data.Options:
        """For a pipeline of `examples`, after its last part."""
        options = tf.data.Options()
        # A private pool: TensorFlow's own has a thread for every core of the host, on each rank.
        options.threading.private_threadpool_size = workers + _FETCHES * bool(self.ahead)
        # Nothing is left to tune, and its thread would hold up the end of a run, for seconds.
        options.autotune.enabled = False
        # One thread an example, so that sums do not depend on the number of threads.
        options.threading.max_intra_op_parallelism = 1
        return options


def reader(source: Source, transform: Transform, keyed: bool, *, paired: bool = False) -> Reader:
    """Reads a sample and applies `transform`; traced once and shared by training and evaluation.

    The index is an argument of the graph, so that shapes hold for every sample. `keyed`: whether
    `transform` takes a key, int32 [2], to draw with. `paired`: whether another sample, which the
    key chooses, is read with it, as sample["partner"]; it is not read ahead.
    """
    parts: set[str] = set()
    ahead = getattr(source, "ahead", None)
    owner = getattr(ahead, "__self__", None)  # of several sources, one in the other, the innermost
    if owner is not None and len(owner) != len(source):  # it has other indices, and reads by itself
        ahead = owner = None

    def read(index: tf.Tensor, *rest: Any) -> Example:
        key = rest[len(rest) - keyed :]
        with fetched(owner, index, rest[0]) if ahead else contextlib.nullcontext():
            sample = source.read(index)
        if not isinstance(sample, Mapping):
            kind = type(sample).__name__
            raise ValueError(f"the source's read() must return a dict of tensors, not {kind}")
        parts.update(sample)
        if paired:
            sample = {**sample, "partner": source.read(partner(index, *key, len(source)))}
        return transform(sample, *key)

    signature = [tf.TensorSpec([], tf.int64), *([owner.form] if ahead else [])]
    signature += [tf.TensorSpec([2], tf.int32)] * keyed
    traced = tf.function(read, input_signature=signature, autograph=False)
    at_once = max(1, min(_FETCHED, int(_FETCHED_BYTES / owner.bytes_each))) if ahead else 0
    pairs = len(source) if paired else 0
    made, line = traced.get_concrete_function(), project.line_of(transform)
    return Reader(made, frozenset(parts), ahead, at_once, pairs, line)


class BadSample(ValueError):
    """A sample cannot be read, whatever the disk does; the message names it."""

    sample = -1  # its index


def read_one(made: Reader, source: Source, index: int, *key: tf.Tensor) -> Example:
    """An example by itself. Raises BadSample, or ValueError where the disk fails time and again."""
    pauses = iter(_PAUSES)
    while True:
        try:
            return made.one(index, *key)
        except _READ_ERRORS as error:
            if not pause(error, pauses):
                ids = made.reads(index, *key)
                fault = BadSample(explain(source, ids, error, made=made))
                fault.sample = next(filter(source.explain, ids), index)
                raise fault from None


class Replaced(NamedTuple):
    """A bad sample, and the one of the same global batch that took its place at a step."""

    step: int
    sample: int
    by: int
    why: str


class TrainingFeed:
    """This rank's batches, nested tensors [micro_batches, local_micro_size, ...], step by step.

    A sample that cannot be read does not raise: `next` returns a batch of zeros and `error` says
    what is wrong, so that this rank still takes part in the step and can tell the others. With
    `replaces`, another sample takes its place and is listed in `replaced`; which one depends on
    the sample's key and on the global batch only. Where the disk failed, `next` tries again.

    Use it in a `with`, which stops reading ahead: TensorFlow crashes if its threads still read when
    the process ends. `workers` threads read and augment an example each; batches are copied to the
    GPU `device`, if it has a name.
    """

    def __init__(
        self,
        source: Source,
        order: Sampler,
        reader: Reader,
        *,
        first_step: int = 0,
        num_steps: int,
        workers: int = 2,
        device: str = "",
        replaces: bool = False,
    ) -> None:
        self.error: str | None = None
        self.replaced: list[Replaced] = []
        self._source, self._order, self._step = source, order, first_step
        self._reader, self._workers, self._replaces = reader, workers, replaces
        self._num_steps, self._device = num_steps, device
        self.waited = 0.0  # seconds spent in `next`; the device may work on earlier steps then
        # What is read is said by variables: the pipeline's graphs, which stay in memory, are made
        # once, however often it starts again at another step.
        with tf.device("CPU"):
            self._start = tf.Variable(first_step, dtype=tf.int64)
            self._mended = tf.Variable(-1, dtype=tf.int64)  # this step has these samples
            self._instead = tf.Variable(tf.zeros_like(order.local_samples(self._start)[0]))
        self._all = self._read(self._samples())
        self.spec = self._all.element_spec
        self._open()

    def _samples(self) -> tf.data.Dataset:
        """(id, key) of this rank's samples from step `_start` on."""

        def of_step(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            ids, keys = self._order.local_samples(step)
            return tf.where(step == self._mended, self._instead, ids), keys

        def steps(_: tf.Tensor) -> tf.data.Dataset:
            return tf.data.Dataset.range(self._start, self._num_steps)

        once = tf.data.Dataset.from_tensors(0)
        return once.flat_map(as_written(steps)).map(as_written(of_step)).unbatch()

    def _read(self, samples: tf.data.Dataset) -> tf.data.Dataset:
        """Batches of these samples."""
        order = self._order

        @as_written
        def fold(batch: Example) -> Example:
            shape = [order.micro_batches, order.local_micro_size]
            return tf.nest.map_structure(lambda t: tf.reshape(t, [*shape, *t.shape[1:]]), batch)

        size = order.micro_batches * order.local_micro_size
        examples = self._reader.examples(samples, self._workers)
        batches = examples.batch(size, drop_remainder=True).map(fold)
        return batches.with_options(self._reader.options(self._workers))

    def _open(self) -> None:
        batches, parts = self._all, tf.nest.flatten(self.spec)
        # Two batches ahead, however much memory there is; in the GPU's memory, copied during the
        # step before. GPUs hold no text.
        if self._device and all(part.dtype != tf.string for part in parts):
            batches = batches.apply(tf.data.experimental.prefetch_to_device(self._device, 2))
        else:
            batches = batches.prefetch(2)
        self._batches = _begun(batches)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._batches = None

    def next(self) -> Example:
        if self.error is None:
            start = time.perf_counter()
            try:
                batch = self._next()
                self.waited += time.perf_counter() - start
                return batch
            except ValueError as fault:
                self.error = str(fault)
        return tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), self.spec)

    def _next(self) -> Example:
        """The next batch, without what is bad in it; ValueError where it cannot be read."""
        good, pauses = None, iter(_PAUSES)
        while True:
            try:
                with heartbeat.reading():
                    batch = next(self._batches)
                self._step += 1
                return batch
            except _READ_ERRORS as error:
                # Which of the samples it is, is found below. Once all are good by themselves, it is
                # the disk, which failed again, or no sample causes it alone.
                if good is not None and not pause(error, pauses):
                    why = explain(self._source, good, error, made=self._reader)
                    raise ValueError(why) from None
            if good is None:
                ids, keys = self._order.local_samples(tf.constant(self._step, tf.int64))
                good = [self._good(index, key) for index, key in zip(ids.numpy().tolist(), keys)]
            self._batches = None  # it stops reading
            self._instead.assign(good)
            self._mended.assign(self._step)
            self._start.assign(self._step)
            self._open()

    def sample(self, place: int, draw: int = 0) -> Example:
        """An example by itself, or, with `replaces`, the next one that can be read; ValueError.

        `draw`: of its key.
        """
        size, key = len(self._source), tf.constant([draw, 0], tf.int32)
        for number in range(place, place + size):
            try:
                return read_one(self._reader, self._source, number % size, key)
            except BadSample:
                if not self._replaces or number == place + size - 1:
                    raise

    def replaced_at(self, step: int = 0) -> list[Replaced]:
        """At a step; 0: in the newest batch."""
        return [one for one in self.replaced if one.step == (step or self._step)]

    def _good(self, index: int, key: tf.Tensor) -> int:
        """This sample, or the one in its place; ValueError where there is none."""
        if not (fault := self._fault(index, key)):
            return index
        if not self._replaces:
            raise ValueError(str(fault))
        whole = dataclasses.replace(self._order, rank=0, size=1, virtual_ranks=0)
        batch = whole.local_samples(tf.constant(self._step, tf.int64))[0].numpy().tolist()
        first = int(key[0]) % len(batch)
        for other in batch[first:] + batch[:first]:
            if other != index and not self._fault(other, key):
                self.replaced.append(Replaced(self._step + 1, fault.sample, other, str(fault)))
                return other
        raise ValueError(f"no sample of the batch of step {self._step + 1} can be read: {fault}")

    def _fault(self, index: int, key: tf.Tensor) -> BadSample | None:
        """Why a sample or its partner cannot be read; ValueError: the disk fails time and again."""
        try:
            read_one(self._reader, self._source, index, key)
            return None
        except BadSample as fault:
            return fault


class EvaluationFeed:
    """This rank's whole batches: number rank, rank + size, rank + 2 * size, ... of the set.

    A batch holds the same samples on any number of ranks, so its results are the same to the last
    bit. The last batch of the set may be short; a rank may have none. Examples whose shapes are not
    fixed (pictures at their own size) are batches of one: `one_by_one`.
    """

    def __init__(
        self,
        source: Source,
        reader: Reader,
        batch_size: int,
        *,
        rank: int = 0,
        size: int = 1,
        workers: int = 2,
    ) -> None:
        self.reader = reader
        parts = tf.nest.flatten(reader.read.structured_outputs)
        self.one_by_one = not all(part.shape.is_fully_defined() for part in parts)
        # tf.data hung at 2**31 - 1.
        batch_size = 1 if self.one_by_one else min(batch_size, len(source))
        starts = range(rank * batch_size, len(source), size * batch_size)
        self.rounds = -(-len(source) // (size * batch_size))  # batches of the rank that has most
        self._source, self.batch_size = source, batch_size
        self._ids = [i for s in starts for i in range(s, min(s + batch_size, len(source)))]
        self._workers = workers
        self._all = self._batches(0)  # once: each graph of them stays in memory
        self.spec = self._all.element_spec

    def _batches(self, first: int) -> tf.data.Dataset:
        """This rank's batches from number `first` on."""
        ids = tf.constant(self._ids[first * self.batch_size :], tf.int64)
        examples = self.reader.examples(tf.data.Dataset.from_tensor_slices(ids), self._workers)
        batches = examples.batch(self.batch_size).prefetch(2)
        return batches.with_options(self.reader.options(self._workers))

    def __iter__(self) -> Iterator[Example]:
        """Raises ValueError naming the sample that cannot be read; tries a disk again."""
        done, pauses = 0, iter(_PAUSES)
        while self.ids(done):
            try:
                for batch in _each(_begun(self._batches(done) if done else self._all)):
                    yield batch
                    done, pauses = done + 1, iter(_PAUSES)
            except _READ_ERRORS as error:
                if not pause(error, pauses):
                    # Looks only at the batch that failed: the other ranks wait.
                    why = explain(self._source, self.ids(done), error, made=self.reader)
                    raise ValueError(why) from None

    def ids(self, place: int) -> list[int]:
        """The samples of this rank's batch number `place`."""
        return self._ids[place * self.batch_size :][: self.batch_size]


def _begun(batches: tf.data.Dataset) -> Iterator[Example]:
    """An iterator over a pipeline as it is written, which has one order on any number of threads.

    Under --deterministic TensorFlow would take threads and reading ahead out of each pipeline that
    reads a variable, or asserts (its make_deterministic). There is no public way to say not to.
    """
    is_on = _pywrap_determinism.is_enabled()
    _pywrap_determinism.enable(False)
    try:
        return iter(batches)
    finally:
        _pywrap_determinism.enable(is_on)


def _each(batches: Iterator[Example]) -> Iterator[Example]:
    """The batches; the watch over ranks knows of each wait for one."""
    while True:
        with heartbeat.reading():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def pause(error: Exception, pauses: Iterator[float]) -> bool:
    """Whether to read again: waits if the disk failed; ValueError once it did so too often."""
    if not passes(error):
        return False
    if (seconds := next(pauses, None)) is None:
        often = f"{len(_PAUSES) + 1} times in {sum(_PAUSES)} s"
        what = f"the disk fails, not the file: {reason_of(error)}, {often}"
        raise ValueError(f"{what}: look at the disk or the file server, then start again") from None
    say(f"note: the disk fails ({reason_of(error)}): reading again in {seconds} s")
    heartbeat.beat()
    time.sleep(seconds)
    return True


def explain(source: Source, ids: list[int], error: Exception, made: Reader | None = None) -> str:
    """A message about the first bad sample among `ids`, of examples that `made` makes."""
    faults = map(source.explain, ids)
    if fault := next(filter(None, faults), None):
        return fault
    if made is None:
        return reason_of(error)
    where = f"sample {join(ids)} (counted from 0)"
    if line := line_of(error, made.read.graph) or made.line:
        where = f"{where}: {line}"
    return f"{where}: {reason_of(error)}"


def line_of(error: Exception, graph: tf.Graph) -> str:
    """The user's line that made the operation of a graph that failed; "" where it is not known."""
    for name in re.findall(r"\{\{node ([^}]+)\}\}", str(error)):
        # Where functions are inlined, names of the calls stand before it.
        made = [op for op in graph.get_operations() if f"/{name}".endswith(f"/{op.name}")]
        if made:
            return project.line_in_fork(max(made, key=lambda op: len(op.name)).traceback)
    return ""


def reason_of(error: Exception) -> str:
    """TensorFlow's reason in one line, without names and places of graph nodes."""
    message = re.sub(r"\x1b\[[0-9;]*m", "", getattr(error, "message", str(error)))
    if failed := re.search(r"assertion failed: \[(.*?)\](?: \[Op:|\s*$)", message, re.MULTILINE):
        unescaped = re.sub(r"\\(['\"])", r"\1", failed[1])
        return unescaped.replace("] [", " ")
    lines = [line for line in message.splitlines() if not _NO_REASON.match(line)]
    reason = re.sub(r"\{\{.*?\}\} ?", "", (lines or [type(error).__name__])[0])
    reason = re.sub(r" \[Op:\w+\].*", "", reason)
    return re.sub(r"^\(0\) [A-Z_]+: +", "", reason.strip())
