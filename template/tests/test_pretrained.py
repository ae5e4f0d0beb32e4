"""Published weights: read by name from what Keras writes, and fed with what they know."""

import hashlib
import importlib
import importlib.util
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from hvdkit import settings as settings_lib
from hvdkit.checkpoint import pretrained, warm_start, weight_files
from hvdkit.train import preprocessing, variable_names
from hvdkit.train.preprocessing import Preprocess
from keras.applications import imagenet_utils

import published

PICTURE = np.random.default_rng(2).integers(0, 256, (1, 64, 64, 3)).astype(np.float32)
LARGE = ("h5", "weights.h5", "keras")  # the forms in which ResNet-50 is written, 95 MB each
PLACES = ("conv2_block3_out", "conv4_block6_out", "conv5_block3_out")


def project_networks() -> dict:
    """Those of this project's models that have keras.applications' ResNet-50 in them."""
    found = {}
    for module, names in (
        ("classification_models", ("resnet50_keras", "resnet50")),
        ("segmentation_models", ("deeplabv3plus",)),
    ):
        if importlib.util.find_spec(f"tasks.{module}"):
            models = importlib.import_module(f"tasks.{module}").MODELS
            name = next(name for name in names if name in models)
            found[name] = models[name]
    return found


NETWORKS = project_networks()


@pytest.fixture(scope="module")
def resnet50():
    return published.resnet50(PICTURE.shape[1:3])


@pytest.fixture(scope="module")
def wanted(resnet50):
    """Keras's own features: its preprocess_input, then its model."""
    return features(resnet50)(keras.applications.resnet.preprocess_input(PICTURE.copy()))


@pytest.fixture(scope="module", params=NETWORKS)
def project_network(request):
    model = NETWORKS[request.param](64, 5, 0.0)
    return model, features(model)


@pytest.fixture(scope="module")
def files(resnet50, tmp_path_factory):
    """In each form; the published one without its top, as that is called."""
    folder = tmp_path_factory.mktemp("files")
    notop = keras.Model(resnet50.input, resnet50.get_layer(PLACES[-1]).output, name="notop")
    paths = {
        form: published.write(notop if form == "h5" else resnet50, folder, form) for form in LARGE
    }
    yield paths
    shutil.rmtree(folder)


def features(model):
    outputs = [model.get_layer(name).output for name in PLACES]
    inner = keras.Model(model.inputs, outputs)
    return lambda image: [x.numpy() for x in inner([image])]


def near(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("form", LARGE)
def test_features_are_those_of_keras_applications(form, resnet50, wanted, project_network, files):
    """On the same picture, which the project feeds as it is and Keras in BGR less a mean."""
    model, own = project_network
    file = files[form]
    for variable in model.weights:
        variable.assign(np.ones(variable.shape))
    loaded = pretrained.load(model, file, "caffe")
    assert len(loaded.set) == 106 and loaded.unused == ["predictions"] * ("notop" not in file.name)
    assert "logits" in loaded.left and not set(loaded.left) & {x.name for x in resnet50.layers}
    for name in loaded.set:
        pairs = zip(resnet50.get_layer(name).weights, model.get_layer(name).weights, strict=True)
        assert all(np.array_equal(one.numpy(), other.numpy()) for one, other in pairs)
    got = own(PICTURE)
    dilated = "deeplab" in model.name  # its last block; test_deeplab.py has that
    for one, other in list(zip(got, wanted))[: 2 if dilated else 3]:
        near(one, other)


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


def network(start=0.0, classes=3, filters=4, bias=True, pixels=True, name="small", **how):
    """Weights count up from `start`; a `more` one has a second convolution in its first group."""
    more, head = how.get("more", False), how.get("head", f"logits{classes}")
    image = keras.Input((None, None, 3), name="image")
    x = Preprocess(name="preprocess")(image) if pixels else preprocessing.scaled(image)
    x = keras.layers.Conv2D(filters, 3, use_bias=bias, name="conv1_conv")(x)
    x = keras.layers.BatchNormalization(name="conv1_bn")(x)
    if more:
        x = keras.layers.Conv2D(filters, 1, name="conv1_block2_conv")(x)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Dropout(0.1)(x))
    x = keras.layers.Dense(classes, name=head)(x)
    model = keras.Model(image, x, name=name)
    for number, variable in enumerate(v for v in model.weights if v.name != "mode"):
        variable.assign(np.full(variable.shape, start + number))
    return model


def starts(model) -> set[float]:
    weights = [v for v in model.weights if v.name != "mode"]
    return {float(v.numpy().flat[0]) - n for n, v in enumerate(weights)}


