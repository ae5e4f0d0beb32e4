"""The short form of `make chaos`: what is hardest to get right, once each."""

import subprocess
import sys

import pytest
from hosts import ROOT

KINDS = ("kill_in_save", "flip_a_bit", "fill_the_disk")


@pytest.mark.timeout(900)
def test_a_run_that_is_interrupted_ends_with_the_bits_of_one_that_never_was():
    words = [sys.executable, "tests/chaos.py", "--seed=3", f"--events={len(KINDS)}", *KINDS]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=850)
    print(ended.stdout + ended.stderr)
    assert ended.returncode == 0 and "the same to the last bit" in ended.stdout
