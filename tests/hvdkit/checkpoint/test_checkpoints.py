"""Checkpoints on disk: whole or not there, verified, few kept; by one rank, without a launcher."""

import errno
import json
import math
import os
import resource
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from kills import killed_at_each
from refusals import differ, refused
from small_checkpoints import ALONE, names, of_step, restored, save, variables

from hvdkit import whole_files
from hvdkit.checkpoint import files, writing
from hvdkit.checkpoint.checkpoints import Checkpoints, changes, measure
from hvdkit.checkpoint.saver import Saver
from hvdkit.data.place import Place
from hvdkit.ranks.world import raw
from hvdkit.run import load_run
from hvdkit.scores import MainMetric
from hvdkit.settings import Settings, absl_flags, fields, project, runs, setting
from hvdkit.stop import NotNow, Stop, passes
from hvdkit.train.optim import optimizer
from hvdkit.train.step.state import State


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "int4"])
def test_types_that_numpy_does_not_know_are_stored_as_bytes(name):
    value = np.array([1, -2], getattr(ml_dtypes, name))
    stored = writing._storable({"v": value, "w": np.ones(2, np.float16)})
    assert stored["v"].dtype.kind == "V" and stored["w"].dtype == np.float16


def test_types_that_numpy_does_not_know(kept):
    value = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    values = {
        "v": tf.Variable(value),
        "w": tf.Variable(True),
        "s": tf.Variable(value[0]),
    }
    writing.check_types(values)
    path = kept.write(kept.copy(Place(1), values, Settings()))
    assert files.read(path)["v"].dtype == value.dtype
    into = {"v": tf.Variable(tf.zeros_like(value)), "w": tf.Variable(False)}
    into["s"] = tf.Variable(tf.zeros_like(value[0]))
    kept.restore(kept.find("auto"), into, Settings())
    assert (
        np.all(into["v"].numpy() == value)
        and bool(into["w"])
        and into["s"].numpy() == 1.5
    )
    with pytest.raises(
        ValueError, match="t is of type object: a checkpoint holds numbers only"
    ):
        writing.check_types({"t": tf.Variable("text")})
    grows = tf.Variable(tf.zeros([0, 3]), shape=[None, 3])
    with pytest.raises(
        ValueError, match=r"task/bank has the shape \(None, 3\): .* full size"
    ):
        writing.check_types({"task/bank": grows})


@pytest.mark.parametrize(
    ("scores", "left", "best"),
    [
        ([0.2, 0.9, None, 0.5, None], [2, 4, 5], (0.9, 2)),
        ([0.9, 0.9, 0.2, 0.2], [2, 3, 4], (0.9, 2)),
        ([math.nan, -math.inf, -5.0, math.inf], [3, 4], (-5.0, 3)),
    ],
)
def test_the_newest_and_the_best_are_kept(scores, left, best, kept):
    for step, score in enumerate(scores, start=1):
        path = save(kept, step)
        assert kept.score_of(kept.find(str(path))) is None
        if score is not None:
            kept.add_score(of_step(step, score))
            kept_score = kept.score_of(kept.find(str(path)))
            assert kept_score == score or not math.isfinite(kept_score + score)
    assert (
        names(kept) == [f"step-{step:08d}" for step in left] and kept.best()[:2] == best
    )


def test_of_equal_scores_the_lower_loss_is_the_best_then_the_newer(kept):
    losses = [0.0877, 0.0070, 0.0070, math.nan, 0.0300, math.inf]
    for step, loss in enumerate(losses, start=1):
        save(kept, step)
        kept.add_score(of_step(step, 0.96, loss=loss, since=1))
    assert names(kept) == [f"step-0000000{step}" for step in (3, 5, 6)]
    assert kept.best() == (0.96, 3, 0.0070, 1)
    task = SimpleNamespace(main_metric="accuracy")
    assert load_run.chosen(kept.folder, "best", task).name == "step-00000003"


