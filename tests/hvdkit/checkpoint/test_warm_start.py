"""Averages of weights, weights of other runs and of files as Keras publishes them."""

import os

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.applications import imagenet_utils
from keras.src.legacy.saving import legacy_h5_format
from small_checkpoints import ALONE

from hvdkit.checkpoint import checkpoints, warm_start, writing
from hvdkit.settings import Settings
from hvdkit.train import preprocessing
from hvdkit.train.preprocessing import Preprocess
from hvdkit.train.state import State, averaged_weights, names_of_model
from ranks import CHECKS, names_of_checks, run_checks
from tasks import classification, segmentation


def network(classes: int = 3, start: float = 0.0) -> keras.Model:
    """Named layers and batch norm; every weight counts up from `start`."""
    x = keras.Input((4,))
    y = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(5, name="body")(x))
    model = keras.Model(x, keras.layers.Dense(classes, name="head")(y))
    for number, variable in enumerate(model.variables):
        variable.assign(np.full(variable.shape, start + number, np.float32))
    return model


def save(folder, model: keras.Model, *, step: int = 1, optimizer=None) -> checkpoints.Checkpoints:
    """Writes a checkpoint of the model into the folder."""
    if optimizer is None:
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    kept = checkpoints.Checkpoints(folder, 9, ALONE)
    kept.write(kept.copy(step, State(model, optimizer, "float32").variables, Settings()))
    return kept


def averaging(model: keras.Model, **average) -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.SGD(0.1, **average)
    optimizer.build(model.trainable_variables)
    return optimizer


def same(one, other) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (a, b)))


def steps(model: keras.Model, optimizer: keras.optimizers.Optimizer, count: int) -> list:
    """Plain steps with gradients 1, 2, 3, ...; the first weight after each of them."""
    track = []
    for number in range(count):
        gradients = [tf.fill(v.shape, float(number + 1)) for v in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)
        track.append(float(model.trainable_variables[0].numpy()[0, 0]))
    return track


def test_averages_are_there_inside_and_gone_after():
    model = network(start=1.0)
    plain, optimizer = averaging(model), averaging(model, use_ema=True, ema_momentum=0.9)
    for none in (plain, optimizer):  # no step yet: an average of nothing would be zeros
        with averaged_weights(model, none):
            assert model.trainable_variables[0].numpy()[0, 0] == 1.0
    track = steps(model, optimizer, 4)
    average = track[0]
    for weight in track[1:]:
        average = 0.9 * average + 0.1 * weight
    own = [v.numpy() for v in model.variables]
    with pytest.raises(KeyError), averaged_weights(model, optimizer):
        np.testing.assert_allclose(model.trainable_variables[0].numpy()[0, 0], average, rtol=1e-6)
        raise KeyError
    same(model.variables, own)


@pytest.fixture
def run_dir(tmp_path):
    """Checkpoints of steps 1, 2, 3 with scores 0.5, 0.9, none; weights start at the step."""
    for step, score in ((1, 0.5), (2, 0.9), (3, None)):
        kept = save(tmp_path / "run" / "checkpoints", network(start=float(step)), step=step)
        if score is not None:
            kept.add_score(step, score)
    return tmp_path / "run"


def starts(model: keras.Model) -> list[float]:
    """Each weight less its number; the kind of pictures is no such weight."""
    weights = [v for v in model.weights if v.name != "mode"]
    return [float(v.numpy().flat[0]) - number for number, v in enumerate(weights)]


