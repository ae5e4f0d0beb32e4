"""Values of every flag, rows that combine them, and what each flag must or must not change.

A value is the text that is typed: no word, one or more. checks_flags.py replaces words in braces:
  {carrier}  what this launch reduces over: gloo or mpi
  {run}      folder of a run with moving averages; {plain}: without; {keras}: a model file
  {first}    folder of this row's first part, which a stop signal ended
  {threads}  those of this process, which cannot change in it
"""

import random
import sys
from collections.abc import Callable, Iterable

Row = dict[str, str]  # flag: value

# Given before a row's own values, in a flagfile.
USUAL = """
--task=varied
--num_classes=3
--global_batch_size=12
--eval_batch_size=8
--num_steps=3
--base_lr=0.05
--log_every=1
--eval_every=3
--checkpoint_every=0
"""

# A flag with limits on another stands after it: rows are filled from the top.
VALUES: dict[str, list[str]] = {
    "grouping": ["", "--gradient_groups=1000", "--pack_bytes=1000000 --pack_count=1"],
    "optimizer": [
        "--optimizer=sgd",
        "--optimizer=sgd --nesterov",
        "--optimizer=lars",
        "--optimizer=adam",
        "--optimizer=adam --adam_beta1=0.5",
        "--optimizer=adamw",
        "--optimizer=lamb --adam_beta2=0.9 --adam_epsilon=1e-3",
    ],
    "precision": [
        "--precision=float32",
        "--precision=float64",
        "--precision=bfloat16",
        "--precision=float16",
    ],
    "bn_sync": [f"--bn_sync={mode}" for mode in ("mean", "moments", "full", "none")],
    "data_workers": ["", "--data_workers=3"],
    "jit": ["", "--jit"],
    "lr_policy": [
        "--lr_policy=poly",
        "--lr_policy=cosine",
        "--lr_policy=step",
        "--lr_policy=constant",
        "--lr_policy=plateau --plateau_patience=1 --plateau_factor=0.5 --plateau_min_delta=0.1 "
        "--plateau_cooldown=1 --plateau_min_lr=1e-31",
    ],
    "init_from": [
        "",
        "--init_from={run}",
        "--init_from={keras} --init_skip_mismatched",
        "--init_from={run} --init_ema",
    ],
    "resume": ["--resume=never", "--resume=auto", "--resume={first}"],
    "global_batch_size": ["", "--global_batch_size=6", "--batch_per_rank=6"],
    "accumulation_steps": ["", "--accumulation_steps=3"],
    "num_steps": ["--num_steps=3", "--num_steps=1"],
    "compression": [f"--compression={name}" for name in ("none", "fp16", "bf16")],
    "deterministic": ["", "--deterministic"],
    "virtual_ranks": [
        "",
        "--virtual_ranks=2 --cpu_threads={threads}",
        "--virtual_ranks=4 --cpu_threads={threads}",
    ],
    "base_lr": ["", "--base_lr=1e-30"],
    "end_lr": ["", "--end_lr=1e-30", "--end_lr=0.05"],
    "power": ["", "--power=0", "--power=2"],
    "warmup_steps": ["", "--warmup_steps=1", "--warmup_steps=50"],
    "lr_boundaries": ["", "--lr_boundaries=0.1,0.9"],
    "lr_gamma": ["", "--lr_gamma=2"],
    "lr_scaling": ["--lr_scaling=none", "--lr_scaling=linear", "--lr_scaling=sqrt"],
    "momentum": ["", "--momentum=0"],
    "weight_decay": ["", "--weight_decay=0.01"],
    "clip_norm": ["", "--clip_norm=0.001", "--clip_norm=1e6"],
    "ema_decay": ["", "--ema_decay=0.5"],
    "label_smoothing": ["", "--label_smoothing=0.1"],
    "class_weights": ["", "--class_weights=1,0,2.5"],
    "dropout": ["", "--dropout=0.5"],
    "bn_sync_every": ["", "--bn_sync_every=1", "--bn_sync_every=2"],
    "reduce_backend": ["", "--reduce_backend={carrier}"],
    "device": ["", "--device=cpu"],
    "bind": ["", "--bind=false"],
    "stall_shutdown_s": ["", "--stall_shutdown_s=0", "--stall_shutdown_s=60"],
    "start_limit_s": ["", "--start_limit_s=0", "--start_limit_s=60"],
    "seed": ["", "--seed=0", "--seed=2147483647"],
    "eval_batch_size": ["", "--eval_batch_size=3", "--eval_batch_size=2147483647"],
    "log_gradients": ["", "--log_gradients"],
    "log_every": ["", "--log_every=2", "--log_every=100"],
    "eval_every": ["--eval_every=1", "--eval_every=0", "--eval_every=2"],
    "early_stop_evals": ["", "--early_stop_evals=1"],
    "checkpoint_every": ["", "--checkpoint_every=1", "--checkpoint_every=2"],
    "max_bad_steps": ["", "--max_bad_steps=1"],
    "keep": ["", "--keep=1"],
    "trackers": ["", "--trackers="],
    "profile": ["", "--profile=2:3:all"],
    "steps_per_call": ["", "--steps_per_call=2"],
    "benchmark": ["", "--benchmark"],
}

