"""Holds hvdkit.train.step.objective and hvdkit.train.optim on real ranks, by plain Keras.

A step's batch is the whole training set.
"""

from functools import partial
from types import SimpleNamespace

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from small_runs import CLASSES, FEATURES, Small, fit, folder, same

from hvdkit.data.source import Arrays
from hvdkit.ranks.world import kept_numbers, set_precision
from hvdkit.stop import BUG, DONE, PREEMPTED, WRONG_USE
from hvdkit.train.optim.groups import Group
from hvdkit.train.preprocessing import wide
from hvdkit.train.step import across

SAMPLES = 25  # uneven shares on 2 and 3 ranks, also of 5 micro-batches
STEPS = 3
EXACT = {
    "precision": "float64",
    "lr_policy": "constant",
    "momentum": 0.9,
    "warmup_steps": 0,
    "global_batch_size": SAMPLES,
    "num_steps": STEPS,
    "eval_every": STEPS,
}
# For tasks with optimizers of their own.
WITHOUT_MOMENTUM = {name: value for name, value in EXACT.items() if name != "momentum"}


def samples(seed: int) -> Arrays:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(SAMPLES, FEATURES))
    weights = np.where(
        draw.uniform(size=(SAMPLES, 2)) < 0.3, draw.uniform(size=(SAMPLES, 2)), 0.0
    )
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
        scores = outputs[:, :CLASSES]
        box = outputs[:, CLASSES:]
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
        return {
            "label": (entropy, tf.ones_like(entropy)),
            "box": (tf.square(box - 1.0), weights),
            "size": (tf.abs(box[:, 0]), tf.cast(labels == 0, box.dtype), 0.3),
        }

    def sums(self, outputs, targets):
        return super().sums(outputs[:, :CLASSES], targets[0])


def means_of(task, outputs, targets) -> dict[str, tf.Tensor]:
    means = {}
    for name, (losses, weights, *factor) in task.loss(outputs, targets).items():
        total = tf.reduce_sum(losses * weights)
        if factor:
            total *= factor[0]
        means[name] = total / tf.reduce_sum(weights)
    return means


def targets_of(data: Arrays):
    return tf.constant(data._arrays["y"]), tf.constant(data._arrays["weights"])


@kept_numbers()
def reference(world, task, make) -> tuple[keras.Model, list, dict]:
    """One process, one batch a step: the model, each step's terms, those of the second data."""
    folder(world)  # chooses the threads first
    set_precision("float64")
    train, val = task.sources()
    model = task.build_model()
    rule = make()
    steps = []
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            means = means_of(
                task, model(train._arrays["x"], training=True), targets_of(train)
            )
            loss = tf.add_n(list(means.values()))
        rule.apply(
            tape.gradient(loss, [v.value for v in model.trainable_variables]),
            model.trainable_variables,
        )
        steps.append({name: float(mean) for name, mean in means.items()})
    last = means_of(task, model(val._arrays["x"]), targets_of(val))
    return model, steps, {name: float(mean) for name, mean in last.items()}


def sgd():
    return keras.optimizers.SGD(0.05, momentum=np.float64(0.9))


def slow_check_terms_are_divided_by_their_own_global_counts(world):
    """By accumulation and with virtual ranks too; each is logged, and their sum is the loss."""
    model, steps, last = reference(world, Terms(None), sgd)
    for settings, near in (
        ({}, 1e-12),
        ({"accumulation_steps": 5, "pack_bytes": 99}, 1e-12),
        ({"virtual_ranks": 4}, 1e-7),
    ):
        ended = fit(world, Terms, **EXACT | {"eval_batch_size": 5} | settings)
        same(ended.weights(), [v.numpy() for v in model.variables], near)
        if world.is_chief:
            records = [record for record in ended.records if "loss" in record]
            for record, means in zip(records, steps, strict=True):
                same([record[f"loss/{name}"] for name in means], means.values(), near)
                same([record["loss"]], [sum(means.values())], near)
            scored = ended.records[-1]
            same([scored[f"eval_loss/{name}"] for name in last], last.values(), near)
            same([scored["eval_loss"]], [sum(last.values())], near)


@tf.custom_gradient
def shrunk(x):
    """The gradient of a batch has norm 1: its samples' gradients depend on each other."""
    return tf.identity(x), lambda up: tf.math.l2_normalize(up, epsilon=1e-9)


