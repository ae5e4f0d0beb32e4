"""Every setting of a run, in one frozen dataclass; the command-line flags are made from its fields.

A setting is added here once: its name, type, default, help and limits. `--flagfile=FILE` reads
flags from a file (one a line, `#` starts a comment), later flags win. Without one, they are read
from configs/default.cfg where there is such a file. The resolved settings are written to
RUN_DIR/config.cfg, which is itself such a file, so that a run can be run again.

Paths in flagfiles and defaults are relative to the project (this file's folder), whatever folder
the run is started in; paths on the command line are relative to the working folder.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdkit.settings import combinations, fields, flagfiles, project
from hvdkit.settings.combinations import (
    boundaries,
    class_weights,
    eval_scales,
    notes,
    scale_factor,
    scale_range,
    tracker_names,
)
from hvdkit.settings.fields import setting
from hvdkit.stop import launch_rank, refuse

__all__ = [
    "PROJECT",
    "Config",
    "boundaries",
    "class_weights",
    "eval_scales",
    "for_ranks",
    "from_command_line",
    "notes",
    "parse",
    "scale_factor",
    "scale_range",
    "tracker_names",
    "write",
]

PROJECT = project.folder()
FORMATS = ("", "folders", "voc", "cityscapes", "class_folders", "cifar10", "cifar100", "digits")
FORMATS += ("records",)


@dataclasses.dataclass(frozen=True)
class Config:
    task: str = setting(
        "segmentation",
        "name of a file in tasks/",
        heading="Task, model, data, results",
    )
    model: str = setting("", "one of the task's models; empty: the first")
    data_dir: str = setting("datasets/demo", "folder of the data set", path=True)
    data_format: str = setting("", "layout of data_dir; empty: the task's own", choices=FORMATS)
    train_split: str = setting("train", "split of data_dir to train on")
    val_split: str = setting("val", "split of data_dir to evaluate")
    run_dir: str = setting(
        "runs/default", "folder for checkpoints, metrics and the report", path=True
    )
    num_classes: int = setting(11, "number of classes, background included", low=2)
    image_size: int = setting(64, "height and width of a training crop, in pixels", low=8)
    mirror: str = setting(
        "auto",
        "mirror half of the training pictures, left-right; auto: on, except for digits and the "
        "demo (segmentation, classification)",
        choices=("auto", "on", "off"),
    )
    scale_range: str = setting(
        "",
        "smallest and largest random scale of a training picture; empty: 0.5,2, for the demo "
        "0.8,1.25 (segmentation)",
    )
    crop_area: float = setting(
        0.0,
        "smallest share of a picture's area in a random crop (long narrow pictures, where none "
        "fits: their centre); 0: 0.08, or below 64 pixels only a shift (classification)",
        low=0,
        below=1,
    )
    synthetic_data: bool = setting(False, "random samples instead of data_dir")
    benchmark: bool = setting(
        False,
        "measure the speed and where the time goes, without evaluation and checkpoints; writes "
        "benchmark.json",
    )

    dry_run: bool = setting(
        False, "show what the run would be, try two steps, an evaluation and a save, keep nothing"
    )

    find_lr: bool = setting(
        False,
        "raise the learning rate over at most 200 steps and suggest one; keep only a page, "
        "RUN_DIR-find_lr.html",
    )

    global_batch_size: int = setting(
        32, "samples a step, over all ranks", low=1, heading="Batch size and length"
    )
    batch_per_rank: int = setting(
        0, "samples a step on each rank, instead of global_batch_size; 0: not used", low=0
    )
    accumulation_steps: int = setting(1, "micro-batches in a step (gradient accumulation)", low=1)
    # Below 10**8: checkpoints are named by eight digits of the step.
    num_steps: int = setting(1000, "steps of the run (N of the schedule)", low=1, below=10**8)
    eval_batch_size: int = setting(
        16, "samples a batch in evaluation, on each rank; 1 where picture sizes may differ", low=1
    )

    base_lr: float = setting(
        0.01,
        "learning rate after warm-up",
        above=0,
        heading="Learning rate: base * (1 - step/N) ** power by default",
    )
    lr_policy: str = setting(
        "poly", "learning-rate schedule", choices=("poly", "cosine", "step", "constant")
    )
    power: float = setting(0.9, "power of the poly policy", low=0)
    end_lr: float = setting(0.0, "learning rate at the last step (poly, cosine)", low=0)
    warmup_steps: int = setting(0, "steps of linear warm-up", low=0)
    warmup_from: float = setting(0.0, "learning rate at the start of warm-up", low=0)
    lr_boundaries: str = setting("0.5,0.75", "step policy: fractions of num_steps, comma-separated")
    lr_gamma: float = setting(0.1, "step policy: factor at each boundary", above=0)
    lr_scaling: str = setting(
        "none",
        "multiply base_lr by the number of ranks or its root",
        choices=("none", "linear", "sqrt"),
    )

    optimizer: str = setting(
        "sgd", "update rule", choices=("sgd", "adam", "adamw", "lamb"), heading="Optimizer"
    )
    momentum: float = setting(0.9, "momentum of sgd", low=0, below=1)
    weight_decay: float = setting(
        0.0, "L2 of kernels (sgd, adam) or decoupled decay of kernels (adamw, lamb)", low=0
    )
    clip_norm: float = setting(0.0, "clip gradients to this global norm; 0: no clipping", low=0)
    ema_decay: float = setting(
        0.0,
        "keep a moving average of the weights (EMA) with this decay and evaluate it; 0: none",
        low=0,
        below=1,
    )

    label_smoothing: float = setting(
        0.0,
        "share of the target spread evenly over all classes",
        low=0,
        below=1,
        heading="Loss",
    )
    class_weights: str = setting(
        "", "weight of each class in the loss, comma-separated; empty: all 1"
    )

    eval_crop: int = setting(
        0,
        "score only a centre of this many pixels, in batches; 0: whole pictures at their own size",
        low=0,
        heading="Evaluation of segmentation",
    )
    eval_window: int = setting(
        0,
        "sliding windows of this many pixels, overlapping by a third, for larger pictures; 0: no "
        "windows",
        low=0,
    )
    eval_scales: str = setting("1", "average the probabilities at these scales, comma-separated")
    eval_flip: bool = setting(False, "also average the probabilities of the mirror image")

    precision: str = setting(
        "float32",
        "type of computation; weights are float32, or float64 with float64",
        choices=("float32", "float64", "bfloat16", "float16"),
        heading="Precision, compression, batch norm, dropout",
    )
    jit: bool = setting(
        False, "compile forward and backward pass with XLA; several times slower on CPUs"
    )
    compression: str = setting(
        "none", "send gradients in 16 bits", choices=("none", "fp16", "bf16")
    )
    bn_sync: str = setting(
        "mean",
        "batch norm across ranks: mean or moments combine the moving statistics, full normalizes "
        "with the global batch",
        choices=("mean", "moments", "full", "none"),
    )
    bn_sync_every: int = setting(
        0, "steps between syncs of the moving statistics; 0: only when they are read", low=0
    )
    dropout: float = setting(0.0, "dropout rate, if the model has dropout", low=0, below=1)

    reduce_backend: str = setting(
        "auto",
        "backend that the gradients must use",
        choices=("auto", "gloo", "mpi", "nccl"),
        heading="Sending gradients (docs/gradients.md: Horovod's own names)",
    )
    gradient_groups: int = setting(
        0, "merge gradients into this many messages; 0: Horovod fuses them by arrival", low=0
    )
    pack_bytes: int = setting(0, "pack gradients of up to this many bytes together; 0: off", low=0)
    pack_count: int = setting(16, "largest number of gradients in one pack", low=1)
    stall_shutdown_s: int = setting(
        1800, "end the run after waiting this many seconds for a rank that hangs; 0: never", low=0
    )

    seed: int = setting(
        1, "seed of weights, sample order and augmentation", low=0, heading="Repeatability"
    )
    deterministic: bool = setting(
        False, "bit-identical weights on the same number of ranks; slower"
    )
    virtual_ranks: int = setting(
        0, "split each step into this many shares: the same bits on 1 to this many ranks", low=0
    )
    device: str = setting(
        "auto",
        "auto: one GPU for each rank, or CPUs if the host has no GPU",
        choices=("auto", "gpu", "cpu"),
    )
    cpu_threads: int = setting(
        0, "CPU threads of a rank; 0: its share of the cores, 1 with --virtual_ranks", low=0
    )

    data_workers: int = setting(
        0, "threads that read and augment a rank's data; 0: its share of the cores", low=0
    )

    log_gradients: bool = setting(
        False,
        "log sum and norm of each layer's gradient to gradients.jsonl",
        heading="Logging, evaluation, checkpoints, resuming",
    )
    trackers: str = setting(
        "tensorboard",
        "where figures go besides metrics.jsonl, comma-separated: tensorboard, or MODULE:CLASS of "
        "your own (docs/trackers.md); empty: nowhere",
    )
    log_every: int = setting(20, "steps between log lines", low=1)
    eval_every: int = setting(200, "steps between evaluations; 0: only at the end", low=0)
    checkpoint_every: int = setting(200, "steps between checkpoints; 0: only at the end", low=0)
    checkpoint_minutes: float = setting(
        0.0, "also save when the newest checkpoint is older than this; 0: off", low=0
    )
    max_failed_saves: int = setting(3, "end after this many failed saves in a row", low=1)
    max_bad_steps: int = setting(
        3,
        "steps with NaN or infinity are skipped; after this many in a row, go back to a checkpoint "
        "and leave out the batches since; the second time end with exit code 3",
        low=1,
    )
    early_stop_evals: int = setting(
        0, "end after this many evaluations without a better score; 0: never", low=0
    )
    keep: int = setting(
        3, "number of newest checkpoints to keep, besides the best (by each measure)", low=1
    )
    drift_every: int = setting(
        1000, "steps between checks that all ranks hold the same weights; 0: at the end", low=0
    )
    drift: str = setting(
        "stop", "if weights differ: stop, or take those of rank 0", choices=("stop", "repair")
    )
    resume: str = setting(
        "auto",
        "auto: from the newest sound checkpoint of run_dir; never: start anew; or the path of a "
        "checkpoint or of a run's folder",
        path=True,
        words=("auto", "never"),
    )
    init_from: str = setting(
        "",
        "start a new run from these weights: a run's folder, a checkpoint's, or a .keras file",
        path=True,
    )
    init_ema: bool = setting(
        False, "with --init_from: take the averaged weights of a run with --ema_decay"
    )
    init_skip_mismatched: bool = setting(
        False,
        "with --init_from: keep the initial values of variables that do not fit, and list them",
    )
    backbone_weights: str = setting(
        "", "fill a new model's backbone from a .h5 file of keras.applications", path=True
    )
    backbone_preprocessing: str = setting(
        "",
        "preprocessing that --backbone_weights was trained with (its ResNet-50: caffe)",
        choices=("", "tf", "caffe", "torch"),
    )


_FIELDS = {field.name: field for field in dataclasses.fields(Config)}
_BATCH = ("global_batch_size", "batch_per_rank")


def from_command_line(argv: Sequence[str]) -> Config:
    """As `parse`, for a program's start: one rank says what is wrong, all exit with 2."""
    try:
        return parse(argv)
    except ValueError as error:
        refuse(str(error))


