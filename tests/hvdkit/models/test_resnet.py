"""The networks are the papers', the counts are counts."""

import dataclasses
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdkit.data.prepare import pack
from hvdkit.data.shipped import Digits
from hvdkit.models import resnet
from hvdkit.settings import Settings
from hvdkit.train.layers import batch_norm
from tasks import classification
from tasks.classification import MODELS

CONFIG = dataclasses.replace(
    Settings(), task="classification", num_classes=10, image_size=8
)


@pytest.mark.parametrize(
    ("name", "parameters"), [("resnet20", 269_722), ("resnet56", 853_018)]
)
def test_parameters(name, parameters):
    """He et al. 2015, table 6: 0.27 and 0.85 million. Those of resnet50_keras: test_backbone.py."""
    assert trainable(MODELS[name](32, 10, 0.0)) == parameters


def trainable(model: keras.Model) -> int:
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


@pytest.fixture(scope="module")
def resnet50() -> keras.Model:
    keras.utils.set_random_seed(0)
    return MODELS["resnet50"](65, 1000, 0.0)


def test_resnet50_begins_as_its_paper_says(resnet50):
    """Goyal et al. 2017 (arXiv:1706.02677), section 5.1; the count is torchvision's num_params."""
    assert trainable(resnet50) == 25_557_032
    weights = {layer.name: layer.get_weights() for layer in resnet50.layers}
    convs = {n: w for n, w in weights.items() if n.endswith("_conv")}
    assert len(convs) == 53 and all(len(w) == 1 for w in convs.values())
    for name, (kernel,) in convs.items():
        high, wide, _, filters = kernel.shape
        assert kernel.std() == pytest.approx(
            np.sqrt(2 / (high * wide * filters)), rel=0.05
        ), name
    norms = {
        layer.name: layer for layer in resnet50.layers if layer.name.endswith("_bn")
    }
    assert len(norms) == 53
    for name, layer in norms.items():
        assert (layer.momentum, layer.epsilon) == (0.9, 1e-5)
        assert set(layer.get_weights()[0]) == {0.0 if name.endswith("_3_bn") else 1.0}
    kernel, bias = weights["logits"]
    assert kernel.std() == pytest.approx(0.01, rel=0.01) and not bias.any()
    strided = {x.name for x in resnet50.layers if getattr(x, "strides", (1,))[0] == 2}
    expected = {"stem_conv"}
    for stage in (2, 3, 4):
        expected |= {
            f"stage{stage}_block1_shortcut_conv",
            f"stage{stage}_block1_2_conv",
        }
    assert {name for name in strided if "pool" not in name} == expected


def test_resnet50_computes_what_keras_applications_does_with_its_strides(resnet50):
    """Sizes are odd, for which Keras's own padding is the same on all sides, as Torch's always."""
    theirs = keras.applications.ResNet50(
        weights=None, input_shape=(65, 65, 3), classifier_activation=None
    )
    rng = np.random.default_rng(0)
    for layer in [layer for layer in resnet50.layers if layer.weights]:
        name = name_in_keras(layer.name)
        weights = layer.get_weights()
        if name.endswith("_bn"):
            ranges = ((0.5, 1.0), (-0.2, 0.2), (-0.2, 0.2), (0.5, 1.5))
            shape = weights[0].shape
            weights = [rng.uniform(low, high, shape) for low, high in ranges]
            layer.set_weights(weights)
        elif name.endswith("_conv"):
            assert layer.padding == "valid"  # zeros are added apart
            theirs.get_layer(name).strides = layer.strides
            weights.append(np.zeros(layer.filters))  # ours have no bias
        theirs.get_layer(name).set_weights(weights)
    picture = rng.integers(0, 256, (2, 65, 65, 3))
    logits = resnet50({"image": tf.constant(picture, tf.uint8)}, training=False)
    expected = theirs(picture / 127.5 - 1).numpy()
    np.testing.assert_allclose(
        logits, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max()
    )


