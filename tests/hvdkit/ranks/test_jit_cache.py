"""--jit_cache: programs of XLA are kept for the next start, in a folder that nobody else may
use."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import executable

from hvdkit.ranks import jit_cache
from ranks import PROJECT

PROGRAM = """
import json, os, sys
import hvdkit
from settings import Settings

hvdkit.check_flags(Settings, ["train.py", "--jit", f"--jit_cache={sys.argv[1]}"])

import tensorflow as tf
from hvdkit.ranks import fingerprint, jit_cache

double = tf.function(lambda x: x @ x, jit_compile=True)
try:
    double(tf.ones([2, 2]))
except tf.errors.OpError as error:
    sys.exit(jit_cache.fault(error.message))
print(json.dumps(fingerprint.here()["switches"]))
"""


def test_a_cache_that_is_not_ours_stays(tmp_path, monkeypatch):
    flag = f"--tf_xla_persistent_cache_directory={tmp_path}"
    monkeypatch.setenv("TF_XLA_FLAGS", flag)
    assert jit_cache.fault("Failed to parse serialized program") == ""
    assert tmp_path.exists()


def test_a_program_of_another_gpu_is_deleted(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(jit_cache, "_folder", str(cache))
    error = "INTERNAL: RET_CHECK failure Compute capability mismatch; expected {9.0}"
    assert "is deleted" in jit_cache.fault(error) and not cache.exists()


@pytest.mark.parametrize(
    ("cards", "is_other"),
    [
        (["RTX 3060, 8.6, 580", "GTX 1650, 7.5, 580"], True),
        (["RTX 3060, 8.6, 580", "RTX 3060, 8.6, 580"], False),
    ],
)
def test_each_kind_of_gpu_of_a_host_has_its_own_programs(
    cards, is_other, tmp_path, monkeypatch
):
    lines = "\\n".join(cards)
    executable(tmp_path / "nvidia-smi", f"printf '{lines}'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machines = {jit_cache._machine()}
    for shown in ("0", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        machines.add(jit_cache._machine())
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    machines.add(jit_cache._machine())
    assert len(machines) == (4 if is_other else 1)


def start(cache: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process that compiles one program."""
    env = {name: value for name, value in os.environ.items() if name != "TF_XLA_FLAGS"}
    env |= variables
    command = [sys.executable, "-c", PROGRAM, str(cache)]
    return subprocess.run(
        command,
        cwd=PROJECT,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def files_of(cache: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in cache.rglob("*.pb")}


def test_a_program_is_compiled_once(tmp_path):
    cache = tmp_path / "new" / "cache"
    first = start(cache)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout) == "none", "where programs are kept changes no bit"
    kept = files_of(cache)
    [folder] = cache.iterdir()
    assert len(kept) == 1 and folder.stat().st_mode & 0o777 == 0o700

    again = start(cache)
    assert again.returncode == 0, again.stderr
    assert files_of(cache) == kept

    # XLA's switches change programs, and its own names for them do not have the switches.
    other = start(cache, XLA_FLAGS="--xla_cpu_enable_fast_math=true")
    assert other.returncode == 0, other.stderr
    assert len(files_of(cache)) == 2

    [program] = folder.glob("*.pb")
    program.write_bytes(program.read_bytes()[:100])
    damaged = start(cache)
    assert damaged.returncode == 1
    assert f"{folder} is deleted" in damaged.stderr
    assert start(cache).returncode == 0


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    ended = start(tmp_path / "file")
    assert ended.returncode == 2 and "--jit_cache=" in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("open", 0o777, "may be changed by other users"),
        ("a blank", 0o700, "no path with a blank"),
    ],
)
def test_an_unsafe_or_unusable_folder_is_refused(tmp_path, name, mode, words):
    cache = tmp_path / name
    cache.mkdir()
    cache.chmod(mode)
    ended = start(cache)
    assert (
        ended.returncode == 2
        and words in ended.stderr
        and "Traceback" not in ended.stderr
    )
    assert "--jit_cache=" in ended.stderr and not files_of(cache)
