"""Flags of a run of a few seconds."""

# A run of a few seconds; flags after these win.
TINY_FLAGS = (
    "--model=tiny",
    "--image_size=32",
    "--eval_crop=32",
    "--global_batch_size=7",
    "--eval_batch_size=4",
    "--num_steps=4",
    "--warmup_steps=0",
    "--log_every=1",
    "--eval_every=0",
    "--checkpoint_every=0",
)