def test_of_an_error_the_lowest_score_is_kept(kept):
    lowest = measure(Settings(), MainMetric("mae", "min"), "data")
    kept = replace(kept, measure=lowest)
    for step, score in enumerate([20.2, 5.7, math.nan, -math.inf, 9.0, 7.0], start=1):
        save(kept, step, score=score)
    assert names(kept) == [f"step-0000000{step}" for step in (2, 5, 6)]
    assert kept.best()[:2] == (5.7, 2)
    task = SimpleNamespace(main_metric="mae", main_metric_mode="min")
    assert load_run.chosen(kept.folder, "best", task).name == "step-00000002"


@pytest.mark.parametrize(("name", "is_other"), [("loss", True), ("accuracy", False)])
def test_losses_of_other_settings_are_not_compared(kept, name, is_other):
    metric = MainMetric(name, "min")
    kept = replace(kept, measure=measure(Settings(), metric, "data"))
    save(kept, 1, score=0.1)
    smooth = Settings(label_smoothing=0.1)
    kept = replace(kept, measure=measure(smooth, metric, "data"))
    step, note = kept.other_scores()
    assert (kept.best() is None, step == 1) == (is_other, is_other)
    assert ("--label_smoothing was 0.0, is 0.1" in note) == is_other
    save(kept, 2, score=0.2)
    # At its default it is no part, as in runs of before.
    kept = replace(kept, measure=measure(Settings(), metric, "data"))
    assert "--label_smoothing" not in kept.measure
    best = kept.best()
    assert best is not None and best[:2] == (0.1, 1)


def test_a_mode_that_is_mended_decides_from_then_on(kept, capsys):
    wrong = measure(Settings(), MainMetric("mae", "max"), "data")
    mended = measure(Settings(), MainMetric("mae", "min"), "data")
    kept = replace(kept, measure=wrong)
    for step, score in enumerate([20.2, 5.7, 9.0, 7.0], start=1):
        save(kept, step, score=score)
    assert names(kept) == [f"step-0000000{step}" for step in (1, 3, 4)]
    task = SimpleNamespace(main_metric="mae", main_metric_mode="max")
    assert load_run.chosen(kept.folder, "best", task).name == "step-00000001"
    assert not capsys.readouterr().out
    task.main_metric_mode = "min"
    assert load_run.chosen(kept.folder, "best", task).name == "step-00000004"
    printed = capsys.readouterr().out
    assert (
        "main_metric_mode was max and is now min: the best is chosen anew, of the 3 ch"
        in printed
    )
    task.main_metric = "rmse"
    words = (
        "the scores of the checkpoints are mae, and the task's main_metric is now rmse"
    )
    refused(lambda: load_run.chosen(kept.folder, "best", task), words)
    assert load_run.chosen(kept.folder, "last", task).name == "step-00000004"
    # A training that goes on says so, and compares with what was kept.
    resumed = replace(kept, measure=mended)
    step, note = resumed.other_scores()
    assert step == 0 and note.startswith(
        "main_metric_mode was max, is min: the best is chosen"
    )
    assert (
        resumed.best()[:2] == (7.0, 4) and resumed.score_of(resumed.find("auto")) == 7.0
    )
    save(resumed, 5, score=8.0)
    assert names(kept) == ["step-00000004", "step-00000005"]


def test_a_data_card_may_hold_numbers_that_json_lacks(kept):
    kept.card["augmentation"] = {"largest": math.inf, "least": math.nan}
    path = save(kept, 1, score=0.5)
    assert files.verify(path).card["augmentation"] == {"largest": None, "least": None}


def test_scores_of_another_measure_are_none(kept):
    old = replace(kept, measure={"--eval_crop": 16, "--eval_flip": False})
    new = replace(kept, measure={"--eval_crop": 0, "--eval_flip": False})
    save(old, 1, score=0.9)
    assert (
        old.score_of(old.find("auto")) == 0.9
        and old.best()[:2] == (0.9, 1)
        and old.other_scores() == (0, "")
    )
    assert new.score_of(new.find("auto")) is None and new.best() is None
    words = "the score of step 1 is of another measure (--eval_crop was 16, is 0): "
    step, note = new.other_scores()
    assert step == 1 and note.startswith(words)
    for step, score in ((2, 0.3), (3, 0.2), (4, 0.1), (5, None)):
        save(new, step, score=score)
    assert names(kept) == [f"step-0000000{step}" for step in (1, 2, 4, 5)]
    assert new.best()[:2] == (0.3, 2) and old.best()[:2] == (0.9, 1)
    assert new.other_scores() == (1, note) and kept.best()[:2] == (0.9, 1), (
        "of none: like all"
    )


