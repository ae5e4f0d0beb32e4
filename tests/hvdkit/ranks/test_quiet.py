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
