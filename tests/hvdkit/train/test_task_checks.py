"""A task's mistakes, each told in one sentence by what tries it; on ranks: checks_tasks.py."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from refusals import refused
from small_models import Net
from small_runs import CLASSES, FEATURES, Small, classifier

from hvdkit.settings import Settings
from hvdkit.train.step import graph_checks, objective
from hvdkit.train.task import checks as task_checks


class Base(Small):
    """Small, with a variable and a generator that its functions may use."""

    def __init__(self, config):
        super().__init__(config)
        self.state = tf.Variable(0.0)
        self.noise = tf.random.Generator.from_seed(1)


class OnlyInTraining(keras.layers.Layer):
    """Makes weights when it is first called in training, and not before."""

    def __init__(self):
        super().__init__()
        self.more = keras.layers.Dense(3)

    def call(self, x, training=False):
        return self.more(x) if training else x


def test_weights_that_training_alone_needs_are_made_before_the_optimizer():
    x = keras.Input((3,))
    model = keras.Model(x, OnlyInTraining()(keras.layers.Dense(3)(x)))
    assert len(model.trainable_variables) == 2
    task_checks.build_variables(model, {"inputs": tf.zeros([2, 3])})
    assert len(model.trainable_variables) == 4


class Ghost(keras.layers.Layer):
    """Splits its batch in training, as a normalization by parts of it does; it has no weights."""

    def call(self, x, training=False):
        return tf.concat(tf.split(x, 2), 0) if training else x


def test_a_model_that_takes_no_single_sample_in_training_is_built():
    x = keras.Input((3,))
    model = keras.Model(x, keras.layers.Dense(3)(Ghost()(x)))
    task_checks.build_variables(model, {"inputs": tf.zeros([1, 3])})


def tried(methods: dict) -> dict[str, tf.Tensor]:
    """Calls the task's functions as a run does before its first step; its sums, symbolic."""
    task = type("Task", (Base,), methods)(Settings())
    train, val = task.sources()
    reader = task_checks.reader(task, train, True)
    model = task.build_model()
    task_checks.build_variables(model, task_checks.read_example(reader, True))

    reader = task_checks.reader(task, val, False)
    example = task_checks.read_example(reader, False)
    targets = example["targets"]
    outputs = task_checks.outputs(task, model, example["inputs"])
    objective.loss(task, outputs, targets, samples=1)

    @tf.function(autograph=False)
    def sums(outputs: tf.Tensor, targets: tf.Tensor):
        return task_checks.sums(task, outputs, targets)

    traced = sums.get_concrete_function(of_any_batch(outputs), of_any_batch(targets))
    counts = {"hits": np.int64(1), "samples": np.int64(1)}
    task_checks.metrics(task, counts, {"loss": 1.0})
    return traced.structured_outputs


def of_any_batch(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


def mean(task, outputs, targets):
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)
    )


def column(task, outputs, targets):
    losses, weights = Small.loss(task, outputs, targets)
    return losses, weights[:, None]


def squares(task, outputs, targets):  # [n, 1] and [n] make [n, n]
    losses = tf.square(outputs - tf.cast(targets, outputs.dtype))
    return losses, tf.ones_like(losses)


def terms(make):
    """A loss that `make` makes of the losses and weights of Small."""
    return {
        "loss": lambda task, outputs, targets: make(*Small.loss(task, outputs, targets))
    }


def sums(name, make):
    """The sums of Small and another one, of the outputs."""

    def more(task, outputs, targets):
        return Small.sums(task, outputs, targets) | {name: make(outputs)}

    return {"sums": more}


def branches(task, sample, key):
    if sample["y"] > 1:
        return {"inputs": -sample["x"], "targets": sample["y"]}
    return Small.training_example(task, sample, key)


def tuple_for_dict(task):
    train, val = Small.sources(task)
    read = train.read
    train.read = lambda index: tuple(read(index).values())
    return train, val


def example(**parts):
    """A training_example with these parts of (task, x, y) in the place of Small's."""

    def make(task, sample, key=None):
        pair = {"inputs": sample["x"], "targets": sample["y"]}
        for name, part in parts.items():
            pair[name] = part(task, sample["x"], sample["y"])
        return pair

    return {"training_example": make}


def noisy(noise):
    return example(inputs=lambda task, x, y: x + noise(task, x))


def flip(task, x):
    return tf.cond(tf.random.uniform([]) < 0.5, lambda: x, lambda: -x)


NORMAL = noisy(lambda task, x: tf.random.normal([FEATURES]))["training_example"]


def model(make):
    return {"build_model": lambda task: make()}


class Steps(Net):
    def train_step(self, data):
        raise NotImplementedError


class OwnLoss(Net):
    def compute_loss(self, *of, **how):
        raise NotImplementedError


class OwnScores(Net):
    def test_step(self, data):
        raise NotImplementedError


class OwnPredictions(Net):
    def predict_step(self, data):
        raise NotImplementedError


