"""Checkpoints on disk: whole or not there, verified, few kept; by one rank, without a launcher."""

import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import replace

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from config import Config
from engine import batch_norm, checkpoint_files, variable_names
from engine.checkpoint import Checkpoints, changes
from engine.state import State
from engine.stop import Stop
from engine.world import World
from kills import killed_at_each

ALONE = World(0, 1, 0, 1)


@pytest.fixture
def kept(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2, world=ALONE)


def variables(value=1.0, shape=(2, 3), dtype=tf.float32):
    kernel = tf.Variable(tf.fill(shape, tf.cast(value, dtype)))
    return {"step": tf.Variable(7, dtype=tf.int64), "w/kernel": kernel}


def save(kept, step, value=1.0, score=None, config=None):
    path = kept.save(step, variables(value), config or Config())
    if score is not None:
        kept.add_score(step, score)
    return path


def restored(kept, resume="auto"):
    into = variables(-1.0)
    kept.restore(kept.find(resume, 10**9), into, Config())
    return float(into["w/kernel"][0, 0])


def names(kept):
    return sorted(p.name for p in kept.folder.iterdir())


def test_what_was_saved_is_restored(kept):
    path = save(kept, 7, 1.5)
    into = variables(0.0)
    into["step"].assign(0)
    found = kept.find("auto", 7)
    assert found == (path, 7, False)
    kept.restore(found, into, Config())
    assert int(into["step"]) == 7 and np.all(into["w/kernel"].numpy() == 1.5)


def test_types_that_numpy_does_not_know(kept):
    value = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    path = kept.save(1, {"v": tf.Variable(value), "w": tf.Variable(True)}, Config())
    assert checkpoint_files.read(path)["v"].dtype == value.dtype
    into = {"v": tf.Variable(tf.zeros_like(value)), "w": tf.Variable(False)}
    kept.restore(kept.find("auto", 1), into, Config())
    assert np.all(into["v"].numpy() == value) and bool(into["w"])
    with pytest.raises(Stop, match=r"step 2 not written: t is of type"):
        kept.save(2, {"t": tf.Variable("text")}, Config())
    assert names(kept) == ["step-00000001"]


def test_the_newest_and_the_best_are_kept(kept):
    for step, score in [(1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, None)]:
        save(kept, step, score=score)
    assert names(kept) == ["step-00000002", "step-00000004", "step-00000005"]
    assert kept.best() == (0.9, 2)


def test_of_equal_scores_the_first_is_the_best(kept):
    """It is the one that an uninterrupted run compares with, so early stopping stays the same."""
    for step, score in [(1, 0.9), (2, 0.9), (3, 0.2), (4, 0.2)]:
        save(kept, step, score=score)
    assert names(kept) == ["step-00000001", "step-00000003", "step-00000004"]
    assert kept.best() == (0.9, 1)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_no_number_is_known_and_never_the_best(score, kept):
    path = save(kept, 1)
    assert not kept.has_score(path) and kept.best() is None
    kept.add_score(1, score)
    assert kept.has_score(path) and kept.best() is None
    save(kept, 2, score=-5.0)
    assert kept.best() == (-5.0, 2)
    assert kept.find("auto", 9).step == 2, "a score leaves a checkpoint sound"


def test_pruning_touches_nothing_else(kept):
    others = ["notes.txt", "step-1", "step-00000001.tar", ".step-00000001.mine"]
    kept.folder.mkdir()
    for name in others:
        (kept.folder / name).mkdir()
    (kept.folder / "step-00000000").write_text("a file")
    for step in (123456789, 1234567890):  # more digits than the name has room for
        save(kept, step)
    assert kept.find("auto", 10**10).step == 1234567890
    assert set(names(kept)) >= {*others, "step-00000000"}


def test_a_score_without_its_checkpoint_is_refused(kept):
    save(kept, 1)
    with pytest.raises(Stop, match=r"score of step 2 not written.*step-00000002.*missing"):
        kept.add_score(2, 0.5)


