"""hvdkit export and predict of tasks without pictures: by the model's own inputs."""

import errno
import json
import os
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from refusals import refused
from small_checkpoints import ALONE
from small_models import Called
from small_runs import Small

from hvdkit import whole_files
from hvdkit.checkpoint.checkpoints import Checkpoints
from hvdkit.commands import example_files, export, predict
from hvdkit.data.place import Place
from hvdkit.run import load_run
from hvdkit.settings import Settings
from hvdkit.stop import NOT_NOW, Stop
from hvdkit.train.optim import optimizer
from hvdkit.train.step.state import State
from hvdkit.train.task import inputs as inputs_lib
from hvdkit.train.task import outputs as outputs_lib
from hvdkit.train.task.inputs import Inputs
from ranks import json_lines

NEVER = SimpleNamespace(asked=False)


class Table(Small):
    """Columns, of which one has spaces in its name, text, tokens of any number; nested outputs."""

    def build_model(self):
        hours = keras.Input((), name="hours per week", dtype="float64")
        age = keras.Input((1,), name="age")
        job = keras.Input((), name="job", dtype="string")
        tokens = keras.Input((None,), name="tokens", dtype="int32")
        words = keras.layers.StringLookup(
            vocabulary=["cook", "baker"], output_mode="one_hot"
        )
        parts = [keras.ops.cast(hours[:, None], "float32"), age, words(job)]
        parts.append(
            keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(9, 4)(tokens))
        )
        x = keras.layers.Concatenate()(parts)
        outputs = {"one": keras.layers.Dense(1)(x), "more": [keras.layers.Dense(3)(x)]}
        columns = {"hours per week": hours, "age": age, "job": job}
        return keras.Model({"columns": columns, "tokens": tokens}, outputs)


LINES = [
    {
        "columns/hours per week": 3,
        "columns/age": 4.5,
        "columns/job": "cook",
        "tokens": [1, 2],
    },
    {
        "columns/hours per week": 0.1,
        "columns/age": [2],
        "columns/job": "\u00e9",
        "tokens": [8],
    },
    {
        "columns/hours per week": -2,
        "columns/age": [3],
        "columns/job": "",
        "tokens": [1, 5],
    },
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The settings of a run with one checkpoint, of the task that it is given; and its model."""

    def make(kind=Table):
        config = Settings(run_dir=str(tmp_path / "run"), num_steps=3)
        task = kind(config)
        model = task.build_model()
        rule = optimizer.build(config, model, None)
        state = State(model, rule, "float32", task=task)
        checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 1, ALONE)
        checkpoints.write(checkpoints.copy(Place(1), state.variables, config))
        monkeypatch.setattr(load_run.tasks, "load_task", kind)
        return config, model

    return make


def arguments_of(out, *files, check=None, onnx=False):
    """Flags of a command, as argparse gives them."""
    return SimpleNamespace(
        out=out,
        checkpoint="last",
        ema=False,
        check=check,
        onnx=onnx,
        pictures=[*files],
    )


def called(model, line):
    """The model's own outputs for a line."""
    columns = {
        "hours per week": tf.constant([line["columns/hours per week"]], tf.float64),
        "age": tf.reshape(tf.constant(line["columns/age"], tf.float32), [1, 1]),
        "job": tf.constant([line["columns/job"]]),
    }
    outputs = model({"columns": columns, "tokens": tf.constant([line["tokens"]])})
    return {"one": outputs["one"].numpy()[0], "more/0": outputs["more"][0].numpy()[0]}


def test_columns_text_and_tokens_are_exported_and_predicted_by_their_names(
    run, tmp_path, capsys
):
    config, model = run()
    file = tmp_path / "people.jsonl"
    file.write_text("".join(json.dumps(line | {"id": 7}) + "\n" for line in LINES))
    out = tmp_path / "out"
    predict.predict(config, ALONE, NEVER, arguments=arguments_of(out, file))
    assert "line 1 has id, no input of the model" in capsys.readouterr().out
    predictions = json_lines(out / "predictions.jsonl")
    for line, predicted in zip(LINES, predictions, strict=True):
        for name, value in called(model, line).items():
            np.testing.assert_allclose(predicted[name], value, 1e-5)

    export.export(
        config, ALONE, NEVER, arguments=arguments_of(tmp_path / "exported", check=file)
    )
    assert "equal outputs (more/0 [2, 3], one [2, 1])" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "exported").glob("[!.]*"))
    assert names == ["card.json", "model.keras", "saved_model"]
    served = tf.saved_model.load(str(tmp_path / "exported" / "saved_model"))
    outputs = served.signatures["serving_default"](
        columns_hours_per_week=tf.constant([3, 0.1], tf.float64),
        columns_age=tf.constant([[4.5], [2]]),
        columns_job=tf.constant(["cook", "\u00e9"]),
        tokens=tf.constant([[1, 2], [8, 8]]),
    )
    np.testing.assert_allclose(outputs["one"][0], called(model, LINES[0])["one"], 1e-5)


