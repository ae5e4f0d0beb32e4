"""A backbone's weights from files as keras.applications has them, and what pictures it is fed."""

import os

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.applications import imagenet_utils
from keras.src.legacy.saving import legacy_h5_format
from refusals import refused
from small_checkpoints import counted, first_weights

from hvdkit.checkpoint import warm_start
from hvdkit.settings import Settings
from hvdkit.train.layers import preprocessing
from hvdkit.train.layers.preprocessing import Preprocess
from hvdkit.train.step.state import names_of_model
from tasks import classification

PICTURE = np.random.default_rng(2).integers(0, 256, (1, 64, 64, 3)).astype(np.float32)
PLACES = ("conv2_block3_out", "conv4_block6_out", "conv5_block3_out")


def write(model, path):
    """As keras.applications' files are: the format of Keras 2, without the network itself."""
    with h5py.File(path, "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, model)
    return path


def load(model, file, mode):
    config = Settings(backbone_weights=str(file), backbone_preprocessing=mode)
    warm_start.load_backbone(model, config)


def features(model, image):
    outputs = [model.get_layer(name).output for name in PLACES]
    return [x.numpy() for x in keras.Model(model.inputs, outputs)([image])]


def test_features_are_those_of_keras_applications(tmp_path):
    """On the same picture, which the project feeds as it is and Keras in BGR less a mean."""
    there = keras.applications.ResNet50(
        include_top=False, weights=None, input_shape=(64, 64, 3)
    )
    rng = np.random.default_rng(1)
    for variable in there.variables:
        if variable.name != "kernel":
            low = 0.5 if variable.name in ("gamma", "moving_variance") else -0.2
            variable.assign(rng.uniform(low, low + 0.5, variable.shape))
    wanted = features(there, keras.applications.resnet.preprocess_input(PICTURE.copy()))
    model = classification.MODELS["resnet50_keras"](64, 5, 0.0)
    load(model, write(there, tmp_path / "notop.h5"), "caffe")
    for layer in there.layers[1:]:
        pairs = zip(layer.weights, model.get_layer(layer.name).weights, strict=True)
        assert all(np.array_equal(one.numpy(), other.numpy()) for one, other in pairs)
    for one, other in zip(features(model, PICTURE), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("mode", preprocessing.MODES)
def test_pictures_are_turned_into_those_of_keras_applications(mode):
    layer = Preprocess()
    layer.build((None, None, None, 3))
    layer.mode.assign(preprocessing.MODES.index(mode))
    wanted = imagenet_utils.preprocess_input(PICTURE.copy(), mode=mode)
    np.testing.assert_allclose(layer(PICTURE), wanted, rtol=0, atol=3e-5)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:  # pictures are float32 up to the first layer
        assert Preprocess()(keras.Input((4, 4, 3))).dtype == "float32"
    finally:
        keras.config.set_dtype_policy("float32")


def small(start=0.0, filters=4, pixels=True, backbone="conv1_bn"):
    """A convolution, batch norm, a head; weights count up from `start`."""
    image = keras.Input((None, None, 3), name="image")
    x = Preprocess(name="preprocess")(image) if pixels else preprocessing.scaled(image)
    x = keras.layers.Conv2D(filters, 3, name="conv1_conv")(x)
    x = keras.layers.BatchNormalization(name="conv1_bn")(x)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Dropout(0.1)(x))
    model = keras.Model(image, keras.layers.Dense(3, name="logits")(x), name="small")
    model.backbone = backbone
    return counted(model, start)


def mode(model) -> str:
    return preprocessing.MODES[int(preprocessing.find(model).mode)]


def published(path, last="conv1_bn", **options):
    model = small(5.0, pixels=False, **options)
    return write(keras.Model(model.input, model.get_layer(last).output), path)


def test_models_that_leave_pictures_unscaled_are_known():
    shades, floats = (np.zeros((1, 8, 8, 3), dtype) for dtype in ("uint8", "float32"))
    image = keras.Input((8, 8, 3))
    bare = keras.Model(image, keras.layers.Conv2D(2, 3)(image))
    inside = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Rescaling(1 / 255), bare]
    )
    unscaled = preprocessing.leaves_unscaled
    assert unscaled(bare, {"image": tf.constant(shades)})
    assert not unscaled(bare, {"image": tf.constant(floats)})
    for model in (small(), small(pixels=False), inside):
        assert not unscaled(model, tf.constant(shades))
    # Whole numbers to a layer that Keras does not cast for.
    np.testing.assert_array_equal(
        Preprocess()(tf.constant(shades)), Preprocess()(floats)
    )


