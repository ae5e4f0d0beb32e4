"""Networks for small pictures: sizes as published, outputs of the right shape."""

import numpy as np
import pytest

from hvdkit.models import small_pictures


@pytest.mark.parametrize(
    ("network", "weights"),
    [
        # He et al.'s ResNet-18 with a 3x3 stem for CIFAR-10, and WRN-28-10 without biases.
        (small_pictures.resnet18, 11_173_962),
        (small_pictures.wide_resnet28_10, 36_479_194),
    ],
)
def test_the_number_of_weights_is_the_published_one(network, weights):
    model = network(28, 10, 0.0)
    sizes = [np.prod(weight.shape) for weight in model.trainable_weights]
    assert sum(sizes) == weights
    assert model.output_shape == (None, 10)


def test_dropout_has_a_key_for_each_picture():
    model = small_pictures.resnet18(28, 10, 0.3)
    assert {*model.input} == {"image", "key"}
