"""Run on real ranks by test_small_runs.py: models that are wrong, told before the first step."""

from __future__ import annotations

import h5py
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from checks_tasks import dense, refused
from keras.src.legacy.saving import legacy_h5_format
from small_runs import CLASSES, FEATURES, Small, fit, folder
from tensorflow.python.framework import config as tf_config

from hvdkit.stop import DONE
from hvdkit.train import preprocessing


def task(make=None, **methods) -> type:
    """A task with this model, or other functions of its own."""
    return type("Task", (Small,), methods | ({"build_model": lambda self: make()} if make else {}))


def followed(*parts):
    """A functional model of layers and a dense one behind them."""
    x = y = keras.Input((FEATURES,))
    for part in parts:
        y = part(y)
    return keras.Model(x, keras.layers.Dense(CLASSES)(y))


class Net(keras.Model):
    """The usual subclassed model, not built when it is returned."""

    def __init__(self):
        super().__init__()
        self.body = keras.layers.Dense(5, activation="tanh")
        self.head = keras.layers.Dense(CLASSES)

    def call(self, x, training=False):
        return self.head(self.body(x))


class Aux(Net):
    """Only training calls its second head."""

    def __init__(self):
        super().__init__()
        self.aux = keras.layers.Dense(CLASSES)

    def call(self, x, training=False):
        inner = self.body(x)
        return self.head(inner) + (self.aux(inner) if training else 0)


class Lazy(keras.Model):
    """Makes a layer in its first call; in `training` only, or `always`."""

    def __init__(self, always=False):
        super().__init__()
        self.head, self.extra, self.always = keras.layers.Dense(CLASSES), None, always

    def call(self, x, training=False):
        if not (training or self.always):
            return self.head(x)
        if self.extra is None:
            self.extra = keras.layers.Dense(FEATURES, name="extra")
        return self.head(self.extra(x))


def check_layers_that_calls_make_are_built_and_trained(world):
    """A model that is not built, one with a head for training, one whose first call makes it."""
    for make, settings, weights, name in (
        (Net, {"bn_sync": "full"}, 4, "net"),
        (Aux, {}, 6, "aux"),
        (lambda: Lazy(True), {"optimizer": "adam"}, 4, "extra"),
    ):
        ended = fit(world, task(make), num_steps=2, **settings)
        assert ended.code == DONE and len(ended.model.trainable_variables) == weights, ended.message
        state = np.load(ended.folder / "checkpoints/step-00000002/state.npz")
        assert any(name in n for n in state)
        last = world.gather_objects(ended.weights()[-1].tobytes(), "last")
        assert len(set(last)) == 1


class Steps(Net):
    def train_step(self, data):
        raise NotImplementedError


class Losses(Net):
    def compute_loss(self, *args, **kwargs):
        raise NotImplementedError


class Scaled(keras.layers.Layer):
    """Keeps state where Keras does not look for it."""

    def __init__(self, trainable):
        super().__init__()
        self.scale = tf.Variable(1.0, trainable=trainable)

    def call(self, x, training=False):
        if not self.scale.trainable:
            self.scale.assign_add(1.0)
        return x * self.scale


class Noise(keras.layers.Layer):
    def call(self, x, training=False):
        return x + tf.random.normal(tf.shape(x)) if training else x


def frozen():
    model = dense()
    model.trainable = False
    return model


# Models that are refused, and words of the sentence about them.
MODELS = [
    (lambda: keras.layers.Dense(3), "build_model must return a keras.Model"),
    (Steps, "defines its own train_step", "the task's loss"),
    (Losses, "defines its own compute_loss", "the task's loss"),
    (
        lambda: keras.Sequential([keras.Input((FEATURES + 1,)), keras.layers.Dense(CLASSES)]),
        *("the model", str(FEATURES)),
    ),
    (Lazy, "the model", "failed", "new elements of state"),
    (frozen, "train"),
    (lambda: followed(Scaled(True)), "does not hold", "add_weight"),
    (lambda: followed(Scaled(False)), "does not hold", "add_weight"),
    (lambda: followed(Noise()), "RandomStandardNormal", "SeedGenerator"),
]


def check_models_that_cannot_be_trained_are_refused(world):
    for make, *words in MODELS:
        refused(world, task(make), *words)
    for make, *words in MODELS[-2:]:
        refused(world, task(make), *words, jit=True)


def check_names_of_inputs(world):
    def model():
        image = keras.Input((FEATURES,), name="image")
        return keras.Model({"image": image}, keras.layers.Dense(CLASSES)(image))

    def example(self, sample, key):
        return {"inputs": {"img": sample["x"]}, "targets": sample["y"]}

    refused(world, task(model, training_example=example), "['image']", "['img']", "names")
    refused(world, task(model), "dict", "['image']")


def check_trainable_changed_too_late_is_told(world):
    class Task(Small):
        def build_model(self):
            self.model = super().build_model()
            return self.model

        def loss(self, outputs, targets):
            self.model.layers[1].trainable = False
            return super().loss(outputs, targets)

    refused(world, Task, "trainable", "build_model")


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


