"""Runs in a process that goes on afterwards, as a notebook's kernel, whose flags are its own."""

import json
import re
import subprocess
import sys

import pytest
from refusals import refused

import hvdkit
from hvdkit.settings import Settings
from ranks import PROJECT

# No file is __main__'s, as in a kernel.
CELLS = """
import os, random, signal, sys, time
RUN, SNIPPET = sys.argv[1:]
import hvdkit
from settings import Settings
import train

sys.argv = ["/opt/ipykernel_launcher.py", "-f", "/root/kernel-123.json"]  # set after the import
assert hvdkit.main(train.train, Settings) == 2
sys.argv = ["train.py", "--num_steps=none"]
assert hvdkit.main(train.train, Settings) == 2

import keras
import numpy as np
import tensorflow as tf
from keras.src.utils.rng_utils import get_random_seed
from tensorflow.python.framework.config import is_op_determinism_enabled

tf.zeros(1)  # TensorFlow has started

def in_the_process():
    return [
        signal.getsignal(signal.SIGINT), keras.config.dtype_policy().name, keras.config.floatx(),
        keras.config.epsilon(), keras.config.image_data_format(), is_op_determinism_enabled(),
        random.getstate(), np.random.get_state()[1].tolist(), get_random_seed(),
        keras.random.uniform([2], seed=keras.random.SeedGenerator(1)).numpy().tolist(),
    ]

def drawn():
    return float(tf.random.uniform([])), float(keras.random.uniform([]))

keras.utils.set_random_seed(5)
firsts = [drawn(), drawn()]
keras.utils.set_random_seed(5)
assert drawn() == firsts[0]
before = in_the_process()
usual = dict(flagfile="configs/blank.cfg", run_dir=RUN, trackers="", precision="bfloat16")
usual["deterministic"] = True

exec(SNIPPET, {})
settings = hvdkit.load_settings(Settings, **usual, num_steps=20, checkpoint_every=10)

def changed_by_the_task(run):
    keras.config.set_epsilon(1e-3)
    train.train(run)

assert hvdkit.main(changed_by_the_task, settings) == 0
wide = usual | {"precision": "float64", "run_dir": f"{RUN}-float64"}
assert hvdkit.main(train.train, hvdkit.load_settings(Settings, **wide, num_steps=2)) == 0
assert in_the_process() == before
settings = hvdkit.load_settings(Settings, **usual, num_steps=40)  # it goes on, in the same process

names = []

def interrupted(run):
    names.append([keras.layers.Flatten().name, *[layer.name for layer in run.model.layers]])
    step = run.make_step(train.make_step)
    for number, batch in enumerate(run.batches()):
        run.after_step(step(batch))
        if number in PRESSED:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(2)  # two at once count as one press

PRESSED = [3]
assert hvdkit.main(interrupted, settings) == 75  # it is saved, and the process lives
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
PRESSED = []
assert hvdkit.main(interrupted, settings) == 0
assert names[0] == names[1] and "flatten" in names[0], names  # SampleDropout draws by its name
later = keras.layers.Flatten().name
assert later == "flatten_1", later

def pressed_twice(run):
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(2)

try:
    hvdkit.main(pressed_twice, settings)
    raise SystemExit("not interrupted")
except KeyboardInterrupt:
    pass
assert in_the_process() == before

model = hvdkit.load(RUN, "last")
assert isinstance(model, keras.Model) and in_the_process() == before
assert drawn() == firsts[1]
assert hvdkit.load(f"{RUN}-float64", "last").get_weights()[0].dtype == np.float64
assert model.get_weights()[0].dtype == np.float32
print("weights", float(abs(model.get_weights()[0]).sum()), model.dtype_policy.name)
"""


@pytest.mark.timeout(300)
def test_a_notebook_trains_twice_is_interrupted_and_loads_the_model(tmp_path):
    page = (PROJECT.parent / "docs" / "first-hour.md").read_text()
    snippet = re.search(
        r"```python\n(import hvdkit\nfrom settings .*?)```", page, re.S
    )[1]
    snippet = snippet.replace("num_steps=100", "num_steps=5")
    snippet = snippet.replace("runs/notebook", str(tmp_path / "notebook"))
    words = [sys.executable, "-c", CELLS, str(tmp_path / "run"), snippet]
    ended = subprocess.run(
        words, cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert (
        "error: a notebook has no flags: hvdkit.main(train, hvdkit.load_settings("
        in ended.stderr
    )
    assert "--num_steps=none: must be a whole number" in ended.stderr
    assert re.search(r"resuming from .*step-00000020", ended.stdout)
    assert re.search(r"resuming from .* at step 2[4-9]", ended.stdout)
    for name, steps in (("notebook", 5), ("run", 40)):
        assert (
            json.loads((tmp_path / name / "summary.json").read_text())["step"] == steps
        )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_step": 3}, "there is no flag --num_step: did you mean --num_steps?"),
        ({"num_steps": 1.5}, "--num_steps=1.5: must be a whole number"),
        (
            {"num_steps": None},
            "num_steps=None: give a number, a text, a path, True or False",
        ),
        ({"jit": [True]}, "jit=[True]: give a number"),
        ({"jit": 2}, "--jit=2: must be true or false"),
        ({"flagfile": "away.cfg"}, "--flagfile=away.cfg: there is no such file"),
        ({"end_lr": 1, "base_lr": 0.5}, "--end_lr=1.0 is greater than --base_lr=0.5"),
    ],
)
def test_wrong_names_and_values_are_refused_as_flags_are(values, words):
    refused(lambda: hvdkit.load_settings(Settings, **values), words)


def test_values_are_what_flags_would_make_of_them(tmp_path):
    (tmp_path / "a.cfg").write_text("--num_steps=7\n--jit\n--momentum=0.5\n")
    file = tmp_path / "a.cfg"
    config = hvdkit.load_settings(
        Settings, num_steps=5, jit=False, epochs=3, flagfile=file
    )
    assert (str(config.num_steps), config.jit, config.momentum) == (
        "3epochs",
        False,
        0.5,
    )


def test_a_run_that_is_none_is_refused(tmp_path):
    refused(lambda: hvdkit.load(PROJECT / "runs" / "away"), "does not exist")
