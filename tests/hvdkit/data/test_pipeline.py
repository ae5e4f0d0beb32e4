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

SOURCE = Arrays(x=np.arange(40))


class Busy:
    """Counts how many threads are inside at once; each stays for a while."""

    def __init__(self) -> None:
        self.most, self._inside, self._lock = 0, 0, threading.Lock()

    def __call__(self, sample, key=None):
        def stay(x):
            with self._lock:
                self._inside += 1
                self.most = max(self.most, self._inside)
            time.sleep(0.02)
            with self._lock:
                self._inside -= 1
            return x

        return {"x": tf.ensure_shape(tf.numpy_function(stay, [sample["x"]], tf.int64), [])}


@pytest.fixture
def deterministic():
    _pywrap_determinism.enable(True)
    yield
    _pywrap_determinism.enable(False)


@pytest.mark.parametrize("workers", [1, 3])
def test_as_many_examples_at_once_as_there_are_workers(workers: int, deterministic):
    busy = Busy()
    made = reader(SOURCE, busy, keyed=True)
    feed = TrainingFeed(Sampler(40, 20, 1, 1, 0, 1), made, num_steps=2, workers=workers)
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

        return {"x": tf.ensure_shape(tf.numpy_function(wait, [sample["x"]], tf.int64), [])}

    made = reader(SOURCE, slow, keyed=True)
    feed = TrainingFeed(order, made, first_step=2, num_steps=3, workers=4)
    assert feed.next()["x"][0].numpy().tolist() == ids


class Torn(Arrays):
    """Samples that cannot be read, and a disk that fails at these reads of one sample."""

    def __init__(self, *bad: int, busy: int = -1, fails: Container[int] = ()) -> None:
        super().__init__(x=np.arange(50))
        self.bad, self.asked = bad, []
        self.busy, self.reads, self.fails = busy, 0, fails

    def _look(self, index):
        self.reads += index == self.busy
        if index == self.busy and self.reads in self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return index

    def read(self, index):
        fine = tf.reduce_all(tf.constant(self.bad, tf.int64) != index)
        with tf.control_dependencies([tf.debugging.Assert(fine, ["torn"])]):
            index = tf.ensure_shape(tf.numpy_function(self._look, [index], tf.int64), [])
            return super().read(index)

    def explain(self, index):
        self.asked.append(index)
        return f"sample {index} is torn" if index in self.bad else None


@pytest.mark.parametrize("device", ["", "/CPU:0"])
def test_a_step_names_the_sample_that_cannot_be_read(device: str):
    """With a device, batches take the ops that copy them to a GPU; here it is the host."""
    order = Sampler(50, 4, 1, 1, 0, 1)
    source = Torn(bad := order.ids_of(2, 0)[1])
    made = reader(source, lambda sample, key: sample, keyed=True)
    feed = TrainingFeed(order, made, num_steps=5, device=device)
    for step in range(3):
        assert feed.error is None, step
        read = feed.next()["x"][0].numpy().tolist()
        assert read == (order.ids_of(step, 0) if step < 2 else [0] * 4)
    assert feed.error == f"sample {bad} is torn"


