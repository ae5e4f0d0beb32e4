"""The feed's own threads, and how long a step waits for it."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.data.pipeline import EvaluationFeed, TrainingFeed, reader
from hvdkit.data.sampler import Sampler
from hvdkit.data.source import Arrays
from hvdkit.observe.telemetry import Telemetry
from hvdkit.ranks.world import World
from hvdkit.settings import Settings

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


@pytest.mark.parametrize("workers", [1, 3])
def test_as_many_examples_at_once_as_there_are_workers(workers: int):
    busy = Busy()
    feed = TrainingFeed(
        SOURCE,
        Sampler(40, 20, 1, 1, 0, 1),
        reader(SOURCE, busy, True),
        num_steps=2,
        workers=workers,
    )
    feed.next()
    assert busy.most == workers
    # A sample takes 0.02 s, and what is slow on a busy machine takes longer.
    assert feed.waited() > 20 * 0.02 / workers * 0.8

    busy = Busy()
    feed = EvaluationFeed(SOURCE, reader(SOURCE, busy, keyed=False), 8, workers=workers)
    assert sum(len(batch["x"]) for batch in feed) == 40
    assert busy.most == workers


def test_batches_are_the_same_on_a_device_of_their_own():
    """The host's, as there is no other here: through the same ops as for a GPU."""
    order = Sampler(40, 20, 1, 1, 0, 1)

    def take(sample, key):
        small = tf.debugging.assert_less(sample["x"], tf.constant(limit, tf.int64))
        with tf.control_dependencies([small]):
            return {"x": tf.identity(sample["x"])}

    limit = 40
    taken = reader(SOURCE, take, keyed=True)
    feeds = [
        TrainingFeed(SOURCE, order, taken, first_step=1, num_steps=4, device=device)
        for device in ("", "/CPU:0")
    ]
    for _ in range(3):
        ours, other = (feed.next()["x"].numpy() for feed in feeds)
        np.testing.assert_array_equal(ours, other)
    limit = 0
    taken = reader(SOURCE, take, keyed=True)
    feed = TrainingFeed(SOURCE, order, taken, first_step=1, num_steps=4, device="/CPU:0")
    assert feed.next()["x"].numpy().max() == 0 and "x < y" in feed.error


def test_a_run_that_waits_for_its_data_is_told_so_once(tmp_path, capsys):
    figures = {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0}
    telemetry = Telemetry(
        Settings(run_dir=str(tmp_path), num_steps=100), World(0, 1, 0, 1), first_step=0, epoch=50
    )
    for step, waited in ((1, 9.0), (2, 0.0), (3, 9.0), (4, 9.0)):  # first: nothing is read ahead
        time.sleep(0.01)
        telemetry.step(step, figures, samples=8, losses=[1.0], waited=waited, times={})
        said = capsys.readouterr().out
        assert ("input-bound: rank 0 waited for data 100% of the time" in said) == (step == 3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert ['"data_wait": 0.0' in line for line in lines] == [False, True, False, False]


def test_samples_keep_their_order_however_long_each_takes():
    """Those of step 2, where a run begins with it."""
    order = Sampler(40, 8, 1, 1, 0, 1)
    ids = order.ids_of(2, 0)

    def slow(sample, key):
        def wait(x):
            time.sleep(0.2 if x == ids[0] else 0.0)
            return x

        return {"x": tf.ensure_shape(tf.numpy_function(wait, [sample["x"]], tf.int64), [])}

    made = reader(SOURCE, slow, keyed=True)
    feed = TrainingFeed(SOURCE, order, made, first_step=2, num_steps=3, workers=4)
    assert feed.next()["x"][0].numpy().tolist() == ids


def test_the_sample_that_cannot_be_read_is_the_one_named():
    """Every step's samples are named by a source that blames all it is asked about."""
    order = Sampler(40, 4, 1, 1, 0, 1)
    bad = order.ids_of(2, 0)[1]

    class Source(Arrays):
        def explain(self, index):
            return f"sample {index} is bad" if index == bad else None

    def take(sample, key):
        sound = tf.debugging.assert_none_equal(sample["x"], tf.constant(bad, tf.int64))
        with tf.control_dependencies([sound]):
            return {"x": tf.identity(sample["x"])}

    source = Source(x=np.arange(40))
    feed = TrainingFeed(source, order, reader(source, take, keyed=True), num_steps=5)
    for step in range(3):
        assert feed.error is None, step
        feed.next()
    assert feed.error == f"sample {bad} is bad"
