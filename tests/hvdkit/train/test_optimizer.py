"""Update rules and averages against their formulas, by hand in NumPy."""

import dataclasses
import re
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from refusals import refused
from small_runs import same

from hvdkit.ranks.world import raw, set_precision
from hvdkit.run import context
from hvdkit.settings import Settings
from hvdkit.train.optim import optimizer, schedule
from hvdkit.train.optim.groups import Group
from hvdkit.train.optim.optimizer import SGD
from hvdkit.train.step import gradients
from hvdkit.train.step.gradients import is_kernel
from hvdkit.train.step.state import State

STEPS = 8
SKIPPED = (0, 4)  # these steps are not applied
EMA = 0.8
# What trains in `network`, in order; the loss does not depend on the last one.
NAMES = ["kernel", "bias", "gamma", "beta", "kernel", "bias"]
KERNELS = (0, 4)
UNUSED = 5
RULES = [("sgd", 0.0), ("sgd", 0.7), ("adam", 0.9), ("adamw", 0.9), ("lamb", 0.9)]
RULES += [("lars", 0.9), ("lars", 0.0)]


@pytest.fixture(autouse=True)
def float64():
    set_precision("float64")
    yield
    set_precision("float32")


def network() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2, kernel_initializer="zeros"),
        ]
    )
    assert [v.name for v in model.trainable_variables] == NAMES
    draw = np.random.default_rng(1)
    for variable in model.trainable_variables[:4]:
        variable.assign(draw.normal(size=variable.shape))
    return model


def slopes(model: keras.Model) -> list[list[np.ndarray]]:
    """Gradients by step and variable."""
    draw = np.random.default_rng(2)
    steps = []
    for _ in range(STEPS):
        steps.append([draw.normal(size=v.shape) for v in model.trainable_variables])
    return steps


def settings(rule: str, **others) -> Settings:
    config = dataclasses.replace(
        Settings(),
        optimizer=rule,
        base_lr=0.3,
        num_steps=STEPS,
        warmup_steps=3,
        precision="float64",
    )
    return dataclasses.replace(config, **others)


def train(config: Settings, model: keras.Model, slope: list) -> State:
    """Steps as training does them: rate from the schedule, L2, and not all of them applied."""
    state = State(model, optimizer.build(config, model), config.precision)
    rule = state.optimizer
    variables = model.trainable_variables
    rate = schedule.make(config, 1)

    @tf.function(autograph=False)
    def step(number, applied, grads):
        known = [g for i, g in enumerate(grads) if i != UNUSED]
        used = [v for i, v in enumerate(variables) if i != UNUSED]
        l2 = optimizer.l2_weight(config, rule)
        known, _ = gradients.finish(known, used, l2=l2, clip_norm=0.0)
        rule.learning_rate.assign(tf.cast(rate(number), rule.learning_rate.dtype))
        tf.cond(applied, lambda: state.apply(known, used), lambda: None)

    for number in range(STEPS):
        grads = [tf.cast(g, raw(v).dtype) for g, v in zip(slope[number], variables)]
        step(tf.constant(number, tf.int64), tf.constant(number not in SKIPPED), grads)
    return state


def averages_of(state: State) -> list[np.ndarray]:
    averages = []
    for group in state.averages:
        averages += [average.numpy() for _, average in group.pairs]
    return averages


@dataclasses.dataclass
class Constants:
    """What an update rule takes beside a weight, its gradient and its slots."""

    rate: float
    decay: float
    momentum: float
    is_kernel: bool
    t: int  # updates so far, with this one


