"""Averages of weights; weights of other runs and of .keras files. test_backbone.py has
backbones."""

import dataclasses
import io
import json
import os
import zipfile
import zlib
from types import SimpleNamespace

import h5py
import keras
import memory
import numpy as np
import pytest
import tensorflow as tf
from refusals import refused
from small_checkpoints import ALONE, counted, first_weights, of_step
from small_models import Net
from small_runs import same

from hvdkit.checkpoint import checkpoints, warm_start, writing
from hvdkit.data.place import Place
from hvdkit.scores import MainMetric
from hvdkit.settings import Settings
from hvdkit.train.optim import optimizer
from hvdkit.train.step.state import State, TaskState
from ranks import CHECKS, names_of_checks, run_checks


def network(start: float = 0.0) -> keras.Model:
    """Named layers and batch norm; every weight counts up from `start`."""
    x = keras.Input((4,))
    y = keras.layers.BatchNormalization(name="norm")(
        keras.layers.Dense(5, name="body")(x)
    )
    return counted(keras.Model(x, keras.layers.Dense(3, name="head")(y)), start)


def save(
    folder, model: keras.Model, *, step: int = 1, state=None
) -> checkpoints.Checkpoints:
    kept = checkpoints.Checkpoints(folder, 9, ALONE)
    state = state or averaging(model)
    kept.write(kept.copy(Place(step), state.variables, Settings()))
    return kept


def averaging(model: keras.Model, decay: float = 0.0) -> State:
    config = Settings(base_lr=0.1, momentum=0.0, ema_decay=decay)
    return State(model, optimizer.build(config, model), "float32")


@pytest.fixture
def run_dir(tmp_path):
    """Checkpoints of steps 1, 2, 3 with scores 0.5, 0.9, none; weights start at the step."""
    for step, score in ((1, 0.5), (2, 0.9), (3, None)):
        kept = save(
            tmp_path / "run" / "checkpoints", network(start=float(step)), step=step
        )
        if score is not None:
            kept.add_score(of_step(step, score))
    return tmp_path / "run"


def test_a_runs_best_checkpoint_or_the_one_that_is_named(run_dir):
    model = network(start=70.0)
    assert not warm_start.load(model, run_dir, False) and set(first_weights(model)) == {
        2.0
    }
    warm_start.load(model, run_dir / "checkpoints" / "step-00000003", False)
    assert set(first_weights(model)) == {3.0}
    # Step 2 has the higher score, but of another measure than the newest that has one.
    writing.set_score(
        run_dir / "checkpoints" / "step-00000002", of_step(2, 0.9), {"--eval_crop": 8}
    )
    writing.set_score(
        run_dir / "checkpoints" / "step-00000003", of_step(3, 0.1), {"--eval_crop": 0}
    )
    warm_start.load(model, run_dir, False)
    assert set(first_weights(model)) == {1.0}, (
        "of an older version's: compared with all"
    )
    renamed = (run_dir / "checkpoints" / "step-00000002").rename(run_dir / "good")
    warm_start.load(model, renamed, False)
    assert set(first_weights(model)) == {2.0}
    damaged = run_dir / "checkpoints" / "step-00000001"
    (damaged / "state.npz").write_bytes(b"damaged")
    for path in (run_dir, damaged):
        words = "step-00000001/state.npz is damaged"
        refused(lambda path=path: warm_start.load(model, path, False), words)


def unnamed(start: float, before: int = 0) -> keras.Model:
    """Layers that Keras names; `before` others were made first, so it names them otherwise."""
    for _ in range(before):
        keras.layers.Dense(1), keras.layers.Conv1D(1, 1), keras.random.SeedGenerator()
    x = keras.Input((4, 3))
    y = keras.layers.TimeDistributed(keras.layers.Dense(3))(
        keras.layers.Conv1D(3, 1)(x)
    )
    y = keras.layers.Bidirectional(keras.layers.GRU(2))(keras.layers.Dropout(0.1)(y))
    return counted(
        keras.Model(x, keras.layers.Dense(2)(keras.layers.Dense(2)(y))), start
    )


