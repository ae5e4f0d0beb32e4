"""--jit_cache: a second start does not compile again what XLA compiled before.

XLA's own cache tells programs apart by what they compute, not by the machine or the switches of its
compiler: each kind of machine, each TensorFlow and each set of switches has a folder of its own.
"""

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

from hvdkit import launcher, whole_files
from hvdkit.logs import refuse
from hvdkit.ranks import fingerprint
from hvdkit.stop import NOT_NOW, WRONG_USE, passes

_GPU = [
    "nvidia-smi",
    "--query-gpu=name,compute_cap,driver_version",
    "--format=csv,noheader",
]
_PACKAGES = ("tensorflow", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
# What TensorFlow says where a kept program is damaged.
_DAMAGE = (
    "Failed to parse serialized",
    "Read less bytes than requested",
    "Serialized cache key does not match",
    "Compute capability mismatch",
)

_folder = ""  # where XLA keeps this process's programs


def use(cache_dir: str, *, deterministic: bool) -> None:
    """Has XLA keep its programs in a folder of `cache_dir`; call it before TensorFlow starts.

    `deterministic`: whether the run is, as its programs may be others.
    The process ends with exit code 2 where another user could put programs there, and with 76 where
    the disk or the driver of this host fails.
    """
    if re.search(r"\s", cache_dir):
        refuse(f"--jit_cache={cache_dir!r}: TensorFlow takes no path with a blank here")
    try:
        key = f"{_machine()}\ndeterministic {deterministic}"
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        folder = Path(cache_dir).absolute() / name
        whole_files.make_private(folder, "--jit_cache")
    except ValueError as error:
        refuse(str(error))
    except (OSError, subprocess.SubprocessError) as error:
        is_of_host = passes(error) or isinstance(error, subprocess.SubprocessError)
        text = f"--jit_cache={cache_dir} on {os.uname().nodename}: {error}"
        refuse(text, NOT_NOW if is_of_host else WRONG_USE)
    global _folder
    _folder = str(folder)
    flags = f"{os.environ.get('TF_XLA_FLAGS', '')} {fingerprint.XLA_CACHE}{folder}"
    os.environ["TF_XLA_FLAGS"] = flags.strip()


def fault(error: str) -> str:
    """What is wrong with the cache where a step failed with `error`; "" where nothing is.

    Programs of which one is damaged are deleted.
    """
    if not _folder:
        return ""
    if _folder in error:
        return f"the programs of --jit_cache cannot be kept: {error}"
    if not any(words in error for words in _DAMAGE):
        return ""
    shutil.rmtree(_folder, ignore_errors=True)
    return (
        f"a program of --jit_cache was damaged ({error}): {_folder} is deleted, and a new start "
        "compiles its programs anew"
    )


def _machine() -> str:
    """What programs are compiled by, for and with."""
    parts = [fingerprint.cpu(), fingerprint.switches(), *fingerprint.flags_of_cpu()]
    for package in _PACKAGES:
        for distribution in importlib.metadata.distributions(name=package):
            parts.append(f"{package} {distribution.version}")
    if shutil.which("nvidia-smi"):
        listing = subprocess.run(
            _GPU, stdout=subprocess.PIPE, text=True, timeout=60, check=False
        )
        kinds = sorted(set(listing.stdout.splitlines()))
        parts += kinds
        if len(kinds) > 1:
            # Which of them this rank gets is chosen later, by these.
            parts.append(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
            parts.append(str(launcher.launch_local_rank()))
    return "\n".join(parts)