def mode(model) -> str:
    return preprocessing.MODES[int(preprocessing.find(model).mode)]


def plain(tmp_path, form="h5", **how):
    return published.write(network(5.0, pixels=False, **how), tmp_path, form)


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


@pytest.mark.parametrize("form", published.FORMS)
def test_what_is_on_one_side_only_is_listed(form, tmp_path, capsys):
    file = plain(tmp_path, form, classes=7)
    model = network()
    assert pretrained.load(model, file, "torch") == pretrained.Loaded(
        ["conv1_conv", "conv1_bn"], ["logits3"], ["logits7"], "torch"
    )
    assert mode(model) == "torch" and starts(model) == {0.0, 5.0}
    pretrained.start(network(), config(file, "caffe"))
    said = capsys.readouterr().out
    assert "2 layers, conv1_conv to conv1_bn, trained on BGR in [0, 255]" in said
    assert "another shape): logits3; not used from the file: logits7" in said


def config(file, mode):
    words = [f"--backbone_weights={file}", f"--backbone_preprocessing={mode}"]
    return settings_lib.parse(["train.py", *words])


def refused(model, file, words, mode="tf"):
    before = [v.numpy() for v in model.variables]
    with pytest.raises(ValueError, match=words) as error:
        pretrained.load(model, file, mode)
    assert "\n" not in str(error.value) and str(file) in str(error.value)
    assert all(np.array_equal(a, v.numpy()) for a, v in zip(before, model.variables))


@pytest.mark.parametrize("form", ["h5", "keras"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            {"filters": 5},
            r"2 layers: conv1_conv \(kernel \[3, 3, 3, 5\] there, \[3, 3, 3, 4\] here",
        ),
        ({"bias": False}, r"1 layers: conv1_conv \((0|kernel) there, kernel, bias here\)"),
        (
            {"more": True},
            "another network: only the file has conv1_block2_conv, only the model",
        ),
        ({"start": np.nan}, "conv1_conv .kernel holds values that are not finite"),
    ],
)
def test_weights_of_another_network_are_refused_by_name(form, how, words, tmp_path):
    file = published.write(network(**{"pixels": False} | how), tmp_path, form)
    refused(network(), file, words)


def test_a_shallower_network_is_refused(tmp_path):
    refused(network(more=True), plain(tmp_path), "none, only the model conv1_block2_conv")


def test_a_file_that_fits_nothing_is_refused(tmp_path):
    x = keras.Input((4,))
    other = keras.Model(x, keras.layers.Dense(3, name="conv1")(x), name="other")
    file = published.write(other, tmp_path, "h5")
    refused(network(), file, "no layer of small: the file has conv1, the model conv1_conv, ")


@pytest.mark.parametrize("form", published.FORMS)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.97])
def test_a_damaged_file_is_refused(form, kept, tmp_path):
    file = plain(tmp_path, form)
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    refused(network(), file, "is no .h5 or .keras file of Keras, or is damaged")


@pytest.mark.parametrize("form", published.FORMS)
def test_a_head_of_other_classes_is_left_as_made(form, tmp_path, capsys):
    """All models here call theirs logits: a classifier is a backbone of one with other classes."""
    model = network(head="logits")
    file = plain(tmp_path, form, classes=7, head="logits")
    loaded = pretrained.load(model, file, "tf")
    assert (loaded.left, loaded.unused) == (["logits"], ["logits"]) and starts(model) == {0.0, 5.0}
    assert loaded.set == ["conv1_conv", "conv1_bn"]
    pretrained.start(model, config(file, "tf"))
    said = capsys.readouterr().out
    assert "another shape): logits; not used from the file: logits" in said
    # Only the head is: before it, and as all that is shared, another shape is another network.
    wide = network(pixels=False, filters=5, head="logits")
    refused(model, published.write(wide, tmp_path, form), "not fit 2 layers: conv1_conv")
    x = keras.Input((4,))
    other = keras.Model(x, keras.layers.Dense(9, name="logits")(x), name="other")
    refused(model, published.write(other, tmp_path, form), "no layer of small: the file has log")
    # Of the same shape it goes along.
    alike = published.write(network(5.0, pixels=False, head="logits"), tmp_path, form)
    assert pretrained.load(model, alike, "tf").left == [] and starts(model) == {5.0}


