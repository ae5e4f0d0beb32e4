"""Keras is what a run needs, whatever keras.json and variables of another project say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import hvdkit
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
"""
OTHERS = {"image_data_format": "channels_first", "epsilon": 0.1, "floatx": "float64"}
OTHERS |= {"backend": "jax", "nnx_enabled": True}


def shown(home: Path, text: str | None = None, **env: str) -> list[str]:
    if text is not None:
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


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    home = tmp_path_factory.mktemp("home")
    return [line.replace(str(home), "HOME") for line in shown(home)]


@pytest.mark.parametrize(
    ("text", "env", "named"),
    [
        (
            json.dumps(OTHERS),
            {},
            ["image_data_format=channels_first", "epsilon=0.1", "backend=jax"],
        ),
        # Keras itself ends with a trace there.
        (json.dumps({"epsilon": 1, "floatx": "bfloat16"}), {}, ["epsilon=1", "floatx=bfloat16"]),
        ('{"floatx":', {}, []),
        ("[]", {"KERAS_MAX_EPOCHS": "many"}, []),
        (
            None,
            {"KERAS_BACKEND": "torch", "KERAS_NNX_ENABLED": "1", "TF_USE_LEGACY_KERAS": "1"},
            ["KERAS_BACKEND=torch", "KERAS_NNX_ENABLED=1", "TF_USE_LEGACY_KERAS=1"],
        ),
        (json.dumps({"image_data_format": "channels_last", "epsilon": 1e-7}), {}, []),
    ],
)
def test_a_model_is_the_same_and_what_is_not_used_is_said_once(
    tmp_path: Path, default, text, env, named
):
    *notes, first, second, backend = shown(tmp_path, text, **env)
    assert [first, second.replace(str(tmp_path), "HOME")] == default[-3:-1]
    assert backend == str(env.get("KERAS_BACKEND"))  # programs that this one starts get the user's
    assert len(notes) == bool(named)
    assert all(name in notes[0] for name in named)


def test_only_rank_0_says_it(tmp_path: Path):
    lines = shown(tmp_path, json.dumps(OTHERS), HOROVOD_RANK="1")
    assert not any("note:" in line for line in lines)


def test_in_a_process_that_goes_on_keras_is_as_before(capsys):
    """A notebook that has set it before."""
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
    assert "image_data_format=channels_first, epsilon=0.5: Keras runs" in capsys.readouterr().out


def test_another_backend_that_runs_already_is_refused(tmp_path: Path):
    """With a Keras that stands for one on JAX, which is not installed."""
    (tmp_path / "keras.py").write_text("class config:\n    backend = staticmethod(lambda: 'jax')\n")
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
