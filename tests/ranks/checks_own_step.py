"""Holds hvdkit.train.step.step: a step of one's own on real ranks computes what one process does.

The references are written anew here, in plain Keras.
"""

from functools import partial
from typing import ClassVar
from unittest import mock

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from small_runs import (
    CLASSES,
    FEATURES,
    Small,
    classifier,
    fit,
    folder,
    numbers,
    same,
)

from hvdkit import logs
from hvdkit.data.sampler import Sampler
from hvdkit.ranks.world import kept_numbers, set_precision
from hvdkit.stop import BUG, DONE, WRONG_USE
from hvdkit.train.layers import batch_norm
from hvdkit.train.step import across

SIZE = 13  # samples: shares of 7 and 6
KEPT = 20  # rows of the queue
WIDTH = 4  # units of a key
STEPS = 3
EXACT = {
    "precision": "float64",
    "lr_policy": "constant",
    "momentum": 0.0,
    "base_lr": 0.1,
    "warmup_steps": 0,
    "global_batch_size": SIZE,
    "num_steps": STEPS,
    "seed": 1,
}

EXACT_TURNS = {name: EXACT[name] for name in EXACT if name != "num_steps"}


def network(seed: int) -> keras.Model:
    x = keras.Input((FEATURES,))
    y = keras.layers.Dense(5, activation="tanh")(x)
    model = keras.Model(x, keras.layers.Dense(WIDTH)(y))
    draw = np.random.default_rng(seed)
    model.set_weights([draw.normal(size=v.shape) for v in model.variables])
    return model


class Own(Small):
    """Every step takes all samples; a slow network, a queue, a centre, a counter."""

    combines: ClassVar = {}

    def __init__(self, config):
        super().__init__(config)
        draw = np.random.default_rng(2)
        self.slow = network(4)
        self.slow.trainable = False
        rows = draw.normal(size=(KEPT, WIDTH))
        self.queue = tf.Variable(rows, trainable=False, name="queue")
        self.centre = tf.Variable(np.zeros(WIDTH), trainable=False, name="centre")
        self.count = tf.Variable(0, trainable=False, dtype=tf.int64, name="count")

    def sources(self):
        return numbers(1, SIZE), numbers(2, 5)

    def training_example(self, sample, key):
        return {"inputs": tf.cast(sample["x"], tf.float64), "targets": sample["y"]}

    def build_model(self):
        return network(3)

    def loss(self, outputs, targets):
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)
        return each, tf.ones_like(each)


def summed(run, tape, loss, **names):
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **run.reduction)
    return tape.gradient(loss, run.weights, **names)


def training(make, run) -> None:
    """train.py's loop, with the step of `make(run)`."""
    step = run.make_step(make)
    for batch in run.batches():
        run.after_step(step(batch))


def trained(world, make, *words, task=Own, code=None, **settings):
    code = code or (WRONG_USE if words else DONE)
    return fit(
        world,
        task,
        *words,
        own_train=partial(training, make),
        code=code,
        **EXACT | settings,
    )


class Alone:
    """The part of a run that a step calls, by plain Keras on one process and the whole batch."""

    def __init__(self, task=Own):
        self.task = task(None)
        self.model = network(3)
        self.weights = [v.value for v in self.model.trainable_variables]

    def mean(self, pair):
        losses, weights = pair
        return tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)

    def descend(self, gradients) -> None:
        for weight, gradient in zip(self.weights, gradients):
            weight.assign_sub(0.1 * gradient)


@kept_numbers()
def reference(world, step) -> Alone:
    """`step(alone, micro)` on each batch, in the order of the run's samples."""
    folder(world)  # chooses the threads first
    set_precision("float64")
    alone = Alone()
    samples = numbers(1, SIZE)._arrays
    sampler = Sampler(SIZE, SIZE, micro_batches=1, seed=1, rank=0, size=1)
    for number in range(STEPS):
        ids = sampler.local_samples(tf.constant(number, tf.int64))[0].numpy().ravel()
        inputs = tf.constant(np.float64(samples["x"][ids]))
        targets = tf.constant(samples["y"][ids])
        step(alone, {"inputs": inputs, "targets": targets}, number)
    return alone


def held(task) -> list[np.ndarray]:
    state = [*task.slow.variables, task.queue, task.centre, task.count]
    return [np.asarray(v) for v in state]


