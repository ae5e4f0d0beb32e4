"""What settings mean together: what contradicts itself, and what a person may not expect."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdkit.settings.config import Config

_LARGEST_SCALE = 8  # of an evaluation: 64 times the pixels


def implied(config: Config) -> Config:
    """The settings with those that --virtual_ranks cannot do without."""
    if not config.virtual_ranks:
        return config
    # Kernels on CPUs split their sums by threads.
    threads = config.cpu_threads or 1
    return dataclasses.replace(config, deterministic=True, cpu_threads=threads)


def check(config: Config) -> None:
    """Raises ValueError for settings that contradict each other."""
    parts = (_check_virtual, _check_batch, _check_reduction, _check_schedule)
    for part in (*parts, _check_start):
        part(config)
    if config.jit and config.bn_sync == "full":
        raise ValueError(
            "--jit compiles the computation of one rank, and --bn_sync=full communicates between "
            "ranks inside it: use another --bn_sync or leave out --jit"
        )
    alone = [name for name in ("dry_run", "find_lr", "benchmark") if getattr(config, name)]
    if len(alone) > 1:
        raise ValueError(f"--{alone[0]} and --{alone[1]} are two kinds of runs: choose one")
    class_weights(config)
    _check_evaluation(config)
    scale_range(config)
    tracker_names(config)


def check_ranks(config: Config, size: int) -> None:
    """Raises ValueError for settings that cannot work on `size` ranks."""
    _check_warmup(config, size)
    virtual = config.virtual_ranks
    if not virtual:
        return
    if size > virtual:
        raise ValueError(
            f"--virtual_ranks={virtual} cannot be dealt to {size} ranks: start at most {virtual}, "
            f"or begin another run with --virtual_ranks={size} or more"
        )
    if config.bn_sync == "full" and size != virtual:
        raise ValueError(
            f"--bn_sync=full needs all of --virtual_ranks={virtual} at once, and {size} rank(s) "
            f"compute them one after the other: start {virtual} ranks or use --bn_sync=mean"
        )


def tracker_names(config: Config) -> list[str]:
    """Of --trackers, in order. Raises ValueError for one that cannot be a name."""
    names = [name.strip() for name in config.trackers.split(",") if name.strip()]
    for name in names:
        if name != "tensorboard" and not re.fullmatch(r"[\w.]+:\w+", name):
            raise ValueError(f"--trackers={name} is neither tensorboard nor MODULE:CLASS of yours")
    return names


def _check_virtual(config: Config) -> None:
    if not config.virtual_ranks:
        return
    flag = f"--virtual_ranks={config.virtual_ranks}"
    own_messages = ("compression", "pack_bytes", "gradient_groups")
    for name in own_messages:
        if getattr(config, name) not in ("none", 0, False):
            raise ValueError(
                f"{flag} sums gradients as integers, in messages of its own: leave out --{name}"
            )
    for name in ("batch_per_rank", "lr_scaling"):
        if getattr(config, name) not in ("none", 0):
            raise ValueError(
                f"{flag} makes the same run on any number of ranks, but --{name} makes it depend "
                "on their number: leave it out"
            )
    if config.bn_sync not in ("mean", "full"):
        raise ValueError(
            f"{flag} takes the mean of moving statistics at every step: use --bn_sync=mean instead "
            f"of {config.bn_sync}"
        )
    micro = config.global_batch_size // config.accumulation_steps
    if micro < config.virtual_ranks:
        raise ValueError(
            f"{flag}: every virtual rank needs a sample, and a micro-batch (--global_batch_size / "
            f"--accumulation_steps) has {micro}: make it larger or give fewer virtual ranks"
        )


def _check_batch(config: Config) -> None:
    name = "batch_per_rank" if config.batch_per_rank else "global_batch_size"
    if getattr(config, name) % config.accumulation_steps:
        raise ValueError(
            f"--{name}={getattr(config, name)} is not a multiple of "
            f"--accumulation_steps={config.accumulation_steps}: micro-batches must be of one size"
        )


def _check_reduction(config: Config) -> None:
    if config.compression == "bf16" and (config.pack_bytes or config.gradient_groups):
        raise ValueError("--compression=bf16 packs gradients by itself: leave out grouping")
    if config.pack_bytes and config.gradient_groups:
        raise ValueError("--pack_bytes and --gradient_groups are two ways to group: choose one")
    if config.deterministic and (config.pack_bytes or config.gradient_groups > 1):
        raise ValueError(
            "--deterministic reduces all gradients as one group: leave out --pack_bytes and "
            "--gradient_groups"
        )


def _check_schedule(config: Config) -> None:
    if config.lr_policy in ("poly", "cosine") and config.end_lr > config.base_lr:
        raise ValueError(f"--end_lr={config.end_lr} is greater than --base_lr={config.base_lr}")
    if config.lr_scaling == "none":
        _check_warmup(config, 1)
    if config.early_stop_evals and not config.eval_every:
        raise ValueError(
            f"--early_stop_evals={config.early_stop_evals} counts evaluations, and --eval_every=0 "
            "makes none: set --eval_every"
        )
    if config.lr_policy == "step":
        boundaries(config)


def _check_warmup(config: Config, size: int) -> None:
    peak = config.base_lr * scale_factor(config, size)
    if config.warmup_from > peak:
        scaled = f", which is {peak:g} on {size} rank(s)" if config.lr_scaling != "none" else ""
        raise ValueError(
            f"--warmup_from={config.warmup_from} is greater than --base_lr={config.base_lr}"
            f"{scaled}: warm-up must rise"
        )


def scale_factor(config: Config, size: int) -> float:
    """What base_lr is multiplied by on `size` ranks.

    linear: Goyal et al. 2017 (arXiv:1706.02677); sqrt: Krizhevsky 2014 (arXiv:1404.5997). Both
    are for a batch that grows with the number of ranks; with a fixed global batch use none.
    """
    return {"none": 1.0, "linear": float(size), "sqrt": math.sqrt(size)}[config.lr_scaling]


def _check_start(config: Config) -> None:
    for name in ("init_ema", "init_skip_mismatched"):
        if getattr(config, name) and not config.init_from:
            raise ValueError(f"--{name} says what to take from --init_from: name one")
    if bool(config.backbone_weights) != bool(config.backbone_preprocessing):
        raise ValueError(
            f"--backbone_weights={config.backbone_weights} and --backbone_preprocessing="
            f"{config.backbone_preprocessing} (what these weights were trained on) need each other"
        )
    if config.backbone_weights and config.init_from:
        raise ValueError(
            "--init_from and --backbone_weights are two starts of a new run: leave one out"
        )
    for name in ("train_split", "val_split"):
        if not getattr(config, name):
            raise ValueError(f"--{name}= is empty: name a split of --data_dir")
    if not config.run_dir:
        raise ValueError("--run_dir= is empty: name a folder")
    if not config.resume:
        raise ValueError("--resume= is empty: write auto, never or a path")


def class_weights(config: Config) -> list[float]:
    """Each class's weight in the loss; an empty list where all count alike."""
    if not config.class_weights:
        return []
    try:
        weights = [float(part) for part in config.class_weights.split(",")]
    except ValueError:
        weights = [math.nan]
    if not all(0 <= w < math.inf for w in weights) or not any(weights):
        raise ValueError(
            f"--class_weights={config.class_weights!r} must be numbers from 0 up, not all 0, with "
            "commas between them: 1,2.5,1"
        )
    if len(weights) != config.num_classes:
        raise ValueError(
            f"--class_weights={config.class_weights!r} has {len(weights)} weights for "
            f"--num_classes={config.num_classes}"
        )
    return weights