def parse(argv: Sequence[str]) -> Config:
    """Settings from `argv` (argv[0] is the program's name).

    Raises:
      ValueError: an unknown flag, a bad value or a combination that cannot work; the message
        names the flag and what it takes, and the flagfile and line that it stands in.
      SystemExit: code 0, after printing the flags, for --help.
    """
    words = argv[1:]
    if {"--help", "-h", "-help", "--helpfull"} & set(words):
        _print_help(argv[0])
        sys.exit(0)
    switches = [n for n, f in _FIELDS.items() if f.type == "bool"]
    switches += [f"no{name}" for name in switches]
    given = [
        fields.recognize(flag, _FIELDS)
        for flag in flagfiles.expand(words, PROJECT, PROJECT / "configs" / "default.cfg", switches)
    ]
    values = {
        name: fields.placed(field, field.default, PROJECT, PROJECT)
        for name, field in _FIELDS.items()
    }
    for flag in given:
        field, folder = _FIELDS[flag.name], PROJECT if flag.file else Path.cwd()
        try:
            value = fields.value(field, flag.value)
        except ValueError as error:
            raise flag.error(str(error)) from None
        values[flag.name] = fields.placed(field, value, folder, PROJECT)
    if _chosen_batch(given) == "batch_per_rank" and values["batch_per_rank"]:
        values["global_batch_size"] = 0
    else:
        values["batch_per_rank"] = 0
    config = combinations.implied(Config(**values))
    combinations.check(config)
    return config


