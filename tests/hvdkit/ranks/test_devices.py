"""A run on CPUs must be meant: a host with GPUs that TensorFlow does not see is refused.

No GPU here: a stand-in for nvidia-smi lists them, and this TensorFlow is the build for CPUs.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tensorflow as tf

from hvdkit.ranks import devices
from hvdkit.ranks import world as world_lib
from ranks import ENVIRONMENT, last_lines, launch

pytestmark = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU"
)


def nvidia_smi(folder: Path, lines: str) -> str:
    """PATH with a stand-in that prints the lines."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    program.chmod(0o755)
    return f"{folder}:{ENVIRONMENT['PATH']}"


TWO = "GPU 0: NVIDIA H100 (UUID: GPU-1)\\nGPU 1: NVIDIA H100 (UUID: GPU-2)\\n"


@pytest.mark.parametrize(
    "hidden, counted",
    [(None, 2), ("1", 1), ("0,-1,1", 1), ("", 0), ("-1", 0), ("NoDevFiles", 0)],
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
        assert f"{os.uname().nodename} has {counted} GPU(s)" in why and "--device=cpu" in why
        assert tf.test.is_built_with_cuda() or "DEVICE=gpu" in why
    assert devices.why_no_gpu("gpu")


def test_a_driver_that_fails_is_no_host_without_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path, "Driver/library version mismatch"))
    with open(tmp_path / "nvidia-smi", "a") as program:
        program.write("exit 18\n")
    assert "nvidia-smi fails" in devices.why_no_gpu("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.why_no_gpu("auto") == ""


@pytest.mark.parametrize(
    ("gpus", "nccl", "said"),
    [
        (["gpu"], True, "one GPU each, NCCL, set up over "),
        (["gpu"], False, "one GPU each, "),
        ([], True, "CPU thread(s) each, "),
    ],
)
def test_what_carries_gradients_is_said(monkeypatch, gpus, nccl, said):
    """NCCL where this Horovod has it and there is a GPU to send from."""
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    monkeypatch.setattr(world_lib.hvd, "nccl_built", lambda: nccl)
    monkeypatch.setattr(world_lib.hvd, "mpi_enabled", lambda: False)
    assert world_lib.describe(world_lib.World(0, 1, 0, 1)).endswith(f"{said}Gloo")


def test_training_on_two_ranks(tiny, tmp_path):
    env = {"PATH": nvidia_smi(tmp_path, TWO)}
    command = ["train.py", *tiny, "--num_steps=1"]
    refused = launch(2, command, env=env)
    assert refused.code == 2, last_lines(refused.output)
    (said,) = refused.errors()
    assert "TensorFlow sees none of them" in said
    ended = launch(2, [*command, "--device=cpu"], env=env)
    assert ended.code == 0 and "CPU thread(s) each" in ended.output, last_lines(ended.output)
    (said,) = launch(1, [*command, "--device=gpu"]).errors()
    assert "--device=gpu, but" in said and "nvidia-smi" in said
