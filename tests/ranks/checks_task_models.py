"""Run on real ranks by test_small_runs.py: models that are wrong, told before the first step."""

import keras
import tensorflow as tf
from checks_tasks import refused
from small_models import Step
from small_runs import FEATURES, Small, classifier, fit, task_with


def own_state(layer):
    layer.own = tf.Variable(1.0, trainable=False)


def noise(layer, x, training):
    return x + tf.random.normal(tf.shape(x)) if training else x


# Without --jit they are kinds of models.
WITH_JIT = [
    (lambda: classifier(Step(lambda s, x, t: x * s.own, own_state)), "does not hold", "add_weight"),
    (lambda: classifier(Step(noise)), "RandomStandardNormal", "SeedGenerator"),
]


def check_models_that_xla_would_compile_wrong_are_refused(world):
    for make, *words in WITH_JIT:
        refused(world, task_with(make), *words, jit=True)


def check_a_frozen_model_of_the_task_may_be_used(world):
    class Distilled(Small):
        def __init__(self, config, trainable=False):
            super().__init__(config)
            self.teacher = classifier(units=FEATURES)
            self.teacher.trainable = trainable

        def build_model(self):
            return classifier(units=FEATURES)

        def loss(self, outputs, targets):
            losses, weights = super().loss(outputs, targets)
            return losses + tf.reduce_mean(tf.square(outputs - self.teacher(outputs)), -1), weights

    class Trained(Distilled):
        def __init__(self, config):
            super().__init__(config, trainable=True)

    fit(world, Distilled)
    refused(world, Trained, "does not hold", "frozen model")


def slow_check_what_xla_cannot_compile_is_told(world):
    """Its own errors would come in the first step, and what it leaves out never."""

    def resizing():
        inside = keras.layers.Resizing(4, 4, "bicubic")
        return classifier(keras.layers.Reshape((2, 3, 1)), inside, keras.layers.Flatten())

    refused(world, task_with(resizing), "--jit", "it has no ResizeBicubic (", "resizing", jit=True)

    def checked(losses):
        tf.debugging.assert_less(losses, 1e9)
        return losses

    def grows(losses):
        array = tf.TensorArray(tf.float32, 0, dynamic_size=True)
        return array.write(tf.cast(0 * losses[0], tf.int32), losses).read(0)

    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0], [0.0]), 0.0)
    cases = [
        (checked, "leaves out Assert ("),
        (grows, "leaves out TensorListSetItem ("),
        (lambda x: x + table.lookup(tf.cast(x, tf.int32)), "no lookup table"),
        (lambda x: tf.reshape(x, [tf.cast(12 + 0 * x[0], tf.int32)]), "compile-time constant"),
    ]
    for change, *words in cases:

        def loss(self, outputs, targets, change=change):
            losses, weights = Small.loss(self, outputs, targets)
            return change(losses), weights

        refused(world, task_with(loss=loss), "--jit", *words, jit=True)
