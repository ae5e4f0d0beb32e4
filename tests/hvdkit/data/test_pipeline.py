"""The feed's own threads, how long a step waits for it, and samples that cannot be read."""

import errno
import os
import threading
import time
from collections.abc import Container

import numpy as np
import pytest
import tensorflow as tf
from refusals import refused
from tensorflow.python.util import _pywrap_determinism

from hvdkit.data import pipeline
from hvdkit.data import source as sources
from hvdkit.data.pipeline import EvaluationFeed, Replaced, TrainingFeed, reader
from hvdkit.data.sampler import Sampler
from hvdkit.data.source import Arrays
from hvdkit.train.step import losses
from ranks import launch

SOURCE = Arrays(x=np.arange(40))


class Busy:
    """Counts how many threads are inside at once; each stays for a while."""

    def __init__(self) -> None:
        self.most = 0
        self._inside = 0
        self._lock = threading.Lock()

    def __call__(self, sample, key=None):
        def stay(x):
            with self._lock:
                self._inside += 1
                self.most = max(self.most, self._inside)
            time.sleep(0.02)
            with self._lock:
                self._inside -= 1
            return x

        return {
            "x": tf.ensure_shape(tf.numpy_function(stay, [sample["x"]], tf.int64), [])
        }


@pytest.fixture
def deterministic():
    _pywrap_determinism.enable(True)
    yield
    _pywrap_determinism.enable(False)


@pytest.mark.parametrize("workers", [1, 3])
def test_as_many_examples_at_once_as_there_are_workers(workers: int, deterministic):
    busy = Busy()
    feed = TrainingFeed(
        Sampler(40, 20, 1, 1, 0, 1),
        reader(SOURCE, busy, keyed=True),
        num_steps=2,
        workers=workers,
    )
    feed.next()
    assert busy.most == workers
    # A sample takes 0.02 s, and what is slow on a busy machine takes longer.
    assert feed.waited > 20 * 0.02 / workers * 0.8

    busy = Busy()
    feed = EvaluationFeed(reader(SOURCE, busy, keyed=False), 8, workers=workers)
    assert sum(len(batch["x"]) for batch in feed) == 40
    assert busy.most == workers


def test_samples_keep_their_order_however_long_each_takes():
    order = Sampler(40, 8, 1, 1, 0, 1)
    ids = order.ids_of(2, 0)

    def slow(sample, key):
        def wait(x):
            time.sleep(0.2 if x == ids[0] else 0.0)
            return x

        return {
            "x": tf.ensure_shape(tf.numpy_function(wait, [sample["x"]], tf.int64), [])
        }

    feed = TrainingFeed(
        order,
        reader(SOURCE, slow, keyed=True),
        first_step=2,
        num_steps=3,
        workers=4,
    )
    assert ids_in(feed.next()) == ids


def ids_in(batch: dict) -> list[int]:
    """Of a batch for training with one micro-batch."""
    return batch["x"][0].numpy().tolist()


class Torn(Arrays):
    """Samples that cannot be read, and a disk that fails at these reads of one sample."""

    def __init__(self, *bad: int, busy: int = -1, fails: Container[int] = ()) -> None:
        super().__init__(x=np.arange(50))
        self.bad = bad
        self.asked = []
        self.busy = busy
        self.reads = 0
        self.fails = fails

    def _look(self, index):
        if index == self.busy:
            self.reads += 1
            if self.reads in self.fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return index

    def read(self, index):
        fine = tf.reduce_all(tf.constant(self.bad, tf.int64) != index)
        with tf.control_dependencies([tf.debugging.Assert(fine, ["torn"])]):
            index = tf.ensure_shape(
                tf.numpy_function(self._look, [index], tf.int64), []
            )
            return super().read(index)

    def explain(self, index):
        self.asked.append(index)
        return f"sample {index} is torn" if index in self.bad else None


@pytest.mark.parametrize("device", ["", "/CPU:0"])
def test_a_step_names_the_sample_that_cannot_be_read(device: str):
    """With a device, batches take the ops that copy them to a GPU; here it is the host."""
    order = Sampler(50, 4, 1, 1, 0, 1)
    bad = order.ids_of(2, 0)[1]
    samples = reader(Torn(bad), lambda sample, key: sample, keyed=True)
    feed = TrainingFeed(order, samples, num_steps=5, device=device)
    for step in range(2):
        assert ids_in(feed.next()) == order.ids_of(step, 0)
        assert feed.error is None, step
    # The step that no rank applies has a batch that the model can compute.
    assert ids_in(feed.next()) == order.ids_of(1, 0)
    assert feed.error == f"sample {bad} is torn"


