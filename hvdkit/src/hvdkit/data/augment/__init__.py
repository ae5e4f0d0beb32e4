"""Augmentation of pictures, on any number of ranks alike: `from hvdkit.data import augment`.

crops                   random crops, with label pictures or with one class; colours
image_ops               resizing, cutting and random draws that the others use
mixing                  mixup and CutMix
rand_augment            RandAugment
"""

from hvdkit.data.augment.crops import (
    Augmentation,
    Limits,
    Pair,
    centred,
    coloured,
    evaluation_pair,
    jitter,
    random_part,
    random_resized,
    shifted,
    training_pair,
)

__all__ = [
    "Augmentation",
    "Limits",
    "Pair",
    "centred",
    "coloured",
    "evaluation_pair",
    "jitter",
    "random_part",
    "random_resized",
    "shifted",
    "training_pair",
]
