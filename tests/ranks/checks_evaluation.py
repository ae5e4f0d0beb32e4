"""Run on real ranks by test_small_runs.py: evaluations, and stops in the middle of them."""

import contextlib
import gc
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from checks_runs import batch_ids
from scipy.special import log_softmax
from small_runs import CLASSES, Small, classifier, fit, folder, numbers, same
from tensorflow.python.data.ops import iterator_ops

from hvdkit.checkpoint.saver import Saver
from hvdkit.observe import report
from hvdkit.observe.telemetry import Telemetry
from hvdkit.stop import DIVERGED, PREEMPTED, WRONG_USE
from ranks import json_lines


def check_a_failing_evaluation_loses_no_training(world):
    class Torn(Small):
        def evaluation_example(self, sample):
            fine = tf.debugging.Assert(sample["id"] != 13, ["sample 13 is torn"])
            with tf.control_dependencies([fine]):
                return {"inputs": tf.identity(sample["x"]), "targets": sample["y"]}

    gc.collect()
    gc.disable()
    try:
        ended = fit(world, Torn, "sample 13 is torn", code=WRONG_USE, eval_every=2, num_steps=6)
        # A pipeline that reads on is collected by any thread: by one that it waits for, both hang.
        kind = iterator_ops.OwnedIterator
        reading = [each for each in gc.get_objects() if isinstance(each, kind)]
    finally:
        gc.enable()

    class Fails(Small):
        def sums(self, outputs, targets):  # the last batch is of 4 samples
            few = tf.gather([0], tf.cast(tf.shape(targets)[0] == 4, tf.int32))
            return super().sums(outputs, targets) | {"few": few}

    words = "sample 16, 17, 18, 19 (counted from 0; inputs of shape [4, 6]): checks_evaluation.py, "
    words += "line 41: indices = 1 is not in"
    other = fit(world, Fails, words, code=WRONG_USE, eval_every=2)
    assert other.checkpoints == ended.checkpoints == ["step-00000002"]
    # Mended and started again, the evaluation is made up for, and training goes on from there.
    again = fit(world, Small, eval_every=2, num_steps=6, run_dir=ended.folder)
    if world.is_chief:
        trained = [r["step"] for r in again.records if "loss" in r]
        assert again.evaluated == [2, 4, 6] and trained == [1, 2, 3, 4, 5, 6], again.records
    assert not reading  # here, as the other ranks go on


def slow_check_a_kill_between_log_and_score_loses_no_evaluation(world):
    """Whichever comes first at step 4 is done, the other is not."""
    called = []

    def killed(function):
        def call(self, step, *args, **more):
            called.append(getattr(step, "step", step))
            if called.count(4) == 2:
                raise RuntimeError("killed")
            function(self, step, *args, **more)

        return call

    usual = {"eval_every": 2, "num_steps": 8, "run_dir": folder(world) / "run"}
    with contextlib.ExitStack() as patched, contextlib.suppress(RuntimeError):
        for owner, name in ((Saver, "add_score"), (Telemetry, "evaluation")):
            dies = killed(getattr(owner, name))
            patched.enter_context(mock.patch.object(owner, name, dies))
        fit(world, Small, **usual)
    assert called == [2, 2, 4, 4]
    again = fit(world, Small, **usual)
    assert not world.is_chief or again.evaluated == [2, 4, 6, 8]