def expected(config: Settings, weights: list, slope: list) -> tuple[list, list]:
    """Weights and their averages after the same steps; in-place changes of `weights`."""
    update = UPDATES[config.optimizer]
    m = [np.zeros_like(w) for w in weights]
    v = [np.zeros_like(w) for w in weights]
    averages = None
    t = 0
    for number in range(STEPS):
        if number in SKIPPED:
            continue
        t += 1
        rate = 0.3 * (1 - number / STEPS) ** 0.9 * min((number + 1) / 3, 1)
        for i, w in enumerate(weights):
            if i == UNUSED:
                continue
            constants = Constants(
                rate=rate,
                decay=config.weight_decay if i in KERNELS else 0.0,
                momentum=config.momentum,
                is_kernel=i in KERNELS,
                t=t,
            )
            w -= update(w, slope[number][i], m[i], v[i], constants)
        if averages is None:
            averages = [w.copy() for w in weights]
        averages = [EMA * a + (1 - EMA) * w for a, w in zip(averages, weights)]
    return weights, averages


def sgd(w, g, m, v, constants):
    m[...] = constants.momentum * m - constants.rate * (g + constants.decay * w)
    return -m


def adam_size(m, v, g, t, epsilon_hat):
    """Adam's update at rate 1; `epsilon_hat`: beside the uncorrected v (Kingma and Ba 2015)."""
    m[...] = 0.9 * m + 0.1 * g
    v[...] = 0.999 * v + 0.001 * g**2
    if epsilon_hat:
        return np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-7)
    return m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-7)


def adam(w, g, m, v, constants):
    return constants.rate * adam_size(m, v, g + constants.decay * w, constants.t, True)


def adamw(w, g, m, v, constants):
    return constants.rate * (
        adam_size(m, v, g, constants.t, True) + constants.decay * w
    )


def lamb(w, g, m, v, constants):
    u = adam_size(m, v, g, constants.t, False) + constants.decay * w
    weight_norm = np.linalg.norm(w)
    update_norm = np.linalg.norm(u)
    ratio = 1.0
    if constants.is_kernel and weight_norm > 0 and update_norm > 0:
        ratio = weight_norm / update_norm
    return constants.rate * ratio * u


def lars(w, g, m, v, constants):
    weight_norm = np.linalg.norm(w)
    gradient_norm = np.linalg.norm(g)
    rate = constants.rate
    if constants.is_kernel and weight_norm > 0 and gradient_norm > 0:
        rate *= 0.001 * weight_norm / (gradient_norm + constants.decay * weight_norm)
    m[...] = constants.momentum * m + rate * (g + constants.decay * w)
    return m


UPDATES = {"sgd": sgd, "adam": adam, "adamw": adamw, "lamb": lamb, "lars": lars}


@pytest.mark.parametrize(
    ("decay", "precision", "near"),
    [(0.0, "float64", 1e-12), (0.2, "float64", 1e-12), (0.2, "float32", 1e-4)],
)
@pytest.mark.parametrize(("rule", "momentum"), RULES)
def test_weights_and_averages_follow_the_formula(
    rule, momentum, decay, precision, near
):
    set_precision(precision)
    config = settings(
        rule, momentum=momentum, weight_decay=decay, ema_decay=EMA, precision=precision
    )
    model = network()
    slope = slopes(model)
    start = [v.numpy() for v in model.trainable_variables]
    state = train(config, model, slope)
    trained = state.optimizer
    weights, averages = expected(config, [w.astype(np.float64) for w in start], slope)
    assert trained.learning_rate.dtype == precision
    assert int(trained.iterations) == STEPS - len(SKIPPED)
    assert all(variable.dtype == precision for variable in model.trainable_variables)
    same([v.numpy() for v in model.trainable_variables], weights, near, near / 10)
    same(averages_of(state), averages, near, near / 10)
    np.testing.assert_array_equal(
        model.trainable_variables[UNUSED].numpy(), start[UNUSED]
    )


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_sgd_gives_keras_bits(precision):
    set_precision(precision)
    slope = np.random.default_rng(3).normal(size=(STEPS, 50, 21)).astype(precision)

    def ends(kind: type) -> list[np.ndarray]:
        weight = keras.Variable(
            np.linspace(-1, 1, 1050).reshape(50, 21), dtype=precision
        )
        rule = kind(0.1, momentum=np.float64(0.7) if precision == "float64" else 0.7)
        rule.build([weight])
        step = tf.function(
            lambda gradient: rule.apply([gradient], [weight]), autograph=False
        )
        for number, gradient in enumerate(slope):
            rule.learning_rate.assign(0.1 / (number + 1))
            step(gradient)
        return [v.numpy() for v in (weight, *rule.variables)]

    for ours, theirs in zip(ends(SGD), ends(keras.optimizers.SGD)):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("rule", ["adamw", "lamb", "lars"])
