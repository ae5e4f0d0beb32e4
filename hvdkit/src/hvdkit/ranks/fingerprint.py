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

# Each of these chooses other kernels for the same operations; the newest is the last.
_INSTRUCTIONS = (
    *("sse4_2", "avx", "avx2", "avx512f", "avx512_bf16", "amx_bf16"),
    *("asimd", "asimdhp", "sve", "sve2", "bf16", "i8mm"),  # of ARM
)
_NOT_IMPORTED = ("tests", "notebooks", "benchmarks", "docs", "datasets", "runs")
_SWITCHES = (
    "TF_ENABLE_ONEDNN_OPTS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "TF_SET_ONEDNN_FPMATH_MODE",
    "NVIDIA_TF32_OVERRIDE",
    "XLA_FLAGS",
    "TF_XLA_FLAGS",
    "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT",
)

# On GPUs these change the order in which NCCL and Horovod add gradients.
_ORDERS_OF_SUMS = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "NCCL_COLLNET_ENABLE",
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_HIERARCHICAL_ALLGATHER",
)

XLA_CACHE = "--tf_xla_persistent_cache_directory="  # in TF_XLA_FLAGS
PACKAGES = ("tensorflow", "keras", "horovod")  # All ranks must have the same ones.


def here() -> dict[str, str]:
    """The fingerprint of this process, by name; call it after device and threads were chosen."""
    import tensorflow as tf  # The import stands here as comparing two runs needs none.

    fingerprint = {}
    gpus = tf.config.get_visible_devices("GPU")
    if gpus:
        fingerprint["device"] = _gpu(tf.config.experimental.get_device_details(gpus[0]))
        if order := _as_set(_ORDERS_OF_SUMS):
            fingerprint["order of sums"] = order
    else:
        fingerprint["device"] = cpu()
        fingerprint["threads"] = str(
            tf.config.threading.get_intra_op_parallelism_threads()
        )
    build = tf.sysconfig.get_build_info()
    versions = [tf.__version__, tf.version.GIT_VERSION, tf.version.COMPILER_VERSION]
    for name in ("cuda", "cudnn"):
        if f"{name}_version" in build:
            versions.append(f"{name} {build[f'{name}_version']}")
    fingerprint["tensorflow"] = ", ".join(versions)
    for name in ("keras", "horovod"):
        fingerprint[name] = importlib.metadata.version(name)
    fingerprint["switches"] = switches()
    options = tf.config.optimizer.get_experimental_options()
    if not options.get("arithmetic_optimization", True):
        fingerprint["arithmetic"] = "as written"
    return fingerprint


def switches() -> str:
    """The variables that change how TensorFlow computes, as they are set; "none" without any."""
    return _as_set(_SWITCHES) or "none"


def _as_set(names: Sequence[str]) -> str:
    """Those of these variables that are set, with their values."""
    words = []
    for name in names:
        # XLA's cache changes no bit, and may be elsewhere on each host.
        value = re.sub(rf"{XLA_CACHE}\S*", "", os.environ.get(name, "")).strip()
        if value:
            words.append(f"{name}={value}")
    return " ".join(words)


def code(project: Path, engine: Path) -> dict[str, str]:
    """SHA-256 of each Python file of the project and of the engine, by its name in them.

    The project's files are those that a run may import.
    """
    files = project_files(project)
    named = [(str(file.relative_to(project)), file) for file in files]
    named += [
        (str(file.relative_to(engine.parent)), file) for file in engine.rglob("*.py")
    ]
    # An editor's lock is a link that leads nowhere, .#train.py.
    return {name: whole_files.sha256(file) for name, file in named if file.is_file()}


def project_files(project: Path) -> list[Path]:
    """Python files of a project, and of folders in it from which a run may import.

    Those need no __init__.py, but hold Python files themselves.
    """
    files = _python_files(project)
    for folder in _folders(project):
        is_package = (folder / "__init__.py").is_file()
        if is_package or folder.name not in _NOT_IMPORTED:
            files += _files_below(folder)
    return files


def _files_below(folder: Path, above: tuple[str, ...] = ()) -> list[Path]:
    """`above`: real paths of the folders that hold this one, as links may lead in a circle."""
    real = os.path.realpath(folder)
    if real in above:
        return []
    files = _python_files(folder)
    for inner in _folders(folder) if files else []:
        files += _files_below(inner, (*above, real))
    return files


def _python_files(folder: Path) -> list[Path]:
    return [folder / name for name in _names(folder) if name.endswith(".py")]


def _folders(folder: Path) -> list[Path]:
    """Those whose names Python can import."""
    named = [folder / name for name in _names(folder) if name.isidentifier()]
    return [path for path in named if path.is_dir()]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def of_all(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The fingerprint of a run: where its ranks differ, all values."""
    merged: dict[str, str] = {}
    for fingerprint in ranks:
        merged |= fingerprint
    for name in merged:
        values = {fingerprint.get(name, "none") for fingerprint in ranks}
        merged[name] = " and ".join(sorted(values))
    return merged


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Describes each difference."""
    texts = []
    for name in {**one, **other}:
        before = one.get(name, "not known")
        after = other.get(name, "not known")
        if before != after:
            texts.append(f"{name} ({before}; {after})")
    return texts


def _gpu(details: Mapping[str, Any]) -> str:
    numbers = [str(number) for number in details.get("compute_capability", ())]
    capability = ".".join(numbers) or "not known"
    return f"{details.get('device_name', 'GPU')}, compute capability {capability}"


def cpu() -> str:
    """The model of this host's CPU, and the newest of its instructions that kernels choose by."""
    text = Path("/proc/cpuinfo").read_text()
    match = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    model = match[1].strip() if match else _model_of_arm(text)
    flags = set(flags_of_cpu())
    instructions = ["basic", *(name for name in _INSTRUCTIONS if name in flags)]
    return f"{model}, {instructions[-1]}"


def flags_of_cpu() -> list[str]:
    """The instructions that this host's CPU has, by the kernel's names; sorted."""
    text = Path("/proc/cpuinfo").read_text()
    lines = re.findall(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    return sorted(set(" ".join(lines).split()))


def _model_of_arm(cpuinfo: str) -> str:
    numbers = re.findall(r"^CPU (?:implementer|part)\s*: (\S+)$", cpuinfo, re.MULTILINE)
    return " ".join([os.uname().machine, *sorted(set(numbers))])