def slow_check_what_is_kept_of_each_sample_comes_once_and_in_order(world):
    class Keeps(Small):
        def evaluation_example(self, sample):
            return {
                "inputs": sample["x"],
                "targets": tf.stack([tf.cast(sample["y"], tf.int64), sample["id"]]),
            }

        def loss(self, outputs, targets):
            return super().loss(outputs, targets[..., 0] if targets.shape.rank == 2 else targets)

        def sums(self, outputs, targets):
            return super().sums(outputs, targets[:, 0])

        def per_sample(self, outputs, targets):
            return {"id": targets[:, 1]}

        def metrics(self, sums):
            own = sums["id"].tolist()
            return super().metrics(sums) | {"in_order": own == [*range(20)]}

    ended = fit(world, Keeps, num_steps=1)
    assert "keep 8 bytes of each of 20 samples" in ended.printed or not world.is_chief
    assert not world.is_chief or ended.records[-1]["eval_in_order"] == 1.0
    Keeps.per_sample = lambda self, outputs, targets: {"id": tf.zeros([1, 2**24])}
    fit(world, Keeps, "1.2 GiB: every rank holds them all, 1 GiB", code=WRONG_USE, num_steps=1)
    Keeps.per_sample = lambda self, outputs, targets: {"id": tf.cast(targets[:, 1], tf.uint32)}
    fit(world, Keeps, "has id, uint32", "that Horovod gathers", code=WRONG_USE, num_steps=1)


def check_failed_pictures_and_nan_scores_end_no_run(world):
    class Faulty(Small):
        """The first two evaluations have no score; pictures fail after the try-out."""

        drawn = scored = 0

        def draw(self, inputs, targets, outputs):
            Faulty.drawn += 1
            if Faulty.drawn > 1:
                raise RuntimeError("no fonts here")
            return np.zeros((1, 4, 4, 3), np.uint8)

        def metrics(self, sums):
            Faulty.scored += 1
            return {"accuracy": {2: np.nan, 3: np.inf}.get(Faulty.scored, 0.1 * Faulty.scored)}

    ended = fit(world, Faulty, eval_every=1, num_steps=6, keep=1, early_stop_evals=3)
    best = "a score of NaN or infinity is never the best"
    assert ended.checkpoints == ["step-00000006"], best
    # Printed once, by one rank.
    notes = ended.printed.count("note: no pictures: draw failed: RuntimeError: no fonts here")
    assert notes == world.is_chief, ended.printed

    class Nan(Small):  # whose outputs have a largest one all the same
        def evaluation_example(self, sample):
            return {"inputs": sample["x"] * np.nan, "targets": sample["y"]}

    ended = fit(world, Nan, eval_every=1, num_steps=6, early_stop_evals=2)
    if world.is_chief:
        assert "no accuracy that is a number in 2 evaluations" in ended.printed
        none = "no checkpoint is the best: accuracy was NaN or infinite at each evaluation"
        assert none in ended.printed and ended.summary["no_best"] == none
        assert none in report.write(ended.folder).read_text()


def check_of_an_error_the_lowest_is_the_best(world):
    class Error(Small):
        """Its error falls to step 3, then rises."""

        main_metric, main_metric_mode = "error", "min"
        calls = 0

        def metrics(self, sums):
            Error.calls += 1
            return {"error": {1: 5.0, 2: 9.0, 3: 4.0, 4: 2.0}.get(Error.calls, 3.0)}

    usual = {"eval_every": 1, "num_steps": 8, "keep": 1, "early_stop_evals": 2}
    ended = fit(world, Error, **usual)
    assert ended.checkpoints == ["step-00000003", "step-00000005"], ended.checkpoints
    if world.is_chief:
        said = "stopped early: no error below 2.0000, of step 3, in 2 evaluations"
        assert said in ended.printed, ended.printed
        start = json_lines(ended.folder / "starts.jsonl")[0]
        assert (start["score"], start["score_mode"]) == ("error", "min")
        best = {
            "main_metric": "error",
            "main_metric_mode": "min",
            "best_score": 2.0,
            "best_step": 3,
        }
        assert (
            best.items() <= ended.summary.items()
            and "best error: 2.0000, of step 3" in ended.printed
        )
    again = fit(world, Error, run_dir=ended.folder, **usual)
    assert not world.is_chief or again.summary["step"] == 5
    # The validation loss, which falls, may be the score itself.
    task = type("ByLoss", (Small,), {"main_metric": "loss", "main_metric_mode": "min"})
    ended = fit(world, task, **usual | {"num_steps": 4})
    assert ended.checkpoints == ["step-00000004"]
    # Which of them is the best, and how often they are made, may change.
    task.main_metric_mode = "max"
    changed = {"eval_every": 2, "num_steps": 6, "early_stop_evals": 9}
    again = fit(world, task, run_dir=ended.folder, **usual | changed)
    if world.is_chief:
        assert "note: main_metric_mode was min, is max: the best is chosen anew" in again.printed
        told = "--eval_every was 1, is 2: --early_stop_evals=9 ends the run 9 times 2 steps after"
        assert told in again.printed, again.printed
        assert again.summary["best_step"] == 4


