"""L2, clipping, update rules, averages and loss scale against their formulas, by hand in NumPy."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdkit.ranks.world import raw, set_precision
from hvdkit.settings import Settings
from hvdkit.train import gradients, optimizer, schedule
from hvdkit.train.gradients import LossScale, is_kernel
from hvdkit.train.optimizer import SGD, Lamb
from hvdkit.train.state import average_variables, averaged_weights

STEPS, SKIPPED, EMA = 8, (0, 4), 0.8
# What trains in `network`, in order; the loss does not depend on the last one.
NAMES = ["kernel", "bias", "gamma", "beta", "kernel", "bias"]
KERNELS, UNUSED = (0, 4), 5
RULES = [("sgd", 0.0), ("sgd", 0.7), ("adam", 0.9), ("adamw", 0.9), ("lamb", 0.9)]


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
    """Gradients of every step."""
    draw = np.random.default_rng(2)
    return [[draw.normal(size=v.shape) for v in model.trainable_variables] for _ in range(STEPS)]


def settings(rule: str, **others) -> Settings:
    common = {"base_lr": 0.3, "num_steps": STEPS, "warmup_steps": 3, "precision": "float64"}
    return dataclasses.replace(Settings(), optimizer=rule, **common | others)


def train(config: Settings, model: keras.Model, slope: list) -> keras.optimizers.Optimizer:
    """Steps as training does them: rate from the schedule, L2, and not all of them applied."""
    rule, variables = optimizer.build(config, model), model.trainable_variables
    rate = schedule.make(config, 1)

    @tf.function(autograph=False)
    def step(number, applied, grads):
        known = [g if i != UNUSED else None for i, g in enumerate(grads)]
        l2 = optimizer.l2_weight(config, rule)
        known, _ = gradients.finish(known, variables, l2=l2, clip_norm=0.0)
        rule.learning_rate.assign(tf.cast(rate(number), rule.learning_rate.dtype))
        pairs = [(g, v) for g, v in zip(known, variables) if g is not None]
        tf.cond(applied, lambda: rule.apply(*zip(*pairs)), lambda: None)

    for number in range(STEPS):
        grads = [tf.cast(g, raw(v).dtype) for g, v in zip(slope[number], variables)]
        step(tf.constant(number, tf.int64), tf.constant(number not in SKIPPED), grads)
    return rule


def expected(config: Settings, weights: list, slope: list) -> tuple[list, list]:
    """Weights and their averages after the same steps; in-place changes of `weights`."""
    m, v = [np.zeros_like(w) for w in weights], [np.zeros_like(w) for w in weights]
    averages, t = None, 0
    for number in range(STEPS):
        if number in SKIPPED:
            continue
        t += 1
        rate = 0.3 * (1 - number / STEPS) ** 0.9 * min((number + 1) / 3, 1)
        for i, w in enumerate(weights):
            if i != UNUSED:
                decay = config.weight_decay if i in KERNELS else 0.0
                update = UPDATES[config.optimizer](config, w, slope[number][i], m[i], v[i], t)
                w -= update(rate, decay, i in KERNELS)
        if averages is None:
            averages = [w.copy() for w in weights]
        averages = [EMA * a + (1 - EMA) * w for a, w in zip(averages, weights)]
    return weights, averages


def sgd(config, w, g, m, v, t):
    def update(rate, decay, kernel):
        m[...] = config.momentum * m - rate * (g + decay * w)
        return -m

    return update


def adam_size(m, v, g, t, epsilon_hat):
    """Adam's update at rate 1; `epsilon_hat`: beside the uncorrected v (Kingma and Ba 2015)."""
    m[...] = 0.9 * m + 0.1 * g
    v[...] = 0.999 * v + 0.001 * g**2
    if epsilon_hat:
        return np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-7)
    return m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-7)


def adam(config, w, g, m, v, t):
    return lambda rate, decay, kernel: rate * adam_size(m, v, g + decay * w, t, True)


def adamw(config, w, g, m, v, t):
    return lambda rate, decay, kernel: rate * (adam_size(m, v, g, t, True) + decay * w)


def lamb(config, w, g, m, v, t):
    def update(rate, decay, kernel):
        u = adam_size(m, v, g, t, False) + decay * w
        usable = kernel and np.linalg.norm(w) > 0 and np.linalg.norm(u) > 0
        return rate * (np.linalg.norm(w) / np.linalg.norm(u) if usable else 1.0) * u

    return update


