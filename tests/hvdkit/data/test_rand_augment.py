"""RandAugment's operations are Pillow's; what is drawn belongs to the key."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance, ImageOps

from hvdkit.data import shipped
from hvdkit.data.augment import rand_augment
from hvdkit.settings import Settings
from tasks import classification

FILE = Path(shipped.__file__).parent / "china.png"
CHINA = np.asarray(Image.open(FILE).convert("RGB"))[:90, :121] // 2 + 40
PLAIN = np.full_like(CHINA, 7)


def affine(numbers):
    def moved(image, s):
        return image.transform(
            image.size, Image.AFFINE, numbers(s), fillcolor=(128,) * 3
        )

    return moved


def enhanced(kind):
    return lambda image, s: kind(image).enhance(1 + 0.9 * s)


PILLOW = {
    "identity": lambda image, s: image,
    "autocontrast": lambda image, s: ImageOps.autocontrast(image),
    "equalize": lambda image, s: ImageOps.equalize(image),
    "rotate": lambda image, s: image.rotate(30 * s, fillcolor=(128,) * 3),
    "solarize": lambda image, s: ImageOps.solarize(image, int(255 * (1 - abs(s)))),
    "colour": enhanced(ImageEnhance.Color),
    "posterize": lambda image, s: ImageOps.posterize(image, 8 - round(4 * abs(s))),
    "contrast": enhanced(ImageEnhance.Contrast),
    "brightness": enhanced(ImageEnhance.Brightness),
    "sharpness": enhanced(ImageEnhance.Sharpness),
    "shear_x": affine(lambda s: (1, 0.3 * s, 0, 0, 1, 0)),
    "shear_y": affine(lambda s: (1, 0, 0, 0.3 * s, 1, 0)),
    "shift_x": affine(lambda s: (1, 0, round(s * 150 / 331 * 121), 0, 1, 0)),
    "shift_y": affine(lambda s: (1, 0, 0, 0, 1, round(s * 150 / 331 * 90))),
}


@pytest.mark.parametrize("name", rand_augment.OPERATIONS)
def test_an_operation_computes_what_pillow_does(name: str):
    for image, strength in (
        (CHINA, 0.7),
        (CHINA, -0.7),
        (PLAIN, 0.4),
        (CHINA[:2, :1], -1.0),
    ):
        if len(image) == 2 and name.startswith("shift"):  # another size
            continue
        changed = rand_augment.OPERATIONS[name](
            tf.constant(image), tf.constant(strength)
        ).numpy()
        expected = np.asarray(PILLOW[name](Image.fromarray(image), strength)).astype(
            int
        )
        wrong = np.abs(changed - expected).max(-1) > 1
        # Where a place falls on the edge of two pixels, each rounds by itself.
        most = 2e-3 if name in ("rotate", "shear_x", "shear_y") else 0
        assert wrong.mean() <= most, (wrong.sum(), strength)


def test_operations_belong_to_the_key_and_all_are_drawn():
    draw = tf.function(
        lambda key: rand_augment.applied(CHINA, key, count=1, magnitude=30.0)
    )
    images = [draw(tf.constant([3, number])).numpy() for number in range(150)]
    # There are 14 operations, most of them with two signs.
    assert len({image.tobytes() for image in images}) > 20
    np.testing.assert_array_equal(images[9], draw(tf.constant([3, 9])))
    task = classification.Task(Settings(num_classes=3, rand_augment="1,30"))
    assert task.augmentation()["rand_augment"] == (1, 30.0)