def _chosen_batch(given: Sequence[flagfiles.Given]) -> str:
    """Which of the two that say how large a batch is was given last."""
    chosen, both = "global_batch_size", {}
    for flag in given:
        if flag.name in _BATCH:
            chosen = flag.name
            if both.setdefault(flag.file, flag.name) != flag.name:
                raise flag.error(
                    "--global_batch_size and --batch_per_rank both say how large a batch is: "
                    "leave one out"
                )
    return chosen


def _print_help(program: str) -> None:
    if launch_rank() != 0:
        return
    try:
        print(fields.help_text(program, _FIELDS), flush=True)
    except BrokenPipeError:
        # `--help | head` reads no more; Python would complain when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def for_ranks(config: Config, size: int) -> Config:
    """The settings for a run of `size` ranks: --batch_per_rank becomes the global batch size.

    Raises:
      ValueError: the settings cannot work on so many ranks.
    """
    combinations.check_ranks(config, size)
    if not config.batch_per_rank:
        return config
    whole = fields.value(_FIELDS["global_batch_size"], str(config.batch_per_rank * size))
    resolved = dataclasses.replace(config, global_batch_size=whole, batch_per_rank=0)
    combinations.check(resolved)
    return resolved


def write(config: Config, path: Path, given: Config | None = None) -> None:
    """Writes the settings as a flagfile that reads back to the same, from any working folder.

    Args:
      given: the settings before `for_ranks`; a comment says what it resolved.
    Raises:
      ValueError: a text that a line of a flagfile cannot hold.
    """
    lines = ["# Resolved settings of this run; run it again: python train.py --flagfile=THIS_FILE"]
    if given and given.batch_per_rank and config.global_batch_size:
        ranks = config.global_batch_size // given.batch_per_rank
        lines.append(
            f"# --global_batch_size={config.global_batch_size} was given as "
            f"--batch_per_rank={given.batch_per_rank} on {ranks} rank(s)"
        )
    unused = "global_batch_size" if config.batch_per_rank else "batch_per_rank"
    for name, field in _FIELDS.items():
        value = fields.placed(field, getattr(config, name), Path.cwd(), PROJECT)
        if name == unused:
            continue
        if isinstance(value, bool):
            lines.append(f"--{'' if value else 'no'}{name}")
        else:
            fields.value(field, str(value))
            lines.append(f"--{name}={value}")
    text = "\n".join(lines) + "\n"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
