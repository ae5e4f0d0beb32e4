"""A run's config.cfg: the folder that it lies in is its run, also after mv or cp -r."""

from pathlib import Path

from hvdkit import whole_files
from hvdkit.settings import project

CONFIG = "config.cfg"
HEADER = "# Resolved settings of this run; run it again: python train.py --flagfile=THIS_FILE"
# A folder with one of these is a run's.
_RECORDS = ("checkpoints", "metrics.jsonl", "starts.jsonl")
# Settings that may change without making it another run: where it is kept, what is logged and
# kept, and how gradients travel (at most, sums are rounded otherwise). A resume names all others
# that changed, also data_dir (it may hold other data), accumulation_steps (batch norm sees
# micro-batches), compression, deterministic (about the whole run), init_from (not read any more).
HARMLESS = {
    "accept_changed_data",
    "benchmark",
    "bind",
    "cache_dir",
    "cache_gb",
    "checkpoint_every",
    "data_workers",
    "dry_run",
    "early_stop_evals",
    "eval_batch_size",
    "eval_every",
    "find_lr",
    "gradient_groups",
    "jit_cache",
    "keep",
    "log_every",
    "log_gradients",
    "max_bad_samples",
    "max_bad_steps",
    "max_pixels",
    "pack_bytes",
    "pack_count",
    "profile",
    "reduce_backend",
    "resume",
    "run_dir",
    "stall_shutdown_s",
    "start_limit_s",
    "steps_per_call",
    "trackers",
}
# Settings of how a step trains, and of nothing else. Not those that a restart on other hosts
# changes (the batch), or that an evaluation reads too (label_smoothing, image_size).
OF_STEPS = {
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "base_lr",
    "clip_norm",
    "colour_range",
    "cutmix",
    "dropout",
    "end_lr",
    "lr_boundaries",
    "lr_gamma",
    "lr_policy",
    "mirror",
    "mixup",
    "momentum",
    "nesterov",
    "optimizer",
    "plateau_cooldown",
    "plateau_factor",
    "plateau_min_delta",
    "plateau_min_lr",
    "plateau_patience",
    "power",
    "rand_augment",
    "scale_range",
    "seed",
    "shift",
    "weight_decay",
}


def folder_of(file: Path) -> Path | None:
    """The run's folder that a flagfile is the config.cfg of; None where it is another flagfile.

    Raises ValueError for a link from one run's folder into another.
    """
    folders = set()
    for path in (file, file.resolve()):
        records = [path.with_name(name) for name in _RECORDS]
        if path.name == CONFIG and any(record.exists() for record in records):
            folders.add(path.parent.resolve())
    if len(folders) > 1:
        ways = " or ".join(f"--run_dir={folder}" for folder in sorted(folders))
        raise ValueError(
            f"{file} is a link to the config.cfg of another run: add {ways}"
        )
    return next(iter(folders), None)


def run_dir(file: Path, recorded: str) -> str:
    """The --run_dir that a flagfile stands for, in which `recorded` is written ("": none is).

    Raises ValueError where a run wrote it and it lies neither in that run's folder nor in another.
    """
    own = project.folder()
    folder = folder_of(file)
    named = (own / recorded).resolve()
    if folder is None:
        here = file.parent.resolve()
        if (
            file.name != CONFIG
            or not recorded
            or named == here
            or not _is_written(file)
        ):
            return recorded
        raise ValueError(
            f"{file} was written by the run in {recorded}, and {here} is no run's folder: add "
            f"--run_dir={recorded} to resume that run, or --run_dir={here} to train there"
        )
    if recorded and named == folder:
        return recorded
    return str(folder.relative_to(own) if folder.is_relative_to(own) else folder)


def has_begun(file: Path, run_dir: Path) -> bool:
    """Whether a flagfile is the config.cfg of the run in `run_dir`, which has checkpoints.

    Its --resume says what the run once began from; now the run has its own to go on from.
    """
    folder = folder_of(file)
    if folder is None or folder != run_dir.resolve():
        return False
    return any(folder.glob("checkpoints/step-*"))


def _is_written(file: Path) -> bool:
    return whole_files.read(file, whole_files.JSON_BYTES, links=True).startswith(
        HEADER.encode()
    )
