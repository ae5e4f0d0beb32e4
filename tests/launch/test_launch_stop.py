"""stop.sh on one host: whom it tells. In a process namespace, where other runs are out of reach."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Two launches of two ranks; a rank exits with 75 when it is told. Printed: exit codes by launch.
SCRIPT = """
wait='trap "exit 75" USR1; while :; do sleep 0.05; done'
rank() { LAUNCH_ID=$1 HOROVOD_RANK=$2 bash -c "$wait" & }
rank one 0; pids=$!; rank one 1; pids="$pids $!"
rank two 0; others=$!; rank two 1; others="$others $!"
sleep 0.5
sh "$STOP" one >&2
for pid in $pids; do wait $pid; echo $?; done
sleep 0.3
kill -KILL $others
for pid in $others; do wait $pid; echo $?; done 2>/dev/null
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, unshare")
def test_only_the_ranks_of_the_launch_that_is_named():
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", SCRIPT]
    env = os.environ | {"STOP": str(ROOT / "launch/stop.sh")}
    ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["75", "75", "137", "137"], ended.stderr
    assert "sent USR1 to 2 rank(s)" in ended.stderr
