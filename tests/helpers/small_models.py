"""Builders of the models that kinds_of_models.py lists."""

import keras
import tensorflow as tf
from keras import layers

from hvdkit.train.layers.dropout import SampleDropout

IDS = 12  # those of an embedding are below


class Block(layers.Layer):
    def build(self, shape):
        self.dense = layers.Dense(4, name="dense")
        self.bn = layers.BatchNormalization(name="bn")
        self.dense.build(shape)
        self.bn.build((*shape[:-1], 4))

    def compute_output_shape(self, shape):
        return (*shape[:-1], 4)

    def call(self, x, training=False):
        return tf.tanh(self.bn(self.dense(x), training=training))


class Net(keras.Model):
    def __init__(self, *parts):
        super().__init__()
        self.parts = list(parts)

    def call(self, x, training=False):
        for part in self.parts:
            takes = part._call_has_training_arg
            x = part(x, training=training) if takes else part(x)
        return x


@keras.saving.register_keras_serializable(package="checks")  # Bidirectional copies it
class Cell(layers.Layer):
    state_size = output_size = 3

    def __init__(self, **named):
        super().__init__(**named)
        self.bn = layers.BatchNormalization(name="cell_bn")

    def build(self, shape):
        self.bn.build(shape)

    def call(self, x, states, training=False):
        y = self.bn(x, training=training) + 0.5 * states[0]
        return y, [y]


class InFunctions(keras.Model):
    """One batch norm, called in a function that is called twice, and outside of it."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(4)
        self.bn = bn()

    def build(self, shape):
        self.part = tf.function(
            lambda y: tf.tanh(self.bn(y, training=True)), autograph=False
        )

    def call(self, x, training=False):
        if not training:
            return self.bn(self.first(x))
        y = self.first(x)
        return self.part(y) + self.part(y * y + 1) + self.bn(tf.sin(y), training=True)


def masked():
    x = keras.Input((6, 3))
    valid = keras.Input((6,))
    y = bn()(dense()(x), mask=keras.ops.greater(valid, 0))
    return keras.Model([x, valid], y)


def functional(*parts, shape=(6, 3)):
    x = y = keras.Input(shape)
    for part in parts:
        y = part(y)
    return keras.Model(x, y)


def dense(units=4, **named):
    return layers.Dense(units, activation="tanh", **named)


def bn(**named):
    return layers.BatchNormalization(momentum=0.5, **named)


class Called(keras.Model):
    """A subclassed model: `call` is the given function of (model, inputs, training)."""

    def __init__(self, called, **parts):
        super().__init__()
        self.called = called
        for name, part in parts.items():
            setattr(self, name, part)

    def call(self, inputs, training=False):
        return self.called(self, inputs, training)


class Step(layers.Layer):
    """A layer of one function: `make(layer)` in build, then `called(layer, x, training)`."""

    def __init__(self, called, make=lambda layer: None, **named):
        super().__init__(**named)
        self.called = called
        self.make = make

    def build(self, shape):
        self.make(self)

    def call(self, x, training=False):
        return self.called(self, x, training)


def weight(name, shape=(), **named):
    return lambda layer: setattr(
        layer, name, layer.add_weight(shape=shape, name=name, **named)
    )


def shared():
    left = keras.Input((3,))
    right = keras.Input((3,))
    twice = keras.Sequential([dense(), bn()])
    return keras.Model([left, right], layers.Concatenate()([twice(left), twice(right)]))


def two_outputs():
    x = keras.Input((6,))
    y = bn()(dense()(x))
    return keras.Model(x, {"one": layers.Dense(2)(y), "two": layers.Dense(3)(y)})


def auxiliary(model, x, training):
    y = model.body(x)
    return (model.head(y), model.more(y)) if training else model.head(y)


def made_in_call(model, x, training):
    if not hasattr(model, "late"):
        model.late = layers.Dense(3)
    return model.late(model.body(x))


def made_in_training(model, x, training):
    if training and not hasattr(model, "late"):
        model.late = layers.Dense(4)
    y = model.body(x)
    return model.head(model.late(y) if training else y)


def tied():
    table = layers.Embedding(IDS, 4)

    def called(model, x, training):
        y = tf.reduce_mean(model.table(x), axis=1)
        return tf.matmul(model.body(y), model.table.embeddings, transpose_b=True)

    return Called(called, table=table, body=dense())


def frozen_inside():
    inner = keras.Sequential([dense(name="fixed"), bn(name="fixed_bn")], name="inner")
    inner.build((None, 6))
    inner.trainable = False
    return functional(inner, dense(), bn(), layers.Dense(2), shape=(6,))


def regularized():
    l2 = keras.regularizers.L2(0.05)
    wide = dense(kernel_regularizer=l2, bias_regularizer=l2, activity_regularizer=l2)
    # Its regularizer alone moves this weight.
    own = Step(
        lambda s, x, t: x, weight("own", (3,), initializer="ones", regularizer=l2)
    )
    return functional(wide, bn(gamma_regularizer=l2), own, layers.Dense(2), shape=(6,))


def adds_loss(model, x, training):
    y = model.body(x)
    # Alone trains `aside`.
    model.add_loss(0.1 * tf.reduce_mean(tf.square(model.aside(y))))
    return model.head(y)


def transformer():
    x = keras.Input((4, 4))
    y = layers.MultiHeadAttention(2, 3)(x, x)
    y = layers.LayerNormalization()(layers.Add()([x, y]))
    return keras.Model(
        x, layers.Dense(2)(layers.Add()([y, layers.Dense(4)(dense()(y))]))
    )


def sample_dropout():
    x = keras.Input((6,), name="x")
    key = keras.Input((2,), dtype="int32", name="key")
    y = SampleDropout(0.4, name="drop")([dense(8)(x), key])
    return keras.Model({"x": x, "key": key}, layers.Dense(2)(y))


def anneal(layer, x, training):
    """State that changes in the same way on every rank."""
    if training:
        layer.calls.assign_add(1)
    return x / (1.0 + tf.cast(layer.calls, x.dtype))


def remember(layer, x, training):
    if training:
        layer.seen.assign(tf.reduce_mean(x))
    return x


def raw_variable():
    def make(layer):
        layer.own = tf.Variable(1.5, dtype=tf.float64)

    return functional(
        Step(lambda s, x, t: x * s.own, make), layers.Dense(2), shape=(6,)
    )


def hidden_layer():
    hidden = {frozenset(): dense(name="hidden")}

    def called(model, x, training):
        (layer,) = hidden.values()
        return model.head(layer(x))

    return Called(called, head=layers.Dense(2))


def unseeded(layer, x, training):
    return x + keras.random.normal((4,), dtype=x.dtype) if training else x


def fail(*args):
    raise RuntimeError("no such thing as this layer")


def between(*parts, shape=(6,)):
    return functional(*parts, layers.Dense(2), shape=shape)
