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
import tensorflow as tf
from PIL import Image
from refusals import refused
from small_checkpoints import ALONE

from hvdkit import settings as settings_lib
from hvdkit.checkpoint.checkpoints import Checkpoints
from hvdkit.commands import browse, evaluate, predict, serve
from hvdkit.commands.export import Exported, export
from hvdkit.data.place import Place
from hvdkit.run import load_run
from hvdkit.settings import Settings
from hvdkit.stop import WRONG_USE, Stop
from hvdkit.train.optim import optimizer
from hvdkit.train.step.state import State
from hvdkit.train.task import outputs
from ranks import CHECKS, PROJECT, json_lines, last_lines, launch, names_of_checks, run_checks
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


def test_by_default_the_best_is_evaluated_with_the_runs_own_figures_to_the_last_digit(digits):
    ended = command("evaluate", f"--run_dir={digits}")
    records = json_lines(digits / "metrics.jsonl")
    best = max((r for r in records if "eval_loss" in r), key=lambda r: r["eval_accuracy"])
    out = digits / "evaluation" / f"step-{best['step']:08d}-val"
    found = json.loads((out / "evaluation.json").read_text())
    assert found["step"] == best["step"] and found["averaged"] and len(found["worst"]) == 8
    assert found["chose_checkpoint"] and "(val) chose this checkpoint as the best" in ended.output
    assert found["figures"] == {n[5:]: v for n, v in best.items() if n.startswith("eval_")}


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
    assert ended.returncode == 2 and ended.stderr == (
        "error: hvdkit evaluate: run it in your fork, the folder that holds train.py and tasks/; "
        "type `cd models/mine`\n"
    )


def test_code_is_run_of_a_fork_only_that_others_cannot_change(tmp_path: Path):
    command = [Path(sys.executable).with_name("hvdkit"), "check", "--data_dir=none"]
    for name in ("settings.py", "numpy.py"):
        (tmp_path / name).write_text("raise SystemExit('foreign code')")
    (inside := tmp_path / "inside").mkdir()

    def said(where: Path) -> str:
        return subprocess.run(command, cwd=where, capture_output=True, text=True).stderr

    assert "foreign code" not in said(tmp_path), "of a folder that is no fork"
    (tmp_path / "tasks").mkdir()
    (tmp_path / "train.py").touch()
    (tmp_path / "train.py").chmod(0o666)
    for where in (tmp_path, inside):
        assert f"other users own or can change {tmp_path}, whose code" in said(where)
    (tmp_path / "train.py").chmod(0o644)
    assert "foreign code" in said(inside), "of a fork of one's own"


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
    with pytest.raises(ValueError, match=words):
        load_run.chosen(folder / run / "checkpoints", which, task=None)


@pytest.mark.slow  # of a run: checks_errors.py
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
    kept = Checkpoints(tmp_path / "checkpoints", 1, ALONE)
    kept.write(kept.copy(Place(1), State(model, rule, "float32", task=task).variables, config))
    monkeypatch.setattr(load_run.tasks, "load_task", Keeps)
    _, found, *_ = load_run.model_of(config, "last", False)
    assert all(map(np.array_equal, found.get_weights(), model.get_weights()))


def test_what_decode_returns_beside_classes_is_written_and_shown_too(tmp_path):
    image, names = np.zeros((2, 2, 3), np.uint8), ["cat", "dog"]
    found = {"classes": np.int64(1), "probabilities": np.array([0.25, 0.75]), "size": 3.5}
    prediction = predict.write(tmp_path, "a.png", image=image, outputs=found)
    assert prediction == ("a.png", [(1, 0.75), (0, 0.25)], {"size": 3.5})
    predict.record(tmp_path, [prediction], names)
    assert "a.png,dog,0.75,cat,0.25" in (tmp_path / "predictions.csv").read_text()
    assert json_lines(tmp_path / "predictions.jsonl") == [{"file": "a.png", "size": 3.5}]
    drawn = found | {"classes": np.zeros((2, 2), np.int64)}
    prediction = predict.write(tmp_path, "b.png", image=image, outputs=drawn)
    assert prediction == ("b.png", [], {"size": 3.5})
    assert (tmp_path / "labels" / "b.png.png").exists()
    data = tf.io.encode_png(image).numpy()
    shown = serve.answered(data, lambda _: found, names)["rows"]  # a number is no share
    assert shown == [("dog", "75.0%"), ("cat", "25.0%"), ("size", "3.5")]
    assert serve.answered(data, lambda _: drawn, names)["rows"][1:] == [("size", "3.5")]