def require_equal(ended, task, alone, near=1e-12) -> None:
    same(ended.weights(), [v.numpy() for v in alone.model.variables], near, near)
    same(held(task), held(alone.task), near, near)


def kept() -> tuple[type, list]:
    """A task's class, and the list that its newest object will be in."""
    newest = []

    class Kept(Own):
        def __init__(self, config):
            super().__init__(config)
            newest[:] = [self]

    return Kept, newest


def moco(task, model, micro, gather):
    """Losses of a query against its key and the queue; the keys of all ranks join the queue."""
    query = model(micro["inputs"], training=True)
    key = task.slow(micro["inputs"], training=False)
    alike = tf.reduce_sum(query * key, -1, keepdims=True)
    logits = tf.concat([alike, query @ tf.transpose(task.queue)], -1)
    labels = tf.zeros(query.shape[0], tf.int32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    rows = gather(key)
    task.queue.assign(tf.concat([task.queue, rows], 0)[-KEPT:])
    task.centre.assign(0.9 * task.centre + 0.1 * tf.reduce_mean(rows, 0))
    task.count.assign_add(rows.shape[0])
    return losses, tf.ones_like(losses)


def follow(task, model) -> None:
    for slow, fast in zip(task.slow.variables, model.variables):
        slow.assign(0.9 * slow + 0.1 * fast)


def make_moco(run):
    def losses(micro):
        return moco(run.task, run.model, micro, across.gather)

    @run.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = run.loss(batch, losses)
        result = run.update(summed(run, tape, loss))
        follow(run.task, run.model)  # after the update, as MoCo and DINO have it
        return result

    return step


def check_state_of_gathered_rows_is_that_of_one_process(world):
    """MoCo's queue, DINO's centre and teacher; without a rule, and with `same`."""

    def alone_step(alone, micro, number):
        with tf.GradientTape() as tape:
            loss = alone.mean(moco(alone.task, alone.model, micro, tf.identity))
        alone.descend(tape.gradient(loss, alone.weights))
        follow(alone.task, alone.model)

    alone = reference(world, alone_step)
    for rules in ({}, {"task/queue/*": "same"}):
        task, newest = kept()
        task.combines = rules
        ended = trained(world, make_moco, task=task)
        require_equal(ended, newest[0], alone)


def check_rules_for_gathered_rows_are_refused(world):
    if world.size == 1:
        return
    for name, rule in (("queue", "concatenate"), ("count", "sum")):

        class Wrong(Own):
            combines: ClassVar = {f"task/{name}/*": rule}

        trained(
            world, make_moco, name, "gathered already", "leave the rule out", task=Wrong
        )


def slow_check_rules_for_what_the_step_itself_changes_hold_or_are_refused(world):
    def make(run, when):
        @run.function
        def step(batch):
            if when == "before":
                run.task.centre.assign_add(
                    tf.reduce_mean(batch["inputs"][0], 0)[:WIDTH]
                )
            with tf.GradientTape() as tape:
                loss = run.loss(batch)
            result = run.update(summed(run, tape, loss))
            if when == "after":
                run.task.centre.assign_add(
                    tf.reduce_mean(batch["inputs"][0], 0)[:WIDTH]
                )
            return result

        return step

    task, newest = kept()
    x = np.float64(numbers(1, SIZE)._arrays["x"])[:, :WIDTH]
    for when in ("before", "after"):
        task.combines = {"task/centre/*": "mean"}
        trained(world, partial(make, when=when), task=task)
        same(newest[0].centre.numpy(), STEPS * np.mean(x, 0), 1e-12, 1e-12)
    if world.size > 1:
        task.combines = {"task/centre/*": "sum"}
        trained(
            world, partial(make, when="after"), "task/centre", "another rule", task=task
        )
        # Nor may it be of each rank's samples without a rule.
        for when in ("before", "after"):
            trained(world, partial(make, when=when), "task/centre", "by the samples")


class Counts(keras.layers.Layer):
    """A slow average of how many samples there were; it passes its input on."""

    combines: ClassVar = {"counts": ("sum", 0.9)}

    def build(self, shape):
        self.counts = self.add_weight(
            shape=(), initializer="ones", trainable=False, name="counts"
        )

    def call(self, x, training=False):
        if training:
            samples = tf.cast(tf.shape(x)[0], self.counts.dtype)
            self.counts.assign(0.9 * self.counts + samples)
        return x


class Turns(Small):
    """Two terms, of a head each; the counting layer stands before the first head alone."""

    def build_model(self):
        x = keras.Input((FEATURES,))
        body = keras.layers.Dense(4, activation="tanh")(x)
        heads = [Counts()(body), body]
        return keras.Model(x, [keras.layers.Dense(3)(head) for head in heads])

    def loss(self, outputs, targets):
        return super().loss(outputs[0], targets)

    def sums(self, outputs, targets):
        return super().sums(outputs[0], targets)


def of_head(run, place, micro):
    """The loss of one head, of which the other one's layers are not called."""
    body, counts, *heads = [
        layer
        for layer in run.model.layers
        if isinstance(layer, (keras.layers.Dense, Counts))
    ]
    if isinstance(counts, keras.layers.Dense):
        raise AssertionError("the layers stand in another order")
    features = body(micro["inputs"])
    if place == 0:
        features = counts(features, training=True)
    logits = heads[place](features)
    losses = keras.losses.sparse_categorical_crossentropy(
        micro["targets"], logits, from_logits=True
    )
    return losses, tf.ones_like(losses)


def check_state_of_one_turn_is_not_combined_in_the_other(world):
    """What a turn's forward pass leaves as it is must not be added up over ranks."""
    newest = []

    def train(run):
        steps = []
        for place in range(2):

            @run.function
            def step(batch, place=place):
                with tf.GradientTape() as tape:
                    loss = run.loss(batch, partial(of_head, run, place))
                return run.update(summed(run, tape, loss))

            steps.append(step)
        (counts,) = [x for x in run.model.layers if isinstance(x, Counts)]
        for batch in run.batches():
            run.after_step(steps[run.step % 2](batch))
            newest.append(float(counts.counts))

    fit(world, Turns, own_train=train, num_steps=4, **EXACT_TURNS)
    expected = [1.0]
    for step in range(4):
        expected.append(0.9 * expected[-1] + SIZE if step % 2 else expected[-1])
    np.testing.assert_allclose(newest, expected[1:], rtol=1e-9)


def check_a_term_that_is_not_differentiated_gives_no_gradient(world):
    """Not zeros, by which momentum and decay would move its weights; also in micro-batches."""
    connected = []

    def train(run):
        @run.function
        def step(batch):
            def both(micro):
                return {name: of_head(run, i, micro) for i, name in enumerate("ab")}

            with tf.GradientTape() as tape:
                means = run.losses(batch, both)
            tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **run.reduction)
            gradients = tape.gradient(means["b"], run.weights)
            connected.append([gradient is not None for gradient in gradients])
            return run.update(gradients)

        for batch in run.batches():
            run.after_step(step(batch))

    for steps in (1, 2):
        connected.clear()
        fit(
            world,
            Turns,
            own_train=train,
            accumulation_steps=steps,
            num_steps=1,
            **EXACT_TURNS | {"global_batch_size": 12},
        )
        assert connected[0] == [True, True, False, False, True, True], (
            steps,
            connected,
        )