def test_a_runs_best_checkpoint_or_the_one_that_is_named(run_dir):
    model = network(start=70.0)
    assert not warm_start.load(model, run_dir, False) and set(starts(model)) == {2.0}
    warm_start.load(model, run_dir / "checkpoints" / "step-00000003", False)
    assert set(starts(model)) == {3.0}
    # Step 2 has the higher score, but of another measure than the newest that has one.
    writing.set_score(run_dir / "checkpoints" / "step-00000002", 0.9, {"--eval_crop": 8})
    writing.set_score(run_dir / "checkpoints" / "step-00000003", 0.1, {"--eval_crop": 0})
    warm_start.load(model, run_dir, False)
    assert set(starts(model)) == {1.0}, "of an older version's: compared with all"
    renamed = (run_dir / "checkpoints" / "step-00000002").rename(run_dir / "good")
    warm_start.load(model, renamed, False)
    assert set(starts(model)) == {2.0}
    # A damaged one is passed over, or named.
    damaged = run_dir / "checkpoints" / "step-00000001"
    (damaged / "state.npz").write_bytes(b"damaged")
    warm_start.load(model, run_dir, False)
    assert set(starts(model)) == {3.0}
    with pytest.raises(ValueError, match=r"step-00000001/state.npz is damaged"):
        warm_start.load(model, damaged, False)


@pytest.mark.parametrize("share", [0, 0.9])
def test_a_keras_file_that_is_damaged_is_named_in_one_line(share, tmp_path):
    """Another file, and the beginning of a right one."""
    file = tmp_path / "model.keras"
    network().save(file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))] or b"damaged")
    with pytest.raises(ValueError, match=r"--init_from=\S+model.keras cannot be read: .") as error:
        warm_start.load(network(), file, False)
    assert "\n" not in str(error.value)


def unnamed(start: float, before: int = 0) -> keras.Model:
    """Layers that Keras names; `before` others were made first, so it names them otherwise."""
    for _ in range(before):
        keras.layers.Dense(1), keras.layers.Conv1D(1, 1), keras.random.SeedGenerator()
    x = keras.Input((4, 3))
    y = keras.layers.TimeDistributed(keras.layers.Dense(3))(keras.layers.Conv1D(3, 1)(x))
    y = keras.layers.Bidirectional(keras.layers.GRU(2))(keras.layers.Dropout(0.1)(y))
    model = keras.Model(x, keras.layers.Dense(2)(keras.layers.Dense(2)(y)))
    for number, variable in enumerate(model.variables):
        if variable.trainable:
            variable.assign(np.full(variable.shape, start + number, np.float32))
    return model


@pytest.mark.parametrize("kind", ["checkpoint", "keras"])
def test_what_keras_counted_does_not_matter(kind, tmp_path):
    there = unnamed(5.0)
    if kind == "keras":
        there.save(tmp_path / "model.keras")
    else:
        save(tmp_path / "checkpoints", there)
    model = unnamed(70.0, before=3)
    state = next(v for v in model.variables if v.name == "seed_generator_state")
    state.assign([3, 1])
    assert [v.path for v in model.variables] != [v.path for v in there.variables]
    path = tmp_path / "model.keras" if kind == "keras" else tmp_path
    assert not warm_start.load(model, path, False)
    same(model.weights, there.weights)
    assert state.numpy().tolist() == [3, 1], "states of random layers are the new run's own"
    # Also inside another model.
    x, inner = keras.Input((4, 3)), unnamed(70.0)
    model = keras.Model(x, keras.layers.Dense(2, name="new")(inner(x)))
    assert list(warm_start.load(model, path, True)) == ["new/kernel", "new/bias"]
    assert inner.trainable_variables[0].numpy().flat[0] == 5.0


def averaged_run(folder, count, **average):
    """A run's checkpoint after so many steps; returns its weights, and those it evaluates."""
    model = network(start=1.0)
    optimizer = averaging(model, **average)
    steps(model, optimizer, count)
    save(folder / "checkpoints", model, step=count, optimizer=optimizer)
    own = [v.numpy() for v in model.variables]
    with averaged_weights(model, optimizer):
        return own, [v.numpy() for v in model.variables]