def _check_evaluation(config: Config) -> None:
    eval_scales(config)
    if config.eval_crop and config.eval_window:
        raise ValueError(
            f"--eval_crop={config.eval_crop} scores the centre of a picture, "
            f"--eval_window={config.eval_window} all of it in parts: choose one"
        )


def eval_scales(config: Config) -> list[float]:
    """Factors on a picture's size at which it is evaluated."""
    try:
        scales = [float(part) for part in config.eval_scales.split(",")]
    except ValueError:
        scales = [math.nan]
    if not all(0 < s <= _LARGEST_SCALE for s in scales) or len(set(scales)) != len(scales):
        raise ValueError(
            f"--eval_scales={config.eval_scales!r} must be different numbers above 0, "
            f"{_LARGEST_SCALE} at most, with commas between them: 0.5,1,1.5"
        )
    return scales


def scale_range(config: Config) -> tuple[float, float] | None:
    """Least and largest factor of a random scale; None where the task chooses."""
    if not config.scale_range:
        return None
    try:
        low, high = (float(part) for part in config.scale_range.split(","))
    except ValueError:
        low, high = math.nan, math.nan
    # A factor of 0.1 reads a window of 100 times the crop's pixels.
    if not 0.1 <= low <= high <= 10:
        raise ValueError(
            f"--scale_range={config.scale_range!r} must be two numbers from 0.1 to 10, the lower "
            "one first, with a comma between them: 0.5,2"
        )
    return low, high


