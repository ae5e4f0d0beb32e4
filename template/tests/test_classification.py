"""The networks are the papers', the counts are counts."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from config import Config
from engine import batch_norm
from tasks import classification, classification_models
from tasks.classification_models import MODELS

CONFIG = dataclasses.replace(Config(), task="classification", num_classes=10, image_size=8)


# He et al. 2015, table 6: 0.27 and 0.85 million. ResNet-50 has 25,557,032, and 26,560 biases that
# keras.applications has in its convolutions.
@pytest.mark.parametrize(
    ("name", "size", "classes", "parameters"),
    [
        ("resnet20", 32, 10, 269_722),
        ("resnet56", 32, 10, 853_018),
        ("resnet50", 64, 1000, 25_557_032 + 26_560),
    ],
)
def test_parameters(name, size, classes, parameters):
    model = MODELS[name](size, classes, 0.0)
    trainable = sum(np.prod(v.shape) for v in model.trainable_variables)
    assert trainable == parameters


@pytest.mark.parametrize("name", [n for n in MODELS if n != "resnet50"])
def test_models_give_float32_logits_and_can_be_saved_and_synchronized(name, tmp_path):
    model = MODELS[name](16, 7, 0.2)
    inputs = {
        "image": tf.random.stateless_normal([2, 16, 16, 3], [1, 2]),
        "key": tf.zeros([2, 2], tf.int32),
    }
    logits = model(inputs)
    assert logits.shape == (2, 7) and logits.dtype == tf.float32
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(inputs), logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(batch_norm.synchronize(model)(inputs), logits, rtol=1e-5, atol=1e-6)


def test_blocks_that_stride_and_widen_keep_every_second_pixel():
    x = keras.Input((4, 4, 2))
    image = np.arange(32, dtype=np.float32).reshape(1, 4, 4, 2)
    out = keras.Model(x, classification_models._shortcut(x, 5, strides=2))(image).numpy()
    assert out.shape == (1, 2, 2, 5)
    np.testing.assert_array_equal(out[..., :2], image[:, ::2, ::2])
    np.testing.assert_array_equal(out[..., 2:], 0)


def test_accuracy_and_top_5():
    task = classification.Task(CONFIG)
    logits = tf.constant(np.tile(np.arange(10.0, 0.0, -1.0), (4, 1)))  # 0 is likeliest, then 1
    sums = task.sums(logits, tf.constant([0, 4, 5, 9], tf.int64))
    figures = task.metrics({k: v.numpy() for k, v in sums.items()})
    assert figures == {"accuracy": 0.25, "top5_accuracy": 0.5}
    few = classification.Task(dataclasses.replace(CONFIG, num_classes=5))
    assert list(few.sums(logits[:, :5], tf.constant([0, 4, 3, 3], tf.int64))) == ["hits", "samples"]


def test_the_sheet_has_a_tile_for_each_picture():
    task = classification.Task(CONFIG)
    inputs = {"image": tf.zeros([11, 8, 8, 3])}
    sheet = task.draw(inputs, tf.zeros([11], tf.int64), tf.eye(11, 10))
    tile = classification.TILE
    assert sheet.shape == (1, 2 * (tile + 18), 8 * tile, 3) and sheet.dtype == np.uint8
    right, wrong = (
        sheet[0, tile + 1 : tile + 18, :tile],
        sheet[0, tile + 1 : tile + 18, tile : 2 * tile],
    )
    assert right[..., 1].max() > right[..., 0].max() and wrong[..., 0].max() > wrong[..., 1].max()


def test_wrong_model_is_named():
    with pytest.raises(ValueError, match=r"--model=vgg.*resnet20"):
        classification.Task(dataclasses.replace(CONFIG, model="vgg"))