def check_a_factor_that_begins_at_0_is_no_missing_gradient(world):
    """As of a discriminator that joins later; with micro-batches."""

    def make(run):
        @run.function
        def step(batch):
            with tf.GradientTape() as tape:
                loss = run.loss(batch)
                loss *= tf.cast(run.state.step > 0, loss.dtype)
            return run.update(summed(run, tape, loss))

        return step

    def train(run):
        step = make(run)
        for batch in run.batches():
            run.after_step(step(batch))

    fit(world, Small, own_train=train, accumulation_steps=2, num_steps=2)


def check_an_evaluation_in_which_ranks_would_meet_is_refused(world):
    """At a save rank 0 alone evaluates samples."""

    class Teacher(Small):
        def __init__(self, config):
            super().__init__(config)
            norm = keras.layers.BatchNormalization(center=False, scale=False)
            self.teacher = keras.Sequential([keras.Input((CLASSES,)), norm])

        def loss(self, outputs, targets):
            return super().loss(self.teacher(outputs, training=True), targets)

    if world.size > 1:
        words = ("the evaluation exchanges", "training=False")
        fit(world, Teacher, *words, code=WRONG_USE, bn_sync="full")
    else:
        fit(world, Teacher, bn_sync="full", num_steps=1)


def check_what_a_task_holds_normalizes_and_draws_as_the_model_does(world):
    """A teacher that is called in training."""
    made = []

    class Teacher(Small):
        def __init__(self, config):
            super().__init__(config)
            layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
            self.teacher = keras.Sequential([keras.Input((FEATURES,)), *layers])
            self.noise = keras.random.SeedGenerator(7)
            made.append(self)

    fit(world, Teacher, bn_sync="full", num_steps=1)
    task = made[-1]
    norm, drop = task.teacher.layers
    assert type(norm) is batch_norm.SyncBatchNormalization
    # Numbers of the task's own generator may change weights after the sum over ranks.
    for seed, different in ((drop.seed_generator, world.size), (task.noise, 1)):
        drawn = keras.random.uniform([4], seed=seed).numpy().tolist()
        everyone = world.gather_objects(drawn, "draws")
        assert len({tuple(draws) for draws in everyone}) == different