def test_arrays_are_predicted_to_arrays(run, tmp_path):
    class Plain(Small):
        def decode(self, outputs):
            return {
                "file": tf.cast(outputs, tf.bfloat16),
                "word": tf.strings.as_string(outputs),
            }

    config, model = run(Plain)
    x = np.random.default_rng(1).normal(size=(20, 6))
    np.savez_compressed(tmp_path / "x.npz", inputs=x)
    predict.predict(
        config,
        ALONE,
        NEVER,
        arguments=arguments_of(tmp_path / "out", tmp_path / "x.npz"),
    )
    with np.load(tmp_path / "out" / "predictions.npz") as file:
        outputs = tf.cast(model(x), tf.bfloat16)
        np.testing.assert_array_equal(file["file"], tf.cast(outputs, tf.float32))
        assert file["word"].shape == (20, 3) and file["word"].dtype.kind == "S"


def test_an_example_without_a_class_is_named(run, tmp_path, capsys):
    config, _ = run(Small)
    x = np.zeros([4, 6], np.float32)
    x[2, 0] = np.nan
    np.savez(tmp_path / "x.npz", inputs=x)
    arguments = arguments_of(tmp_path / "out", tmp_path / "x.npz")
    refused(
        lambda: predict.predict(config, ALONE, NEVER, arguments=arguments),
        "1 of 4 examples are without a class",
        kind=Stop,
    )
    words = "without a class: " + f"{tmp_path}/x.npz, example 3: the model's outputs"
    assert words in capsys.readouterr().out
    with np.load(tmp_path / "out/predictions.npz") as file:
        assert (file["classes"] < 0).tolist() == [False, False, True, False]


def test_what_the_task_holds_is_exported(run, tmp_path, capsys):
    class Named(Small):
        def __init__(self, config):
            super().__init__(config)
            names = tf.lookup.KeyValueTensorInitializer(
                tf.range(3, dtype=tf.int64), ["low", "middle", "high"]
            )
            self.tables = {"names": tf.lookup.StaticHashTable(names, "none")}
            self.factors = [tf.Variable(2.0), keras.Variable(3.0)]
            self.letters = keras.layers.StringLookup(vocabulary=["a", "b"], invert=True)

        def decode(self, outputs):
            first, second = self.factors
            numbers = tf.argmax(outputs, -1)
            return {
                "word": self.tables["names"].lookup(numbers),
                "letter": self.letters(numbers),
                "six": tf.ones_like(outputs) * first * second,
            }

    config, _ = run(Named)
    export.export(config, ALONE, NEVER, arguments=arguments_of(tmp_path / "out"))
    assert "equal outputs (letter [" in capsys.readouterr().out


def test_lines_of_ranks_are_merged_by_file_and_none_makes_no_file(tmp_path, capsys):
    parts = [tmp_path / "0", tmp_path / "1"]
    for part, names in zip(parts, (['a"', "c"], ["b", "d"])):
        lines = [json.dumps({"file": name, "depth": [1]}) + "\n" for name in names]
        part.write_text("".join(lines))
    out = tmp_path / "predictions.jsonl"
    example_files.merge_parts(out, parts)
    assert [line["file"] for line in json_lines(out)] == ['a"', "b", "c", "d"]
    assert not any(part.exists() for part in parts)
    assert len(capsys.readouterr().out.splitlines()) == 4
    (tmp_path / "0").write_text("")
    example_files.merge_parts(tmp_path / "none", parts[:1])
    assert not (tmp_path / "none").exists()


