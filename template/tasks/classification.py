"""Image classification: one class for a picture. By default handwritten digits."""

from collections.abc import Callable
from functools import partial

import keras
import numpy as np
import tensorflow as tf
from hvdkit.data import augment, classes, image_ops, mixing, rand_augment
from hvdkit.data.open import one_split, open_sources
from hvdkit.data.source import Source
from hvdkit.evaluate import metrics
from hvdkit.models import resnet, small_pictures
from hvdkit.settings import Settings
from hvdkit.train import losses
from hvdkit.train.outputs import softmax
from hvdkit.train.task import Example
from PIL import Image, ImageDraw

import models

MODELS: dict[str, Callable[[int, int, float], keras.Model]] = {
    "small": models.classifier,
    "two_convolutions": models.two_convolutions,
    "resnet18": small_pictures.resnet18,
    "wide_resnet28_10": small_pictures.wide_resnet28_10,
    "resnet20": partial(resnet.cifar_resnet, depth=20),
    "resnet56": partial(resnet.cifar_resnet, depth=56),
    "resnet50": resnet.resnet50,
    "resnet50_keras": resnet.resnet50_keras,
}
# Shown at an evaluation: how many, in a row, pixels each.
PICTURES, COLUMNS, TILE = 32, 8, 96
MOST_CONFUSED = 1000  # classes: with more, there is no confusion matrix
LARGE = 64  # pixels: pictures from this size on are augmented as photographs


