"""Holds hvdkit.evaluate.evaluator on real ranks: evaluations, and stops in the middle of them."""

import contextlib
import gc
from functools import partial
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from checks_runs import batch_ids
from scipy.special import log_softmax
from scipy.stats import pearsonr
from small_runs import CLASSES, Small, classifier, fit, folder, numbers, same, task_with
from tensorflow.python.data.ops import iterator_ops

from hvdkit.checkpoint.saver import Saver
from hvdkit.observe import report
from hvdkit.observe.telemetry import Telemetry
from hvdkit.stop import DIVERGED, PREEMPTED, WRONG_USE
from ranks import json_lines


def check_a_metric_that_the_task_holds_is_refused(world):
    class Holds(Small):
        def __init__(self, config):
            super().__init__(config)
            self.right = keras.metrics.SparseCategoricalAccuracy()

        def sums(self, outputs, targets):
            self.right.update_state(targets, outputs)
            return super().sums(outputs, targets)

    words = ("self.right, whose state goes back", "KerasMetrics(right=...)")
    fit(world, Holds, *words, code=WRONG_USE)


def check_an_evaluation_that_draws_without_a_key_is_refused(world):
    """Its scores would depend on the ranks, and on interruptions."""

    def noisy(outputs):
        return outputs + tf.random.normal(tf.shape(outputs))

    def predict(task, model, inputs):
        return noisy(model(inputs, training=False))

    def sums(task, outputs, targets):
        return Small.sums(task, noisy(outputs), targets)

    def per_sample(task, outputs, targets):
        return {"scores": noisy(outputs)}

    words = ("the evaluation draws random numbers (RandomStandardNormal)", "stateless")
    for method in (predict, sums, per_sample):
        task = task_with(**{method.__name__: method})
        fit(world, task, *words, code=WRONG_USE)

    class Seeded(Small):
        def build_model(self):
            self.seeds = keras.random.SeedGenerator(3)
            return super().build_model()

        def predict(self, model, inputs):
            outputs = model(inputs, training=False)
            return outputs + keras.random.normal(tf.shape(outputs), seed=self.seeds)

    fit(world, Seeded, num_steps=1)


def _errors(outputs, targets):
    return outputs[:, 0] - tf.cast(targets, outputs.dtype)


def _in_batch(task, outputs, targets):
    """How many find themselves in the batch: the loss compares samples as well."""
    hits = tf.argmax(outputs @ tf.transpose(outputs), -1) == tf.range(
        tf.shape(outputs, tf.int64)[0]
    )
    return {"hits": tf.math.count_nonzero(hits), "samples": tf.size(hits)}


def check_sums_that_do_not_add_up_are_refused(world):
    def with_sum(name, of_batch):
        def sums(task, outputs, targets):
            return Small.sums(task, outputs, targets) | {
                name: of_batch(outputs, targets)
            }

        return task_with(sums=sums)

    rmse = with_sum(
        "rmse", lambda *batch: tf.sqrt(tf.reduce_mean(tf.square(_errors(*batch))))
    )
    batches = with_sum("batches", lambda outputs, targets: tf.constant(1))
    most = with_sum("most", lambda *batch: tf.reduce_max(_errors(*batch)))
    for task, name in ((rmse, "rmse"), (batches, "batches"), (most, "most")):
        words = (
            f"the task's sums: {name} of 8 samples together is ",
            "in two halves",
            "`metrics`",
        )
        fit(world, task, *words, code=WRONG_USE)
    # Batches of one sample are halved by nobody.
    fit(world, batches, num_steps=1, eval_batch_size=1)

    def loss(task, outputs, targets):
        everyone = outputs @ tf.transpose(outputs)
        own = tf.range(tf.shape(outputs)[0])
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(own, everyone)
        return each, tf.ones_like(each)

    if world.size == 1:
        fit(world, task_with(loss=loss, sums=_in_batch), num_steps=1)

    def in_a_batch(task, outputs, targets):
        noise = tf.random.stateless_uniform(tf.shape(outputs), [1, 2])
        errors = tf.reduce_sum(outputs - tf.one_hot(targets, CLASSES))
        cancelled = tf.reduce_sum(outputs - tf.reduce_mean(outputs, -1, keepdims=True))
        counts = tf.histogram_fixed_width(outputs, [-1.0, 1.0], 5)
        return Small.sums(task, outputs, targets) | {
            "noise": tf.reduce_sum(noise),
            "errors": errors,
            "cancelled": cancelled,
            "counts": counts,
        }

    fit(world, task_with(sums=in_a_batch), num_steps=1)


