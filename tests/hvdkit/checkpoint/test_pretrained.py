"""A backbone's weights from files as keras.applications has them, and what pictures it is fed."""

import os

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.applications import imagenet_utils
from keras.src.legacy.saving import legacy_h5_format

from hvdkit.checkpoint import warm_start
from hvdkit.train import preprocessing, variable_names
from hvdkit.train.preprocessing import Preprocess
from tasks import classification, segmentation

PICTURE = np.random.default_rng(2).integers(0, 256, (1, 64, 64, 3)).astype(np.float32)
PLACES = ("conv2_block3_out", "conv4_block6_out", "conv5_block3_out")


# Models that have keras.applications' ResNet-50 in them.
NETWORKS = {
    name: {**classification.MODELS, **segmentation.MODELS}[name]
    for name in ("resnet50_keras", "deeplabv3plus")
}


def write(model, path):
    """As keras.applications' files are: the format of Keras 2, without the network itself."""
    with h5py.File(path, "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, model)
    return path


def features(model):
    outputs = [model.get_layer(name).output for name in PLACES]
    inner = keras.Model(model.inputs, outputs)
    return lambda image: [x.numpy() for x in inner([image])]


@pytest.mark.parametrize("name", NETWORKS)
def test_features_are_those_of_keras_applications(name, tmp_path):
    """On the same picture, which the project feeds as it is and Keras in BGR less a mean."""
    there = keras.applications.ResNet50(include_top=False, weights=None, input_shape=(64, 64, 3))
    rng = np.random.default_rng(1)
    for variable in there.variables:
        if variable.name != "kernel":
            low = 0.5 if variable.name in ("gamma", "moving_variance") else -0.2
            variable.assign(rng.uniform(low, low + 0.5, variable.shape))
    wanted = features(there)(keras.applications.resnet.preprocess_input(PICTURE.copy()))
    model = NETWORKS[name](64, 5, 0.0)
    warm_start.load_backbone(model, write(there, tmp_path / "notop.h5"), "caffe")
    for layer in there.layers[1:]:
        pairs = zip(layer.weights, model.get_layer(layer.name).weights, strict=True)
        assert all(np.array_equal(one.numpy(), other.numpy()) for one, other in pairs)
    dilated = "deeplab" in model.name  # its last block; test_deeplab.py has that
    for one, other in list(zip(features(model)(PICTURE), wanted))[: 2 if dilated else 3]:
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("mode", preprocessing.MODES)
def test_pictures_are_turned_into_those_of_keras_applications(mode):
    layer = Preprocess()
    layer.build((None, None, None, 3))
    layer.mode.assign(preprocessing.MODES.index(mode))
    wanted = imagenet_utils.preprocess_input(PICTURE.copy(), mode=mode)
    np.testing.assert_allclose(layer(PICTURE), wanted, rtol=0, atol=3e-5)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_pictures_stay_float32_up_to_the_first_layer(policy):
    keras.config.set_dtype_policy(policy)
    try:
        assert Preprocess()(keras.Input((4, 4, 3))).dtype == "float32"
    finally:
        keras.config.set_dtype_policy("float32")


# Small networks: a convolution, batch norm, a head.


def network(start=0.0, filters=4, bias=True, pixels=True, deeper=False, backbone="conv1_bn"):
    """Weights count up from `start`; the kind of pictures is no such weight."""
    image = keras.Input((None, None, 3), name="image")
    x = Preprocess(name="preprocess")(image) if pixels else preprocessing.scaled(image)
    x = keras.layers.Conv2D(filters, 3, use_bias=bias, name="conv1_conv")(x)
    if deeper:
        x = keras.layers.Conv2D(filters, 1, name="conv2_conv")(x)
    x = keras.layers.BatchNormalization(name="conv1_bn")(x)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Dropout(0.1)(x))
    model = keras.Model(image, keras.layers.Dense(3, name="logits")(x), name="small")
    for number, variable in enumerate(v for v in model.weights if v.name != "mode"):
        variable.assign(np.full(variable.shape, start + number))
    model.backbone = backbone
    return model


def starts(model) -> list[float]:
    weights = [v for v in model.weights if v.name != "mode"]
    return [float(v.numpy().flat[0]) - n for n, v in enumerate(weights)]


def mode(model) -> str:
    return preprocessing.MODES[int(preprocessing.find(model).mode)]


def published(path, last="conv1_bn", **how):
    """The file of such a network up to its layer `last`."""
    model = network(5.0, pixels=False, **how)
    return write(keras.Model(model.input, model.get_layer(last).output), path)


def test_models_that_leave_pictures_unscaled_are_known():
    shades, floats = (np.zeros((1, 8, 8, 3), dtype) for dtype in ("uint8", "float32"))
    image = keras.Input((8, 8, 3))
    bare = keras.Model(image, keras.layers.Conv2D(2, 3)(image))
    inside = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Rescaling(1 / 255), bare])
    unscaled = preprocessing.leaves_unscaled
    assert unscaled(bare, {"image": tf.constant(shades)})
    assert not unscaled(bare, {"image": tf.constant(floats)})
    for model in (network(), network(pixels=False), inside):
        assert not unscaled(model, tf.constant(shades))
    # Whole numbers to a layer that Keras does not cast for.
    np.testing.assert_array_equal(Preprocess()(tf.constant(shades)), Preprocess()(floats))