@pytest.mark.parametrize("kind", ["checkpoint", "keras"])
def test_what_keras_counted_does_not_matter(kind, tmp_path):
    there = unnamed(5.0)
    if kind == "keras":
        there.save(tmp_path / "model.keras")
    else:
        save(tmp_path / "checkpoints", there)
    model = unnamed(70.0, before=3)
    state = next(v for v in model.variables if v.name == "seed_generator_state")
    state.assign([3, 1])
    assert [v.path for v in model.variables] != [v.path for v in there.variables]
    path = tmp_path / "model.keras" if kind == "keras" else tmp_path
    assert not warm_start.load(model, path, False)
    same(model.weights, there.weights)
    assert state.numpy().tolist() == [3, 1], (
        "states of random layers are the new run's own"
    )
    # Also inside another model.
    x = keras.Input((4, 3))
    inner = unnamed(70.0)
    model = keras.Model(x, keras.layers.Dense(2, name="new")(inner(x)))
    assert list(warm_start.load(model, path, True)) == ["new/kernel", "new/bias"]
    assert inner.trainable_variables[0].numpy().flat[0] == 5.0


def averaged_run(folder, count, decay=0.0):
    """A run's folder, after so many steps; its weights, and those that it evaluates."""
    model = network(start=1.0)
    state = averaging(model, decay)
    for number in range(count):
        gradients = [
            tf.fill(v.shape, float(number + 1)) for v in model.trainable_variables
        ]
        state.apply(gradients, model.trainable_variables)
    save(folder / "checkpoints", model, step=count, state=state)
    weights = [v.numpy() for v in model.variables]
    with state.averaged_weights():
        return folder, weights, [v.numpy() for v in model.variables]


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_best_of_a_run_by_the_scores_of_its_averages_is_noted(
    tmp_path, capsys, decay
):
    averaged_run(tmp_path, 3, decay=decay)
    path = tmp_path / "checkpoints" / "step-00000003"
    writing.set_score(path, of_step(3, 0.5), {})
    for start, init_ema in ((tmp_path, False), (path, False), (tmp_path, bool(decay))):
        model = network()
        warm_start.start(
            model,
            Settings(init_from=str(start), init_ema=init_ema),
            task_state=TaskState(SimpleNamespace(), model, []),
            metric=MainMetric("accuracy"),
        )
        said = capsys.readouterr().out
        is_noted = bool(decay) and start == tmp_path and not init_ema
        assert ("--init_ema starts from these" in said) == is_noted, said


def test_averages_of_another_run_on_request(tmp_path):
    _, weights, averages = averaged_run(tmp_path, 3, decay=0.5)
    assert not np.array_equal(weights[0], averages[0])
    for wanted, values in ((False, weights), (True, averages)):
        model = network(start=70.0)
        assert not warm_start.load(model, tmp_path, False, averages=wanted)
        same(model.variables, values)


def keras_file(folder, share: float = 1.0):
    file = folder / "model.keras"
    network().save(file)
    os.truncate(file, int(share * file.stat().st_size))
    return file


def quantized(folder):
    """Keras keeps the codes of int8, not the weights, and a scale beside them."""
    model = network()
    model.quantize("int8")
    model.save(folder / "model.keras")
    return folder / "model.keras"


class Tied(keras.layers.Layer):
    """A head whose kernel is the table of an embedding, which it holds, or the layer."""

    def __init__(self, words=None, *, holds_variable=True, **named):
        super().__init__(**named)
        self.words = words
        if holds_variable:
            self.words, self.table = None, words.embeddings
        self.bias = self.add_weight(shape=(5,), name="bias")

    def call(self, x):
        table = self.words.embeddings if self.words else self.table
        return keras.ops.matmul(x, keras.ops.transpose(table)) + self.bias

    def get_config(self):
        return super().get_config()


def language(start: float, head=None, **options) -> keras.Model:
    """A small language model; the head is tied, or `head`."""
    x = keras.Input((4,), dtype="int32")
    words = keras.layers.Embedding(5, 3, name="words")
    y = words(x)
    head = head or Tied(words, name="head", **options)
    return counted(keras.Model(x, head(y)), start)