# Flags of files are tried in test_open.py, test_files.py, checks_data.py, test_backbone.py and
# test_jit_cache.py, those of runs that keep nothing in test_modes.py; and each run here has a
# folder of its own.
LEFT_OUT = (
    "data_dir",
    "data_format",
    "train_split",
    "val_split",
    "max_pixels",
    "max_bad_samples",
    "accept_changed_data",
    "run_dir",
    "dry_run",
    "find_lr",
    "backbone_weights",
    "backbone_preprocessing",
    "shuffle_shards",
    "cache_dir",
    "cache_gb",
    "jit_cache",
)

# Flags of both runs, and flags of one of them that must change its weights, each by itself.
ALONE = """
--global_batch_size=6 --accumulation_steps=3 --num_steps=1 --num_steps=2 --base_lr=0.1
--end_lr=0.02 --power=0.5 --warmup_steps=2 --momentum=0 --nesterov --weight_decay=0.01 --clip_norm=0.001
--label_smoothing=0.1 --class_weights=1,0,2.5 --dropout=0.5 --seed=0 --seed=257 --jit
"""
CHANGES: list[tuple[str, list[str]]] = [
    (
        "",
        [
            "--optimizer=adam",
            "--optimizer=adamw --weight_decay=0.001",
            "--optimizer=lamb",
            "--optimizer=lars",
            *VALUES["precision"][1:],
            *VALUES["lr_policy"][1:4],
            *ALONE.split(),
            "--init_from={run}",
            "--init_from={run} --init_ema",
            "--virtual_ranks=2 --cpu_threads={threads}",
            "--virtual_ranks=3 --cpu_threads={threads}",
        ],
    ),
    ("--lr_policy=step", ["--lr_boundaries=0.9", "--lr_gamma=2"]),
    (
        # No score is so much better than the first: each second evaluation lowers the rate.
        "--lr_policy=plateau --eval_every=1 --num_steps=5 --plateau_patience=1 "
        "--plateau_min_delta=9",
        [
            "--plateau_factor=0.5",
            "--plateau_patience=2",
            "--plateau_cooldown=2",
            "--plateau_min_lr=0.04",
        ],
    ),
    (
        "--optimizer=adam",
        ["--adam_beta1=0.5", "--adam_beta2=0.5", "--adam_epsilon=1e-3"],
    ),
    ("--optimizer=adam", ["--weight_decay=0.01"]),
    ("--optimizer=adamw", ["--weight_decay=0.01"]),
    ("--optimizer=lamb", ["--weight_decay=0.01"]),
]
CHANGES_ON_RANKS = [
    ("", ["--compression=fp16", "--compression=bf16"]),
    ("", ["--bn_sync=moments", "--bn_sync=full", "--bn_sync=none"]),
    ("", ["--lr_scaling=linear", "--lr_scaling=sqrt"]),
]

