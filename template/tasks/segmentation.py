"""Semantic segmentation: a class for every pixel. Data: folders of image and label pictures."""

from __future__ import annotations

import colorsys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from config import PROJECT, Config, class_weights, scale_range
from data import augment
from data.demo import scenes
from data.labels import IGNORE
from data.open import open_source
from data.source import Source
from engine import losses, metrics
from tasks.base import Example
from tasks.segmentation_models import MODELS

PICTURES = 4  # shown at an evaluation
DEMO = PROJECT / "datasets" / "demo"  # made when it is first asked for


class Task:
    main_metric = "miou"
    uses = ("mirror", "scale_range")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.root = Path(config.data_dir)
        self.model_name = config.model or next(iter(MODELS))
        if self.model_name not in MODELS:
            raise ValueError(f"--model={config.model}: segmentation has {sorted(MODELS)}")
        self.how = self._augmentation(demo=False)

    def prepare(self) -> None:
        if self.root.absolute() == DEMO:
            scenes.ensure_demo(self.root)

    def sources(self) -> tuple[Source, Source]:
        """What the training set is, not where it lies, decides how it is augmented."""
        train, val = (open_source(self.config, s, default="folders") for s in ("train", "val"))
        self.how = self._augmentation(getattr(train, "is_demo", False))
        return train, val

    def _augmentation(self, demo: bool) -> augment.Augmentation:
        """As the flags say; else as usual, but the demo's digits scaled less and never mirrored."""
        config, usual = self.config, (0.8, 1.25) if demo else (0.5, 2.0)
        return augment.Augmentation(
            (config.image_size, config.image_size),
            scale=scale_range(config) or usual,
            mirror={"on": True, "off": False, "auto": not demo}[config.mirror],
            ignore_label=IGNORE,
        )

    def training_example(self, sample: dict[str, tf.Tensor], key: tf.Tensor) -> Example:
        image, label = augment.training_pair(sample["image"], sample["label"], key, self.how)
        return {"inputs": self._inputs(image, key), "targets": label}

    def evaluation_example(self, sample: dict[str, tf.Tensor]) -> Example:
        image, label = augment.evaluation_pair(sample["image"], sample["label"], self.how)
        return {"inputs": self._inputs(image, tf.zeros([2], tf.int32)), "targets": label}

    def _inputs(self, image: tf.Tensor, key: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"image": image, "key": key} if self.config.dropout else {"image": image}

    def build_model(self) -> keras.Model:
        config = self.config
        return MODELS[self.model_name](config.image_size, config.num_classes, config.dropout)

    def loss(self, outputs: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Softmax cross-entropy from logits [B, H, W, classes] and labels uint8 [B, H, W, 1]."""
        labels = tf.squeeze(targets, -1)
        return losses.cross_entropy(
            outputs,
            labels,
            valid=labels != IGNORE,
            smoothing=self.config.label_smoothing,
            class_weights=class_weights(self.config),
        )

    def sums(self, outputs: tf.Tensor, targets: tf.Tensor) -> dict[str, tf.Tensor]:
        predictions = tf.argmax(outputs, axis=-1)
        labels = tf.squeeze(targets, -1)
        classes = self.config.num_classes
        return {
            "confusion": metrics.confusion_matrix(labels, predictions, labels != IGNORE, classes)
        }

    def metrics(self, sums: dict[str, np.ndarray]) -> dict[str, float]:
        """Pixel accuracy, IoU of each class, and their mean over the classes that occur."""
        iou = metrics.intersection_over_union(sums["confusion"])
        figures = {"pixel_accuracy": metrics.accuracy(sums["confusion"])}
        figures["miou"] = float(np.nanmean(iou)) if np.isfinite(iou).any() else 0.0
        return figures | {f"iou_{c}": float(v) for c, v in enumerate(iou)}

    def draw(
        self, inputs: dict[str, tf.Tensor], targets: tf.Tensor, outputs: tf.Tensor
    ) -> np.ndarray:
        """Input | label | prediction, side by side; ignored pixels white."""
        images = augment.denormalize(inputs["image"][:PICTURES]).numpy()
        labels = np.squeeze(targets[:PICTURES], -1)
        predictions = np.argmax(outputs[:PICTURES], axis=-1)
        return np.concatenate([images, _COLOURS[labels], _COLOURS[predictions]], axis=2)


def _colours() -> np.ndarray:
    """A colour a class, uint8 [256, 3]: background grey, neighbours far apart in hue."""
    turns = (np.arange(256) * 0.618034) % 1.0
    colours = [colorsys.hsv_to_rgb(t, 0.75, 1.0 - 0.35 * (i % 2)) for i, t in enumerate(turns)]
    colours[0], colours[IGNORE] = (0.25, 0.25, 0.25), (1.0, 1.0, 1.0)
    return (np.array(colours) * 255).astype(np.uint8)


_COLOURS = _colours()
