"""Mistakes of a user: one clear message from one rank, exit code 2 on all, no hang, no trace."""

import re
import sys

import tensorflow as tf

from hvdkit.data.pipeline import reason_of
from ranks import last_lines, launch


def test_bad_flags_under_horovodrun(tiny):
    """Each rank says its exit code, and then ends well so that the launcher kills nobody."""
    train = [sys.executable, "train.py", "--flagfile=configs/demo.cfg", *tiny]
    command = f"{' '.join(train)} --reduce_backend=mpi; echo exit-code-$?"
    code = f"import os; os.execvp('bash', ['bash', '-c', {command!r}])"
    ended = launch(2, ["-c", code], "gloo")
    shown = last_lines(ended.output)
    assert re.findall(r"exit-code-(\d+)", ended.output) == ["2"] * 2, shown
    (message,) = ended.errors()
    assert "horovodrun --mpi" in message and "Traceback" not in ended.output, shown


def test_the_reason_is_found_in_what_tensorflow_says_twice():
    message = (
        "Graph execution error:\n\nDetected at node a defined at (most recent call last):\n"
        '  File "a.py", line 1, in f\n\n<stack traces unavailable>\n2 root error(s) found.\n'
        "  (0) INVALID_ARGUMENT:  indices = 7 is not in [0, 1)\n\t [[{{node a}}]]\n"
        "  (1) INVALID_ARGUMENT:  indices = 7 is not in [0, 1)\n0 successful operations."
    )
    error = tf.errors.InvalidArgumentError(None, None, message)
    assert reason_of(error) == "indices = 7 is not in [0, 1)"
