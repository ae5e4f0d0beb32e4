"""Run on real ranks by test_small_runs.py: scores of whole pictures against plain NumPy."""

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
CLASSES, CROP, STRIDE = 3, 16, 2
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
            for kind, pixels in (("images", image[: size[0], : size[1]]), ("labels", label)):
                Image.fromarray(pixels.astype(np.uint8)).save(root / kind / f"{number}.png")
        for split in ("train", "val"):
            (root / "splits" / f"{split}.txt").write_text("\n".join(map(str, range(len(SIZES)))))
    world.gather_objects(None, "whole.data")
    config = dataclasses.replace(
        Settings(), model="tiny", data_dir=str(root), num_classes=CLASSES, image_size=CROP
    )
    world_lib.set_up(world, config)
    run = run_lib.prepare(run_lib.make_task(config, world), config, world)
    rng = np.random.default_rng(6)
    for variable in run.model.trainable_variables:  # bolder than they are made
        fan_in = np.prod(variable.shape[:-1]) or 1
        variable.assign(rng.normal(size=variable.shape) * (3 / fan_in) ** 0.5)
    return run


@functools.cache
def evaluator(world, name: str) -> Evaluator:
    """Of WAYS; it is traced once for all checks. Virtual ranks: floats are added up exactly."""
    run = small_run(world)
    config = dataclasses.replace(run.config, virtual_ranks=2, **WAYS[name])
    run = dataclasses.replace(run, config=config, task=Task(config))
    made = Evaluator(run, feed(run, world.rank, world.size, 3))
    made.run_of_it = run
    return made


def feed(run: RunContext, rank: int, size: int, batch: int) -> EvaluationFeed:
    made = reader(run.val_source, run.task.evaluation_example, keyed=False)
    return EvaluationFeed(made, batch, rank=rank, size=size)


def by_hand(run: RunContext) -> tuple[float, float]:
    """mIoU and mean loss, in plain NumPy but for the model itself."""
    config, labels, found, losses = run.config, [], [], []
    scales, flip = config.eval_scale_list, config.eval_flip
    ways = {"window": config.eval_window, "scales": scales, "flip": flip}

    def model(image: np.ndarray) -> np.ndarray:
        return run.model({"image": image[None].astype(np.float32)}, training=False).numpy()[0]

    for number in range(len(SIZES)):
        folder = run.task.root
        image = np.asarray(Image.open(folder / "images" / f"{number}.png"))
        label = np.asarray(Image.open(folder / "labels" / f"{number}.png"))
        if config.eval_crop:
            image, label = centre(image, 128), centre(label, 255)
        shares = probabilities(model, image, **ways)
        labels, found = [*labels, label], [*found, shares.argmax(-1)]
        of_label = np.take_along_axis(shares, np.minimum(label, CLASSES - 1)[..., None], -1)
        losses.extend(-np.log(of_label[..., 0][label != 255]))
    return miou(labels, found), float(np.mean(losses))


def centre(pixels: np.ndarray, fill: float) -> np.ndarray:
    """The middle CROP x CROP, with `fill` where there is no picture."""
    beside = [(CROP, CROP), (CROP, CROP), (0, 0)][: pixels.ndim]
    top, left = (CROP + (side - CROP) // 2 for side in pixels.shape[:2])
    wide = np.pad(pixels, beside, constant_values=fill)
    return wide[top : top + CROP, left : left + CROP]


def check_scores_are_those_of_plain_numpy(world):
    # All of them first: a rank that fails must not leave the others alone in the next.
    found = {name: evaluator(world, name).run(lambda: False).figures for name in WAYS}
    if not world.is_chief:
        return
    values = set()
    for name, figures in found.items():
        miou, loss = by_hand(evaluator(world, name).run_of_it)
        assert figures["miou"] == miou, (name, figures["miou"], miou)
        np.testing.assert_allclose(figures["loss"], loss, rtol=2e-5, err_msg=name)
        values.add(miou)
    assert len(values) == len(WAYS)


def check_scores_are_the_same_to_the_last_digit_on_any_number_of_ranks(world):
    different = []
    for name in ("whole", "all"):
        made = evaluator(world, name)
        shared, usual = made.run(lambda: False).figures, made._feed
        # Each rank all pictures, in other batches: on 2 ranks, all sums are twice as large.
        made._feed = feed(made.run_of_it, 0, 1, batch=1)
        alone, made._feed = made.run(lambda: False).figures, usual
        different += [] if shared == alone else [(name, shared, alone)]
    assert not different


def check_pictures_of_all_sizes_are_traced_once_and_drawn_on_one_sheet(world):
    made = evaluator(world, "whole")
    made.try_out()
    found = made.run(lambda: False)
    assert made._step.experimental_get_tracing_count() == 1
    if world.is_chief:
        assert found.pictures.shape == (4, 256, 3 * 256, 3)


def slow_check_a_picture_too_large_for_memory_is_told_on_all_ranks(world):
    made = evaluator(world, "whole")
    step, last = made._step, world.rank == world.size - 1

    def full(batch):
        if last and batch["inputs"]["image"].shape[1] == 17:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM")
        return step(batch)

    full.get_concrete_function = step.get_concrete_function
    with mock.patch.object(made, "_step", full):
        stop = differ(lambda: made.run(lambda: False), "--eval_window", "[1, 17, 23, 3]")
    assert stop.code == WRONG_USE


def probabilities(
    model: Model, image: np.ndarray, *, window: int, scales: Sequence[float], flip: bool
) -> np.ndarray:
    """float64 [H, W, classes] of an image [H, W, 3] in [0, 255]."""
    height, width = image.shape[:2]
    found = []
    for scale in scales:
        for turned in (False, True) if flip else (False,):
            seen = image[:, ::-1] if turned else image
            seen = resized(seen, max(round(height * scale), 1), max(round(width * scale), 1))
            part = resized(in_windows(model, seen, window), height, width)
            found.append(part[:, ::-1] if turned else part)
    return np.mean(found, axis=0)


def in_windows(model: Model, image: np.ndarray, window: int) -> np.ndarray:
    height, width = image.shape[:2]
    side = window or max(height, width)
    total, count = 0.0, np.zeros((height, width, 1))
    for top in starts(height, side):
        for left in starts(width, side):
            place = np.s_[top : top + side, left : left + side]
            found = softmax(padded(model, image[place]).astype(np.float64), axis=-1)
            total = np.zeros((height, width, found.shape[-1])) + total
            total[place] += found
            count[place] += 1
    return total / count


def starts(length: int, side: int) -> list[int]:
    """Two thirds of a window apart, the last one as far as there is room."""
    found = [0]
    while found[-1] + side < length:
        found.append(min(found[-1] + 2 * side // 3, length - side))
    return found


def padded(model: Model, image: np.ndarray) -> np.ndarray:
    height, width = image.shape[:2]
    beside = [(0, -height % STRIDE), (0, -width % STRIDE), (0, 0)]
    return model(np.pad(image, beside, constant_values=128))[:height, :width]


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear, pixel centres at one half."""
    factors = height / image.shape[0], width / image.shape[1], 1
    how = {"order": 1, "mode": "nearest", "grid_mode": True}
    return ndimage.zoom(np.asarray(image, np.float64), factors, **how)


def miou(labels: list[np.ndarray], predictions: list[np.ndarray]) -> float:
    """Mean over the classes that occur in labels or predictions; 255 is not counted."""
    label, found = (np.concatenate([np.ravel(a) for a in many]) for many in (labels, predictions))
    return float(jaccard_score(label[label != 255], found[label != 255], average="macro"))