def test_averages_of_another_run_on_request(tmp_path):
    own, averages = averaged_run(tmp_path, 3, use_ema=True, ema_momentum=0.5)
    assert not np.array_equal(own[0], averages[0])
    for wanted, values in ((False, own), (True, averages)):
        model = network(start=70.0)
        assert not warm_start.load(model, tmp_path, False, averages=wanted)
        same(model.variables, values)
    network().save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match=r"a .keras file holds no average"):
        warm_start.load(network(), tmp_path / "model.keras", False, averages=True)


@pytest.mark.parametrize(("count", "average"), [(3, {}), (0, {"use_ema": True})])
def test_averages_that_there_are_none_of_are_refused(count, average, tmp_path):
    """Where no step was made they are zeros."""
    averaged_run(tmp_path, count, **average)
    with pytest.raises(ValueError, match=r"holds no average .*--init_ema.*--ema_decay"):
        warm_start.load(network(), tmp_path, False, averages=True)


def test_a_head_of_another_size_is_named_or_skipped_on_request(run_dir):
    model = network(classes=7, start=70.0)
    with pytest.raises(ValueError) as error:
        warm_start.load(model, run_dir, False)
    words = ("2 of the model's 8", "head/kernel ([5, 3] there, [5, 7] here)", "head/bias ([3]")
    assert all(word in str(error.value) for word in words), error.value
    assert set(starts(model)) == {70.0}, "nothing is set unless all is"
    assert list(warm_start.load(model, run_dir, True)) == ["head/kernel", "head/bias"]
    assert set(starts(model)) == {2.0, 70.0}


def test_what_holds_no_weights_of_the_model_is_an_error(run_dir):
    for name in ("nothing", "model.h5"):
        with pytest.raises(ValueError, match=rf"{name} is no .keras file"):
            warm_start.load(network(), run_dir / name, False)
    x = keras.Input((4,))
    with pytest.raises(ValueError, match=r"2 of the model's 2 .* other/kernel \(missing there\)"):
        warm_start.load(keras.Model(x, keras.layers.Dense(3, name="other")(x)), run_dir, True)


def test_weights_of_another_precision_are_cast(run_dir):
    x = keras.Input((4,), dtype="float64")
    model = keras.Model(x, keras.layers.Dense(5, name="body", dtype="float64")(x))
    assert not warm_start.load(model, run_dir, False) and set(starts(model)) == {2.0}
    assert model.weights[0].dtype == "float64"


# Real runs, of the skeleton: every project has it. What 1 rank begins, 2 go on with.
FILE = CHECKS / "checks_warm_start.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    env = {"WARM_RUNS": str(tmp_path_factory.mktemp("warm"))}
    return [run_checks([FILE], ranks, env=env) for ranks in (1, 2)]


@pytest.mark.parametrize("name", names_of_checks(FILE))
def test_real_runs(name, outcomes):
    failures = [found[name] for found in outcomes]
    assert failures == [None, None], failures[0] or failures[1]


def test_two_layers_of_one_path_each_get_their_own(tmp_path):
    """Two models inside another may name their layers alike; order tells them apart."""

    class Twins(keras.Model):
        def __init__(self, start: float):
            super().__init__()
            self.one, self.other = (
                keras.Sequential([keras.layers.Dense(4, name="body")], name="part")
                for _ in range(2)
            )
            self(np.zeros((1, 4), np.float32))
            for number, variable in enumerate(self.variables):
                variable.assign(np.full(variable.shape, start + number, np.float32))

        def call(self, x):
            return self.other(self.one(x))

    fresh = Twins(0.0)
    save(tmp_path / "checkpoints", Twins(10.0))
    warm_start.load(fresh, tmp_path, skip_mismatched=False)
    assert starts(fresh) == [10.0] * 4


# A backbone's weights from files as keras.applications has them, and what pictures it is fed.
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


def features(model, image):
    outputs = [model.get_layer(name).output for name in PLACES]
    return [x.numpy() for x in keras.Model(model.inputs, outputs)([image])]