def check_a_score_that_stays_ends_early_although_the_newest_is_the_best(world):
    """At the same step where the run was interrupted: by the first step that had it."""
    task = type("Stays", (Small,), {"metrics": lambda task, sums: {"accuracy": 0.5}})
    usual = {"eval_every": 1, "keep": 1, "early_stop_evals": 3}
    first = fit(world, task, num_steps=3, **usual)
    ended = fit(world, task, num_steps=9, run_dir=first.folder, **usual)
    assert ended.checkpoints == ["step-00000004"], ended.checkpoints
    if world.is_chief:
        assert ended.summary["exit_reason"] == "early stop" and ended.summary["best_step"] == 4
        assert "no accuracy above 0.5000, of step 1, in 3 evaluations" in ended.printed


def slow_check_a_score_of_another_measure_counts_as_none(world):
    """A high score of picture centres does not end a run that scores whole ones; both are kept."""

    class Rises(Small):
        calls = 0

        def metrics(self, sums):
            # Each run's first call is its try-out; the first evaluation of the second gives none.
            Rises.calls += 1
            score = float("nan") if Rises.calls == 5 else 0.01 * Rises.calls
            return {"accuracy": 2 / Rises.calls if self.config.eval_crop else score}

    usual = {"eval_every": 1, "keep": 1, "early_stop_evals": 2}
    first = fit(world, Rises, eval_crop=16, num_steps=2, **usual)
    ended = fit(world, Rises, num_steps=5, run_dir=first.folder, **usual)
    assert ended.checkpoints == ["step-00000001", "step-00000005"], ended.checkpoints
    if world.is_chief:
        assert ended.summary["exit_reason"] == "done"
        # Its checkpoint is scored anew: as it is now measured.
        scores = {r["step"]: r["eval_accuracy"] for r in ended.records if "eval_loss" in r}
        assert list(scores) == [1, 2, 3, 4, 5] and scores[1] == 1.0, scores
        assert scores[2] is None and scores[3] < 1.0, scores
        note = "the score of step 2 is of another measure (--eval_crop was 16, is 0): such"
        assert ended.printed.count(note) == 1, ended.printed

    # Back to the first: its best is old, but it was not scored since.
    ended = fit(world, Rises, eval_crop=16, num_steps=9, run_dir=first.folder, **usual)
    if world.is_chief:
        assert ended.summary["exit_reason"] == "early stop" and ended.summary["step"] == 7

    class Others(Rises):
        def sources(self):
            return numbers(1, 60), numbers(3, 20)

    ended = fit(world, Others, num_steps=7, run_dir=first.folder, **usual)
    if world.is_chief:
        assert "the validation data's fingerprint was " in ended.printed
        assert ended.records[-1]["eval_accuracy"] > scores[5]


def check_a_validation_set_in_which_nothing_counts_is_refused(world):
    class Weightless(Small):
        def loss(self, outputs, targets):
            losses, weights = super().loss(outputs, targets)
            trains = tf.reduce_any(tf.shape(losses)[0] == [12, 6])  # on 1 rank, on 2
            return losses, weights * tf.cast(trains, weights.dtype)

    ended = fit(world, Weightless, "weights of the validation set are 0", code=WRONG_USE)
    assert not world.is_chief or ended.checkpoints == ["step-00000003"]


class Centre(keras.layers.Layer):
    """Takes off a running mean of its inputs, which it moves in evaluation too."""

    combines = "mean"

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], trainable=False, name="mean")

    def call(self, x):
        centred = x - self.mean
        self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(x, 0))
        return centred


