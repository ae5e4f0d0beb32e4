"""What a task is: the model, its data, loss and metrics; a file in tasks/ with a class `Task`."""

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from hvdkit import scores
from hvdkit.data.place import BEGINNING, Place
from hvdkit.data.source import Source
from hvdkit.settings import Settings, absl_flags, project
from hvdkit.train.optim.groups import Group

# Settings that only tasks read, and those that a task's own function leaves without a reader.
EVALUATION = ("eval_crop", "eval_window", "eval_scales", "eval_flip", "val_split")
_OF_TASKS = (
    "model",
    "num_classes",
    "dropout",
    "label_smoothing",
    "class_weights",
    "image_size",
    "data_dir",
    "data_format",
    "synthetic_data",
    "train_split",
    "mirror",
    "scale_range",
    "shift",
    "label_map",
    "colour_range",
    "rand_augment",
    "mixup",
    "cutmix",
    *EVALUATION,
)
_SCHEDULE = (
    "lr_policy",
    "power",
    "end_lr",
    "warmup_steps",
    "lr_boundaries",
    "lr_gamma",
    "base_lr",
    "plateau_factor",
    "plateau_patience",
    "plateau_min_delta",
    "plateau_cooldown",
    "plateau_min_lr",
)
_OPTIMIZER = (
    "optimizer",
    "momentum",
    "nesterov",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
_REPLACED = {"optimizer": _OPTIMIZER, "schedule": _SCHEDULE}
_REQUIRED = (
    "sources",
    "training_example",
    "evaluation_example",
    "build_model",
    "loss",
    "sums",
    "metrics",
)

# A dict with "inputs" (what the model is called with) and "targets" (what the loss compares to);
# each a tensor, or tensors in dicts and tuples (of a list, tf.data makes one tensor). In training
# shapes must be fixed, apart from the batch's.
Example = dict[str, Any]


class Task(Protocol):
    """Made once a process, with the run's settings: `Task(config)`.

    A setting that was chosen, that only tasks read and that this one does not is refused.

    `hvdkit predict`, `export`, `serve` and `hvdkit.load` call neither `prepare` nor `sources`: the
    data may be elsewhere. What the model, `predict`, `picture_inputs` or `decode` need of the data,
    such as a mean, belongs into a variable or a layer, which checkpoints hold: examples/tabular. A
    vocabulary, which gives layers their sizes, must be there: in the project, or read from the data
    again, as that example does.
    """

    # The metric by which the best checkpoint is chosen: "loss", or a key of `metrics`.
    main_metric: str

    # Whether its highest value is the best, "max", or its lowest, "min". Optional, "max", unless
    # the metric's name is that of an error (hvdkit/scores.py).
    main_metric_mode: str

    # Whether `training_example` finds another sample of the training set, drawn by the key, as
    # sample["partner"], to mix with (hvdkit/data/augment/mixing.py). Optional.
    mixes: bool

    def prepare(self) -> None:
        """Runs once on every host before the data is opened: make or unpack it. Optional.

        Raises ValueError or OSError with a message for a person, as `sources` does.
        """

    def sources(self) -> tuple[Source, Source]:
        """Training and validation samples.

        Readers list files on rank 0 only. On other ranks this may therefore be called twice: it
        ends at the first listing, and starts again when rank 0's has arrived.
        """

    def training_example(self, sample: dict[str, tf.Tensor], key: tf.Tensor) -> Example:
        """One augmented example from what the source read. TensorFlow ops only.

        For pictures, hvdkit.data.augment takes the sample and returns uint8, a quarter of float32's
        bytes; the model's first layer scales them (hvdkit/train/layers/preprocessing.py).

        `if` and `for` do not take tensors here, nor in `loss` and `sums`: use tf.where, tf.cond
        or @tf.function on the function that needs it (it costs seconds at start-up).

        Args:
          key: int32 [2]; use it, and nothing else, for every random draw (tf.random.stateless_*),
            so that the example does not depend on which rank reads it. Two draws by one key are the
            same numbers: split it (tf.random.split(key, 2)).
        """

    def evaluation_example(self, sample: dict[str, tf.Tensor]) -> Example:
        """One example without random changes. TensorFlow ops only.

        Examples without fixed shapes (pictures at their own size) are evaluated one by one.
        """

    def augmentation(self) -> dict[str, Any]:
        """What `training_example` does to a sample, as JSON, for the data card. Optional."""

    def build_model(self) -> keras.Model:
        """The model, with its variables made; it is called as model(inputs, training=...)."""

    def predict(self, model: keras.Model, inputs: Any) -> Any:
        """Outputs outside of training, by default model(inputs, training=False). Optional."""

    def picture_inputs(self, image: tf.Tensor) -> Any:
        """The "inputs" of `evaluation_example` for a picture, uint8 [H, W, 3]. Optional.

        With it `hvdkit predict`, `export` and `serve` take pictures, without it `predict` and
        `export` the model's own inputs by name; TensorFlow ops only.
        """

    def decode(self, outputs: Any) -> dict[str, tf.Tensor]:
        """What outputs mean, for `hvdkit predict` and `export`: names -> tensors [batch, ...].

        Optional where the loss is softmax cross-entropy of all outputs, and where there are no
        pictures: else predictions are the model's outputs as they are. hvdkit.train.outputs has
        softmax, one_logit and sigmoid. "classes" [batch] with "probabilities" [batch, classes] are
        listed by probability, "classes" [batch, height, width] drawn; anything else (labels,
        numbers, boxes, text) is written by name. TensorFlow ops only.
        """

    def loss(self, outputs: Any, targets: Any) -> Any:
        """Losses and weights, float tensors of one shape [batch, ...].

        A loss for each example (or pixel, or word), not their mean: the run's loss is
        sum(losses * weights) / sum(weights) over the global batch of all ranks. Weight 0 leaves a
        position out (an ignored pixel, padding). Weights do not depend on the outputs, unless
        through tf.stop_gradient.

        Several terms: a dict of name: (losses, weights) or (losses, weights, factor), a number of
        Python. Each is divided by the sum of its own weights and multiplied by its factor; their
        sum is the run's loss, and each is logged as loss/NAME. One without weight counts 0.
        """

    def sums(self, outputs: Any, targets: Any) -> dict[str, tf.Tensor]:
        """Metric counts of one evaluation batch, added over batches and ranks; of fixed shapes.

        Any names but "loss" and "weight" (of terms "loss/NAME" and "weight/NAME"), the loss's sums.
        What does not add up, as a mean or a number of batches, is refused before the first step.
        """

    def per_sample(self, outputs: Any, targets: Any) -> dict[str, tf.Tensor]:
        """What figures over all predictions need (exact AUC): tensors [batch, ...]. Optional.

        `metrics` finds them beside the sums, [samples, ...], each sample once, in their order, on
        any number of ranks. Every rank holds all of them, 1 GiB at most.
        """

    def metrics(self, sums: dict[str, np.ndarray]) -> dict[str, float]:
        """Figures from the added sums; logged as eval_NAME. The run adds `loss`.

        It is tried with one sample before the first step; hvdkit.evaluate.metrics has KerasMetrics.
        """

    def notes(self, sums: dict[str, np.ndarray]) -> list[str]:
        """Sentences to print with the figures, each once. Optional."""

    def draw(self, inputs: Any, targets: Any, outputs: Any) -> np.ndarray:
        """Pictures to look at, uint8 [n, height, width, 3], from an evaluation batch. Optional.

        Examples that are evaluated one by one are drawn so; their pictures must be of one size.
        """

    def actions(self, run: Any) -> list[Any]:
        """More to do after a step, in this order, before it is saved and evaluated. Optional.

        Each is an Action (hvdkit/run/actions.py): `due(step)` says when, by its argument alone, as
        it may be asked before the step; `settles = True` says that it reads weights, and
        action(step, result) does it. `run` holds model, world, config. What an action changes is in
        the checkpoint of its step; one that raises ends the run, and the step is not saved. Every
        rank calls them; check `run.world.is_chief` before writing a file.
        examples/byol has one.
        """

    def schedule(self, config: Settings) -> Callable[[tf.Tensor], tf.Tensor]:
        """Step (int64 scalar) -> learning rate (scalar), in place of --lr_policy. Optional.

        Of TensorFlow ops; --lr_scaling multiplies it. A resume names steps at which it changed.
        """

    def optimizer(self, model: keras.Model) -> keras.optimizers.Optimizer | list[Group]:
        """An update rule of Keras in place of --optimizer, or groups (groups.Group). Optional.

        A new one at each call; not ScheduleFreeAdamW. The run calls its `apply`.
        The schedule sets its learning rate at each step; --weight_decay joins the gradient as L2;
        --ema_decay, or its own `use_ema`, averages its weights. A resume names what changed in it.
        """


def load_task(config: Settings) -> Task:
    """The task that --task names; ValueError where its class lacks something."""
    names = available()
    if config.task not in names:
        raise ValueError(
            f"--task={config.task}: there is no such task; the tasks are {names}"
        )
    absl_flags.resolve(config)
    task_class = importlib.import_module(f"tasks.{config.task}").Task
    watched = config.watched()
    task = task_class(watched)
    task._watched = watched
    missing = [name for name in _REQUIRED if not optional(task, name)]
    if missing:
        raise ValueError(
            f"tasks/{config.task}.py: class Task has no {', '.join(missing)}: "
            "hvdkit/train/task/protocol.py says what to return"
        )
    if not isinstance(getattr(task, "main_metric", None), str):
        raise ValueError(
            f"tasks/{config.task}.py: class Task has no main_metric: the name of one of the "
            "figures of `metrics`"
        )
    try:
        scores.of_task(task)
    except ValueError as error:
        raise ValueError(f"tasks/{config.task}.py: {error}") from None
    return task


def settings_of(task: Task, config: Settings) -> Settings:
    """The run's settings, where what the task reads of them is noted."""
    return getattr(task, "_watched", config)


def counted(
    task: Task, config: Settings, samples: int, *, place: Place = BEGINNING
) -> Settings:
    """The settings with steps in place of epochs, also those that the task holds.

    `samples`: of the training set; `place`: where the run goes on in them. Raises ValueError where
    the task has read a number of steps that was not known yet.
    """
    watched = settings_of(task, config)
    counted_settings = config.for_samples(samples, step=place.step, used=place.samples)
    for name, value in vars(counted_settings).items():
        if value is not vars(config)[name]:
            if name in getattr(watched, "_reads", ()):
                raise ValueError(
                    f"tasks/{config.task}.py reads config.{name} before its data are counted: read "
                    f"it in build_model or later, or give --{name} in steps"
                )
            object.__setattr__(watched, name, value)
    absl_flags.resolve(counted_settings)
    return counted_settings


def check_read(task: Task, config: Settings, among: Sequence[str] = ()) -> list[str]:
    """Raises ValueError for a setting that was chosen, and that the task alone reads but did not.

    Call it once all functions of the task were called or traced; or `among` the settings of those
    that were. Returns a note for each file with which such settings came (`came_with_file`).
    """
    reads = getattr(settings_of(task, config), "_reads", None)
    if reads is None:
        return []
    flags_of_file: dict[str, list[str]] = {}
    for reader, names in _readers(task, config, among).items():
        for name in names:
            if name in reads or not _has_effect(config, name):
                continue
            value = config.not_defaults()[name]
            if name not in config.came_with_file:
                raise ValueError(
                    f"--{name}={value}: {reader} does not read it: leave it out, also of the "
                    f"flagfile, or use config.{name} in tasks/{config.task}.py"
                )
            file = config.came_with_file[name]
            flags_of_file.setdefault(file, []).append(f"--{name}={value}")
    notes = []
    for file, flags in flags_of_file.items():
        passed_over = ", ".join(flags)
        notes.append(
            f"--task={config.task} does not read all of {file}; passed over: {passed_over}"
        )
    return notes


def _readers(
    task: Task, config: Settings, among: Sequence[str]
) -> dict[str, Sequence[str]]:
    """By a reader, in words, the settings that it alone reads; or `among` those of the task."""
    readers = {f"--task={config.task}": among or _OF_TASKS}
    if among:
        return readers
    for function, names in _REPLACED.items():
        if optional(task, function) and not (config.find_lr and function == "schedule"):
            readers[f"the {function} of --task={config.task}"] = names
    return readers


def _has_effect(config: Settings, name: str) -> bool:
    """Whether the setting is not its default, and no other setting takes its effect away."""
    return name in config.not_defaults() and name not in config.without_effect()


def optional(task: Task, name: str) -> Callable | None:
    """One of the task's functions; None where it leaves it out: the protocol's are empty."""
    inherited = getattr(type(task), name, None) is vars(Task)[name]
    return None if inherited else getattr(task, name, None)


def available() -> list[str]:
    """Names of all tasks: files in tasks/ with a `class Task`."""
    names = []
    for file in (project.folder() / "tasks").glob("*.py"):
        if file.is_file() and re.search(
            rb"^class Task\b", file.read_bytes(), re.MULTILINE
        ):
            names.append(file.stem)
    return sorted(names)