def slow_check_terms_that_mix_samples_or_differ_between_ranks_are_refused(world):
    if world.size != 2:  # the checks are the same on any number of ranks
        return

    class Boxes(Terms):
        """One term, whose losses `change` changes."""

        def loss(self, outputs, targets):
            losses, weights = super().loss(outputs, targets)["box"]
            return {"box": (self.change(losses), weights)}

    class Mixed(Boxes):
        def change(self, losses):
            return losses * tf.reduce_mean(losses)

    class Shrunk(Boxes):
        def change(self, losses):
            return shrunk(losses)

    class NamedByRank(Terms):
        def loss(self, outputs, targets):
            return {f"box{world.rank}": super().loss(outputs, targets)["box"]}

    mixed = ("loss/box of", "in two halves", "across.gather")
    fit(world, Mixed, *mixed, code=WRONG_USE, **EXACT)
    fit(
        world,
        Shrunk,
        "gradient by the outputs",
        "in two halves",
        code=WRONG_USE,
        **EXACT,
    )
    fit(world, NamedByRank, "step.totals.box0", code=BUG, **EXACT)


def own_train(run, change):
    """Trains with run.loss of other losses than the task's, which mix no samples."""

    def losses(micro):
        outputs = run.context.model(micro["inputs"], training=True)[:, 0]
        each = tf.square(change(outputs))
        return each, tf.ones_like(each)

    @run.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = run.loss(batch, losses)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **run.reduction)
        return run.update(tape.gradient(loss, run.weights))

    for batch in run.batches():
        run.after_step(step(batch))


def slow_check_own_losses_that_mix_samples_are_refused(world):
    for change, name in (
        (lambda x: x - tf.reduce_mean(x), "losses"),
        (shrunk, "gradient"),
        (tf.identity, ""),
    ):
        train = partial(
            fit, world, Terms, own_train=partial(own_train, change=change), **EXACT
        )
        if name and world.size > 1:
            train(f"run.loss(batch, losses): {name} of", "parts", code=WRONG_USE)
        else:
            train(code=DONE)


def contrast(outputs, gather, places):
    """Each sample's first half against all samples' second halves, and the labels of all."""
    first, second = tf.split(outputs[:, :4], 2, -1)
    logits = first @ tf.transpose(gather(second)) * 3.0
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(places(first), logits)
    everyone = gather(second)
    # tf.gather makes the gradient come as rows.
    hardest = tf.reduce_max(tf.gather(everyone, tf.range(tf.shape(everyone)[0])))
    return {
        "contrast": (losses, 1 + tf.square(tf.stop_gradient(first[:, 0]))),
        "hardest": (tf.square(hardest - second[:, 0]), tf.ones_like(losses), 0.5),
    }


class Contrastive(Terms):
    def loss(self, outputs, targets):
        return contrast(outputs, across.gather, across.places)


def slow_check_gathered_rows_give_the_gradient_of_the_global_loss(world):
    class Alone(Terms):
        def loss(self, outputs, targets):
            return contrast(outputs, tf.identity, lambda x: tf.range(len(x)))

    model, steps, last = reference(world, Alone(None), sgd)
    ended = fit(world, Contrastive, eval_batch_size=SAMPLES, **EXACT)
    same(ended.weights(), [v.numpy() for v in model.variables], 1e-12)
    if world.is_chief:
        same(ended.losses, [sum(means.values()) for means in steps], 1e-12)
        same([ended.records[-1]["eval_loss"]], [sum(last.values())], 1e-12)
    # 5 virtual ranks, on fewer: sums are of whole numbers.
    virtual = fit(world, Contrastive, virtual_ranks=5, **EXACT)
    same(virtual.weights(), ended.weights(), 1e-6)


