"""hvdkit evaluate, predict, export and browse, on a trained run and on the command line."""

import base64
import csv
import io
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import readers
import tensorflow as tf
from PIL import Image
from refusals import refused
from small_checkpoints import ALONE
from small_runs import CLASSES, FEATURES, Small, same

from hvdkit import settings as settings_lib
from hvdkit.checkpoint.checkpoints import Checkpoints
from hvdkit.commands import browse, evaluate, predict, serve
from hvdkit.commands.export import Exported, export
from hvdkit.data.pipeline import reason_of
from hvdkit.data.place import Place
from hvdkit.run import load_run
from hvdkit.settings import Settings
from hvdkit.stop import WRONG_USE, Stop
from hvdkit.train.optim import optimizer
from hvdkit.train.step.state import State
from hvdkit.train.task import outputs
from ranks import (
    CHECKS,
    PROJECT,
    json_lines,
    last_lines,
    launch,
    names_of_checks,
    run_checks,
)
from tasks import classification

FILE = CHECKS / "checks_commands.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """For what the checks on 2 ranks write: runs `digits` and `scenes`, predictions."""
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def outcomes(folder, tiny_data):
    return run_checks([FILE], 2, env={"COMMANDS": str(folder), "TINY": str(tiny_data)})


@pytest.fixture(scope="module")
def digits(folder, outcomes):
    return folder / "digits"


@pytest.mark.parametrize("name", names_of_checks(FILE))
def test_on_two_ranks(name, outcomes):
    assert outcomes[name] is None, outcomes[name]


def command(name, *words):
    ended = launch(1, ["-m", "hvdkit", name, *words], "alone")
    assert ended.code == 0, last_lines(ended.output)
    return ended


def test_by_default_the_best_is_evaluated_with_the_runs_own_figures_to_the_last_digit(
    digits,
):
    ended = command("evaluate", f"--run_dir={digits}")
    records = json_lines(digits / "metrics.jsonl")
    best = max(
        (r for r in records if "eval_loss" in r), key=lambda r: r["eval_accuracy"]
    )
    out = digits / "evaluation" / f"step-{best['step']:08d}-val"
    report = json.loads((out / "evaluation.json").read_text())
    assert (
        report["step"] == best["step"]
        and report["averaged"]
        and len(report["worst"]) == 8
    )
    assert (
        report["chose_checkpoint"]
        and "(val) chose this checkpoint as the best" in ended.output
    )
    assert report["figures"] == {
        n[5:]: v for n, v in best.items() if n.startswith("eval_")
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nonsense=1"], "no flag --nonsense"),
        (["--worst=few"], "invalid int value: 'few'"),
        (["--run_dir=/no/such"], "--run_dir=/no/such does not exist"),
        (["--run_dir=/etc"], "is no run's folder: it holds no config.cfg"),
        ([], "required: --run_dir"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_sentence(digits, flags, words, capsys):
    run = [f"--run_dir={digits}"] if flags else []
    with pytest.raises(SystemExit, match="2"):
        evaluate.main(["hvdkit evaluate", *run, *flags])
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_outside_a_fork_it_says_where_to_run_it(tmp_path):
    (tmp_path / "models/mine/tasks").mkdir(parents=True)
    (tmp_path / "models/mine/train.py").touch()
    words = [sys.executable, "-m", "hvdkit", "evaluate", "--run_dir=run"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert (
        "run it in your fork" in ended.stderr
        and "type `cd models/mine`" in ended.stderr
    )


def test_code_is_run_of_a_fork_only_that_others_cannot_change(tmp_path: Path):
    command = [Path(sys.executable).with_name("hvdkit"), "check", "--data_dir=none"]
    for name in ("settings.py", "numpy.py"):
        (tmp_path / name).write_text("raise SystemExit('foreign code')")
    inside = tmp_path / "inside"
    inside.mkdir()

    def errors(where: Path) -> str:
        return subprocess.run(command, cwd=where, capture_output=True, text=True).stderr

    assert "foreign code" not in errors(tmp_path), "of a folder that is no fork"
    (tmp_path / "tasks").mkdir()
    (tmp_path / "train.py").touch()
    (tmp_path / "train.py").chmod(0o666)
    for where in (tmp_path, inside):
        assert f"other users own or can change {tmp_path}, whose code" in errors(where)
    (tmp_path / "train.py").chmod(0o644)
    assert "foreign code" in errors(inside), "of a fork of one's own"


@pytest.mark.parametrize(
    ("run", "which", "words"),
    [
        ("digits", "15", "none of step 15"),
        ("digits", "/no/such", "/no/such is no checkpoint"),
        ("nothing", "best", "holds no checkpoint"),
        ("nothing", "last", "holds no checkpoint"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_named(folder, digits, run, which, words):
    task = SimpleNamespace(main_metric="accuracy")
    with pytest.raises(ValueError, match=words):
        load_run.chosen(folder / run / "checkpoints", which, task=task)


@pytest.mark.slow  # checks_errors.py has it for a run
def test_ranks_with_different_flags_are_refused_before_they_wait(digits, tmp_path):
    script = (
        "import os, sys; from hvdkit.commands import evaluate\n"
        "own = ['--no-ema'] if os.environ['OMPI_COMM_WORLD_RANK'] == '1' else []\n"
        "sys.exit(evaluate.main([*sys.argv, *own]))"
    )
    run = ["-c", script, f"--run_dir={digits}", f"--out={tmp_path}/out"]
    ended = launch(2, run, "mpirun", timeout=120)
    assert ended.code == 2, last_lines(ended.output)
    (error,) = ended.errors()
    assert "rank 1" in error and "give every rank the same flags" in error


def test_a_task_may_keep_its_optimizer(tmp_path, monkeypatch):
    """Its variables have the run's names in a checkpoint, not the task's."""

    class Keeps(classification.Task):
        def __init__(self, config):
            super().__init__(config)
            self.rule = keras.optimizers.Adam()

        def optimizer(self, model):
            return self.rule

    config = Settings(task="classification", run_dir=str(tmp_path), image_size=8)
    task = Keeps(config)
    model = task.build_model()
    rule = optimizer.build(config, model, task.optimizer)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, ALONE)
    state = State(model, rule, "float32", task=task)
    checkpoints.write(checkpoints.copy(Place(1), state.variables, config))
    monkeypatch.setattr(load_run.tasks, "load_task", Keeps)
    _, loaded, *_ = load_run.model_of(config, "last", False)
    same(loaded.get_weights(), model.get_weights())


@pytest.mark.parametrize(
    ("flags", "is_told"), [([], True), (["--image_size=16"], False)]
)
def test_settings_of_a_resume_that_a_checkpoint_was_saved_without_are_told(
    flags, is_told, tmp_path, monkeypatch, capsys
):
    saved = Settings(run_dir=str(tmp_path), image_size=8, eval_crop=4)
    model = Small(saved).build_model()
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, ALONE)
    state = State(model, optimizer.build(saved, model), "float32")
    checkpoints.write(checkpoints.copy(Place(1), state.variables, saved))
    resumed = Settings(run_dir=str(tmp_path), image_size=12, eval_crop=4)
    settings_lib.write(resumed, tmp_path / "config.cfg")
    monkeypatch.setattr(load_run.tasks, "load_task", Small)
    # This flag is one that commands set themselves.
    config = load_run.settings_of(tmp_path, ["--eval_crop=0", *flags])
    load_run.trained(config, "last", False)
    said = capsys.readouterr().out
    words = "note: step-00000001 was saved with --image_size=8, and config.cfg now has --image"
    assert (words in said) == is_told, said
    assert "saved with" not in said or is_told


class Sampling(keras.layers.Layer):
    """As in a variational autoencoder: it draws whenever it is called."""

    def __init__(self, **named):
        super().__init__(**named)
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x):
        noise = keras.random.normal(keras.ops.shape(x), seed=self.seed_generator)
        return x + noise


class Drawing(Small):
    """Its model draws in inference too, and the task holds a layer that does."""

    def __init__(self, config):
        super().__init__(config)
        self.noise = keras.layers.Dropout(0.5)

    def build_model(self):
        x = keras.Input((FEATURES,))
        y = Sampling()(keras.layers.Dense(CLASSES)(x))
        return keras.Model(x, keras.layers.Dropout(0.5)(y, training=True))

    def predict(self, model, inputs):
        return self.noise(model(inputs, training=False), training=True)


def test_a_model_that_draws_in_inference_is_exported(tmp_path, monkeypatch, capsys):
    config = Settings(run_dir=str(tmp_path / "run"))
    task = Drawing(config)
    model = task.build_model()
    task.noise.build((None, CLASSES))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 1, ALONE)
    state = State(model, optimizer.build(config, model), "float32", task=task)
    checkpoints.write(checkpoints.copy(Place(1), state.variables, config))
    monkeypatch.setattr(load_run.tasks, "load_task", Drawing)
    out = tmp_path / "out"
    arguments = SimpleNamespace(
        out=out, check=None, checkpoint="last", ema=False, onnx=False
    )
    export(config, ALONE, None, arguments=arguments)
    said = capsys.readouterr().out
    assert "without this code: equal outputs" in said
    assert (out / "model.keras").exists(), said
    serve = tf.saved_model.load(str(out / "saved_model")).signatures["serving_default"]
    (name,) = serve.structured_input_signature[1]
    inputs = {name: tf.ones([2, FEATURES])}
    first, second = (serve(**inputs)["probabilities"].numpy() for _ in range(2))
    assert (first != second).any(), "each call draws anew"


def test_what_decode_returns_beside_classes_is_written_and_shown_too(tmp_path):
    image = np.zeros((2, 2, 3), np.uint8)
    names = ["cat", "dog"]
    of_class = {
        "classes": np.int64(1),
        "probabilities": np.array([0.25, 0.75]),
        "size": 3.5,
    }
    prediction = predict.write(tmp_path, "a.png", image=image, outputs=of_class)
    assert prediction == ([(1, 0.75), (0, 0.25)], {"size": 3.5})
    predict.record(tmp_path, [predict.Classified("a.png", prediction.likeliest)], names)
    assert "a.png,dog,0.75,cat,0.25" in (tmp_path / "predictions.csv").read_text()
    of_pixels = of_class | {"classes": np.zeros((2, 2), np.int64)}
    prediction = predict.write(tmp_path, "b.png", image=image, outputs=of_pixels)
    assert prediction == ([], {"size": 3.5})
    assert (tmp_path / "labels" / "b.png.png").exists()
    data = tf.io.encode_png(image).numpy()
    # A number has no share.
    rows = serve.answered(data, lambda _: of_class, names)["rows"]
    assert rows == [("dog", "75.0%"), ("cat", "25.0%"), ("size", "3.5")]
    assert serve.answered(data, lambda _: of_pixels, names)["rows"][1:] == [
        ("size", "3.5")
    ]


@pytest.mark.parametrize("classes", [np.int64(0), np.zeros((2, 2), np.int64)])
def test_outputs_that_are_no_numbers_are_no_class(tmp_path, classes):
    image = np.zeros((2, 2, 3), np.uint8)
    numbers = {
        "classes": classes,
        "probabilities": np.full([*classes.shape, 2], np.nan),
    }
    refused(
        lambda: predict.write(tmp_path, "a.png", image=image, outputs=numbers),
        "a.png: ",
        "no numbers",
    )


def test_a_class_below_0_is_not_drawn(tmp_path):
    image = np.zeros((2, 2, 3), np.uint8)
    outputs = {"classes": np.full((2, 2), -2)}
    refused(
        lambda: predict.write(tmp_path, "a.png", image=image, outputs=outputs),
        "a.png: class -2, which a PNG of labels cannot hold",
    )
    assert not list(tmp_path.iterdir())


def test_colours_of_16_bits_in_a_tiff_are_refused():
    file = readers.encoded(np.zeros((2, 3, 3), np.uint8), "TIFF")
    assert predict.decoded(file, "a.tiff").shape == (2, 3, 3)
    deep = file.replace(b"\x08\0" * 3, b"\x10\0" * 3)
    refused(
        lambda: predict.decoded(deep, "a.tiff"), "a.tiff has more than 8 bits a channel"
    )


def test_several_pictures_in_a_file_and_16_bits_in_a_ppm_are_refused():
    pages = io.BytesIO()
    page = Image.new("RGB", (2, 3))
    page.save(pages, "TIFF", save_all=True, append_images=[page])
    refused(
        lambda: predict.decoded(pages.getvalue(), "a.tiff"), "a.tiff holds 2 pictures"
    )
    for largest, bytes_of in ((255, 6), (15, 6)):
        file = b"P6 2 1 %d\n" % largest + bytes(bytes_of)
        assert predict.decoded(file, "a.ppm").shape == (1, 2, 3)
    deep = b"P6 2 1 65535\n" + bytes(12)
    refused(lambda: predict.decoded(deep, "a.ppm"), "a.ppm has more than 8 bits")


def test_16_bits_in_a_jpeg_2000_are_refused():
    for mode in ("RGB", "L"):
        written = io.BytesIO()
        Image.new(mode, (5, 4)).save(written, "JPEG2000", no_jp2=mode == "L")
        file = written.getvalue()
        assert predict.decoded(file, "a.jp2").shape == (4, 5, 3)
        depths = file.index(b"\xff\x4f\xff\x51") + 42
        deep = bytearray(file)
        deep[depths] = 11
        refused(
            lambda file=bytes(deep): predict.decoded(file, "a.jp2"),
            "a.jp2 has more than 8 bits a channel",
        )


@pytest.mark.parametrize(("value", "words"), [(0.5, "0.5 to 0.5"), (-2.0, "-2 to -2")])
def test_pictures_of_0_to_1_are_not_shown_black(value, words):
    example = {"inputs": np.full([2, 2, 3], value, np.float32), "targets": 0}
    refused(lambda: browse.sheet([example], ["cat"]), words, "0 to 255")
    dark = {"inputs": np.zeros([2, 2, 3], np.float32), "targets": 0}
    assert browse.sheet([dark], ["cat"]).dtype == np.uint8


def test_earlier_predictions_in_a_folder_of_pictures_are_left_out(tmp_path):
    for name in ("a.png", "labels.png", "out/labels/a.png.png", "out/predictions.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    out = tmp_path / "away" / ".." / "out"
    assert list(predict.listed([tmp_path], out)) == ["a.png", "labels.png"]
    assert len(predict.listed([tmp_path], tmp_path / "other")) == 4
    for hidden in (".DS_Store", ".cache/a.png"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "folder").symlink_to(tmp_path / "out")
    (tmp_path / "out" / "loop").symlink_to(tmp_path / "linked")
    names = [*predict.listed([tmp_path / "linked"], tmp_path / "other")]
    assert names == ["folder/labels/a.png.png", "folder/predictions.csv"]
    assert not any(name.startswith(".") for name in predict.listed([tmp_path], out))
    (tmp_path / "empty").mkdir()
    refused(lambda: predict.listed([tmp_path / "empty"], out), "no files in")
    refused(
        lambda: predict.listed([tmp_path / "gone.png"], out), "gone.png does not exist"
    )


# In a process without this project's code, but for the .keras file's own layers.
SERVED = """
import importlib, sys, keras, numpy as np, tensorflow as tf
out, *modules, file = sys.argv[1:]
loaded = tf.saved_model.load(out + "/saved_model")
for name, kind in (("serving_default", tf.string), ("pictures", tf.uint8)):
    spec = loaded.signatures[name].structured_input_signature[1]["image"]
    assert spec.dtype == kind and spec.shape[0] is None, spec