def test_outputs_that_are_no_numbers_are_no_class(tmp_path):
    for classes in (np.int64(0), np.zeros((2, 2), np.int64)):
        found = {"classes": classes, "probabilities": np.full([*classes.shape, 2], np.nan)}
        how = {"image": np.zeros((2, 2, 3), np.uint8), "outputs": found}
        refused(lambda how=how: predict.write(tmp_path, "a.png", **how), "a.png: ", "no numbers")


def test_colours_of_16_bits_in_a_tiff_are_refused():
    Image.new("RGB", (3, 2)).save(file := io.BytesIO(), "TIFF")
    assert predict.decoded(file.getvalue(), "a.tiff").shape == (2, 3, 3)
    deep = file.getvalue().replace(b"\x08\0" * 3, b"\x10\0" * 3)
    refused(lambda: predict.decoded(deep, "a.tiff"), "a.tiff has more than 8 bits a channel")


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
    found = [*predict.listed([tmp_path / "linked"], tmp_path / "other")]
    assert found == ["folder/labels/a.png.png", "folder/predictions.csv"]
    assert not any(name.startswith(".") for name in predict.listed([tmp_path], out))
    (tmp_path / "empty").mkdir()
    refused(lambda: predict.listed([tmp_path / "empty"], out), "no files in")
    refused(lambda: predict.listed([tmp_path / "gone.png"], out), "gone.png does not exist")


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
        ("scenes", "hvdkit.models.upsampling.BilinearUpsampling", "(3, 24, 40) (3, 24, 40, 11)"),
    ],
)
def test_an_export_is_served_without_this_code(run, layer, shapes, folder, outcomes, tmp_path):
    ended = command("export", f"--run_dir={folder / run}", f"--out={tmp_path}/out", "--onnx")
    assert "model.onnx: the network alone, image tensor(float) ['any', " in ended.output
    assert "without this code: equal outputs" in ended.output
    # A note names the layer that is none of Keras's own.
    assert f"not Keras's own, {layer}: import their modules" in ended.output, ended.output
    with (folder / "predicted" / "predictions.csv").open() as file:
        _, (name, first, chance, *_), *_ = csv.reader(file)
    words = [sys.executable, "-I", "-c", SERVED, tmp_path / "out", layer.rpartition(".")[0]]
    words.append(folder / "in-359" / name)
    served = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert served.returncode == 0 and f"shapes {shapes}" in served.stdout, served.stderr[-2000:]
    if run == "digits":  # its probabilities are those of `hvdkit predict`
        number, probability = served.stdout.split()[-2:]
        assert f"digit {number}" == first
        assert float(probability) == pytest.approx(float(chance), abs=1e-6)


def asked(address: str, data: bytes | None = None) -> tuple[int, str]:
    """Status and text of what a server answers to GET, or to POST of `data`."""
    try:
        with urllib.request.urlopen(address, data, timeout=120) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", ["digits", "scenes"])