@pytest.mark.parametrize(("last", "left"), [("conv1_bn", [0.0] * 2), ("logits", [5.0] * 2)])
def test_what_the_backbone_is_and_no_more_is_set(last, left, tmp_path):
    """A last layer that is the network's own takes a whole file."""
    model = network(backbone=last)
    warm_start.load_backbone(model, published(tmp_path / "a.h5", last), "torch")
    assert starts(model) == [5.0] * 6 + left and mode(model) == "torch"


def test_frozen_layers_and_other_precisions(tmp_path):
    file = published(tmp_path / "a.h5")
    keras.config.set_dtype_policy("float64")
    try:
        model = network()
    finally:
        keras.config.set_dtype_policy("float32")
    model.get_layer("conv1_conv").trainable = False
    warm_start.load_backbone(model, file, "tf")
    assert starts(model)[:6] == [5.0] * 6 and model.weights[1].dtype == "float64"


def refused(model, file, *words):
    with pytest.raises(ValueError) as error:
        warm_start.load_backbone(model, file, "tf")
    said = str(error.value)
    assert said.startswith(f"--backbone_weights={file}") and "\n" not in said
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ({}, {"filters": 5}, ["up to conv1_bn: Shape mismatch", "(3, 3, 3, 5)"]),
        ({}, {"bias": False}, ["up to conv1_bn: Weight count mismatch", "conv1_conv"]),
        ({}, {"deeper": True}, ["Layer count mismatch", "expected 2 layers, found 3"]),
        ({"deeper": True}, {}, ["Layer count mismatch", "expected 3 layers, found 2"]),
        ({}, {"last": "logits"}, ["Layer count mismatch", "expected 2 layers, found 3"]),
        ({"pixels": False}, {}, ["hvdkit.train.preprocessing.Preprocess", "model.backbone"]),
        ({"backbone": ""}, {}, ["small has no backbone", "model.backbone"]),
    ],
)
def test_weights_of_another_network_are_refused(here, there, words, tmp_path):
    refused(network(**here), published(tmp_path / "a.h5", **there), *words)


@pytest.mark.parametrize("name", ["a.keras", "a.weights.h5", "gone.h5", ""])
def test_what_is_no_such_file_is_refused(name, tmp_path):
    model = network()
    if name.startswith("a"):
        (model.save if name.endswith("keras") else model.save_weights)(tmp_path / name)
    refused(model, tmp_path / name, "is no .h5 file of keras.applications", "--init_from")


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.97])
def test_a_damaged_file_is_refused(kept, tmp_path):
    """Also one whose values are not finite."""
    file = published(tmp_path / "a.h5")
    with h5py.File(file, "r+") as content:
        content["conv1_bn/conv1_bn/gamma"][0] = np.nan
    refused(network(), file, "conv1_bn holds values that are not finite")
    os.truncate(file, int(kept * file.stat().st_size))
    refused(network(), file, "does not fit small")


def linked(content, name, secret):
    """In place of a layer's kernel or of the whole layer: what is in another file of the user."""
    if name == "virtual":
        layout = h5py.VirtualLayout((3, 3, 3, 4), "f4")
        layout[:] = h5py.VirtualSource(secret, "kernel", (3, 3, 3, 4))
        content.create_virtual_dataset("conv1_conv/conv1_conv/kernel", layout)
    elif name == "external":
        where = [(str(secret), 0, h5py.h5f.UNLIMITED)]
        content.create_dataset("conv1_conv/conv1_conv/kernel", (3, 3, 3, 4), "f4", external=where)
    else:
        content[name] = h5py.ExternalLink(secret, "/kernel" if name.endswith("kernel") else "/")


@pytest.mark.parametrize(
    "name", ["conv1_conv", "conv1_conv/conv1_conv/kernel", "external", "virtual"]
)
def test_a_file_cannot_read_others(name, tmp_path):
    file, secret = published(tmp_path / "a.h5"), tmp_path / "secret.h5"
    with h5py.File(secret, "w") as content:
        content["kernel"] = np.ones((3, 3, 3, 4), np.float32)
        content.create_group("conv1_conv")
        content.attrs["weight_names"] = ["kernel", "kernel"]
    with h5py.File(file, "r+") as content:
        del content[name if name.startswith("conv1") else "conv1_conv/conv1_conv/kernel"]
        linked(content, name, secret)
    where = "conv1_conv" if name == "conv1_conv" else "conv1_conv/conv1_conv/kernel"
    refused(network(), file, f"{where} is in another file")


def test_a_run_that_begins_with_such_a_one_keeps_its_pictures(tmp_path):
    """--init_from takes them along, and refuses weights that do not say theirs."""
    there, model = network(5.0), network()
    preprocessing.find(there).mode.assign(1)
    there.save(tmp_path / "a.keras")
    assert not warm_start.load(model, tmp_path / "a.keras", False)
    assert mode(model) == "caffe" and "preprocess/mode" in variable_names.of_model(model)
    network(pixels=False).save(tmp_path / "b.keras")
    with pytest.raises(ValueError, match=r"preprocess/mode is missing there"):
        warm_start.load(network(), tmp_path / "b.keras", True)