@pytest.mark.parametrize("name", NETWORKS)
def test_features_are_those_of_keras_applications(name, tmp_path):
    """On the same picture, which the project feeds as it is and Keras in BGR less a mean."""
    there = keras.applications.ResNet50(include_top=False, weights=None, input_shape=(64, 64, 3))
    rng = np.random.default_rng(1)
    for variable in there.variables:
        if variable.name != "kernel":
            low = 0.5 if variable.name in ("gamma", "moving_variance") else -0.2
            variable.assign(rng.uniform(low, low + 0.5, variable.shape))
    wanted = features(there, keras.applications.resnet.preprocess_input(PICTURE.copy()))
    model = NETWORKS[name](64, 5, 0.0)
    warm_start.load_backbone(model, write(there, tmp_path / "notop.h5"), "caffe")
    for layer in there.layers[1:]:
        pairs = zip(layer.weights, model.get_layer(layer.name).weights, strict=True)
        assert all(np.array_equal(one.numpy(), other.numpy()) for one, other in pairs)
    dilated = "deeplab" in model.name  # its last block; test_deeplab.py has that
    for one, other in list(zip(features(model, PICTURE), wanted))[: 2 if dilated else 3]:
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("mode", preprocessing.MODES)
def test_pictures_are_turned_into_those_of_keras_applications(mode):
    layer = Preprocess()
    layer.build((None, None, None, 3))
    layer.mode.assign(preprocessing.MODES.index(mode))
    wanted = imagenet_utils.preprocess_input(PICTURE.copy(), mode=mode)
    np.testing.assert_allclose(layer(PICTURE), wanted, rtol=0, atol=3e-5)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:  # float32 up to the first layer
        assert Preprocess()(keras.Input((4, 4, 3))).dtype == "float32"
    finally:
        keras.config.set_dtype_policy("float32")


# Small networks: a convolution, batch norm, a head.


def small(start=0.0, filters=4, bias=True, pixels=True, backbone="conv1_bn"):
    """Weights count up from `start`; the kind of pictures is no such weight."""
    image = keras.Input((None, None, 3), name="image")
    x = Preprocess(name="preprocess")(image) if pixels else preprocessing.scaled(image)
    x = keras.layers.Conv2D(filters, 3, use_bias=bias, name="conv1_conv")(x)
    x = keras.layers.BatchNormalization(name="conv1_bn")(x)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Dropout(0.1)(x))
    model = keras.Model(image, keras.layers.Dense(3, name="logits")(x), name="small")
    for number, variable in enumerate(v for v in model.weights if v.name != "mode"):
        variable.assign(np.full(variable.shape, start + number))
    model.backbone = backbone
    return model


def mode(model) -> str:
    return preprocessing.MODES[int(preprocessing.find(model).mode)]


def published(path, last="conv1_bn", **how):
    """The file of such a network up to its layer `last`."""
    model = small(5.0, pixels=False, **how)
    return write(keras.Model(model.input, model.get_layer(last).output), path)


def test_models_that_leave_pictures_unscaled_are_known():
    shades, floats = (np.zeros((1, 8, 8, 3), dtype) for dtype in ("uint8", "float32"))
    image = keras.Input((8, 8, 3))
    bare = keras.Model(image, keras.layers.Conv2D(2, 3)(image))
    inside = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Rescaling(1 / 255), bare])
    unscaled = preprocessing.leaves_unscaled
    assert unscaled(bare, {"image": tf.constant(shades)})
    assert not unscaled(bare, {"image": tf.constant(floats)})
    for model in (small(), small(pixels=False), inside):
        assert not unscaled(model, tf.constant(shades))
    # Whole numbers to a layer that Keras does not cast for.
    np.testing.assert_array_equal(Preprocess()(tf.constant(shades)), Preprocess()(floats))


