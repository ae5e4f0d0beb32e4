"""Trains the same few runs on this many ranks and keeps the weights: the proof of "same weights".

`equivalence.py DATA_DIR OUT_DIR MODEL NAME...`, names of SETTINGS: by the run's own code, but for
the loop around it.
"""

import dataclasses
import sys
import time
from pathlib import Path

STEPS = 40

# Shares of 10 samples are uneven on 3 and 4 ranks, counts of valid pixels everywhere.
_COMMON = {"bn_sync": "full", "global_batch_size": 10, "num_steps": STEPS, "image_size": 32}
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
# On 1 rank only: each leaves out one flag of "float64 sgd".
WITHOUT = {
    f"float64 sgd without {flag}": _F64 | _SGD | {flag: 0.0}
    for flag in ("momentum", "weight_decay", "clip_norm")
}
# A setting and the one that differs from it by a flag: on 1 rank their weights must differ.
CONTRASTS = {
    **dict.fromkeys(WITHOUT, "float64 sgd"),
    "float64 sgd accumulation": "float64 sgd",
    "float64 adam": "float64 sgd",
    "float64 adam accumulation": "float64 adam",
    "float64 adam dropout": "float64 adam",
    "float32 sgd": "float64 sgd",
    "float32 sgd accumulation": "float32 sgd",
    "float32 adam": "float32 sgd",
    "float32 sgd dropout": "float32 sgd",
}
ROUNDING = 1e-9  # more than that is no rounding of float64; float32 differs by more than that


def same(folder: Path) -> list[str]:
    """Of those CONTRASTS that FOLDER holds weights of, the ones that do not differ."""
    pairs = [[folder / f"{name}.npz" for name in pair] for pair in CONTRASTS.items()]
    there = [pair for pair in pairs if all(file.exists() for file in pair)]
    return [f"{a.stem}: {b.stem}" for a, b in there if largest_difference(a, b) <= ROUNDING]


def largest_difference(a: Path, b: Path) -> float:
    """Largest over the variables of max|a - b| / max|a|: relative, variable by variable."""
    import numpy as np

    with np.load(a) as first, np.load(b) as second:
        assert first.files == second.files
        return max(
            float(np.max(np.abs(first[n] - second[n])) / max(np.max(np.abs(first[n])), 1e-30))
            for n in first.files
        )


def _run(config, world):
    """Variables by position after all steps, the last loss, and seconds a step."""
    import tensorflow as tf
    from shared_checks import make_train_step

    from hvdkit.data.pipeline import TrainingFeed
    from hvdkit.data.sampler import Sampler
    from hvdkit.ranks import agreement
    from hvdkit.run.context import prepare
    from hvdkit.train import batch_norm

    run = prepare(config, world)
    state, model = run.state, run.model
    world.broadcast_variables(list(state.variables.values()))
    size, micro = config.global_batch_size, config.accumulation_steps
    order = Sampler(len(run.train_source), size, micro, config.seed, world.rank, world.size)
    feed = TrainingFeed(run.train_source, order, run.train_reader, num_steps=config.num_steps)
    step = make_train_step(config, world, run.task, state=state, spec=feed.spec)
    step(feed.next(), agreement.votes())
    start = time.monotonic()
    for _ in range(config.num_steps - 1):
        result = step(feed.next(), agreement.votes())
    seconds = (time.monotonic() - start) / (config.num_steps - 1)
    batch_norm.make_sync(model, config.bn_sync, weight=order.weight)()
    assert int(state.step) == config.num_steps and int(state.skipped) == 0
    assert float(tf.reduce_max(result["votes"])) == 0
    weights = {f"{i:03d}": v.value.numpy() for i, v in enumerate(model.variables)}
    return weights | {"loss": result["loss"].numpy()}, seconds


def main(data_dir: str, out_dir: str, model: str, *names: str) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "template"))
    import numpy as np

    import hvdkit.ranks.quiet  # noqa: F401
    from hvdkit.ranks import world as world_lib
    from hvdkit.settings import Settings

    usual = dataclasses.replace(Settings(), data_dir=data_dir, model=model, **_COMMON)
    world = world_lib.connect()
    world_lib.set_up(world, usual)
    for name in names:
        weights, seconds = _run(dataclasses.replace(usual, **(SETTINGS | WITHOUT)[name]), world)
        world.check_same(world_lib.hashlib.sha256(weights["000"].tobytes()).hexdigest(), name)
        if world.is_chief:
            np.savez(Path(out_dir) / f"{name}.npz", **weights)
            print(f"{name}: {seconds * 1000:.1f} ms a step", flush=True)
    world_lib.finish(world)


if __name__ == "__main__":
    main(*sys.argv[1:])
