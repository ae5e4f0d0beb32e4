"""The device of a rank: a GPU of its own, or its share of the cores, where CPUs are meant."""

import os
import subprocess

import tensorflow as tf

from hvdkit.ranks import placement


def gpus(device: str) -> list[placement.Gpu]:
    """The GPUs that TensorFlow sees, in its order; none where CPUs are meant (--device)."""
    if device == "cpu":
        return []
    return placement.gpus_of_driver(len(tf.config.list_physical_devices("GPU")))


def choose(device: str, gpu: int, threads: int, *, must: bool = False) -> None:
    """Gives this process one GPU, by its number, or so many threads of CPUs (--device).

    Raises ValueError where TensorFlow has started already, as in a notebook, with other GPUs; with
    other threads where it `must` have these.
    """
    try:
        _choose(device, gpu, threads)
    except RuntimeError:
        used = len(tf.config.get_visible_devices("GPU"))
        if used != (gpu >= 0):
            raise ValueError(
                f"TensorFlow has started with {used} GPUs: start it in a new process (restart the "
                "notebook's kernel), before TensorFlow"
            ) from None
        if must:
            raise ValueError(
                f"--cpu_threads={threads} (--virtual_ranks sets it): TensorFlow has started "
                "without it: start it in a new process (restart the notebook's kernel), before "
                "TensorFlow"
            ) from None


def _choose(device: str, gpu: int, threads: int) -> None:
    if device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    elif gpu >= 0:
        gpu_of_rank = tf.config.list_physical_devices("GPU")[gpu]
        tf.config.set_visible_devices(gpu_of_rank, "GPU")
        tf.config.experimental.set_memory_growth(gpu_of_rank, True)
        # TensorFlow's own choice is cuDNN's older batch norm, with which a step takes 1.6 as long.
        os.environ.setdefault("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", "1")
        return
    elif reason := why_no_gpu(device):
        raise ValueError(reason)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def threads() -> int:
    """CPU threads of an operation, once they were chosen; 0 before."""
    return tf.config.threading.get_intra_op_parallelism_threads()


def why_no_gpu(device: str) -> str:
    """Why --device cannot go on where TensorFlow sees no GPU; "" where it can."""
    host = os.uname().nodename
    try:
        count = placement.granted()
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi fails on {host} ({error}): look at its driver, or give --device=cpu"
    if not count and device == "auto":
        return ""
    if not count:
        return f"--device=gpu, but {host} has no GPU that this process may use (nvidia-smi)"
    return (
        f"{host} has {count} GPU(s) and TensorFlow sees none of them: it is the build for CPUs "
        "(set up again with DEVICE=gpu, which tests that), or it does not find CUDA's libraries. "
        "To train on CPUs all the same: --device=cpu"
    )
