"""Every setting of a run, in one frozen dataclass; the command-line flags are made from its fields.

A setting is added here once: its name, type, default, help and limits. `--flagfile=FILE` reads
flags from a file (one a line, `#` starts a comment), later flags win. Without one, they are read
from configs/default.cfg where there is such a file. The resolved settings are
written to RUN_DIR/config.cfg, which is itself such a file, so that a run can be run again.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from absl import flags

_DEFAULTS = Path("configs/default.cfg")


def _setting(
    default: Any,
    help: str,
    *,
    choices: tuple = (),
    low: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> Any:
    """A field with its help and limits: one of `choices`; low <= value, above < value < below."""
    meta = {"help": help, "choices": choices, "low": low, "above": above, "below": below}
    return dataclasses.field(default=default, metadata=meta)


FORMATS = ("", "folders", "voc", "cityscapes", "class_folders", "cifar10", "digits", "records")


@dataclasses.dataclass(frozen=True)
class Config:
    # What is trained, on what, and where results go.
    task: str = _setting("segmentation", "name of a file in tasks/")
    model: str = _setting("", "which of the task's models; empty: the task's first")
    data_dir: str = _setting("datasets/demo", "folder of the data set")
    data_format: str = _setting("", "layout of data_dir; empty: the task's own", choices=FORMATS)
    run_dir: str = _setting("runs/default", "folder for checkpoints, metrics and the report")
    num_classes: int = _setting(11, "number of classes, background included", low=2)
    image_size: int = _setting(64, "height and width of a training crop, in pixels", low=8)
    synthetic_data: bool = _setting(False, "random samples instead of data_dir")
    benchmark: bool = _setting(False, "only steps: no evaluation, no checkpoint; says the speed")

    # How long, and how much at once.
    global_batch_size: int = _setting(32, "samples a step, over all ranks", low=1)
    accumulation_steps: int = _setting(1, "micro-batches a step is split into", low=1)
    num_steps: int = _setting(1000, "steps of the whole run (N of the schedule)", low=1)
    eval_batch_size: int = _setting(16, "samples a batch in evaluation, each rank", low=1)

    # Learning rate: base * (1 - step/N) ** power by default.
    base_lr: float = _setting(0.01, "learning rate after warm-up", above=0)
    lr_policy: str = _setting("poly", "schedule", choices=("poly", "cosine", "step", "constant"))
    power: float = _setting(0.9, "power of the poly policy", low=0)
    end_lr: float = _setting(0.0, "learning rate at the last step (poly, cosine)", low=0)
    warmup_steps: int = _setting(0, "steps of linear warm-up from 0", low=0)
    lr_boundaries: str = _setting("0.5,0.75", "step policy: fractions of num_steps, with commas")
    lr_gamma: float = _setting(0.1, "step policy: factor at each boundary", above=0)
    lr_scaling: str = _setting(
        "none", "multiply base_lr by the number of ranks", choices=("none", "linear", "sqrt")
    )

    # Optimizer.
    optimizer: str = _setting("sgd", "update rule", choices=("sgd", "adam", "adamw", "lamb"))
    momentum: float = _setting(0.9, "momentum of sgd", low=0)
    weight_decay: float = _setting(
        0.0, "L2 on kernels (sgd, adam) or decoupled decay of kernels (adamw, lamb)", low=0
    )
    clip_norm: float = _setting(0.0, "largest global gradient norm; 0: no clipping", low=0)
    ema_decay: float = _setting(
        0.0,
        "decay a step of the weights' moving average, which is evaluated; 0: none",
        low=0,
        below=1,
    )

    # Loss.
    label_smoothing: float = _setting(
        0.0, "share of the target spread evenly over all classes", low=0, below=1
    )
    class_weights: str = _setting("", "a weight for each class, with commas; empty: all 1")

    # Numbers: precision, reduction, batch norm.
    precision: str = _setting(
        "float32", "compute type", choices=("float32", "float64", "bfloat16", "float16")
    )
    compression: str = _setting(
        "none", "type of gradients on the wire", choices=("none", "fp16", "bf16")
    )
    bn_sync: str = _setting(
        "mean",
        "batch norm across ranks: mean or moments of the moving statistics, full (normalize with "
        "the global batch), none",
        choices=("mean", "moments", "full", "none"),
    )
    bn_sync_every: int = _setting(
        0, "steps between syncs of moving statistics; 0: when they are read", low=0
    )
    dropout: float = _setting(0.0, "share of features dropped before the logits", low=0, below=1)

    # How gradients travel (engine/reduction.py says which knob of Horovod each one turns).
    reduce_backend: str = _setting(
        "auto", "what must carry them", choices=("auto", "gloo", "mpi", "nccl")
    )
    gradient_groups: int = _setting(
        0, "merge them into this many messages; 0: Horovod fuses by arrival", low=0
    )
    pack_bytes: int = _setting(0, "pack gradients of up to so many bytes together; 0: off", low=0)
    pack_count: int = _setting(16, "most gradients in one pack", low=1)
    fusion_threshold_mb: int = _setting(-1, "Horovod's fusion buffer, MiB; -1: its default", low=-1)
    cycle_time_ms: float = _setting(-1.0, "Horovod's cycle time, ms; -1: its default", low=-1)
    cache_capacity: int = _setting(-1, "Horovod's response cache; -1: its default", low=-1)
    hierarchical_allreduce: bool = _setting(False, "reduce within hosts first (GPU builds)")
    hierarchical_allgather: bool = _setting(False, "gather within hosts first (GPU builds)")
    autotune: bool = _setting(
        False, "search for the best of these; written to RUN_DIR/autotune.cfg"
    )

    seed: int = _setting(1, "seed of weights, sample order and augmentation", low=0)
    deterministic: bool = _setting(False, "bit-identical on the same number of ranks; slower")

    # When to look, keep, and go on.
    log_gradients: bool = _setting(False, "each layer's gradient sum and norm, gradients.jsonl")
    log_every: int = _setting(20, "steps between log lines", low=1)
    eval_every: int = _setting(200, "steps between evaluations; 0: only at the end", low=0)
    checkpoint_every: int = _setting(200, "steps between checkpoints; 0: only at the end", low=0)
    early_stop_evals: int = _setting(
        0, "end after this many evaluations without a better score; 0: never", low=0
    )
    keep: int = _setting(3, "newest checkpoints kept; the best is kept besides", low=1)
    resume: str = _setting(
        "auto",
        "auto: newest sound checkpoint of run_dir; never: start anew; or a checkpoint's path",
    )
    init_from: str = _setting(
        "", "weights of a new run: another run's folder, a checkpoint's, or a .keras file"
    )
    init_skip_mismatched: bool = _setting(
        False, "with --init_from: leave variables that do not fit as they are, and name them"
    )


def parse(argv: list[str]) -> Config:
    """Settings from `argv` (argv[0] is the program's name).

    Raises:
      ValueError: an unknown flag, a bad value or a combination that cannot work; the message
        names the flag and what it takes.
      SystemExit: code 0, after printing the flags, for --help.
    """
    values = _define_flags()
    if _DEFAULTS.exists() and not any(a.lstrip("-").startswith("flagfile") for a in argv[1:]):
        argv = [argv[0], f"--flagfile={_DEFAULTS}", *argv[1:]]
    if any(arg in ("--help", "-h", "-help", "--helpfull") for arg in argv[1:]):
        print(f"usage: {argv[0]} [--flagfile=FILE] [--flag=value ...]\n{values.get_help()}")
        raise SystemExit(0)
    try:
        rest = values(argv)
    except flags.Error as error:
        raise ValueError(f"{error} (--help lists all flags)") from None
    if len(rest) > 1:
        raise ValueError(f"unexpected argument {rest[1]!r}: flags are written --name=value")
    config = Config(**{f.name: values[f.name].value for f in dataclasses.fields(Config)})
    _check_combinations(config)
    return config


def write(config: Config, path: Path) -> None:
    """Writes the resolved settings as a flagfile that `--flagfile` reads back to the same."""
    lines = ["# Resolved settings of this run; run it again: python train.py --flagfile=THIS_FILE"]
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, bool):
            lines.append(f"--{'' if value else 'no'}{name}")
        else:
            lines.append(f"--{name}={value}")
    path.write_text("\n".join(lines) + "\n")


def _define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    define = {"str": flags.DEFINE_string, "int": flags.DEFINE_integer}
    define |= {"float": flags.DEFINE_float, "bool": flags.DEFINE_boolean}
    for field in dataclasses.fields(Config):
        meta = field.metadata
        if meta["choices"]:
            args = (field.name, field.default, list(meta["choices"]), meta["help"])
            flags.DEFINE_enum(*args, flag_values=values)
            continue
        define[field.type](field.name, field.default, meta["help"], flag_values=values)
        if _range_text(meta):
            flags.register_validator(
                field.name,
                lambda value, m=meta: _in_range(value, m),
                message=f"must be {_range_text(meta)}",
                flag_values=values,
            )
    return values


def _in_range(value: float, meta: Any) -> bool:
    return math.isfinite(value) and meta["low"] <= value and meta["above"] < value < meta["below"]


def _range_text(meta: Any) -> str:
    words = {"low": "at least", "above": "greater than", "below": "less than"}
    return " and ".join(f"{w} {meta[k]:g}" for k, w in words.items() if math.isfinite(meta[k]))


def _check_combinations(config: Config) -> None:
    if config.global_batch_size % config.accumulation_steps:
        raise ValueError(
            f"--global_batch_size={config.global_batch_size} is not a multiple of "
            f"--accumulation_steps={config.accumulation_steps}: micro-batches must be of one size"
        )
    if config.compression == "bf16" and (config.pack_bytes or config.gradient_groups):
        raise ValueError("--compression=bf16 carries each gradient alone: leave out grouping")
    if config.pack_bytes and config.gradient_groups:
        raise ValueError("--pack_bytes and --gradient_groups are two ways to group: choose one")
    if config.deterministic and (config.pack_bytes or config.gradient_groups > 1):
        raise ValueError(
            "--deterministic reduces all gradients as one group: leave out --pack_bytes and "
            "--gradient_groups"
        )
    if config.warmup_steps > config.num_steps:
        raise ValueError(
            f"--warmup_steps={config.warmup_steps} is more than --num_steps={config.num_steps}"
        )
    if config.lr_policy in ("poly", "cosine") and config.end_lr > config.base_lr:
        raise ValueError(f"--end_lr={config.end_lr} is greater than --base_lr={config.base_lr}")
    if config.early_stop_evals and not config.eval_every:
        raise ValueError(
            f"--early_stop_evals={config.early_stop_evals} counts evaluations: --eval_every=0 "
            "makes none"
        )
    if config.init_skip_mismatched and not config.init_from:
        raise ValueError("--init_skip_mismatched says what --init_from may leave out: name one")
    if config.lr_policy == "step":
        boundaries(config)
    class_weights(config)


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