def check_a_step_that_is_not_finite_leaves_no_trace_of_what_the_step_itself_does(world):
    """The last rank's samples are no numbers at the second of three steps."""
    seen = []

    def train(run):
        task = run.task

        def losses(micro):
            last = world.rank == world.size - 1
            bad = tf.logical_and(run.state.step == 1, last)
            x = micro["inputs"] + tf.where(bad, tf.constant(np.nan, tf.float64), 0.0)
            return moco(task, run.model, {"inputs": x}, across.gather)

        @run.function
        def step(batch):
            with tf.GradientTape() as tape:
                loss = run.loss(batch, losses)
            result = run.update(summed(run, tape, loss))
            follow(task, run.model)
            task.count.assign_add(1)
            run.weights[0].assign(tf.clip_by_value(0.99 * run.weights[0], -1.0, 1.0))
            return result

        def arrays():
            return [*held(task), *(np.asarray(weight) for weight in run.weights)]

        for batch in run.batches():
            before = arrays()
            run.after_step(step(batch))
            seen.append((before, arrays()))

    fit(world, Own, own_train=train, **EXACT | {"num_steps": 3}, code=None)
    # The last step is tried before the first.
    (start, first), (also_first, second), *_ = seen
    assert not np.array_equal(start[0], first[0])
    same(also_first, first)
    same(second, first)


def annealed(run):
    def losses_of(ramp):
        def losses(micro):
            each, weights = run.task.loss(
                run.model(micro["inputs"], training=True), micro["targets"]
            )
            return each * ramp, weights

        return losses

    @run.function
    def step(batch):
        ramp = tf.minimum(tf.cast(run.state.step + 1, tf.float64) / 4, 1.0)
        with tf.GradientTape() as tape:
            loss = run.loss(batch, losses_of(ramp))
        return run.update(summed(run, tape, loss))

    return step


def spread(outputs):
    """0 where outputs are alike; it compares the samples of a batch."""
    return tf.reduce_sum(tf.math.reduce_variance(outputs, 0))


def check_what_compares_samples_later_or_under_a_zero_head_is_refused(world):
    """A term that grows from 0 with the step; a head that begins with zeros."""

    def grows(run):
        @run.function
        def step(batch):
            ramp = tf.minimum(tf.cast(run.state.step, tf.float64) / 2, 1.0)

            def losses(micro):
                outputs = run.model(micro["inputs"], training=True)
                each, weights = run.task.loss(outputs, micro["targets"])
                return each + ramp * spread(outputs), weights

            with tf.GradientTape() as tape:
                loss = run.loss(batch, losses)
            return run.update(summed(run, tape, loss))

        return step

    class Hidden(Small):
        """A head of zeros hides that the loss compares samples."""

        def build_model(self):
            return classifier(kernel_initializer="zeros")

        def loss(self, outputs, targets):
            each, weights = super().loss(outputs, targets)
            return each + tf.cast(spread(outputs), each.dtype), weights

    if world.size == 1:  # any loss is right there
        trained(world, grows)
    else:
        trained(world, grows, "samples together", "in two parts")
        fit(world, Hidden, "samples together", "in two halves", code=WRONG_USE)