def test_inputs_of_a_model_that_does_not_say_them_are_those_of_the_data():
    class Subclassed(Small):
        def evaluation_example(self, sample):
            return {
                "inputs": (sample["x"][:2], {"b": sample["x"][2:]}),
                "targets": sample["y"],
            }

        def build_model(self):
            def call(model, inputs, training):
                return model.head(tf.concat([inputs[0], inputs[1]["b"]], -1))

            return Called(call, head=keras.layers.Dense(3))

    task = Subclassed(Settings())
    model = task.build_model()
    inputs = inputs_lib.of_model(task, model, 8)
    assert str(inputs) == "inputs_0 float32 [2], inputs_1_b float32 [4]" and model.built
    assert [spec.shape[0] for spec in inputs.specs.values()] == [None, None]

    class Away(Subclassed):
        def sources(self):
            raise OSError("/data does not exist")

    refused(
        lambda: inputs_lib.of_model(Away(Settings()), task.build_model(), 8),
        "which say",
        "/data",
    )


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (
            lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]),
            ["inputs"],
        ),
        (
            lambda: both(keras.Input((4,), name="left"), keras.Input((4,))),
            ["left", "inputs_1"],
        ),
    ],
)
def test_an_input_without_a_name_has_the_same_in_every_process(model, wanted):
    assert inputs_lib.of_model(Small(Settings()), model(), 8).names == wanted


def both(*tensors):
    return keras.Model(tensors, keras.layers.Add()(tensors))


SPECS = Inputs(
    {
        "age": tf.TensorSpec([None, 1], tf.float32),
        "ids": tf.TensorSpec([None, None], tf.int32),
        "job": tf.TensorSpec([None], tf.string),
    },
    ["age", "ids", "job"],
)
GOOD = {"age": 1.5, "ids": [1, 2], "job": "cook"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"age": 1', "line 2 is no JSON"),
        (
            "[1, 2]",
            "line 2 is no JSON object: write {...} with age float32 [1], ids int32 [any]",
        ),
        ({"age": 1.5, "ids": [1]}, "line 2 has no job; the model takes age"),
        (GOOD | {"ids": [1, 2.5]}, "line 2: ids holds a value that int32 cannot"),
        (GOOD | {"ids": [1, 2**40]}, "line 2: ids holds a value that int32 cannot"),
        (GOOD | {"ids": [[1], [2, 3]]}, "line 2: ids holds lists of different lengths"),
        (
            GOOD | {"ids": 3},
            "line 2: ids has examples of shape []; the model takes int32 [any]",
        ),
        (
            GOOD | {"age": None},
            "line 2: age is null: write numbers (NaN for a missing one)",
        ),
        (
            GOOD | {"age": "old"},
            "line 2: age holds <U3, not numbers; the model takes float32 [1]",
        ),
        (GOOD | {"age": 1e300}, "line 2: age holds a value that float32 cannot"),
        (GOOD | {"job": 3}, "line 2: job holds int64, not texts"),
        (GOOD | {"job": ["a", 3]}, "line 2: job is"),
    ],
)
def test_a_wrong_line_is_named(line, words, tmp_path):
    file = tmp_path / "lines.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    file.write_text(f"{json.dumps(GOOD)}\n{text}\n")
    refused(lambda: example_files.read(file, SPECS), f"{file}, {words}")