def test_pruning_touches_nothing_else(kept):
    others = ["notes.txt", "step-1", "step-00000001.tar", ".step-00000001.mine"]
    kept.folder.mkdir()
    for name in others:
        (kept.folder / name).mkdir()
    (kept.folder / "step-00000000").write_text("a file")
    for step in (123456789, 1234567890):  # the name has room for fewer digits
        save(kept, step)
    assert kept.find("auto").step == 1234567890
    assert set(names(kept)) >= {*others, "step-00000000"}


def test_the_same_step_saved_again_takes_the_place_of_the_first_without_its_score(kept):
    path = save(kept, 1, 1.0, score=0.5)
    save(kept, 1, 2.0)
    assert kept.best() is None and restored(kept) == 2.0 and names(kept) == [path.name]
    refused(lambda: kept.add_score(of_step(2, 0.5)), "step-00000002 is no checkpoint")


def test_auto_never_a_checkpoint_and_a_run(kept, tmp_path):
    assert kept.find("auto") is None
    paths = [save(kept, step, float(step)) for step in (1, 2)]
    assert kept.find("never") is None
    assert kept.find(str(paths[0])) == (paths[0], Place(1, 32), True, True)
    for run in (tmp_path, f"{tmp_path}/"):
        assert kept.find(str(run)) == (paths[1], Place(2, 64), False, True)
    renamed = paths[0].rename(tmp_path / "my favourite")
    assert kept.find(str(renamed)) == (renamed, Place(1, 32), True, False)
    for nothing in (
        tmp_path / "nothing",
        tmp_path / "checkpoints",
        tmp_path / "step-00000001",
    ):
        with pytest.raises(
            Stop, match=f"--resume={nothing}: .*(checkpoint|does not exist)"
        ):
            kept.find(str(nothing))
    (paths[1] / "state.npz").write_bytes(b"damaged")
    refused(
        lambda: kept.find(str(paths[1])),
        "step-00000002/state.npz is damaged",
        kind=Stop,
    )


def rewrite(file, number=files.FORMAT, **changes):
    """A manifest with changes, and the checksum of that."""
    record = json.loads(file.read_text()) | changes
    del record["checksum"], record["format"]
    record |= {"checksum": files.checksum_of(record, number), "format": number}
    file.write_text(json.dumps(record))


@pytest.mark.parametrize("number", [3, 6])
def test_another_format_is_refused_by_name_not_passed_over(number, kept):
    save(kept, 1)
    file = save(kept, 2) / "manifest.json"
    rewrite(file, number)
    for resume in ("auto", str(file.parent)):
        with pytest.raises(
            Stop, match=rf"step-00000002 is of checkpoint format {number}"
        ):
            kept.find(resume)


def test_a_manifest_of_before_and_one_with_unknown_fields_are_read(kept):
    save(kept, 1)
    file = save(kept, 2) / "manifest.json"
    rewrite(file, 4)
    assert kept.find("auto").step == 2
    rewrite(file, of_tomorrow={"a": 1})
    assert kept.find("auto").step == 2


@pytest.mark.parametrize(
    "figures",
    [{"data": 5}, {"samples": ["a"]}, {"samples": {"its outputs": [0.5, "a"]}}],
)
def test_figures_that_are_none_are_damage(figures, kept, capsys):
    save(kept, 1)
    rewrite(save(kept, 2) / "manifest.json", figures=figures)
    assert kept.find("auto").step == 1 and "its figures are" in capsys.readouterr().out


