"""Settings of the task, its data and how it is scored."""

import math
import re
from pathlib import Path

from hvdkit import whole_files
from hvdkit.logs import refuse
from hvdkit.settings.fields import Room, numbers, setting


class TaskSettings(Room):
    """Task, model and loss"""

    task: str = setting("segmentation", "name of a file in tasks/")
    model: str = setting("", "one of the task's models; empty: the first")
    num_classes: int = setting(11, "number of classes, background included", low=2)
    dropout: float = setting(
        0.0, "dropout rate, if the model has dropout", low=0, below=1
    )
    label_smoothing: float = setting(
        0.0, "share of the target over all classes", low=0, below=1
    )
    class_weights: str = setting("", "each class's weight in the loss; empty: all 1")

    def check(self) -> None:
        _ = self.class_weight_list

    @property
    def class_weight_list(self) -> list[float]:
        """Each class's weight in the loss; an empty list where all count alike."""
        if not self.class_weights:
            return []
        weights = numbers(
            self,
            "class_weights",
            "numbers from 0 up, not all 0, with commas between them: 1,2.5,1",
            fits=lambda w: all(0 <= x < math.inf for x in w) and any(w),
        )
        if len(weights) != self.num_classes:
            raise ValueError(
                f"--class_weights has {len(weights)} weights for --num_classes={self.num_classes}"
            )
        return weights


# The reader of each layout of data_dir, "module.name", which hvdkit/data/open.py calls.
READERS = {
    "folders": "hvdkit.data.readers.pairs.ImageLabelFolder",
    "voc": "hvdkit.data.readers.voc.Voc",
    "cityscapes": "hvdkit.data.readers.cityscapes.Cityscapes",
    "class_folders": "hvdkit.data.readers.class_folders.ClassFolders",
    "cifar10": "hvdkit.data.readers.cifar.Cifar10",
    "cifar100": "hvdkit.data.readers.cifar.Cifar100",
    "idx": "hvdkit.data.readers.idx.Idx",
    "digits": "hvdkit.data.shipped.Digits",
    "records": "hvdkit.data.readers.records.Records",
}
# What `hvdkit pack` reads besides; to train from them, pack them.
PACK_ONLY = {
    "webdataset": "hvdkit.data.readers.archives.Tars",
    "tfrecords": "hvdkit.data.readers.archives.Examples",
}
FORMATS = ["", *READERS]  # the choices of --data_format, to which add_reader appends


def add_reader(name: str, reader: str) -> None:
    """Adds a value of --data_format; for a fork's settings.py.

    `reader`: "module.name" of a class or function, imported when it is used, that takes data_dir, a
    split and the number of classes, and returns a `hvdkit.data.source.Source`.

    A name that is taken, or a reader that is no "module.name", ends the program with one sentence.
    """
    parts = reader.split(".")
    is_dotted = len(parts) > 1 and all(part.isidentifier() for part in parts)
    if name in FORMATS or not is_dotted:
        refuse(f"add_reader({name!r}, {reader!r}): give a new name and module.name")
    READERS[name] = reader
    FORMATS.append(name)