def test_the_slots_do_not_depend_on_the_weight_decay(rule):
    """So that a checkpoint fits a run with another decay."""

    def slots(config: Settings) -> list[str]:
        variables = optimizer.build(config, network()).optimizer.variables
        # Keras counts optimizers in their names: adam_w_3/..., adam_w_4/...
        return [re.sub(r"_\d+$", "", v.path.split("/")[0]) for v in variables]

    assert slots(settings(rule)) == slots(settings(rule, weight_decay=0.1))


class Own(keras.layers.Layer):
    """A layer whose weights are not called as Keras calls them."""

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(shape[-1], 2))
        self.nameless = self.add_weight(shape=(2,))

    def call(self, x):
        return x @ self.w + self.nameless


LAYERS = keras.layers
# Layer, shape of its input, names of the weights that decay, names of those that do not.
KINDS = [
    (
        LAYERS.SeparableConv2D(2, 3),
        (8, 8, 3),
        ["depthwise_kernel", "pointwise_kernel"],
        ["bias"],
    ),
    (LAYERS.LSTM(2), (5, 3), ["kernel", "recurrent_kernel"], ["bias"]),
    (LAYERS.MultiHeadAttention(2, 3), (4, 5), ["kernel"] * 4, ["bias"] * 4),
    (LAYERS.Embedding(7, 2), (5,), [], ["embeddings"]),
    (LAYERS.LayerNormalization(), (3,), [], ["gamma", "beta"]),
    (LAYERS.SpectralNormalization(LAYERS.Dense(2)), (3,), ["kernel"], ["bias"]),
    # Keras calls a weight without a name variable, variable_1, ...
    (Own(), (3,), [], ["w", "variable"]),
]


@pytest.mark.parametrize(("layer", "shape", "decayed", "others"), KINDS)
def test_kernels_decay_and_nothing_else(layer, shape, decayed, others):
    if isinstance(layer, LAYERS.MultiHeadAttention):
        layer.build((None, *shape), (None, *shape))
    else:
        layer.build((None, *shape))
    variables = layer.trainable_variables
    assert [v.name for v in variables if is_kernel(v)] == decayed
    assert [v.name.split("_")[0] for v in variables if not is_kernel(v)] == others


def test_weights_that_a_person_may_expect_to_decay_are_named():
    x = keras.Input((4,))
    y = Own(name="own")(keras.layers.Embedding(5, 3, name="words")(x))
    model = keras.Model(x, keras.layers.BatchNormalization()(keras.layers.Dense(2)(y)))
    names = optimizer.not_decayed(model.trainable_variables)
    assert names[:2] == ["words/embeddings", "own/w"]
    assert len(names) == 3 and names[2].startswith("own/variable")


