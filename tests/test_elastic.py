"""--elastic: ranks come and go under a real horovodrun, and the end has the bits of a quiet run."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

from elastic_run import HOSTS, Elastic
from engine import elastic as elastic_lib
from hosts import ROOT, hosts, run  # noqa: F401

STEPS, COPIES = 300, 40
TEMPLATE = ROOT / "template"
TRAIN = [sys.executable, "train.py"]
HOSTS_SH, DISCOVER = (str(ROOT / "launch" / name) for name in ("hosts.sh", "discover.sh"))


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of small steps, logged one by one."""
    from hvdkit.data.demo import scenes

    data = tmp_path_factory.mktemp("scenes") / "data"
    scenes.make(data, scenes.Settings(train=26, val=10, size=32, box=(12, 16), digits=(1, 3)))
    return [
        *("--flagfile=configs/demo.cfg", "--model=tiny", f"--data_dir={data}", "--image_size=32"),
        *("--eval_crop=32", "--virtual_ranks=6", "--global_batch_size=12", "--warmup_steps=0"),
        *("--log_every=1", "--eval_every=0", "--checkpoint_every=120", "--keep=2"),
        *(f"--num_steps={STEPS}", f"--elastic_commit_every={COPIES}"),
    ]


@pytest.fixture(scope="module")
def quiet(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The summary of the run that nothing happened to."""
    folder = tmp_path_factory.mktemp("quiet") / "run"
    ended = run([*TRAIN, *flags, f"--run_dir={folder}"], 200, cwd=TEMPLATE)
    assert ended.code == 0, ended.output
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture
def elastic(flags: list[str], tmp_path: Path) -> Iterator:
    """Starts the run on so many ranks; what is left of it at the test's end is killed."""
    made: list[Elastic] = []

    def start(ranks: int, *more: str) -> Elastic:
        made.append(Elastic(tmp_path / "run", HOSTS[:ranks], [*flags, *more]))
        return made[-1]

    yield start
    for it in made:
        it.kill_all()
        it.process.wait(60)


def judge(it: Elastic, quiet: dict) -> None:
    code = it.ended()
    assert code == 0, it.tail()
    summary = it.summary()
    assert summary["weights_sha256"] == quiet["weights_sha256"]
    assert it.logged() == list(range(1, STEPS + 1))
    assert not any("Traceback" in line for line in it.lines), "".join(it.lines)


def test_a_rank_joins_then_rank_0_is_lost(elastic, quiet, record_property):
    it = elastic(2)
    it.until(20)
    second = it.rank_of(HOSTS[1])
    grown = it.change(HOSTS[:3])
    assert any("3 ranks on " in line for line in it.lines)
    it.wait_for("steps after a copy", lambda: it.steps[-1][0] % COPIES in range(10, 20), 60)
    lost = it.lose(HOSTS[0])
    assert len(it.steps) > len({step for step, _ in it.steps})  # some are made again
    record_property("elastic", f"{grown:.1f} s from a new host, {lost:.1f} s from a lost rank 0")
    assert lost < 30  # Gloo would wait so long for a rank that is not told
    assert it.rank_of(HOSTS[1]).pid == second.pid  # it was not started anew
    judge(it, quiet)
    assert it.summary()["ranks"] == 2


def test_such_a_launcher_and_the_flag_need_each_other(flags, tmp_path):
    ended = run([*TRAIN, *flags, "--elastic", f"--run_dir={tmp_path / 'run'}"], 60, cwd=TEMPLATE)
    assert ended.code == 2
    assert "error: --elastic needs a launcher that lets hosts come" in ended.output
    launcher = ["--discover", "echo localhost:2", "--interface", "lo"]
    words = [HOSTS_SH, *launcher, *TRAIN, *flags, f"--run_dir={tmp_path / 'run'}"]
    ended = run(words, 120, cwd=TEMPLATE)
    assert ended.code == 2, ended.output
    assert ended.output.count("add --elastic") == 1 and "Traceback" not in ended.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "said",
    [
        "Horovod has been shut down. This was caused by an exception on one of the ranks",
        "[/tmp/x/third_party/compatible17_gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out "
        "waiting 30000ms for recv operation to complete\n\t [[{{node step.totals}}]]",
        "[/x/gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]:3501: Connection reset by peer",
        "Process set does not exist, or has not been registered.",
    ],
)
def test_what_tells_that_a_rank_was_lost(said):
    with pytest.raises(elastic_lib.WorldChanged), elastic_lib._told():
        raise tf.errors.UnknownError(None, None, said)
    with pytest.raises(tf.errors.UnknownError), elastic_lib._told():
        raise tf.errors.UnknownError(None, None, "out of memory")


