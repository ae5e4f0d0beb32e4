"""What another project or a container leaves in the environment does not end a run with a trace."""

import sys

import pytest
from hosts import ROOT, run


@pytest.mark.parametrize("script", ["template/train.py", "launch/doctor.py"])
def test_scripts_find_the_modules_beside_them(script: str):
    ended = run(
        [sys.executable, ROOT / script, "--x"], timeout=60, env={"PYTHONSAFEPATH": "1"}
    )
    assert ended.code == 2 and "ModuleNotFoundError" not in ended.output, ended.output


def test_a_python_that_writes_names_of_files_in_ascii_is_told_what_to_set():
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-c", "import hvdkit.ranks.quiet"]
    ended = run(words, timeout=60, env=env)
    assert ended.code == 2 and ended.output.count("\n") == 1, ended.output
    assert "in ascii here" in ended.output and "PYTHONUTF8=1" in ended.output


@pytest.mark.parametrize("rank", ["0", "1"])
def test_packages_from_elsewhere_are_noted_before_they_are_imported(tmp_path, rank):
    """As a cluster's modules put them into PYTHONPATH: once, by rank 0."""
    (tmp_path / "h5py").mkdir()
    (tmp_path / "h5py/__init__.py").write_text("raise SystemExit(7)\n")
    words = [sys.executable, "-c", "import hvdkit.ranks.quiet"]
    path = f"{tmp_path}:{ROOT}/hvdkit/src"
    ended = run(words, timeout=60, env={"PYTHONPATH": path, "HOROVOD_RANK": rank})
    note = (
        f"note: not of this environment ({sys.prefix}): h5py of {tmp_path}, which may"
    )
    assert ended.output.count("note: ") == (rank == "0"), ended.output
    assert (note in ended.output) == (rank == "0")
    assert ended.code == 7