def check_a_score_that_needs_several_samples_is_tried_later(world):
    class Correlates(Small):
        def per_sample(self, outputs, targets):
            return {"first": outputs[:, 0], "label": targets}

        def metrics(self, sums):
            related = pearsonr(sums["first"], sums["label"])
            return super().metrics(sums) | {"related": float(related.statistic)}

    ended = fit(world, Correlates, eval_every=3)
    if world.is_chief:
        assert "metrics cannot be tried with one sample" in ended.printed
        assert "eval_related" in ended.records[-1]


def check_a_failing_evaluation_loses_no_training(world):
    class Torn(Small):
        def evaluation_example(self, sample):
            fine = tf.debugging.Assert(sample["id"] != 13, ["sample 13 is torn"])
            with tf.control_dependencies([fine]):
                return {"inputs": tf.identity(sample["x"]), "targets": sample["y"]}

    gc.collect()
    gc.disable()
    try:
        ended = fit(
            world, Torn, "sample 13 is torn", code=WRONG_USE, eval_every=2, num_steps=6
        )
        # A pipeline that reads on is collected by any thread: by one that it waits for, both hang.
        kind = iterator_ops.OwnedIterator
        reading = [each for each in gc.get_objects() if isinstance(each, kind)]
    finally:
        gc.enable()

    class Fails(Small):
        def sums(self, outputs, targets):  # the last batch is of 8 samples
            few = tf.gather([0], tf.cast(tf.shape(targets)[0] == 8, tf.int32))
            return super().sums(outputs, targets) | {"few": few}

    line = Fails.sums.__code__.co_firstlineno + 1
    message = (
        "sample 12, 13, 14, 15, 16 and 3 more (counted from 0; inputs of shape [8, 6]): "
        f"checks_evaluation.py, line {line}: indices = 1 is not in"
    )
    settings = {"eval_every": 2, "eval_batch_size": 12}
    other = fit(world, Fails, message, code=WRONG_USE, **settings)
    assert other.checkpoints == ended.checkpoints == ["step-00000002"]
    # Mended and started again, the evaluation is made up for, and training goes on from there.
    again = fit(world, Small, eval_every=2, num_steps=6, run_dir=ended.folder)
    if world.is_chief:
        trained = [record["step"] for record in again.records if "loss" in record]
        assert again.evaluated == [2, 4, 6] and trained == [1, 2, 3, 4, 5, 6], (
            again.records
        )
    assert not reading  # here, as the other ranks go on


def slow_check_a_kill_between_log_and_score_loses_no_evaluation(world):
    """Whichever comes first at step 4 is done, the other is not."""
    called = []

    def killed(function):
        def call(self, step, *args, **keywords):
            called.append(getattr(step, "step", step))
            if called.count(4) == 2:
                raise RuntimeError("killed")
            function(self, step, *args, **keywords)

        return call

    train = partial(
        fit, world, eval_every=2, num_steps=8, run_dir=folder(world) / "run"
    )
    with (
        contextlib.suppress(RuntimeError),
        mock.patch.object(Saver, "add_score", killed(Saver.add_score)),
        mock.patch.object(Telemetry, "evaluation", killed(Telemetry.evaluation)),
    ):
        train()
    assert called == [2, 2, 4, 4]
    again = train()
    assert not world.is_chief or again.evaluated == [2, 4, 6, 8]


