"""The device of a rank and its threads; a stand-in for nvidia-smi lists GPUs, as there is none."""

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf
from hosts import executable
from refusals import refused

from hvdkit.ranks import devices, fingerprint, placement
from ranks import ENVIRONMENT, last_lines, launch

GPUS = tf.config.list_physical_devices("GPU")
without_gpu = pytest.mark.skipif(bool(GPUS), reason="there is a GPU")
TWO = "GPU 0: NVIDIA H100 (UUID: GPU-1)\\nGPU 1: NVIDIA H100 (UUID: GPU-2)\\n"


def nvidia_smi(folder: Path, lines: str, end: str = "") -> str:
    """PATH with a stand-in that prints the lines."""
    executable(folder / "nvidia-smi", f"printf '{lines}'\n{end}")
    return f"{folder}:{ENVIRONMENT['PATH']}"


# The program after it, whose rank 1 has another PATH.
FOR_RANK_1 = """
import os, sys
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.environ["PATH"] = sys.argv[1]
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@without_gpu
@pytest.mark.parametrize(
    "hidden, counted", [(None, 2), ("1", 2), ("", 0), ("-1", 0), ("NoDevFiles", 0)]
)
def test_gpus_that_this_process_may_use(tmp_path, monkeypatch, hidden, counted):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path, TWO))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    why = devices.why_no_gpu("auto")
    if not counted:
        assert why == ""
    else:
        assert (
            f"{os.uname().nodename} has {counted} GPU(s)" in why
            and "--device=cpu" in why
        )
        assert "DEVICE=gpu" in why
    assert devices.why_no_gpu("gpu")


@without_gpu
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "it is the build for CPUs"),
        (100, "CUDA_VISIBLE_DEVICES=7 names none that is there"),
        (802, "start nvidia-fabricmanager"),
        (803, "(cuInit gives 803)"),
    ],
)
def test_why_the_driver_gives_no_gpu(tmp_path, monkeypatch, code, words):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path, TWO))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    cuda = SimpleNamespace(cuInit=lambda _: code)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    assert words in devices.why_no_gpu("auto")


def test_a_gpu_that_tensorflow_ignores_keeps_its_number(monkeypatch):
    seen = [SimpleNamespace(name=f"/physical_device:GPU:{n}") for n in (1, 2)]
    of_driver = [(f"uuid{number}", "") for number in range(3)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: seen)
    monkeypatch.setattr(placement, "gpus_of_driver", lambda count: of_driver[:count])
    assert devices.gpus("auto") == of_driver[1:]


@pytest.mark.parametrize(
    ("capability", "is_refused"), [((5, 2), True), ((6, 0), False), ((10, 0), False)]
)
def test_a_gpu_too_old_for_tensorflow_is_named(monkeypatch, capability, is_refused):
    details = {"compute_capability": capability, "device_name": "GTX 980"}
    build = {"cuda_compute_capabilities": ["sm_100", "sm_60", "compute_90"]}
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", lambda gpu: details
    )
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)
    gpu = SimpleNamespace(name="/physical_device:GPU:0")
    if is_refused:
        words = ("GTX 980 of ", "capability 5.2", "built for 6.0 and newer")
        refused(lambda: devices._check_capability(gpu), *words)
    else:
        devices._check_capability(gpu)


@without_gpu
def test_a_driver_that_fails_is_no_host_without_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "PATH", nvidia_smi(tmp_path, "Driver/library version mismatch", "exit 18")
    )
    assert "nvidia-smi fails" in devices.why_no_gpu("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.why_no_gpu("auto") == ""


@without_gpu
def test_on_a_host_with_gpus_a_run_on_cpus_must_be_asked_for(tiny, tmp_path):
    ended = launch(1, ["train.py", *tiny], env={"PATH": nvidia_smi(tmp_path, TWO)})
    (message,) = ended.errors()
    assert ended.code == 2 and "TensorFlow sees none of them" in message, last_lines(
        ended.output
    )


@without_gpu
def test_a_driver_that_fails_on_one_host_is_that_hosts_fault(tiny, tmp_path):
    """Ranks stand for hosts here; all that fail alike use it wrongly: the test above."""
    broken = nvidia_smi(
        tmp_path, "Unable to determine the device handle for GPU", "exit 15"
    )
    ended = launch(2, ["-c", FOR_RANK_1, broken, "train.py", *tiny], "mpirun")
    (message,) = ended.errors()
    assert ended.code == 76, last_lines(ended.output)
    assert f"nvidia-smi fails on {os.uname().nodename}" in message
    assert message.endswith(f"(rank 1 on {os.uname().nodename})")


def test_a_fingerprint_on_gpus_has_what_orders_their_sums(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("HOROVOD_HIERARCHICAL_ALLREDUCE", "1")
    assert "order of sums" not in fingerprint.here()
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a GPU"])
    monkeypatch.setattr(
        tf.config.experimental,
        "get_device_details",
        lambda gpu: {"device_name": "H200"},
    )
    order = "NCCL_ALGO=Ring HOROVOD_HIERARCHICAL_ALLREDUCE=1"
    assert fingerprint.here()["order of sums"] == order
    monkeypatch.delenv("NCCL_ALGO")
    monkeypatch.delenv("HOROVOD_HIERARCHICAL_ALLREDUCE")
    assert "order of sums" not in fingerprint.here()


def test_a_fingerprint_on_cpus_has_the_threads():
    """Kernels split their sums by them, so two runs compare only where they are equal."""
    facts = fingerprint.here()
    assert facts["threads"] == str(
        tf.config.threading.get_intra_op_parallelism_threads()
    )
    assert {*facts} == {
        "device",
        "threads",
        "tensorflow",
        "keras",
        "horovod",
        "switches",
    }