class Centred(Small):
    """Its loss does the same with the outputs."""

    def build_model(self):
        self.seen = tf.Variable(tf.ones(CLASSES), trainable=False, name="seen")
        self.seen.combines = "mean"
        return classifier(keras.layers.Dense(5, bias_initializer="ones"), Centre())

    def loss(self, outputs, targets):
        found = super().loss(outputs - self.seen, targets)
        self.seen.assign(0.5 * self.seen + 0.5 * tf.reduce_mean(outputs, 0))
        return found


def check_notes_that_are_no_texts_are_refused(world):
    task = type("Noted", (Small,), {"notes": lambda task, sums: "one text"})
    ended = fit(world, task, "the task's notes must return a list of texts", code=WRONG_USE)
    assert ended.checkpoints == ["step-00000003"]


def check_state_that_an_evaluation_changes_goes_back_after_each_batch(world):
    """Ranks have different batches: figures would depend on their number."""
    ended = fit(world, Centred, eval_every=3, eval_batch_size=4)
    x, y = (numbers(2, 20)._arrays[name] for name in ("x", "y"))
    if world.is_chief:
        [seen] = [v for name, v in ended.state(3).items() if name.startswith("task/seen")]
        scores = log_softmax(ended.model(x).numpy() - seen, -1)
        loss = -np.mean(scores[np.arange(20), y])
        np.testing.assert_allclose(ended.records[-1]["eval_loss"], loss, 1e-6)


class StopsAt:
    """Asks the last rank to stop at its n-th question (a step or a part of an evaluation)."""

    def __init__(self, world, question):
        self._mine, self._left = world.rank == world.size - 1, question

    @property
    def asked(self):
        self._left -= 1
        return self._mine and self._left <= 0


def check_a_stop_during_an_evaluation_acts_at_once_and_is_made_up_for(world):
    settings = {"eval_every": 2, "num_steps": 6, "run_dir": folder(world) / "run"}
    stops = {"stop_signal": StopsAt(world, 3), "code": PREEMPTED}  # two steps, then the evaluation
    ended = fit(world, Small, "saved at step 2", **settings, **stops)
    assert ended.checkpoints == ["step-00000002"]
    again = fit(world, **settings)
    assert not world.is_chief or again.evaluated == [2, 4, 6]
    same(again.weights(), fit(world, eval_every=2, num_steps=6).weights())


def check_a_stop_saves_the_step_it_names(world):
    # The step that was under way when the votes were counted; the last is in the records.
    for question, step, log_every in ((1, 2, 2), (3, 4, 9)):
        stops = {"stop_signal": StopsAt(world, question), "code": PREEMPTED}
        ended = fit(
            world, Small, f"saved at step {step}", num_steps=9, log_every=log_every, **stops
        )
        assert ended.checkpoints == [f"step-{step:08d}"], ended.checkpoints
        if world.is_chief and step == 2:
            assert [r["step"] for r in ended.records] == [2]


def check_a_dry_run_that_is_stopped_does_not_claim_to_have_saved(world):
    stops = {"stop_signal": StopsAt(world, 3), "code": PREEMPTED}  # two steps, then the evaluation
    ended = fit(world, Small, "stop signal received", dry_run=True, num_steps=9, **stops)
    assert "saved" not in ended.message and not ended.folder.exists()


def check_a_stop_in_the_step_before_a_divergence_does_not_hide_it(world):
    bad = batch_ids(1)[0]

    class Infinite(Small):
        def training_example(self, sample, key):
            factor = tf.where(sample["id"] == bad, np.inf, 1.0)
            return super().training_example(sample | {"x": sample["x"] * factor}, key)

    settings = {"num_steps": 9, "log_every": 9, "max_bad_steps": 1, "code": DIVERGED}
    ended = fit(world, Infinite, stop_signal=StopsAt(world, 1), **settings)
    assert not ended.checkpoints
