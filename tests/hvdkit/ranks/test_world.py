"""The ranks' world: what starting it changes, what can be sent; between ranks: checks_world.py."""

import math
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.ranks import messages
from hvdkit.ranks.world import World
from ranks import launch


def test_a_rank_may_have_as_many_open_files_as_are_allowed():
    """Over Gloo it has a connection with every other one; 1,024 is what many systems begin with."""
    code = (
        "import os, resource, sys; sys.path.insert(0, '.'); kind = resource.RLIMIT_NOFILE;"
        "resource.setrlimit(kind, (1000, resource.getrlimit(kind)[1]));"
        "from hvdkit.ranks import world; world.connect(); soft, most = resource.getrlimit(kind);"
        "print('raised' if soft == min(most, 65536) else soft, os.environ['HOROVOD_CACHE_CAPACITY'])"
    )
    assert "raised 8192" in launch(1, ["-c", code]).output


def test_each_part_of_what_is_large_is_a_sign_of_life(monkeypatch):
    """Else a rank that receives gigabytes for minutes would count as hanging."""
    heard = []
    parts = []

    def broadcast(part: np.ndarray, root_rank: int, name: str) -> tf.Tensor:
        parts.append((len(part), len(heard)))
        return tf.constant(part + 1)

    monkeypatch.setattr(messages, "_PART", 4)
    monkeypatch.setattr(messages.hvd, "broadcast", broadcast)
    monkeypatch.setattr(messages.heartbeat, "beat", lambda: heard.append(1))
    array = np.zeros(10, np.uint8)
    messages.fill(messages.Horovod(), array, root=0, own=False)
    assert parts == [(4, 0), (4, 1), (2, 2)] and len(heard) == 3 and np.all(array == 1)


VALUES = [
    {"a": [1, -2.5, math.inf, None, True], "dict": {"array": ["uint8", [1]]}},
    ["file-\udcff\udc80.png", "é", "\U0001f600", 2**2000],
    {"grid": np.arange(6, dtype=">i4").reshape(2, 3), "one": np.array(3.5)},
    [
        np.zeros((0, 3), np.complex64),
        tf.constant([1.5], tf.bfloat16).numpy(),
        np.array([True]),
    ],
]


@pytest.mark.parametrize("value", VALUES)
def test_what_is_sent_arrives_as_it_was(value):
    gathered = World(0, 1, 0, 1).gather_objects(value, "values")
    tf.nest.map_structure(np.testing.assert_array_equal, gathered, [value])
    arrays = [v for v in tf.nest.flatten(value) if isinstance(v, np.ndarray)]
    gathered = [v for v in tf.nest.flatten(gathered) if isinstance(v, np.ndarray)]
    assert [(v.shape, v.dtype.name) for v in gathered] == [
        (v.shape, v.dtype.name) for v in arrays
    ]


@pytest.mark.parametrize(
    "value",
    [
        {(1,): 2},
        {1, 2},
        Path("a"),
        np.float32(1),
        np.array(["a"]),
        np.array([None]),
        1j,
        b"a",
    ],
)
@pytest.mark.parametrize("call", ["gather_objects", "gather_alike", "broadcast_object"])
def test_a_value_of_another_type_is_refused_where_it_would_be_sent(value, call):
    with pytest.raises(TypeError, match="'the faults' cannot be sent to other ranks: "):
        getattr(World(0, 1, 0, 1), call)([value], "the faults")