def slow_check_what_is_kept_of_each_sample_comes_once_and_in_order(world):
    class Keeps(Small):
        def evaluation_example(self, sample):
            return {
                "inputs": sample["x"],
                "targets": tf.stack([tf.cast(sample["y"], tf.int64), sample["id"]]),
            }

        def loss(self, outputs, targets):
            return super().loss(
                outputs, targets[..., 0] if targets.shape.rank == 2 else targets
            )

        def sums(self, outputs, targets):
            return super().sums(outputs, targets[:, 0])

        def per_sample(self, outputs, targets):
            return {"id": targets[:, 1]}

        def metrics(self, sums):
            return super().metrics(sums) | {
                "in_order": sums["id"].tolist() == [*range(20)]
            }

    ended = fit(world, Keeps, num_steps=1)
    assert "keep 8 bytes of each of 20 samples" in ended.printed or not world.is_chief
    assert not world.is_chief or ended.records[-1]["eval_in_order"] == 1.0

    class KeepsMuch(Keeps):
        def per_sample(self, outputs, targets):
            return {"id": tf.zeros([1, 2**24])}

    fit(
        world,
        KeepsMuch,
        "1.2 GiB: every rank holds them all, 1 GiB",
        code=WRONG_USE,
        num_steps=1,
    )

    class KeepsUnsigned(Keeps):
        def per_sample(self, outputs, targets):
            return {"id": tf.cast(targets[:, 1], tf.uint32)}

    fit(
        world,
        KeepsUnsigned,
        "has id, uint32",
        "that Horovod gathers",
        code=WRONG_USE,
        num_steps=1,
    )


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
            return {
                "accuracy": {2: np.nan, 3: np.inf}.get(
                    Faulty.scored, 0.1 * Faulty.scored
                )
            }

    ended = fit(world, Faulty, eval_every=1, num_steps=6, keep=1, early_stop_evals=3)
    best = "a score of NaN or infinity is never the best"
    assert ended.checkpoints == ["step-00000006"], best
    # Printed once, by one rank.
    notes = ended.printed.count(
        "note: no pictures: draw failed: RuntimeError: no fonts here"
    )
    assert notes == world.is_chief, ended.printed

    class Nan(Small):
        """Of outputs that are NaN one counts as the largest all the same."""

        def evaluation_example(self, sample):
            return {"inputs": sample["x"] * np.nan, "targets": sample["y"]}

    ended = fit(world, Nan, eval_every=1, num_steps=6, early_stop_evals=2)
    if world.is_chief:
        assert "no accuracy that is a number in 2 evaluations" in ended.printed
        none = (
            "no checkpoint is the best: accuracy was NaN or infinite at each evaluation"
        )
        assert none in ended.printed and ended.summary["no_best"] == none
        assert none in report.write(ended.folder).read_text()


def check_of_an_error_the_lowest_is_the_best(world):
    class Error(Small):
        """Its error falls to step 3, then rises."""

        main_metric = "error"
        main_metric_mode = "min"
        calls = 0

        def metrics(self, sums):
            Error.calls += 1
            return {"error": {1: 5.0, 2: 9.0, 3: 4.0, 4: 2.0}.get(Error.calls, 3.0)}

    train = partial(fit, world, eval_every=1, num_steps=8, keep=1, early_stop_evals=2)
    ended = train(Error)
    assert ended.checkpoints == ["step-00000003", "step-00000005"], ended.checkpoints
    if world.is_chief:
        message = "stopped early: no error below 2.0000, of step 3, in 2 evaluations"
        assert message in ended.printed, ended.printed
        start = json_lines(ended.folder / "starts.jsonl")[0]
        assert (start["score"], start["score_mode"]) == ("error", "min")
        assert ended.summary["main_metric"] == "error"
        assert ended.summary["main_metric_mode"] == "min"
        assert ended.summary["best_score"] == 2.0
        assert ended.summary["best_step"] == 3
        assert "best error: 2.0000, of step 3" in ended.printed
    again = train(Error, run_dir=ended.folder)
    assert not world.is_chief or again.summary["step"] == 5

    class ByLoss(Small):
        """The validation loss, which falls, may be the score itself."""

        main_metric = "loss"
        main_metric_mode = "min"

    ended = train(ByLoss, num_steps=4)
    assert ended.checkpoints == ["step-00000004"]
    # Which score is the best, and how often evaluations are made, may change.
    ByLoss.main_metric_mode = "max"
    again = train(
        ByLoss, run_dir=ended.folder, eval_every=2, num_steps=6, early_stop_evals=9
    )
    if world.is_chief:
        assert (
            "note: main_metric_mode was min, is max: the best is chosen anew"
            in again.printed
        )
        note = "--eval_every was 1, is 2: --early_stop_evals=9 ends the run 9 times 2 steps after"
        assert note in again.printed, again.printed
        assert again.summary["best_step"] == 4


