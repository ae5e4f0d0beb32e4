"""Checkpoints that something damaged: restored right, or passed over by name."""

import contextlib
import io
import os
import random
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from small_checkpoints import restored, save, variables

from hvdkit import whole_files
from hvdkit.checkpoint import files, writing
from hvdkit.settings import Settings
from hvdkit.stop import Stop


def test_200_mutations_restore_right_or_are_passed_over_by_name(kept, capsys):
    """One of them each, of a folder with checkpoints 1 to 4: what comes back is what was saved."""
    kept = replace(kept, keep=4)
    for step in range(1, 5):
        save(kept, step, float(step), score=step / 10)
    pristine = kept.folder.with_name("pristine")
    shutil.copytree(kept.folder, pristine)
    draw = random.Random(9)
    passed_over = 0
    tried = set()
    for _ in range(200):
        shutil.rmtree(kept.folder)
        shutil.copytree(pristine, kept.folder)
        mutate = draw.choice(MUTATIONS)
        victim = mutate(kept.folder, draw)  # None means step 4
        capsys.readouterr()
        checkpoint = kept.find("auto")
        printed = capsys.readouterr().out
        into = variables(-1.0)
        kept.restore(checkpoint, into, Settings())
        assert float(into["w/kernel"][1, 2]) == checkpoint.step, (
            mutate.__name__,
            checkpoint,
        )
        if checkpoint.step < 4:
            name = "step-00000004" if victim is None else victim
            assert name in printed and checkpoint.step == 3, (
                mutate.__name__,
                name,
                printed,
            )
        best = kept.best()
        assert best is None or best.value == best.step / 10
        with contextlib.suppress(Stop):  # by name it is refused, or restored right
            assert restored(kept, str(kept.folder / "step-00000004")) == 4.0
        passed_over += checkpoint.step < 4
        tried.add(mutate)
    assert passed_over > 100 and tried == {*MUTATIONS}


def newest(folder, draw, name=None):
    return (
        folder / "step-00000004" / (name or draw.choice(["state.npz", "manifest.json"]))
    )


def flip_a_bit(folder, draw):
    file = newest(folder, draw)
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def cut_off(folder, draw):
    file = newest(folder, draw)
    os.truncate(file, draw.randrange(file.stat().st_size))


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


def copy_a_step_under_another_name(folder, draw):
    shutil.rmtree(folder / "step-00000004")
    shutil.copytree(
        folder / f"step-{draw.randrange(1, 4):08d}", folder / "step-00000004"
    )


def nothing_a_folder_or_a_pipe_instead_of_a_file(folder, draw):
    """Reading a pipe would wait for ever."""
    file = newest(folder, draw)
    file.unlink()
    draw.choice([lambda path: None, os.mkdir, os.mkfifo])(file)


def a_file_instead_of_the_folder(folder, draw):
    shutil.rmtree(folder / "step-00000004")
    (folder / "step-00000004").write_bytes(draw.randbytes(10))


def a_link_to_nowhere(folder, draw):
    victim = draw.choice([newest(folder, draw), folder / "step-00000004"])
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    victim.symlink_to(draw.choice([victim.name, "nowhere"]))  # itself, or nowhere


def a_link_to_elsewhere(folder, draw):
    (folder / "step-00000004").rename(folder.parent / f"moved-{draw.random()}")
    (folder / "step-00000004").symlink_to(
        max(folder.parent.glob("moved-*"), key=os.path.getctime)
    )


def terabytes(folder, draw):
    os.truncate(newest(folder, draw, "manifest.json"), 2**42)


MUTATIONS = [
    *[flip_a_bit] * 2,
    *[nothing_a_folder_or_a_pipe_instead_of_a_file] * 3,
    *(
        swap_a_file_with_another_steps,
        copy_a_step_under_another_name,
        a_link_to_nowhere,
    ),
    *(
        a_link_to_elsewhere,
        terabytes,
        a_file_instead_of_the_folder,
        cut_off,
        rename_the_folder,
    ),
]


def npz(save=np.savez, **members):
    content = io.BytesIO()
    save(content, **members)
    return content.getvalue()


def huge_header():
    """An array of 16 TB, says its header."""
    true_shape, lie = b"(1000,), }".ljust(19), b"(2000000000000,), }"
    whole = npz(w=np.zeros(1000))
    assert true_shape in whole
    return whole.replace(true_shape, lie)


WHOLE = npz(w=np.zeros(9))
UNREADABLE = {
    "empty": b"",
    "cut off": WHOLE[:-30],
    "objects": npz(w=np.array([{}], object)),
    "another key": WHOLE.replace(b"descr", b"xxxxx"),
    "16 terabytes": huge_header(),
    "packed": npz(np.savez_compressed, w=np.zeros(2**20)),
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_state_that_numpy_cannot_read_is_named_even_with_its_right_sum(content, kept):
    """As if it had been written so: the sums say that it is sound."""
    path = save(kept, 1)
    (path / "state.npz").write_bytes(content)
    about = replace(
        files.read_manifest(path), sha256=whole_files.sha256(path / "state.npz")
    )
    writing._write_manifest(path, about)
    with pytest.raises(Stop) as stop:
        kept.restore(kept.find("auto"), {"w": tf.Variable(np.zeros(9))}, Settings())
    assert re.search(r"step-00000001/state\.npz is damaged: \w+: .", str(stop.value)), (
        stop.value
    )