def test_the_same_step_saved_again_keeps_its_score_only_with_the_same_weights(kept):
    path = save(kept, 1, 1.0, score=0.5)
    save(kept, 1, 1.0, config=Config(num_steps=5))
    assert kept.best() == (0.5, 1)
    assert checkpoint_files.read_manifest(path).config["num_steps"] == 5
    save(kept, 1, 2.0)
    assert not kept.has_score(path) and restored(kept) == 2.0 and names(kept) == [path.name]


def test_a_damaged_checkpoint_is_passed_over_and_named(kept, capsys):
    save(kept, 1)
    state = save(kept, 2) / "state.npz"
    damaged = bytearray(state.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    state.write_bytes(damaged)
    assert kept.find("auto", 9).path == kept.folder / "step-00000001"
    assert "step-00000002/state.npz is damaged" in capsys.readouterr().out
    with pytest.raises(Stop, match="damaged"):
        kept.find(str(state.parent), 9)


def test_auto_never_a_checkpoint_and_a_run(kept, tmp_path):
    assert kept.find("auto", 9) is None
    paths = [save(kept, step, float(step)) for step in (1, 2)]
    assert kept.find("never", 9) is None
    assert kept.find(str(paths[0]), 9) == (paths[0], 1, True)
    for run in (tmp_path, f"{tmp_path}/"):
        assert kept.find(str(run), 9) == (paths[1], 2, False)
    renamed = paths[0].rename(tmp_path / "my favourite")
    assert kept.find(str(renamed), 9) == (renamed, 1, True)
    for nothing in (tmp_path / "nothing", tmp_path / "checkpoints", tmp_path / "step-00000001"):
        with pytest.raises(Stop, match=f"--resume={nothing}: .*checkpoint"):
            kept.find(str(nothing), 9)


def test_a_step_past_the_last_is_refused_with_the_ways_out(kept):
    save(kept, 8)
    assert kept.find("auto", 8).step == 8
    with pytest.raises(Stop) as stop:
        kept.find("auto", 6)
    words = ("step 8", "--num_steps=6", "--run_dir", "--resume=never", "step-00000008")
    assert all(word in str(stop.value) for word in words) and "\n" not in str(stop.value)


@pytest.mark.parametrize("number", [1, 3])
def test_another_format_is_refused_by_name_not_passed_over(number, kept):
    save(kept, 1)
    file = save(kept, 2) / "manifest.json"
    record = json.loads(file.read_text()) | {"format": number}
    del record["checksum"]
    if number == 1:
        del record["format"]
    else:
        del record["format"]
        record = {"format": number, **record, "checksum": checkpoint_files._checksum(record, 3)}
    file.write_text(json.dumps(record))
    for resume in ("auto", str(file.parent)):
        with pytest.raises(Stop, match=rf"step-00000002 is of checkpoint format {number}"):
            kept.find(resume, 9)


@pytest.mark.parametrize(
    ("into", "words"),
    [
        (variables(shape=(3, 2)), ["w/kernel", "(2, 3)", "(3, 2)"]),
        (variables(dtype=tf.float64), ["w/kernel is float32", "float64", "--precision"]),
        ({"step": variables()["step"]}, ["'w/kernel' is not known"]),
        (variables() | {"v": tf.Variable(1.0)}, ["'v' is missing"]),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(kept, into, words):
    save(kept, 7)
    before = [v.numpy() for v in into.values()]
    with pytest.raises(Stop) as stop:
        kept.restore(kept.find("auto", 9), into, Config())
    assert all(word in str(stop.value) for word in words), stop.value
    assert all(np.array_equal(v, b) for v, b in zip(into.values(), before))


def test_changed_settings_are_named(kept, capsys):
    save(kept, 7, config=Config(seed=1, power=0.9, log_every=20))
    now = Config(seed=2, power=1.0, log_every=1, run_dir="elsewhere", pack_bytes=100)
    kept.restore(kept.find("auto", 9), variables(), now)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("note")]
    assert "--seed was 1, is 2" in line and "--power was 0.9, is 1.0" in line
    assert line.count(" was ") == 2, line


def test_another_number_of_ranks_is_named_where_it_changes_numbers(kept):
    plain = Config(bn_sync="full")
    before = checkpoint_files.read_manifest(save(kept, 7, config=plain))
    assert changes(before, plain, 4, normed=True) == []
    for config, normed, word in (
        (replace(plain, lr_scaling="linear"), False, "--lr_scaling=linear multiplies"),
        (Config(bn_sync="mean"), True, "--bn_sync=mean normalizes"),
        (Config(bn_sync="moments"), True, "--bn_sync=moments normalizes"),
    ):
        found = [x for x in changes(before, config, 4, normed) if "were 1, are 4" in x]
        assert len(found) == 1 and word in found[0]
        assert not [x for x in changes(before, config, 1, normed) if "are" in x]
        assert not any("normalizes" in x for x in changes(before, config, 4, normed=False))


def test_a_setting_that_came_later_had_its_default(kept):
    before = checkpoint_files.read_manifest(save(kept, 7))
    del before.config["clip_norm"]
    assert changes(before, Config(), 1, True) == []
    assert changes(before, Config(clip_norm=1.0), 1, True) == ["--clip_norm was 0.0, is 1.0"]


def test_the_manifest_says_what_it_is(kept):
    about = json.loads((save(kept, 7, score=0.25) / "manifest.json").read_text())
    assert (about["step"], about["score"], about["config"]["seed"]) == (7, 0.25, 1)


# A full disk, a kill, and bytes that nobody wrote.


@pytest.fixture
def full_disk(tmp_path):
    """A function that leaves `free` bytes to write, and another that gives them back."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root: the limit on a file's size is tested")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def big(value):
    noise = np.random.default_rng(value).random((80, 200))  # 128 kB
    return {"w": tf.Variable(noise)}


def test_a_full_disk_leaves_what_was_there_and_no_half(full_disk):
    kept = Checkpoints(full_disk / "checkpoints", keep=2, world=ALONE)
    kept.save(1, big(1), Config())
    for step in (2, 1):  # a new step, and one that would replace the old
        with pytest.raises(Stop) as stop:
            kept.save(step, big(2), Config())
        assert f"step {step}" in str(stop.value) and "No space left" in str(stop.value)
        assert "step-00000001" in str(stop.value)
        assert names(kept) == ["step-00000001"]
    filler = full_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(Stop, match=r"score of step 1 not written: No space left"):
        kept.add_score(1, 0.5)
    into = big(3)
    kept.restore(kept.find("auto", 9), into, Config())
    assert np.array_equal(into["w"], big(1)["w"]) and not kept.has_score(kept._path(1))
    assert sorted(p.name for p in kept._path(1).iterdir()) == ["manifest.json", "state.npz"]
    filler.unlink()
    kept.add_score(1, 0.5)
    assert kept.best() == (0.5, 1)


def test_a_file_that_may_not_grow_so_far_leaves_nothing(kept):
    save(kept, 1)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, usual[1]))
    try:
        with pytest.raises(Stop, match=r"step 2 not written: File too large"):
            kept.save(2, big(1), Config())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert names(kept) == ["step-00000001"] and restored(kept) == 1.0


def test_a_kill_at_any_moment_of_saving_a_step_again_loses_nothing(tmp_path):
    def saves(folder, value):
        arrays = {"w": np.full((2, 3), value, np.float32)}
        checkpoint_files.write(folder, 5, arrays, {}, 1, "")

    def start(folder):
        saves(folder, 1.0)
        checkpoint_files.set_score(folder / "step-00000005", 0.5)

    outcomes = Counter()
    for folder in killed_at_each(tmp_path, start, lambda folder: saves(folder, 2.0)):
        found, passed_over = checkpoint_files.newest_sound(folder)
        assert found and not passed_over
        value = checkpoint_files.read(found)["w"][0, 0]
        outcomes[float(value)] += 1
        assert checkpoint_files.read_manifest(found).evaluated == (value == 1.0)
        checkpoint_files.tidy(folder)
        assert [p.name for p in folder.iterdir()] == ["step-00000005"]
        saves(folder, 3.0)
        assert checkpoint_files.read(folder / "step-00000005")["w"][0, 0] == 3.0
    print(f"killed at {sum(outcomes.values())} moments: {dict(outcomes)}")
    assert outcomes[1.0] > 5 and outcomes[2.0] > 1


def test_200_random_mutations_restore_right_or_are_passed_over_by_name(kept, capsys):
    """One of them each, of a folder with checkpoints 1 to 4: what comes back is what was saved."""
    kept = replace(kept, keep=4)
    for step in range(1, 5):
        save(kept, step, float(step), score=step / 10)
    pristine = kept.folder.with_name("pristine")
    shutil.copytree(kept.folder, pristine)
    draw, counts, kinds, start = random.Random(9), Counter(), Counter(), time.process_time()
    for _ in range(200):
        shutil.rmtree(kept.folder)
        shutil.copytree(pristine, kept.folder)
        mutate = draw.choice(MUTATIONS)
        victim = mutate(kept.folder, draw)
        capsys.readouterr()
        found = kept.find("auto", 10**9)
        said = capsys.readouterr().out
        into = variables(-1.0)
        kept.restore(found, into, Config())
        assert float(into["w/kernel"][1, 2]) == found.step, (mutate.__name__, found)
        passed_over = found.step < 4
        if passed_over:
            assert victim in said and found.step == 3, (mutate.__name__, victim, said)
        best = kept.best()
        assert best is None or best.score == best.step / 10
        with contextlib.suppress(Stop):  # by name it is refused, or restored right
            assert restored(kept, str(kept.folder / "step-00000004")) == 4.0
        counts["passed over" if passed_over else "restored"] += 1
        kinds[mutate.__name__, "passed over" if passed_over else "restored"] += 1
    seconds = time.process_time() - start
    with capsys.disabled():
        print(f"\n200 mutations in {seconds:.0f} s: {dict(counts)}")
        for (kind, outcome), count in sorted(kinds.items()):
            print(f"  {kind}: {outcome} {count}")
    assert counts["passed over"] > 100 and seconds < 30
    assert {kind for kind, _ in kinds} == {mutate.__name__ for mutate in MUTATIONS}


def newest(folder, draw, name=None):
    return folder / "step-00000004" / (name or draw.choice(["state.npz", "manifest.json"]))


def flip_a_bit(folder, draw):
    file = newest(folder, draw)
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return "step-00000004"


def cut_off(folder, draw):
    file = newest(folder, draw)
    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])
    return "step-00000004"


def empty(folder, draw):
    newest(folder, draw).write_bytes(b"")
    return "step-00000004"


def append(folder, draw):
    file = newest(folder, draw)
    file.write_bytes(file.read_bytes() + draw.randbytes(1 + draw.randrange(9)))
    return "step-00000004"


def overwrite_a_part(folder, draw):
    file = newest(folder, draw)
    content = bytearray(file.read_bytes())
    at = draw.randrange(len(content))
    content[at : at + 8] = draw.randbytes(8)
    file.write_bytes(content)
    return "step-00000004"


def remove(folder, draw):
    newest(folder, draw).unlink()
    return "step-00000004"


def rename_within(folder, draw):
    file = newest(folder, draw)
    file.rename(file.with_name(draw.choice(["state", "manifest", "x.json"])))
    return "step-00000004"


def rename_the_folder(folder, draw):
    """The last one is gone under its name, so it is the new name that is passed over."""
    name = f"step-{draw.choice([0, 5, 77]):08d}"
    (folder / "step-00000004").rename(folder / name)
    return name if name > "step-00000004" else ""


def swap_a_file_with_another_steps(folder, draw):
    file = newest(folder, draw)
    other = folder / "step-00000002" / file.name
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return "step-00000004"


def copy_a_step_under_another_name(folder, draw):
    step = draw.randrange(1, 4)
    shutil.rmtree(folder / "step-00000004")
    shutil.copytree(folder / f"step-{step:08d}", folder / "step-00000004")
    return "step-00000004"


def both_files_of_another_step(folder, draw):
    shutil.copytree(folder / "step-00000002", folder / "step-00000004", dirs_exist_ok=True)
    return "step-00000004"


def json_of_another_type(folder, draw):
    values = [[], 3, None, "text", {}, {"step": 4}, {"step": 4, "sha256": []}, True, 1e999]
    newest(folder, draw, "manifest.json").write_text(json.dumps(draw.choice(values)))
    return "step-00000004"


def json_with_one_value_changed(folder, draw):
    file = newest(folder, draw, "manifest.json")
    record = json.loads(file.read_text())
    record[draw.choice(list(record))] = draw.choice([0, None, [], {}, "x", 10**40, -1.5])
    file.write_text(json.dumps(record))
    return "step-00000004"


def json_that_is_too_deep(folder, draw):
    newest(folder, draw, "manifest.json").write_text("[" * 10**5)
    return "step-00000004"


def bytes_that_are_no_text(folder, draw):
    newest(folder, draw, "manifest.json").write_bytes(b"\xff\xfe" + draw.randbytes(40))
    return "step-00000004"


def a_step_in_words(folder, draw):
    """Right by its checksum, and yet not what this code writes."""
    file = newest(folder, draw, "manifest.json")
    record = json.loads(file.read_text())
    number = record.pop("format")
    del record["checksum"]
    if draw.random() < 0.5:
        record["step"] = "four"
    else:
        del record["ranks"]
    checksum = checkpoint_files._checksum(record, number)
    file.write_text(json.dumps({"format": number, **record, "checksum": checksum}))
    return "step-00000004"


def a_folder_instead_of_a_file(folder, draw):
    file = newest(folder, draw)
    file.unlink()
    file.mkdir()
    return "step-00000004"


def a_file_instead_of_the_folder(folder, draw):
    shutil.rmtree(folder / "step-00000004")
    (folder / "step-00000004").write_bytes(draw.randbytes(10))
    return "step-00000004"


def a_pipe_instead_of_a_file(folder, draw):
    """Reading it would wait for ever."""
    file = newest(folder, draw)
    file.unlink()
    os.mkfifo(file)
    return "step-00000004"


def a_link_to_nowhere(folder, draw):
    victim = draw.choice([newest(folder, draw), folder / "step-00000004"])
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    victim.symlink_to(draw.choice([victim.name, "nowhere"]))  # to itself: a loop
    return "step-00000004"


def no_permission(folder, draw):
    """Root reads it all the same."""
    newest(folder, draw).chmod(0)
    return "step-00000004"


def leftovers_of_a_kill(folder, draw):
    kind = draw.choice(["partial", "deleted", "old"])
    shutil.copytree(folder / "step-00000002", folder / f".step-0000000{draw.randrange(9)}.{kind}")
    return ".step-0000000"


MUTATIONS = [
    *(flip_a_bit, flip_a_bit, cut_off, empty, append, overwrite_a_part, remove, rename_within),
    *(rename_the_folder, swap_a_file_with_another_steps, copy_a_step_under_another_name),
    *(both_files_of_another_step, json_of_another_type, json_with_one_value_changed),
    *(json_that_is_too_deep, bytes_that_are_no_text, a_step_in_words, a_link_to_nowhere),
    *(a_folder_instead_of_a_file, a_file_instead_of_the_folder, a_pipe_instead_of_a_file),
    *(no_permission, leftovers_of_a_kill),
]


def npz(**members):
    content = io.BytesIO()
    np.savez(content, **members)
    return content.getvalue()


def huge_header():
    """An array of 16 TB, says its header."""
    said, lie = b"(1000,), }".ljust(19), b"(2000000000000,), }"
    whole = npz(w=np.zeros(1000))
    assert said in whole
    return whole.replace(said, lie)


WHOLE = npz(w=np.zeros(9))
UNREADABLE = {
    "empty": b"",
    "cut off": WHOLE[:-30],
    "zeros": bytes(100),
    "a beginning": WHOLE[:4],
    "objects": npz(w=np.array([{}], object)),
    "another key": WHOLE.replace(b"descr", b"xxxxx"),
    "16 terabytes": huge_header(),
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_state_that_numpy_cannot_read_is_named_even_with_its_right_sum(content, kept):
    """As if it had been written so: the sums say that it is sound."""
    path = save(kept, 1)
    (path / "state.npz").write_bytes(content)
    about = replace(
        checkpoint_files.read_manifest(path), sha256=checkpoint_files._sha256(path / "state.npz")
    )
    checkpoint_files._write_manifest(path, about)
    with pytest.raises(Stop) as stop:
        kept.restore(kept.find("auto", 9), {"w": tf.Variable(np.zeros(9))}, Config())
    assert re.search(r"step-00000001/state\.npz is damaged: \w+: .", str(stop.value)), stop.value


# Names of variables.


def network():
    """The Keras layers whose variables' paths depend on what was made before."""
    layers = keras.layers
    x = keras.Input((8, 3))
    y = layers.Conv1D(4, 3)(x)
    y = layers.BatchNormalization()(layers.Conv1D(4, 3)(y))
    y = layers.TimeDistributed(layers.Dense(3))(layers.Dropout(0.1)(y))
    y = layers.MultiHeadAttention(2, 2, dropout=0.1)(y, y)
    y = layers.Bidirectional(layers.LSTM(3, dropout=0.1))(y)
    y = keras.Sequential([layers.Dense(4), layers.Dropout(0.2), layers.Dense(4)])(y)
    return keras.Model(x, layers.Dense(2, name="head_7")(y))


class Sub(keras.Model):
    def __init__(self):
        super().__init__()
        self.body = [keras.layers.Dense(3) for _ in range(2)]
        self.inner = keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(3)])

    def call(self, x):
        for layer in self.body:
            x = layer(x)
        return self.inner(x)