@pytest.mark.parametrize(("last", "left", "policy"), [
    ("conv1_bn", [0.0] * 2, "float32"), ("logits", [5.0] * 2, "float64"),
])  # fmt: skip
def test_what_the_backbone_is_and_no_more_is_set(last, left, policy, tmp_path):
    """Frozen layers too. A last layer that is the network's own takes a whole file."""
    file = published(tmp_path / "a.h5", last)
    keras.config.set_dtype_policy(policy)
    try:
        model = small(backbone=last)
    finally:
        keras.config.set_dtype_policy("float32")
    model.get_layer("conv1_conv").trainable = False
    load(model, file, "torch")
    assert first_weights(model) == [5.0] * 6 + left and mode(model) == "torch"
    assert model.weights[1].dtype == policy


def no_number(file):
    with h5py.File(file, "r+") as content:
        content["conv1_bn/conv1_bn/gamma"][0] = np.nan


def weights_of_keras(file):
    small().save_weights(file.with_name("a.weights.h5"))
    return file.with_name("a.weights.h5")


KERNEL = (3, 3, 3, 4)


def linked(kind):
    """What is in another file of the user, in place of a layer's kernel or of the whole layer."""

    def link(file):
        secret = file.with_name("secret.h5")
        with h5py.File(secret, "w") as content:
            content["kernel"] = np.ones(KERNEL, np.float32)
            content.create_group("conv1_conv")
            content.attrs["weight_names"] = ["kernel", "kernel"]
        name = "conv1_conv" if kind == "layer" else "conv1_conv/conv1_conv/kernel"
        with h5py.File(file, "r+") as content:
            del content[name]
            if kind == "virtual":
                layout = h5py.VirtualLayout(KERNEL, "f4")
                layout[:] = h5py.VirtualSource(secret, "kernel", KERNEL)
                content.create_virtual_dataset(name, layout)
            elif kind == "terabytes":
                content.create_dataset(name, (2**20, 2**20), "f4", chunks=(1024, 1024))
            elif kind == "one chunk":
                content.create_dataset(
                    name,
                    data=np.ones(1, np.float32),
                    chunks=(2**27,),
                    compression="gzip",
                    maxshape=(None,),
                )
            elif kind == "external":
                where = [(str(secret), 0, h5py.h5f.UNLIMITED)]
                content.create_dataset(name, KERNEL, "f4", external=where)
            else:
                content[name] = h5py.ExternalLink(
                    secret, "/" if kind == "layer" else "/kernel"
                )

    return link


NO_FILE = ["is no .h5 file of keras.applications", "--init_from"]
ELSEWHERE = ["conv1_conv/conv1_conv/kernel is in another file"]


@pytest.mark.parametrize(
    ("here", "there", "spoil", "words"),
    [
        ({}, {"filters": 5}, None, ["up to conv1_bn: Shape mismatch", "(3, 3, 3, 5)"]),
        (
            {},
            {"last": "logits"},
            None,
            ["Layer count mismatch", "expected 2 layers, found 3"],
        ),
        (
            {"pixels": False},
            {},
            None,
            ["hvdkit.train.preprocessing.Preprocess", ".backbone"],
        ),
        ({"backbone": ""}, {}, None, ["small has no backbone", "model.backbone"]),
        ({}, {}, weights_of_keras, NO_FILE),
        ({}, {}, lambda file: file.with_name("gone.h5"), NO_FILE),
        ({}, {}, no_number, ["conv1_bn holds values that are not finite"]),
        (
            {},
            {},
            lambda file: os.truncate(file, file.stat().st_size * 97 // 100),
            ["does not fit"],
        ),
        ({}, {}, linked("layer"), ["conv1_conv is in another file"]),
        *(
            ({}, {}, linked(kind), ELSEWHERE)
            for kind in ("kernel", "external", "virtual")
        ),
        ({}, {}, linked("terabytes"), ["conv1_conv/conv1_conv/kernel claims 4,"]),
        (
            {},
            {},
            linked("one chunk"),
            ["conv1_conv/kernel holds 1 values in a chunk of 134,"],
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(
    here, there, spoil, words, tmp_path
):
    file = published(tmp_path / "a.h5", **there)
    if spoil:
        file = spoil(file) or file
    error = refused(lambda: load(small(**here), file, "tf"), *words)
    assert str(error).startswith(f"--backbone_weights={file}")


def test_a_run_that_begins_with_such_a_one_keeps_its_pictures(tmp_path):
    """--init_from takes them along, and refuses weights that do not say theirs."""
    there = small(5.0)
    model = small()
    preprocessing.find(there).mode.assign(1)
    there.save(tmp_path / "a.keras")
    assert not warm_start.load(model, tmp_path / "a.keras", False)
    assert mode(model) == "caffe" and "preprocess/mode" in names_of_model(model)
    small(pixels=False).save(tmp_path / "b.keras")
    with pytest.raises(ValueError, match=r"preprocess/mode is missing there"):
        warm_start.load(small(), tmp_path / "b.keras", True)