def check_a_step_cannot_use_the_python_number_of_the_step(world):
    """A graph would keep it for ever."""

    def make(run):
        @run.function
        def step(batch):
            with tf.GradientTape() as tape:
                loss = run.loss(batch)
            slopes = summed(run, tape, loss)
            return run.update([slope * min(run.step / 2, 1.0) for slope in slopes])

        return step

    trained(world, make, "run.step is a number of Python", "run.state.step")


def check_an_operation_that_fails_in_a_step_is_told_in_one_sentence(world):
    if world.size > 1:  # the others would wait: the rank's process ends
        return

    class Fails(Small):
        """At the fourth step it reads a row that is not there."""

        def build_model(self):
            self.count = tf.Variable(0, trainable=False)
            return classifier()

        def loss(self, outputs, targets):
            each, weights = super().loss(outputs, targets)
            row = tf.gather(tf.zeros([3]), tf.cast(self.count, tf.int32))
            self.count.assign_add(1)
            return each + tf.cast(row, each.dtype), weights

    code = None
    with mock.patch.object(logs, "complain") as complain:
        try:
            fit(world, Fails, code=None, num_steps=20)
        except SystemExit as error:
            code = error.code
    (message,) = complain.call_args[0]
    assert code == BUG and "\n" not in message
    assert message.startswith("the step failed on rank 0, at step "), message
    assert "[0, 3)" in message, message


def slow_check_losses_may_use_a_tensor_of_the_step(world):
    def alone_step(alone, micro, number):
        with tf.GradientTape() as tape:
            outputs = alone.model(micro["inputs"], training=True)
            loss = (
                alone.mean(alone.task.loss(outputs, micro["targets"]))
                * (number + 1)
                / 4
            )
        alone.descend(tape.gradient(loss, alone.weights))

    alone = reference(world, alone_step)
    ended = trained(world, annealed)
    same(ended.weights(), [v.numpy() for v in alone.model.variables], 1e-12, 1e-12)
    plain = trained(world, annealed, global_batch_size=12)
    in_two = trained(world, annealed, global_batch_size=12, accumulation_steps=2)
    by_xla = trained(world, annealed, global_batch_size=12, jit=True)
    same(in_two.weights(), plain.weights(), 1e-12, 1e-12)
    same(by_xla.weights(), plain.weights(), 1e-12, 1e-12)


def sharp(run):
    """Sharpness-aware minimization (Foret et al. 2021): the gradient from a step up the slope."""

    @run.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.add_n(list(run.losses(batch).values()))
        slopes = summed(run, tape, loss)
        before = [tf.identity(weight) for weight in run.weights]
        for weight, slope in zip(run.weights, slopes):
            weight.assign_add(0.05 * slope / tf.linalg.global_norm(slopes))
        with tf.GradientTape() as tape:
            loss = tf.add_n(list(run.losses(batch).values()))
        slopes = summed(run, tape, loss)
        for weight, old in zip(run.weights, before):
            weight.assign(old)
        return run.update(slopes)

    return step


def check_sharpness_aware_minimization_is_that_of_one_process(world):
    def slopes_of(alone, micro):
        with tf.GradientTape() as tape:
            outputs = alone.model(micro["inputs"], training=True)
            loss = alone.mean(alone.task.loss(outputs, micro["targets"]))
        return tape.gradient(loss, alone.weights)

    def alone_step(alone, micro, number):
        slopes = slopes_of(alone, micro)
        before = [tf.identity(weight) for weight in alone.weights]
        for weight, slope in zip(alone.weights, slopes):
            weight.assign_add(0.05 * slope / tf.linalg.global_norm(slopes))
        slopes = slopes_of(alone, micro)
        for weight, old in zip(alone.weights, before):
            weight.assign(old)
        alone.descend(slopes)

    alone = reference(world, alone_step)
    ended = trained(world, sharp)
    same(ended.weights(), [v.numpy() for v in alone.model.variables], 1e-12, 1e-12)
    plain = trained(world, sharp, global_batch_size=12)
    in_two = trained(world, sharp, global_batch_size=12, accumulation_steps=2)
    same(in_two.weights(), plain.weights(), 1e-12, 1e-12)