def attentive(start=0.0, size=2, deferred=False):
    """Layers of equal names inside two layers, a model (or one made when called), and a head."""
    image = keras.Input((8, 8, 3))
    shades = preprocessing.scaled(image)
    inner = keras.Input((8, 8, 3))
    convolution = keras.layers.Conv2D(4, 3, name="stem_conv")
    batch_norm = keras.layers.BatchNormalization(name="stem_bn")
    if deferred:
        x = keras.Sequential([convolution, batch_norm], name="stem")(shades)
    else:
        x = keras.Model(inner, batch_norm(convolution(inner)), name="stem")(shades)
    x = keras.layers.Reshape((36, 4))(x)
    for name, key_size in (("one", 2), ("two", size)):
        x = keras.layers.MultiHeadAttention(2, key_size, name=name)(x, x)
    x = keras.layers.TimeDistributed(keras.layers.Dense(4, name="dense"), name="each")(x)
    x = keras.layers.Bidirectional(keras.layers.LSTM(2, name="lstm"), name="both")(x)
    model = keras.Model(image, keras.layers.Dense(3, name="logits")(x), name="attentive")
    for number, variable in enumerate(model.weights):
        variable.assign(np.full(variable.shape, start + number))
    return model


@pytest.mark.parametrize("form", published.FORMS)
def test_layers_inside_others_have_their_names_too(form, tmp_path):
    # Where no file says that it was a model, a deferred one is a layer like others.
    for deferred in (False, True)[: 1 if form == "h5" else 2]:
        file = published.write(attentive(5.0, deferred=deferred), tmp_path, form)
        model = attentive()
        loaded = pretrained.load(model, file, "tf")
        assert loaded.left == loaded.unused == [] and starts(model) == {5.0}
        assert set(weight_files.read(file)) == set(loaded.set)  # whatever is here
    names = ["stem_conv", "stem_bn", "one/query", "two/query", "each/dense"]
    assert {*names, "both/forward_lstm/lstm_cell"} < set(loaded.set)
    words = r"does not fit 4 layers: two/query \(.* \[4, 2, 2\] there, \[4, 2, 3\] here.*two/key "
    refused(attentive(size=3), file, words)
    # Not there, so listed: a network of the stem and a head.
    image = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, name="stem_conv")(preprocessing.scaled(image))
    x = keras.layers.BatchNormalization(name="stem_bn")(x)
    model = keras.Model(image, keras.layers.Dense(2, name="query")(x), name="plain")
    loaded = pretrained.load(model, file, "tf")
    assert loaded.set == ["stem_conv", "stem_bn"] and loaded.left == ["query"]
    assert {"one/query", "two/query", "logits"} < set(loaded.unused)


