"""What the preflight sees of a sound host with two InfiniBand cards and two GPUs."""

from __future__ import annotations

import types

OPTIONS = types.SimpleNamespace(min_free_gb=1.0, device="auto", interface="")
GB = 1 << 30


def fact(host: str, number: int) -> dict:
    """A sound host's facts."""
    disk = {"path": "/x", "free": 50 * GB, "error": None}
    return {
        "host": host,
        "boot": f"boot {number}",
        "local_rank": 0,
        "local_size": 2,
        "program": "/usr/bin/python3",
        "versions": {"python": "3.11.7", "tensorflow": "2.21.0"},
        "libraries": {"NCCL": "2.27.7", "NCCL (Horovod)": "yes"},
        "tensorflow": {"gpus": 2, "cuda": True},
        "imports": {},
        "gpus": {"count": 2, "visible": ["a", "b"], "names": ["H100"], "driver": "550"},
        "health": {"gpus": [[], []], "nvlinks": [[18, 18], [18, 18]], "xids": []},
        "names": {"name": host, "addresses": [f"10.0.0.{number}"]},
        "interfaces": {"eth0": [f"10.0.0.{number}"], "lo": ["127.0.0.1"]},
        "down": [],
        "address": f"10.0.0.{number}",
        "disks": {use: dict(disk) for use in ("the run folder", "temporary files", "/dev/shm")},
        "data": None,
        "limits": {"open files": 65536, "locked memory": None},
        "fabric": [{"port": f"mlx5_{n}:1", "kind": "InfiniBand", "state": "ACTIVE"} for n in "01"],
        "verbs": True,
        "environment": {},
    }