def test_what_cannot_be_trained_is_refused():
    unnamed = keras.Sequential([keras.Input((3,)), Own(name="unnamed")])
    with pytest.raises(ValueError, match=r"--weight_decay=0.1 .*'kernel'.*unnamed/w"):
        optimizer.build(settings("sgd", weight_decay=0.1), unnamed)
    optimizer.build(settings("sgd"), unnamed)
    bound = keras.layers.Dense(2, kernel_constraint="unit_norm", name="bound")
    bound = keras.Sequential([keras.Input((3,)), bound])
    with pytest.raises(ValueError, match=r"--ema_decay=0.8: .*UnitNorm.*bound/kernel"):
        optimizer.build(settings("sgd", ema_decay=EMA), bound)
    optimizer.build(settings("sgd"), bound)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"optimizer": "sgd", "adam_beta1": 0.5}, "--adam_beta1=0.5: --optimizer=sgd"),
        (
            {"optimizer": "lars", "adam_beta2": 0.5},
            "--adam_beta2=0.5: --optimizer=lars",
        ),
        (
            {"optimizer": "lars", "adam_epsilon": 0.5},
            "--adam_epsilon=0.5: --optimizer=lars",
        ),
        (
            {"optimizer": "adamw", "nesterov": True},
            "--nesterov=True: --optimizer=adamw",
        ),
        ({"optimizer": "lamb", "nesterov": True}, "--nesterov=True: --optimizer=lamb"),
    ],
)
def test_a_number_that_the_rule_does_not_have_is_refused(flags, words):
    refused(lambda: optimizer.build(Settings(**flags), network()), words)


def test_only_what_trains_has_slots_and_a_change_in_mid_run_is_told():
    model = network()
    model.layers[0].trainable = False
    state = State(
        model, optimizer.build(settings("sgd", ema_decay=EMA), model), "float64"
    )
    assert [v.shape for v in averages_of(state)] == [(4,), (4,), (4, 2), (2,)]
    optimizer.check_trainable(state.optimizer, model)
    model.layers[0].trainable = True
    refused(
        lambda: optimizer.check_trainable(state.optimizer, model),
        "changed after ",
        "dense",
        "/kernel",
    )