def test_a_tied_variable_is_the_files_or_refused(tmp_path, capsys):
    file = tmp_path / "untied.keras"
    plain = language(3.0, keras.layers.Dense(5, name="head", use_bias=False))
    plain.save(file)
    wanted = plain.get_layer("words").get_weights()
    # Keras reads the head after the words: the values it was made with would win.
    refused(
        lambda: warm_start.load(language(70.0), file, True),
        *("words/embeddings", "a variable of another layer too", "hold the layer"),
    )
    model = language(70.0, holds_variable=False)
    warm_start.load(model, file, True)
    same(model.get_layer("words").get_weights(), wanted)
    tied = language(5.0)
    tied.save(tmp_path / "tied.keras")
    model = language(70.0)
    warm_start.load(model, tmp_path / "tied.keras", False)
    same(model.get_weights(), tied.get_weights())


def broken(folder):
    model = network()
    model.weights[0].assign(model.weights[0] * np.nan)
    model.save(folder / "model.keras")
    return folder / "model.keras"


CUT = r"--init_from=\S+model.keras cannot be read: ."
NO_AVERAGE = r"holds no average .*--init_ema.*--ema_decay"


@pytest.mark.parametrize(
    ("write", "averages", "match"),
    [
        (lambda at: keras_file(at, 0.9), False, CUT),
        (quantized, False, r"\(int8 there, of a quantized model, float32 here\)"),
        (broken, False, r"\(NaN there\)"),
        (keras_file, True, r"a .keras file holds no average"),
        (lambda at: averaged_run(at, 3)[0], True, NO_AVERAGE),
        # They are zeros so far.
        (lambda at: averaged_run(at, 0, decay=0.5)[0], True, NO_AVERAGE),
        (lambda at: at / "nothing", False, "nothing does not exist"),
    ],
)
def test_what_holds_no_such_weights_is_named_in_one_line(
    write, averages, match, tmp_path
):
    with pytest.raises(ValueError, match=match) as error:
        warm_start.load(network(), write(tmp_path), False, averages=averages)
    assert "\n" not in str(error.value)


def test_a_run_of_which_nothing_fits_is_refused(run_dir):
    """What fits in part is refused or taken on request: checks_warm_start.py."""
    x = keras.Input((4,))
    with pytest.raises(
        ValueError, match=r"2 of the model's 2 .* other/kernel \(missing there\)"
    ):
        warm_start.load(
            keras.Model(x, keras.layers.Dense(3, name="other")(x)), run_dir, True
        )


def test_weights_of_another_precision_are_cast(run_dir):
    x = keras.Input((4,), dtype="float64")
    model = keras.Model(x, keras.layers.Dense(5, name="body", dtype="float64")(x))
    with pytest.raises(
        ValueError, match=r"no place for norm/gamma, .*--init_skip_mismatched"
    ):
        warm_start.load(model, run_dir, False)
    assert not warm_start.load(model, run_dir, True) and set(first_weights(model)) == {
        2.0
    }
    assert model.weights[0].dtype == "float64"


def test_floats_are_not_cast_into_quantized_kernels(tmp_path):
    def dense(*, is_quantized: bool) -> keras.Model:
        x = keras.Input((4,))
        model = keras.Model(x, keras.layers.Dense(3, name="head")(x))
        if is_quantized:
            model.quantize("int8")
        return model

    save(tmp_path / "checkpoints", dense(is_quantized=False))
    for skip in (False, True):
        with pytest.raises(
            ValueError, match="load first, quantize afterwards"
        ) as error:
            warm_start.load(dense(is_quantized=True), tmp_path, skip)
        assert "init_skip_mismatched" not in str(error.value)


def test_a_layer_between_those_that_keras_has_numbered_is_told(tmp_path, capsys):
    def stack(count: int) -> keras.Model:
        keras.utils.clear_session()
        dense = [keras.layers.Dense(4) for _ in range(count)]
        return keras.Sequential([keras.Input((4,)), *dense])

    save(tmp_path / "checkpoints", stack(3))
    with pytest.raises(
        ValueError, match=r"matched by number \(3 dense there, 4 here\)"
    ):
        warm_start.load(stack(4), tmp_path, False)
    warm_start.load(stack(4), tmp_path, True)
    assert "3 dense there, 4 here" in capsys.readouterr().out