def test_arrays_become_what_the_model_takes(tmp_path):
    file = tmp_path / "x.npz"
    np.savez(file, age=np.zeros(3), ids=np.ones([3, 4]), job=np.array(["a", "b", "c"]))
    arrays = example_files.read(file, SPECS)
    assert arrays["ids"].dtype == np.int32 and arrays["job"][1] == b"b"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"age": np.zeros([3, 2])}, "age has examples of shape [2]; the model takes float32 [1]"),
        ({"ids": np.zeros([2, 4])}, "arrays must be of one length"),
        ({"ids": np.zeros([3, 4], np.complex64)}, "ids holds complex64, not numbers"),
        ({"job": np.zeros([3])}, "job holds float64, not texts"),
        ({"job": np.array(["a", None, "b"])}, "is no file of arrays by np.savez: Object arrays"),
        ({"age": np.float32(3)}, "age is one value"),
        ({name: np.zeros([0, *tail]) for name, tail in (("age", [1]), ("ids", [2]), ("job", []))},
         "holds no example"),
    ],
)  # fmt: skip
def test_a_wrong_array_is_named(change, words, tmp_path):
    file = tmp_path / "x.npz"
    arrays = {
        "age": np.zeros(3),
        "ids": np.ones([3, 4]),
        "job": np.array(["a", "b", "c"]),
    }
    np.savez(file, **(arrays | change))
    refused(lambda: example_files.read(file, SPECS), str(file), words)


def test_an_example_that_the_model_cannot_take_is_named_and_the_old_predictions_stay(
    run, tmp_path
):
    config, _ = run()
    file = tmp_path / "people.jsonl"
    out = tmp_path / "out"
    out.mkdir()
    (out / "predictions.jsonl").write_text("old")
    recorded(out, "predictions.jsonl")

    def predict_lines(lines: list[dict], stop_signal: SimpleNamespace) -> None:
        file.write_text("\n".join(json.dumps(line) for line in lines))
        predict.predict(config, ALONE, stop_signal, arguments=arguments_of(out, file))

    bad = LINES[2] | {"tokens": [1, 9]}  # the embedding has 9 rows
    refused(
        lambda: predict_lines([*LINES[:2], bad], NEVER),
        f"{file}, line 3: ",
        "9 is not in [0, 9)",
        kind=Stop,
    )
    stopped = SimpleNamespace(asked=True)
    refused(lambda: predict_lines(LINES, stopped), "nothing was written", kind=Stop)
    assert [path.name for path in out.glob("[!.]*")] == ["predictions.jsonl"]
    assert (out / "predictions.jsonl").read_text() == "old"


def recorded(folder, *names):
    """Makes the folder say that a command has written these names."""
    names_folder = folder.parent / "names_folder"
    names_folder.mkdir()
    whole_files._write_record(folder, names, names_folder)


def test_what_fails_leaves_the_export_before(run, tmp_path, monkeypatch):
    config, _ = run()
    out = tmp_path / "out"
    (out / "saved_model").mkdir(parents=True)
    for name in ("saved_model/old", "model.keras", "card.json"):
        (out / name).write_text("old")
    recorded(out, "saved_model", "model.keras", "card.json")
    before = sorted(out.rglob("*"))

    def full(module, folder, signatures):
        os.mkdir(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tf.saved_model, "save", full)
    with pytest.raises(Stop, match="No space left") as stop:
        export.export(config, ALONE, NEVER, arguments=arguments_of(out))
    assert stop.value.code == NOT_NOW
    assert (
        sorted(out.rglob("*")) == before and (out / "model.keras").read_text() == "old"
    )


class Scaled(keras.layers.Layer):
    def __init__(self, factor=1.0, **named):
        super().__init__(**named)
        self.factor = factor

    def call(self, x):
        return self.factor(x) if callable(self.factor) else x * self.factor


class Told(Scaled):
    def get_config(self):
        return super().get_config() | {"factor": self.factor}


class Forgets(Scaled):
    def get_config(self):
        return super(Scaled, self).get_config()


@keras.saving.register_keras_serializable(package="test_examples")
class Registered(Told):
    pass


def double(x):
    return 2 * x


