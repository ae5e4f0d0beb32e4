"""Scales pictures down once, when they are packed, instead of at every read."""

from __future__ import annotations

import tensorflow as tf

from hvdkit.data import image_ops, source
from hvdkit.data.readers import pictures
from hvdkit.data.source import Source


class Smaller:
    """Another source's samples, with the shorter side of pictures at most `short_side` pixels.

    Larger pictures are scaled with antialiasing and stored as JPEG of `quality` (1 to 100); labels
    of pixels take the nearest pixel. Smaller ones are unchanged, and so are sample ids.
    """

    def __init__(self, larger: Source, short_side: int, quality: int) -> None:
        """Raises ValueError for an invalid side or quality."""
        if short_side < 1 or not 1 <= quality <= 100:
            raise ValueError(
                f"--short_side={short_side} --quality={quality}: give at least 1 pixel, and a "
                "quality of 1 to 100"
            )
        self._source, self._side, self._quality = larger, short_side, quality
        self.class_names = getattr(larger, "class_names", [])
        self.is_demo = getattr(larger, "is_demo", False)

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads {"image": uint8 [h, w, 3], "label": as the source has it, "file": bytes}."""
        sample = self._source.read(index)
        image, label = sample["image"], sample["label"]
        shape = tf.shape(image)[:2]
        shorter = tf.reduce_min(shape)
        # Integer arithmetic, so that the shorter side is exact.
        scaled = tf.maximum((2 * shape * self._side + shorter) // (2 * shorter), 1)

        def encoded() -> tf.Tensor:
            small = tf.image.resize(image, scaled, antialias=True)
            return tf.io.encode_jpeg(tf.cast(small + 0.5, tf.uint8), quality=self._quality)

        def as_it_was() -> tf.Tensor:
            return sample["file"] if "file" in sample else tf.io.encode_png(image)

        file = tf.cond(shorter > self._side, encoded, as_it_was)
        if label.shape.rank == 3:
            label = image_ops.nearest(label, tf.where(shorter > self._side, scaled, shape))
        return {"image": pictures.decode_image(file), "label": label, "file": file}

    def explain(self, index: int) -> str | None:
        """What is wrong with sample `index`, or None when it reads well."""
        return self._source.explain(index)

    def fingerprint(self) -> str:
        """SHA-256 over the source's and the settings."""
        return source.digest([(self._source.fingerprint(), self._side), ("", self._quality)])