def test_a_first_step_that_cannot_be_read_has_zeros():
    order = Sampler(50, 4, 1, 1, 0, 1)
    samples = reader(Torn(order.ids_of(0, 0)[1]), ids_alone, keyed=True)
    feed = TrainingFeed(order, samples, num_steps=5)
    assert ids_in(feed.next()) == [0] * 4 and feed.error


@pytest.mark.parametrize("bad", [13, 49])
def test_an_evaluation_looks_for_a_bad_sample_in_its_batch_only(bad: int):
    source = Torn(bad)
    samples = reader(source, lambda sample: sample, keyed=False)
    outcomes = []  # samples of a rank, or its error
    for rank in range(3):
        try:
            feed = EvaluationFeed(samples, 4, rank=rank, size=3)
            outcomes.append(sum(len(batch["x"]) for batch in feed))
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes.count(f"sample {bad} is torn") == 1 and len(set(outcomes)) > 1
    assert source.asked == [bad]


def ids_alone(sample, key):
    return {"x": sample["x"]}


def ids_with_partners(sample, key):
    return {"x": [sample["x"], sample["partner"]["x"]]}


def batches_of(
    source: Torn, steps: range, size: int, example=ids_alone, *, paired: bool = False
) -> tuple[list[list], list]:
    """Ids that `size` ranks get at each step, in the batch's order, and what they replaced."""
    samples = reader(source, example, keyed=True, paired=paired)
    feeds = []
    for rank in range(size):
        feed = TrainingFeed(
            Sampler(50, 12, 1, 1, rank, size),
            samples,
            first_step=steps.start,
            num_steps=steps.stop,
            replaces=True,
        )
        feeds.append(feed)
    batches = []
    for _ in steps:
        batches.append([])
        for feed in feeds:
            batches[-1] += ids_in(feed.next())
    replaced = []
    for feed in feeds:
        assert feed.error is None
        replaced += feed.replaced
    return batches, sorted(replaced)


def test_a_sample_whose_partner_is_bad_is_replaced_alike_on_any_number_of_ranks():
    rows, replaced = batches_of(Torn(17), range(9), 1, ids_with_partners, paired=True)
    on_three = batches_of(Torn(17), range(9), 3, ids_with_partners, paired=True)
    assert (rows, replaced) == on_three
    rows = np.array(rows)
    assert 17 not in rows and np.all(rows[..., 0] != rows[..., 1])
    assert len(replaced) > 2
    assert {one.sample for one in replaced} == {17}  # it counts as one bad sample


def test_a_bad_sample_is_replaced_alike_on_any_number_of_ranks_and_at_a_resume():
    order = Sampler(50, 12, 1, 1, 0, 1)
    torn = {3, 17, 44}
    batches, replaced = batches_of(Torn(*torn), range(9), 1)
    expected = []
    for step, batch in enumerate(batches):
        planned = order.ids_of(step, 0)
        assert {*batch} <= {*planned} - torn, "of the same batch, and good"
        for wanted, read in zip(planned, batch):
            if wanted in torn:
                expected.append(
                    Replaced(step + 1, wanted, read, f"sample {wanted} is torn")
                )
            else:
                assert read == wanted
    assert replaced == sorted(expected) and len({one.by for one in expected}) > 2
    for size in (2, 3):
        assert batches_of(Torn(*torn), range(9), size) == (batches, replaced)
    later = [one for one in replaced if one.step > 4]
    assert batches_of(Torn(*torn), range(4, 9), 2) == (batches[4:], later)


# The second: also once more where all samples are read again, after each was read by itself.
@pytest.mark.parametrize("fails", [{1, 2, 3}, {1, 3}])
def test_a_disk_that_fails_is_read_again_with_patience(monkeypatch, capsys, fails):
    monkeypatch.setattr(pipeline, "_PAUSES", (0.01, 0.01, 0.01))
    order = Sampler(50, 12, 1, 1, 0, 1)
    source = Torn(busy=order.ids_of(1, 0)[5], fails=fails)
    feed = TrainingFeed(order, reader(source, ids_alone, keyed=True), num_steps=3)
    for step in range(3):
        assert ids_in(feed.next()) == order.ids_of(step, 0)
    assert not feed.replaced and feed.error is None
    assert "reading again" in capsys.readouterr().out


def test_an_evaluation_reads_again_too(monkeypatch):
    monkeypatch.setattr(pipeline, "_PAUSES", (0.01, 0.01, 0.01))
    samples = reader(Torn(busy=17, fails={1, 2}), lambda sample: sample, keyed=False)
    ids = [batch["x"].numpy() for batch in EvaluationFeed(samples, 4)]
    assert np.concatenate(ids).tolist() == list(range(50))


