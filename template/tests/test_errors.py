"""Mistakes of a user: one clear message from one rank, exit code 2 on all, no hang, no trace."""

import re
import shutil
import sys

import pytest
from PIL import Image

from ranks import last_lines, launch

# Each rank says its own exit code, and then ends well so that the launcher kills nobody.
_SAY_EXIT = "{python} train.py --flagfile=configs/demo.cfg {flags}; echo exit-code-$?"


def fail(flags, ranks=2, backend=""):
    """Runs train.py; returns the one error message."""
    command = _SAY_EXIT.format(python=sys.executable, flags=" ".join(flags))
    code = f"import os; os.execvp('bash', ['bash', '-c', {command!r}])"
    ended = launch(ranks, ["-c", code], backend)
    shown = last_lines(ended.output)
    assert re.findall(r"exit-code-(\d+)", ended.output) == ["2"] * ranks, shown
    assert len(ended.errors()) == 1, shown
    assert "Traceback" not in ended.output, shown
    return ended.errors()[0]


@pytest.fixture
def broken(tiny_data, tmp_path):
    """A copy of the data set to break."""
    root = tmp_path / "broken"
    shutil.copytree(tiny_data, root)
    return root


def first_name(root, split="train"):
    return (root / "splits" / f"{split}.txt").read_text().split()[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--task=segmentatoin"], ["segmentatoin", "segmentation"]),
        (["--global_batch_size=1"], ["--global_batch_size=1", "ranks, 2"]),
    ],
)
def test_bad_flags(flags, words, tiny):
    message = fail([*tiny, *flags])
    assert all(word in message for word in words), message


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_under_horovodrun_too(backend, tiny):
    assert "/no/such/folder" in fail([*tiny, "--data_dir=/no/such/folder"], backend=backend)


def test_image_without_label(tiny, broken):
    name = first_name(broken)
    (broken / "labels" / f"{name}.png").unlink()
    assert name in fail([*tiny, f"--data_dir={broken}"])


def test_corrupt_png_in_mid_run_keeps_what_was_trained(tiny, broken, tmp_path):
    """The bad image comes up at some step within the first epoch; steps before it are saved."""
    name = (broken / "splits" / "train.txt").read_text().split()[9]  # the first is tried at start
    path = broken / "images" / f"{name}.png"
    path.write_bytes(path.read_bytes()[:60])
    message = fail([*tiny, f"--data_dir={broken}", "--num_steps=9"])
    assert path.name in message
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert int(saved.name[5:]) < 4


def test_corrupt_validation_image(tiny, broken):
    path = broken / "images" / f"{first_name(broken, 'val')}.png"
    path.write_bytes(b"not a picture")
    assert path.name in fail([*tiny, f"--data_dir={broken}", "--num_steps=1"])


def test_label_value_out_of_range(tiny, broken):
    for path in (broken / "labels").glob("*.png"):
        label = Image.open(path)
        label.putpixel((3, 4), 99)
        label.save(path)
    message = fail([*tiny, f"--data_dir={broken}"])
    assert "99" in message and ".png" in message


def test_image_and_label_of_different_size(tiny, broken):
    for path in (broken / "labels").glob("*.png"):
        Image.open(path).resize((30, 32)).save(path)
    message = fail([*tiny, f"--data_dir={broken}"])
    assert "30" in message and "32" in message


def test_fewer_samples_than_ranks(tiny, broken):
    listing = broken / "splits" / "train.txt"
    listing.write_text(first_name(broken) + "\n")
    message = fail([*tiny, f"--data_dir={broken}"])
    assert "1 training sample" in message and "2 ranks" in message


def test_unwritable_run_folder(tiny, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "file" in fail([*tiny, f"--run_dir={tmp_path / 'file' / 'run'}"])


@pytest.mark.parametrize("flag", ["--num_steps=3", "--seed=7"])
def test_ranks_that_were_given_different_settings_are_told(flag, tiny):
    """As where hosts hold different versions of a flagfile."""
    code = (
        "import os, sys; sys.path.insert(0, '.'); import train;"
        f"flags = {[*tiny]!r};"
        f"flags += [{flag!r}] if os.environ['OMPI_COMM_WORLD_RANK'] == '1' else [];"
        "sys.exit(train.main(['train.py', '--flagfile=configs/demo.cfg', *flags]))"
    )
    ended = launch(2, ["-c", code], "mpirun")
    assert ended.code == 2, last_lines(ended.output)
    name, value = flag.split("=")
    assert [f"{name} is {value} on rank 1" in e for e in ended.errors()] == [True], ended.output


def test_a_run_outlives_who_reads_its_output(tiny, tmp_path):
    command = f"{sys.executable} train.py --flagfile=configs/demo.cfg {' '.join(tiny)}"
    code = f"import os; os.execvp('bash', ['bash', '-c', {command + ' > /dev/full'!r}])"
    ended = launch(1, ["-c", code])
    assert ended.code == 0, last_lines(ended.output)
    assert ended.output.count("standard output cannot be written") == 1
    assert (tmp_path / "run" / "summary.json").exists()


def test_hosts_that_see_different_data_are_told(tiny, tiny_data, tmp_path):
    """Rank 1 is given another data folder, as on a host with a stale copy."""
    other = tmp_path / "other"
    shutil.copytree(tiny_data, other)
    names = (other / "splits" / "train.txt").read_text().split()
    (other / "splits" / "train.txt").write_text("\n".join(names[1:]))
    code = (
        "import os, sys; sys.path.insert(0, '.'); import train;"
        f"flags = {[*tiny]!r};"
        f"flags += ['--data_dir={other}'] if os.environ['HOROVOD_RANK'] == '1' else [];"
        "sys.exit(train.main(['train.py', '--flagfile=configs/demo.cfg', *flags]))"
    )
    ended = launch(2, ["-c", code], "gloo")
    assert ended.code != 0
    assert ["data files on rank 1" in e for e in ended.errors()] == [True], ended.output
