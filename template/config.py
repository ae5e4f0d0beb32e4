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

import combinations
import flagfiles
import settings
from combinations import (
    boundaries,
    class_weights,
    eval_scales,
    notes,
    scale_factor,
    scale_range,
    timeline_steps,
    tracker_names,
)
from engine.stop import WRONG_USE, complain, launch_rank
from settings import setting

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
    "timeline_steps",
    "tracker_names",
    "write",
]

PROJECT = Path(__file__).resolve().parent
FORMATS = ("", "folders", "voc", "cityscapes", "class_folders", "cifar10", "cifar100", "digits")
FORMATS += ("records",)


@dataclasses.dataclass(frozen=True)
class Config:
    task: str = setting(
        "segmentation",
        "name of a file in tasks/",
        heading="What is trained, on what, and where results go",
    )
    model: str = setting("", "which of the task's models; empty: the task's first")
    data_dir: str = setting("datasets/demo", "folder of the data set", path=True)
    data_format: str = setting("", "layout of data_dir; empty: the task's own", choices=FORMATS)
    train_split: str = setting("train", "split of data_dir that is trained on")
    val_split: str = setting("val", "split of data_dir that is scored")
    run_dir: str = setting(
        "runs/default", "folder for checkpoints, metrics and the report", path=True
    )
    num_classes: int = setting(11, "number of classes, background included", low=2)
    image_size: int = setting(64, "height and width of a training crop, in pixels", low=8)
    mirror: str = setting(
        "auto",
        "left-right, half of the training pictures; auto: on but for digits and the demo "
        "(segmentation, classification)",
        choices=("auto", "on", "off"),
    )
    scale_range: str = setting(
        "",
        "least and largest random factor on the pixels of a training picture; empty: 0.5,2 or the "
        "demo's 0.8,1.25 (segmentation)",
    )
    crop_area: float = setting(
        0.0,
        "least share of a picture's area in a training crop, but for the middle of a long narrow "
        "one, where no crop fits; 0: 0.08, below 64 pixels a shift alone (classification)",
        low=0,
        below=1,
    )
    synthetic_data: bool = setting(False, "random samples instead of data_dir")
    benchmark: bool = setting(
        False,
        "only steps, no evaluation, no checkpoint: says the speed and where time goes, "
        "benchmark.json",
    )

    dry_run: bool = setting(
        False, "show what the run would be, try two steps, an evaluation and a save, keep nothing"
    )

    find_lr: bool = setting(
        False,
        "let the learning rate rise over 200 steps at most, suggest one, keep nothing but a page, "
        "find_lr.html beside run_dir",
    )

    global_batch_size: int = setting(
        32, "samples a step, over all ranks", low=1, heading="How long, and how much at once"
    )
    batch_per_rank: int = setting(
        0, "samples a step on each rank, in place of global_batch_size; 0: not used", low=0
    )
    accumulation_steps: int = setting(1, "micro-batches a step is split into", low=1)
    # Below 10**8: checkpoints are named by eight digits of the step.
    num_steps: int = setting(1000, "steps of the whole run (N of the schedule)", low=1, below=10**8)
    eval_batch_size: int = setting(
        16, "samples a batch in evaluation, each rank; one where sizes may differ", low=1
    )

    base_lr: float = setting(
        0.01,
        "learning rate after warm-up",
        above=0,
        heading="Learning rate: base * (1 - step/N) ** power by default",
    )
    lr_policy: str = setting("poly", "schedule", choices=("poly", "cosine", "step", "constant"))
    power: float = setting(0.9, "power of the poly policy", low=0)
    end_lr: float = setting(0.0, "learning rate at the last step (poly, cosine)", low=0)
    warmup_steps: int = setting(0, "steps of linear warm-up", low=0)
    warmup_from: float = setting(0.0, "learning rate that warm-up rises from", low=0)
    lr_boundaries: str = setting("0.5,0.75", "step policy: fractions of num_steps, with commas")
    lr_gamma: float = setting(0.1, "step policy: factor at each boundary", above=0)
    lr_scaling: str = setting(
        "none", "multiply base_lr by the number of ranks", choices=("none", "linear", "sqrt")
    )

    optimizer: str = setting(
        "sgd", "update rule", choices=("sgd", "adam", "adamw", "lamb"), heading="Optimizer"
    )
    momentum: float = setting(0.9, "momentum of sgd", low=0, below=1)
    weight_decay: float = setting(
        0.0, "L2 on kernels (sgd, adam) or decoupled decay of kernels (adamw, lamb)", low=0
    )
    clip_norm: float = setting(0.0, "largest global gradient norm; 0: no clipping", low=0)
    ema_decay: float = setting(
        0.0,
        "decay a step of the weights' moving average, which is evaluated; 0: none",
        low=0,
        below=1,
    )

    label_smoothing: float = setting(
        0.0, "share of the target spread evenly over all classes", low=0, below=1, heading="Loss"
    )
    class_weights: str = setting("", "a weight for each class, with commas; empty: all 1")

    eval_crop: int = setting(
        0,
        "score the centre of this many pixels, in batches; 0: whole pictures at their own size",
        low=0,
        heading="Evaluation of segmentation",
    )
    eval_window: int = setting(
        0,
        "go over a larger picture in windows of this many pixels, which overlap by a third; 0: "
        "each at once",
        low=0,
    )
    eval_scales: str = setting("1", "average the probabilities at these sizes, with commas")
    eval_flip: bool = setting(False, "average the probabilities of the mirror image too")

    precision: str = setting(
        "float32",
        "compute type",
        choices=("float32", "float64", "bfloat16", "float16"),
        heading="Precision, compression, batch norm, dropout",
    )
    jit: bool = setting(
        False, "compile forward and backward with XLA; several times slower on CPUs"
    )
    compression: str = setting(
        "none", "type of gradients on the wire", choices=("none", "fp16", "bf16")
    )
    bn_sync: str = setting(
        "mean",
        "batch norm across ranks: mean or moments of the moving statistics, full (normalize with "
        "the global batch), none",
        choices=("mean", "moments", "full", "none"),
    )
    bn_sync_every: int = setting(
        0, "steps between syncs of moving statistics; 0: when they are read", low=0
    )
    dropout: float = setting(
        0.0, "share of features dropped, where the model has it", low=0, below=1
    )

    reduce_backend: str = setting(
        "auto",
        "what must carry them",
        choices=("auto", "gloo", "mpi", "nccl"),
        heading="How gradients travel (docs/gradients.md: Horovod's own names)",
    )
    gradient_groups: int = setting(
        0, "merge them into this many messages; 0: Horovod fuses by arrival", low=0
    )
    pack_bytes: int = setting(0, "pack gradients of up to so many bytes together; 0: off", low=0)
    pack_count: int = setting(16, "most gradients in one pack", low=1)
    fusion_threshold_mb: int = setting(-1, "Horovod's fusion buffer, MiB; -1: its default", low=-1)
    cycle_time_ms: float = setting(-1.0, "Horovod's cycle time, ms; -1: its default", low=-1)
    cache_capacity: int = setting(-1, "Horovod's response cache; -1: its default", low=-1)
    hierarchical_allreduce: bool = setting(False, "reduce within hosts first (GPU builds)")
    hierarchical_allgather: bool = setting(False, "gather within hosts first (GPU builds)")
    autotune: bool = setting(False, "search for the best of these; written to RUN_DIR/autotune.cfg")
    stall_shutdown_s: int = setting(
        1800, "seconds that ranks wait for one that hangs before the run ends; 0: for ever", low=0
    )

    seed: int = setting(
        1, "seed of weights, sample order and augmentation", low=0, heading="Repeatability"
    )
    deterministic: bool = setting(False, "bit-identical on the same number of ranks; slower")
    virtual_ranks: int = setting(
        0, "deal a step to this many shares: the same bits on any number of ranks up to it", low=0
    )
    device: str = setting(
        "auto",
        "what computes; auto: a GPU each, or CPUs where the host has none",
        choices=("auto", "gpu", "cpu"),
    )
    cpu_threads: int = setting(
        0, "threads of a rank on CPUs; 0: its share of the cores, 1 with --virtual_ranks", low=0
    )

    data_workers: int = setting(
        0, "threads of a rank that read and augment data; 0: its share of the cores", low=0
    )

    log_gradients: bool = setting(
        False,
        "each layer's gradient sum and norm, gradients.jsonl",
        heading="When to look, keep, and go on",
    )
    timeline: str = setting(
        "",
        "steps FIRST:LAST of which rank 0 records Horovod's timeline and TensorFlow's profile",
    )
    trackers: str = setting(
        "tensorboard",
        "where figures go besides metrics.jsonl, with commas: tensorboard, csv (a table at the "
        "end), mlflow, wandb (if installed); empty: nowhere",
    )
    log_every: int = setting(20, "steps between log lines", low=1)
    eval_every: int = setting(200, "steps between evaluations; 0: only at the end", low=0)
    checkpoint_every: int = setting(200, "steps between checkpoints; 0: only at the end", low=0)
    checkpoint_minutes: float = setting(
        0.0, "a checkpoint too when the newest is older than this; 0: whatever its age", low=0
    )
    checkpoint_parts: int = setting(
        1,
        "files of a checkpoint, each written by one rank, on as many hosts as there are; more than "
        "1 needs a run_dir that they share",
        low=1,
    )
    max_failed_saves: int = setting(
        3, "checkpoints in a row that cannot be written until the run ends", low=1
    )
    max_bad_steps: int = setting(
        3,
        "steps in a row whose loss or gradients are no numbers, skipped, until the run goes back "
        "to a checkpoint and leaves out the batches since; the second time it ends, exit code 3",
        low=1,
    )
    early_stop_evals: int = setting(
        0, "end after this many evaluations without a better score; 0: never", low=0
    )
    keep: int = setting(
        3, "newest checkpoints kept; the best, by each measure, is kept besides", low=1
    )
    drift_every: int = setting(
        1000, "steps between looks whether all ranks hold the same weights; 0: at the end", low=0
    )
    drift: str = setting(
        "stop", "what to do where they do not: stop, or take rank 0's", choices=("stop", "repair")
    )
    resume: str = setting(
        "auto",
        "auto: newest sound checkpoint of run_dir; never: start anew; or the path of a checkpoint "
        "or of a run's folder",
        path=True,
        words=("auto", "never"),
    )
    elastic: bool = setting(
        False,
        "go on with the ranks that are left when some are lost, and with hosts that join "
        "(launch/hosts.sh --discover)",
    )
    elastic_commit_every: int = setting(
        10,
        "with --elastic: steps between copies in memory, which ranks that are left go back to",
        low=1,
    )
    init_from: str = setting(
        "",
        "weights of a new run: another run's folder, a checkpoint's, or a .keras file",
        path=True,
    )
    init_ema: bool = setting(
        False, "with --init_from: the averaged weights of a run with --ema_decay"
    )
    init_skip_mismatched: bool = setting(
        False, "with --init_from: leave variables that do not fit as they are, and name them"
    )
    backbone_weights: str = setting(
        "",
        "a new run's first layers, by name: a .h5, .weights.h5 or .keras file of Keras",
        path=True,
    )
    backbone_preprocessing: str = setting(
        "",
        "pictures that --backbone_weights was trained on; empty: the file says it",
        choices=("", "tf", "caffe", "torch"),
    )


