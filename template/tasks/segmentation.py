"""Semantic segmentation: a class for every pixel. Data: folders of image and label pictures."""

import dataclasses
import math
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from hvdkit.data import augment, scenes
from hvdkit.data.labels import COLOURS, IGNORE
from hvdkit.data.open import open_sources
from hvdkit.data.source import Source
from hvdkit.evaluate import metrics, whole_pictures
from hvdkit.models.deeplab import deeplabv3plus
from hvdkit.settings import Settings, project
from hvdkit.train import losses
from hvdkit.train.outputs import check_softmax, softmax
from hvdkit.train.task import Example
from PIL import Image

import models

MODELS = {"small": models.small, "tiny": models.tiny, "deeplabv3plus": deeplabv3plus}
# Height and width of a model's input must be multiples of these.
STRIDES = {"small": 8, "tiny": 2, "deeplabv3plus": 16}
PICTURES, SIDE = 4, 256  # shown at an evaluation: how many, pixels each at least
DEMO = project.folder() / "datasets" / "demo"  # made when it is first asked for


class Task:
    main_metric = "miou"
    # Height and width of the model's inputs are multiples of it; evaluation pads pictures to it.
    # None: that of --model. Set it with a `build_model` of your own: 32 for a U-Net that halves
    # five times.
    stride: int | None = None
    # Whether the model was built here, so that --model gives its stride.
    _built_here = False

    def __init__(self, config: Settings) -> None:
        self.config = config
        self.root = Path(config.data_dir)
        self.model_name = config.model or next(iter(MODELS))
        if self.model_name not in MODELS:
            raise ValueError(
                f"--model={config.model}: segmentation has {sorted(MODELS)}"
            )
        self.options = self._augmentation(demo=False)
        self.passes = self._passes()

    def _passes(self) -> whole_pictures.Passes:
        """How evaluation goes over a picture."""
        config, stride = self.config, self._stride()
        if config.eval_window % stride:
            whose = (
                f"--model={self.model_name}"
                if self.stride is None
                else "the task's model"
            )
            raise ValueError(
                f"--eval_window={config.eval_window}: {whose} needs a multiple of {stride}"
            )
        scales = tuple(config.eval_scale_list)
        return whole_pictures.Passes(
            stride, config.eval_window, scales, config.eval_flip, self.options.fill
        )

    def _stride(self) -> int:
        if self.stride is not None and not (
            isinstance(self.stride, int) and self.stride > 0
        ):
            raise ValueError(
                f"{_name(self)}: stride = {self.stride!r} must be a whole number from 1 up"
            )
        if self.stride is None and self.model_name not in STRIDES:
            raise ValueError(f"tasks/segmentation.py: STRIDES lacks {self.model_name}")
        return self.stride or STRIDES[self.model_name]

    def prepare(self) -> None:
        if self.root.absolute() == DEMO:
            scenes.ensure_demo(self.root)

    def sources(self) -> tuple[Source, Source]:
        """The demo's data set, wherever it lies, is augmented in its own way."""
        train, val = open_sources(self.config, default="folders")
        self.options = self._augmentation(getattr(train, "is_demo", False))
        return train, val

    def _augmentation(self, demo: bool) -> augment.Augmentation:
        """As the flags say; by default the demo's digits are scaled less and not mirrored."""
        config = self.config
        scale = (0.8, 1.25) if demo else (0.5, 2.0)
        brightness, contrast, saturation = config.colour_limits or (0.1, 0.2, 0.2)
        return augment.Augmentation(
            (config.image_size, config.image_size),
            brightness=brightness,
            contrast=contrast,
            saturation=saturation,
            scale=config.scale_limits or scale,
            mirror={"on": True, "off": False, "auto": not demo}[config.mirror],
            ignore_label=IGNORE,
        )

    def augmentation(self) -> dict[str, object]:
        return dataclasses.asdict(self.options)

    def training_example(self, sample: dict[str, tf.Tensor], key: tf.Tensor) -> Example:
        image, label = augment.training_pair(sample, key, self.options)
        return {"inputs": self._inputs(image, key), "targets": {"label": label}}

    def picture_inputs(self, image: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._inputs(image, tf.zeros([2], tf.int32))

    def evaluation_example(self, sample: dict[str, tf.Tensor]) -> Example:
        """The whole picture at its own size; with --eval_crop its centre, and counts of pixels."""
        image = sample["image"]
        label = sample["label"]
        targets = {}
        side = self.config.eval_crop
        if side:
            height, width = tf.unstack(tf.shape(label, tf.int64)[:2])
            targets["seen_pixels"] = tf.minimum(height, side) * tf.minimum(width, side)
            targets["all_pixels"] = height * width
            crop = dataclasses.replace(self.options, size=(side, side))
            image, label = augment.evaluation_pair(sample, crop)
        return {
            "inputs": self.picture_inputs(image),
            "targets": {"label": label} | targets,
        }

    def _inputs(self, image: tf.Tensor, key: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"image": image, "key": key} if self.config.dropout else {"image": image}

    def build_model(self) -> keras.Model:
        config = self.config
        self._built_here = True
        return MODELS[self.model_name](
            config.image_size, config.num_classes, config.dropout
        )

    def predict(self, model: keras.Model, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        """Logits [B, H, W, classes] of pictures of any size, by the --eval flags.

        Raises ValueError if the model's stride is unknown, if pictures are no uint8, or if views
        are to be averaged whose logits may be none of a softmax.
        """
        has_own_model = (
            type(self).build_model is not Task.build_model and not self._built_here
        )
        if self.stride is None and has_own_model:
            raise ValueError(
                f"{_name(self)} has a build_model of its own: add `stride = N` to the class, where "
                "heights and widths of the model's inputs are multiples of N"
            )

        def call(images: tf.Tensor) -> tf.Tensor:
            return model(inputs | {"image": images}, training=False)

        image = inputs["image"]
        if image.dtype != tf.uint8 and self.passes.stride > 1:
            raise ValueError(
                f"{_name(self)}: pictures are padded with a grey of 0 to 255, and the model is "
                f"given {image.dtype.name}: give it uint8 and scale in the model "
                "(hvdkit.train.preprocessing), or give the class a `predict` of its own"
            )
        logits = whole_pictures.predict(call, image, self.passes)
        if self.passes.average:
            check_softmax(self, logits)
        return logits

    def loss(
        self, outputs: tf.Tensor, targets: dict[str, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Softmax cross-entropy from logits [B, H, W, classes] and labels uint8 [B, H, W, 1]."""
        labels = tf.squeeze(targets["label"], -1)
        return losses.cross_entropy(
            outputs,
            labels,
            valid=labels != IGNORE,
            smoothing=self.config.label_smoothing,
            class_weights=self.config.class_weight_list,
        )

    def decode(self, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return softmax(outputs)

    def sums(
        self, outputs: tf.Tensor, targets: dict[str, tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        predictions = tf.argmax(outputs, axis=-1)
        labels = tf.squeeze(targets["label"], -1)
        # A model may have more outputs than there are classes.
        classes = max(self.config.num_classes, outputs.shape[-1])
        sums = {
            name: tf.reduce_sum(x) for name, x in targets.items() if name != "label"
        }
        sums["confusion"] = metrics.confusion_matrix(
            labels, predictions, labels != IGNORE, num_classes=classes
        )
        return sums

    def metrics(self, sums: dict[str, np.ndarray]) -> dict[str, float]:
        """Pixel accuracy, IoU of each class, and their mean over the classes that occur."""
        iou = metrics.intersection_over_union(sums["confusion"])
        figures = {"pixel_accuracy": metrics.accuracy(sums["confusion"])}
        figures["miou"] = float(np.nanmean(iou)) if np.isfinite(iou).any() else 0.0
        return figures | {f"iou_{c}": float(v) for c, v in enumerate(iou)}

    def notes(self, sums: dict[str, np.ndarray]) -> list[str]:
        if not self.config.eval_crop or sums["seen_pixels"] == sums["all_pixels"]:
            return []
        share = sums["seen_pixels"] / sums["all_pixels"]
        return [
            f"--eval_crop={self.config.eval_crop}: the scores are of {share:.2%} of the validation "
            "set's pixels; without the flag, of whole pictures"
        ]

    def draw(
        self,
        inputs: dict[str, tf.Tensor],
        targets: dict[str, tf.Tensor],
        outputs: tf.Tensor,
    ) -> np.ndarray:
        """Input | label | prediction, side by side; ignored pixels white.

        Each is fitted into a square, so that pictures of all sizes line up.
        """
        images = np.array(inputs["image"][:PICTURES])
        labels = np.squeeze(targets["label"][:PICTURES], -1)
        predictions = tf.argmax(outputs[:PICTURES], axis=-1).numpy()
        side = self.config.eval_crop or max(self.config.image_size, SIDE)
        parts = zip(images, COLOURS[labels], COLOURS[predictions])
        return np.stack(
            [np.hstack([_fitted(part, side) for part in row]) for row in parts]
        )


def _name(task: Task) -> str:
    return f"{type(task).__module__}.{type(task).__name__}"


def _fitted(picture: np.ndarray, side: int) -> np.ndarray:
    """uint8 [side, side, 3]: the picture centred, scaled down, or up by a whole factor."""
    height, width = picture.shape[:2]
    scale = side / max(height, width)
    scale = math.floor(scale) if scale > 1 else scale
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    square = Image.new("RGB", (side, side))
    corner = ((side - size[0]) // 2, (side - size[1]) // 2)
    # Nearest: a mix of two classes' colours may be a third class's.
    square.paste(
        Image.fromarray(picture).resize(size, Image.Resampling.NEAREST), corner
    )
    return np.asarray(square)