# Flags of both runs, and flags of one of them that together must not change a bit of its weights.
KEEPS = [
    (
        "--bn_sync_every=1",
        "--log_every=2 --eval_every=1 --early_stop_evals=9 --checkpoint_every=1 --keep=1 "
        "--eval_batch_size=3 --log_gradients --gradient_groups=2 --max_bad_steps=1 "
        "--profile=2:3:all",
    ),
    ("", "--pack_bytes=1000 --pack_count=2 --reduce_backend={carrier} --benchmark"),
    ("--num_steps=6 --eval_every=6 --log_every=6", "--steps_per_call=3"),
]
KEEPS_ON_ONE_RANK = [
    (
        "",
        "--ema_decay=0.5 --clip_norm=1e6 --lr_gamma=2 --lr_boundaries=0.9 --resume=never "
        "--cpu_threads={threads} --device=cpu --stall_shutdown_s=0 --data_workers=3 --trackers= "
        "--bind=false --start_limit_s=9",
    ),
    ("--init_from={run}", "--init_skip_mismatched"),
    ("--optimizer=adam", "--momentum=0"),
    ("--lr_policy=constant", "--power=2 --end_lr=0.02"),
    ("--lr_policy=plateau --eval_every=1", "--plateau_min_delta=0.5"),
    ("--virtual_ranks=3 --cpu_threads={threads}", "--deterministic --bn_sync_every=1"),
    ("--deterministic", "--bn_sync=moments --bn_sync_every=1 --lr_scaling=linear"),
    ("", "--bn_sync=none --bn_sync_every=1 --compression=bf16 --batch_per_rank=12"),
]
# These choose a task's model, data and evaluation; Varied has its own.
OF_TASKS = (
    "task",
    "model",
    "num_classes",
    "image_size",
    "synthetic_data",
    "mirror",
    "scale_range",
    "label_map",
    "colour_range",
    "eval_crop",
    "eval_window",
    "eval_scales",
    "eval_flip",
    "shift",
    "rand_augment",
    "mixup",
    "cutmix",
)