def two_losses(outputs, targets):
    """With weights of their own: each has a count of its own."""
    first = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)
    second = -tf.square(outputs[:, 0] - tf.cast(targets, outputs.dtype))
    return {
        "first": (first, tf.ones_like(first)),
        "second": (second, tf.cast(targets > 0, outputs.dtype)),
    }


def surgery(first, second):
    """PCGrad (Yu et al. 2020), of two gradients: each without its part against the other."""
    dot = tf.add_n([tf.reduce_sum(a * b) for a, b in zip(first, second)])
    against = tf.minimum(dot, 0.0)
    first_share = against / tf.square(tf.linalg.global_norm(first))
    second_share = against / tf.square(tf.linalg.global_norm(second))
    return [a - second_share * b + b - first_share * a for a, b in zip(first, second)]


def projected(run, **names):
    def losses(micro):
        return two_losses(run.model(micro["inputs"], training=True), micro["targets"])

    @run.function
    def step(batch):
        with tf.GradientTape(persistent=True) as tape:
            means = run.losses(batch, losses)
        first = summed(run, tape, means["first"], **names)
        second = summed(run, tape, means["second"], **names)
        return run.update(surgery(first, second))

    return step


def slow_check_gradients_of_each_loss_are_those_of_one_process(world):
    def alone_step(alone, micro, number):
        with tf.GradientTape(persistent=True) as tape:
            terms = two_losses(
                alone.model(micro["inputs"], training=True), micro["targets"]
            )
            means = {name: alone.mean(pair) for name, pair in terms.items()}
        first = tape.gradient(means["first"], alone.weights)
        second = tape.gradient(means["second"], alone.weights)
        alone.descend(surgery(first, second))

    alone = reference(world, alone_step)
    ended = trained(world, projected)
    same(ended.weights(), [v.numpy() for v in alone.model.variables], 1e-12, 1e-12)
    generic = partial(projected, use_generic_names=True)
    trained(world, generic, "by one name", "use_generic_names")


def check_what_makes_weights_depend_on_the_ranks_is_refused(world):
    """Clipping by a rank's own norm; a mean over ranks of uneven shares; a sum of means."""
    if world.size == 1:
        return

    def clipped(run, norm=1e-3):
        @run.function
        def step(batch):
            with tf.GradientTape() as tape:
                loss = run.loss(batch)
            slopes, _ = tf.clip_by_global_norm(tape.gradient(loss, run.weights), norm)
            sums = []
            for number, slope in enumerate(slopes):
                sums.append(hvd.allreduce(slope, op=hvd.Sum, name=f"slope{number}"))
            return run.update(sums)

        return step

    def centred(run):
        @run.function
        def step(batch):
            with tf.GradientTape() as tape:
                loss = run.loss(batch)
            mean = tf.reduce_mean(batch["inputs"][0], 0)[:WIDTH]
            run.task.centre.assign_add(
                hvd.allreduce(mean, op=hvd.Average, name="centre")
            )
            return run.update(summed(run, tape, loss))

        return step

    trained(world, clipped, "gradient of", "linear")
    # No gradient of a few samples is so large.
    trained(world, partial(clipped, norm=50.0), "gradient of", "linear")
    trained(world, centred, "task/centre", "by the samples")
    trained(world, centred, global_batch_size=12)


class Adds(keras.layers.Layer):
    """Adds a loss of its inputs in training, by `make(x, gather)`."""

    def __init__(self, make, **kwargs):
        super().__init__(**kwargs)
        self.make = make

    def call(self, x, training=False):
        if training:
            self.add_loss(self.make(x, across.gather))
        return x


def balance(x, gather):
    """The loss of a mixture of experts: shares of the samples times mean probabilities."""
    gates = tf.nn.softmax(gather(x))
    chosen = tf.one_hot(tf.argmax(gates, -1), gates.shape[-1], dtype=gates.dtype)
    return 0.5 * tf.reduce_sum(tf.reduce_mean(chosen, 0) * tf.reduce_mean(gates, 0))


def adding(make) -> type:
    """A task whose model adds the loss `make(x, gather)` of its outputs."""

    class Adding(Own):
        def build_model(self):
            model = network(3)
            draws = keras.layers.Dropout(0.5)(model.output, training=True)
            added = Adds(make)(model.output)
            return keras.Model(model.input, added + 0.0 * draws)

    return Adding