class Traced(keras.layers.Layer):
    """Its first call, which is traced, makes the weights of the layer inside."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES)

    @tf.function
    def call(self, x):
        return self.dense(x)


class Built(Traced):
    """It reads its generator, and one of its layers, in training alone."""

    def __init__(self):
        super().__init__()
        self.noise = keras.layers.Dropout(0.5)
        self.more = OnlyInTraining()

    def build(self, shape):
        self.dense.build(shape)
        self.noise.build((*shape[:-1], CLASSES))
        self.more.more.build((*shape[:-1], CLASSES))

    @tf.function
    def call(self, x, training=False):
        return self.more(
            self.noise(self.dense(x), training=training), training=training
        )


class TracedNet(Net):
    """Only its calls of one sample, in evaluation, use the first graph."""

    @tf.function
    def call(self, x, training=False):
        return super().call(x)


def with_layer(layer):
    x = keras.Input((FEATURES,))
    return keras.Model(x, layer(keras.layers.Dense(4)(x)))


@pytest.mark.parametrize(
    "net",
    [
        lambda: with_layer(Traced()),
        lambda: keras.Sequential([keras.layers.Dense(4), Traced()]),
        lambda: TracedNet(keras.layers.Dense(CLASSES)),
    ],
)
def test_a_traced_call_that_lost_the_weights_is_refused(net):
    """It computes with their first values, and they have no gradient."""
    example = {"inputs": tf.ones([1, FEATURES])}
    refused(
        lambda: task_checks.build_variables(net(), example),
        "has a tf.function that does not read",
        *("kernel", "leave out tf.function", "build"),
    )


def test_a_traced_call_of_a_layer_that_was_built_has_its_weights():
    model = with_layer(Built())
    x = tf.ones([1, FEATURES])
    task_checks.build_variables(model, {"inputs": x})
    before = model(x).numpy()
    bias = next(v for v in model.layers[-1].dense.weights if v.name == "bias")
    bias.assign_add(tf.ones([CLASSES]))
    np.testing.assert_allclose(model(x), before + 1, rtol=1e-6)


def frozen():
    model = classifier()
    model.trainable = False
    return model


def with_names():
    image = keras.Input((FEATURES,), name="image")
    return keras.Model({"image": image}, keras.layers.Dense(CLASSES)(image))


OF_IMAGE = example(inputs=lambda task, x, y: {"img": x})
# Keras would take "half", the first by its name, for the image.
OF_MORE = example(inputs=lambda task, x, y: {"half": x / 2, "image": x})
OF_NAME = example(inputs=lambda task, x, y: {"image": x})
# What a task does otherwise, and words of the sentence about it.
MISTAKES = [
    (
        {"evaluation_example": lambda task, s: (s["x"], s["y"])},
        "evaluation_example",
        "tuple",
    ),
    (
        {"training_example": branches},
        "training_example failed",
        "test_task_checks.py, line",
    ),
    ({"sources": tuple_for_dict}, "read() must return a dict of tensors, not tuple"),
    (
        example(targets=lambda _, x, y: tf.sparse.from_dense(x)),
        "training_example",
        "SparseTensor",
    ),
    (
        example(targets=lambda task, x, y: tf.ensure_shape(x[: y + 1], [None])),
        *("training_example", "shape (None,)"),
    ),
    (noisy(flip), "training_example draws", "`key`"),
    (noisy(lambda task, x: task.noise.normal([FEATURES])), "draws", "RngReadAndSkip"),
    (
        noisy(lambda task, x: task.state.assign_add(1.0)),
        *("training_example changes a variable", "AssignAddVariableOp"),
    ),
    ({"evaluation_example": NORMAL}, "evaluation_example draws", "leave them out"),
    (model(lambda: keras.layers.Dense(3)), "build_model must return a keras.Model"),
    (
        model(lambda: Steps(keras.layers.Dense(CLASSES))),
        "its own train_step",
        "the task's loss",
    ),
    (model(lambda: OwnLoss(keras.layers.Dense(CLASSES))), "its own compute_loss"),
    (
        model(lambda: OwnScores(keras.layers.Dense(CLASSES))),
        *("its own test_step", "sums and metrics"),
    ),
    (
        model(lambda: OwnPredictions(keras.layers.Dense(CLASSES))),
        *("its own predict_step", "predict or decode"),
    ),
    (
        model(
            lambda: keras.Sequential(
                [keras.Input((FEATURES + 1,)), keras.layers.Dense(3)]
            )
        ),
        *("the model", str(FEATURES)),
    ),
    (model(frozen), "no variable to train"),
    (model(with_names) | OF_IMAGE, "['image']", "['img']", "names"),
    (model(with_names), "no dict", "['image']"),
    (
        model(with_names) | OF_MORE,
        *("['image']", "training_example's are ['half', 'image']"),
    ),
    (
        model(with_names)
        | OF_NAME
        | {"evaluation_example": OF_MORE["training_example"]},
        *("['image']", "evaluation are ['half', 'image']"),
    ),
    ({"loss": lambda *of: (mean(*of), tf.constant(1.0))}, "a loss for each example"),
    ({"loss": column}, "losses", "weights", "the same shape"),
    (terms(lambda losses, weights: {}), "at least one"),
    (terms(lambda *pair: {"a/b": pair}), "['a/b']", "letters"),
    (
        terms(lambda losses, weights: {"box": losses}),
        "loss 'box'",
        "must return two tensors",
    ),
    (terms(lambda *pair: {"box": (*pair, pair[0])}), "'box'", "a factor"),
    (
        {"loss": squares} | model(lambda: classifier(units=1)),
        "one example more",
        "[n, 1]",
    ),
    (
        {"loss": lambda task, outputs, targets: (outputs["logits"], targets)},
        *("the task's loss failed", "test_task_checks.py, line", "TypeError"),
    ),
    (sums("loss", lambda outputs: tf.constant(1.0)), "sums", "loss"),
    (sums("hits", lambda outputs: outputs > 0), "hits", "bool"),
    (
        sums("each", lambda outputs: tf.argmax(outputs, -1)),
        "each",
        "must not depend on it",
    ),
    ({"main_metric": "top5"}, '"top5" is none of', "['accuracy', 'loss']"),
    (
        {"metrics": lambda task, sums: Small.metrics(task, sums) | {"loss": 1.0}},
        *("return 'loss'", "another name"),
    ),
]


def test_a_model_of_other_inputs_is_told_with_the_line_that_builds_it():
    task = types.SimpleNamespace(build_model=frozen)
    line = frozen.__code__.co_firstlineno
    with pytest.raises(
        ValueError, match=rf"test_task_checks.py, line {line}: ValueError: Input 0"
    ):
        task_checks.outputs(task, classifier(), tf.zeros([2, FEATURES + 1]))


def test_an_input_by_name_that_no_model_takes_is_left_out_where_it_is_the_last():
    """As a key that only dropout reads."""
    model = with_names()
    inputs = {"image": tf.ones([2, FEATURES]), "key": tf.zeros([2, 2], tf.int32)}
    task_checks.build_variables(model, {"inputs": inputs})
    np.testing.assert_array_equal(model(inputs), model({"image": inputs["image"]}))


def checked_draws(function):
    graph = tf.function(function, autograph=False).get_concrete_function().graph
    graph_checks.check_draws(graph, "the step", "use a key")


PICTURE = tf.zeros([1, 6, 6, 1])


def sampled_softmax(**sampled):
    rows = tf.zeros([9, 2])
    labels = tf.zeros([1, 1], tf.int64)
    return tf.nn.sampled_softmax_loss(
        rows, rows[:, 0], labels, rows[:1], 3, 9, **sampled
    )


@pytest.mark.parametrize(
    ("draw", "operation"),
    [
        (lambda noise: tf.random.normal([2], seed=3), "RandomStandardNormal"),
        (lambda noise: tf.random.shuffle([1, 2]), "RandomShuffle"),
        (lambda noise: sampled_softmax(), "LogUniformCandidateSampler"),
        (lambda noise: noise.binomial([2], 5.0, 0.5), "StatefulRandomBinomial"),
        (lambda noise: noise.uniform_full_int([2]), "RngReadAndSkip"),
        (
            lambda noise: tf.nn.fractional_max_pool(PICTURE, [1, 1.5, 1.5, 1]),
            "FractionalMaxPool",
        ),
    ],
)
def test_draws_without_a_key_are_refused(draw, operation):
    noise = tf.random.Generator.from_seed(1)
    refused(lambda: checked_draws(lambda: draw(noise)), "the step draws", operation)


def cudnn_lstm(dropout=0.0):
    zeros = tf.zeros([1, 1, 2])
    return tf.raw_ops.CudnnRNNV3(
        input=zeros,
        input_h=zeros,
        input_c=zeros,
        params=tf.zeros([40]),
        sequence_lengths=[1],
        rnn_mode="lstm",
        dropout=dropout,
    )


def test_what_draws_nothing_may_have_seeds():
    """As recurrent layers of cuDNN, poolings by a seed, and samples that the task has drawn."""
    checked_draws(lambda: tf.random.stateless_normal([2], [1, 2]))
    checked_draws(cudnn_lstm)
    checked_draws(lambda: tf.nn.fractional_max_pool(PICTURE, [1, 1.5, 1.5, 1], seed=3))
    drawn = (tf.constant([1, 2, 3], tf.int64), tf.ones([1, 1]), tf.ones([3]))
    checked_draws(lambda: sampled_softmax(sampled_values=drawn))
    refused(lambda: checked_draws(lambda: cudnn_lstm(dropout=0.5)), "CudnnRNNV3")


def test_sums_are_of_types_that_hold_totals():
    """A count in float32 stops growing at 2 ** 24."""
    totals = tried(sums("more", lambda outputs: tf.reduce_sum(outputs)))
    types = {"hits": tf.int64, "samples": tf.int64, "more": tf.float64}
    assert {name: total.dtype for name, total in totals.items()} == types


@pytest.mark.parametrize(
    ("methods", "words"), [(methods, words) for methods, *words in MISTAKES]
)
def test_a_mistake_is_told_in_one_sentence(methods, words):
    refused(lambda: tried(methods), *words)
