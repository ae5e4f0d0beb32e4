"""GPUs of this host that TensorFlow does not see: a run on CPUs must be meant."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import tensorflow as tf


def why_no_gpu(device: str) -> str:
    """Where TensorFlow sees no GPU: why the run cannot go on without, "" where it can.

    Args:
      device: --device, auto or gpu.
    """
    host = os.uname().nodename
    try:
        count = _granted()
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi fails on {host} ({error}): look at its driver, or give --device=cpu"
    if device == "auto" and not count:
        return ""
    if not count:
        return f"--device=gpu, but {host} has no GPU that this process may use (nvidia-smi)"
    if tf.test.is_built_with_cuda():
        why = "its CUDA libraries cannot be loaded; TensorFlow's own lines above name them"
    else:
        why = "it is the build for CPUs: set up again with DEVICE=gpu"
    return (
        f"{host} has {count} GPU(s) and TensorFlow sees none of them: {why}. To train on CPUs all "
        "the same: --device=cpu"
    )


def _granted() -> int:
    """GPUs that the driver shows, less those that CUDA_VISIBLE_DEVICES hides."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen.strip() in ("", "-1", "NoDevFiles"):
        return 0
    if not shutil.which("nvidia-smi"):
        return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True, timeout=60)
    if listed.returncode == 6:  # its manual: nothing was found
        return 0
    listed.check_returncode()
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    if chosen is None:
        return count
    # CUDA takes those before the first that is none.
    names = [name.strip() for name in chosen.split(",")]
    none = next((i for i, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
    return min(count, none)
