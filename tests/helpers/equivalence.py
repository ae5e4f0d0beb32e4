"""Trains the same few runs on so many ranks and writes the weights: the proof of "same weights".

`equivalence.py DATA_DIR OUT_DIR MODEL NAME...`; each NAME of SETTINGS is a whole run.
"""

import dataclasses
import sys
from pathlib import Path

STEPS = 40
SAMPLES = 10

# Shares of 10 samples are uneven on 3 and 4 ranks, counts of valid pixels everywhere.
_COMMON = {
    "bn_sync": "full",
    "global_batch_size": SAMPLES,
    "num_steps": STEPS,
    "image_size": 32,
    "trackers": "",
    "log_every": STEPS // 2,
}
_SGD = {"optimizer": "sgd", "base_lr": 0.02, "weight_decay": 1e-4, "clip_norm": 0.5}
_ADAM = {"optimizer": "adam", "base_lr": 0.002}
_F64 = {"precision": "float64"}
SETTINGS = {
    "float64 sgd": _F64 | _SGD,
    "float64 sgd accumulation": _F64 | _SGD | {"accumulation_steps": 2},
    "float64 adam": _F64 | _ADAM,
    "float64 adam accumulation": _F64 | _ADAM | {"accumulation_steps": 2},
    "float64 adam dropout": _F64 | _ADAM | {"dropout": 0.2},
    "float32 sgd": _SGD,
    "float32 sgd accumulation": _SGD | {"accumulation_steps": 2},
    "float32 adam": _ADAM,
    "float32 sgd dropout": _SGD | {"dropout": 0.2},
    "float64 sgd local batch norm": _F64 | _SGD | {"bn_sync": "mean"},
}


def largest_difference(a: Path, b: Path) -> float:
    """Largest over the variables of max|a - b| / max|a|: relative, variable by variable."""
    import numpy as np

    largest = 0.0
    with np.load(a) as first, np.load(b) as second:
        assert first.files == second.files
        for name in first.files:
            difference = np.max(np.abs(first[name] - second[name]))
            scale = max(np.max(np.abs(first[name])), 1e-30)
            largest = max(largest, float(difference / scale))
    return largest


def main(data_dir: str, out_dir: str, model: str, *names: str) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "template"))
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    import numpy as np
    import tensorflow as tf
    from small_runs import fit_config

    from hvdkit.ranks import world as world_lib
    from hvdkit.settings import Settings
    from tasks.segmentation import Task

    # As users do.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    usual = dataclasses.replace(Settings(), data_dir=data_dir, model=model, **_COMMON)
    world = world_lib.connect()
    for name in names:
        config = dataclasses.replace(
            usual, run_dir=str(Path(out_dir, name)), **SETTINGS[name]
        )
        ended = fit_config(config, world, Task)
        if world.is_chief:
            assert ended.summary["skipped_steps"] == 0
            arrays = {
                f"{number:03d}": value for number, value in enumerate(ended.weights())
            }
            arrays["loss"] = np.asarray(ended.losses[-1])
            file = Path(out_dir) / f"{name}.npz"
            np.savez(file, **arrays)
            rate = ended.records[-2]["samples_per_second"]
            print(f"{name}: {SAMPLES / rate * 1000:.1f} ms a step", flush=True)
    world_lib.finish(world)


if __name__ == "__main__":
    main(*sys.argv[1:])