def test_two_layers_of_one_path_each_get_their_own(tmp_path):
    """Two models inside another may name their layers alike; order tells them apart."""

    def twins(start: float) -> keras.Model:
        body = [keras.layers.Dense(4, name="body") for _ in range(2)]
        model = Net(*(keras.Sequential([layer], name="part") for layer in body))
        model(np.zeros((1, 4), np.float32))
        return counted(model, start)

    fresh = twins(0.0)
    save(tmp_path / "checkpoints", twins(10.0))
    warm_start.load(fresh, tmp_path, skip=False)
    assert first_weights(fresh) == [10.0] * 4


class Holds:
    """A task with a teacher, a queue, an optimizer and random numbers of its own."""

    def __init__(self, start: float, queue: int = 3, *, extra: bool = False) -> None:
        self.teacher = counted(
            keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]), start
        )
        self.queue = tf.Variable(tf.fill([queue], start))
        self.adam = keras.optimizers.Adam(start + 1.0)
        self.draws = keras.random.SeedGenerator(int(start))
        if extra:
            self.counter = tf.Variable(start)


def starting(run_dir, task: Holds, *, skip: bool = False) -> Holds:
    model = network()
    config = Settings(init_from=str(run_dir), init_skip_mismatched=skip)
    warm_start.start(
        model, config, task_state=TaskState(task, model), metric=MainMetric("accuracy")
    )
    return task


def test_what_a_task_holds_starts_from_there_too(tmp_path, capsys):
    model = network(start=7.0)
    state = State(
        model,
        optimizer.build(Settings(), model),
        "float32",
        task=Holds(5.0, extra=True),
    )
    save(tmp_path / "checkpoints", model, state=state)
    task = starting(tmp_path, Holds(1.0))
    assert first_weights(task.teacher) == [5.0, 5.0] and set(task.queue.numpy()) == {
        5.0
    }
    assert float(task.adam.learning_rate) == 2.0 and int(task.draws.state[0]) == 1
    printed = capsys.readouterr().out
    assert "of what the task holds, too: task/queue/0000, task/teacher/" in printed
    assert "is not used: task/counter/0000" in printed and "left as made" not in printed
    words = "task/queue/0000 ([3] there, [4] here). --init_skip_mismatched leaves"
    refused(lambda: starting(tmp_path, Holds(1.0, queue=4)), words)
    task = starting(tmp_path, Holds(1.0, queue=4), skip=True)
    assert first_weights(task.teacher) == [5.0, 5.0] and set(task.queue.numpy()) == {
        1.0
    }
    # Of a run whose task held nothing.
    save(tmp_path / "plain" / "checkpoints", network(start=7.0))
    task = starting(tmp_path / "plain", Holds(1.0))
    printed = capsys.readouterr().out
    assert first_weights(task.teacher) == [1.0, 1.0]
    assert (
        "holds these, left as made: task/queue/0000 (missing there), task/teacher"
        in printed
    )


def test_weights_of_another_vocabulary_are_refused(tmp_path, capsys):
    def lookup(words: list[str]) -> SimpleNamespace:
        return SimpleNamespace(lookup=keras.layers.StringLookup(vocabulary=words))

    model = network(start=7.0)
    task = lookup(["a", "b"])
    state = State(model, optimizer.build(Settings(), model), "float32", task=task)
    save(tmp_path / "checkpoints", model, state=state)
    starting(tmp_path, lookup(["a", "b"]))
    refused(
        lambda: starting(tmp_path, lookup(["b", "a"])),
        "table/0000 (a vocabulary or bound",
    )
    starting(tmp_path, lookup(["b", "a"]), skip=True)
    assert "is not used: table/0000" in capsys.readouterr().out


def given_words(words: list) -> keras.layers.Layer:
    return keras.layers.StringLookup(vocabulary=words)


