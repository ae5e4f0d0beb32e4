"""A used folder: what lies ahead of where a run begins is set aside, never mixed; by one rank."""

import errno
import fcntl
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from kills import killed_at_each
from refusals import refused
from small_checkpoints import ALONE, of_step

from hvdkit import settings as settings_lib
from hvdkit import whole_files
from hvdkit.checkpoint import files, lease, run_folder, writing
from hvdkit.checkpoint.checkpoints import Checkpoints
from hvdkit.data.place import Place
from hvdkit.settings import Settings, project
from hvdkit.stop import NotNow
from ranks import json_lines

RECORDS = (
    "metrics.jsonl",
    "gradients.jsonl",
    "summary.json",
    "report.html",
    "predictions.png",
)


def train(run_dir, seed, num_steps, every, keep=3, resume="auto", stop_at=None):
    """What a run writes, with weights that say whose they are: 100 * seed + step."""
    config = Settings(seed=seed, num_steps=num_steps, keep=keep, run_dir=str(run_dir))
    kept = Checkpoints(run_dir / "checkpoints", keep, ALONE)
    checkpoint = kept.find(resume)
    weight = tf.Variable(100.0 * seed)
    if checkpoint:
        kept.restore(checkpoint, {"w": weight}, config)
    note = run_folder.begin(run_dir, checkpoint, config, evaluates_first=False)
    board = run_dir / "tensorboard" / f"events-{seed}-{stop_at}"
    board.parent.mkdir(exist_ok=True)
    board.touch()
    for step in range(
        checkpoint.step + 1 if checkpoint else 1, (stop_at or num_steps) + 1
    ):
        weight.assign(float(100 * (weight.numpy() // 100) + step))
        for name in ("metrics.jsonl", "gradients.jsonl"):
            with (run_dir / name).open("a") as file:
                file.write(json.dumps({"step": step, "seed": seed}) + "\n")
        if step % every == 0:
            kept.write(kept.copy(Place(step), {"w": weight}, config))
            kept.add_score(
                of_step(step, 0.9 if (seed, step) == (1, 8) else 0.1 + step / 100)
            )
            with (run_dir / "metrics.jsonl").open("a") as file:
                file.write(
                    json.dumps({"step": step, "eval_loss": 0, "seed": seed}) + "\n"
                )
    if not stop_at:
        for name in ("summary.json", "report.html", "predictions.png"):
            (run_dir / name).write_text(f"of seed {seed}")
    return checkpoint, note


def steps(folder):
    return [files.read_manifest(p).step for p in files.candidates(folder)]


def seeds(path):
    return {line["seed"] for line in json_lines(path)}


@pytest.fixture
def used(tmp_path):
    """8 steps of seed 1, checkpoints of all even ones, the last is the best."""
    train(tmp_path, seed=1, num_steps=8, every=2, keep=9)
    return tmp_path


def test_trackers_of_a_new_run_start_before_anything_is_set_aside(used):
    known = used / "trackers.json"
    known.write_text("old")

    def contents() -> dict:
        every = [p for p in used.rglob("*") if p.is_file() and p.name != ".lease"]
        return {path: path.read_bytes() for path in every}

    lease.take(used)
    before = contents()
    config = Settings(run_dir=str(used))
    begin = partial(run_folder.begin, used, None, config, evaluates_first=False)

    def start(error: type[BaseException] | None) -> None:
        assert not known.exists() and (used / "summary.json").exists()
        known.write_text("new")
        if error:
            raise error("no login")

    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            begin(start_trackers=lambda error=error: start(error))
        assert contents() == before
    known.rename(used / ".trackers.json.old")  # after a kill
    (used / ".trackers.json.new").write_text("of a start that was killed")
    begin(start_trackers=lambda: start(None))
    assert known.read_text() == "new"
    assert (used / "aside-1/trackers.json").read_text() == "old"
    assert not list(used.glob(".trackers*"))


def test_starting_anew_in_a_used_folder_then_going_on(used):
    """The new run keeps its checkpoints, and `auto` goes on from it and not from the old one."""
    (used / "trackers.json").touch()
    (used / "profile").mkdir()
    (used / "profile/operations.json").touch()
    checkpoint, note = train(used, 2, 6, every=2, keep=2, resume="never", stop_at=4)
    assert checkpoint is None and not (used / "trackers.json").exists()
    assert not (used / "profile").exists()
    assert (used / "aside-1/profile/operations.json").exists()
    assert f"set aside in {used / 'aside-1'}: 4 checkpoints (of steps 2 to 8)" in note
    assert "9 records (metrics.jsonl, gradients.jsonl, summary.json, " in note
    assert steps(used / "checkpoints") == [2, 4]
    assert steps(used / "aside-1" / "checkpoints") == [2, 4, 6, 8]
    assert Checkpoints(used / "checkpoints", 2, ALONE).best()[:2] == (0.14, 4)
    assert (
        not (used / "summary.json").exists() and not (used / "predictions.png").exists()
    )
    assert seeds(used / "metrics.jsonl") == {2} and seeds(
        used / "aside-1/metrics.jsonl"
    ) == {1}
    assert "--seed=1" in (used / "aside-1" / "config.cfg").read_text().splitlines()
    assert "--seed=2" in (used / "config.cfg").read_text().splitlines()

    checkpoint, note = train(used, 2, 6, every=2, keep=2)
    assert checkpoint.step == 4 and note == "" and not (used / "aside-2").exists()
    state = files.read(used / "checkpoints" / "step-00000006")
    assert state["w"] == 206.0 and steps(used / "checkpoints") == [4, 6]
    # What was set aside can be gone on from: now it is the run of seed 2 that is set aside.
    checkpoint, _ = train(used, 1, 9, every=1, resume=str(used / "aside-1"))
    assert checkpoint.step == 8 and steps(used / "checkpoints") == [9]
    assert files.read(used / "checkpoints" / "step-00000009")["w"] == 109.0
    assert steps(used / "aside-2" / "checkpoints") == [4, 6]
    assert (
        len([*used.glob("tensorboard/*")]) == 1
        and len([*used.glob("aside-2/*board/*")]) == 2
    )
    assert steps(used / "aside-1" / "checkpoints") == [2, 4, 6, 8], "it stays as it is"


def test_an_ordinary_resume_shows_no_step_twice(tmp_path):
    # Killed: three logged steps were not saved.
    train(tmp_path, 1, 9, every=4, stop_at=7)
    (tmp_path / "summary.json").write_text("of an earlier attempt")
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "lo\xff')
    checkpoint, note = train(tmp_path, 1, 9, every=4, stop_at=8)
    assert (
        checkpoint.step == 4 and note == "" and not (tmp_path / "summary.json").exists()
    )
    expected = [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert [x["step"] for x in json_lines(tmp_path / "metrics.jsonl")] == expected
    assert not list(tmp_path.glob("aside*")) and not list(tmp_path.glob("**/*.partial"))


def test_damaged_newer_checkpoints_are_set_aside_and_their_steps_saved_again(
    used, capsys
):
    folder = used / "checkpoints"
    (folder / "step-00000008" / "state.npz").write_bytes(b"damaged")
    (folder / "step-00000009").write_text("a file where a folder should be")
    # A kill leaves these.
    for left in (".step-00000009.partial", ".step-00000002.deleted"):
        (folder / left).mkdir()
    (folder / "notes").write_text("mine")
    checkpoint, note = train(used, 1, 9, every=1, keep=9)
    assert (
        checkpoint.step == 6
        and "2 checkpoints (of steps 8 to 9)" in note
        and "records" not in note
    )
    expected = ["notes", *(f"step-0000000{n}" for n in (2, 4, 6, 7, 8, 9))]
    assert sorted(p.name for p in folder.iterdir()) == expected
    printed = capsys.readouterr().out
    assert "passed over" in printed and "step-00000008/state.npz is damaged" in printed
    assert "step-00000009 is no checkpoint" in printed


def test_checkpoints_that_came_after_a_start_looked_are_not_set_aside(tmp_path):
    """As where the disk was not mounted then; what was there, and unsound, makes way."""
    old = tmp_path / "checkpoints" / "step-00000003"
    old.mkdir(parents=True)

    def begin(listed: set[str]) -> None:
        run_folder.begin(
            tmp_path, None, Settings(), evaluates_first=False, listed=listed
        )

    with pytest.raises(
        NotNow, match="step-00000003, which was not there when this start looked"
    ):
        begin(set())
    assert old.exists() and not (tmp_path / "config.cfg").exists()
    begin({old.name})
    assert not old.exists() and (tmp_path / "aside-1/checkpoints" / old.name).exists()


def test_checkpoints_on_a_mount_of_their_own_are_refused_at_the_first_start(
    tmp_path, monkeypatch
):
    """They could not be renamed into aside-N."""
    monkeypatch.setattr(run_folder, "_mount_of", lambda folder: folder.name)
    refused(
        lambda: run_folder.begin(tmp_path, None, Settings(), evaluates_first=False),
        f"{tmp_path / 'checkpoints'} is a mount of its own",
        f"mount {tmp_path} instead",
    )
    assert not (tmp_path / "config.cfg").exists()
    monkeypatch.undo()
    # This folder is always one.
    assert run_folder._mount_of(Path("/proc")) != run_folder._mount_of(Path("/"))
    (tmp_path / "link").symlink_to(tmp_path)
    assert run_folder._mount_of(tmp_path / "link") == run_folder._mount_of(tmp_path)


@pytest.mark.parametrize("moved", [0, 1])
def test_a_failure_while_setting_aside_leaves_no_copies(used, monkeypatch, moved):
    left = [None] * moved
    rename = Path.rename

    def fails_then(path: Path, to: Path) -> Path:
        if to.parent.name != "checkpoints" or left:
            left.pop()
            return rename(path, to)
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "rename", fails_then)
    with pytest.raises(OSError, match="cross-device"):
        run_folder.begin(used, None, Settings(), evaluates_first=False)
    assert (used / "aside-1").exists() == bool(moved)
    assert steps(used / "checkpoints") == [2, 4, 6, 8][: 4 - moved]


def test_a_new_folder_has_nothing_to_set_aside(tmp_path, monkeypatch):
    monkeypatch.chdir(project.folder())  # from elsewhere its paths would be absolute
    run_dir = tmp_path / "runs" / "new"
    config = Settings(run_dir=str(run_dir))
    for _ in range(2):  # a start that logged nothing makes none
        assert run_folder.begin(run_dir, None, config, evaluates_first=False) == ""
    expected = {".lease", ".lock", "checkpoints", "config.cfg"}
    assert {p.name for p in run_dir.iterdir()} == expected
    written = settings_lib.parse(["train.py", f"--flagfile={run_dir / 'config.cfg'}"])
    assert written == config


def test_a_lock_that_only_its_own_host_sees_lets_nobody_in(tmp_path, monkeypatch):
    """As NFS does it with nolock: a lock is had at once, though another host renews the lease."""
    monkeypatch.setattr(lease, "_BEAT", 0.1)
    lease_file = tmp_path / ".lease"
    lease_file.write_text('{"job": "another", "host": "node9"}')
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.05):
            os.utime(lease_file)

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        refused(lambda: lease.take(tmp_path), "another run, on node9", kind=NotNow)
    finally:
        ended.set()
        renewing.join()
    lease.take(tmp_path)
    lease.release()


@pytest.mark.parametrize("is_used", [False, True])
def test_a_disk_without_locks_is_in_use_while_its_lease_is_renewed(
    tmp_path, monkeypatch, is_used
):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(lease, "_BEAT", 0.1)
    monkeypatch.setattr(lease, "_FENCING", 0.0)
    (tmp_path / ".lease").write_text('{"job": "another", "host": "node9"}')
    ended = threading.Event()

    def renew():
        while is_used and not ended.wait(0.02):
            os.utime(tmp_path / ".lease")

    other = threading.Thread(target=renew)
    other.start()
    try:
        if is_used:
            with pytest.raises(NotNow, match="is in use by another run, on node9"):
                lease.take(tmp_path)
        else:
            lease.take(tmp_path)
    finally:
        ended.set()
        other.join()


def test_a_lease_is_looked_at_as_nfs_shows_it(tmp_path, monkeypatch):
    """NFS answers `stat` from what it has kept; opening the file makes it ask its server."""
    monkeypatch.setattr(lease, "_BEAT", 0.02)
    lease_file = tmp_path / ".lease"
    lease_file.write_text('{"job": "another", "host": "node9"}')
    known = os.stat(lease_file)
    seen = itertools.count(1)
    fstat = os.fstat

    def renewed(handle: int) -> os.stat_result:
        os.utime(lease_file, ns=(0, next(seen)))
        return fstat(handle)

    def kept(path: Path, **options: bool) -> os.stat_result:
        return known if path == lease_file else os.stat(path, **options)

    monkeypatch.setattr(lease.os, "fstat", renewed)
    monkeypatch.setattr(Path, "stat", kept)
    refused(lambda: lease._lock(tmp_path, True), "", kind=BlockingIOError)


def test_a_folder_is_free_once_its_run_has_ended_in_a_process_that_goes_on(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(lease, "_BEAT", 0.05)
    take = "import pathlib, sys; from hvdkit.checkpoint import lease; "
    take += "lease.take(pathlib.Path(sys.argv[1]))"
    other = [sys.executable, "-c", take, tmp_path]
    for _ in range(2):
        lease.take(tmp_path)
        refused = subprocess.run(other, capture_output=True, text=True)
        assert "is in use by another run" in refused.stderr
        lease.release()
        assert subprocess.run(other).returncode == 0
        time.sleep(0.2)
        assert not lease.lost(tmp_path), "nobody took over a run that goes on"


def test_a_copy_keeps_modes_and_leaves_out_links(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/private").write_text("x")
    (tmp_path / "a/private").chmod(0o600)
    (tmp_path / "a/link").symlink_to("private")
    whole_files.copy(tmp_path / "a", tmp_path / "b")
    (copied,) = (tmp_path / "b").iterdir()
    assert copied.read_text() == "x" and copied.stat().st_mode & 0o777 == 0o600


def old_run(folder):
    """Checkpoints 2, 4, 6 of seed 1 and its records, with no TensorFlow at work."""
    for step in (2, 4, 6):
        writing.write(
            folder / "checkpoints",
            step,
            {"w": np.float32(100 + step)},
            config={"seed": 1},
            ranks=1,
            tensorflow="",
            samples=0,
            passed_over=0,
        )
    for name in RECORDS:
        (folder / name).write_text(
            "".join(f'{{"step": {s}, "seed": 1}}\n' for s in range(1, 8))
        )
    settings_lib.write(Settings(seed=1), folder / "config.cfg")


def asides(folder):
    return Counter(p.name for p in folder.glob("aside-*/checkpoints/*"))


@pytest.mark.parametrize("back_to", [None, 2])
def test_a_kill_at_any_moment_mixes_and_loses_nothing(back_to, tmp_path):
    def begin(folder):
        checkpoint = None
        if back_to:
            path = folder / "checkpoints" / f"step-0000000{back_to}"
            checkpoint = run_folder.CheckpointInfo(path, Place(back_to), True, True)
        run_folder.begin(folder, checkpoint, Settings(seed=2), evaluates_first=False)

    later = [step for step in (2, 4, 6) if step > (back_to or 0)]

    outcomes = Counter()
    for folder in killed_at_each(tmp_path, old_run, begin):
        there, _ = files.newest_sound(folder / "checkpoints")
        step = files.read_manifest(there).step if there else 0
        ahead = [s for s in (2, 4, 6) if s > step]
        assert asides(folder) == {f"step-0000000{s}": 1 for s in ahead}
        logged = (
            [x["step"] for x in json_lines(folder / "metrics.jsonl")] if step else []
        )
        assert (
            not step
            or logged == [*range(1, 8)]
            or (step == back_to and logged == [1, 2])
        )
        settings = folder / "config.cfg"
        if settings.exists() and "--seed=2" in settings.read_text():
            assert step == (back_to or 0) and not (folder / "summary.json").exists()
        outcomes[step] += 1

        begin(folder)  # the same command again
        assert steps(folder / "checkpoints") == ([back_to] if back_to else [])
        assert asides(folder) == {f"step-0000000{step}": 1 for step in later}
        set_aside = set()
        for records in folder.glob("aside-*/metrics.jsonl"):
            set_aside.update(line["step"] for line in json_lines(records))
        assert set_aside == set(range(1, 8))
        left = folder / "metrics.jsonl"
        if back_to:
            assert [line["step"] for line in json_lines(left)] == [1, 2]
        else:
            assert not left.exists()
        assert "--seed=2" in (folder / "config.cfg").read_text()
        assert not (folder / "summary.json").exists()
    print(f"killed at {sum(outcomes.values())} moments, newest left: {dict(outcomes)}")
    assert set(outcomes) == {back_to or 0, *later}
