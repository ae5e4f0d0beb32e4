"""The device of a rank: a GPU of its own, or its share of the cores, where CPUs are meant."""

import ctypes
import os
import re
import subprocess

import tensorflow as tf

from hvdkit.ranks import placement

# What CUDA's cuInit gives.
_NO_DEVICE = 100
_NOT_READY = 802


def gpus(device: str) -> list[placement.Gpu]:
    """The GPUs that TensorFlow sees, in its order; none where CPUs are meant (--device)."""
    if device == "cpu":
        return []
    # A GPU that TensorFlow ignores has a number too.
    seen = tf.config.list_physical_devices("GPU")
    numbers = [int(gpu.name.rpartition(":")[2]) for gpu in seen]
    of_driver = placement.gpus_of_driver(max(numbers, default=-1) + 1)
    return [of_driver[number] for number in numbers]


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
        _check_capability(gpu_of_rank)
        tf.config.set_visible_devices(gpu_of_rank, "GPU")
        tf.config.experimental.set_memory_growth(gpu_of_rank, True)
        # TensorFlow's own choice is cuDNN's older batch norm, with which a step takes 1.6 as long.
        os.environ.setdefault("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", "1")
        return
    elif reason := why_no_gpu(device):
        raise ValueError(reason)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def _check_capability(gpu: tf.config.PhysicalDevice) -> None:
    """Raises ValueError for a GPU that is older than all that TensorFlow was built for."""
    details = tf.config.experimental.get_device_details(gpu)
    built_for = []
    # They are named sm_60, or compute_90.
    for name in tf.sysconfig.get_build_info().get("cuda_compute_capabilities", ()):
        if match := re.search(r"_(\d+)(\d)", name):
            built_for.append((int(match[1]), int(match[2])))
    capability = details.get("compute_capability")
    if capability and built_for and capability < min(built_for):
        raise ValueError(
            f"{details.get('device_name', gpu.name)} of {os.uname().nodename} has compute "
            f"capability {capability[0]}.{capability[1]}, and this TensorFlow is built for "
            f"{min(built_for)[0]}.{min(built_for)[1]} and newer: hide that GPU by "
            "CUDA_VISIBLE_DEVICES, or give --device=cpu"
        )


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
    reason = _fault_of_driver() or (
        "it is the build for CPUs (set up again with DEVICE=gpu, which tests that), or it does "
        "not find CUDA's libraries"
    )
    return (
        f"{host} has {count} GPU(s) and TensorFlow sees none of them: {reason}. "
        "To train on CPUs all the same: --device=cpu"
    )


def _fault_of_driver() -> str:
    """Why the driver gives this process no GPU; "" where it does, or cannot be asked."""
    try:
        code = ctypes.CDLL("libcuda.so.1").cuInit(0)
    except OSError:
        return ""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if code == _NO_DEVICE and shown:
        return f"CUDA_VISIBLE_DEVICES={shown} names none that is there"
    if code == _NOT_READY:
        return (
            f"its driver is not ready (cuInit gives {code}): start nvidia-fabricmanager"
        )
    return f"its driver does not start (cuInit gives {code})" if code else ""