def adapted_words(words: list) -> keras.layers.Layer:
    lookup = keras.layers.TextVectorization(standardize=None, split=None)
    # More frequent words come first.
    lookup.adapt(tf.constant([words[0], *words]))
    return lookup


def adapted_numbers(words: list) -> keras.layers.Layer:
    lookup = keras.layers.IntegerLookup()
    numbers = [ord(word) for word in words]
    lookup.adapt(np.array([numbers[0], *numbers]))
    return lookup


def boundaries(words: list) -> keras.layers.Layer:
    return keras.layers.Discretization([np.float32(0.1), float(ord(words[0]))])


@pytest.mark.parametrize(
    "make", [given_words, adapted_words, adapted_numbers, boundaries]
)
def test_a_keras_file_of_another_vocabulary_is_refused(make, tmp_path, capsys):
    def reading(words: list) -> keras.Model:
        lookup = make(words)
        dtypes = {given_words: "string", adapted_words: "string", boundaries: "float32"}
        x = keras.Input((1,), dtype=dtypes.get(make, "int64"))
        y = keras.layers.Embedding(9, 2)(lookup(x))
        return keras.Model(
            x, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(y))
        )

    def start(words: list, *, skip: bool = False) -> str:
        model = reading(words)
        warm_start.start(
            model,
            Settings(init_from=str(file), init_skip_mismatched=skip),
            task_state=TaskState(None, model),
            metric=MainMetric("accuracy"),
        )
        return capsys.readouterr().out

    file = tmp_path / "model.keras"
    reading(["a", "b"]).save(file)
    assert "note" not in start(["a", "b"])
    words = "has a vocabulary, special words or boundaries that the model has not"
    refused(lambda: start(["b", "a"]), f"--init_from={file} {words}")
    assert "note: " in start(["b", "a"], skip=True)


@keras.saving.register_keras_serializable()
class Marked(keras.layers.Layer):
    """Puts two words before those that it is given."""

    def __init__(self, vocabulary: list, **options) -> None:
        super().__init__(**options)
        self.vocabulary = vocabulary
        self.lookup = keras.layers.StringLookup(vocabulary=["<s>", "</s>", *vocabulary])

    def get_config(self) -> dict:
        return super().get_config() | {"vocabulary": self.vocabulary}

    def call(self, words):
        return self.lookup(words)


def test_special_words_of_a_keras_file_are_compared(tmp_path):
    def start(lookup: keras.layers.Layer) -> None:
        model = model_of(lookup)
        warm_start.start(
            model,
            Settings(init_from=str(tmp_path / "model.keras")),
            task_state=TaskState(None, model),
            metric=MainMetric("accuracy"),
        )

    def model_of(lookup: keras.layers.Layer) -> keras.Model:
        x = keras.Input((1,), dtype="string")
        y = keras.layers.Embedding(9, 2)(lookup(x))
        return keras.Model(x, keras.layers.GlobalAveragePooling1D()(y))

    model_of(given_words(["a", "b"])).save(tmp_path / "model.keras")
    start(given_words(["a", "b"]))
    masked = keras.layers.StringLookup(vocabulary=["a", "b"], mask_token="")
    refused(lambda: start(masked), "has a vocabulary, special words or boundaries")
    model_of(Marked(["a", "b"])).save(tmp_path / "model.keras")
    start(Marked(["a", "b"]))


def test_a_vocabulary_that_a_keras_file_does_not_have_is_named(tmp_path, capsys):
    """The task alone holds it."""
    network().save(tmp_path / "model.keras")
    lookup = keras.layers.StringLookup(vocabulary=["a"], name="words")
    starting(tmp_path / "model.keras", SimpleNamespace(lookup=lookup))
    assert (
        "does not have the vocabulary or boundaries of words" in capsys.readouterr().out
    )