@pytest.mark.parametrize(
    "card",
    [
        {"train": 5},
        {"train": {"fingerprint": ["a"], "samples": 1}},
        {"class_names": [5]},
    ],
)
def test_a_card_that_is_none_is_damage(card, kept, capsys):
    """Of an author who knows the checksum: what reads it would end in a trace."""
    save(kept, 1)
    rewrite(save(kept, 2) / "manifest.json", card=card)
    assert kept.find("auto").step == 1 and "its card is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("into", "words"),
    [
        (variables(shape=(3, 2)), ["w/kernel", "(2, 3)", "(3, 2)"]),
        (
            variables(dtype=tf.float64),
            ["w/kernel is float32", "float64", "--precision"],
        ),
        ({"step": variables()["step"]}, ["'w/kernel' is not known"]),
        (variables() | {"v": tf.Variable(1.0)}, ["'v' is missing"]),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(kept, into, words):
    save(kept, 7)
    before = [v.numpy() for v in into.values()]
    checkpoint = kept.find("auto")
    refused(lambda: kept.restore(checkpoint, into, Settings()), *words, kind=Stop)
    assert all(np.array_equal(v, b) for v, b in zip(into.values(), before))


def test_averages_that_one_of_both_runs_lacks_are_named_by_their_flag(kept):
    plain = variables()
    averaged = plain | {
        "ema_updates/0": tf.Variable(1),
        "ema/0/0000/w/kernel": tf.Variable(tf.ones([2, 3])),
    }
    kept.write(kept.copy(Place(1), plain, Settings()))

    def restored_to(into):
        kept.restore(kept.find("auto"), into, Settings())

    words = ("holds no average of its weights: leave out --ema_decay", "--init_from=")
    refused(lambda: restored_to(averaged), *words, kind=Stop)
    for decay, way in ((0.8, "--ema_decay=0.8"), (0.0, "`use_ema` to the task's")):
        kept.write(kept.copy(Place(2), averaged, Settings(ema_decay=decay)))
        words = (f"this run keeps none: give {way}", "--init_from=")
        refused(lambda: restored_to(plain), *words, kind=Stop)


def test_changed_settings_are_named(kept, capsys):
    save(kept, 7, config=Settings(seed=1, power=0.9, log_every=20))
    now = Settings(seed=2, power=1.0, log_every=1, run_dir="elsewhere", pack_bytes=100)
    kept.restore(kept.find("auto"), variables(), now)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("note")]
    assert "--seed was 1, is 2" in line and "--power was 0.9, is 1.0" in line
    assert line.count(" was ") == 2, line


def test_a_run_without_a_step_left_is_not_trained_with_other_settings(kept, capsys):
    config = Settings(num_steps=7, base_lr=0.1, mirror="off")
    save(kept, 7, config=config)
    found = kept.find("auto")
    other = replace(config, base_lr=0.2)
    words = ("no step is left", "--base_lr was 0.1, is 0.2", "another --run_dir")
    refused(lambda: kept.restore(found, variables(), other), *words, kind=Stop)
    # It may be evaluated in another way or elsewhere, and go on.
    elsewhere = replace(config, eval_scales="1,2", global_batch_size=8, jit=True)
    for settings in (config, elsewhere, replace(other, num_steps=8)):
        kept.restore(found, variables(), settings)


def test_every_setting_of_steps_is_one_and_not_harmless():
    assert {*fields.of(Settings)} - runs.HARMLESS >= runs.OF_STEPS


def test_other_kernels_are_named_where_bits_are_promised(kept, capsys):
    save(replace(kept, fingerprint={"switches": "none"}), 7)
    other = replace(kept, fingerprint={"switches": "TF_ENABLE_ONEDNN_OPTS=0"})
    for deterministic in (False, True):
        other.restore(
            other.find("auto"), variables(), Settings(deterministic=deterministic)
        )
        named = "switches (none; TF_ENABLE_ONEDNN_OPTS=0)" in capsys.readouterr().out
        assert named == deterministic


@pytest.mark.parametrize(
    ("config", "normed", "words"),
    [
        (
            Settings(lr_scaling="linear", bn_sync="full"),
            True,
            ["--lr_scaling=linear multiplies"],
        ),
        (Settings(bn_sync="mean"), True, ["--bn_sync=mean normalizes"]),
        (Settings(bn_sync="mean"), False, []),
        (Settings(bn_sync="full"), True, []),
    ],
)
def test_another_number_of_ranks_is_named_where_it_changes_numbers(
    config, normed, words, kept
):
    before = files.read_manifest(save(kept, 7, config=config))
    differences = changes(before, config, ranks=4, has_batch_norm=normed)
    assert (
        len(differences) == len(words)
        and changes(before, config, ranks=1, has_batch_norm=normed) == []
    )
    assert all(w in x and "were 1, are 4" in x for w, x in zip(words, differences))