def test_a_rank_that_comes_too_late_does_not_wait_for_those_that_gave_up(monkeypatch):
    store = {}

    def request(method, path, body=None):
        return store.update({path: body}) if method == "PUT" else store.get(path, "")

    monkeypatch.setattr(elastic_lib, "_request", request)
    monkeypatch.setenv("HOROVOD_SIZE", "3")
    found = []
    for rank, patience in (("0", 0.2), ("1", 30.0), ("2", 30.0)):
        monkeypatch.setenv("HOROVOD_RANK", rank)
        monkeypatch.setattr(elastic_lib, "_PATIENCE", patience)
        start = time.monotonic()
        found.append(elastic_lib._all_there())
        assert time.monotonic() - start < 10
    assert found == [False] * 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["echo a:1", "--interface", "lo", "--mpi"], "--discover is for Gloo"),
        (["echo a:1"], "--discover needs --interface"),
        (["echo a:1", "-H", "a:1", "--interface", "lo"], "choose one"),
        (["true", "--interface", "lo"], "prints no host"),
        (["echo a", "--interface", "lo"], "'a' is not HOST:RANKS"),
        (["echo a:1", "--interface", "lo", "--min-np", "x"], "--min-np 'x'"),
        ([f"{DISCOVER} none.txt", "--interface", "lo"], "cannot read the hostfile none.txt"),
    ],
)
def test_what_the_launcher_refuses(words, sentence):
    ended = run([HOSTS_SH, "--discover", *words, "true"], 30)
    assert ended.code == 2 and sentence in ended.output, ended.output


def test_discovery_in_slurm_leaves_out_lost_nodes(tmp_path):
    (tmp_path / "sinfo").write_text(
        "#!/bin/sh\necho n1 alloc; echo n2 down; echo n3 mix*; echo n4 drng; echo n4 drng\n"
    )
    (tmp_path / "sinfo").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-4]"}
    ended = run([DISCOVER, "--slurm"], 30, env | {"SLURM_NTASKS_PER_NODE": "8"})
    assert ended.output.split() == ["n1:8", "n4:8"]


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_ended_and_the_others_go_on(elastic, quiet, record_property):
    it = elastic(3)
    it.until(20)
    lost = it.lose(HOSTS[1], signal.SIGSTOP)
    record_property("elastic", f"{lost:.1f} s from a stopped rank")
    assert sum("a rank was stopped" in line for line in it.lines) == 1
    judge(it, quiet)


@pytest.mark.slow
def test_a_host_that_is_taken_away_costs_no_step(elastic, quiet, record_property):
    it = elastic(3)
    it.until(20)
    away = it.change([HOSTS[1], HOSTS[2]])
    record_property("elastic", f"{away:.1f} s from a host that is taken away")
    assert any("this rank's host has left the run" in line for line in it.lines)
    judge(it, quiet)
    made = [step for step, _ in it.steps]
    assert len(made) == len(set(made))


@pytest.mark.slow
def test_more_ranks_than_virtual_ones_end_the_run_in_one_sentence(elastic):
    it = elastic(2, "--virtual_ranks=2")
    it.until(20)
    it.offer(HOSTS[:3])
    assert it.ended() == 2, it.tail()
    assert sum("cannot be dealt to 3 ranks" in line for line in it.lines) == 1


@pytest.mark.slow
def test_a_stop_saves_and_a_rerun_goes_on(elastic, quiet):
    it = elastic(2)
    it.until(20)
    it.change(HOSTS[:3])
    it.process.terminate()
    assert it.ended() == 75, it.tail()
    judge(elastic(2), quiet)


@pytest.mark.slow
def test_a_host_is_cut_off_then_another_one_joins(flags, hosts, quiet, tmp_path, record_property):  # noqa: F811
    with Elastic(tmp_path / "run", ["node2", "node3"], flags, hosts[1]) as it:
        it.until(20)
        cut = it.until_next_world(lambda: hosts.cut(hosts[2]))
        grown = it.change(["node1", "node3"])
        record_property("elastic", f"{cut:.1f} s from a cut, {grown:.1f} s from a new host")
        judge(it, quiet)
    assert it.summary()["ranks"] == 2
