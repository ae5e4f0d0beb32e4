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
