"""Checkpoints on disk: whole or not there, verified, few kept; by one rank, without a launcher."""

import json

import numpy as np
import pytest
import tensorflow as tf

from config import Config
from engine.checkpoint import Checkpoints
from engine.stop import Stop
from engine.world import World

ALONE = World(0, 1, 0, 1)


@pytest.fixture
def kept(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2, world=ALONE)


def variables(value=1.0, shape=(2, 3)):
    return {"step": tf.Variable(7, dtype=tf.int64), "w/kernel": tf.Variable(tf.fill(shape, value))}


def names(kept):
    return sorted(p.name for p in kept.folder.iterdir())


def test_what_was_saved_is_restored(kept):
    kept.save(7, variables(1.5), Config(), None)
    into = variables(0.0)
    into["step"].assign(0)
    kept.restore(kept.find("auto"), into, Config())
    assert int(into["step"]) == 7 and np.all(into["w/kernel"].numpy() == 1.5)


def test_the_newest_and_the_best_are_kept(kept):
    for step, score in [(1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, None)]:
        kept.save(step, variables(), Config(), score)
    assert names(kept) == ["step-00000002", "step-00000004", "step-00000005"]
    assert kept.best() == (0.9, 2)


def test_of_equal_scores_the_first_is_the_best(kept):
    """It is the one that an uninterrupted run compares with, so early stopping stays the same."""
    for step, score in [(1, 0.9), (2, 0.9), (3, 0.2), (4, 0.2)]:
        kept.save(step, variables(), Config(), score)
    assert names(kept) == ["step-00000001", "step-00000003", "step-00000004"]
    assert kept.best() == (0.9, 1)


def test_a_damaged_checkpoint_is_passed_over_and_named(kept, capsys):
    kept.save(1, variables(), Config(), None)
    kept.save(2, variables(), Config(), None)
    state = kept.folder / "step-00000002" / "state.npz"
    damaged = bytearray(state.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    state.write_bytes(damaged)
    assert kept.find("auto") == kept.folder / "step-00000001"
    assert "step-00000002/state.npz is damaged" in capsys.readouterr().out
    with pytest.raises(Stop, match="damaged"):
        kept.find(str(state.parent))


def test_a_half_written_one_is_not_taken(kept, monkeypatch):
    kept.save(1, variables(), Config(), None)

    def full(*args, **kwargs):
        args[0].write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(Stop) as stop:
        kept.save(2, variables(), Config(), None)
    assert "step 2" in str(stop.value) and "No space left" in str(stop.value)
    assert "step-00000001" in str(stop.value)
    monkeypatch.undo()
    assert kept.find("auto").name == "step-00000001"
    kept.save(2, variables(), Config(), None)
    assert names(kept) == ["step-00000001", "step-00000002"]


def test_resume_never_and_an_empty_folder_start_anew(kept):
    assert kept.find("auto") is None
    kept.save(1, variables(), Config(), None)
    assert kept.find("never") is None


@pytest.mark.parametrize(
    ("into", "words"),
    [
        (variables(shape=(3, 2)), ["w/kernel", "(2, 3)", "(3, 2)"]),
        ({"step": variables()["step"]}, ["'w/kernel' is not known"]),
        (variables() | {"v": tf.Variable(1.0)}, ["'v' is missing"]),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(kept, into, words):
    kept.save(7, variables(), Config(), None)
    with pytest.raises(Stop) as stop:
        kept.restore(kept.find("auto"), into, Config())
    assert all(word in str(stop.value) for word in words), stop.value


def test_changed_settings_are_named(kept, capsys):
    kept.save(7, variables(), Config(seed=1), None)
    kept.restore(kept.find("auto"), variables(), Config(seed=2))
    assert "--seed was 1, is 2" in capsys.readouterr().out


def test_the_manifest_says_what_it_is(kept):
    kept.save(7, variables(), Config(), 0.25)
    about = json.loads((kept.folder / "step-00000007" / "manifest.json").read_text())
    assert (about["step"], about["score"], about["config"]["seed"]) == (7, 0.25, 1)