@pytest.mark.parametrize(
    ("layer", "words", "stays"),
    [
        (lambda: Registered(3.0), "", True),
        (
            lambda: Told(3.0),
            "load_model takes model.keras with custom_objects of Told only",
            True,
        ),
        (
            lambda: keras.layers.Lambda(lambda x: 2 * x),
            "with safe_mode=False only",
            True,
        ),
        (lambda: Told(double), "nobody can load model.keras", True),
        (
            lambda: Scaled(double),
            "there is no model.keras: Keras cannot write it",
            False,
        ),
        (
            lambda: Forgets(3.0),
            "there is no model.keras: loaded again it gives other out",
            False,
        ),
    ],
)
def test_what_keras_cannot_write_or_load_is_said(layer, words, stays, tmp_path):
    x = keras.Input((6,))
    model = keras.Model(x, keras.layers.Dense(3)(layer()(x)))
    inputs = inputs_lib.of_model(Small(Settings()), model, 8)
    run = load_run.Trained(Small(Settings()), model, tmp_path, inputs)
    module = export.Exported(run.task, model, outputs_lib.named)
    exports = export.Exports(run, module, {}, tf.ones([2, 6]), {})
    note = export._write_keras(exports, tmp_path / "model.keras")
    assert words in note and "\n" not in note and bool(note) == bool(words), note
    assert (tmp_path / "model.keras").exists() == stays


@pytest.mark.parametrize(
    ("words", "is_kept"), [(["a", "b"], True), (["a\u2028b"], False)]
)
def test_a_vocabulary_that_keras_reads_otherwise_is_not_exported(
    words, is_kept, tmp_path
):
    """The outputs of an empty text, by which both are compared, are the same."""
    lookup = keras.layers.StringLookup(
        output_mode="multi_hot", max_tokens=5, pad_to_max_tokens=True
    )
    lookup.adapt(tf.constant(words))
    x = keras.Input((1,), dtype="string")
    model = keras.Model(x, keras.layers.Dense(3)(lookup(x)))
    inputs = inputs_lib.of_model(Small(Settings()), model, 8)
    run = load_run.Trained(Small(Settings()), model, tmp_path, inputs)
    module = export.Exported(run.task, model, outputs_lib.named)
    exports = export.Exports(run, module, {}, tf.constant([[""], [""]]), {})
    note = export._write_keras(exports, tmp_path / "model.keras")
    assert (tmp_path / "model.keras").exists() == is_kept
    assert ("loaded again it has another vocabulary" in note) == (not is_kept), note


def test_onnx_of_bfloat16_is_refused_at_the_start(tmp_path):
    config = Settings(run_dir=str(tmp_path), precision="bfloat16")
    arguments = arguments_of(tmp_path / "out", onnx=True)
    refused(
        lambda: export.export(config, ALONE, NEVER, arguments=arguments),
        "--onnx: the run has --precision=bfloat16",
        "add --precision=float32",
        kind=Stop,
    )


def test_a_layer_that_keras_cannot_write_is_exported_as_a_saved_model(
    run, tmp_path, capsys
):
    class OfOne(Small):
        def build_model(self):
            x = keras.Input((6,), name="x")
            return keras.Model(x, keras.layers.Dense(3)(Scaled(double)(x)))

    config, model = run(OfOne)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.keras").write_text("of another run")
    recorded(tmp_path / "out", "model.keras")
    export.export(config, ALONE, NEVER, arguments=arguments_of(tmp_path / "out"))
    assert "there is no model.keras: Keras cannot write it" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "out").glob("[!.]*"))
    assert names == ["card.json", "saved_model"]
    served = tf.saved_model.load(str(tmp_path / "out" / "saved_model"))
    outputs = served.signatures["serving_default"](x=tf.ones([1, 6]))
    expected = tf.nn.softmax(model(tf.ones([1, 6])))
    np.testing.assert_allclose(outputs["probabilities"], expected, 1e-5)


def test_noise_that_the_model_cannot_take_asks_for_examples(run, tmp_path):
    class Long(Small):
        def build_model(self):
            x = keras.Input((None, 2), name="sound")
            y = keras.layers.Conv1D(3, 50)(x)
            return keras.Model(x, keras.layers.GlobalMaxPooling1D()(y))

    config, _ = run(Long)
    refused(
        lambda: export.export(
            config, ALONE, NEVER, arguments=arguments_of(tmp_path / "out")
        ),
        "with noise: --check=FILE gives it examples",
        kind=Stop,
    )
    assert not (tmp_path / "out").exists()