def test_a_disk_that_goes_on_failing_is_named(monkeypatch):
    monkeypatch.setattr(pipeline, "_PAUSES", (0.01, 0.01, 0.01))
    order = Sampler(50, 12, 1, 1, 0, 1)
    source = Torn(busy=order.ids_of(1, 0)[5], fails=range(99))
    feed = TrainingFeed(order, reader(source, ids_alone, keyed=True), num_steps=3)
    for _ in range(3):
        feed.next()
    assert not feed.replaced and feed.error.startswith("the disk fails, not the ")


def test_the_reason_is_found_in_what_tensorflow_says_twice():
    message = (
        "Graph execution error:\n\nDetected at node a defined at (most recent call last):\n"
        '  File "a.py", line 1, in f\n\n<stack traces unavailable>\n2 root error(s) found.\n'
        "  (0) INVALID_ARGUMENT:  indices = 7 is not in [0, 1)\n\t [[{{node a}}]]\n"
        "  (1) INVALID_ARGUMENT:  indices = 7 is not in [0, 1)\n0 successful operations."
    )
    error = tf.errors.InvalidArgumentError(None, None, message)
    assert pipeline.reason_of(error) == "indices = 7 is not in [0, 1)"

    message = "Exception encountered when calling A.call().\n\n\x1b[1m{{a}} no [2] [Op:B]\x1b[0m"
    error = tf.errors.InvalidArgumentError(None, None, message)
    assert pipeline.reason_of(error) == "no [2]"


def three_or_four(x):
    return np.ones(4 if x > 1 else 3, np.int64)


def of_wrong_shape(sample):
    row = tf.numpy_function(three_or_four, [sample["x"]], tf.int64)
    return tf.ensure_shape(row, [3])


def of_a_false_shape(sample):
    row = tf.numpy_function(three_or_four, [sample["x"]], tf.int64)
    row.set_shape([3])
    return row


@pytest.mark.parametrize(
    ("transform", "first", "inside"), [(of_wrong_shape, 2, 2), (of_a_false_shape, 0, 0)]
)
def test_an_example_of_another_shape_is_told_with_its_line(transform, first, inside):
    """The line of the operation that fails, or else that of the function."""
    source = Arrays(x=np.arange(4))
    feed = EvaluationFeed(reader(source, transform, keyed=False), 4)
    line = transform.__code__.co_firstlineno + inside
    refused(lambda: [*feed], f"sample {first}", f"test_pipeline.py, line {line}: ")


class Other:
    """Other indices; what it lacks is its source's, also `ahead`."""

    def __init__(self, source, length, index):
        self._source = source
        self._length = length
        self._index = index

    def __getattr__(self, name):
        return getattr(self._source, name)

    def __len__(self):
        return self._length

    def read(self, index):
        return self._source.read(self._index(index))


@pytest.mark.parametrize(
    ("length", "index"),
    [(0, None), (40, lambda i: 2 * i), (160, lambda i: i // 2), (80, lambda i: 79 - i)],
    ids=["itself", "halves", "twice", "turned"],
)
@pytest.mark.parametrize("named", [False, True], ids=["numbers", "names too"])
def test_what_is_read_ahead_is_what_would_be_read(
    tmp_path, monkeypatch, length, index, named
):
    """Arrays of a file, in few calls; a source with other indices reads again, by itself."""

    def arrays_of_file() -> Arrays:
        x = np.load(tmp_path / "x.npy", mmap_mode="r")
        if not named:
            return Arrays(x=x)
        return Arrays(x=x, name=np.array(["a"] * 79 + ["\u00e9"]))

    def counted_fetch(ids):
        calls.append(len(ids))
        return fetch(ids)

    np.save(tmp_path / "x.npy", np.arange(80) ** 2)
    small = arrays_of_file()
    monkeypatch.setattr(sources, "_LARGE", 0)
    large = arrays_of_file()
    calls: list[int] = []
    fetch = large.fetch
    monkeypatch.setattr(large, "fetch", counted_fetch)
    assert (
        not small.reads_ahead
        and large.reads_ahead
        and large.fingerprint() == small.fingerprint()
    )

    expected = all_reads(Other(small, length, index) if length else small)
    ahead = all_reads(Other(large, length, index) if length else large)
    tf.nest.map_structure(np.testing.assert_array_equal, ahead, expected)
    # By whole batches of 20 and 7; what has other indices is read sample by sample.
    if length == 0:
        assert set(calls) == {20, 7, 3, 1} and calls.count(1) == 2
    elif length == 80:
        assert max(calls) == 32 and calls.count(1) > 9
    else:
        assert set(calls) == {1}


def all_reads(source) -> list:
    """Batches for training and for evaluation, one example and one sample."""
    order = Sampler(len(source), 20, 1, 1, 0, 1)
    examples = reader(source, lambda sample, key: {"x": sample, "key": key}, keyed=True)
    feed = TrainingFeed(order, examples, num_steps=4, workers=2)
    batches = [feed.next() for _ in range(4)]
    samples = reader(source, lambda sample: sample, keyed=False)
    batches += [samples.one(3), *EvaluationFeed(samples, 7, rank=1, size=2)]
    batches.append(source.read(tf.constant(7, tf.int64)))
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), batches)


