"""launch/scaling.py: formulas by hand, refusals, what it writes, and published figures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import by_path
from hosts import ROOT, require

PLAN = ["--params=25.6M", "--step_ms=110", "--batch=64", "--link=25Gbit", "--gpus_per_host=8"]


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "launch")


@pytest.fixture
def model():
    return importlib.import_module("planner.model")


def scaling(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "launch" / "scaling.py", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_ring_of_four(model):
    # Each rank sends 6 quarters of 100 MB at 100 MB/s, in 6 steps of 1 ms.
    assert model.ring(100e6, 4, 100e6, 1e-3) == pytest.approx(1.5 + 0.006)


def test_gloo_sends_nearly_all_twice(model):
    # 8 MiB on two ranks: four segments of 1 MiB a rank, 2 x (4 x 2 - 2) of them sent.
    assert model.gloo_ring(8 << 20, 2, 1 << 20, 0.0) == pytest.approx(12)
    # A latency above a segment's own time: two are under way in the time of one and the latency.
    assert model.gloo_ring(8 << 20, 2, 1 << 20, 3.0) == pytest.approx(2 * (6 * 2 + 3))


def test_two_levels_use_the_link_once_a_host(model):
    links = model.Links(8, inside=10e9, inside_latency=0.0, link=1e9, link_latency=0.0)
    # Inside 2 x 7/8 of 1 GB at 10 GB/s, between four hosts 2 x 3/4 of it at 1 GB/s.
    found = model.allreduce(1e9, 32, links, model.Horovod(algorithm="two-level"))
    assert found == pytest.approx(0.175 + 1.5)
    # One ring over all 32: 2 x 31/32 of it over the slowest link.
    found = model.allreduce(1e9, 32, links, model.Horovod(algorithm="ring"))
    assert found == pytest.approx(2 * 31 / 32)


def test_a_tree_has_fewer_hops(model):
    links = model.Links(1, inside=1e9, inside_latency=0.0, link=1e9, link_latency=1e-3)
    found = model.allreduce(9e8, 64, links, model.Horovod(algorithm="tree"))
    assert found == pytest.approx(2.0 + 2 * 6 * 1e-3)
    small = [model.allreduce(1, 64, links, model.Horovod(algorithm=a)) for a in ("ring", "auto")]
    assert small == pytest.approx([126e-3, 12e-3], rel=1e-3)


def test_expected_maximum(model):
    # Of one: 0; of two: 1 / sqrt(pi); of 100: tables of order statistics.
    assert model.expected_maximum(1) == pytest.approx(0, abs=1e-6)
    assert model.expected_maximum(2) == pytest.approx(np.pi**-0.5, abs=1e-5)
    assert model.expected_maximum(100) == pytest.approx(2.50759, abs=1e-4)


def test_young_and_daly(model):
    # C = 50 s, M = 10,000 s: sqrt(2 C M) = 1,000 s; Daly adds 1/3 sqrt(C/2M) + 1/9 C/2M, less C.
    assert model.young(50, 10_000) == pytest.approx(1000)
    assert model.daly(50, 10_000) == pytest.approx(1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50)
    kept = [model.goodput(every, 50, 100, 10_000) for every in (200, 967, 4000)]
    assert kept[1] > max(kept[0], kept[2])
    # A failure costs half an interval and the restart, to first order: (517 + 100) / 10,000.
    assert kept[1] == pytest.approx(967 / 1017 * (1 - 617 / 10_000), abs=0.003)


def test_communication_hides_behind_the_backward_pass(model):
    horovod = model.Horovod(cycle=1e-6)
    # Backward from 1 s to 3 s. Early gradients are summed by then; late ones start at its end.
    links = model.Links(1, 1e9, 0.0, 1e9, 0.0)
    early = model.Job(3.0, 1, 1e9, ((0.0, 1.0),))
    late = model.Job(3.0, 1, 1e9, ((1.0, 1.0),))
    assert model.step(early, 2, links, horovod).total == pytest.approx(3.0, abs=1e-5)
    assert model.step(late, 2, links, horovod).total == pytest.approx(4.0, abs=1e-5)
    # Two in a row wait for each other: 2 x 1.5 s from 1 s on; the second is ready at 2 s.
    both = model.Job(3.0, 1, 3e9, ((0.0, 0.5), (0.5, 0.5)))
    assert model.step(both, 2, links, horovod).bandwidth == pytest.approx(1.0, abs=1e-5)


def test_what_is_ready_together_travels_together(model):
    sent = []

    def reduce(size: float) -> float:
        sent.append(size)
        return 2.0

    # Asked half a second after the first is ready, then every second (NCCL) or when free.
    ready = [(0.0, 3.0), (0.1, 3.0), (0.2, 3.0), (1.0, 1.0), (2.4, 1.0)]
    horovod = model.Horovod(fusion=6.0, cycle=1.0)
    assert model.messages_end(ready, reduce, horovod, 0.0) == pytest.approx(0.5 + 4 * 2)
    assert sent == [6.0, 3.0, 1.0, 1.0]
    sent.clear()
    horovod = model.Horovod(backend="gloo", fusion=6.0, cycle=1.0)
    assert model.messages_end(ready, reduce, horovod, 0.0) == pytest.approx(0.5 + 3 * 2)
    assert sent == [6.0, 3.0, 2.0]
    # What is of another type travels beside them.
    assert model.messages_end(ready, reduce, horovod, 0.0, 1.0) == pytest.approx(0.5 + 4 * 2)


def test_the_slowest_rank_and_the_input_hold_all_up(model):
    links = model.Links(4, 1e12, 0.0, 1e12, 0.0)
    job = model.Job(1.0, 10, 1.0, ((0.0, 1.0),), jitter=0.1)
    found = model.step(job, 2, links, model.Horovod())
    assert found.stragglers == pytest.approx(0.1 * np.pi**-0.5, abs=1e-5)
    # Four GPUs of a host want 40 samples, of which it prepares 20 a second.
    slow = model.Job(1.0, 10, 1.0, ((0.0, 1.0),), input_rate=20.0)
    assert model.step(slow, 4, links, model.Horovod()).input == pytest.approx(1.0, abs=1e-5)


def test_a_table_json_and_a_plot(tmp_path: Path):
    files = [tmp_path / name for name in ("plan.json", "plan.svg", "plan.png")]
    out = [f"--json={files[0]}", "--price=2", f"--plot={files[1]}"]
    ended = scaling(*PLAN, "--gpus=8,64,512", *out)
    assert ended.returncode == 0, ended.stderr
    assert "limited by stragglers" in ended.stdout and "cost of 1 M samples" in ended.stdout
    rows = json.loads(files[0].read_text())["predictions"]
    assert [row["gpus"] for row in rows] == [8, 64, 512]
    rates = [row["efficiency"] for row in rows]
    assert 1 > rates[0] > rates[1] > rates[2] > 0.5
    assert "<svg" in files[1].read_text()
    assert scaling(*PLAN, "--gpus=1", f"--plot={files[2]}").returncode == 0
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_what_reads_only_the_first_line_gets_no_trace():
    command = f"{sys.executable} {ROOT}/launch/scaling.py {' '.join(PLAN)} --gpus=8,64 | true"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert not ended.stderr


def test_flags_that_help_against_a_slow_link():
    ended = scaling(*PLAN, "--gpus=64", "--link=1Gbit")
    assert "limited by bandwidth (--compression=fp16: " in ended.stdout
    halved = scaling(*PLAN, "--gpus=64", "--link=1Gbit", "--compression=fp16")
    told = ended.stdout.split("--compression=fp16: ")[1].split("%")[0]
    assert abs(float(_value(halved.stdout, "efficiency").rstrip("%")) - float(told)) <= 0.5


def _value(table: str, name: str) -> str:
    return next(line for line in table.splitlines() if line.startswith(name)).split()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus=8,x"], "'x' is not a whole number"),
        (["--gpus=0"], "'0' is not a whole number"),
        (["--gpus=8", "--link=25"], "'25' is not a rate"),
        (["--gpus=8", "--params=-1M"], "'-1M' is not a number above 0"),
        (["--gpus=8", "--step_ms=nan"], "'nan' is not a number above 0"),
        (["--gpus=8", "--jitter=2"], "'2' is not a share"),
        (["--gpus=8", "--link_share=0"], "'0' leaves no bandwidth"),
        (["--gpus=800000", "--mtbf_days=0.001"], "no step is kept"),
        (["--gpus=8", "--inside=token_ring"], "--inside=token_ring: one of pcie3"),
        (["--gpus=8", "--profile=none"], "--profile=none: no profile of that name"),
        (["--gpus=8", "--plot=x.pdf"], "--plot=x.pdf: a name that ends in .svg or .png"),
        (["--gpus=8", "--json=/nowhere/x"], "/nowhere/x"),
        (["--gpus=8", "--run_dir=/nowhere"], "leave them out"),
    ],
)
def test_wrong_values_are_refused_in_one_sentence(words: list[str], said: str):
    ended = scaling(*PLAN, *words)
    assert ended.returncode == 2 and not ended.stdout
    assert said in ended.stderr and ended.stderr.count("\n") == 1


def test_what_is_missing_is_named():
    ended = scaling("--gpus=8", "--link=25Gbit", "--batch=2")
    assert ended.returncode == 2
    assert ended.stderr == "error: --params and --step_ms: give them, or --run_dir of a benchmark\n"


def test_a_benchmark_and_a_timeline_are_read(tmp_path: Path):
    benchmark_of(tmp_path, ranks=2)
    ended = scaling(f"--run_dir={tmp_path}", "--gpus=1,8", "--link=1Gbit", f"--profile={tmp_path}")
    assert ended.returncode == 0, ended.stderr
    assert "0.5498 M parameters, 2.199 MB of gradients a step; 100 ms for 16" in ended.stdout
    assert "note: measured on 2 ranks" in ended.stdout
    run = importlib.import_module("planner.run")
    # Three of four bytes come first, the rest last.
    assert np.allclose(run.arrivals(tmp_path), [(0.0, 0.75), (1.0, 0.25)])


def test_flags_beside_a_benchmark_count_or_are_refused(tmp_path: Path):
    benchmark_of(tmp_path, ranks=1)
    words = [f"--run_dir={tmp_path}", "--gpus=8", "--link=1Gbit"]
    assert "1.1 MB of gradients" in scaling(*words, "--compression=fp16").stdout
    refused = scaling(*words, "--accumulation_steps=4")
    assert refused.returncode == 2 and "--accumulation_steps: leave them out" in refused.stderr
    settings = tmp_path / "config.cfg"
    settings.write_text(settings.read_text().replace("virtual_ranks=0", "virtual_ranks=8"))
    assert "--virtual_ranks, whose messages" in scaling(*words).stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("ranks", 0), ("seconds_a_step", float("nan")), ("global_batch_size", float("inf")),
     ("trained_parameters", 0), ("seconds_a_step", None)],
)  # fmt: skip
def test_a_damaged_benchmark_is_refused(tmp_path: Path, name: str, value: float | None):
    benchmark_of(tmp_path, ranks=1)
    file = tmp_path / "benchmark.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    ended = scaling(f"--run_dir={tmp_path}", "--gpus=8", "--link=1Gbit")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert "is not as --benchmark writes it" in ended.stderr


def test_a_save_waits_for_the_one_before_it():
    slow = scaling(*PLAN, "--gpus=1024", "--write_s=1800").stdout
    assert float(_value(slow, "save every")) == pytest.approx(30, abs=0.1)
    # Of 31 minutes one is training, and the failures come on top.
    often = scaling(*PLAN, "--gpus=1024", "--write_s=1800", "--checkpoint_minutes=1").stdout
    assert float(_value(often, "saves and failures").rstrip("%")) > 96


def benchmark_of(folder: Path, ranks: int) -> None:
    """What train.py --benchmark writes, and a timeline of two steps and two gradients."""
    about = {"ranks": ranks, "seconds_a_step": 0.1, "global_batch_size": 16 * ranks}
    about["trained_parameters"] = 549_755
    (folder / "benchmark.json").write_text(json.dumps(about))
    flags = "--accumulation_steps=1\n--compression=none\n--virtual_ranks=0\n"
    (folder / "config.cfg").write_text(flags)
    events = [{"ph": "M", "name": "process_name", "pid": p, "args": {"name": f"grad_{p}"}}
              for p in (1, 2)]  # fmt: skip
    for start in (1000, 5000):
        for pid, late, count in ((1, 0, 3), (2, 500, 1)):
            args = {"dtype": "float32", "shape": f"[{count}, 2]"}
            events += [
                {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "pid": pid, "ts": start + late},
                {"ph": "E", "pid": pid, "ts": start + late + 10},
                {"ph": "B", "name": "ALLREDUCE", "pid": pid, "ts": start + late + 20},
                {"ph": "E", "pid": pid, "ts": start + late + 90, "args": args},
            ]
    (folder / "timeline").mkdir()
    (folder / "timeline" / "step-00000010.json").write_text(json.dumps(events))


def test_published_figures_are_predicted_from_other_sources():
    published = by_path.benchmark("published")
    table = published.rows()
    of_all = published.errors(table)
    places = published.left_out(table, of_all)
    found = [own[best] for own, best in zip(of_all, places)]
    assert len(table) == 23 and np.median(np.abs(found)) <= published.GOAL
    # A row's own source has no say: other figures there change nothing.
    own = np.array([row.source == table[0].source for row in table])
    assert published.left_out(table, of_all + 50 * own[:, None])[0] == places[0]


@pytest.mark.slow  # a minute
def test_a_shaped_link_with_a_delay_is_predicted():
    require("sshd", "ssh", "ip", "tc", "unshare", "nsenter")
    words = ["--hosts=2", "--mbit=25", "--delay_ms=5"]
    command = [sys.executable, ROOT / "benchmarks" / "links.py", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "1 of 1 within 15%" in ended.stdout, ended.stdout
