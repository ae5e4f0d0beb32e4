"""A few steps of a small model under whatever flags: what Horovod's timeline is taken from.

`knobs.py [--flag=value ...]`, on real ranks. 13 gradients, 7 of them of at most 200 bytes; the
embedding's is sparse and gathered, unless gradients are grouped.
"""

import sys
import time
from pathlib import Path


def main(argv: list[str]) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "template"))
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    import keras
    import tensorflow as tf
    from shared_checks import make_train_step

    from hvdkit import settings as settings_lib
    from hvdkit.ranks import agreement
    from hvdkit.ranks import world as world_lib
    from hvdkit.train import optimizer, reduction
    from hvdkit.train.state import State

    config = settings_lib.parse(argv)
    world = world_lib.connect(reduction.environment(config))
    world_lib.set_up(world, config)
    world_lib.set_numbers(config)
    ids = keras.Input((3,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(50, 4)(ids))
    for width in (40, 40, 40, 40, 4):
        x = keras.layers.Dense(width)(x)
    model = keras.Model(ids, keras.layers.Dense(1)(x))

    class Task:
        def loss(self, outputs, targets):
            return tf.square(outputs - targets), tf.ones_like(outputs)

    micro = config.accumulation_steps
    spec = {
        "inputs": tf.TensorSpec([micro, 2, 3], tf.int32),
        "targets": tf.TensorSpec([micro, 2, 1], tf.float32),
    }
    state = State(model, optimizer.build(config, model), config.precision)
    world.broadcast_variables(list(state.variables.values()))
    step = make_train_step(config, world, Task(), state=state, spec=spec)
    for number in range(config.num_steps):
        inputs = tf.reshape(tf.range(micro * 6) + number + world.rank, [micro, 2, 3]) % 50
        batch = {"inputs": inputs, "targets": tf.ones([micro, 2, 1])}
        step(batch, agreement.votes())
    time.sleep(1)  # Horovod's shutdown loses what the timeline's writer has not written
    world_lib.finish(world)


if __name__ == "__main__":
    main(sys.argv)