def name_in_keras(name: str) -> str:
    """stage1_block2_shortcut_bn is conv2_block2_0_bn there."""
    name = re.sub(r"stage(\d)", lambda match: f"conv{int(match[1]) + 1}", name)
    for part, theirs in (
        ("stem", "conv1"),
        ("shortcut", "0"),
        ("logits", "predictions"),
    ):
        name = name.replace(part, theirs)
    return name


@pytest.mark.parametrize("name", [n for n in MODELS if not n.startswith("resnet5")])
def test_models_give_float32_logits_and_can_be_saved_and_synchronized(name, tmp_path):
    model = MODELS[name](16, 7, 0.2)
    inputs = {
        "image": tf.random.stateless_uniform([2, 16, 16, 3], [1, 2], 0, 255),
        "key": tf.zeros([2, 2], tf.int32),
    }
    # Pictures of the model show these names.
    assert [x.name for x in model.inputs] == list(inputs)
    logits = model(inputs)
    assert logits.shape == (2, 7) and logits.dtype == tf.float32
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(inputs), logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        batch_norm.synchronize(model)(inputs), logits, rtol=1e-5, atol=1e-6
    )


def test_blocks_that_stride_and_widen_keep_every_second_pixel():
    x = keras.Input((4, 4, 2))
    image = np.arange(32, dtype=np.float32).reshape(1, 4, 4, 2)
    out = keras.Model(x, resnet._shortcut(x, 5, strides=2))(image)
    np.testing.assert_array_equal(
        out, np.pad(image[:, ::2, ::2], [(0, 0)] * 3 + [(0, 3)])
    )


def test_accuracy_and_top_5():
    task = classification.Task(CONFIG)
    # Class 0 is likeliest, then class 1.
    logits = tf.constant(np.tile(np.arange(10.0, 0.0, -1.0), (4, 1)))
    sums = task.sums(logits, tf.constant([0, 4, 5, 9], tf.int64))
    figures = task.metrics({k: v.numpy() for k, v in sums.items()})
    assert figures == {"accuracy": 0.25, "top5_accuracy": 0.5}
    # Ties, and logits that are no numbers: test_metrics.py.
    few = classification.Task(dataclasses.replace(CONFIG, num_classes=5))
    names = list(few.sums(logits[:, :5], tf.constant([0, 4, 3, 3], tf.int64)))
    assert names == ["hits", "samples", "confusion"]


@pytest.mark.parametrize(
    ("format", "mirror", "mirrored"),
    [("", "auto", False), ("digits", "on", True), ("class_folders", "auto", True),
     ("class_folders", "off", False)],
)  # fmt: skip
def test_pictures_are_mirrored_as_the_flag_says_or_where_they_are_no_digits(
    format, mirror, mirrored
):
    config = dataclasses.replace(
        CONFIG, data_format=format, mirror=mirror, image_size=16
    )
    ramp = tf.constant(np.tile(np.arange(16, dtype=np.uint8)[:, None] * 9, (16, 1, 3)))
    sample = {"image": ramp, "label": tf.constant(0)}
    for smallest in (None, 0.9):  # pictures are moved, then cut
        task = classification.Task(config)
        assert task.smallest is None
        task.smallest = smallest
        falls = 0
        for number in range(12):
            drawn = task.training_example(sample, tf.constant([0, number]))["inputs"][
                "image"
            ]
            if drawn[8, 4, 0] > drawn[8, 11, 0]:
                falls += 1
        assert (0 < falls < 12) if mirrored else falls == 0


def test_packed_digits_are_not_mirrored_either(tmp_path):
    for split in ("train", "val"):
        pack.pack(Digits(None, split), tmp_path, split)
    config = dataclasses.replace(
        CONFIG, data_format="records", data_dir=str(tmp_path), num_classes=10
    )
    for mirror, mirrored in (("auto", False), ("on", True)):
        task = classification.Task(dataclasses.replace(config, mirror=mirror))
        task.sources()
        assert task.mirror == mirrored


def test_wrong_model_is_named():
    with pytest.raises(ValueError, match=r"--model=vgg.*resnet20"):
        classification.Task(dataclasses.replace(CONFIG, model="vgg"))
