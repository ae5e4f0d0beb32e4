"""Objectives and optimizers on real ranks against plain Keras; run by test_objective.py.

A step's batch is the whole training set, so that the reference needs no order of samples.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from small_runs import CLASSES, FEATURES, Small, fit, folder, same

from hvdkit.data.source import Arrays
from hvdkit.ranks.world import set_precision
from hvdkit.stop import BUG, WRONG_USE

SAMPLES, STEPS = 14, 3  # uneven shares on 3 ranks
EXACT = {"precision": "float64", "lr_policy": "constant", "momentum": 0.9, "warmup_steps": 0}
EXACT |= {"global_batch_size": SAMPLES, "num_steps": STEPS, "eval_every": STEPS}


def samples(seed: int) -> Arrays:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(SAMPLES, FEATURES))
    weights = np.where(draw.uniform(size=(SAMPLES, 2)) < 0.3, draw.uniform(size=(SAMPLES, 2)), 0.0)
    return Arrays(x=x, y=np.argmax(x[:, :CLASSES], -1), weights=weights)


class Terms(Small):
    """Three terms: by sample, by place of which most have no weight, and one times a factor."""

    def sources(self):
        return samples(1), samples(2)

    def training_example(self, sample, key):
        return self.evaluation_example(sample)

    def evaluation_example(self, sample):
        return {"inputs": sample["x"], "targets": (sample["y"], sample["weights"])}

    def build_model(self):
        x = keras.Input((FEATURES,))
        y = keras.layers.Dense(5, activation="tanh")(x)
        model = keras.Model(x, keras.layers.Dense(CLASSES + 2)(y))
        draw = np.random.default_rng(3)
        model.set_weights([draw.normal(size=v.shape) for v in model.variables])
        return model

    def loss(self, outputs, targets):
        labels, weights = targets
        scores, box = outputs[:, :CLASSES], outputs[:, CLASSES:]
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
        return {
            "label": (entropy, tf.ones_like(entropy)),
            "box": (tf.square(box - 1.0), weights),
            "size": (tf.abs(box[:, 0]), tf.cast(labels == 0, box.dtype), 0.25),
        }

    def sums(self, outputs, targets):
        return super().sums(outputs[:, :CLASSES], targets[0])


def means_of(task, outputs, targets) -> dict[str, tf.Tensor]:
    """Each term's mean over these samples, times its factor."""
    found = {name: (*term, 1.0)[:3] for name, term in task.loss(outputs, targets).items()}
    return {n: f * tf.reduce_sum(e * w) / tf.reduce_sum(w) for n, (e, w, f) in found.items()}


def targets_of(data: Arrays):
    return tf.constant(data._arrays["y"]), tf.constant(data._arrays["weights"])


def reference(world, task, make) -> tuple[keras.Model, list, dict]:
    """One process, one batch a step: the model, each step's terms, those of the second data."""
    folder(world)  # chooses the threads first
    set_precision("float64")
    (x, more), model, steps = task.sources(), task.build_model(), []
    rule = make()
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            means = means_of(task, model(x._arrays["x"], training=True), targets_of(x))
            loss = tf.add_n(list(means.values()))
        rule.apply(
            tape.gradient(loss, [v.value for v in model.trainable_variables]),
            model.trainable_variables,
        )
        steps.append({n: float(v) for n, v in means.items()})
    last = means_of(task, model(more._arrays["x"]), targets_of(more))
    return model, steps, {n: float(v) for n, v in last.items()}


def sgd():
    return keras.optimizers.SGD(0.05, momentum=np.float64(0.9))


def check_terms_are_divided_by_their_own_global_counts(world):
    """By accumulation and with virtual ranks too; each is logged, and their sum is the loss."""
    model, steps, last = reference(world, Terms(None), sgd)
    for settings, near in (
        ({}, 1e-12),
        ({"accumulation_steps": 2}, 1e-12),
        ({"virtual_ranks": 4}, 1e-7),
        ({"deterministic": False, "pack_bytes": 99}, 1e-12),
    ):
        ended = fit(world, Terms, **EXACT | {"eval_batch_size": 5} | settings)
        same(ended.weights(), [v.numpy() for v in model.variables], near)
        if world.is_chief:
            records = [r for r in ended.records if "loss" in r]
            for record, means in zip(records, steps, strict=True):
                same([record[f"loss/{n}"] for n in means], means.values(), near)
                same([record["loss"]], [sum(means.values())], near)
            scored = ended.records[-1]
            same([scored[f"eval_loss/{n}"] for n in last], last.values(), near)
            same([scored["eval_loss"]], [sum(last.values())], near)


def _term(change):
    return lambda task, outputs, targets: change(Terms.loss(task, outputs, targets))


def check_terms_that_are_none_are_refused(world):
    for change, words in (
        (lambda terms: {}, ("at least one",)),
        (lambda terms: {"a/b": terms["box"]}, ("['a/b']", "letters")),
        (lambda terms: terms | {"box": terms["box"][0]}, ("loss 'box'", "must return two tensors")),
        (lambda terms: terms | {"box": (*terms["box"], terms["box"][0])}, ("'box'", "a factor")),
        (lambda terms: terms | {"box": (*terms["box"], float("nan"))}, ("'box'", "factor of nan")),
        (lambda terms: {f"box{world.rank}": terms["box"]}, ("step.totals.box0",)),
    ):
        task = type("Wrong", (Terms,), {"loss": _term(change)})
        differ = "step.totals.box0" in words
        if world.size > 1 or not differ:
            fit(world, task, *words, code=BUG if differ else WRONG_USE, **EXACT)