def check_a_variable_of_the_loss_is_refused(world):
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
        def __init__(self, config, trainable=False):
            super().__init__(config)
            self.teacher = dense(FEATURES)
            self.teacher.trainable = trainable

        def build_model(self):
            return dense(FEATURES)

        def loss(self, outputs, targets):
            losses, weights = super().loss(outputs, targets)
            return losses + tf.reduce_mean(tf.square(outputs - self.teacher(outputs)), -1), weights

    class Trained(Distilled):
        def __init__(self, config):
            super().__init__(config, trainable=True)

    ended = fit(world, Distilled)
    assert ended.code == DONE, ended.message
    refused(world, Trained, "does not hold", "frozen model")


def noisy(noise):
    """A function of a task that makes an example with `noise(task, x)` added."""
    return lambda self, sample, key=None: {
        "inputs": sample["x"] + noise(self, sample["x"]),
        "targets": sample["y"],
    }


def check_draws_without_a_key_are_told(world):
    class OfState(Small):
        def __init__(self, config):
            super().__init__(config)
            self.state, self.noise = tf.Variable(0.0), tf.random.Generator.from_seed(1)
            self.layer = keras.layers.GaussianNoise(0.5, seed=1)

    def flip(self, x):
        return tf.cond(tf.random.uniform([]) < 0.5, lambda: x, lambda: -x)

    for noise, *words in (
        (flip, "training_example draws", "`key`"),
        (
            lambda self, x: self.noise.normal([FEATURES]),
            *("training_example draws", "RngReadAndSkip"),
        ),
        (
            lambda self, x: self.layer(x[None], training=True)[0],
            *("training_example changes a variable",),
        ),
        (
            lambda self, x: self.state.assign_add(1.0),
            *("training_example changes a variable", "AssignAddVariableOp"),
        ),
    ):
        refused(world, type("Task", (OfState,), {"training_example": noisy(noise)}), *words)
    example = noisy(lambda self, x: tf.random.normal([FEATURES]))
    refused(world, task(evaluation_example=example), "evaluation_example draws", "leave them out")


def check_what_xla_cannot_compile_is_told(world):
    """Its own errors would come in the first step, and what it leaves out never."""

    def resizing():
        inside = keras.layers.Resizing(4, 4, "bicubic")
        return followed(keras.layers.Reshape((2, 3, 1)), inside, keras.layers.Flatten())

    refused(world, task(resizing), "--jit", "it has no ResizeBicubic (", "resizing", jit=True)

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
        (lambda x: x + 0 * hvd.allreduce(x, name="own"), "checks_task_models.py, line", "(own)"),
        (lambda x: tf.reshape(x, [tf.cast(12 + 0 * x[0], tf.int32)]), "compile-time constant"),
    ]
    for change, *words in cases:

        def loss(self, outputs, targets, change=change):
            losses, weights = Small.loss(self, outputs, targets)
            return change(losses), weights

        refused(world, task(loss=loss), "--jit", *words, jit=True)


def check_a_backbone_is_read_by_rank_0_alone_and_goes_on(world):
    """In each kind of run; its pictures' mode too. A resume does not read it again."""

    class Pictures(Small):
        def build_model(self):
            x = keras.Input((FEATURES,))
            y = keras.layers.Reshape((FEATURES // 3, 1, 3))(x)
            y = preprocessing.Preprocess(name="preprocess")(y)
            y = keras.layers.Conv2D(4, 1, name="conv1_conv")(y)
            y = keras.layers.BatchNormalization(name="conv1_bn", momentum=1 - 1e-9)(y)
            y = keras.layers.Flatten()(y)
            model = keras.Model(x, keras.layers.Dense(CLASSES, name="logits")(y), name="pictures")
            model.backbone = "conv1_bn"
            return model

    def begins(model):
        norm = model.get_layer("conv1_bn").get_weights()
        return [model.get_layer("conv1_conv").get_weights()[0], norm[2], norm[3]]

    file = folder(world) / "backbone.h5"
    there = Pictures(None).build_model()
    there.set_weights([np.full(w.shape, 0.5 + i) for i, w in enumerate(there.get_weights())])
    if world.is_chief:
        body = keras.Model(there.get_layer("conv1_conv").input, there.get_layer("conv1_bn").output)
        with h5py.File(file, "w") as content:
            legacy_h5_format.save_weights_to_hdf5_group(content, body)
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    kinds = (
        {"precision": "bfloat16", "ema_decay": 0.5},
        {"virtual_ranks": 2, "cpu_threads": threads, "deterministic": True},
    )
    for kind in kinds:
        # Others do not look at it: there is none.
        path = file if world.is_chief else file.with_name("nothing")
        how = kind | {"base_lr": 1e-30, "eval_every": 1, "run_dir": str(folder(world) / "run")}
        how |= {"backbone_preprocessing": "caffe"}
        runs = [fit(world, Pictures, num_steps=2, backbone_weights=str(path), **how)]
        if "ema_decay" in kind:  # once is enough
            gone = str(file) + ".gone"
            runs.append(fit(world, Pictures, num_steps=3, backbone_weights=gone, **how))
        tf_config.disable_op_determinism()
        for run in runs:
            assert run.code == DONE, run.message
            assert int(run.model.get_layer("preprocess").mode) == 1
            for one, other in zip(begins(run.model), begins(there)):
                np.testing.assert_allclose(one, other, rtol=1e-3)
        if world.is_chief and "ema_decay" in kind:
            with np.load(run.folder / "checkpoints/step-00000003/state.npz") as state:
                name = next(n for n in state if n.startswith("ema/") and "conv1_conv/kernel" in n)
                np.testing.assert_allclose(state[name], begins(there)[0], rtol=1e-6)