# What contradicts itself, at the latest on 2 ranks, and words of the sentence about it.
REFUSED = {
    "--global_batch_size=10 --accumulation_steps=3": "micro-batches must be of one size",
    "--compression=bf16 --pack_bytes=1": "--compression=bf16",
    "--pack_bytes=1 --gradient_groups=1": "choose one",
    "--virtual_ranks=1": "start at most 1",
    "--virtual_ranks=3 --bn_sync=full": "start 3 ranks",
    "--virtual_ranks=2 --compression=fp16": "--virtual_ranks=2 cannot be used with --compression:",
    "--virtual_ranks=2 --pack_bytes=1": "--virtual_ranks=2 cannot be used with --pack_bytes:",
    "--virtual_ranks=2 --gradient_groups=1": (
        "--virtual_ranks=2 cannot be used with --gradient_groups:"
    ),
    "--virtual_ranks=2 --batch_per_rank=8": (
        "--virtual_ranks=2 cannot be used with --batch_per_rank:"
    ),
    "--virtual_ranks=2 --lr_scaling=linear": "--virtual_ranks=2 cannot be used with --lr_scaling:",
    "--virtual_ranks=2 --bn_sync=moments": "--bn_sync=mean instead of moments",
    "--virtual_ranks=7 --accumulation_steps=2": "has 6: make it larger",
    "--jit --bn_sync=full": "--bn_sync=full",
    "--nesterov --momentum=0": "leave out one",
    "--adam_epsilon=0": "at least 1e-37",
    "--adam_beta2=0.99999999": "less than 0.9999999",
    "--deterministic --gradient_groups=2": "--deterministic",
    "--end_lr=0.06": "is greater than",
    "--shift=8 --image_size=8": "--shift=8 moves pictures",
    "--scale_range=2,0.5": "--scale_range='2,0.5'",
    "--colour_range=0,2,0": "--colour_range='0,2,0'",
    "--colour_range=0,nan,0": "--colour_range='0,nan,0'",
    **{
        f"--rand_augment={value}": f"--rand_augment='{value}'"
        for value in ("2", "0,9", "1.5,9", "2,31", "2,-1", "2,nan")
    },
    "--label_map=no/such": "no/such: No such file",
    # The file holds no text.
    f"--label_map={sys.executable}": "must be pairs of a value",
    **{
        f"--label_map={value}": f"--label_map='{value}'"
        for value in ("1:x", "256:0", "1:255", "1:0,1:2", "-1:0", ":")
    },
    **{
        f"--max_bad_samples={value}": f"--max_bad_samples='{value}'"
        for value in ("-1", "101%", "x%")
    },
    "--early_stop_evals=1 --eval_every=0": "--eval_every=0",
    "--lr_policy=step --lr_boundaries=0.9,0.1": "rising",
    "--lr_policy=plateau --eval_every=0": "--eval_every=0",
    "--lr_policy=plateau --plateau_min_lr=0.06": "is greater than",
    "--plateau_factor=1": "less than 1",
    "--init_ema": "--init_from",
    "--backbone_preprocessing=caffe": "need each other",
    "--backbone_weights=some.h5 --backbone_preprocessing=tf --init_from=other": "leave one out",
    "--train_split=": "--train_split",
    "--val_split=": "--val_split",
    "--run_dir=": "--run_dir",
    "--resume=": "--resume",
    "--class_weights=1,x,3": "--class_weights='1,x,3'",
    "--class_weights=1,2": "2 weights",
    "--eval_scales=1,x": "--eval_scales='1,x'",
    "--eval_scales=1,nan": "--eval_scales='1,nan'",
    "--eval_scales=0.5,0.5": "different numbers",
    "--eval_crop=8 --eval_window=8": "choose one",
    "--global_batch_size=12 --batch_per_rank=6": "leave one out",
    "--trackers=paper": "paper is neither",
    "--profile=3": "not of the form",
    "--profile=1:3": "from step 2 on",
    "--profile=4:3": "from step 2 on",
    "--dry_run --benchmark": "choose one",
    "--find_lr --benchmark": "choose one",
    "--find_lr --resume=runs/other": "begins at step 0",
}
# Contradictions that only a started run can find.
REFUSED_BY_RUN = {
    "--task=segmentation --model=tiny --synthetic_data --image_size=17": "--image_size=17",
    "--adam_beta1=0.5": "--optimizer=sgd has no such number",
    "--device=gpu": "--device=gpu",
    "--reduce_backend=nccl": "--reduce_backend=nccl",
    "--reduce_backend={other_carrier}": "start the run with horovodrun",
    "--task=segmentation --model=nothing": "--model=nothing",
    "--task=segmentation --model=tiny --eval_window=9": "--eval_window=9",
    "--task=classification": "--num_classes=3",
    "--task=segmentation --data_dir={run}": "{run}",
    "--resume={run}/nothing": "{run}/nothing",
    "--resume={run} --optimizer=adam": "{run}",
    "--init_from={run}/nothing": "{run}/nothing",
    "--init_from={keras} --init_ema": "leave out --init_ema",
    "--init_from={plain} --init_ema": "no average",
    "--backbone_weights={keras} --backbone_preprocessing=caffe": (
        "hvdkit.train.preprocessing.Preprocess"
    ),
}


def words(values: Iterable[str]) -> list[str]:
    return " ".join(values).split()


def fields_of(values: Iterable[str]) -> set[str]:
    return {word.lstrip("-").split("=")[0] for word in words(values)}


def rows(
    values: dict[str, list[str]], accepts: Callable[[Iterable[str]], bool], count: int
) -> list[Row]:
    """Random rows, always the same: of each flag a value that `accepts` takes beside the others."""
    draw = random.Random(7)
    drawn = []
    for _ in range(count):
        row: Row = {}
        for name, choices in values.items():
            in_random_order = draw.sample(choices, len(choices))
            beside = list(row.values())
            row[name] = ""
            for value in in_random_order:
                if accepts([*beside, value]):
                    row[name] = value
                    break
        drawn.append(row)
    return drawn