def test_classes_of_another_order_beside_a_keras_file_are_told(tmp_path, capsys):
    network().save(tmp_path / "model.keras")
    for card, is_told in (
        (None, False),
        (["cat", "dog"], False),
        (["dog", "cat"], True),
    ):
        if card:
            text = json.dumps({"class_names": card})
            (tmp_path / "card.json").write_text(text)
        model = network()
        warm_start.start(
            model,
            Settings(init_from=str(tmp_path / "model.keras")),
            task_state=TaskState(None, model),
            metric=MainMetric("accuracy"),
            class_names=["cat", "dog"],
        )
        assert ("another class" in capsys.readouterr().out) == is_told


def test_the_best_to_start_from_is_by_the_tasks_mode(tmp_path, capsys):
    for step, score in ((1, 20.0), (2, 5.0)):
        checkpoints = save(
            tmp_path / "checkpoints", network(start=float(step)), step=step
        )
        measure = {"main_metric": "mae", "main_metric_mode": "max"}
        checkpoints = dataclasses.replace(checkpoints, measure=measure)
        checkpoints.add_score(of_step(step, score))
    for mode, start in (("max", 1.0), ("min", 2.0)):
        model = network()
        warm_start.start(
            model,
            Settings(init_from=str(tmp_path)),
            task_state=TaskState(None, model),
            metric=MainMetric("mae", mode),
        )
        assert set(first_weights(model)) == {start}


def test_classes_of_another_order_are_told(tmp_path, capsys):
    kept = save(tmp_path / "checkpoints", network())
    named = dataclasses.replace(kept, card={"class_names": ["cat", "dog"]})
    named.write(named.copy(Place(2), averaging(network()).variables, Settings()))
    for class_names, is_told in ((["cat", "dog"], False), (["dog", "cat"], True)):
        model = network()
        warm_start.start(
            model,
            Settings(init_from=str(tmp_path)),
            task_state=TaskState(None, model),
            metric=MainMetric("accuracy"),
            class_names=class_names,
        )
        assert ("another class" in capsys.readouterr().out) == is_told


# Real runs, of the skeleton: every project has it. What 1 rank begins, 2 go on with.
FILE = CHECKS / "checks_warm_start.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    env = {"WARM_RUNS": str(tmp_path_factory.mktemp("warm"))}
    outcomes = {}
    for ranks, start in ((1, "check_one_"), (2, "check_two_")):
        names = [name for name in names_of_checks(FILE) if name.startswith(start)]
        outcomes |= run_checks([FILE], ranks, names=names, env=env)
    return outcomes


@pytest.mark.parametrize("name", names_of_checks(FILE))
def test_real_runs(name, outcomes):
    assert outcomes[name] is None, outcomes[name]


def test_a_keras_file_holds_all_that_it_claims(tmp_path):
    file = tmp_path / "model.keras"
    linked = io.BytesIO()
    with h5py.File(linked, "w") as content:
        content["kernel"] = h5py.ExternalLink(tmp_path / "secret.h5", "/x")
    more = {
        "model.weights.h5": (linked.getvalue(), "is in another file"),
        "a": (bytes(2**28), "its parts claim 268,"),
    }
    for name, (content, words) in more.items():
        network().save(file)
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(
                name, content, zipfile.ZIP_DEFLATED if name == "a" else None
            )
        with pytest.raises(ValueError, match=f"{file} cannot be read: .*{words}"):
            warm_start.load(network(), file, False)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model.weights.npz", b"")
    with pytest.raises(
        ValueError, match=f"{file} cannot be read: it holds no model.weights.h5"
    ):
        warm_start.load(network(), file, False)


def packed_twice(content):
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk((1024,))
    settings.set_deflate(9)
    settings.set_deflate(9)
    space = h5py.h5s.create_simple((1024,))
    name = b"layers/dense/vars/0"
    values = h5py.h5d.create(content.id, name, h5py.h5t.IEEE_F32LE, space, settings)
    values.write_direct_chunk((0,), zlib.compress(zlib.compress(bytes(2**28))))


def packed_chunk(content):
    """A chunk of 4 KiB that gives 256 MiB."""
    name = "layers/dense/vars/0"
    values = content.create_dataset(
        name, (1024,), "f4", chunks=(1024,), compression="gzip"
    )
    values.id.write_direct_chunk((0,), zlib.compress(bytes(2**28)))