def check_a_score_that_stays_ends_early_although_the_newest_is_the_best(world):
    """At the same step where the run was interrupted: by the first step that had it."""

    class Stays(Small):
        def metrics(self, sums):
            return {"accuracy": 0.5}

    train = partial(fit, world, Stays, eval_every=1, keep=1, early_stop_evals=3)
    first = train(num_steps=3)
    ended = train(num_steps=9, run_dir=first.folder)
    assert ended.checkpoints == ["step-00000004"], ended.checkpoints
    if world.is_chief:
        assert (
            ended.summary["exit_reason"] == "early stop"
            and ended.summary["best_step"] == 4
        )
        assert "no accuracy above 0.5000, of step 1, in 3 evaluations" in ended.printed


def slow_check_a_score_of_another_measure_counts_as_none(world):
    """A high score of picture centres does not end a run that scores whole ones; both are kept."""

    class Rises(Small):
        calls = 0

        def metrics(self, sums):
            # Each run's first call is its try-out; the first evaluation of the second gives none.
            Rises.calls += 1
            if self.config.eval_crop:
                return {"accuracy": 2 / Rises.calls}
            return {
                "accuracy": float("nan") if Rises.calls == 5 else 0.01 * Rises.calls
            }

    train = partial(fit, world, eval_every=1, keep=1, early_stop_evals=2)
    first = train(Rises, eval_crop=16, num_steps=2)
    ended = train(Rises, num_steps=5, run_dir=first.folder)
    assert ended.checkpoints == ["step-00000001", "step-00000005"], ended.checkpoints
    if world.is_chief:
        assert ended.summary["exit_reason"] == "done"
        # Its checkpoint is scored anew: as it is now measured.
        scores = {}
        for record in ended.records:
            if "eval_loss" in record:
                scores[record["step"]] = record["eval_accuracy"]
        assert list(scores) == [1, 2, 3, 4, 5] and scores[1] == 1.0, scores
        assert scores[2] is None and scores[3] < 1.0, scores
        note = (
            "the score of step 2 is of another measure (--eval_crop was 16, is 0): such"
        )
        assert ended.printed.count(note) == 1, ended.printed

    # Back to the first: its best is old, but it was not scored since.
    ended = train(Rises, eval_crop=16, num_steps=9, run_dir=first.folder)
    if world.is_chief:
        assert (
            ended.summary["exit_reason"] == "early stop" and ended.summary["step"] == 7
        )

    class Others(Rises):
        def sources(self):
            return numbers(1, 60), numbers(3, 20)

    ended = train(Others, num_steps=7, run_dir=first.folder)
    if world.is_chief:
        assert "the validation data's fingerprint was " in ended.printed
        assert ended.records[-1]["eval_accuracy"] > scores[5]


def check_a_validation_set_in_which_nothing_counts_is_refused(world):
    class Weightless(Small):
        def loss(self, outputs, targets):
            losses, weights = super().loss(outputs, targets)
            trains = tf.reduce_any(tf.shape(losses)[0] == [12, 6])  # on 1 rank, on 2
            return losses, weights * tf.cast(trains, weights.dtype)

    ended = fit(
        world, Weightless, "weights of the validation set are 0", code=WRONG_USE
    )
    assert not world.is_chief or ended.checkpoints == ["step-00000003"]

    class InTrainingAlone(Weightless):
        def loss(self, outputs, targets):
            main = Small.loss(self, outputs, targets)
            return {"main": main, "auxiliary": super().loss(outputs, targets)}

    ended = fit(world, InTrainingAlone)
    if world.is_chief:
        (evaluated,) = [line for line in ended.records if "eval_loss" in line]
        assert evaluated["eval_loss"] == evaluated["eval_loss/main"] > 0
        assert evaluated["eval_loss/auxiliary"] is None


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
    """Its loss takes a running mean off the outputs, as Centre does with inputs."""

    def build_model(self):
        self.seen = tf.Variable(tf.ones(CLASSES), trainable=False, name="seen")
        self.seen.combines = "mean"
        return classifier(keras.layers.Dense(5, bias_initializer="ones"), Centre())

    def loss(self, outputs, targets):
        terms = super().loss(outputs - self.seen, targets)
        self.seen.assign(0.5 * self.seen + 0.5 * tf.reduce_mean(outputs, 0))
        return terms


