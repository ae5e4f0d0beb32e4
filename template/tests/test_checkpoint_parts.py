"""Checkpoints in several files: on real ranks, and what is on disk at every moment."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hvdkit.checkpoint import files
from hvdkit.checkpoint import parts as checkpoint_parts
from hvdkit.checkpoint.parts import Heard, Writers
from hvdkit.ranks.world import World

from kills import killed_at_each
from ranks import names_of_checks, run_checks
from small_checkpoints import names, save

FILE = Path(__file__).parent / "checks_checkpoint_parts.py"
# In this order: what 2 ranks began, others go on with.
LAUNCHES = {"two": (2, "mpirun"), "one": (1, "alone"), "three": (3, "gloo")}
TWO = Writers((0, 1), ("north", "south"))


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """By launch: what failed."""
    env, failures = {"PARTS_RUNS": str(tmp_path_factory.mktemp("parts"))}, {}
    for name, launch in LAUNCHES.items():
        env |= {"PARTS_LAUNCH": name}
        failures[name] = run_checks([FILE], *launch, timeout=300, env=env)
    return failures


# The first waits for all launches: a minute, and several on a busy machine.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", names_of_checks(FILE))
def test_on_ranks(name, launches):
    failure = launches[name.split("_")[1]][name]
    assert failure is None, failure


# ---- Who writes what ---------------------------------------------------------------------------


def test_a_rank_of_every_host_writes_before_a_second_one_of_any(monkeypatch):
    places = [(0, "a"), (1, "a"), (0, "b"), (1, "b"), (0, "c")]
    monkeypatch.setattr(World, "gather_objects", lambda *_: places)
    world = World(0, 5, 0, 2)
    chosen = [checkpoint_parts.choose(world, parts) for parts in (2, 3, 4, 99)]
    assert [w.ranks for w in chosen] == [(0, 2), (0, 2, 4), (0, 2, 4, 1), (0, 2, 4, 1, 3)]
    assert chosen[1].hosts == ("a", "b", "c") and chosen[1].part_of(4) == 2
    assert checkpoint_parts.choose(world, 1) == Writers() and Writers().part_of(1) is None


def test_parts_are_as_large_and_hold_every_variable_once():
    sizes = np.random.default_rng(1).integers(1, 2000, 60)
    variables = {f"v{n}": tf.Variable(tf.zeros([size])) for n, size in enumerate(sizes)}
    turned = dict(reversed(variables.items()))
    for count in (1, 2, 3, 7):
        parts = [checkpoint_parts.part(variables, count, n) for n in range(count)]
        assert sorted(name for part in parts for name in part) == sorted(variables)
        bytes_of = [4 * sum(int(v.shape[0]) for v in part.values()) for part in parts]
        assert max(bytes_of) - min(bytes_of) <= 4 * 2000 / 7, bytes_of
        for n, part in enumerate(parts):
            assert {*checkpoint_parts.part(turned, count, n)} == {*part}
    few = [checkpoint_parts.part({"w": tf.Variable(1.0)}, 3, n) for n in range(3)]
    assert [len(part) for part in few] == [1, 0, 0]


# ---- On disk -----------------------------------------------------------------------------------


def arrays(value):
    """By part."""
    return [{"v": np.full((40, 3), value, np.float32)}, {"w": np.full((2, 3), value, np.float32)}]


def write_both(folder, step, value, name="0123abcd-1", heard=None, writers=TWO):
    """Rank 1's part, then rank 0's, which makes the checkpoint of them."""
    partial, about = checkpoint_parts.unfinished(folder, step, name), (step, {}, 2, "", {})
    checkpoint_parts.write_part(partial, arrays(value)[1], 2, 1)
    return checkpoint_parts.write_all(partial, arrays(value)[0], writers, heard or Heard(), about)


def value_of(path):
    found = files.read(path)
    (value,) = {float(x) for array in found.values() for x in array.flat}
    assert {*found} == {"v", "w"}
    return value


def test_one_part_is_the_file_and_the_format_that_it_was(kept):
    path = save(kept, 7)
    about = json.loads((path / "manifest.json").read_text())
    assert about["format"] == 3 and "parts" not in about
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "state.npz"]


def test_parts_come_together_in_any_order_and_their_score_stays(kept):
    partial = checkpoint_parts.unfinished(kept.folder, 5, "0123abcd-1")
    late = threading.Thread(
        target=lambda: (
            time.sleep(0.3),
            checkpoint_parts.write_part(partial, arrays(1.0)[1], 2, 1),
        )
    )
    late.start()
    about = (5, {}, 2, "", {})
    path = checkpoint_parts.write_all(partial, arrays(1.0)[0], TWO, Heard(), about)
    late.join()
    assert files.verify(path).files().keys() == {"state-1-of-2.npz", "state-2-of-2.npz"}
    assert json.loads((path / "manifest.json").read_text())["format"] == 4
    assert value_of(path) == 1.0 and names(kept) == [path.name]
    assert {*files.read(path, ("w",))} == {"w"}
    kept.add_score(5, 0.5)
    assert write_both(kept.folder, 5, 1.0) == path and kept.best() == (0.5, 5)
    write_both(kept.folder, 5, 2.0)
    assert not kept.has_score(path) and value_of(path) == 2.0


@pytest.mark.parametrize("file", ["state-1-of-2.npz", "state-2-of-2.npz", "manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "missing", "of another step"])
def test_a_damaged_part_is_named_and_the_older_checkpoint_taken(file, how, kept, capsys):
    older, newer = write_both(kept.folder, 4, 1.0), write_both(kept.folder, 5, 2.0)
    content = bytearray((newer / file).read_bytes())
    if how == "missing":
        (newer / file).unlink()
    else:
        flipped = content[:50] + bytes([content[50] ^ 1]) + content[51:]
        another = (older / file).read_bytes()
        damaged = {"flipped": flipped, "cut": content[:-9], "of another step": another}
        (newer / file).write_bytes(damaged[how])
    assert kept.find("auto", 9).path == older
    said = capsys.readouterr().out
    assert "passed over" in said and (str(newer) in said if how[0] == "o" else file in said), said


@pytest.mark.parametrize("parts", [{}, [], {"state-1-of-1.npz": ""}, {"../x": "", "y": ""}, 3])
def test_a_manifest_that_does_not_name_its_parts_is_damaged(parts, kept):
    path = write_both(kept.folder, 5, 1.0)
    record = json.loads((path / "manifest.json").read_text()) | {"parts": parts}
    number = record.pop("format")
    del record["checksum"]
    checksum = files.checksum_of(record, number)
    text = json.dumps({"format": number, **record, "checksum": checksum})
    (path / "manifest.json").write_text(text)
    assert "manifest.json is damaged" in files.fault(path)


def test_what_an_earlier_save_left_is_never_taken_and_goes(kept):
    """A rank that was late, of the save before or of a run that was killed."""
    for name in ("0123abcd-1", "ffffffff-2"):
        partial = checkpoint_parts.unfinished(kept.folder, 5, name)
        checkpoint_parts.write_part(partial, arrays(7.0)[1], 2, 1)
    path = write_both(kept.folder, 5, 1.0, "0123abcd-2")
    assert value_of(path) == 1.0 and names(kept) == [path.name]


@pytest.mark.parametrize(
    ("heard", "words"),
    [
        ({"failed": "rank 1 on south: No space left"}, ["rank 1 on south: No space left"]),
        ({"until": 0.0}, ["does not see ", "state-2-of-2.npz, which rank 1 on south wrote"]),
    ],
)
def test_a_part_that_is_missing_fails_the_save_and_leaves_nothing(heard, words, kept):
    older = write_both(kept.folder, 4, 1.0)
    left = checkpoint_parts.unfinished(kept.folder, 5, "0123abcd-1")  # by the save before
    checkpoint_parts.write_part(left, arrays(7.0)[1], 2, 1)
    knows = Heard()
    vars(knows).update(heard)
    partial = checkpoint_parts.unfinished(kept.folder, 5, "0123abcd-2")
    with pytest.raises(ValueError) as error:
        checkpoint_parts.write_all(partial, arrays(2.0)[0], TWO, knows, (5, {}, 2, "", {}))
    assert all(word in str(error.value) for word in words), error.value
    assert names(kept) == [older.name]


def test_a_part_that_is_not_whole_yet_is_waited_for(kept):
    """A network disk may show another host the note before all of the file."""
    partial = checkpoint_parts.unfinished(kept.folder, 5, "0123abcd-1")
    checkpoint_parts.write_part(partial, arrays(1.0)[1], 2, 1)
    file = partial / "state-2-of-2.npz"
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    threading.Timer(0.3, lambda: file.write_bytes(whole)).start()
    path = checkpoint_parts.write_all(partial, arrays(1.0)[0], TWO, Heard(), (5, {}, 2, "", {}))
    assert files.fault(path) is None and value_of(path) == 1.0


def test_a_kill_at_any_moment_of_a_save_in_parts_loses_nothing(tmp_path):
    outcomes = Counter()
    for folder in killed_at_each(
        tmp_path,
        lambda folder: write_both(folder, 5, 1.0),
        lambda folder: write_both(folder, 5, 2.0, "0123abcd-2"),
    ):
        found, passed_over = files.newest_sound(folder)
        assert found and not passed_over
        outcomes[value_of(found)] += 1
        files.tidy(folder)
        assert [p.name for p in folder.iterdir()] == ["step-00000005"]
        write_both(folder, 5, 3.0, "0123abcd-3")
        assert value_of(folder / "step-00000005") == 3.0
    print(f"killed at {sum(outcomes.values())} moments: {dict(outcomes)}")
    assert outcomes[1.0] > 10 and outcomes[2.0] > 1


def test_one_rank_keeps_what_several_wrote(kept):
    """The newest and the best, whatever they are made of."""
    for step in (1, 2):
        write_both(kept.folder, step, float(step))
    kept.add_score(1, 0.9)
    for step in (3, 4):
        save(kept, step)
    assert names(kept) == [f"step-0000000{step}" for step in (1, 3, 4)]
    assert value_of(kept.folder / "step-00000001") == 1.0