def test_a_picture_is_predicted_on_a_page_whose_address_is_secret(run, folder, outcomes):
    words = [sys.executable, "-u", "-m", "hvdkit", "serve", f"--run_dir={folder / run}"]
    shown = np.random.default_rng(1).integers(0, 256, (24, 40, 3), np.uint8)
    data = tf.io.encode_png(shown).numpy()
    how = {"cwd": PROJECT, "text": True, "stderr": subprocess.PIPE}
    with subprocess.Popen([*words, "--port=0"], stdout=subprocess.PIPE, **how) as server:
        try:
            lines = iter(server.stdout)
            address = next(re.search(r"http://\S+", line)[0] for line in lines if "open" in line)
            status, page = asked(address)
            assert status == 200 and "<h1>" in page and str(folder / run) in page
            host = address.rsplit("/", 1)[0]
            assert [asked(f"{host}/", d)[0] for d in (None, data)] == [404, 404]
            assert "is no picture" in json.loads(asked(address, b"no picture")[1])["error"]
            found = json.loads(asked(address, data)[1])
            if run == "digits":
                taken = f"--port={host.rpartition(':')[2]}"
                ended = subprocess.run([*words, taken], **how)
                assert ended.returncode == 2 and f"{taken}: Address already in use" in ended.stderr
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0 and "stopping; Ctrl-C" in server.stderr.read()
        finally:
            server.kill()
    config = load_run.settings(folder / run, ["--eval_crop=0"])
    task, model, _, decode = load_run.model_of(config, "best", run == "digits")
    wanted = predict.of_picture(task, model, decode)(shown)
    if run == "digits":
        assert found["rows"][0][0] == f"digit {int(wanted['classes'])}" and len(found["rows"]) == 5
        assert found["rows"][0][1] == f"{wanted['probabilities'].max():.1%}"
    else:
        with Image.open(io.BytesIO(base64.b64decode(found["picture"].split(",")[1]))) as over:
            _, expected = predict.drawn("", image=shown, outputs=wanted)
            assert np.array_equal(over, expected) and found["rows"][0][2][0] == "#"


@pytest.mark.parametrize(
    ("out", "check", "words"),
    [("file", None, "File exists"), ("out", "file", "no JPEG, PNG or WebP that can")],
)
def test_an_export_that_cannot_be_made_is_refused(tmp_path, out, check, words):
    (tmp_path / "file").touch()
    own = SimpleNamespace(out=tmp_path / out, check=check and tmp_path / check)
    with pytest.raises(Stop, match=words) as stop:
        export(Settings(), ALONE, None, arguments=own)
    assert stop.value.code == WRONG_USE and not own.out.is_dir()


def test_an_export_replaces_nothing_of_a_person(tmp_path):
    (tmp_path / "saved_model").mkdir()
    (tmp_path / "saved_model" / "mine").write_text("a person's own")
    with pytest.raises(Stop, match="saved_model/mine was put there") as stop:
        export(Settings(), ALONE, None, arguments=SimpleNamespace(out=tmp_path, check=None))
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
    found = Exported(task, model, outputs.softmax).of_pictures(pictures)
    high, low = np.e / (np.e + 2), 1 / (np.e + 2)
    np.testing.assert_allclose(found["probabilities"], [[high, low, low], [low, low, high]])
    np.testing.assert_array_equal(found["classes"], [0, 2])


def test_a_sheet_holds_the_pictures_and_labels_of_the_first_step(tiny, tmp_path):
    flags = ["--flagfile=configs/demo.cfg", *tiny, "--accumulation_steps=1", "--num_steps=2"]
    command("browse", *flags, f"--out={tmp_path}/sheet.png", "--count=6")
    command("browse", *flags, f"--out={tmp_path}/sheet.png", "--count=6")  # replaces its own
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    Image.fromarray(sheet).save(tmp_path / "photo.png")
    ended = launch(1, ["-m", "hvdkit", "browse", *flags, f"--out={tmp_path}/photo.png"], "alone")
    assert ended.code == 2 and "photo.png is a file that this command did not" in ended.output
    config = settings_lib.parse(["train.py", *flags])
    examples, _ = browse.samples(config.for_ranks(1), 6)
    assert len(examples) == 6 and len({e["inputs"]["image"].tobytes() for e in examples}) == 6
    first = examples[0]["inputs"]["image"]
    assert first.shape == (32, 32, 3) and (sheet[1:97:3, 1:97:3] == first).all()
    label = browse.COLOURS[examples[0]["targets"]["label"][..., 0]]
    assert (sheet[1:97:3, 97:193:3] == label).all()


def test_a_class_stands_below_its_picture():
    example = {"inputs": {"image": np.full((8, 8, 3), 7, np.uint8)}, "targets": np.int64(1)}
    named, plain = browse.tile(example, ["cat", "dog"]), browse.tile(example, [])
    assert named.shape == (98 + 18, 98, 3) and (named[1:97, 1:97] == 7).all()
    assert (named[98:] != plain[98:]).any()  # "dog", and "1"
    with pytest.raises(ValueError, match="inputs hold no picture"):
        browse.tile({"inputs": np.zeros(8), "targets": np.int64(1)}, [])