class Block(keras.layers.Layer):
    """Calls its parts as a model does in a file: `layers`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layers = [keras.layers.Dense(4, name="first"), keras.layers.Dense(4, name="second")]

    def build(self, shape):
        for layer in self.layers:
            layer.build(shape)
        self.gain = self.add_weight(name="gain", shape=(4,))

    def call(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.gain


@pytest.mark.parametrize("form", ["h5", "weights.h5"])
def test_a_layer_may_call_its_own_ones_layers(form, tmp_path):
    def model(start, *blocks):
        x = keras.Input((4,))
        y = keras.layers.Dense(4, name="stem")(preprocessing.scaled(x))
        for name in blocks:
            y = Block(name=name)(y)
        made = keras.Model(x, keras.layers.Dense(4, name="second")(y), name="blocks")
        for number, variable in enumerate(made.weights):
            variable.assign(np.full(variable.shape, start + number))
        return made

    file, same = published.write(model(5.0, "one", "two"), tmp_path, form), model(0.0, "one", "two")
    assert pretrained.load(same, file, "tf").left == [] and starts(same) == {5.0}
    if form == "h5":
        assert pretrained.load(model(0.0), file, "tf").set == ["stem", "second"]
    else:  # which of the three?
        refused(model(0.0), file, "it holds two layers of the name second")
    refused(network(pixels=False), file, "has no layer of small: the file has .*stem")


def test_what_is_no_file_is_refused(tmp_path):
    refused(network(), tmp_path, "there is no such file")
    refused(network(), tmp_path / "nothing.h5", "there is no such file")


def test_the_pictures_must_be_known(tmp_path, monkeypatch):
    file = plain(tmp_path)
    refused(network(), file, "--backbone_preprocessing= .*keras.applications' ResNet-50", mode="")
    # A file that Keras has published is known by its MD5.
    digest = hashlib.md5(file.read_bytes()).hexdigest()
    monkeypatch.setitem(pretrained._PUBLISHED, digest, "caffe")
    model = network()
    assert pretrained.load(model, file).mode == mode(model) == "caffe"
    refused(network(), file, "--backbone_preprocessing=tf.* BGR .*leave it out", mode="tf")
    refused(network(pixels=False), file, "was trained on BGR.*Preprocess", mode="")
    assert len(pretrained._PUBLISHED) == 3


@pytest.mark.parametrize(
    ("shape", "scaled", "fits"),
    [((8, 8, 3), True, True), ((8, 8, 3), False, False), ((4,), False, True)],
)
def test_pictures_as_they_are_were_trained_on_by_none(shape, scaled, fits, tmp_path):
    """Numbers that are no picture's are the task's own matter."""

    def model(start: float) -> keras.Model:
        x = keras.Input(shape)
        inner = preprocessing.scaled(x) if scaled else x
        made = keras.Model(x, keras.layers.Dense(2, name="stem")(inner), name="plain")
        made.get_layer("stem").kernel.assign(np.full((shape[-1], 2), start))
        return made

    file, same = published.write(model(5.0), tmp_path, "h5"), model(0.0)
    if fits:
        assert pretrained.load(same, file, "tf").set == ["stem"]
        assert np.all(same.get_layer("stem").kernel.numpy() == 5.0)
    else:
        refused(same, file, "plain does not convert pictures to that", mode="tf")


@pytest.mark.parametrize("form", published.FORMS)
def test_a_file_of_this_project_says_it_itself(form, tmp_path):
    there = network(5.0)
    preprocessing.find(there).mode.assign(2)
    file = published.write(there, tmp_path, form)
    model = network()
    assert pretrained.load(model, file).mode == mode(model) == "torch"
    refused(network(), file, "leave it out, or write torch", mode="caffe")


def test_a_layer_of_that_name_and_another_kind_is_refused(tmp_path):
    image = keras.Input((None, None, 3))
    x = keras.layers.Normalization(name="preprocess")(image)
    x = keras.layers.Conv2D(4, 3, name="conv1_conv")(x)
    file = published.write(keras.Model(image, x, name="own"), tmp_path, "keras")
    refused(network(), file, "another network: only the file has none, only the model conv1_bn")
    x = keras.layers.BatchNormalization(name="conv1_bn")(x)
    file = published.write(keras.Model(image, x, name="own"), tmp_path, "keras")
    refused(network(), file, "which this code does not know")


def test_a_network_without_the_layer_takes_what_was_trained_on_the_same_pictures(tmp_path):
    model = network(pixels=False)
    assert pretrained.load(model, plain(tmp_path), "tf").left == []
    assert starts(model) == {5.0}


def test_a_network_inside_another_is_found_in_the_file(tmp_path):
    image = keras.Input((8, 8, 3))
    outer = keras.Model(image, keras.layers.Dense(2, name="top")(network(5.0)(image)), name="outer")
    for form in published.FORMS[1:]:
        model = network()
        loaded = pretrained.load(model, published.write(outer, tmp_path, form))
        assert loaded.unused == ["top"] and starts(model) == {5.0}


def test_names_that_tensorflow_1_counted_on(tmp_path):
    file = tmp_path / "counted.h5"
    published.keras_2(network(5.0, pixels=False), file, scope="_1")
    model = network()
    assert pretrained.load(model, file, "tf").left == [] and starts(model) == {5.0}


def test_frozen_layers_and_other_precisions(tmp_path):
    there = network(5.0, pixels=False)
    there.get_layer("conv1_bn").trainable = False
    keras.config.set_dtype_policy("float64")
    try:
        model = network()
    finally:
        keras.config.set_dtype_policy("float32")
    model.get_layer("conv1_conv").trainable = False
    for form in published.FORMS:
        for variable in model.weights:
            variable.assign(np.zeros(variable.shape))
        pretrained.load(model, published.write(there, tmp_path, form), "tf")
        assert starts(model) == {5.0} and model.weights[1].dtype == "float64"


def test_a_run_that_begins_with_such_a_one_keeps_its_pictures(tmp_path):
    """--init_from takes them along, and refuses weights that do not say theirs."""
    there, model = network(5.0), network()
    preprocessing.find(there).mode.assign(1)
    assert not warm_start.load(model, published.write(there, tmp_path, "keras"), False)
    assert mode(model) == "caffe" and "preprocess/mode" in variable_names.of_model(model)
    file = plain(tmp_path, "keras", classes=7)
    with pytest.raises(ValueError, match=r"preprocess/mode is missing there.*--backbone_weights"):
        warm_start.load(network(), file, True)
