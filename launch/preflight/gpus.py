"""GPUs as the driver shows them, and as TensorFlow does. Whether they are well: ask DCGM."""

import os
from typing import Any


def of_the_driver() -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    """How many are "shown", their "kinds" and "driver"; what is wrong with the driver."""
    found = {"shown": 0, "kinds": "none", "driver": "none"}
    try:
        import pynvml
    except ImportError:  # nvidia-ml-py is not installed: TensorFlow's view is all there is
        return found, []
    try:
        pynvml.nvmlInit()
        every = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        names = [pynvml.nvmlDeviceGetName(one) for one in every]
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError_LibraryNotFound:
        return found, []
    except pynvml.NVMLError as error:
        return found, [(f"the GPU driver fails: {error}", "look at nvidia-smi and dmesg", "wrong")]
    # What CUDA_VISIBLE_DEVICES hides is not idle.
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1")
    shown = 0 if hidden else len(names)
    return found | {"shown": shown, "kinds": ", ".join(sorted(set(names)))}, []


def of_tensorflow() -> dict[str, Any]:
    """What TensorFlow sees (nothing is laid out on a GPU by that), and Horovod was built for."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    count = len(tf.config.list_physical_devices("GPU"))
    return {"seen": count, "cuda": tf.test.is_built_with_cuda(), "nccl": bool(hvd.nccl_built())}


def fault(its: dict[str, Any], local_rank: int, wanted: bool) -> tuple[str, str, str] | None:
    """Of a rank that training would refuse, or that would compute on a CPU beside an idle GPU.

    `its`: what the functions above returned; `wanted`: --device=gpu, or another rank has one.
    """
    count, shown = its["seen"], its["shown"]
    if not count and (shown or wanted):
        what = f"TensorFlow sees no GPU, the driver shows {shown}"
        todo = "look at the driver, CUDA_VISIBLE_DEVICES and what TensorFlow says at its import"
        if not its["cuda"]:
            what += ": it is the CPU build"
            todo = "install the GPU build there (make setup DEVICE=gpu)"
        return what, f"{todo}; to train on CPUs: --device=cpu", "wrong"
    if count and local_rank >= count:
        what = f"training needs GPU number {local_rank} there, counted from 0, of {count} visible"
        todo = "start at most one rank a GPU, and let each see all GPUs of its host (Slurm: "
        todo += "--gpus-per-node, not --gpus-per-task; see CUDA_VISIBLE_DEVICES)"
        return what, todo, "fatal"
    if count and not its["nccl"]:
        what = "Horovod is built without NCCL: gradients would go through the hosts' memory"
        return what, "build it for GPUs: make setup DEVICE=gpu", "note"
    return None