class DataSettings(Room):
    """Data"""

    data_dir: str = setting(
        "datasets/demo", "folder of the data, or URL of packed ones", path=True
    )
    cache_dir: str = setting(
        "", "folder for remote shards; empty: ~/.cache/hvdkit", path=True
    )
    cache_gb: float = setting(
        100.0, "size of --cache_dir, in GB of 10^9 bytes", above=0
    )
    data_format: str = setting(
        "", "layout of data_dir; empty: the task's own", choices=FORMATS
    )
    train_split: str = setting("train", "split of data_dir to train on")
    val_split: str = setting("val", "split of data_dir to evaluate")
    shuffle_shards: int = setting(
        0, "packed shards to shuffle together; 0: all samples", low=0
    )
    synthetic_data: bool = setting(False, "random samples instead of data_dir")
    label_map: str = setting(
        "", "values of label pictures to classes: 255:1,0:ignore, or a file", path=True
    )
    image_size: int = setting(
        64, "height and width of a training crop, in pixels", low=8
    )
    mirror: str = setting(
        "auto",
        "mirror half of the pictures; auto: except digits, asked for with idx",
        choices=("auto", "on", "off"),
    )
    scale_range: str = setting(
        "", "least and largest random scale; empty: the task's own"
    )
    shift: int = setting(
        -1, "most pixels to shift a small picture; -1: an eighth of its size", low=-1
    )
    accept_changed_data: bool = setting(
        False, "resume although the training data changed"
    )
    colour_range: str = setting(
        "",
        "random shift of brightness, contrast, saturation: 0.1,0.2,0.2; empty: the task's own",
    )
    rand_augment: str = setting(
        "",
        "RandAugment's number of operations and magnitude, 0 to 30: 2,9; empty: none",
    )
    mixup: float = setting(
        0.0, "mix pictures: Beta's parameter; 0: off", low=0, below=1000
    )
    cutmix: float = setting(
        0.0, "paste boxes: Beta's parameter; 0: off", low=0, below=1000
    )
    max_pixels: int = setting(
        64_000_000, "pixels of a picture at most, else it is refused", low=1
    )
    max_bad_samples: str = setting(
        "0", "bad samples to replace, a number or a share: 100 or 0.1%"
    )
    data_workers: int = setting(
        0, "threads that read data; 0: a share of the cores", low=0
    )

    def check(self) -> None:
        for name in ("train_split", "val_split"):
            if not getattr(self, name):
                raise ValueError(f"--{name}= is empty: name a split of --data_dir")
        if self.shift >= self.image_size:
            raise ValueError(
                f"--shift={self.shift} moves pictures of --image_size={self.image_size} away: make "
                "it smaller"
            )
        # Each of these raises where its text is wrong.
        _ = self.scale_limits
        _ = self.label_values
        _ = self.colour_limits
        _ = self.most_bad_samples(0)
        _ = self.random_operations

    @property
    def label_values(self) -> dict[int, int | None]:
        """What --label_map says: see the function `label_values`."""
        return label_values(self.label_map)

    @property
    def scale_limits(self) -> tuple[float, float] | None:
        """Least and largest factor of a random scale; None where the task chooses."""
        if not self.scale_range:
            return None
        # A factor of 0.1 reads a window of 100 times the crop's pixels.
        least, largest = numbers(
            self,
            "scale_range",
            "two numbers from 0.1 to 10, the lower one first, with a comma between them: 0.5,2",
            fits=lambda s: len(s) == 2 and 0.1 <= s[0] <= s[1] <= 10,
        )
        return least, largest

    @property
    def random_operations(self) -> tuple[int, float] | None:
        """How many operations RandAugment applies, and their magnitude; None: it is off."""
        if not self.rand_augment:
            return None
        count, magnitude = numbers(
            self,
            "rand_augment",
            "a whole number from 1 to 10 and a magnitude from 0 to 30: 2,9",
            fits=lambda x: len(x) == 2 and x[0] in range(1, 11) and 0 <= x[1] <= 30,
        )
        return int(count), magnitude

    def most_bad_samples(self, samples: int) -> int:
        """How many of so many training samples may be bad."""
        found = re.fullmatch(r"(\d+)|(\d+|\d*\.\d+)%", self.max_bad_samples)
        if not found or float(found[2] or 0) > 100:
            raise ValueError(
                f"--max_bad_samples={self.max_bad_samples!r} must be a whole number from 0 up, or "
                "a share of the training samples from 0% to 100%: 100 or 0.1%"
            )
        return int(found[1]) if found[1] else int(samples * float(found[2]) / 100)

    @property
    def colour_limits(self) -> tuple[float, float, float] | None:
        """Shares of brightness, contrast and saturation; None where the task chooses."""
        if not self.colour_range:
            return None
        brightness, contrast, saturation = numbers(
            self,
            "colour_range",
            "three numbers from 0 to 1, of brightness, contrast and saturation; 0,0,0: unchanged",
            fits=lambda c: len(c) == 3 and 0 <= min(c) <= max(c) <= 1,
        )
        return brightness, contrast, saturation

    def notes(self) -> list[str]:
        alike = self.train_split == self.val_split and not self.synthetic_data
        if not alike:
            return []
        return [
            f"--train_split and --val_split are both {self.train_split}: the score is measured on "
            "the training data"
        ]

    def without_effect(self) -> dict[str, str]:
        names = ("train_split", "val_split", "data_dir", "data_format")
        found = dict.fromkeys(names if self.synthetic_data else (), "--synthetic_data")
        is_remote = "://" in self.data_dir and not self.synthetic_data
        cache = () if is_remote else ("cache_dir", "cache_gb")
        return found | dict.fromkeys(cache, "a --data_dir that is no URL")