def scaled(sample):
    """Numbers that are rounded, a choice, a text and a class that is checked."""
    x = (sample["x"] - 0.3) / 0.7
    return {
        "x": tf.where(x > 0, x * 1.1, x),
        "name": sample["name"],
        "hot": tf.one_hot(losses.require_classes(sample["label"], 5), 5),
    }


def summed(sample):
    return {"x": tf.reduce_sum(sample["x"])}


def exponential(sample):
    return {"x": tf.exp(sample["x"])}


def of_any_length(sample):
    return {"x": tf.boolean_mask(sample["x"], sample["x"] > 0)}


def beyond_range(sample):
    return {"x": tf.cast(1e4 * sample["x"], tf.uint8)}


def padded(sample):
    return {"x": tf.pad(sample["x"], [[1, 2]], constant_values=9.0)}


def squeezed(sample):
    return {"x": tf.squeeze(sample["x"][:1])}


def listed(sample):
    return {"x": tf.split(sample["x"][:6], 2)}


DRAW = np.random.default_rng(3)
SMALL_SAMPLES = Arrays(
    x=DRAW.normal(size=(61, 7)).astype(np.float32),
    name=np.array(["a", "\u00e9"] * 30 + ["b"]),
    label=np.arange(61) % 5,
)


@pytest.mark.parametrize("large", [False, True])
def test_small_samples_read_at_once_have_the_bits_of_each(monkeypatch, large: bool):
    if large:
        monkeypatch.setattr(sources, "_LARGE", 0)
    source = Arrays(**SMALL_SAMPLES._arrays)
    read = reader(source, scaled, keyed=False)
    assert source.reads_ahead == large and read.is_exact_at_once

    at_once = [*EvaluationFeed(read, 8)]
    one_by_one = [*EvaluationFeed(read._replace(is_exact_at_once=False), 8)]
    assert len(at_once) == 8 and len(at_once[-1]["x"]) == 61 - 7 * 8
    for batch, expected in zip(at_once, one_by_one, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, batch, expected)


@pytest.mark.parametrize(
    "transform",
    [
        summed,
        exponential,
        of_any_length,
        beyond_range,
        padded,
        squeezed,
        listed,
    ],
)
def test_what_may_be_otherwise_among_many_is_read_one_by_one(transform):
    assert not reader(SMALL_SAMPLES, transform, keyed=False).is_exact_at_once


# Prints how many different sums 25 runs have, in a process of its own: as TensorFlow starts.
SUMS = """
import hvdkit.ranks.quiet
import sys
import numpy as np
import tensorflow as tf
from hvdkit.data.pipeline import TrainingFeed, reader
from hvdkit.data.sampler import Sampler
from hvdkit.data.source import Arrays
from hvdkit.run import main
from hvdkit.settings import Settings

def example(sample, key):
    a, b, c, d = tf.unstack(sample["x"])
    return {"inputs": tf.stack([a + b + c + d, a - b, c - d]), "targets": ()}

def work(world, stop_signal):
    draw = np.random.default_rng(0)
    microphones = Arrays(x=draw.normal(size=(64, 4, 2000)).astype(np.float32))
    made = reader(microphones, example, keyed=True)
    results = set()
    for _ in range(25):
        sampler = Sampler(64, 16, micro_batches=1, seed=5, rank=0, size=1)
        with TrainingFeed(sampler, made, num_steps=4) as feed:
            batches = [feed.next()["inputs"] for _ in range(4)]
        results.add(b"".join(batch.numpy().tobytes() for batch in batches))
    print(len(results))

sys.exit(main.with_ranks(Settings(deterministic=True, cpu_threads=2), work))
"""


def test_a_deterministic_run_adds_up_in_one_order():
    """Else TensorFlow joins three additions, in an order that depends on threads."""
    ended = launch(1, ["-c", SUMS])
    assert ended.output.splitlines()[-1] == "1", ended.output


def test_a_bad_sample_among_many_read_at_once_is_named():
    labels = np.arange(61) % 5
    labels[37] = 9
    source = Arrays(**(SMALL_SAMPLES._arrays | {"label": labels}))
    read = reader(source, scaled, keyed=False)
    assert read.is_exact_at_once
    words = ("sample 37 ", "label 9 is no class: classes are 0 to 4")
    refused(lambda: [*EvaluationFeed(read, 8)], *words)
