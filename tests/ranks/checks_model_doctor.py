"""Holds hvdkit.run.model_doctor on real ranks: what it notes, and when it notes nothing."""

from collections.abc import Callable
from functools import partial

import keras
import numpy as np
from small_runs import Small, classifier, fit

from hvdkit.data.source import Arrays


def printed_by(world, task=Small, **settings) -> str:
    return fit(world, task, **settings).printed


# Notes of the launch, of a busy machine, of batch norm and dropout by rank.
OTHERS = (
    "horovodrun over Gloo",
    "input-bound",
    "slow: ",
    "weights depend on the number of",
)


def doctor_notes(printed: str) -> list[str]:
    """The lines of notes that are the model doctor's."""
    lines = []
    for line in printed.splitlines():
        if line.startswith("note: ") and not any(other in line for other in OTHERS):
            lines.append(line)
    return lines


def check_what_is_seen_before_the_first_step_is_said(world):
    class Bad(Small):
        def sources(self):
            train, val = super().sources()
            x = train._arrays["x"] * 200
            train = Arrays(x=x, y=np.ones(60, np.int32), id=train._arrays["id"])
            train.class_names = ["Cat", "cat"]
            return train, val

    class Good(Small):
        def sources(self):
            train, val = super().sources()
            train.class_names = val.class_names = ["a", "b", "c"]
            return train, val

    bad = printed_by(world, Bad, precision="bfloat16")
    good = printed_by(world, Good)
    # After all runs, as ranks make them together.
    if world.is_chief:
        for note in (
            "inputs are ",
            "samples from all over the data have the same targets",
            "3 classes apart, and the highest label of 60 samples from all over the data is 1: give --num",
            "the last layer has 3 units and the data have 2 classes",
            "classes Cat, cat differ by case",
            "the val split names no classes",
            "the last layer gives bfloat16",
        ):
            assert note in bad, bad
        assert not doctor_notes(good), good


def check_what_the_first_steps_show_is_said(world):
    class Large(Small):
        def build_model(self):
            wide = keras.initializers.RandomNormal(stddev=300.0, seed=1)
            body = keras.layers.Dense(5, activation="tanh")
            return classifier(body, kernel_initializer=wide)

    class Still(Small):
        """Its ReLUs are dead."""

        def build_model(self):
            low = keras.initializers.Constant(-99)
            return classifier(
                keras.layers.Dense(5, activation="relu", bias_initializer=low)
            )

    train = partial(printed_by, world, global_batch_size=60, lr_policy="constant")
    large = train(Large, num_steps=1)
    still = train(Still, num_steps=100, base_lr=1e-6)
    good = printed_by(world, num_steps=120)
    if world.is_chief:
        assert "the loss begins at " in large, large
        assert "did not change in 20 steps: the gradient is 0" in still, still
        assert "the loss did not fall in 100 steps" in still, still
        assert not doctor_notes(good), good


def check_a_dry_run_learns_one_batch_by_heart(world):
    note = "note: one batch was not learned by heart"
    good = printed_by(world, dry_run=True, num_steps=60, base_lr=0.5)
    slow = printed_by(world, dry_run=True, num_steps=60, base_lr=1e-6, virtual_ranks=4)
    if world.is_chief:
        assert "learning by heart: in 50 steps the loss of one batch went from " in good
        assert note not in good and note in slow and "the median layer" not in good


def slow_check_a_dry_run_names_layers_whose_gradient_is_far_from_the_others(world):
    class Weak(Small):
        """One of three layers hardly counts."""

        factors = (1.0, 1e-9)

        def build_model(self):
            x = keras.Input((6,))
            y = x
            for number, factor in enumerate(self.factors):
                more = keras.layers.Dense(6, "tanh", name=f"layer{number}")(y)
                y = y + keras.layers.Rescaling(factor)(more)
            return keras.Model(x, keras.layers.Dense(3, name="last")(y))

    class MostlyWeak(Weak):
        """Three of four layers hardly count."""

        factors = (1e-9, 1e-9, 1e-9)

    train = partial(printed_by, world, dry_run=True, num_steps=60, weight_decay=1e-3)
    one_weak = train(Weak)
    one_strong = train(MostlyWeak)
    if world.is_chief:
        note = "gradient of layer1/kernel is over 1e+05 times as small as"
        assert note in one_weak, one_weak
        note = "gradient of last/kernel is over 1e+05 times as large as"
        assert note in one_strong, one_strong


L = keras.layers
SCALE = keras.initializers.Constant(1e-6)


def _convolutional(x):
    """MobileNet's block: depthwise, ReLU6."""
    x = L.ReLU(6.0)(
        L.BatchNormalization()(L.Conv2D(16, 3, 2, "same", use_bias=False)(x))
    )
    x = L.ReLU(6.0)(L.BatchNormalization()(L.DepthwiseConv2D(3, padding="same")(x)))
    return L.GlobalAveragePooling2D()(L.Conv2D(32, 1)(x))


