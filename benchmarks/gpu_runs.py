"""What gpu.py starts, each time in processes of its own.

    python benchmarks/gpu_runs.py check             devices and versions, as JSON
    python benchmarks/gpu_runs.py photos FOLDER     JPEG photographs to read
    python benchmarks/gpu_runs.py bare FLAGS        on each rank: a bare Horovod loop
    python benchmarks/gpu_runs.py same-batch FLAGS  train.py, which gets one batch at every step
    python benchmarks/gpu_runs.py train FLAGS       train.py as it is

FLAGS are train.py's. The last three leave benchmark.json in --run_dir.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "template"))
if sys.argv[1] == "photos":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
import hvdkit.ranks.quiet

# isort: split
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvdkit
import train
from hvdkit import settings as settings_lib
from hvdkit.observe import speed
from hvdkit.ranks import devices
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.world import raw
from tasks import classification

LOSS_SCALE = 2.0**10  # float16: fixed, as nothing here looks for overflow


def check() -> None:
    found = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in found]
    built = tf.sysconfig.get_build_info()
    cuda = f", CUDA {built['cuda_version']}" if "cuda_version" in built else ""
    nccl = "with NCCL" if hvd.nccl_built() else "without NCCL"
    record = {
        "gpus": [each.get("device_name", "GPU") for each in details],
        "fault": "" if found else devices.why_no_gpu("auto"),
        "versions": f"TensorFlow {tf.__version__}{cuda}, Keras {keras.__version__}, Horovod {nccl}",
    }
    if len(found) > 1 and not hvd.nccl_built():
        record["fault"] = "Horovod was built without NCCL: set up again with DEVICE=gpu"
    print(json.dumps(record))


def photos(folder: str) -> None:
    import input as input_benchmark

    input_benchmark.make("photos", Path(folder))


def bare(flags: list[str]) -> None:
    """The plainest loop: forward, backward, DistributedGradientTape, Keras's SGD; no checks."""
    world = world_lib.connect()
    config = settings_lib.parse(["gpu_runs.py", *flags]).for_ranks(world.size)
    world_lib.set_up(world, config)
    world_lib.set_numbers(config)
    model = classification.Task(config).build_model()
    optimizer = keras.optimizers.SGD(config.base_lr, momentum=config.momentum)
    optimizer.build(model.trainable_variables)
    values = [raw(v) for v in model.trainable_variables]
    hvd.broadcast_variables([raw(v) for v in [*model.variables, *optimizer.variables]], 0)
    scale = LOSS_SCALE if config.precision == "float16" else 1.0
    samples = config.global_batch_size // world.size
    size = [samples, config.image_size, config.image_size, 3]
    image = tf.cast(tf.random.uniform(size, 0, 256, tf.int32), tf.uint8)
    label = tf.random.uniform([samples], 0, config.num_classes, tf.int32)

    @tf.function(autograph=False)
    def step(image: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model({"image": image}, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
            loss = tf.reduce_mean(losses)
            scaled = loss * scale
        grads = hvd.DistributedGradientTape(tape).gradient(scaled, values)
        if scale != 1:
            grads = [g / scale for g in grads]
        optimizer.apply(grads, model.trainable_variables)
        return loss

    ends, clocks = speed.window_ends(0, config.num_steps), []
    for number in range(1, config.num_steps + 1):
        loss = step(image, label)
        if number in ends:
            float(loss)
            clocks.append(time.perf_counter())
    rates = (samples * ends.step / np.diff(clocks)).tolist()
    total = np.sum(world.gather_objects(rates, "rates"), axis=0)
    if world.is_chief:
        path = Path(config.run_dir) / "benchmark.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"samples_per_second": speed.spread(total)}))
    world_lib.finish(world)


class SameBatch(hvdkit.run.loop.TrainingFeed):
    """The first batch at every step, on the device: no input."""

    _batch: Any = None

    def next(self) -> Any:
        if self._batch is None:
            self._batch = tf.nest.map_structure(tf.identity, super().next())
        return self._batch


def main() -> int:
    kind, *words = sys.argv[1:]
    if kind in ("same-batch", "train"):
        if kind == "same-batch":
            hvdkit.run.loop.TrainingFeed = SameBatch
        return hvdkit.main(train.train, train.Settings, ["train.py", *words])
    {"check": check, "photos": lambda: photos(*words), "bare": lambda: bare(words)}[kind]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