def test_a_flag_of_the_forks_own_that_has_changed_is_named(kept, monkeypatch):
    values = {"--noise": "0.1"}
    monkeypatch.setattr(absl_flags, "values_of_the_fork", lambda: values)
    config = Settings()
    before = files.read_manifest(save(kept, 7, config=config))
    assert changes(before, config, ranks=1, has_batch_norm=False) == []
    values = {"--noise": "0.2", "--new": "1"}
    (change,) = changes(before, config, ranks=1, has_batch_norm=False)
    assert "--noise" in change and "0.1" in change and "0.2" in change


def test_the_same_path_from_another_folder_is_no_change(kept):
    before = files.read_manifest(save(kept, 7))
    elsewhere = Settings(data_dir=str(project.folder() / before.config["data_dir"]))
    assert changes(before, elsewhere, ranks=1, has_batch_norm=True) == []
    differences = changes(
        before, Settings(data_dir="other"), ranks=1, has_batch_norm=True
    )
    assert differences == ["--data_dir was datasets/demo, is other"]


def test_a_setting_that_came_later_had_its_default(kept):
    before = files.read_manifest(save(kept, 7))
    del before.config["clip_norm"]
    assert changes(before, Settings(), ranks=1, has_batch_norm=True) == []
    differences = changes(before, Settings(clip_norm=1.0), ranks=1, has_batch_norm=True)
    assert differences == ["--clip_norm was 0.0, is 1.0"]

    class OfFork(Settings):
        noise: float = setting(0.1, "share of pixels that are noise")

    old = replace(before, config=before.config | {"noise": 0.2})
    assert changes(old, OfFork(), ranks=1, has_batch_norm=True) == [
        "--noise was 0.2, is 0.1"
    ]


def test_the_newest_before_skipped_steps_is_kept_for_going_back(tmp_path):
    kept = Checkpoints(tmp_path / "checkpoints", keep=1, world=ALONE)
    for step, skipped in ((5, 0), (6, 0), (8, 1), (9, 2), (10, 3)):
        state = variables() | {"skipped_in_a_row": tf.Variable(skipped, dtype=tf.int64)}
        copy = kept.copy(Place(step), state, Settings())
        kept.write(copy)
        kept.add_score(of_step(step, math.nan), copy.skipped)
        before = ["step-00000006"] if skipped else []
        assert names(kept) == [*before, f"step-{step:08d}"]
    save(kept, 11)
    assert names(kept) == ["step-00000011"]