def _grouped(x):
    x = L.Conv2D(16, 3, padding="same")(x)
    for _ in range(3):
        x = x + L.Conv2D(16, 3, padding="same")(
            L.GroupNormalization(4)(L.Activation("relu")(x))
        )
    return L.GlobalAveragePooling2D()(x)


def _convnext(x):
    x = L.LayerNormalization()(L.Conv2D(16, 4, 4)(x))
    for _ in range(2):
        y = L.Dense(64, "gelu")(
            L.LayerNormalization()(L.DepthwiseConv2D(7, padding="same")(x))
        )
        x = x + L.Dense(16)(y) * LayerScale()(y[..., :16])
    return L.GlobalAveragePooling2D()(x)


class LayerScale(keras.layers.Layer):
    """ConvNeXt's: it begins at 1e-6."""

    def build(self, shape):
        self.gamma = self.add_weight(shape=shape[-1:], initializer=SCALE, name="gamma")

    def call(self, x):
        return self.gamma * keras.ops.ones_like(x)


def _squeezed(x):
    """DenseNet's concatenations and a squeeze-and-excitation block."""
    for _ in range(3):
        y = L.Conv2D(8, 3, padding="same")(
            L.Activation("swish")(L.BatchNormalization()(x))
        )
        x = L.Concatenate()([x, y])
    gate = L.Dense(x.shape[-1], "sigmoid")(
        L.Dense(4, "relu")(L.GlobalAveragePooling2D()(x))
    )
    return L.GlobalAveragePooling2D()(x * gate[:, None, None])


def _vit(x):
    x = L.Reshape((16, 32))(L.Conv2D(32, 4, 4)(x))
    for _ in range(2):
        y = L.LayerNormalization()(x)
        x = x + L.MultiHeadAttention(4, 8)(y, y)
        x = x + L.Dense(32)(L.Dense(64, "gelu")(L.LayerNormalization()(x)))
    return L.GlobalAveragePooling1D()(L.LayerNormalization()(x))


def _mixer(x):
    x = L.Reshape((16, 32))(L.Conv2D(32, 4, 4)(x))
    for _ in range(2):
        y = L.Permute((2, 1))(L.LayerNormalization()(x))
        x = x + L.Permute((2, 1))(L.Dense(16)(L.Dense(32, "gelu")(y)))
        x = x + L.Dense(32)(L.Dense(64, "gelu")(L.LayerNormalization()(x)))
    return L.GlobalAveragePooling1D()(x)


def _vgg(x):
    """No normalization, dropout before the head."""
    for width in (8, 16):
        x = L.MaxPooling2D()(L.Conv2D(width, 3, activation="relu", padding="same")(x))
    return L.Dropout(0.5)(L.Dense(64, "relu")(L.Flatten()(x)))


def _selu(x):
    x = L.Flatten()(x)
    for _ in range(4):
        x = L.Dense(32, "selu", kernel_initializer="lecun_normal")(x)
    return L.AlphaDropout(0.1)(x)


def _recurrent(x):
    return L.LSTM(32)(L.Reshape((16, 48))(x))


def _both_ways(x):
    return L.Bidirectional(L.GRU(16))(L.Dropout(0.1)(L.Reshape((48, 16))(x)))


SOUND = (
    _convolutional,
    _grouped,
    _convnext,
    _squeezed,
    _vit,
    _mixer,
    _vgg,
    _selu,
    _recurrent,
    _both_ways,
)


def of_pictures(body: Callable) -> type:
    """A task of 16 x 16 pixels around 0, of which one colour is brighter."""

    class Pictures(Small):
        def sources(self):
            rng = np.random.default_rng(3)
            splits = []
            for size in (120, 24):
                y = rng.integers(0, 3, size).astype(np.int32)
                x = (
                    rng.normal(size=(size, 16, 16, 3))
                    + 0.7 * np.eye(3)[y][:, None, None]
                )
                splits.append(Arrays(x=x.astype(np.float32), y=y, id=np.arange(size)))
            return splits

        def build_model(self):
            image = keras.Input((16, 16, 3))
            return keras.Model(image, L.Dense(3)(body(image)))

    return Pictures


def slow_check_sound_models_have_no_note(world):
    """The ten of SOUND: in a dry run, which learns a batch by heart, and in 120 steps."""
    train = partial(
        printed_by,
        world,
        num_steps=120,
        optimizer="adam",
        base_lr=3e-3,
        warmup_steps=10,
    )
    notes = {}
    for body in SOUND:
        task = of_pictures(body)
        notes[body.__name__, "dry run"] = doctor_notes(train(task, dry_run=True))
        notes[body.__name__, "run"] = doctor_notes(train(task, log_every=20))
    if world.is_chief:
        assert not any(notes.values()), notes
