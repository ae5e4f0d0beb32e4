"""hvdkit/launcher.py: what launched a process, by the variables that launchers set."""

import json
import os
import re
import subprocess
import sys

import pytest
from projects import ROOT

from hvdkit import launcher

HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "3",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
}
KINDS = {
    "alone": ({}, (0, 0, 1), set()),
    "horovodrun": (HOROVODRUN, (3, 1, 4), {"is_launched", "over_gloo"}),
    "mpirun": (MPIRUN, (3, 1, 4), {"is_launched", "is_under_mpirun", "in_mpi_world"}),
    "srun with PMIx": (
        SRUN | {"PMIX_RANK": "3"},
        (3, 1, 4),
        {"is_launched", "in_mpi_world"},
    ),
    "srun alone": (SRUN, (3, 1, 4), {"is_lone_task_of_srun"}),
    "a script of Slurm": (
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        (0, 0, 1),
        set(),
    ),
}
QUESTIONS = (
    "is_launched",
    "is_under_mpirun",
    "in_mpi_world",
    "over_gloo",
    "is_lone_task_of_srun",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_is_known_by_its_launchers_variables(kind, monkeypatch):
    variables, places, expected = KINDS[kind]
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "OMPI_COMM_", "PMI", "SLURM_")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ranks, _ = launcher.launched_ranks()
    assert (launcher.launch_rank(), launcher.launch_local_rank(), ranks) == places
    assert {name for name in QUESTIONS if getattr(launcher, name)()} == expected


CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
OF_TENSORFLOW = json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 0}})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"},
            "WORLD_SIZE says that 4",
        ),
        ({"TF_CONFIG": OF_TENSORFLOW}, "TF_CONFIG says that 3 processes"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_SIZE says that 2"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, "unset FLUX_JOB_SIZE"),
        (
            {"AWS_BATCH_JOB_NODE_INDEX": "1", "AWS_BATCH_JOB_NUM_NODES": "2"},
            "AWS_BATCH_JOB_NUM_NODES says that 2",
        ),
        (
            {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"},
            "unset PET_NNODES",
        ),
        ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"}, "that 2 processes"),
        ({"DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "2"}, "that 2 processes"),
        ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "SM_HOSTS says that 2 processes"),
        ({"SM_HOSTS": '["algo-1"]', "PET_NNODES": "2:4"}, ""),
        # Names that mean something else too.
        ({"RANK": "8"}, ""),
        ({"WORLD_SIZE": "2"}, ""),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ""),
        ({"RANK": "major", "WORLD_SIZE": "", "TF_CONFIG": "yes"}, ""),
        ({"TF_CONFIG": '{"cluster": {}}'}, ""),
        ({"TF_CONFIG": "[" * 100_000}, ""),
        # mpirun in a pod of another framework.
        (MPIRUN | {"RANK": "0", "WORLD_SIZE": "2", "TF_CONFIG": OF_TENSORFLOW}, ""),
        # srun's tasks may have PMI's variables too, which are then its own.
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, ""),
        # A job step of one task has a size, whatever its launcher's variables hold.
        ({"SLURM_PROCID": "", "SLURM_STEP_NUM_TASKS": "x"}, ""),
    ],
)
def test_processes_of_another_frameworks_launcher_are_told(
    variables, words, monkeypatch
):
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "OMPI_COMM_", "PMI", "SLURM_")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launcher, "_launcher_is_there", lambda: True)
    fault = launcher.launch_fault()
    assert words in fault and bool(words) == bool(fault)
    of_ours = variables.get("SLURM_PROCID") or variables.get("PMIX_RANK")
    assert launcher.launch_rank() == int(of_ours or 0)


def test_no_other_module_looks_for_a_launchers_ranks():
    """A new launcher is a line in one file."""
    names = "|".join(row.rank for row in launcher.LAUNCHERS)
    for folder in ("hvdkit/src", "launch"):
        for file in (ROOT / folder).rglob("*.py"):
            if file.name != "launcher.py":
                assert not re.search(names, file.read_text()), file


def test_the_doctor_knows_ranks_where_hvdkit_is_not_installed():
    code = "import sys; sys.modules['hvdkit'] = None; from preflight import ranks; "
    code += "print(ranks.launcher.__name__, ranks.launcher.launch_rank())"
    environment = {**os.environ, "OMPI_COMM_WORLD_RANK": "3", "HOROVOD_RANK": "3"}
    words = [sys.executable, "-c", code]
    ended = subprocess.run(
        words,
        cwd=ROOT / "launch",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout.split() == ["launcher", "3"]
