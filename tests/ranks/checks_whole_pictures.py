"""Holds hvdkit.evaluate.whole_pictures on real ranks: scores of whole pictures, by plain NumPy."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import tensorflow as tf
from PIL import Image
from refusals import differ
from scipy import ndimage
from scipy.special import softmax
from sklearn.metrics import jaccard_score
from small_runs import folder

from hvdkit.data.pipeline import EvaluationFeed, reader
from hvdkit.evaluate.evaluator import Evaluator
from hvdkit.ranks import world as world_lib
from hvdkit.run import context as run_lib
from hvdkit.run.context import RunContext
from hvdkit.settings import Settings
from hvdkit.stop import WRONG_USE
from tasks.segmentation import Task

Model = Callable[[np.ndarray], np.ndarray]  # [H, W, 3] -> logits [H, W, classes]
CLASSES = 3
CROP = 16
STRIDE = 2
# Smaller than the crop, odd, wide and high, larger than the window, a row of pixels; then again.
SIZES = [(7, 12), (17, 23), (16, 40), (41, 18), (50, 66), (1, 9), (17, 23)]
WAYS = {
    "whole": {},
    "all": {"eval_window": 24, "eval_scales": "0.7,1.5", "eval_flip": True},
    "crop": {"eval_crop": CROP},
}


@functools.cache
def small_run(world) -> RunContext:
    root = folder(world) / "data"
    if world.is_chief:
        rng = np.random.default_rng(5)
        for name in ("images", "labels", "splits"):
            (root / name).mkdir(parents=True)
        for number, size in enumerate(SIZES):
            # Blocks, so that a scaled or a shifted picture gives other classes.
            image = np.kron(rng.integers(256, size=(10, 12, 3)), np.ones((6, 6, 1)))
            label = rng.choice([0, 1, 2, 255], size=size, p=[0.4, 0.3, 0.2, 0.1])
            for kind, pixels in (
                ("images", image[: size[0], : size[1]]),
                ("labels", label),
            ):
                Image.fromarray(pixels.astype(np.uint8)).save(
                    root / kind / f"{number}.png"
                )
        names = "\n".join(str(number) for number in range(len(SIZES)))
        for split in ("train", "val"):
            (root / "splits" / f"{split}.txt").write_text(names)
    world.gather_objects(None, "whole.data")
    config = dataclasses.replace(
        Settings(),
        model="tiny",
        data_dir=str(root),
        num_classes=CLASSES,
        image_size=CROP,
    )
    world_lib.set_up(world, config)
    run = run_lib.prepare(run_lib.make_task(config, world), config, world)
    rng = np.random.default_rng(6)
    for variable in run.model.trainable_variables:  # larger than a run's first weights
        fan_in = np.prod(variable.shape[:-1]) or 1
        variable.assign(rng.normal(size=variable.shape) * (3 / fan_in) ** 0.5)
    return run


@functools.cache
def evaluator(world, name: str) -> Evaluator:
    """One of WAYS; it is traced once for all checks. Virtual ranks: floats are added up exactly."""
    run = small_run(world)
    config = dataclasses.replace(run.config, virtual_ranks=2, **WAYS[name])
    run = dataclasses.replace(run, config=config, task=Task(config))
    evaluator = Evaluator(run, feed(run, world.rank, world.size, 3))
    evaluator.run_of_it = run
    return evaluator


def feed(run: RunContext, rank: int, size: int, batch: int) -> EvaluationFeed:
    val_reader = reader(run.val_source, run.task.evaluation_example, keyed=False)
    return EvaluationFeed(val_reader, batch, rank=rank, size=size)


def by_hand(run: RunContext) -> tuple[float, float]:
    """mIoU and mean loss, in plain NumPy but for the model itself."""
    config = run.config
    labels = []
    predictions = []
    losses = []

    def model(image: np.ndarray) -> np.ndarray:
        return run.model(
            {"image": image[None].astype(np.float32)}, training=False
        ).numpy()[0]

    for number in range(len(SIZES)):
        folder = run.task.root
        image = np.asarray(Image.open(folder / "images" / f"{number}.png"))
        label = np.asarray(Image.open(folder / "labels" / f"{number}.png"))
        if config.eval_crop:
            image = centre(image, 128)
            label = centre(label, 255)
        shares = probabilities(
            model,
            image,
            window=config.eval_window,
            scales=config.eval_scale_list,
            flip=config.eval_flip,
        )
        labels.append(label)
        predictions.append(shares.argmax(-1))
        of_label = np.take_along_axis(
            shares, np.minimum(label, CLASSES - 1)[..., None], -1
        )
        losses.extend(-np.log(of_label[..., 0][label != 255]))
    return miou(labels, predictions), float(np.mean(losses))


def centre(pixels: np.ndarray, fill: float) -> np.ndarray:
    """The middle CROP x CROP, with `fill` where there is no picture."""
    padding = [(CROP, CROP), (CROP, CROP), (0, 0)][: pixels.ndim]
    padded_pixels = np.pad(pixels, padding, constant_values=fill)
    top = CROP + (pixels.shape[0] - CROP) // 2
    left = CROP + (pixels.shape[1] - CROP) // 2
    return padded_pixels[top : top + CROP, left : left + CROP]


def check_scores_are_those_of_plain_numpy(world):
    # All of them first: a rank that fails must not leave the others alone in the next.
    figures_of = {
        name: evaluator(world, name).run(lambda: False).figures for name in WAYS
    }
    if not world.is_chief:
        return
    values = set()
    for name, figures in figures_of.items():
        miou, loss = by_hand(evaluator(world, name).run_of_it)
        assert figures["miou"] == miou, (name, figures["miou"], miou)
        np.testing.assert_allclose(figures["loss"], loss, rtol=2e-5, err_msg=name)
        values.add(miou)
    assert len(values) == len(WAYS)


def check_scores_are_the_same_to_the_last_digit_on_any_number_of_ranks(world):
    different = []
    for name in ("whole", "all"):
        shares = evaluator(world, name)
        shared = shares.run(lambda: False).figures
        # Each rank reads all pictures, in other batches: on 2 ranks all sums are twice as large.
        everything = feed(shares.run_of_it, 0, 1, batch=1)
        with mock.patch.object(shares, "_feed", everything):
            alone = shares.run(lambda: False).figures
        if shared != alone:
            different.append((name, shared, alone))
    assert not different


def check_pictures_of_all_sizes_are_traced_once_and_drawn_on_one_sheet(world):
    whole = evaluator(world, "whole")
    whole.try_out()
    evaluation = whole.run(lambda: False)
    assert whole._step.experimental_get_tracing_count() == 1
    if world.is_chief:
        assert evaluation.pictures.shape == (4, 256, 3 * 256, 3)


def slow_check_a_picture_too_large_for_memory_is_told_on_all_ranks(world):
    whole = evaluator(world, "whole")
    step = whole._step
    is_last = world.rank == world.size - 1

    def full(batch):
        if is_last and batch["inputs"]["image"].shape[1] == 17:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM")
        return step(batch)

    full.get_concrete_function = step.get_concrete_function
    with mock.patch.object(whole, "_step", full):
        stop = differ(
            lambda: whole.run(lambda: False), "--eval_window", "[1, 17, 23, 3]"
        )
    assert stop.code == WRONG_USE


def probabilities(
    model: Model, image: np.ndarray, *, window: int, scales: Sequence[float], flip: bool
) -> np.ndarray:
    """float64 [H, W, classes] of an image [H, W, 3] in [0, 255]."""
    height, width = image.shape[:2]

    def at(scale: float, image: np.ndarray) -> np.ndarray:
        image = resized(
            image, max(round(height * scale), 1), max(round(width * scale), 1)
        )
        return resized(in_windows(model, image, window), height, width)

    views = []
    for scale in scales:
        views.append(at(scale, image))
        if flip:
            views.append(at(scale, image[:, ::-1])[:, ::-1])
    return np.mean(views, axis=0)


def in_windows(model: Model, image: np.ndarray, window: int) -> np.ndarray:
    height, width = image.shape[:2]
    side = window or max(height, width)
    total = np.zeros((height, width, CLASSES))
    count = np.zeros((height, width, 1))
    for top in starts(height, side):
        for left in starts(width, side):
            place = np.s_[top : top + side, left : left + side]
            total[place] += softmax(
                padded(model, image[place]).astype(np.float64), axis=-1
            )
            count[place] += 1
    return total / count


def starts(length: int, side: int) -> list[int]:
    """Two thirds of a window apart, the last one as far as there is room."""
    places = [0]
    while places[-1] + side < length:
        places.append(min(places[-1] + 2 * side // 3, length - side))
    return places


def padded(model: Model, image: np.ndarray) -> np.ndarray:
    height, width = image.shape[:2]
    padding = [(0, -height % STRIDE), (0, -width % STRIDE), (0, 0)]
    return model(np.pad(image, padding, constant_values=128))[:height, :width]


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear; pixel centres are at one half."""
    return ndimage.zoom(
        np.asarray(image, np.float64),
        (height / image.shape[0], width / image.shape[1], 1),
        order=1,
        mode="nearest",
        grid_mode=True,
    )


def miou(labels: list[np.ndarray], predictions: list[np.ndarray]) -> float:
    """Mean over the classes that occur in labels or predictions; 255 is not counted."""
    label = np.concatenate([np.ravel(array) for array in labels])
    prediction = np.concatenate([np.ravel(array) for array in predictions])
    counts = label != 255
    return float(jaccard_score(label[counts], prediction[counts], average="macro"))
