"""Run on real ranks by test_small_runs.py: what the model doctor says, and when it says nothing."""

from types import MappingProxyType

import keras
import numpy as np
from small_runs import Small, classifier, fit, numbers

from hvdkit.data.source import Arrays


class Changed(Small):
    """The usual task with other arrays or layers."""

    change = head = MappingProxyType({})  # of the training arrays, of the last layer
    layers = (keras.layers.Dense, MappingProxyType({"units": 5, "activation": "tanh"}))
    names = ()  # of classes

    def sources(self):
        train, val = super().sources()
        train = Arrays(**train._arrays | self.change)
        train.class_names = list(self.names)
        return train, val

    def build_model(self):
        kind, how = self.layers
        return classifier(kind(**how), **self.head)


def notes(world, task=Small, **settings) -> str:
    return fit(world, task, **settings).printed


# Notes of the launch, of a busy machine, of batch norm and dropout by rank.
OTHERS = ("horovodrun over Gloo", "input-bound", "slow: ", "weights depend on the number of")


def judge(world, found: dict[str, str], good: str) -> None:
    """Each run said its note, the good one none; after all runs, as ranks make them together."""
    if world.is_chief:
        lacking = {said: printed for said, printed in found.items() if said not in printed}
        said = [line for line in good.splitlines() if line.startswith("note: ")]
        assert not lacking and not [x for x in said if not any(map(x.count, OTHERS))], (
            lacking,
            said,
        )


def check_what_is_seen_before_the_first_step_is_said(world):
    said = (
        "inputs are ",
        "samples from all over the data have the same targets",
        "3 classes apart, and the highest label of 60 samples from all over the data is 1: give --num",
        "the last layer has 3 units and the data have 2 classes",
        "classes Cat, cat differ by case",
        "the last layer gives bfloat16",
    )
    x = numbers(1, 60)._arrays["x"]
    all_wrong = {
        "change": {"x": x * 200, "y": np.ones(60, np.int32)},
        "names": ("Cat", "cat"),
    }
    found = dict.fromkeys(
        said, notes(world, type("Bad", (Changed,), all_wrong), precision="bfloat16")
    )
    good = notes(world, type("Good", (Changed,), {"names": ("a", "b", "c")}))
    judge(world, found, good)


def check_what_the_first_steps_show_is_said(world):
    wide = keras.initializers.RandomNormal(stddev=300.0, seed=1)
    dead = {"units": 5, "activation": "relu", "bias_initializer": keras.initializers.Constant(-99)}
    usual = {"global_batch_size": 60, "lr_policy": "constant"}
    large = type("Large", (Changed,), {"head": {"kernel_initializer": wide}})
    still = type("Still", (Changed,), {"layers": (keras.layers.Dense, dead)})
    slow = notes(world, still, **usual, num_steps=100, base_lr=1e-6)
    found = {
        "the loss begins at ": notes(world, large, **usual, num_steps=1),
        "did not change in 20 steps: the gradient is 0": slow,
        "the loss did not fall in 100 steps": slow,
    }
    judge(world, found, notes(world, num_steps=120))


def check_a_dry_run_learns_one_batch_by_heart(world):
    said = "note: one batch was not learned by heart"
    good = notes(world, dry_run=True, num_steps=60, base_lr=0.5)
    slow = notes(world, dry_run=True, num_steps=60, base_lr=1e-6, virtual_ranks=4)
    if world.is_chief:
        assert "learning by heart: in 50 steps the loss of one batch went from " in good
        assert said not in good and said in slow and "the median layer" not in good


def slow_check_a_dry_run_names_layers_whose_gradient_is_far_from_the_others(world):
    class Weak(Small):
        """Layers that hardly count: one of three, or three of four."""

        def build_model(self):
            x = y = keras.Input((6,))
            for number, factor in enumerate(self.factors):
                more = keras.layers.Dense(6, "tanh", name=f"layer{number}")(y)
                y = y + keras.layers.Rescaling(factor)(more)
            return keras.Model(x, keras.layers.Dense(3, name="last")(y))

    how, found = {"dry_run": True, "num_steps": 60, "weight_decay": 1e-3}, []
    for factors in ((1.0, 1e-9), (1e-9, 1e-9, 1e-9)):
        found.append(notes(world, type("Weak", (Weak,), {"factors": factors}), **how))
    if world.is_chief:
        assert "gradient of layer1/kernel is over 1e+05 times as small as" in found[0], found[0]
        assert "gradient of last/kernel is over 1e+05 times as large as" in found[1], found[1]


L, SCALE = keras.layers, keras.initializers.Constant(1e-6)


def _convolutional(x):
    """MobileNet's block: depthwise, ReLU6."""
    x = L.ReLU(6.0)(L.BatchNormalization()(L.Conv2D(16, 3, 2, "same", use_bias=False)(x)))
    x = L.ReLU(6.0)(L.BatchNormalization()(L.DepthwiseConv2D(3, padding="same")(x)))
    return L.GlobalAveragePooling2D()(L.Conv2D(32, 1)(x))


def _grouped(x):
    x = L.Conv2D(16, 3, padding="same")(x)
    for _ in range(3):
        x = x + L.Conv2D(16, 3, padding="same")(L.GroupNormalization(4)(L.Activation("relu")(x)))
    return L.GlobalAveragePooling2D()(x)


def _convnext(x):
    x = L.LayerNormalization()(L.Conv2D(16, 4, 4)(x))
    for _ in range(2):
        y = L.Dense(64, "gelu")(L.LayerNormalization()(L.DepthwiseConv2D(7, padding="same")(x)))
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
        y = L.Conv2D(8, 3, padding="same")(L.Activation("swish")(L.BatchNormalization()(x)))
        x = L.Concatenate()([x, y])
    gate = L.Dense(x.shape[-1], "sigmoid")(L.Dense(4, "relu")(L.GlobalAveragePooling2D()(x)))
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


SOUND = (_convolutional, _grouped, _convnext, _squeezed, _vit, _mixer, _vgg, _selu)
SOUND += (_recurrent, _both_ways)


class Pictures(Small):
    """16 x 16 pixels around 0: one colour is brighter."""

    def sources(self):
        rng, found = np.random.default_rng(3), []
        for size in (120, 24):
            y = rng.integers(0, 3, size).astype(np.int32)
            x = rng.normal(size=(size, 16, 16, 3)) + 0.7 * np.eye(3)[y][:, None, None]
            found.append(Arrays(x=x.astype(np.float32), y=y, id=np.arange(size)))
        return found

    def build_model(self):
        image = keras.Input((16, 16, 3))
        return keras.Model(image, L.Dense(3)(self.body(image)))


def slow_check_sound_models_have_no_note(world):
    """The ten of SOUND: in a dry run, which learns a batch by heart, and in 120 steps."""
    noted = {}
    for body in SOUND:
        task = type("Sound", (Pictures,), {"body": staticmethod(body)})
        usual = {"num_steps": 120, "optimizer": "adam", "base_lr": 3e-3, "warmup_steps": 10}
        for how in ({"dry_run": True}, {"log_every": 20}):
            printed = notes(world, task, **usual | how)
            said = [line for line in printed.splitlines() if line.startswith("note: ")]
            noted[body.__name__, *how] = [x for x in said if not any(map(x.count, OTHERS))]
    if world.is_chief:
        assert not any(noted.values()), {name: said for name, said in noted.items() if said}
