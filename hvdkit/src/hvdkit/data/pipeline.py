"""From a source to batches: stateless order and augmentation, read on several threads.

It keeps no state: the batch of step k depends on k and on where the run began with such batches.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import tensorflow as tf
from tensorflow.python.util import _pywrap_determinism

from hvdkit.data.sampler import Sampler, partner
from hvdkit.data.source import Fetched, Parts, Source, fetched
from hvdkit.logs import join, say
from hvdkit.ranks.messages import heartbeat
from hvdkit.settings import project
from hvdkit.stop import passes

Example = dict[str, Any]
Transform = Callable[[Example, tf.Tensor], Example] | Callable[[Example], Example]

# A UnicodeDecodeError is raised where TensorFlow's message names a file whose name is not UTF-8.
_READ_ERRORS = (tf.errors.OpError, UnicodeDecodeError)

_PAUSES = (1, 2, 4, 8, 16)  # seconds before the disk is tried again

# Limits of what a ReadAhead fetches at a time, and how many fetches run at once.
_FETCH_SAMPLES = 32
_FETCH_BYTES = 2**25
_FETCHES = 2

# Operations whose results for many samples have the bits of one sample's: no sum, whose order may
# depend on the shape, and no function like exp, which has other code for the last few numbers.
_EXACT_AT_ONCE = {
    "Abs",
    "Add",
    "AddV2",
    "All",
    "Any",
    "ArgMax",
    "Assert",
    "ConcatV2",
    "Const",
    "EnsureShape",
    "Equal",
    "ExpandDims",
    "Fill",
    "FloorDiv",
    "GatherV2",
    "Greater",
    "GreaterEqual",
    "Identity",
    "Less",
    "LessEqual",
    "LogicalAnd",
    "LogicalNot",
    "LogicalOr",
    "Mul",
    "Neg",
    "NoOp",
    "NotEqual",
    "OneHot",
    "OnesLike",
    "Pack",
    "Pad",
    "Placeholder",
    "RealDiv",
    "Reshape",
    "SelectV2",
    "Shape",
    "Slice",
    "Split",
    "SplitV",
    "StridedSlice",
    "Sub",
    "Transpose",
    "Unpack",
    "ZerosLike",
}

# Lines that TensorFlow prints before the reason of a failure.
_NO_REASON = re.compile(
    r"\s*$|Graph execution error|Detected at node|<stack traces|\s+File \"|\d+ root error"
    r"|Exception encountered when calling"  # a line of Keras
)

# AutoGraph is off: converting every function, so that `if` and `for` accept tensors, would take
# more time at start-up than everything else.
as_written = tf.autograph.experimental.do_not_convert


class Reader(NamedTuple):
    """How samples of a source become examples; made by `reader`."""

    source: Source
    # Takes the index, int64; then what `ahead` returns for it, if there is one; a key if `keyed`.
    read: tf.types.experimental.ConcreteFunction
    parts: frozenset[str]  # names of the sample's parts
    # The source's method, if it is a ReadAhead.
    ahead: Callable[[tf.Tensor], Parts] | None
    at_once: int  # samples that `ahead` fetches at a time
    is_paired: bool  # whether another sample is read beside each
    # Whether samples that are read together have the same bits as read one by one.
    is_exact_at_once: bool
    line: str  # where the function begins that makes the example

    def one(self, index: int, *key: tf.Tensor) -> Example:
        """An example by itself; raises what TensorFlow does where it cannot be read."""
        sample = tf.constant(index, tf.int64)
        if not self.ahead:
            return self.read(sample, *key)
        parts = {name: part[0] for name, part in self.ahead(sample[None]).items()}
        return self.read(sample, parts, *key)

    def reads(self, index: int, *key: tf.Tensor) -> list[int]:
        """The samples that an example is made of."""
        samples = [index]
        if self.is_paired:
            other = partner(tf.constant(index, tf.int64), key[0], len(self.source))
            samples.append(int(other))
        return samples

    def read_one(self, index: int, *key: tf.Tensor) -> Example:
        """`one`, with the faults of samples and disks explained.

        Raises BadSample, or ValueError where the disk fails time and again.
        """
        pauses = iter(_PAUSES)
        while True:
            try:
                return self.one(index, *key)
            except _READ_ERRORS as error:
                if not pause(error, pauses):
                    ids = self.reads(index, *key)
                    bad = next(
                        (number for number in ids if self.source.explain(number)), index
                    )
                    raise BadSample(self.explain(ids, error), bad) from None

    def explain(self, ids: list[int], error: Exception) -> str:
        """A message about the first bad sample among `ids`, whose examples failed with `error`."""
        for index in ids:
            if fault := self.source.explain(index):
                return fault
        line = line_of(error, self.read.graph) or self.line
        if line:
            return f"sample {join(ids)} (counted from 0): {line}: {reason_of(error)}"
        return f"sample {join(ids)} (counted from 0): {reason_of(error)}"

    def batches(
        self, groups: tf.data.Dataset, size: int, workers: int
    ) -> tf.data.Dataset:
        """Batches of examples, of groups of `size` indices, or of (indices, keys) [size, 2].

        The last group may be smaller where the groups' shape is open. `workers` threads decode,
        others read disks.
        """
        if self.is_exact_at_once:
            groups = self._with_parts(groups)
            batches = groups.map(
                as_written(self._read_all), workers, deterministic=True
            )
        else:
            is_whole = tf.nest.flatten(groups.element_spec)[0].shape[0] == size
            singles = groups.unbatch()
            if self.ahead:
                singles = self._with_parts(singles.batch(self.at_once)).unbatch()
            examples = singles.map(as_written(self.read), workers, deterministic=True)
            batches = examples.batch(size, drop_remainder=is_whole)

        options = tf.data.Options()
        # The pool is private: TensorFlow's has a thread for every core of the host, on each rank.
        threads = workers + _FETCHES if self.ahead else workers
        options.threading.private_threadpool_size = threads
        # Nothing is left to tune, and the tuner's thread would delay the end of a run by seconds.
        options.autotune.enabled = False
        # An example has one thread, so that sums do not depend on the number of threads.
        options.threading.max_intra_op_parallelism = 1
        return batches.with_options(options)

    def _with_parts(self, groups: tf.data.Dataset) -> tf.data.Dataset:
        """Groups of indices, followed by what `ahead` returns for them, if there is one."""
        ahead = self.ahead
        if not ahead:
            return groups

        def fetch(index: tf.Tensor, *key: tf.Tensor) -> tuple[Any, ...]:
            return index, ahead(index), *key

        return groups.map(as_written(fetch), _FETCHES, deterministic=True).prefetch(1)

    def _read_all(self, *samples: Any) -> Example:
        """`read` of many samples in one call; a call for each would cost more than its work."""
        return tf.vectorized_map(lambda sample: self.read(*sample), samples)


def reader(
    source: Source, transform: Transform, keyed: bool, *, paired: bool = False
) -> Reader:
    """Reads a sample and applies `transform`; traced once and shared by training and evaluation.

    The index is an argument of the graph, so that shapes hold for every sample. `keyed`: whether
    `transform` takes a key, int32 [2], to draw with. `paired`: whether another sample, which the
    key chooses, is read with it, as sample["partner"]; it is not read ahead.
    """
    parts: set[str] = set()
    ahead = getattr(source, "ahead", None)
    # Where sources wrap each other, this is the innermost one.
    owner: Any = getattr(ahead, "__self__", None)
    if ahead and not (owner.reads_ahead and len(owner) == len(source)):
        # It reads by itself, or its indices are others.
        ahead = None
        owner = None

    def read(index: tf.Tensor, *rest: Any) -> Example:
        key = rest[-1:] if keyed else ()
        with fetched.set(Fetched(owner, index, rest[0] if ahead else {})):
            sample = source.read(index)
        if not isinstance(sample, Mapping):
            raise ValueError(
                f"the source's read() must return a dict of tensors, not {type(sample).__name__}"
            )
        parts.update(sample)
        if paired:
            sample = {
                **sample,
                "partner": source.read(partner(index, rest[-1], len(source))),
            }
        return transform(sample, *key)

    signature: list[Any] = [tf.TensorSpec([], tf.int64)]
    at_once = 0
    if ahead:
        signature.append(owner.form)
        at_once = max(1, min(_FETCH_SAMPLES, int(_FETCH_BYTES / owner.bytes_each)))
    if keyed:
        signature.append(tf.TensorSpec([2], tf.int32))
    traced = tf.function(read, input_signature=signature, autograph=False)
    concrete = traced.get_concrete_function()  # Tracing it fills `parts`.
    return Reader(
        source=source,
        read=concrete,
        parts=frozenset(parts),
        ahead=ahead,
        at_once=at_once,
        is_paired=paired,
        is_exact_at_once=_is_exact_at_once(concrete),
        line=project.line_of(transform),
    )


def _is_exact_at_once(read: tf.types.experimental.ConcreteFunction) -> bool:
    """Whether every operation moves numbers, or rounds each result by itself."""
    example = read.structured_outputs
    shapes = [part.shape for part in tf.nest.flatten(example)]
    if not all(shape.is_fully_defined() for shape in shapes) or _holds_list(example):
        return False
    return all(_keeps_bits(operation) for operation in read.graph.get_operations())


def _holds_list(example: object) -> bool:
    """Whether tf.data makes one tensor of a list: its axis comes before that of the batch."""
    if isinstance(example, Mapping):
        return any(_holds_list(part) for part in example.values())
    if isinstance(example, tuple):
        return any(_holds_list(part) for part in example)
    return isinstance(example, list)


def _keeps_bits(operation: tf.Operation) -> bool:
    if operation.type == "Cast":
        # A number beyond the range of whole numbers becomes another one among many.
        before = operation.inputs[0].dtype
        return operation.outputs[0].dtype.is_floating or not before.is_floating
    if operation.type == "Squeeze":
        # Without dimensions it would take away that of a batch of one.
        return bool(operation.get_attr("squeeze_dims"))
    return operation.type in _EXACT_AT_ONCE


class BadSample(ValueError):
    """A sample cannot be read, whatever the disk does; the message names it."""

    def __init__(self, message: str, sample: int) -> None:
        super().__init__(message)
        self.sample = sample


class Replaced(NamedTuple):
    """A bad sample, and the sample of the same global batch that took its place at a step."""

    step: int
    sample: int
    by: int
    why: str


class TrainingFeed:
    """This rank's batches, nested tensors [micro_batches, local_micro_size, ...], step by step.

    A sample that cannot be read does not raise: `next` returns the batch before it, or zeros at the
    first one, and `error` says what is wrong, so that this rank still takes part in the step, which
    no rank applies, and can tell the others. With
    `replaces`, another sample takes its place and is listed in `replaced`; which one depends on
    the sample's key and on the global batch only. Where the disk failed, `next` tries again.

    Use it in a `with`, which stops reading ahead: TensorFlow crashes if its threads still read when
    the process ends. `workers` threads read and augment an example each; batches are copied to the
    GPU `device`, if it has a name. So many batches are read `ahead`, however much memory there is.
    """

    def __init__(
        self,
        order: Sampler,
        reader: Reader,
        *,
        first_step: int = 0,
        num_steps: int,
        workers: int = 2,
        device: str = "",
        replaces: bool = False,
        ahead: int = 2,
    ) -> None:
        self.error: str | None = None
        self.replaced: list[Replaced] = []
        self._order = order
        # Samples that this rank reads for a step.
        self._size = order.micro_batches * order.local_micro_size
        self.reader = reader
        self._step = first_step
        self._num_steps = num_steps
        self._workers = workers
        self._device = device
        self._replaces = replaces
        self._ahead = ahead
        self._newest: Example | None = None
        # Seconds spent in `next`; the device may work on earlier steps then.
        self.waited = 0.0
        # Variables say what is read: the pipeline's graphs, which stay in memory, are made once,
        # however often it starts again at another step.
        with tf.device("CPU"):
            self._start = tf.Variable(first_step, dtype=tf.int64)
            # The number of the step that reads `_instead`.
            self._mended = tf.Variable(-1, dtype=tf.int64)
            self._instead = tf.Variable(tf.zeros([self._size], tf.int64))
        self._all = self._read(self._groups())
        self.spec = self._all.element_spec
        self._open()

    def _groups(self) -> tf.data.Dataset:
        """(ids [n], keys [n, 2]) of this rank's samples of each step from `_start` on."""
        size = self._size

        def of_step(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            ids, keys = self._order.local_samples(step)
            ids = tf.where(step == self._mended, self._instead, ids)
            return tf.ensure_shape(ids, [size]), tf.ensure_shape(keys, [size, 2])

        def steps(_: tf.Tensor) -> tf.data.Dataset:
            return tf.data.Dataset.range(self._start, self._num_steps)

        once = tf.data.Dataset.from_tensors(0)
        return once.flat_map(as_written(steps)).map(as_written(of_step))

    def _read(self, groups: tf.data.Dataset) -> tf.data.Dataset:
        """Batches of these samples."""
        order = self._order

        @as_written
        def fold(batch: Example) -> Example:
            shape = [order.micro_batches, order.local_micro_size]
            return tf.nest.map_structure(
                lambda t: tf.reshape(t, [*shape, *t.shape[1:]]), batch
            )

        return self.reader.batches(groups, self._size, self._workers).map(fold)

    def _open(self) -> None:
        # A GPU gets batches in its own memory, copied during the step before. GPUs hold no text.
        has_text = any(part.dtype == tf.string for part in tf.nest.flatten(self.spec))
        if self._device and not has_text:
            ahead = self._all.apply(
                tf.data.experimental.prefetch_to_device(self._device, self._ahead)
            )
        else:
            ahead = self._all.prefetch(self._ahead)
        self._batches = _begun(ahead)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._batches = iter(())

    def next(self) -> Example:
        if self.error is None:
            start = time.perf_counter()
            try:
                self._newest = self._next()
                self.waited += time.perf_counter() - start
                return self._newest
            except ValueError as fault:
                self.error = str(fault)
        # Zeros may be padding alone, which cuDNN's recurrent layers refuse.
        if self._newest is not None:
            return self._newest
        return tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), self.spec)

    def _next(self) -> Example:
        """The next batch, without what is bad in it; ValueError where it cannot be read."""
        good = None
        pauses = iter(_PAUSES)
        while True:
            try:
                with heartbeat.reading():
                    batch = next(self._batches)
                self._step += 1
                return batch
            except _READ_ERRORS as error:
                # The first time, the bad samples are searched for below. Once all are good by
                # themselves, the disk failed again, or no sample alone causes the error.
                if good is not None and not pause(error, pauses):
                    raise ValueError(self.reader.explain(good, error)) from None
            if good is None:
                ids, keys = self._order.local_samples(tf.constant(self._step, tf.int64))
                good = [
                    self._good(index, key)
                    for index, key in zip(ids.numpy().tolist(), keys)
                ]
            self._batches = iter(())  # stops its threads
            self._instead.assign(good)
            self._mended.assign(self._step)
            self._start.assign(self._step)
            self._open()

    def sample(self, place: int, draw: int = 0) -> Example:
        """An example by itself; with `replaces`, the next good one where it cannot be read.

        Its key is [draw, 0]. Raises ValueError where none can be read.
        """
        size = len(self.reader.source)
        key = tf.constant([draw, 0], tf.int32)
        number = place
        while True:
            try:
                return self.reader.read_one(number % size, key)
            except BadSample:
                number += 1
                if not self._replaces or number == place + size:
                    raise

    def replaced_at(self, step: int = 0) -> list[Replaced]:
        """The samples replaced at a step; 0: in the newest batch."""
        return [
            sample for sample in self.replaced if sample.step == (step or self._step)
        ]

    def _good(self, index: int, key: tf.Tensor) -> int:
        """This sample, or the one in its place; ValueError where there is none."""
        fault = self._fault(index, key)
        if not fault:
            return index
        if not self._replaces:
            raise ValueError(str(fault))
        one_rank = dataclasses.replace(self._order, size=1, virtual_ranks=0)
        batch = one_rank.ids_of(self._step, 0)
        first = int(key[0]) % len(batch)
        for other in batch[first:] + batch[:first]:
            if other != index and not self._fault(other, key):
                self.replaced.append(
                    Replaced(self._step + 1, fault.sample, other, str(fault))
                )
                return other
        raise ValueError(
            f"no sample of the batch of step {self._step + 1} can be read: {fault}"
        )

    def _fault(self, index: int, key: tf.Tensor) -> BadSample | None:
        """Why a sample or its partner cannot be read; ValueError: the disk fails time and again."""
        try:
            self.reader.read_one(index, key)
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
        samples = len(reader.source)
        # tf.data hung at 2**31 - 1.
        batch_size = 1 if self.one_by_one else min(batch_size, samples)
        self.batch_size = batch_size
        # How many batches the rank with the most samples has.
        self.rounds = -(-samples // (size * batch_size))
        self._ids: list[int] = []
        for start in range(rank * batch_size, samples, size * batch_size):
            self._ids += range(start, min(start + batch_size, samples))
        self._workers = workers
        self._all = self._batches(0)  # made once, because its graphs stay in memory
        self.spec = self._all.element_spec

    def _batches(self, first: int) -> tf.data.Dataset:
        """This rank's batches from number `first` on."""
        ids = tf.constant(self._ids[first * self.batch_size :], tf.int64)
        size = self.batch_size

        def of_batch(number: tf.Tensor) -> tf.Tensor:
            return ids[number * size : (number + 1) * size]

        numbers = tf.data.Dataset.range(-(-len(ids) // size))
        groups = numbers.map(as_written(of_batch))
        return self.reader.batches(groups, size, self._workers).prefetch(2)

    def __iter__(self) -> Iterator[Example]:
        """Raises ValueError naming the sample that cannot be read; tries a disk again."""
        done = 0
        pauses = iter(_PAUSES)
        while self.ids(done):
            try:
                for batch in _each(_begun(self._batches(done) if done else self._all)):
                    yield batch
                    done += 1
                    pauses = iter(_PAUSES)
            except _READ_ERRORS as error:
                if not pause(error, pauses):
                    raise ValueError(self._explain(self.ids(done), error)) from None

    def _explain(self, ids: list[int], error: Exception) -> str:
        """A message about the first bad sample of a batch that failed with `error`."""
        for index in ids:
            try:
                self.reader.one(index)
            except _READ_ERRORS as error_of_one:
                return self.reader.explain([index], error_of_one)
        return self.reader.explain(ids, error)

    def ids(self, place: int) -> list[int]:
        """The samples of this rank's batch number `place`."""
        return self._ids[place * self.batch_size :][: self.batch_size]


def _begun(batches: tf.data.Dataset) -> Iterator[Example]:
    """An iterator over a pipeline whose order is fixed, with all its threads.

    Under --deterministic TensorFlow would take threads and reading ahead out of each pipeline that
    reads a variable, or asserts (its make_deterministic). No public option prevents that.
    """
    is_on = _pywrap_determinism.is_enabled()
    _pywrap_determinism.enable(False)
    try:
        return iter(batches)
    finally:
        _pywrap_determinism.enable(is_on)


def _each(batches: Iterator[Example]) -> Iterator[Example]:
    """The batches; the heartbeat of this rank says when it waits for one."""
    while True:
        with heartbeat.reading():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def pause(error: Exception, pauses: Iterator[float]) -> bool:
    """Waits and returns True if the disk failed; ValueError once it has failed too often."""
    if not passes(error):
        return False
    seconds = next(pauses, None)
    if seconds is None:
        raise ValueError(
            f"the disk fails, not the file: {reason_of(error)}, {len(_PAUSES) + 1} times in "
            f"{sum(_PAUSES)} s: look at the disk or the file server, then start again"
        ) from None
    say(f"note: the disk fails ({reason_of(error)}): reading again in {seconds} s")
    heartbeat.beat()
    time.sleep(seconds)
    return True


def line_of(error: Exception, graph: tf.Graph) -> str:
    """The user's line that made the operation of a graph that failed; "" where it is not known."""
    for name in re.findall(r"\{\{node ([^}]+)\}\}", str(error)):
        # Where functions are inlined, the names of the calls stand before the operation's.
        failed = [
            op for op in graph.get_operations() if f"/{name}".endswith(f"/{op.name}")
        ]
        if failed:
            return project.line_in_fork(
                max(failed, key=lambda op: len(op.name)).traceback
            )
    return ""


def reason_of(error: Exception) -> str:
    """TensorFlow's reason in one line, without names and places of graph nodes."""
    message = re.sub(r"\x1b\[[0-9;]*m", "", getattr(error, "message", str(error)))
    asserted = re.search(
        r"assertion failed: \[(.*?)\](?: \[Op:|\s*$)", message, re.MULTILINE
    )
    if asserted:
        unescaped = re.sub(r"\\(['\"])", r"\1", asserted[1])
        return unescaped.replace("] [", " ")

    lines = [line for line in message.splitlines() if not _NO_REASON.match(line)]
    reason = lines[0] if lines else type(error).__name__
    reason = re.sub(r"\{\{.*?\}\} ?", "", reason)
    reason = re.sub(r" \[Op:\w+\].*", "", reason)
    return re.sub(r"^\(0\) [A-Z_]+: +", "", reason.strip())