pictures = np.random.default_rng(2).integers(0, 256, (3, 24, 40, 3), np.uint8)
one = loaded.signatures["pictures"](image=tf.constant(pictures))
files = tf.constant([tf.io.encode_png(p).numpy() for p in pictures])
other = loaded.signatures["serving_default"](image=files)
for name in ("classes", "probabilities"):
    assert np.array_equal(one[name], other[name]), name
print("shapes", one["classes"].shape, one["probabilities"].shape)
out_of_file = loaded.signatures["serving_default"](image=tf.constant([open(file, "rb").read()]))
assert not any(name.startswith("hvdkit") for name in sys.modules)
for module in modules:
    importlib.import_module(module)
keras.saving.load_model(out + "/model.keras")
if one["classes"].shape.rank == 1:
    print(int(out_of_file["classes"][0]), float(tf.reduce_max(out_of_file["probabilities"])))
"""


@pytest.mark.parametrize(
    ("run", "layer", "shapes"),
    [
        pytest.param(
            "digits",
            "hvdkit.train.layers.dropout.SampleDropout",
            "(3,) (3, 10)",
            marks=pytest.mark.slow,
        ),
        (
            "scenes",
            "hvdkit.models.upsampling.BilinearUpsampling",
            "(3, 24, 40) (3, 24, 40, 11)",
        ),
    ],
)
def test_an_export_is_served_without_this_code(
    run, layer, shapes, folder, outcomes, tmp_path
):
    ended = command(
        "export", f"--run_dir={folder / run}", f"--out={tmp_path}/out", "--onnx"
    )
    assert "model.onnx: the network alone, image tensor(float) ['any', " in ended.output
    assert "without this code: equal outputs" in ended.output
    # A note names the layer that is none of Keras's own.
    assert f"not Keras's own, {layer}: import their modules" in ended.output, (
        ended.output
    )
    with (folder / "predicted" / "predictions.csv").open() as file:
        _, (name, first, chance, *_), *_ = csv.reader(file)
    module, _, _ = layer.rpartition(".")
    arguments = [tmp_path / "out", module, folder / "in-359" / name]
    served = subprocess.run(
        [sys.executable, "-I", "-c", SERVED, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert served.returncode == 0 and f"shapes {shapes}" in served.stdout, (
        served.stderr[-2000:]
    )
    if run == "digits":  # its probabilities are those of `hvdkit predict`
        number, probability = served.stdout.split()[-2:]
        assert f"digit {number}" == first
        assert float(probability) == pytest.approx(float(chance), abs=1e-6)


def answer(address: str, data: bytes | None = None) -> tuple[int, str]:
    """Status and text of what a server answers to GET, or to POST of `data`."""
    try:
        with urllib.request.urlopen(address, data, timeout=120) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", ["digits", "scenes"])
def test_a_picture_is_predicted_on_a_page_whose_address_is_secret(
    run, folder, outcomes
):
    serve_words = [
        sys.executable,
        "-u",
        "-m",
        "hvdkit",
        "serve",
        f"--run_dir={folder / run}",
    ]
    picture = np.random.default_rng(1).integers(0, 256, (24, 40, 3), np.uint8)
    data = tf.io.encode_png(picture).numpy()
    with subprocess.Popen(
        [*serve_words, "--port=0"],
        cwd=PROJECT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as server:
        try:
            line = next(line for line in server.stdout if "open" in line)
            address = re.search(r"http://\S+", line)[0]
            host, _, _ = address.rpartition("/")
            status, page = answer(address)
            assert status == 200 and "<h1>" in page and str(folder / run) in page
            for upload in (None, data):
                status, _ = answer(f"{host}/", upload)
                assert status == 404
            _, refusal = answer(address, b"no picture")
            assert "is no picture" in json.loads(refusal)["error"]
            _, text = answer(address, data)
            if run == "digits":
                _, _, port = host.rpartition(":")
                _check_taken_port([*serve_words, f"--port={port}"], f"--port={port}")
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0 and "stopping; Ctrl-C" in server.stderr.read()
        finally:
            server.kill()

    config = load_run.settings(folder / run, ["--eval_crop=0"])
    task, model, _, decode = load_run.model_of(config, "best", run == "digits")
    expected = predict.of_picture(task, model, decode)(picture)
    shown = json.loads(text)
    first_row = shown["rows"][0]
    if run == "digits":
        share = f"{expected['probabilities'].max():.1%}"
        assert first_row[:2] == [f"digit {int(expected['classes'])}", share]
        assert len(shown["rows"]) == 5
    else:
        _, encoded = shown["picture"].split(",")
        _, drawn = predict.drawn("", image=picture, outputs=expected)
        with Image.open(io.BytesIO(base64.b64decode(encoded))) as shown_picture:
            assert np.array_equal(shown_picture, drawn)
        _, _, colour = first_row
        assert colour[0] == "#"


def _check_taken_port(words: list, flag: str) -> None:
    ended = subprocess.run(words, cwd=PROJECT, text=True, capture_output=True)
    assert ended.returncode == 2 and f"{flag}: Address already in use" in ended.stderr


@pytest.mark.parametrize(
    ("out", "check", "words"),
    [("file", None, "File exists"), ("out", "file", "no JPEG, PNG or WebP that can")],
)
def test_an_export_that_cannot_be_made_is_refused(tmp_path, out, check, words):
    (tmp_path / "file").touch()
    arguments = SimpleNamespace(out=tmp_path / out, check=check and tmp_path / check)
    with pytest.raises(Stop, match=words) as stop:
        export(Settings(), ALONE, None, arguments=arguments)
    assert stop.value.code == WRONG_USE and not arguments.out.is_dir()


def test_examples_for_a_model_of_pictures_are_refused(folder, outcomes, tmp_path):
    config = load_run.settings(folder / "digits", [])
    arguments = SimpleNamespace(
        out=tmp_path / "out",
        check=tmp_path / "x.npz",
        checkpoint="best",
        ema=False,
    )
    with pytest.raises(
        Stop, match=r"x\.npz: task classification takes a picture"
    ) as stop:
        export(config, ALONE, None, arguments=arguments)
    assert stop.value.code == WRONG_USE and not arguments.out.exists()


def test_an_export_replaces_nothing_of_a_person(tmp_path):
    (tmp_path / "saved_model").mkdir()
    (tmp_path / "saved_model" / "mine").write_text("a person's own")
    with pytest.raises(Stop, match="saved_model/mine was put there") as stop:
        export(
            Settings(), ALONE, None, arguments=SimpleNamespace(out=tmp_path, check=None)
        )
    assert stop.value.code == WRONG_USE and "\n" not in str(stop.value)
    assert [path.name for path in tmp_path.rglob("*")] == ["saved_model", "mine"]


def test_probabilities_of_an_export_are_of_the_tasks_inputs():
    """A model that gives back its input as logits; the task divides pictures by 255."""
    x = keras.Input((3,))
    model = keras.Model(x, keras.layers.Activation("linear")(x))
    task = SimpleNamespace(
        picture_inputs=lambda image: tf.cast(image[0, 0], tf.float32) / 255.0,
        build_model=lambda: model,
    )
    pictures = tf.constant([[[[255, 0, 0]]], [[[0, 0, 255]]]], tf.uint8)
    served = Exported(task, model, outputs.softmax).of_pictures(pictures)
    high = np.e / (np.e + 2)
    low = 1 / (np.e + 2)
    np.testing.assert_allclose(
        served["probabilities"], [[high, low, low], [low, low, high]]
    )
    np.testing.assert_array_equal(served["classes"], [0, 2])


def test_a_model_that_makes_samples_of_a_larger_picture_is_refused():
    """Of one that takes 4 x 4 pixels, the first sample was taken for the whole picture."""
    x = keras.Input((None, None, 3))
    parts = keras.ops.reshape(x, (-1, 4, 4, 3))
    model = keras.Model(x, keras.ops.cast(parts, "float32"))
    task = SimpleNamespace(
        picture_inputs=lambda image: image, build_model=lambda: model
    )
    outputs_of = predict.of_picture(task, model, outputs.softmax)
    served = Exported(task, model, outputs.softmax)
    exported = tf.function(served.of_pictures, autograph=False)
    picture = np.zeros((4, 4, 3), np.uint8)
    assert outputs_of(picture)["classes"].shape == (4, 4)
    assert exported(tf.constant([picture, picture], tf.uint8))["classes"].shape == (
        2,
        4,
        4,
    )
    for call in (outputs_of, lambda image: exported(tf.constant([image], tf.uint8))):
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            call(np.zeros((8, 4, 3), np.uint8))
        reason = reason_of(error.value)
        assert "does it take pictures of one size only?" in reason, reason


def test_a_sheet_holds_the_pictures_and_labels_of_the_first_step(tiny, tmp_path):
    flags = [
        "--flagfile=configs/demo.cfg",
        *tiny,
        "--accumulation_steps=1",
        "--num_steps=2",
    ]
    command("browse", *flags, f"--out={tmp_path}/sheet.png", "--count=6")
    # It replaces its own.
    command("browse", *flags, f"--out={tmp_path}/sheet.png", "--count=6")
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    Image.fromarray(sheet).save(tmp_path / "photo.png")
    ended = launch(
        1, ["-m", "hvdkit", "browse", *flags, f"--out={tmp_path}/photo.png"], "alone"
    )
    assert (
        ended.code == 2
        and "photo.png is a file that this command did not" in ended.output
    )
    config = settings_lib.parse(["train.py", *flags])
    examples, _ = browse.samples(config.for_ranks(1), 6)
    assert (
        len(examples) == 6
        and len({e["inputs"]["image"].tobytes() for e in examples}) == 6
    )
    first = examples[0]["inputs"]["image"]
    assert first.shape == (32, 32, 3) and (sheet[1:97:3, 1:97:3] == first).all()
    label = browse.COLOURS[examples[0]["targets"]["label"][..., 0]]
    assert (sheet[1:97:3, 97:193:3] == label).all()


def test_a_class_stands_below_its_picture():
    example = {
        "inputs": {"image": np.full((8, 8, 3), 7, np.uint8)},
        "targets": np.int64(1),
    }
    named = browse.tile(example, ["cat", "dog"])
    plain = browse.tile(example, [])
    assert named.shape == (98 + 18, 98, 3) and (named[1:97, 1:97] == 7).all()
    assert (named[98:] != plain[98:]).any()  # "dog", and "1"
    with pytest.raises(ValueError, match="inputs hold no picture"):
        browse.tile({"inputs": np.zeros(8), "targets": np.int64(1)}, [])


@pytest.mark.parametrize(
    ("target", "width"),
    [
        (np.full((8, 8), 2, np.int32), 2),
        (np.full((8, 8, 3), 9, np.float32), 2),
        # A depth, and more classes than colours: the picture alone.
        (np.full((8, 8), 0.5, np.float32), 1),
        (np.full((8, 8, 1), 300, np.int32), 1),
    ],
)
def test_a_label_of_a_picture_is_drawn_where_it_can_be(target, width):
    example = {"inputs": np.full((8, 8, 3), 7, np.uint8), "targets": target}
    tile = browse.tile(example, [])
    assert tile.shape[1] == width * 96 + 2
    if target.ndim == 3 and width == 2:
        assert (tile[1:97, 97:193] == 9).all()


def test_a_loss_that_leaves_out_samples_has_no_worst_ones():
    run = SimpleNamespace(world=ALONE)
    worst = evaluate.WorstSamples(run, count=2, rounds=1)
    refused(lambda: worst.add(np.ones(3), [4, 5, 6, 7]), "3 losses for 4 samples")
    evaluate.WorstSamples(run, count=0, rounds=1).add(np.ones(3), [4, 5, 6, 7])
