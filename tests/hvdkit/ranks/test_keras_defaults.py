"""Keras is what a run needs, whatever keras.json and variables of another project say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import hvdkit
from hvdkit.models import resnet
from hvdkit.ranks import keras_defaults
from hvdkit.ranks import world as world_lib
from hvdkit.settings import Settings

SHOW = """
import os
import hvdkit.ranks.quiet
import keras
import tensorflow as tf
from keras.src.backend import config
from hvdkit.models import resnet
model = resnet.resnet50_keras(32, 10, 0.0)
print(model.count_params(), keras.config.backend(), keras.config.image_data_format())
print(keras.config.epsilon(), keras.config.floatx(), config.keras_home(), tf.keras.__name__)
print(os.environ.get("KERAS_BACKEND"))
text = tf.function(lambda: tf.strings.format("{}", [tf.constant(1)]))()  # XLA compiles none of it
"""
OTHERS = {"image_data_format": "channels_first", "epsilon": 0.1, "floatx": "float64"}
OTHERS |= {"backend": "jax", "nnx_enabled": True}


def shown(home: Path, text: str, **env: str) -> list[str]:
    (home / ".keras").mkdir()
    (home / ".keras" / "keras.json").write_text(text)
    env = {"HOME": str(home), "PYTHONPATH": str(Path(hvdkit.__file__).parents[1])} | env
    ended = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={"PATH": os.environ["PATH"]} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.parametrize(
    ("text", "env", "named"),
    [
        (
            json.dumps(OTHERS),
            {},
            ["image_data_format=channels_first", "epsilon=0.1", "backend=jax"],
        ),
        # Keras itself ends with a trace there.
        (
            json.dumps({"epsilon": 1, "floatx": "bfloat16"}),
            {
                "KERAS_BACKEND": "torch",
                "KERAS_MAX_EPOCHS": "many",
                "TF_USE_LEGACY_KERAS": "1",
                "TF_FUNCTION_JIT_COMPILE_DEFAULT": "True",
                "TF_ENABLE_CONTROL_FLOW_V2": "0",
            },
            [
                "epsilon=1",
                "floatx=bfloat16",
                "KERAS_BACKEND=torch",
                "TF_USE_LEGACY_KERAS=1",
                "TF_FUNCTION_JIT_COMPILE_DEFAULT=True",
                "TF_ENABLE_CONTROL_FLOW_V2=0",
            ],
        ),
    ],
)
def test_a_model_is_the_same_and_what_is_not_used_is_said_once(
    tmp_path: Path, text, env, named
):
    note, first, second, backend = shown(tmp_path, text, **env)
    count = resnet.resnet50_keras(32, 10, 0.0).count_params()
    assert first == f"{count} tensorflow channels_last"
    assert second == f"1e-07 float32 {tmp_path}/.keras keras._tf_keras.keras"
    # Child processes get the user's value.
    assert backend == str(env.get("KERAS_BACKEND"))
    assert note.startswith("note: not used: ") and all(name in note for name in named)


@pytest.mark.parametrize("text", ['{"floatx":', "[]", "", '{"epsilon": 1e-7}', None])
def test_nothing_is_said_of_what_keras_would_not_use_either(
    tmp_path: Path, text: str | None
):
    if text is not None:
        (tmp_path / "keras.json").write_text(text)
    assert keras_defaults._of_the_user(tmp_path / "keras.json") == []


@pytest.mark.parametrize("rank", [0, 1])
def test_in_a_process_that_goes_on_keras_is_as_before(capsys, monkeypatch, rank: int):
    """A notebook that has set it before."""
    monkeypatch.setenv("HOROVOD_RANK", str(rank))
    keras.config.set_image_data_format("channels_first")
    keras.config.set_epsilon(0.5)
    try:
        with world_lib.kept_numbers():
            world_lib.set_numbers(Settings())
            assert keras.config.image_data_format() == "channels_last"
            assert keras.config.epsilon() == 1e-7
        assert keras.config.image_data_format() == "channels_first"
        assert keras.config.epsilon() == 0.5
    finally:
        keras.config.set_image_data_format("channels_last")
        keras.config.set_epsilon(1e-7)
    text = "note: not used: image_data_format=channels_first; epsilon=0.5: Keras runs"
    assert (text in capsys.readouterr().out) == (rank == 0)


def test_another_backend_that_runs_already_is_refused(tmp_path: Path):
    """With a Keras that stands for one on JAX, which is not installed."""
    (tmp_path / "keras.py").write_text(
        "class config:\n    backend = staticmethod(lambda: 'jax')\n"
    )
    program = "import keras, hvdkit\nhvdkit.check_flags(hvdkit.Settings, ['train.py'])"
    path = f"{tmp_path}:{Path(hvdkit.__file__).parents[1]}"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert "error: Keras was imported with the backend jax" in ended.stderr