@pytest.mark.parametrize(
    ("last", "left", "policy"),
    [("conv1_bn", [0.0] * 2, "float32"), ("logits", [5.0] * 2, "float64")],
)
def test_what_the_backbone_is_and_no_more_is_set(last, left, policy, tmp_path):
    """Frozen layers too. A last layer that is the network's own takes a whole file."""
    file = published(tmp_path / "a.h5", last)
    keras.config.set_dtype_policy(policy)
    try:
        model = small(backbone=last)
    finally:
        keras.config.set_dtype_policy("float32")
    model.get_layer("conv1_conv").trainable = False
    warm_start.load_backbone(model, file, "torch")
    assert starts(model) == [5.0] * 6 + left and mode(model) == "torch"
    assert model.weights[1].dtype == policy


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
        ({}, {"last": "logits"}, ["Layer count mismatch", "expected 2 layers, found 3"]),
        ({"pixels": False}, {}, ["hvdkit.train.preprocessing.Preprocess", "model.backbone"]),
        ({"backbone": ""}, {}, ["small has no backbone", "model.backbone"]),
    ],
)
def test_weights_of_another_network_are_refused(here, there, words, tmp_path):
    refused(small(**here), published(tmp_path / "a.h5", **there), *words)


@pytest.mark.parametrize("name", ["a.weights.h5", "gone.h5", ""])
def test_what_is_no_such_file_is_refused(name, tmp_path):
    model = small()
    if name.startswith("a"):
        model.save_weights(tmp_path / name)
    refused(model, tmp_path / name, "is no .h5 file of keras.applications", "--init_from")


@pytest.mark.parametrize("share", [0.0, 0.97])
def test_a_damaged_file_is_refused(share, tmp_path):
    """Also one whose values are not finite."""
    file = published(tmp_path / "a.h5")
    with h5py.File(file, "r+") as content:
        content["conv1_bn/conv1_bn/gamma"][0] = np.nan
    refused(small(), file, "conv1_bn holds values that are not finite")
    os.truncate(file, int(share * file.stat().st_size))
    refused(small(), file, "does not fit small")


@pytest.mark.parametrize("kind", ["layer", "kernel", "external", "virtual"])
def test_a_file_cannot_read_others(kind, tmp_path):
    """In place of a layer's kernel or of the whole layer: what is in another file of the user."""
    file, secret = published(tmp_path / "a.h5"), tmp_path / "secret.h5"
    kernel = (3, 3, 3, 4)
    with h5py.File(secret, "w") as content:
        content["kernel"] = np.ones(kernel, np.float32)
        content.create_group("conv1_conv")
        content.attrs["weight_names"] = ["kernel", "kernel"]
    name = "conv1_conv" if kind == "layer" else "conv1_conv/conv1_conv/kernel"
    with h5py.File(file, "r+") as content:
        del content[name]
        if kind == "virtual":
            layout = h5py.VirtualLayout(kernel, "f4")
            layout[:] = h5py.VirtualSource(secret, "kernel", kernel)
            content.create_virtual_dataset(name, layout)
        elif kind == "external":
            where = [(str(secret), 0, h5py.h5f.UNLIMITED)]
            content.create_dataset(name, kernel, "f4", external=where)
        else:
            content[name] = h5py.ExternalLink(secret, "/" if kind == "layer" else "/kernel")
    refused(small(), file, f"{name} is in another file")


def test_a_run_that_begins_with_such_a_one_keeps_its_pictures(tmp_path):
    """--init_from takes them along, and refuses weights that do not say theirs."""
    there, model = small(5.0), small()
    preprocessing.find(there).mode.assign(1)
    there.save(tmp_path / "a.keras")
    assert not warm_start.load(model, tmp_path / "a.keras", False)
    assert mode(model) == "caffe" and "preprocess/mode" in names_of_model(model)
    small(pixels=False).save(tmp_path / "b.keras")
    with pytest.raises(ValueError, match=r"preprocess/mode is missing there"):
        warm_start.load(small(), tmp_path / "b.keras", True)
