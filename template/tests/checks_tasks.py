"""Run on real ranks by test_small_runs.py: a task's mistakes are told before the first step."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from data.arrays import Arrays
from engine.stop import DONE, WRONG_USE
from small_runs import CLASSES, FEATURES, Small, fit, numbers


def refused(world, task, *words, **settings):
    """The run ends before its first step, on every rank with one message of these words."""
    ended = fit(world, task, **settings)
    assert ended.code == WRONG_USE, (ended.code, ended.message)
    assert all(word in ended.message for word in words), ended.message
    assert "\n" not in ended.message and not ended.checkpoints
    return ended.message


def dense(outputs=CLASSES, **settings):
    x = keras.Input((FEATURES,))
    return keras.Model(x, keras.layers.Dense(outputs, **settings)(x))


class Net(keras.Model):
    """The usual subclassed model, not built when it is returned."""

    def __init__(self):
        super().__init__()
        self.body = keras.layers.Dense(5, activation="tanh")
        self.head = keras.layers.Dense(CLASSES)

    def call(self, x, training=False):
        return self.head(self.body(x))


def check_a_model_that_is_not_built_is_built_from_an_example(world):
    class Task(Small):
        def build_model(self):
            return Net()

    ended = fit(world, Task, num_steps=2, bn_sync="full")
    assert ended.code == DONE and len(ended.weights()) == 4, ended.message


def check_what_is_no_model_is_told(world):
    class Task(Small):
        def build_model(self):
            return keras.layers.Dense(3)

    refused(world, Task, "build_model must return a keras.Model")


def check_names_of_inputs(world):
    class Task(Small):
        def training_example(self, sample, key):
            return {"inputs": {"img": sample["x"]}, "targets": sample["y"]}

        def build_model(self):
            image = keras.Input((FEATURES,), name="image")
            return keras.Model({"image": image}, keras.layers.Dense(CLASSES)(image))

    refused(world, Task, "['image']", "['img']", "names")

    class NoDict(Task):
        def training_example(self, sample, key):
            return {"inputs": sample["x"], "targets": sample["y"]}

    refused(world, NoDict, "dict", "['image']")


def check_keys_of_an_example(world):
    class Task(Small):
        def training_example(self, sample, key):
            return {"x": sample["x"], "y": sample["y"]}

    refused(world, Task, "training_example", "inputs", "targets", "['x', 'y']")

    class Pair(Small):
        def evaluation_example(self, sample):
            return sample["x"], sample["y"]

    refused(world, Pair, "evaluation_example", "tuple")


def check_a_loss_that_is_a_mean_is_told(world):
    class Mean(Small):
        def loss(self, outputs, targets):
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)
            return tf.reduce_mean(losses)

    refused(world, Mean, "loss must return two tensors", "a loss and a weight", "shape ()")

    class Pair(Mean):
        def loss(self, outputs, targets):
            return super().loss(outputs, targets), tf.constant(1.0)

    refused(world, Pair, "a loss for each example")


def check_shapes_of_losses_and_weights(world):
    class Task(Small):
        def loss(self, outputs, targets):
            losses, weights = super().loss(outputs, targets)
            return losses, weights[:, None]

    refused(world, Task, "losses", "weights", "one shape")


def check_a_mistake_in_a_tasks_function_names_its_line(world):
    class Task(Small):
        def loss(self, outputs, targets):
            return outputs["logits"], targets

    refused(world, Task, "the task's loss failed", "checks_tasks.py, line", "TypeError")

    class Branch(Small):
        def training_example(self, sample, key):
            if sample["y"] > 1:
                return {"inputs": -sample["x"], "targets": sample["y"]}
            return super().training_example(sample, key)

    refused(world, Branch, "training_example failed", "checks_tasks.py, line")


def check_a_model_that_does_not_fit_the_data_is_told(world):
    class Task(Small):
        def build_model(self):
            x = keras.Input((FEATURES + 1,))
            return keras.Model(x, keras.layers.Dense(CLASSES)(x))

    refused(world, Task, "the model", str(FEATURES))


def check_main_metric_is_looked_for_before_the_first_step(world):
    class Task(Small):
        main_metric = "acuracy"

    refused(world, Task, '"acuracy"', "['accuracy']")


def check_names_and_kinds_of_sums(world):
    class Taken(Small):
        def sums(self, outputs, targets):
            return {"loss": tf.constant(1.0)}

    refused(world, Taken, "sums", "loss")

    class Kind(Small):
        def sums(self, outputs, targets):
            return {"hits": tf.argmax(outputs, -1) == tf.cast(targets, tf.int64)}

    refused(world, Kind, "hits", "bool")


def check_what_draw_returns(world):
    class Task(Small):
        def draw(self, inputs, targets, outputs):
            return np.zeros((4, 8, 3), np.float32)

    refused(world, Task, "draw must return", "uint8", "float32 [4, 8, 3]")


def check_a_label_that_is_no_class_is_told_by_value(world):
    """From arrays, whose values nothing has looked at; at the first sample or in mid-run."""
    for place in (0, 37):

        class Task(Small):
            bad = place

            def sources(self):
                train = numbers(1, 60)
                train._arrays["y"][self.bad] = 7
                return train, numbers(2, 20)

            def training_example(self, sample, key):
                from engine import losses

                return {
                    "inputs": sample["x"],
                    "targets": losses.require_classes(sample["y"], CLASSES),
                }

        ended = fit(world, Task, num_steps=6)
        assert ended.code == WRONG_USE, (place, ended.code, ended.message)
        assert "label 7 is no class: classes are 0 to 2" in ended.message, ended.message


def check_a_label_that_nothing_looked_at_ends_the_run_as_diverged(world):
    class Task(Small):
        def sources(self):
            x = np.ones((60, FEATURES), np.float32)
            return Arrays(x=x, y=np.full(60, 3, np.int32)), numbers(2, 20)

    ended = fit(world, Task)
    assert ended.code == 3 and "labels that are no class" in ended.message, ended.message


def check_variables_made_in_the_first_call_are_trained_and_in_training_only_refused(world):
    class Lazy(keras.Model):
        def __init__(self, always):
            super().__init__()
            self.head, self.extra, self.always = keras.layers.Dense(CLASSES), None, always

        def call(self, x, training=False):
            if not (training or self.always):
                return self.head(x)
            if self.extra is None:
                self.extra = keras.layers.Dense(FEATURES, name="extra")
            return self.head(self.extra(x))

    class Task(Small):
        always = True

        def build_model(self):
            return Lazy(self.always)

    class InTraining(Task):
        always = False

    refused(world, InTraining, "the model", "failed", "new elements of state")
    ended = fit(world, Task, optimizer="adam")
    assert ended.code == DONE, ended.message
    paths = [v.path for v in ended.model.trainable_variables]
    assert len(paths) == 4, paths
    first = world.gather_objects(ended.weights()[-1].tobytes(), "lazy")
    assert len(set(first)) == 1
    assert any("extra" in n for n in np.load(ended.folder / "checkpoints/step-00000003/state.npz"))


def check_trainable_changed_too_late_is_told(world):
    class Task(Small):
        def build_model(self):
            self.model = super().build_model()
            return self.model

        def loss(self, outputs, targets):
            self.model.layers[1].trainable = False
            return super().loss(outputs, targets)

    refused(world, Task, "trainable", "build_model")


def check_a_model_without_anything_to_train_is_told(world):
    class Task(Small):
        def build_model(self):
            model = super().build_model()
            model.trainable = False
            return model

    refused(world, Task, "train")


def check_a_frozen_part_stays_as_it_is(world):
    class Task(Small):
        def build_model(self):
            model = super().build_model()
            model.layers[1].trainable = False
            Task.before = model.layers[1].get_weights()
            return model

    ended = fit(world, Task)
    assert ended.code == DONE
    # Broadcast from rank 0, so every rank's seed gave the same.
    for a, b in zip(Task.before, ended.model.layers[1].get_weights()):
        np.testing.assert_array_equal(a, b)


def check_sources_that_fail_are_told(world):
    class Task(Small):
        def sources(self):
            return {}["data"]

    refused(world, Task, "sources failed", "checks_tasks.py, line", "KeyError")


def check_a_task_of_its_own_actions_and_schedule(world):
    seen = []

    class Every2:
        settles = True

        def __init__(self, run):
            self.run = run

        def due(self, step):
            return step % 2 == 0

        def __call__(self, step, result):
            seen.append((step, float(result["lr"]), len(self.run.model.trainable_variables)))

    class Task(Small):
        def actions(self, run):
            return [Every2(run)]

        def schedule(self, config):
            return lambda step: config.base_lr / tf.cast(step + 1, tf.float32)

    ended = fit(world, Task, num_steps=5, base_lr=0.6)
    assert ended.code == DONE
    np.testing.assert_allclose([r["lr"] for r in ended.records if "lr" in r], 0.6 / np.arange(1, 6))
    assert [(s, n) for s, _, n in seen] == [(2, 4), (4, 4)]
    np.testing.assert_allclose([r for _, r, _ in seen], [0.3, 0.15], rtol=1e-6)


def check_actions_that_are_none_are_told(world):
    class Nothing(Small):
        def actions(self, run):
            return None

    refused(world, Nothing, "actions must return a list", "NoneType")

    class Function(Small):
        def actions(self, run):
            return [lambda step, result: None]

    refused(world, Function, "settles", "due(step)", "a function")

    class Mistake(Small):
        def actions(self, run):
            if world.rank == world.size - 1:
                raise KeyError("histogram")
            return []

    refused(world, Mistake, "actions failed", "KeyError")


def check_a_schedule_that_gives_no_rate_is_told(world):
    for value, words in (
        (-0.1, "learning rate of -0.1 after 0 steps"),
        (float("nan"), "rate of nan"),
        (None, "schedule failed"),
    ):

        class Task(Small):
            rate = value

            def schedule(self, config):
                return lambda step: self.rate

        refused(world, Task, words)


def check_a_loss_as_main_metric_is_told(world):
    class Task(Small):
        main_metric = "loss"

    refused(world, Task, "highest", '-sums["loss"] / sums["weight"]')


def check_sums_of_a_batchs_shape_are_told(world):
    class Task(Small):
        def sums(self, outputs, targets):
            return super().sums(outputs, targets) | {"each": tf.argmax(outputs, -1)}

    refused(world, Task, "each", "depends on the batch")


def check_parts_of_an_example_that_make_no_batch_are_told(world):
    def unknown(x, y):
        return tf.ensure_shape(x[: y + 1], [None])

    for part, words in (
        (lambda x, y: tf.sparse.from_dense(x), "a SparseTensor"),
        (lambda x, y: tf.RaggedTensor.from_row_lengths(x, [2, FEATURES - 2]), "a RaggedTensor"),
        (lambda x, y: None, "a NoneType"),
        (unknown, "shape (None,)"),
    ):

        class Task(Small):
            def training_example(self, sample, key, part=part):
                return {"inputs": sample["x"], "targets": part(sample["x"], sample["y"])}

        refused(world, Task, "training_example", words)


def check_outputs_spread_over_targets_are_told(world):
    class Task(Small):
        def build_model(self):
            return dense(1)

        def loss(self, outputs, targets):  # [n, 1] and [n] make [n, n]
            losses = tf.square(outputs - tf.cast(targets, outputs.dtype))
            return losses, tf.ones_like(losses)

    refused(world, Task, "one example more", "[n, 1]")


def check_weights_that_depend_on_outputs_are_told(world):
    class Focal(Small):
        def loss(self, outputs, targets):
            losses, _ = super().loss(outputs, targets)
            return losses, 1 - tf.exp(-losses)

    for micro_batches in (1, 2):
        refused(world, Focal, "tf.stop_gradient", accumulation_steps=micro_batches)

    class Stopped(Focal):
        def loss(self, outputs, targets):
            losses, weights = super().loss(outputs, targets)
            return losses, tf.stop_gradient(weights)

    assert fit(world, Stopped).code == DONE


class Scaled(keras.layers.Layer):
    """Keeps state where Keras does not look for it."""

    def __init__(self, trainable):
        super().__init__()
        self.scale = tf.Variable(1.0, trainable=trainable)

    def call(self, x, training=False):
        if not self.scale.trainable:
            self.scale.assign_add(1.0)
        return x * self.scale


def check_variables_that_the_model_does_not_have_are_told(world):
    for trainable in (True, False):

        class InLayer(Small):
            def build_model(self, trainable=trainable):
                x = keras.Input((FEATURES,))
                return keras.Model(x, keras.layers.Dense(CLASSES)(Scaled(trainable)(x)))

        refused(world, InLayer, "does not hold", "add_weight")

    class Uncertainty(Small):
        def __init__(self, config):
            super().__init__(config)
            self.spread = tf.Variable(0.0)

        def loss(self, outputs, targets):
            losses, weights = super().loss(outputs, targets)
            return losses * tf.exp(-self.spread) + self.spread, weights

    refused(world, Uncertainty, "does not hold")


def check_a_frozen_model_of_the_task_may_be_used(world):
    class Distilled(Small):
        def __init__(self, config):
            super().__init__(config)
            self.teacher = dense(FEATURES)
            self.teacher.trainable = False

        def build_model(self):
            return dense(FEATURES)

        def loss(self, outputs, targets):
            losses, weights = super().loss(outputs, targets)
            return losses + tf.reduce_mean(tf.square(outputs - self.teacher(outputs)), -1), weights

    ended = fit(world, Distilled)
    assert ended.code == DONE, ended.message
    Distilled.__init__ = lambda self, config: (
        Small.__init__(self, config),
        setattr(self, "teacher", dense(FEATURES)),
    )[0]
    refused(world, Distilled, "does not hold", "frozen model")


def check_draws_without_a_key_are_told(world):
    class Noise(keras.layers.Layer):
        def call(self, x, training=False):
            return x + tf.random.normal(tf.shape(x)) if training else x

    class InLayer(Small):
        def build_model(self):
            x = keras.Input((FEATURES,))
            return keras.Model(x, keras.layers.Dense(CLASSES)(Noise()(x)))

    refused(world, InLayer, "RandomStandardNormal", "SeedGenerator")

    class InExample(Small):
        def training_example(self, sample, key):
            flipped = tf.cond(
                tf.random.uniform([]) < 0.5, lambda: sample["x"], lambda: -sample["x"]
            )
            return {"inputs": flipped, "targets": sample["y"]}

    refused(world, InExample, "training_example draws", "`key`")


def check_arrays_of_objects(world):
    names = np.array(["a", "bb", "ccc"] * 10, object)
    x = np.ones([30, FEATURES], np.float32)

    class Strings(Small):
        values = names

        def sources(self):
            # New objects, with other addresses on every rank.
            values = np.array([x if x is None else "".join(x) for x in self.values], object)
            return Arrays(x=x, y=values), Arrays(x=x, y=values)

        def training_example(self, sample, key):
            return self.evaluation_example(sample)

        def evaluation_example(self, sample):
            return {"inputs": sample["x"], "targets": tf.strings.length(sample["y"]) - 1}

    ended = fit(world, Strings, num_steps=1)
    assert ended.code == DONE, ended.message
    Strings.values = np.array(["a", None, "ccc"] * 10, object)
    refused(world, Strings, "array y", "objects")