def test_a_disk_that_takes_no_more_leaves_what_was_there_and_no_half(kept):
    path = save(kept, 1)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Each file takes so many bytes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, usual[1]))
    try:
        for step in (2, 1):  # the second would replace the old one
            with pytest.raises(OSError, match="File too large"):
                kept.write(kept.copy(Place(step), variables(2.0), Settings()))
        with pytest.raises(OSError, match="File too large"):
            kept.add_score(of_step(1, 0.5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert (
        names(kept) == ["step-00000001"]
        and restored(kept) == 1.0
        and kept.best() is None
    )
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "state.npz"]
    kept.add_score(of_step(1, 0.5))
    assert kept.best()[:2] == (0.5, 1)


def test_a_kill_at_any_moment_of_a_save_leaves_the_one_before_or_both(tmp_path):
    def saves(folder, step):
        arrays = {"w": np.full((2, 3), step, np.float32)}
        writing.write(
            folder,
            step,
            arrays,
            samples=0,
            passed_over=0,
            config={},
            ranks=1,
            tensorflow="",
        )

    outcomes = Counter()
    for folder in killed_at_each(
        tmp_path, lambda it: saves(it, 4), lambda it: saves(it, 5)
    ):
        newest, passed_over = files.newest_sound(folder)
        assert not passed_over and np.all(
            files.read(newest)["w"] == files.step_of(newest)
        )
        outcomes[newest.name] += 1
        files.tidy(folder)
        assert sorted(folder.iterdir()) == [*files.candidates(folder)]
        saves(folder, 5)
        assert np.all(files.read(folder / "step-00000005")["w"] == 5)
    print(f"killed at {sum(outcomes.values())} moments: {dict(outcomes)}")
    assert outcomes["step-00000004"] > 3 and outcomes["step-00000005"] >= 1


def test_what_is_written_are_the_values_at_the_step(kept, monkeypatch):
    kept.folder.mkdir()
    changed = threading.Event()
    write = Checkpoints.write

    def late(*arguments, **keywords):
        assert changed.wait(60)
        return write(*arguments, **keywords)

    monkeypatch.setattr(Checkpoints, "write", late)
    weights = tf.Variable(tf.ones([4_000_000]))
    with Saver(kept) as saver:
        saver.save(Place(1), {"w": weights}, Settings())
        assert not (kept.folder / "step-00000001").exists(), "it was waited for"
        weights.assign(tf.fill([4_000_000], 2.0))
        changed.set()
        saver.save(Place(2), {"w": weights}, Settings())
        weights.assign(tf.fill([4_000_000], 3.0))
    for step in (1, 2):
        values = files.read(kept.folder / f"step-{step:08d}")["w"]
        assert np.all(values == step)


def test_a_disk_that_fails_for_a_moment_loses_no_checkpoint(kept, monkeypatch):
    """The best is not deleted, nor does a run begin anew beside those that cannot be read."""

    def fails(path, *_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    read = whole_files.read

    def fails_for_the_best(path, *arguments):
        return (
            fails(path)
            if path.parent.name == "step-00000001"
            else read(path, *arguments)
        )

    for step, score in ((1, 0.9), (2, 0.1), (3, 0.2)):
        save(kept, step, score=score)
    with monkeypatch.context() as disk:
        disk.setattr(whole_files, "read", fails_for_the_best)
        save(kept, 4)
    assert kept.best()[:2] == (0.9, 1)
    monkeypatch.setattr(whole_files, "sha256", fails)
    assert (
        differ(lambda: kept.find("auto"), "Input/output error", "--resume=never").code
        == 76
    )
    assert kept.find("never") is None


def test_a_folder_that_is_away_is_not_made_anew(kept, capsys):
    with Saver(kept) as saver:
        saver.save(Place(1), {"w": tf.Variable(1.0)}, Settings())  # the disk is away
        saver.wait()
        assert saver.failed == 1 and "is its disk mounted?" in capsys.readouterr().out
    assert not kept.folder.exists()


def test_a_last_save_that_comes_late_has_its_score(kept, capsys):
    kept.folder.mkdir()
    weights = {"w": tf.Variable(1.0)}
    obstacle = kept.folder / "step-00000001"
    obstacle.touch()
    with Saver(kept) as saver:
        saver.save(Place(1), weights, Settings())
        saver.add_score(of_step(1, 0.5))
        obstacle.unlink()
        saver.last(Place(1), weights, Settings())
    assert kept.best()[:2] == (0.5, 1)
    assert "the checkpoint of step 1 is written now" in capsys.readouterr().out


def test_a_failed_save_on_a_disk_that_answers_nothing_is_a_note(
    kept, monkeypatch, capsys
):
    kept.folder.mkdir()

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with Saver(kept) as saver:
        monkeypatch.setattr(Checkpoints, "write", stale)
        monkeypatch.setattr(files, "candidates", stale)
        saver.save(Place(1), {"w": tf.Variable(1.0)}, Settings())
        saver.wait()
    assert saver.failed == 1 and passes(saver.error)
    printed = capsys.readouterr().out
    assert "Stale file handle" in printed and "Kept in" in printed
    assert "Free some space" not in printed


def test_a_best_score_that_could_not_be_written_is_tried_again(kept, monkeypatch):
    kept.folder.mkdir()
    set_score = writing.set_score

    def fails_once(*arguments: object) -> None:
        monkeypatch.setattr(writing, "set_score", set_score)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    weights = {"w": tf.Variable(1.0)}
    with Saver(kept) as saver:
        for step, score in enumerate((0.5, 0.99, 0.6, 0.6, 0.6), start=1):
            saver.save(Place(step), weights, Settings())
            if step == 2:
                monkeypatch.setattr(writing, "set_score", fails_once)
            saver.add_score(of_step(step, score))
    assert names(kept) == ["step-00000002", "step-00000004", "step-00000005"]
    assert kept.best()[:2] == (0.99, 2)


def test_checkpoints_that_are_passed_over_are_named(kept, monkeypatch, capsys):
    kept = replace(kept, keep=9)
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.6)):
        save(kept, step, score=score)
    (kept.folder / "step-00000002" / files.MANIFEST).write_text("{")
    assert kept.best()[:2] == (0.6, 3)
    assert "passed over" in capsys.readouterr().out
    (kept.folder / "step-00000003" / "state.npz").write_bytes(b"")
    assert kept.sound_before(4).step == 1
    assert capsys.readouterr().out.count("passed over") == 2
    monkeypatch.setattr(whole_files, "sha256", _input_output_error)
    assert differ(lambda: kept.sound_before(4), "Input/output error").code == 76
    monkeypatch.setattr(whole_files, "read", _input_output_error)
    capsys.readouterr()
    assert kept.best() is None
    assert capsys.readouterr().out.count("Input/output error") == 3
    paths = files.candidates(kept.folder)
    unread = files.telling(print)
    refused(lambda: files.scored(paths, unread), "may be the best", kind=NotNow)