class EvaluationSettings(Room):
    """Evaluation"""

    eval_every: int = setting(
        200,
        "steps, or 1epoch, between evaluations; 0: only at the end",
        low=0,
        every=True,
    )
    eval_batch_size: int = setting(
        16, "samples a batch in evaluation, on each rank", low=1
    )
    early_stop_evals: int = setting(
        0, "end after so many without a better score; 0: never", low=0
    )
    eval_crop: int = setting(
        0, "score only a centre of this size; 0: all (segmentation)", low=0
    )
    eval_window: int = setting(
        0, "sliding window, in pixels; 0: none (segmentation)", low=0
    )
    eval_scales: str = setting(
        "1", "average probabilities at these scales (segmentation)"
    )
    eval_flip: bool = setting(
        False, "average those of the mirror image too (segmentation)"
    )

    def check(self) -> None:
        if self.early_stop_evals and not self.eval_every:
            raise ValueError(
                "--early_stop_evals counts evaluations, and --eval_every=0 makes none: set it"
            )
        _ = self.eval_scale_list
        if self.eval_crop and self.eval_window:
            raise ValueError(
                "--eval_crop scores a picture's centre, --eval_window all of it: choose one"
            )

    @property
    def eval_scale_list(self) -> list[float]:
        """Factors on a picture's size at which it is evaluated."""
        # A scale of 8 takes 64 times the pixels.
        return numbers(
            self,
            "eval_scales",
            "different numbers above 0, 8 at most, with commas between them: 0.5,1,1.5",
            fits=lambda s: 0 < min(s) <= max(s) <= 8 and len({*s}) == len(s),
        )


def label_values(label_map: str) -> dict[int, int | None]:
    """The class of values of label pictures that are mapped; None: ignored.

    A file has a pair a line, or several with commas between them.
    """
    text = label_map
    bad = ValueError(
        f"--label_map={label_map!r} must be pairs of a value, 0 to 255, each once, and its class "
        "or the word ignore: 255:1,0:ignore; or the path of a file of such pairs"
    )
    if text and ":" not in text:
        try:
            text = whole_files.read(
                Path(text), whole_files.JSON_BYTES, links=True
            ).decode("utf-8-sig")
        except OSError as error:
            raise ValueError(f"--label_map={label_map}: {error.strerror}") from None
        except ValueError:  # It is not UTF-8.
            raise bad from None
    classes: dict[int, int | None] = {}
    for pair in re.split(r"[,\n]", text):
        if not pair.strip():
            continue
        match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+|ignore)\s*", pair)
        if not match:
            raise bad
        value = int(match[1])
        to_class = None if match[2] == "ignore" else int(match[2])
        if value in classes or value > 255 or (to_class or 0) > 254:
            raise bad
        classes[value] = to_class
    return classes