_FIELDS = {field.name: field for field in dataclasses.fields(Config)}
_BATCH = ("global_batch_size", "batch_per_rank")


def from_command_line(argv: Sequence[str]) -> Config:
    """As `parse`, for a program's start: rank 0 says what is wrong, and every rank exits with 2."""
    try:
        return parse(argv)
    except ValueError as error:
        if launch_rank() == 0:
            complain(str(error))
        sys.exit(WRONG_USE)


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
        settings.recognize(flag, _FIELDS)
        for flag in flagfiles.expand(words, PROJECT, PROJECT / "configs" / "default.cfg", switches)
    ]
    values = {
        name: settings.placed(field, field.default, PROJECT, PROJECT)
        for name, field in _FIELDS.items()
    }
    for flag in given:
        field, folder = _FIELDS[flag.name], PROJECT if flag.file else Path.cwd()
        try:
            value = settings.value(field, flag.value)
        except ValueError as error:
            raise flag.error(str(error)) from None
        values[flag.name] = settings.placed(field, value, folder, PROJECT)
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
        print(settings.help_text(program, _FIELDS), flush=True)
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
    whole = settings.value(_FIELDS["global_batch_size"], str(config.batch_per_rank * size))
    resolved = dataclasses.replace(config, global_batch_size=whole, batch_per_rank=0)
    combinations.check(resolved)
    return resolved


def write(config: Config, path: Path, given: Config | None = None) -> None:
    """Writes the settings as a flagfile that reads back to the same, from any working folder.

    Args:
      given: the settings as they were before `for_ranks`; what it resolved is told in a comment.
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
        value = settings.placed(field, getattr(config, name), Path.cwd(), PROJECT)
        if name == unused:
            continue
        if isinstance(value, bool):
            lines.append(f"--{'' if value else 'no'}{name}")
        else:
            settings.value(field, str(value))
            lines.append(f"--{name}={value}")
    text = "\n".join(lines) + "\n"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