def in_circles(content):
    content["layers/dense/more"] = content["layers"]


def by_a_link(content):
    content["layers/dense/more"] = h5py.SoftLink("/layers")


def many_names(content):
    content["layers/dense/vars/0"] = np.ones(3)
    content["layers/dense/vars/1"] = content["layers/dense/vars/0"]


def deep(content):
    content.create_group("layers" + 3000 * "/a")


def of_text(content):
    content["layers/dense/vars/0"] = ["a", "b"]


def no_place(content):
    content["layers/dense/vars/x1"] = np.ones(3)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (packed_twice, "packed otherwise than once by gzip"),
        (packed_chunk, "has a chunk of [0-9,]+ bytes, which holds less"),
        (in_circles, "layers/dense/more is another name of what is in the file once"),
        (by_a_link, "layers/dense/more is a link, which is not allowed"),
        (many_names, "vars/1 is another name of what is in the file once"),
        (deep, "lies more than 100 groups deep"),
        (of_text, "vars/0 is no array of numbers"),
        (no_place, "vars/x1 is not named by its place in the layer"),
    ],
)
def test_a_hostile_keras_file_is_one_sentence_and_takes_no_memory(
    write, words, tmp_path
):
    file = tmp_path / "model.keras"
    weights = io.BytesIO()
    with h5py.File(weights, "w") as content:
        content.create_group("layers/dense/vars").attrs["name"] = "dense"
        write(content)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model.weights.h5", weights.getvalue())
    model = network()
    before = memory.start()
    with pytest.raises(
        ValueError, match=f"--init_from={file} cannot be read: .*{words}"
    ):
        warm_start.load(model, file, False)
    assert memory.peak() - before < 100e6


def test_no_model_of_a_keras_file_is_made(tmp_path):
    """What describes the model, which could name functions to call, is not even read."""
    model = network(start=1.0)
    model.save(tmp_path / "plain.keras")
    file = tmp_path / "model.keras"
    with (
        zipfile.ZipFile(tmp_path / "plain.keras") as plain,
        zipfile.ZipFile(file, "w") as archive,
    ):
        archive.writestr("model.weights.h5", plain.read("model.weights.h5"))
        archive.writestr("config.json", b"no JSON at all")
    fresh = network(start=70.0)
    assert not warm_start.load(fresh, file, False)
    same(fresh.weights, model.weights)


def layers_with_kernels(rank: int = 0, alpha: float = 0.0) -> keras.Model:
    """Of each kind that Keras gives LoRA factors, here not zeros, if `rank`."""
    keras.utils.set_random_seed(rank)
    x = keras.Input((6,), dtype="int32")
    y = keras.layers.Embedding(9, 4, name="embedding")(x)
    y = keras.layers.Conv1D(5, 2, name="conv")(y)
    y = keras.layers.EinsumDense("abc,cd->abd", output_shape=(None, 3), name="einsum")(
        y
    )
    y = keras.layers.Dropout(0.5)(y) if rank else y  # a dropout's state is no weight
    model = keras.Model(x, keras.layers.Dense(2, name="head")(y))
    for layer in model.layers if rank else ():
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(rank, lora_alpha=alpha)
            second = layer.variables[-1]
            second.assign(keras.random.normal(second.shape, seed=3))
    return model


def test_lora_factors_of_a_run_are_merged_where_the_model_has_others(tmp_path):
    tuned = layers_with_kernels(2, alpha=6.0)
    words = np.arange(12).reshape(2, 6) % 9
    save(tmp_path / "checkpoints", tuned)
    plain = layers_with_kernels()
    assert not warm_start.load(plain, tmp_path, False)
    np.testing.assert_allclose(plain(words), tuned(words), rtol=1e-4, atol=1e-5)
    assert not np.allclose(plain(words), layers_with_kernels()(words), atol=1e-3)
    same_kind = layers_with_kernels(2, alpha=6.0)
    assert not warm_start.load(same_kind, tmp_path, False)
    same(same_kind.weights, tuned.weights)
    # Of another rank or scale: the product is in the kernels, new factors are as made.
    for rank, alpha in ((3, 6.0), (2, 2.0)):
        other = layers_with_kernels(rank, alpha)
        with pytest.raises(ValueError, match=r"lora_embeddings_a .missing there."):
            warm_start.load(other, tmp_path, False)  # these factors change the outputs
        for layer in other.layers:
            if hasattr(layer, "enable_lora"):
                layer.variables[-1].assign(0 * layer.variables[-1])
        assert not warm_start.load(other, tmp_path, False)
        np.testing.assert_allclose(other(words), tuned(words), rtol=1e-4, atol=1e-5)


