"""Keras as a run needs it, whatever keras.json and variables of another project say.

With channels first, another epsilon or another backend, a model would be another one.
Import no Keras before this; `ranks.quiet` does it.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdkit import logs
from hvdkit.stop import launch_rank

_DEFAULTS: dict[str, Any] = {
    "backend": "tensorflow",
    "image_data_format": "channels_last",
    "epsilon": 1e-7,
    "floatx": "float32",  # of a run: --precision
    "nnx_enabled": False,
}
_ON = ("true", "True", "1")  # as TensorFlow and Keras read a variable


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
    if os.environ.get("TF_USE_LEGACY_KERAS") in _ON:
        os.environ["TF_USE_LEGACY_KERAS"] = "0"  # TensorFlow reads it again later
    variables = {name: value for name, value in os.environ.items() if name.startswith("KERAS_")}
    with tempfile.TemporaryDirectory() as folder:
        for name in variables:
            del os.environ[name]
        os.environ["KERAS_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["KERAS_HOME"]
            os.environ.update(variables)
    from keras.src.backend import config

    config._KERAS_DIR = home  # where published weights are kept
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
    for name in ("KERAS_NNX_ENABLED", "TF_USE_LEGACY_KERAS"):
        if os.environ.get(name) in _ON:
            refused.append(f"{name}={os.environ[name]}")
    try:
        values = json.loads(file.read_text())
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
            "channels_last, epsilon 1e-07 and --precision's types"
        )
