"""CIFAR-100's binary version (https://www.cs.toronto.edu/~kriz/cifar.html, "binary version").

ROOT/train.bin      split train: 50,000 pictures
ROOT/test.bin       split val: 10,000 pictures

A record has 3,074 bytes: the coarse label (0 to 19), the fine label (0 to 99), then 32 x 32 red,
green and blue values.
"""

from pathlib import Path

from hvdkit.data.readers.cifar import Cifar, Layout

CLASS_NAMES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle",
    "bottle", "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle",
    "caterpillar", "cattle", "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch",
    "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest", "fox",
    "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom",
    "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree",
    "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road",
    "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake",
    "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone",
    "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
)  # fmt: skip
COARSE_NAMES = (
    "aquatic_mammals", "fish", "flowers", "food_containers", "fruit_and_vegetables",
    "household_electrical_devices", "household_furniture", "insects", "large_carnivores",
    "large_man-made_outdoor_things", "large_natural_outdoor_scenes",
    "large_omnivores_and_herbivores", "medium_mammals", "non-insect_invertebrates", "people",
    "reptiles", "small_mammals", "trees", "vehicles_1", "vehicles_2",
)  # fmt: skip
LAYOUT = Layout(
    name="CIFAR-100",
    archive="cifar-100-binary.tar.gz",
    folder="cifar-100-binary",
    files={"train": ("train.bin",), "val": ("test.bin",)},
    classes=(len(COARSE_NAMES), len(CLASS_NAMES)),
    shares={"train.bin": 5, "test.bin": 1},
)


class Cifar100(Cifar):
    """One split; see `Cifar` for what is read. `coarse`: the 20 classes, not the 100."""

    def __init__(self, root: Path, split: str, coarse: bool = False):
        super().__init__(root, split, LAYOUT, label=0 if coarse else 1)
        self.class_names = COARSE_NAMES if coarse else CLASS_NAMES