UPDATES = {"sgd": sgd, "adam": adam, "adamw": adamw, "lamb": lamb}


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize(("rule", "momentum"), RULES)
def test_weights_and_averages_follow_the_formula(rule, momentum, decay):
    config = settings(rule, momentum=momentum, weight_decay=decay, ema_decay=EMA)
    model = network()
    slope, start = slopes(model), [v.numpy() for v in model.trainable_variables]
    trained = train(config, model, slope)
    weights, averages = expected(config, [w.copy() for w in start], slope)
    assert trained.learning_rate.dtype == "float64"
    assert int(trained.iterations) == STEPS - len(SKIPPED)
    kept = average_variables(trained)
    for i, variable in enumerate(model.trainable_variables):
        np.testing.assert_allclose(variable.numpy(), weights[i], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(kept[i].numpy(), averages[i], rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(model.trainable_variables[UNUSED].numpy(), start[UNUSED])


@pytest.mark.parametrize(("rule", "momentum"), RULES)
def test_float32_is_the_same_but_for_rounding(rule, momentum):
    set_precision("float32")
    config = settings(rule, momentum=momentum, weight_decay=0.2, precision="float32")
    model = network()
    slope, start = slopes(model), [v.numpy() for v in model.trainable_variables]
    trained = train(config, model, slope)
    weights, _ = expected(config, [w.astype(np.float64) for w in start], slope)
    assert average_variables(trained) == []
    for variable, weight in zip(model.trainable_variables, weights):
        assert variable.numpy().dtype == np.float32
        np.testing.assert_allclose(variable.numpy(), weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_sgd_gives_keras_bits(precision):
    set_precision(precision)
    slope = np.random.default_rng(3).normal(size=(STEPS, 50, 21)).astype(precision)

    def ends(kind: type) -> list[np.ndarray]:
        weight = keras.Variable(np.linspace(-1, 1, 1050).reshape(50, 21), dtype=precision)
        rule = kind(0.1, momentum=np.float64(0.7) if precision == "float64" else 0.7)
        rule.build([weight])
        step = tf.function(lambda gradient: rule.apply([gradient], [weight]), autograph=False)
        for number, gradient in enumerate(slope):
            rule.learning_rate.assign(0.1 / (number + 1))
            step(gradient)
        return [v.numpy() for v in (weight, *rule.variables)]

    for ours, theirs in zip(ends(SGD), ends(keras.optimizers.SGD)):
        np.testing.assert_array_equal(ours, theirs)


def test_lamb_without_gradient_and_decay_stands_still():
    model = network()
    before = [v.numpy() for v in model.trainable_variables]
    rule = optimizer.build(settings("lamb"), model)
    rule.apply([tf.zeros(v.shape, tf.float64) for v in model.trainable_variables])
    for variable, value in zip(model.trainable_variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_lamb_survives_serialization():
    rule = optimizer.build(settings("lamb", weight_decay=0.2, ema_decay=EMA), network())
    again = keras.optimizers.deserialize(keras.optimizers.serialize(rule))
    assert type(again) is Lamb and again.get_config() == rule.get_config()


def test_the_slots_do_not_depend_on_the_weight_decay():
    """So that a checkpoint fits a run with another decay."""
    for rule in ("adamw", "lamb"):
        with_and_without = [
            [v.path.split("/")[0] for v in optimizer.build(config, network()).variables]
            for config in (settings(rule), settings(rule, weight_decay=0.1))
        ]
        assert with_and_without[0] == with_and_without[1]


class Own(keras.layers.Layer):
    """A layer whose weights are not called as Keras calls them."""

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(shape[-1], 2))
        self.nameless = self.add_weight(shape=(2,))

    def call(self, x):
        return x @ self.w + self.nameless


LAYERS = keras.layers
# Layer, shape of its input, names of the weights that decay, names of those that do not.
SEPARABLE = ["depthwise_kernel", "pointwise_kernel"]
KINDS = [
    (LAYERS.Conv2D(2, 3), (8, 8, 3), ["kernel"], ["bias"]),
    (LAYERS.SeparableConv2D(2, 3), (8, 8, 3), SEPARABLE, ["bias"]),
    (LAYERS.LSTM(2), (5, 3), ["kernel", "recurrent_kernel"], ["bias"]),
    (LAYERS.EinsumDense("abc,cd->abd", (5, 2), bias_axes="d"), (5, 3), ["kernel"], ["bias"]),
    (LAYERS.Embedding(7, 2), (5,), [], ["embeddings"]),
    (LAYERS.LayerNormalization(), (3,), [], ["gamma", "beta"]),
    (LAYERS.PReLU(), (4, 3), [], ["alpha"]),
    (LAYERS.TimeDistributed(LAYERS.Dense(2)), (4, 3), ["kernel"], ["bias"]),
    (LAYERS.SpectralNormalization(LAYERS.Dense(2)), (3,), ["kernel"], ["bias"]),
    (Own(), (3,), [], ["w", "nameless"]),
]


@pytest.mark.parametrize(("layer", "shape", "decayed", "others"), KINDS)
def test_kernels_decay_and_nothing_else(layer, shape, decayed, others):
    layer.build((None, *shape))
    names = [v.name for v in layer.trainable_variables if is_kernel(v)]
    assert names == decayed
    left = [v.name for v in layer.trainable_variables if not is_kernel(v)]
    # Keras calls a weight without a name variable, variable_1, ...
    assert ["nameless" if name.startswith("variable") else name for name in left] == others


def test_attention_decays_its_four_kernels_and_not_its_biases():
    layer = keras.layers.MultiHeadAttention(2, 3)
    layer.build((None, 4, 5), (None, 4, 5))
    kernels = [v.path.split("/")[-2] for v in layer.trainable_variables if is_kernel(v)]
    assert kernels == ["query", "key", "value", "attention_output"]
    assert len(layer.trainable_variables) == 8


def test_weights_that_a_person_may_expect_to_decay_are_named():
    x = keras.Input((4,))
    y = Own(name="own")(keras.layers.Embedding(5, 3, name="words")(x))
    model = keras.Model(x, keras.layers.BatchNormalization()(keras.layers.Dense(2)(y)))
    names = optimizer.not_decayed(model.trainable_variables)
    assert names[:2] == ["words/embeddings", "own/w"]
    assert len(names) == 3 and names[2].startswith("own/variable")


def test_what_cannot_be_trained_is_refused():
    frozen = network()
    frozen.trainable = False
    with pytest.raises(ValueError, match="no trainable weights"):
        optimizer.build(settings("sgd"), frozen)
    own = keras.Sequential([keras.Input((3,)), Own(name="own")])
    with pytest.raises(ValueError, match=r"--weight_decay=0.1 .*'kernel'.*own/w"):
        optimizer.build(settings("sgd", weight_decay=0.1), own)
    optimizer.build(settings("sgd"), own)
    bound = keras.layers.Dense(2, kernel_constraint="non_neg", name="bound")
    bound = keras.Sequential([keras.Input((3,)), bound])
    with pytest.raises(ValueError, match=r"--ema_decay=0.8 .*bound/kernel"):
        optimizer.build(settings("sgd", ema_decay=EMA), bound)
    optimizer.build(settings("sgd"), bound)


def test_only_what_trains_has_slots_and_a_change_in_mid_run_is_told():
    model = network()
    model.layers[0].trainable = False
    rule = optimizer.build(settings("sgd", ema_decay=EMA), model)
    assert [v.shape for v in average_variables(rule)] == [(4,), (4,), (4, 2), (2,)]
    frozen = model.layers[0].kernel.numpy()
    rule.apply([tf.ones(v.shape, tf.float64) for v in model.trainable_variables])
    with averaged_weights(model, rule):
        np.testing.assert_array_equal(model.layers[0].kernel.numpy(), frozen)
    optimizer.check_trainable(rule, model)
    model.layers[0].trainable = True
    with pytest.raises(ValueError, match=r"changed after .*dense.*/kernel"):
        optimizer.check_trainable(rule, model)
    with pytest.raises(ValueError, match="changed after"), averaged_weights(model, rule):
        pass


def scale_after(scale: LossScale, finite: bool, counted: bool = True) -> tuple[float, int, int]:
    scale.update(tf.constant(finite), tf.constant(counted))
    return float(scale.value), int(scale.sound_steps), int(scale.skipped_in_a_row)


def test_loss_scale_halves_and_counts_what_is_skipped_in_a_row():
    scale = LossScale("float16")
    assert scale_after(scale, True) == (2.0**15, 1, 0)
    assert scale_after(scale, False) == (2.0**14, 0, 1)
    assert scale_after(scale, False) == (2.0**13, 0, 2)
    for finite in (True, False):  # not readable: no step at all
        assert scale_after(scale, finite, counted=False) == (2.0**13, 0, 2)
    assert scale_after(scale, True) == (2.0**13, 1, 0)
    assert scale_after(scale, False, counted=False) == (2.0**13, 1, 0)


def test_loss_scale_doubles_after_a_thousand_sound_steps():
    scale = LossScale("float16")
    assert scale_after(scale, True) == (2.0**15, 1, 0)
    for power in (16, 17):  # the count starts anew each time
        scale.sound_steps.assign(998)
        assert scale_after(scale, True) == (2.0 ** (power - 1), 999, 0)
        assert scale_after(scale, True) == (2.0**power, 0, 0)


def test_loss_scale_stays_between_its_ends():
    scale = LossScale("float16")
    for _ in range(30):
        smallest = scale_after(scale, False)
    assert smallest == (2.0**-10, 0, 30) and LossScale.MIN_SCALE == 2.0**-10
    scale.value.assign(2.0**24)
    scale.sound_steps.assign(LossScale.GROWTH_STEPS - 1)
    assert scale_after(scale, True) == (2.0**24, 0, 0)


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_only_float16_is_scaled(precision):
    scale = LossScale(precision)
    assert scale_after(scale, False) == (1.0, 0, 1)
    assert scale_after(scale, True) == (1.0, 0, 0)


SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
ADAM, SGD_OF_KERAS = keras.optimizers.Adam, keras.optimizers.SGD


@pytest.mark.parametrize(
    ("make", "flags", "why"),
    [
        (lambda: ADAM(SCHEDULE), {}, "schedule"),
        (lambda: ADAM(gradient_accumulation_steps=2), {}, "--accumulation_steps"),
        (lambda: ADAM(loss_scale_factor=8.0), {}, "float16"),
        (lambda: ADAM(use_ema=True), {}, "--ema_decay"),
        (lambda: SGD_OF_KERAS(0.1, weight_decay=0.1), {"weight_decay": 0.1}, "both decay"),
        (lambda: keras.optimizers.LossScaleOptimizer(SGD_OF_KERAS(0.1)), {}, "LossScaleOptimizer"),
    ],
)
def test_what_a_tasks_optimizer_may_not_do_by_itself_is_refused(make, flags, why):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=why):
        optimizer.build(Settings(**flags), model, lambda settings: make())


def test_a_tasks_optimizer_is_built():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    lion = optimizer.build(Settings(), model, lambda s: keras.optimizers.Lion(s.base_lr))
    assert isinstance(lion, keras.optimizers.Lion) and lion.built


# ---- What is applied, from means over the global batch -----------------------------------------


def finished(l2: float, clip_norm: float) -> tuple[list[list[float]], float]:
    """Of a kernel (3, 0) with gradients (0, 4), and a gamma of 5 with gradient 0."""
    variables = [
        keras.Variable(np.array([3.0, 0.0], np.float32), name="kernel"),
        keras.Variable(np.array([5.0], np.float32), name="gamma"),
    ]
    grads = [tf.constant([0.0, 4.0]), tf.constant([0.0])]
    grads, norm = gradients.finish(grads, variables, l2=l2, clip_norm=clip_norm)
    return [g.numpy().tolist() for g in grads], float(norm)


def test_l2_adds_the_kernel_times_its_weight_and_leaves_gamma_alone():
    assert finished(1.0, 0.0) == ([[3.0, 4.0], [0.0]], 5.0)


def test_what_is_clipped_and_logged_is_the_norm_with_l2():
    """Without L2 the norm is 4, and nothing would be clipped to 4.5; with it 5, scaled by 0.9."""
    clipped, norm = finished(1.0, 4.5)
    assert norm == 5.0
    np.testing.assert_allclose(clipped[0], [2.7, 3.6], rtol=1e-6)


@pytest.mark.parametrize("clip_norm", [0.0, 4.0, 100.0])
def test_what_is_small_enough_is_not_scaled(clip_norm):
    assert finished(0.0, clip_norm) == ([[0.0, 4.0], [0.0]], 4.0)


def test_sparse_gradients_name_a_row_twice_and_are_divided():
    rows = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([2, 0, 2]), [3, 1])
    dense, none = gradients.unscale([tf.convert_to_tensor(rows), None], tf.constant(0.5))
    assert none is None and dense.numpy().tolist() == [[1.0], [0.0], [2.5]]


def test_figures_of_a_layer_are_sum_norm_and_the_share_that_is_no_number():
    found = gradients.layer_figures([tf.constant([3.0, -4.0]), None, tf.constant([np.nan, 1.0])])
    np.testing.assert_array_equal(found[:2], [[-1.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    assert np.isnan(found[2, 0]) and np.isnan(found[2, 1]) and found[2, 2] == 0.5