class Task:
    main_metric = "accuracy"

    def __init__(self, config: Settings) -> None:
        self.config = config
        self.model_name = config.model or next(iter(MODELS))
        if self.model_name not in MODELS:
            raise ValueError(
                f"--model={config.model}: classification has {sorted(MODELS)}"
            )
        # Mirrored digits are invalid. For other data, only you know.
        digits = config.data_format in ("", "digits")
        self.mirror = {"on": True, "off": False, "auto": not digits}[config.mirror]
        # The least share of its area that a crop keeps; None: pictures are shifted, not scaled.
        self.smallest = 0.08 if config.image_size >= LARGE else None
        if self.smallest and config.shift >= 0:
            raise ValueError(
                f"--shift={config.shift}: pictures of {LARGE} pixels or more are cropped, not "
                "shifted: leave it out"
            )
        self.colour = config.colour_limits or (0.0, 0.0, 0.0)
        self.operations = config.random_operations
        self.mixes = bool(config.mixup or config.cutmix)

    def sources(self) -> tuple[Source, Source]:
        train, val = open_sources(self.config, default="digits")
        if self.config.mirror == "auto":
            # A command that only scores mirrors nothing.
            if getattr(train, "asks_mirror", False) and not one_split.value:
                raise ValueError(
                    "--mirror=auto: these files may hold digits, letters or photographs: give "
                    "--mirror=off where a mirrored picture is none of its class, else --mirror=on"
                )
            # The demo's digits must not be mirrored.
            if getattr(train, "is_demo", False):
                self.mirror = False
        self.class_names = classes.of(train)
        return train, val

    def augmentation(self) -> dict[str, object]:
        return {
            "mirror": self.mirror,
            "smallest_area": self.smallest,
            "shift": self.config.shift,
            "colour": self.colour,
            "rand_augment": self.operations,
            "mixup": self.config.mixup,
            "cutmix": self.config.cutmix,
        }

    def training_example(self, sample: dict[str, tf.Tensor], key: tf.Tensor) -> Example:
        image = self._augmented(sample, key)
        label = self._label(sample)
        if not self.mixes:
            return {"inputs": self._inputs(image, key), "targets": label}

        partner = sample["partner"]
        partner_key, mixing_key = tf.unstack(image_ops.keys(key, 2))
        image, share = mixing.mixed(
            (image, self._augmented(partner, partner_key)),
            mixing_key,
            mixup=self.config.mixup,
            cutmix=self.config.cutmix,
        )
        targets = {"label": label, "other": self._label(partner), "share": share}
        return {"inputs": self._inputs(image, key), "targets": targets}

    def _augmented(self, sample: dict[str, tf.Tensor], key: tf.Tensor) -> tf.Tensor:
        """Small pictures are shifted a little; large ones cropped at a random size and place."""
        size = self.config.image_size
        if self.smallest is None:
            image = augment.shifted(
                sample, key, size=size, mirror=self.mirror, most=self.config.shift
            )
        else:
            image = augment.random_resized(
                sample, key, size=size, mirror=self.mirror, smallest=self.smallest
            )
        if self.operations:
            count, magnitude = self.operations
            operations_key = image_ops.keys(key, 3)[2]
            image = rand_augment.applied(
                image, operations_key, count=count, magnitude=magnitude
            )
        return augment.coloured(image, key, self.colour)

    def picture_inputs(self, image: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._centre({"image": image})

    def evaluation_example(self, sample: dict[str, tf.Tensor]) -> Example:
        return {"inputs": self._centre(sample), "targets": self._label(sample)}

    def _centre(self, sample: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        size = self.config.image_size
        image = augment.centred(sample, size, share=0.875 if size >= LARGE else 1.0)
        return self._inputs(image, tf.zeros([2], tf.int32))

    def _inputs(self, image: tf.Tensor, key: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"image": image, "key": key} if self.config.dropout else {"image": image}

    def _label(self, sample: dict[str, tf.Tensor]) -> tf.Tensor:
        return tf.cast(
            losses.require_classes(sample["label"], self.config.num_classes), tf.int64
        )

    def build_model(self) -> keras.Model:
        config = self.config
        return MODELS[self.model_name](
            config.image_size, config.num_classes, config.dropout
        )

    def loss(
        self, outputs: tf.Tensor, targets: tf.Tensor | dict[str, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Softmax cross-entropy from logits [B, classes] and labels integer [B], or mixed ones."""
        is_mixed = isinstance(targets, dict)
        loss = losses.mixed_cross_entropy if is_mixed else losses.cross_entropy
        return loss(
            outputs,
            targets,
            smoothing=self.config.label_smoothing,
            class_weights=self.config.class_weight_list,
        )

    def decode(self, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return softmax(outputs)

    def sums(self, outputs: tf.Tensor, targets: tf.Tensor) -> dict[str, tf.Tensor]:
        """Counts of a batch, from logits [B, classes] and labels [B]; `metrics` gets the totals."""
        hits = metrics.in_top(targets, outputs, k=1)
        sums = {
            "hits": tf.math.count_nonzero(hits),
            "samples": tf.size(targets, tf.int64),
        }
        if self.config.num_classes <= MOST_CONFUSED:
            # argmax takes the first of equal scores; in_top, and so `hits`, the last.
            count = outputs.shape[-1]
            predicted = count - 1 - tf.argmax(outputs[:, ::-1], axis=-1)
            sums["confusion"] = metrics.confusion_matrix(
                targets, predicted, tf.ones_like(targets, tf.bool), num_classes=count
            )
        if self.config.num_classes > 5:
            sums["hits_of_5"] = tf.math.count_nonzero(
                metrics.in_top(targets, outputs, k=5)
            )
        return sums

    def metrics(self, sums: dict[str, np.ndarray]) -> dict[str, float]:
        samples = max(int(sums["samples"]), 1)
        figures = {"accuracy": float(sums["hits"] / samples)}
        if "hits_of_5" in sums:
            figures["top5_accuracy"] = float(sums["hits_of_5"] / samples)
        return figures

    def draw(
        self, inputs: dict[str, tf.Tensor], targets: tf.Tensor, outputs: tf.Tensor
    ) -> np.ndarray:
        """One sheet: each image above its class, and the prediction if it is wrong."""
        images = np.array(inputs["image"][:PICTURES])
        predictions = np.argmax(outputs[:PICTURES], axis=-1)
        tiles = []
        for image, label, prediction in zip(images, np.array(targets), predictions):
            tiles.append(_tile(image, self._name(label), self._name(prediction)))
        while len(tiles) % COLUMNS:
            tiles.append(np.zeros_like(tiles[0]))
        rows = [
            np.concatenate(tiles[i : i + COLUMNS], 1)
            for i in range(0, len(tiles), COLUMNS)
        ]
        return np.concatenate(rows)[None]

    def _name(self, number: int) -> str:
        """The class's name in the data; its number where they name none."""
        return (
            self.class_names[number] if number < len(self.class_names) else str(number)
        )


def _tile(image: np.ndarray, label: str, prediction: str) -> np.ndarray:
    """uint8 [TILE + 34, TILE, 3]: image and text, green if right and red if wrong."""
    tile = Image.new("RGB", (TILE, TILE + 34))
    picture = Image.fromarray(image)
    tile.paste(picture.resize((TILE - 2, TILE - 2), Image.Resampling.NEAREST), (1, 1))
    text = label
    colour = (90, 220, 90)
    if prediction != label:
        text = f"{prediction}\nis {label}"
        colour = (255, 110, 90)
    ImageDraw.Draw(tile).text((4, TILE), text, fill=colour, font_size=13)
    return np.asarray(tile)
