"""Keras as a run needs it, whatever keras.json and variables of another project say.

With channels first, another epsilon or another backend, a model would be another one.
Import no Keras before this; `ranks.quiet` does it.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdkit import logs, whole_files
from hvdkit.launcher import launch_rank

_DEFAULTS: dict[str, Any] = {
    "backend": "tensorflow",
    "image_data_format": "channels_last",
    "epsilon": 1e-7,
    "floatx": "float32",  # --precision sets a run's.
    "nnx_enabled": False,
}
_ON = ("true", "1")  # TensorFlow and Keras read a variable so.
# Variables that make another program of the same code, and what they must be while TensorFlow is
# imported: it would compile every function, also what a task's input does, or trace old branches.
_SWITCHES = {
    "TF_USE_LEGACY_KERAS": "0",
    "TF_FUNCTION_JIT_COMPILE_DEFAULT": "0",
    "TF_ENABLE_CONTROL_FLOW_V2": "1",
}


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """While Keras is imported, it finds no keras.json and no variable of its own.

    Raises ValueError where Keras was imported before, with another backend than TensorFlow.
    """
    if "keras" in sys.modules:
        _check_backend()
        yield
        return
    home = os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras")
    refused = _of_the_user(Path(home, "keras.json"))
    for name in _SWITCHES.keys() & os.environ.keys():
        # The variable stays set, as TensorFlow may read it again later.
        os.environ[name] = _SWITCHES[name]
    variables = {
        name: value for name, value in os.environ.items() if name.startswith("KERAS_")
    }
    for name in variables:
        del os.environ[name]
    # This is no folder, so Keras reads and writes no keras.json there.
    os.environ["KERAS_HOME"] = os.devnull
    try:
        yield
    finally:
        del os.environ["KERAS_HOME"]
        os.environ.update(variables)
    from keras.src.backend import config

    config._KERAS_DIR = home  # Keras keeps published weights there.
    _say(refused)


def _check_backend() -> None:
    backend = sys.modules["keras"].config.backend()
    if backend != "tensorflow":
        raise ValueError(
            f"Keras was imported with the backend {backend}, and this is TensorFlow's: set "
            "KERAS_BACKEND=tensorflow, or import hvdkit.ranks.quiet before keras"
        )


def _of_the_user(file: Path) -> list[str]:
    """What the user's file and variables set otherwise than a run needs it."""
    refused = []
    backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
    if backend != "tensorflow":
        refused.append(f"KERAS_BACKEND={backend}")
    for name, needed in {"KERAS_NNX_ENABLED": "0", **_SWITCHES}.items():
        value = os.environ.get(name, needed)
        if (value.lower() in _ON) != (needed in _ON):
            refused.append(f"{name}={value}")
    try:
        values = whole_files.from_json(file.read_text(), file)
    except (OSError, ValueError):
        return refused
    others = []
    if isinstance(values, dict):
        for name, default in _DEFAULTS.items():
            value = values.get(name, default)
            if value != default:
                others.append(f"{name}={value}")
    if others:
        refused.append(f"{', '.join(others)} of {file}")
    return refused


def apply() -> None:
    """Sets what Keras takes also after its import; says what was set otherwise."""
    from keras import config

    refused = []
    for name in ("image_data_format", "epsilon"):
        value = getattr(config, name)()
        if value != _DEFAULTS[name]:
            refused.append(f"{name}={value}")
            getattr(config, f"set_{name}")(_DEFAULTS[name])
    _say(refused)


def _say(refused: list[str]) -> None:
    if refused and launch_rank() == 0:
        logs.say(
            f"note: not used: {'; '.join(refused)}: Keras runs on TensorFlow here, with "
            "channels_last, epsilon 1e-07 and --precision's types; --jit compiles the step"
        )