class Clips(keras.optimizers.Adam):
    """Changes gradients where Keras's fit passes and a run does not, as adaptive clipping may."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(g / 2, v) for g, v in grads_and_vars])


class Settles(keras.optimizers.Adam):
    def finalize_variable_values(self, var_list):
        for variable in var_list:
            variable.assign(variable / 2)


def scaling():
    made = keras.optimizers.Adam()
    made.scale_loss = lambda loss: 8 * loss
    return made


class Halves(keras.optimizers.Adam):
    def apply(self, grads, trainable_variables=None):
        super().apply([g / 2 for g in grads], trainable_variables)


SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
ADAM = keras.optimizers.Adam
SGD_OF_KERAS = keras.optimizers.SGD
MUON = keras.optimizers.Muon


@pytest.mark.parametrize(
    ("make", "flags", "why"),
    [
        (lambda: ADAM(SCHEDULE), {}, "schedule"),
        (lambda: ADAM(gradient_accumulation_steps=2), {}, "--accumulation_steps"),
        (lambda: ADAM(loss_scale_factor=8.0), {}, "float16"),
        (
            lambda: ADAM(use_ema=True),
            {"ema_decay": 0.9},
            "--ema_decay=0.9 .* ema_momentum=0.99",
        ),
        (
            lambda: SGD_OF_KERAS(0.1, weight_decay=0.1),
            {"weight_decay": 0.1},
            "both decay",
        ),
        (lambda: MUON(0.1, weight_decay=None), {"weight_decay": 0.1}, "both decay"),
        (lambda: ADAM(1e-5), {}, "rate 1e-05 of Adam is not used"),
        (
            lambda: [Group(lambda v: True, SGD_OF_KERAS(1e-5), 0.1)],
            {},
            "rate 1e-05 of SGD is not used",
        ),
        (Clips, {}, "Clips has its own apply_gradients, .*`apply` or"),
        (
            lambda: [Group(lambda v: True, Settles())],
            {},
            "Settles has its own finalize_variable_values",
        ),
        (scaling, {}, "Adam has its own scale_loss"),
        (
            keras.optimizers.ScheduleFreeAdamW,
            {},
            "ScheduleFreeAdamW is not supported, .*--ema_decay",
        ),
        (list, {}, "at least one Group"),
        (lambda: [ADAM()], {}, "make it of Groups"),
        (lambda: [Group(lambda v: True, ADAM(), -1.0)], {}, "rate of -1.0"),
        (lambda: [Group(is_kernel, ADAM())], {}, "bias is in no Group"),
        (
            lambda: [Group([], ADAM()), Group(lambda v: True, ADAM())],
            {},
            "Group 0 takes no weight",
        ),
        (
            lambda: [Group([keras.Variable(0.0, name="x")], ADAM())],
            {},
            "0 has x, not trained",
        ),
        (
            lambda: keras.optimizers.LossScaleOptimizer(SGD_OF_KERAS(0.1)),
            {},
            "LossScaleOptimizer",
        ),
        (
            lambda: keras.optimizers.MultiOptimizer(lambda v: ADAM()),
            {},
            "a list of hvdkit.*Group",
        ),
    ],
)
def test_what_a_tasks_optimizer_may_not_do_by_itself_is_refused(make, flags, why):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=why):
        optimizer.build(Settings(**flags), model, lambda model: make())


def test_a_tasks_optimizer_is_built_and_its_weight_decay_is_l2():
    """Whatever rule --optimizer names, which may be a fork's default."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    config = Settings(optimizer="adamw", weight_decay=0.1)
    rule = optimizer.build(
        config, model, lambda model: keras.optimizers.Lion(config.base_lr)
    )
    assert isinstance(rule.optimizer, keras.optimizers.Lion) and rule.optimizer.built
    assert optimizer.l2_weight(config, rule.optimizer) == 0.1


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
def test_to_describe_weight_decay_does_not_change_it(kind):
    """Keras keeps the answer to the first question, which it asks with TensorFlow's variable."""

    def decayed(*, is_described: bool) -> list[np.ndarray]:
        keras.utils.clear_session()
        layers = [
            keras.layers.Dense(2, name="kept"),
            keras.layers.Dense(2, name="head"),
        ]
        model = keras.Sequential([keras.Input((2,)), *layers])
        for weight in model.weights:
            weight.assign(tf.ones_like(raw(weight)))
        own = getattr(keras.optimizers, kind)(weight_decay=0.5)
        own.exclude_from_weight_decay(var_names=["kept"])
        rule = optimizer.build(Settings(), model, lambda model: own)
        if is_described:
            names = {id(weight): weight.path for weight in model.weights}
            described = optimizer.of_weights(rule, names)
            lines = [name for name in described if "kept" in name]
            # Muon asks with Keras's variable, whose name has no layer's in it.
            assert len(lines) == (2 if kind == "AdamW" else 0)
        zeros = [tf.zeros_like(raw(weight)) for weight in model.weights]
        applied(rule.optimizer.apply, model, [zeros])
        return [weight.numpy() for weight in model.weights]

    same(decayed(is_described=True), decayed(is_described=False))


def test_a_rate_that_a_class_chooses_is_no_given_one():
    class Passes(keras.optimizers.Adam):
        def __init__(self, **options):
            super().__init__(**options)

    class Chooses(keras.optimizers.Adam):
        def __init__(self, learning_rate=None):
            super().__init__(learning_rate or 3e-4)

    for kind in (Passes, Chooses, Halves, ADAM):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer.build(Settings(), model, lambda model, kind=kind: kind())
    # A command that trains nothing takes what an older version took.
    for made in (ADAM(3e-4), Clips()):
        optimizer.build(Settings(), model, lambda model, made=made: made, trains=False)


# These are no optimizers, or refused.
OTHERS = (
    *("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"),
    "ScheduleFreeAdamW",
)
OF_KERAS = [
    kind
    for name, kind in vars(keras.optimizers).items()
    if isinstance(kind, type) and name not in OTHERS
]


def applied(apply, model: keras.Model, slope: list) -> None:
    @tf.function(autograph=False)
    def step(grads):
        apply(grads, model.trainable_variables)

    for grads in slope:
        step([tf.constant(gradient) for gradient in grads])