def check_notes_that_are_no_texts_are_refused(world):
    class Noted(Small):
        def notes(self, sums):
            return "one text"

    ended = fit(
        world, Noted, "the task's notes must return a list of texts", code=WRONG_USE
    )
    assert ended.checkpoints == ["step-00000003"]


def check_state_that_an_evaluation_changes_goes_back_after_each_batch(world):
    """Ranks have different batches: figures would depend on their number."""
    ended = fit(world, Centred, eval_every=3, eval_batch_size=4)
    val = numbers(2, 20)._arrays
    if world.is_chief:
        (seen,) = [
            array
            for name, array in ended.state(3).items()
            if name.startswith("task/seen")
        ]
        scores = log_softmax(ended.model(val["x"]).numpy() - seen, -1)
        loss = -np.mean(scores[np.arange(20), val["y"]])
        np.testing.assert_allclose(ended.records[-1]["eval_loss"], loss, 1e-6)


class StopsAt:
    """Asks the last rank to stop at its n-th question (a step or a part of an evaluation)."""

    def __init__(self, world, question):
        self._mine = world.rank == world.size - 1
        self._left = question

    @property
    def asked(self):
        self._left -= 1
        return self._mine and self._left <= 0


def check_a_stop_during_an_evaluation_acts_at_once_and_is_made_up_for(world):
    train = partial(fit, world, Small, eval_every=2, num_steps=6)
    run_dir = folder(world) / "run"
    # The first two questions are steps, the third is the evaluation.
    ended = train(
        "saved at step 2",
        run_dir=run_dir,
        stop_signal=StopsAt(world, 3),
        code=PREEMPTED,
    )
    assert ended.checkpoints == ["step-00000002"]
    again = train(run_dir=run_dir)
    assert not world.is_chief or again.evaluated == [2, 4, 6]
    same(again.weights(), train().weights())


def check_a_stop_saves_the_step_it_names(world):
    # The step that was under way when the votes were counted; the last is in the records.
    for question, step, log_every in ((1, 2, 2), (3, 4, 9)):
        ended = fit(
            world,
            Small,
            f"saved at step {step}",
            num_steps=9,
            log_every=log_every,
            stop_signal=StopsAt(world, question),
            code=PREEMPTED,
        )
        assert ended.checkpoints == [f"step-{step:08d}"], ended.checkpoints
        if world.is_chief and step == 2:
            assert [record["step"] for record in ended.records] == [2]


def check_a_dry_run_that_is_stopped_does_not_claim_to_have_saved(world):
    # The first two questions are steps, the third is the evaluation.
    ended = fit(
        world,
        Small,
        "stop signal received",
        dry_run=True,
        num_steps=9,
        stop_signal=StopsAt(world, 3),
        code=PREEMPTED,
    )
    assert "saved" not in ended.message and not ended.folder.exists()


def check_a_stop_in_the_step_before_a_divergence_does_not_hide_it(world):
    bad = batch_ids(1)[0]

    class Infinite(Small):
        def training_example(self, sample, key):
            factor = tf.where(sample["id"] == bad, np.inf, 1.0)
            return super().training_example(sample | {"x": sample["x"] * factor}, key)

    ended = fit(
        world,
        Infinite,
        stop_signal=StopsAt(world, 1),
        num_steps=9,
        log_every=9,
        max_bad_steps=1,
        code=DIVERGED,
    )
    assert not ended.checkpoints