def slow_check_rows_that_cannot_be_gathered_are_refused(world):
    if world.size != 2:
        return

    def calls(function):
        """A task whose loss calls function(outputs) too."""

        class Calls(Terms):
            def loss(self, outputs, targets):
                function(outputs)
                return super().loss(outputs, targets)

        return Calls

    def twice(x):
        return across.gather(across.gather(x)[: x.shape[0]])

    def in_a_tape(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            products = tf.reduce_sum(x @ tf.transpose(across.gather(x)))
        return tape.gradient(products, x)

    whole_numbers = calls(lambda x: across.gather(tf.argmax(x, -1)))
    fit(world, whole_numbers, virtual_ranks=5, **EXACT)
    for task, settings, words in (
        (
            calls(in_a_tape),
            {"virtual_ranks": 5},
            ("no gradient of its own", "leave out"),
        ),
        (
            calls(across.gather),
            {"virtual_ranks": 5, "jit": True},
            ("--jit", "leave out one"),
        ),
        (
            calls(across.gather),
            {"accumulation_steps": 5},
            ("--accumulation_steps=5", "leave it out"),
        ),
        (calls(lambda x: across.gather(x[:1])), {}, ("a row for each",)),
        (calls(twice), {"virtual_ranks": 5}, ("comes from gathered rows", "leave out")),
        (calls(lambda x: tf.map_fn(across.gather, x[None])), {}, ("branch or a loop",)),
        (calls(hvd.allgather), {}, ("HorovodAllgather", "across.gather")),
        (
            calls(lambda x: tf.map_fn(hvd.allreduce, x)),
            {},
            ("HorovodAllreduce", "mean over ranks"),
        ),
    ):
        fit(world, task, *words, code=WRONG_USE, **EXACT | settings)

    class Sums(Terms):
        def sums(self, outputs, targets):
            return {"x": tf.reduce_sum(hvd.allreduce(outputs))}

    fit(world, Sums, "in evaluation, calls", code=WRONG_USE, **EXACT)


class Signs(keras.optimizers.Optimizer):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(
            variable, tf.sign(gradient) * tf.cast(learning_rate, gradient.dtype)
        )


def rules(beta=0.5, **average):
    return [
        keras.optimizers.Muon(0.05, **average),
        keras.optimizers.Lion(0.05, weight_decay=0.1, **average),
        keras.optimizers.Adam(0.05, beta_1=beta, beta_2=0.9, clipnorm=0.1, **average),
        Signs(0.05, **average),
    ]


def nesterov():
    return keras.optimizers.SGD(0.05, momentum=0.8, nesterov=True, weight_decay=0.1)


class InTurns:
    """The reference of groups: optimizers of plain Keras, one after the other."""

    def __init__(self, **average):
        self.rules = rules(**average)
        self.rules[2].learning_rate.assign(np.float64(0.05) * 0.1)

    def apply(self, grads, variables):
        for rule, gradient, variable in zip(self.rules, grads, variables):
            rule.apply([gradient], [variable])


class Grouped(Terms):
    beta = 0.5  # beta_1 of the third group
    rate = 0.1  # of the third group

    def optimizer(self, model):
        first, second, third, _ = model.trainable_variables
        muon, lion, adam, signs = rules(self.beta)
        return [
            Group([first], muon, 1),
            Group(lambda variable: variable is second, lion, 1),
            Group([third], adam, self.rate),
            Group(lambda variable: True, signs, 1.0),
        ]


def slow_check_a_tasks_optimizers_are_those_of_plain_keras_and_resume(world):
    class Nesterov(Terms):
        def optimizer(self, model):
            return nesterov()

    train = partial(fit, world, base_lr=0.05, **WITHOUT_MOMENTUM)
    for task, rule in ((Grouped, InTurns), (Nesterov, nesterov)):
        model, _, _ = reference(world, Terms(None), rule)
        first = train(task, num_steps=1)
        ended = train(task, run_dir=first.folder)  # resumes
        same(ended.weights(), [v.numpy() for v in model.variables], 1e-12)


def check_averages_of_groups_are_kerass_and_resume_and_a_changed_rule_is_named(world):
    settings = WITHOUT_MOMENTUM | {"base_lr": 0.05, "ema_decay": 0.5, "eval_every": 1}
    train = partial(fit, world, **settings)
    folder(world)  # chooses the threads first
    set_precision("float64")
    turns = InTurns(use_ema=True, ema_momentum=0.5)
    model, _, _ = reference(world, Terms(None), lambda: turns)
    first = train(Grouped, num_steps=1)
    ended = train(Grouped, run_dir=first.folder)
    same(ended.weights(), [v.numpy() for v in model.variables], 1e-12)
    averages = [rule._model_variables_moving_average[0].numpy() for rule in turns.rules]
    assert not np.allclose(averages[0], model.variables[0], rtol=1e-6)
    model.set_weights(averages)
    _, val = Terms(None).sources()
    scored = sum(
        means_of(Terms(None), model(val._arrays["x"]), targets_of(val)).values()
    )
    if world.is_chief:
        state = ended.state(STEPS)
        saved = [state[name] for name in sorted(state) if name.startswith("ema/")]
        same(saved, averages, 1e-12)
        same([ended.records[-1]["eval_loss"]], [scored.numpy()], 1e-12)

    class Other(Grouped):
        beta = 0.6
        rate = 0.2

    again = train(Other, run_dir=first.folder, num_steps=STEPS + 1)
    note = "the task's optimizer: group 2's beta_1 was 0.5, is 0.6, group 2's rate was 0.1, is 0.2"
    assert (note in again.printed) == world.is_chief, again.printed
    assert "the task's optimizer:" not in ended.printed


def check_a_tasks_schedule_that_changed_is_named(world):
    def steady(rate):
        class Steady(Small):
            def schedule(self, config):
                return lambda step: rate

        return Steady

    first = fit(world, steady(0.1), num_steps=1)
    again = fit(world, steady(0.1), run_dir=first.folder, num_steps=2)
    assert "the task's schedule:" not in again.printed
    ended = fit(world, steady(0.2), run_dir=first.folder, num_steps=3)
    words = "the task's schedule: rate after 0 steps was 0.1, is 0.2"
    assert (words in ended.printed) == world.is_chief, ended.printed


PLATEAU = EXACT | {
    "lr_policy": "plateau",
    "base_lr": 2.0,
    "num_steps": 7,
    "eval_every": 1,
    "plateau_patience": 1,
    "plateau_factor": 0.5,
    "plateau_min_delta": 0.01,
    "plateau_cooldown": 2,
    "warmup_steps": 2,
}


PARTS = [
    f"plateau/{name}" for name in ("factor", "best", "waited", "resting", "judged")
]


class Follows:
    """The part of a model that Keras's callback uses: an optimizer's rate."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


class ByPlateau:
    """The reference: plain Keras, its callback called with the second data's accuracy."""

    def __init__(self):
        self.rule = keras.optimizers.SGD(2.0, momentum=np.float64(0.9))
        self.callback = keras.callbacks.ReduceLROnPlateau(
            "score", patience=1, factor=0.5, min_delta=0.01, cooldown=2, mode="max"
        )
        self.callback.set_model(Follows(keras.optimizers.SGD(2.0)))
        self.callback.on_train_begin()
        self.rates = []

    def run(self, task):
        model = task.build_model()
        weights = model.trainable_variables
        train, val = task.sources()
        for step in range(1, PLATEAU["num_steps"] + 1):
            rate = float(self.callback.model.optimizer.learning_rate) * min(step / 2, 1)
            self.rates.append(rate)
            self.rule.learning_rate.assign(rate)
            with tf.GradientTape() as tape:
                outputs = model(train._arrays["x"], training=True)
                means = means_of(task, outputs, targets_of(train))
                loss = tf.add_n(list(means.values()))
            self.rule.apply(tape.gradient(loss, [v.value for v in weights]), weights)
            sums = task.sums(model(val._arrays["x"]), targets_of(val))
            score = task.metrics({name: float(value) for name, value in sums.items()})
            self.callback.on_epoch_end(step, {"score": score["accuracy"]})
        return model


def check_the_plateau_policy_is_kerass_also_after_interruptions(world):
    """A run that goes on, one that ended after an evaluation, two that a signal stopped."""
    folder(world)
    set_precision("float64")
    expected = ByPlateau()
    model = expected.run(Terms(None))
    assert len({*expected.rates[2:]}) > 2, expected.rates
    weights = [v.numpy() for v in model.variables]
    whole = fit(world, Terms, **PLATEAU)
    same(whole.weights(), weights, 1e-9)
    assert (
        "the learning rate is lowered from 2 to 1:" in whole.printed
    ) == world.is_chief
    rarely = fit(world, Terms, **PLATEAU | {"eval_every": 2})
    for uninterrupted, changes, is_stopped in (
        (whole, {"num_steps": 4}, False),  # evaluated, its score in the checkpoint
        (whole, {}, True),  # at an evaluation step, which the rerun evaluates
        (rarely, {"eval_every": 2}, True),  # between two evaluations
        (rarely, {"eval_every": 2, "num_steps": 4}, False),
    ):
        train = partial(fit, world, Terms, **PLATEAU | changes)
        first = train(
            code=PREEMPTED if is_stopped else DONE,
            stop_signal=SimpleNamespace(asked=is_stopped),
        )
        ended = train(run_dir=first.folder, num_steps=7)
        # The rate is 2, and sums of three ranks have no fixed order.
        same(ended.weights(), uninterrupted.weights(), 1e-9)
        if world.is_chief:
            state = ended.state(7)
            expected_state = uninterrupted.state(7)
            same(
                [state[name] for name in PARTS],
                [expected_state[name] for name in PARTS],
            )


def check_rounding_of_16_bits_is_no_dependence_between_samples(world):
    """Of a transformer's biases, of which some gradients cancel out."""

    class Attention(Small):
        def sources(self):
            sets = []
            for seed, size in ((1, 40), (2, 8)):
                draw = np.random.default_rng(seed)
                x = draw.normal(size=(size, 64, 32)).astype(np.float32)
                y = draw.integers(0, CLASSES, size).astype(np.int32)
                sets.append(Arrays(x=x, y=y))
            return sets

        def build_model(self):
            x = y = keras.Input((64, 32))
            for _ in range(3):
                z = keras.layers.LayerNormalization()(y)
                y = y + keras.layers.MultiHeadAttention(4, 8)(z, z)
                z = keras.layers.LayerNormalization()(y)
                y = y + keras.layers.Dense(32)(keras.layers.Dense(64, "gelu")(z))
            y = keras.layers.LayerNormalization()(y)
            l2 = keras.regularizers.L2(1e-4)
            y = keras.layers.GlobalAveragePooling1D(activity_regularizer=l2)(y)
            return keras.Model(x, keras.layers.Dense(CLASSES, dtype=wide())(y))

    fit(
        world,
        Attention,
        precision="bfloat16",
        global_batch_size=8,
        accumulation_steps=2 if world.size == 1 else 1,
        num_steps=1,
        seed=1,
    )