@pytest.mark.parametrize("kind", OF_KERAS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("every", [None, 3])
def test_averages_with_every_optimizer_of_keras_are_kerass_own(kind, every):
    """Also where the task asks Keras for them, and where they overwrite the weights."""

    def averaging() -> keras.optimizers.Optimizer:
        return kind(0.1, use_ema=True, ema_momentum=EMA, ema_overwrite_frequency=every)

    ours = network()
    if every:
        rule = optimizer.build(Settings(base_lr=0.1), ours, lambda model: averaging())
    else:
        config = Settings(ema_decay=EMA, base_lr=0.1)
        rule = optimizer.build(config, ours, lambda model: kind(0.1))
    state = State(ours, rule, "float64")
    theirs = network()
    reference = averaging()
    reference.build(theirs.trainable_variables)
    applied(state.apply, ours, slopes(ours))
    applied(reference.apply, theirs, slopes(ours))
    weights = [v.numpy() for v in theirs.trainable_variables]
    averages = [v.numpy() for v in reference._model_variables_moving_average]
    same(ours.trainable_variables, weights, 1e-12)
    assert not np.allclose(weights[0], averages[0], rtol=1e-6)
    with state.averaged_weights():
        same(ours.trainable_variables, averages, 1e-12)
    same(ours.trainable_variables, weights, 1e-12)


def test_each_group_may_average_in_its_own_way():
    model = network()
    first, *others = model.trainable_variables
    groups = [
        Group([first], ADAM(use_ema=True, ema_momentum=0.5)),
        Group([others[0]], ADAM(use_ema=True, ema_momentum=0.9)),
        Group(lambda v: True, SGD_OF_KERAS()),
    ]
    state = State(
        model, optimizer.build(settings("sgd"), model, lambda model: groups), "float64"
    )
    start = [v.numpy() for v in model.trainable_variables]
    seen = []
    for number in range(3):  # the second group takes no part in the first two steps
        updated = model.trainable_variables if number == 2 else [first, *others[1:]]
        state.apply([tf.ones(v.shape, v.dtype) for v in updated], updated)
        seen.append(first.numpy())
    with state.averaged_weights():
        same([first], [0.5 * (0.5 * seen[0] + 0.5 * seen[1]) + 0.5 * seen[2]], 1e-12)
    assert not np.array_equal(others[0], start[1])
    assert [int(average.updates) for average in state.averages] == [3, 1]


def test_the_average_is_of_weights_after_their_constraint():
    model = network()
    model.layers[-1].kernel.constraint = keras.constraints.MaxNorm(0.5)
    state = State(
        model, optimizer.build(settings("sgd", ema_decay=EMA), model), "float64"
    )
    applied(state.apply, model, slopes(model))
    with state.averaged_weights():
        assert np.linalg.norm(model.layers[-1].kernel, axis=0).max() <= 0.5


class Slow(SGD_OF_KERAS):
    """Begins with slow weights that are those of the model, as Lookahead does."""

    def build(self, variables):
        super().build(variables)
        (self._momentums,) = self.add_optimizer_variables(variables, ["slow"])
        for slow, variable in zip(self._momentums, variables):
            slow.assign(variable)


def test_an_optimizer_that_copies_weights_begins_with_those_that_were_read():
    """As of --init_from; others begin with constants, and are left as they are."""
    for kind, copies in ((Slow, True), (ADAM, False)):
        task = SimpleNamespace(optimizer=lambda model, kind=kind: kind())
        model = network()
        run = SimpleNamespace(
            task=task,
            model=model,
            config=Settings(),
            optimizer=optimizer.build(Settings(), model, task.optimizer).optimizer,
        )
        assert optimizer.begins_with_weights(run.optimizer) == copies
        for v in model.trainable_variables:
            v.assign(v + 1)
        context.begin_optimizer(run)
        slots = run.optimizer._momentums
        same(slots, [v * copies for v in model.trainable_variables])
    # The task returns the same one again.
    run.optimizer = optimizer.build(Settings(), model, lambda model: Slow()).optimizer
    task.optimizer = lambda model: run.optimizer
    refused(lambda: context.begin_optimizer(run), "a new one at each call", "Slow")