def sub():
    model = Sub()
    model(tf.zeros((1, 3)))
    return model


def state_names(model, **average):
    optimizer = keras.optimizers.Adam(**average)
    optimizer.build(model.trainable_variables)
    return list(State(model, optimizer, "float32").variables)


@pytest.mark.parametrize("make", [network, sub])
def test_names_are_the_same_for_every_model_of_a_structure(make):
    first, second = (state_names(make(), use_ema=True) for _ in range(2))
    assert first == second and len(set(first)) == len(first)
    assert [v.path for v in make().variables] != [v.path for v in make().variables]
    model = make()
    slots = {n.split("/", 3)[3] for n in first if n.startswith("optimizer/")}
    model_names = variable_names.of_model(model)
    trained = {id(v) for v in model.trainable_variables}
    for i, (variable, name) in enumerate(zip(model.variables, model_names)):
        assert f"model/{i:04d}/{name}" in first
        assert (f"ema/{i:04d}/{name}" in first) == (id(variable) in trained)
        assert ({f"{name}/momentum", f"{name}/velocity"} <= slots) == (id(variable) in trained)
    assert not [n for n in first if "average" in n]


def test_names_as_they_read():
    found = variable_names.of_model(network())
    assert found[:2] == ["conv1d/kernel", "conv1d/bias"] and found[-1] == "head_7/bias"
    expected = {
        *("conv1d_1/kernel", "batch_normalization/moving_mean", "dropout/seed_generator_state"),
        *("time_distributed/dense/kernel", "multi_head_attention/query/kernel", "dense_1/bias"),
        *("multi_head_attention/dropout/seed_generator_state", "dropout_1/seed_generator_state"),
        "bidirectional/backward_lstm/lstm_cell/recurrent_kernel",
    }
    assert expected <= set(found)
    plain = [keras.layers.Dense(2), keras.layers.ReLU(), keras.layers.Dense(2)]
    expected = ["dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"]
    chain = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0), *plain])
    assert variable_names.of_model(chain) == expected
    inside = keras.Model(x := keras.Input((8, 3)), keras.layers.Dense(2)(network()(x)))
    assert variable_names.of_model(inside)[:-2] == found, "the same alone and inside another"
    assert {n.split("/")[0] for n in variable_names.of_model(sub())} == {"sub"}


def test_a_model_refits_its_checkpoint_after_its_batch_norm_was_exchanged(kept):
    for _ in range(2):
        model = network()
        assert state_names(model) == state_names(batch_norm.synchronize(model))


def test_paths_that_repeat_keep_their_slots_apart():
    shared = keras.layers.Dense(3, name="same")
    x = keras.Input((3,))
    model = keras.Model(
        x, keras.Sequential([keras.layers.Dense(3, name="same")])(shared(shared(x)))
    )
    found = state_names(model)
    assert len(found) == len(set(found)) and sum("same/kernel/momentum" in n for n in found) == 2