def _input_output_error(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_leftovers_of_kills_are_removed_or_kept_where_nothing_else_is_there(
    kept, monkeypatch, capsys
):
    save(kept, 1)
    for name in (
        ".step-00000001.partial",
        ".step-00000001.partial.old",
        ".step-00000002.partial.old",
        ".step-00000003.deleted",
    ):
        (kept.folder / name).mkdir()
    remove = shutil.rmtree

    def refuses(path: Path) -> None:
        if path.name.endswith(".deleted"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", refuses)
    files.recover(kept.folder)
    files.tidy(kept.folder)
    assert names(kept) == [
        ".step-00000003.deleted",
        "step-00000001",
        "step-00000002",
    ]
    assert ".step-00000003.deleted cannot be removed" in capsys.readouterr().out


def test_all_that_a_run_counts_comes_back(kept):
    """The loss scale and its counters too: begun anew, it would skip steps once more."""

    def state(start: int) -> State:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        state = State(model, optimizer.build(Settings(), model), "float16")
        for number, variable in enumerate(state.variables.values(), start):
            tensor = raw(variable)
            tensor.assign(tf.fill(tensor.shape, tf.cast(number, tensor.dtype)))
        return state

    saved = state(100)
    restored = state(0)
    scale = saved.loss_scale
    counters = [
        saved.step,
        saved.skipped,
        scale.value,
        scale.sound_steps,
        scale.skipped_in_a_row,
    ]
    assert {id(v) for v in counters} < {id(raw(v)) for v in saved.variables.values()}
    kept.write(kept.copy(Place(100), saved.variables, Settings()))
    kept.restore(kept.find("auto"), restored.variables, Settings())
    for one, other in zip(
        saved.variables.values(), restored.variables.values(), strict=True
    ):
        np.testing.assert_array_equal(raw(one), raw(other))


def test_a_counter_that_is_wider_now_takes_the_values_of_an_older_checkpoint(kept):
    saved = {"count": tf.Variable(7), "weight": tf.Variable([0.5])}
    kept.write(kept.copy(Place(1), saved, Settings()))
    wider = {"count": tf.Variable(0, dtype=tf.int64), "weight": tf.Variable([0.0])}
    kept.restore(kept.find("auto"), wider, Settings())
    assert int(wider["count"]) == 7 and wider["weight"].numpy().tolist() == [0.5]
    other = {"count": tf.Variable(0.0, dtype=tf.float64), "weight": tf.Variable([0.0])}
    found = kept.find("auto")
    refused(lambda: kept.restore(found, other, Settings()), "count is int32", kind=Stop)
    narrower = {"count": tf.Variable(0, dtype=tf.int16), "weight": tf.Variable([0.0])}
    words = ["count is int32 in the checkpoint, int16 in the model"]
    refused(
        lambda: kept.restore(kept.find("auto"), narrower, Settings()), *words, kind=Stop
    )