def boundaries(config: Config) -> list[int]:
    """Steps at which the step policy lowers the rate, from fractions of num_steps."""
    try:
        fractions = [float(part) for part in config.lr_boundaries.split(",")]
    except ValueError:
        fractions = [math.nan]
    if not all(0 < f < 1 for f in fractions) or fractions != sorted(set(fractions)):
        raise ValueError(
            f"--lr_boundaries={config.lr_boundaries!r} must be rising fractions between 0 and 1, "
            "with commas between them: 0.5,0.75"
        )
    return [round(f * config.num_steps) for f in fractions]


def notes(config: Config) -> list[str]:
    """What a person may not expect of these settings, a sentence each; most runs have none."""
    found = []
    if config.warmup_steps > config.num_steps:
        found.append(
            f"--warmup_steps={config.warmup_steps} is more than --num_steps={config.num_steps}: "
            "the learning rate does not reach --base_lr"
        )
    if config.virtual_ranks:
        found.append(
            f"--virtual_ranks={config.virtual_ranks} runs with --deterministic and "
            f"--cpu_threads={config.cpu_threads}"
        )
    if config.train_split == config.val_split and not config.synthetic_data:
        found.append(
            f"--train_split and --val_split are both {config.train_split}: the score is measured "
            "on the training data"
        )
    # What leaves a setting without effect.
    unused = {
        "momentum": config.optimizer != "sgd" and f"--optimizer={config.optimizer}",
        "power": config.lr_policy != "poly" and f"--lr_policy={config.lr_policy}",
        "end_lr": config.lr_policy not in ("poly", "cosine") and f"--lr_policy={config.lr_policy}",
        "lr_boundaries": config.lr_policy != "step" and f"--lr_policy={config.lr_policy}",
        "lr_gamma": config.lr_policy != "step" and f"--lr_policy={config.lr_policy}",
        "train_split": config.synthetic_data and "--synthetic_data",
        "val_split": config.synthetic_data and "--synthetic_data",
        "warmup_from": not config.warmup_steps and "--warmup_steps=0",
        "pack_count": not config.pack_bytes and "--pack_bytes=0",
        "bn_sync_every": (
            (config.deterministic and "--deterministic")
            or (config.bn_sync in ("full", "none") and f"--bn_sync={config.bn_sync}")
        ),
        "init_from": config.resume not in ("auto", "never") and f"--resume={config.resume}",
        "backbone_weights": config.resume not in ("auto", "never") and f"--resume={config.resume}",
    }
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    ignored = [
        f"--{name}={getattr(config, name)} ({why})"
        for name, why in unused.items()
        if why and getattr(config, name) != defaults[name]
    ]
    if ignored:
        found.append(f"without effect here: {', '.join(ignored)}")
    return found