def check_losses_that_two_calls_of_a_model_add_are_refused(world):
    """Keras would keep those of the second call; those of an inference are not meant to count."""

    def make(run, first_trains=True):
        def losses(micro):
            one = run.model(micro["inputs"], training=first_trains)
            other = run.model(-micro["inputs"], training=True)
            return tf.reduce_sum(tf.square(one - other), -1), tf.ones_like(one[:, 0])

        @run.function
        def step(batch):
            with tf.GradientTape() as tape:
                loss = run.loss(batch, losses)
            return run.update(summed(run, tape, loss))

        return step

    class Adds(Own):
        def build_model(self):
            model = network(3)
            penalty = keras.layers.ActivityRegularization(l2=0.01)
            return keras.Model(model.input, penalty(model.output))

    trained(world, make, "and Keras forgets these", "(tf.concat)", task=Adds)
    trained(world, partial(make, first_trains=False), task=Adds)


def check_losses_that_a_model_adds_are_means_over_samples_or_refused(world):
    for make, words in (
        (
            lambda x, gather: 0.01 * tf.reduce_sum(tf.square(x)),
            ("model adds", "mean over"),
        ),
        (lambda x, gather: balance(x, tf.identity), ("model adds", "across.gather")),
        (
            lambda x, gather: 0.01 * tf.math.reduce_variance(x),
            ("model adds", "mean over"),
        ),
        (lambda x, gather: 0.01 * tf.reduce_mean(tf.square(x)), ()),
        (balance, ()),
    ):
        words = words if world.size > 1 else ()
        fit(world, adding(make), *words, code=WRONG_USE if words else DONE, **EXACT)

    def alone_step(alone, micro, number):
        with tf.GradientTape() as tape:
            outputs = alone.model(micro["inputs"], training=True)
            loss = alone.mean(alone.task.loss(outputs, micro["targets"]))
            loss += balance(outputs, tf.identity)
        alone.descend(tape.gradient(loss, alone.weights))

    alone = reference(world, alone_step)
    ended = fit(world, adding(balance), **EXACT)
    weights = [v.numpy() for v in ended.model.trainable_variables]
    same(weights, [v.numpy() for v in alone.weights], 1e-12, 1e-12)


class Queued(Own):
    """The template's step: the loss keeps the queue, of gathered rows."""

    def loss(self, outputs, targets):
        rows = across.gather(tf.stop_gradient(outputs))
        logits = outputs @ tf.transpose(self.queue)
        labels = tf.cast(targets, tf.int64)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        self.queue.assign(tf.concat([self.queue, rows], 0)[-KEPT:])
        self.count.assign_add(tf.shape(rows, tf.int64)[0])
        return losses, tf.ones_like(losses)


def slow_check_state_of_rows_that_virtual_ranks_gather_is_that_of_one_process(world):
    def arrays(**settings):
        task, newest = kept()
        task.loss = Queued.loss
        ended = fit(world, task, **EXACT | settings)
        return [*ended.weights(), *held(newest[0])]

    plain = arrays(global_batch_size=12)
    virtual = arrays(global_batch_size=12, virtual_ranks=2)
    same(plain, virtual, 1e-6, 1e-6)

    class Ruled(Queued):
        combines: ClassVar = {"task/queue/*": "concatenate"}

    fit(
        world,
        Ruled,
        "queue",
        "gathered already",
        "leave the rule out",
        code=WRONG_USE,
        **EXACT | {"global_batch_size": 12, "virtual_ranks": 2},
    )


def slow_check_losses_that_use_samples_of_the_whole_batch_are_refused_in_micro_batches(
    world,
):
    """Right without: with --accumulation_steps each would get the first one's."""

    def make(run):
        @run.function
        def step(batch):
            first = run.task.slow(batch["inputs"][0], training=False)

            def losses(micro):
                outputs = run.model(micro["inputs"], training=True)
                each = tf.reduce_sum(tf.square(outputs - first), -1)
                return each, tf.ones_like(each)

            with tf.GradientTape() as tape:
                loss = run.loss(batch, losses)
            return run.update(summed(run, tape, loss))

        return step

    trained(world, make)
    trained(
        world,
        make,
        "run.loss(batch, losses): ",
        "in two parts",
        global_batch_size=12,
        accumulation_steps=2,
    )
