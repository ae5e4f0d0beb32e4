"""The ranks' world: what starting it changes, and how often ranks wait for each other."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from hvdkit.ranks import agreement, messages
from hvdkit.ranks import fingerprint as fingerprints
from hvdkit.settings import Settings

from ranks import launch, run_checks

FILE = Path(__file__).parent / "checks_world.py"


def test_a_rank_may_have_as_many_open_files_as_are_allowed():
    """Over Gloo it has a connection with every other one; 1,024 is what many systems begin with."""
    code = (
        "import resource, sys; sys.path.insert(0, '.'); kind = resource.RLIMIT_NOFILE;"
        "resource.setrlimit(kind, (1000, resource.getrlimit(kind)[1]));"
        "from engine import world; world.connect(); soft, most = resource.getrlimit(kind);"
        "print('raised' if soft == min(most, 65536) else soft)"
    )
    assert "raised" in launch(1, ["-c", code]).output


@pytest.mark.parametrize("ranks, backend", [(3, "gloo"), (2, "mpirun")])
def test_ranks_meet_send_and_compare(ranks: int, backend: str):
    outcomes = run_checks([FILE], ranks, backend)
    assert set(outcomes.values()) == {None}, outcomes


def test_what_thousands_of_ranks_send_is_read_in_time_that_grows_with_them_no_faster(monkeypatch):
    """8,192 ranks' words, as an allgather brings them. Horovod's own way took 1.6 s."""
    parts = []

    def everyone(own: np.ndarray, name: str) -> tf.Tensor:
        parts.append(own)
        return tf.constant(np.tile(own, 8192))

    monkeypatch.setattr(messages.hvd, "allgather", everyone)
    start = time.process_time()
    assert messages.gather(("host", 5), 8192) == [("host", 5)] * 8192
    assert time.process_time() - start < 0.8 and len(parts) == 1


def test_each_part_of_what_is_large_is_a_sign_of_life(monkeypatch):
    """Else a rank that receives gigabytes for minutes would count as hanging."""
    heard, parts = [], []

    def broadcast(part: np.ndarray, root_rank: int, name: str) -> tf.Tensor:
        parts.append((len(part), len(heard)))
        return tf.constant(part + 1)

    monkeypatch.setattr(messages, "_PART", 4)
    monkeypatch.setattr(messages.hvd, "broadcast", broadcast)
    monkeypatch.setattr(messages.pulse, "beat", lambda: heard.append(1))
    array = np.zeros(10, np.uint8)
    messages.fill(array, own=False)
    assert parts == [(4, 0), (4, 1), (2, 2)] and len(heard) == 3 and np.all(array == 1)


def test_ranks_that_are_alike_send_each_other_no_details():
    """Of thousands each one's packages, device and host would be megabytes."""
    world = SimpleNamespace(gather_alike=lambda own, name: [own] * 3, gather_objects=None)
    found = agreement.fingerprint(world, Settings())
    assert found == fingerprints.of_all([fingerprints.here()])