def test_a_scale_of_what_is_no_factor_is_refused(tmp_path):
    kept = checkpoints.Checkpoints(tmp_path / "checkpoints", 9, ALONE)
    variables = averaging(network()).variables | {"lora/0000/body": tf.Variable(2.0)}
    kept.write(kept.copy(Place(1), variables, Settings()))
    with pytest.raises(
        ValueError, match="'body' is not the name of a first factor of LoRA"
    ):
        warm_start.load(network(), tmp_path, False)


def test_a_model_with_new_lora_factors_takes_plain_weights(tmp_path):
    plain = network(start=5.0)
    save(tmp_path / "checkpoints", plain)
    tuned = network(start=70.0)
    tuned.get_layer("body").enable_lora(2)
    first = tuned.get_layer("body").lora_kernel_a.numpy()
    assert not warm_start.load(tuned, tmp_path, False) and first.any()
    same(tuned(np.ones((2, 4))), plain(np.ones((2, 4))))
    np.testing.assert_array_equal(tuned.get_layer("body").lora_kernel_a.numpy(), first)


def test_another_lora_alpha_is_refused_on_a_resume(tmp_path):
    kept = save(tmp_path / "checkpoints", layers_with_kernels(2, alpha=6.0))
    for alpha, refusal in (
        (6.0, None),
        (2.0, r"by 1 \(lora_alpha / rank\), not by 3 as on rank 0"),
    ):
        state = averaging(layers_with_kernels(2, alpha))
        kept.restore(kept.find("auto"), state.variables, Settings())
        if refusal is None:
            state.task_state.finalize()
            continue
        with pytest.raises(ValueError, match=refusal):
            state.task_state.finalize()


@pytest.mark.parametrize("kind", ["checkpoint", "keras"])
def test_weights_without_a_place_in_the_model_are_refused(kind, tmp_path, capsys):
    path = tmp_path / "model.keras" if kind == "keras" else tmp_path
    network(start=5.0).save(path) if kind == "keras" else save(
        path / "checkpoints", network()
    )
    x = keras.Input((4,))
    model = keras.Model(x, keras.layers.Dense(5, name="body")(x))
    with pytest.raises(
        ValueError, match=r"the model has no place for .*norm/.*skip_mismatched"
    ):
        warm_start.load(model, path, False)
    assert not warm_start.load(model, path, True)
    assert "is not used: " in capsys.readouterr().out


def test_a_keras_file_and_lora_layers(tmp_path):
    """Keras writes merged kernels; a layer with factors takes a plain kernel and keeps them."""
    tuned = network(start=1.0)
    tuned.get_layer("body").enable_lora(2)
    tuned.get_layer("body").lora_kernel_b.assign(np.ones((2, 5)))
    merged = tuned.get_layer("body").kernel.numpy()
    tuned.save(tmp_path / "tuned.keras")
    plain = network(start=70.0)
    assert not warm_start.load(plain, tmp_path / "tuned.keras", False)
    np.testing.assert_allclose(
        plain.get_layer("body").kernel.numpy(), merged, rtol=1e-6
    )
    plain.save(tmp_path / "plain.keras")
    fresh = network(start=70.0)
    body = fresh.get_layer("body")
    body.enable_lora(2)
    first = body.lora_kernel_a.numpy()
    assert not warm_start.load(fresh, tmp_path / "plain.keras", False)
    np.testing.assert_allclose(body.kernel.numpy(), merged, rtol=1e-6)
    np.testing.assert_array_equal(body.lora_kernel_a.numpy(), first)
    assert first.any()