@pytest.mark.parametrize("bad", [13, 49])
def test_an_evaluation_looks_for_a_bad_sample_in_its_batch_only(bad: int):
    source, found = Torn(bad), []
    made = reader(source, lambda sample: sample, keyed=False)
    for rank in range(3):
        try:
            feed = EvaluationFeed(made, 4, rank=rank, size=3)
            found.append(sum(len(batch["x"]) for batch in feed))
        except ValueError as error:
            found.append(str(error))
    assert found.count(f"sample {bad} is torn") == 1 and len(set(found)) > 1
    assert source.asked == list(range(bad // 4 * 4, bad + 1))


def batches_of(
    source: Torn, steps: range, size: int, example=lambda sample, key: sample, **how
) -> tuple[list[list], list]:
    """Ids that `size` ranks get at each step, in the batch's order, and what they replaced."""
    made = reader(source, example, keyed=True, **how)
    how = {"first_step": steps.start, "num_steps": steps.stop, "replaces": True}
    orders = [Sampler(50, 12, 1, 1, rank, size) for rank in range(size)]
    feeds = [TrainingFeed(order, made, **how) for order in orders]
    found = [[x for feed in feeds for x in feed.next()["x"][0].numpy().tolist()] for _ in steps]
    assert [feed.error for feed in feeds] == [None] * size
    return found, sorted(one for feed in feeds for one in feed.replaced)


def test_a_sample_whose_partner_is_bad_is_replaced_alike_on_any_number_of_ranks():
    both = lambda sample, key: {"x": [sample["x"], sample["partner"]["x"]]}  # noqa: E731
    rows, bad = batches_of(Torn(17), range(9), 1, both, paired=True)
    assert (rows, bad) == batches_of(Torn(17), range(9), 3, both, paired=True)
    rows = np.array(rows)
    assert 17 not in rows and np.all(rows[..., 0] != rows[..., 1])
    assert len(bad) > 2 and {one.sample for one in bad} == {17}  # counted as one bad sample


def test_a_bad_sample_is_replaced_alike_on_any_number_of_ranks_and_at_a_resume():
    order, torn = Sampler(50, 12, 1, 1, 0, 1), {3, 17, 44}
    found, replaced = batches_of(Torn(*torn), range(9), 1)
    ids = [order.ids_of(step, 0) for step in range(9)]
    seen = []
    for step, (batch, read) in enumerate(zip(ids, found)):
        assert {*read} <= {*batch} - torn, "of the same batch, and good"
        assert all(i == x for i, x in zip(batch, read) if i not in torn)
        pairs = [(i, x) for i, x in zip(batch, read) if i in torn]
        seen += [Replaced(step + 1, i, x, f"sample {i} is torn") for i, x in pairs]
    assert replaced == sorted(seen) and len({one.by for one in seen}) > 2
    for size in (2, 3):
        assert batches_of(Torn(*torn), range(9), size) == (found, replaced)
    later = [one for one in replaced if one.step > 4]
    assert batches_of(Torn(*torn), range(4, 9), 2) == (found[4:], later)


def test_a_disk_that_fails_is_read_again_with_patience(monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "_PAUSES", (0.01, 0.01, 0.01))
    order = Sampler(50, 12, 1, 1, 0, 1)
    busy = order.ids_of(1, 0)[5]
    # Also once more where all samples are read again, after each was read by itself.
    for fails, wanted in (({1, 2, 3}, ""), ({1, 3}, ""), (range(99), "the disk fails, not the ")):
        source = Torn(busy=busy, fails=fails)
        made = reader(source, lambda sample, key: sample, keyed=True)
        feed = TrainingFeed(order, made, num_steps=3)
        found = [feed.next()["x"][0].numpy().tolist() for _ in range(3)]
        assert not feed.replaced and (feed.error or "").startswith(wanted)
        if not wanted:
            assert found == [order.ids_of(step, 0) for step in range(3)] and feed.error is None
            assert "reading again" in capsys.readouterr().out
    source = Torn(busy=17, fails={1, 2})
    made = reader(source, lambda sample: sample, keyed=False)
    read = [x for batch in EvaluationFeed(made, 4) for x in batch["x"].numpy().tolist()]
    assert read == list(range(50))


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


def of_wrong_shape(sample):
    made = tf.numpy_function(lambda x: np.ones(3 + (x > 1), np.int64), [sample["x"]], tf.int64)
    return tf.ensure_shape(made, [3])


def of_a_false_shape(sample):
    made = tf.numpy_function(lambda x: np.ones(3 + (x > 1), np.int64), [sample["x"]], tf.int64)
    made.set_shape([3])
    return made


@pytest.mark.parametrize(("transform", "inside"), [(of_wrong_shape, 2), (of_a_false_shape, 0)])
def test_an_example_of_another_shape_is_told_with_its_line(transform, inside):
    """The line of the operation that fails, or else that of the function."""
    source = Arrays(x=np.arange(4))
    feed = EvaluationFeed(reader(source, transform, keyed=False), 4)
    line = transform.__code__.co_firstlineno + inside
    refused(lambda: [*feed], "sample 0", f"test_pipeline.py, line {line}: ")


class Other:
    """Other indices; what it lacks is its source's, also `ahead`."""

    def __init__(self, source, length, index):
        self._source, self._length, self._index = source, length, index

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
@pytest.mark.parametrize("parts", [("x",), ("x", "name")])
def test_what_is_read_ahead_is_what_would_be_read(tmp_path, monkeypatch, length, index, parts):
    """Arrays of a file, in few calls; a source with other indices reads again, by itself."""
    np.save(tmp_path / "x.npy", np.arange(80) ** 2)
    names, asked = np.array(["a"] * 79 + ["\u00e9"]), []
    arrays = {"x": np.load(tmp_path / "x.npy", mmap_mode="r"), "name": names}
    arrays = {part: arrays[part] for part in parts}
    small = Arrays(**arrays)
    monkeypatch.setattr(sources, "_LARGE", 0)
    large = Arrays(**arrays)
    fetch = large.fetch
    monkeypatch.setattr(large, "fetch", lambda ids: asked.append(len(ids)) or fetch(ids))
    assert small.ahead is None and large.is_large and large.fingerprint() == small.fingerprint()
    found = []
    for source in (small, large):
        source = Other(source, length, index) if length else source
        made = reader(source, lambda x, key: {"x": x, "key": key}, keyed=True)
        order = Sampler(len(source), 20, 1, 1, 0, 1)
        feed = TrainingFeed(order, made, num_steps=4, workers=2)
        batches = [feed.next() for _ in range(4)]
        made = reader(source, lambda sample: sample, keyed=False)
        batches += [made.one(3), *EvaluationFeed(made, 7, rank=1, size=2)]
        batches.append(source.read(tf.constant(7, tf.int64)))
        found.append(tf.nest.map_structure(lambda t: t.numpy(), batches))
    tf.nest.map_structure(np.testing.assert_array_equal, *found)
    assert (max(asked) == 32) == (length in (0, 80)) and (asked.count(1) > 9) == (length > 0)
