"""What the bits of a run depend on besides its settings: the device, and who compiled the code.

Two runs that differ here may round differently, so comparing their bits tells nothing.
"""

import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit import whole_files

# Choose other kernels for the same operations; newest last.
_INSTRUCTIONS = ("sse4_2", "avx", "avx2", "avx512f", "avx512_bf16", "amx_bf16")
_SWITCHES = (
    *("TF_ENABLE_ONEDNN_OPTS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "TF_SET_ONEDNN_FPMATH_MODE"),
    *("NVIDIA_TF32_OVERRIDE", "XLA_FLAGS", "TF_XLA_FLAGS"),
    "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT",
)

PACKAGES = ("tensorflow", "keras", "horovod")  # of `here`: ranks must have the same


def here() -> dict[str, str]:
    """Of this process, by name; call it after the device and its threads were chosen."""
    import tensorflow as tf  # here: who compares two runs needs none

    gpus = tf.config.get_visible_devices("GPU")
    details = tf.config.experimental.get_device_details
    found = {"device": _gpu(details(gpus[0])) if gpus else _cpu()}
    if not gpus:
        found["threads"] = str(tf.config.threading.get_intra_op_parallelism_threads())
    build = tf.sysconfig.get_build_info()
    parts = [tf.__version__, tf.version.GIT_VERSION, tf.version.COMPILER_VERSION]
    parts += [f"{k} {build[f'{k}_version']}" for k in ("cuda", "cudnn") if f"{k}_version" in build]
    found["tensorflow"] = ", ".join(parts)
    found |= {name: importlib.metadata.version(name) for name in ("keras", "horovod")}
    switches = [f"{name}={os.environ[name]}" for name in _SWITCHES if name in os.environ]
    return found | {"switches": " ".join(switches) or "none"}


def code(project: Path, engine: Path) -> dict[str, str]:
    """SHA-256 of each Python file of the project and of the engine, by its name in them.

    Of the project, what a run imports: its own files and those of its packages.
    """
    packages = [inner.parent for inner in project.glob("*/__init__.py")]
    files = [*project.glob("*.py"), *(file for inner in packages for file in inner.rglob("*.py"))]
    # An editor's lock is a link that leads nowhere, .#train.py.
    names = {str(file.relative_to(project)): file for file in files if file.is_file()}
    names |= {str(f.relative_to(engine.parent)): f for f in engine.rglob("*.py") if f.is_file()}
    return {name: whole_files.sha256(file) for name, file in names.items()}


def of_all(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Of a run: where its ranks differ, all values."""
    names = dict.fromkeys(name for found in ranks for name in found)
    values = {name: {found.get(name, "none") for found in ranks} for name in names}
    return {name: " and ".join(sorted(found)) for name, found in values.items()}


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """In words, what is not the same."""
    names = dict.fromkeys([*one, *other])
    pairs = {name: (one.get(name, "not known"), other.get(name, "not known")) for name in names}
    return [f"{name} ({a}; {b})" for name, (a, b) in pairs.items() if a != b]


def _gpu(details: Mapping[str, Any]) -> str:
    capability = ".".join(map(str, details.get("compute_capability", ())))
    return f"{details.get('device_name', 'GPU')}, compute capability {capability or 'not known'}"


def _cpu() -> str:
    text = Path("/proc/cpuinfo").read_text()
    named = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = set(" ".join(re.findall(r"^flags\s*: (.*)$", text, re.MULTILINE)).split())
    newest = [name for name in _INSTRUCTIONS if name in flags]
    return f"{named[1].strip() if named else os.uname().machine}, {(newest or ['basic'])[-1]}"
