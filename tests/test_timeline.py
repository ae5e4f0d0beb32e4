"""benchmarks/timeline.py: what it says of a real recording, and of made-up ones that are known."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hosts import ROOT
from ranks import last_lines, launch

REPORT = ROOT / "benchmarks" / "timeline.py"
RUN = Path(__file__).parent / "timeline_run.py"
LATE_MS = 300


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("timeline_report", REPORT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses looks for annotations
    spec.loader.exec_module(module)
    return module


# ---- A real run, whose rank 1 is late ----------------------------------------------------------


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The report's rows by their first cell, each a list of the others."""
    run = tmp_path_factory.mktemp("timeline") / "run"
    ended = launch(2, [RUN, run], "gloo")
    assert ended.code == 0, last_lines(ended.output)
    found = subprocess.run([sys.executable, REPORT, run], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert f"{run}/timeline/step-00000003.json: steps 3 to 5\n" in found.stdout
    return {c[0]: c[1:] for line in found.stdout.splitlines() if (c := re.split(r"  +", line))}


def test_tensors_and_bytes_are_those_of_the_model(told):
    """Two dense layers, 6 to 5 and 5 to 3, in float32; totals: 4 sums and 6 votes."""
    assert told["a step"] == ["gradients", "others"]
    assert told["tensors"] == ["4.0", "1.0"]
    assert told["bytes"] == [str((6 * 5 + 5 + 5 * 3 + 3) * 4), str(10 * 8)]
    messages, others = map(float, told["messages"])
    assert 1 <= messages <= 4 and others == 1
    assert re.fullmatch(r"\d+%", told["hidden"][0])


def test_the_longest_wait_is_for_the_late_rank(told):
    waits = {tensor: cells for tensor, cells in told.items() if re.match(r"grad_|step\.", tensor)}
    assert len(waits) == 5
    # Every step begins late, so whatever is first in it waits the longest.
    step, longest, rank = next(iter(waits.values()))
    assert step in ("3", "4", "5") and float(longest) > LATE_MS * 0.8 and rank == "1"
    by_rank = {rank: float(cells[0]) for rank, cells in told.items() if rank in ("0", "1")}
    assert by_rank["1"] > LATE_MS * 0.8 and by_rank.get("0", 0) < by_rank["1"] / 2


# ---- Made up -----------------------------------------------------------------------------------


class Recorded:
    """A timeline as Horovod writes it; times in microseconds."""

    def __init__(self):
        self.events = [
            {
                "name": "process_name",
                "ph": "M",
                "pid": 0,
                "args": {"start_time_since_epoch_in_micros": 1_000_000},
            }
        ]
        self.pids = {}

    def pid(self, tensor):
        if tensor not in self.pids:
            self.pids[tensor] = len(self.pids) + 1
            name = {"name": "process_name", "ph": "M", "args": {"name": tensor}}
            self.events.append(name | {"pid": self.pids[tensor]})
        return self.pids[tensor]

    def add(self, phase, at, tensor="", name="", **more):
        own = {"pid": self.pid(tensor)} if tensor else {}
        self.events.append({"ph": phase, "ts": at, "name": name, **own, **more})

    def cycle(self):
        self.add("i", 0, name="CYCLE_START")

    def agree(self, tensor, *ready):
        """`ready`: (time, rank); each in a cycle of Horovod's own."""
        self.add("B", ready[0][0], tensor, "NEGOTIATE_ALLREDUCE")
        for at, rank in ready:
            self.cycle()
            self.add("X", at, tensor, str(rank))
        self.add("E", ready[-1][0], tensor)

    def message(self, tensors, activities, size=10):
        """Tensors that travel together; activities: (name, start, end)."""
        for tensor in tensors:
            self.add("B", activities[0][1], tensor, "ALLREDUCE")
        for name, start, end in activities:
            for tensor in tensors:
                self.add("B", start, tensor, name)
            for tensor in tensors:
                self.add("E", end, tensor)
        for tensor in tensors:
            args = {"dtype": "float16", "shape": f"[{size}, 2]"}
            self.add("E", activities[-1][2], tensor, args=args)

    def write(self, run, first=1):
        path = run / "timeline" / f"step-{first:08d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.events))
        return path


def two_steps():
    """Backward passes end at 150 and 1150: half of the first message of each step is hidden."""
    made = Recorded()
    for start in (0, 1000):
        made.agree("step.totals", (start, 0), (start + 5, 1))
        made.message(["step.totals"], [("GLOO_ALLREDUCE", start + 5, start + 6)])
        made.agree("grad_1", (start + 90, 1), (start + 95, 2), (start + 100, 0))
        made.agree("grad_0", (start + 60, 2), (start + 90, 0))
        both = ["grad_1", "grad_0"]
        steps = [("MEMCPY_IN_FUSION_BUFFER", 100, 120), ("GLOO_ALLREDUCE", 120, 200)]
        made.message(both, [(name, start + a, start + b) for name, a, b in steps])
        # On a GPU a message waits for its data first, which is no communication.
        late = [("WAIT_FOR_DATA", 200, 290), ("QUEUE", 290, 300), ("NCCL_ALLREDUCE", 300, 400)]
        made.message(["grad_2"], [(name, start + a, start + b) for name, a, b in late])
    return made


def test_messages_bytes_and_waits_of_a_known_timeline(tool, tmp_path):
    timeline = tool.read(two_steps().write(tmp_path))
    gradients = [use for use in timeline.uses if use.is_gradient]
    assert timeline.steps == 2 and len(gradients) == 6
    assert sum(use.is_message for use in gradients) == 4
    assert sum(use.bytes for use in gradients) == 6 * 10 * 2 * 2
    # 60 to 100 without a gap, and 100 to 200 and 300 to 400, of each step.
    assert tool.negotiation(gradients) == 2 * 40 and tool.communication(gradients) == 2 * 200
    waits = tool.longest_waits(timeline.uses, first=7)
    assert waits[1][0] == "grad_0" and waits[1][3] == "0"
    assert tool.waits_by_rank(timeline.uses, 2)[1] == ("0", "0.0", "4")


def test_bytes_that_horovod_does_not_tell_are_not_left_out_silently(tool, tmp_path):
    made = two_steps()
    made.events = [
        {k: v for k, v in event.items() if k != "args"}
        if event["ph"] == "E" and event["pid"] == made.pid("grad_2")
        else event
        for event in made.events
    ]
    report = "\n".join(tool.report(tmp_path, made.write(tmp_path)))
    assert re.search(r"^bytes +at least 80  +40$", report, re.M), report


def test_ranks_that_come_in_one_cycle_are_equally_late(tool, tmp_path):
    made = two_steps()
    made.add("B", 3000, "grad_0", "NEGOTIATE_ALLREDUCE")
    made.add("X", 3000, "grad_0", "1")
    made.cycle()
    made.add("X", 3100, "grad_0", "0")
    made.add("X", 3100, "grad_0", "2")
    made.add("E", 3100, "grad_0")
    made.message(["grad_0"], [("GLOO_ALLREDUCE", 3100, 3200)])
    assert tool.read(made.write(tmp_path)).uses[-1].last == [0, 2]


def profile(path, planes):
    """An xplane.pb of planes: name: [(operation, start, end)]; began at 1 s, times in us."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    for name, spans in planes.items():
        plane = space.planes.add(name=name)
        plane.stat_metadata[1].name = "tf_op"
        line = plane.lines.add(timestamp_ns=20_000)
        for number, (operation, start, end) in enumerate(spans, 1):
            kernel = name.startswith("/device")
            plane.event_metadata[number].name = "sgemm" if kernel else operation
            event = line.events.add(metadata_id=number)
            event.offset_ps, event.duration_ps = (start - 20) * 10**6, (end - start) * 10**6
            if kernel:
                event.stats.add(metadata_id=1, str_value=operation)
    task = space.planes.add(name="Task Environment")
    task.stat_metadata[1].name = "profile_start_time"
    task.stats.add(metadata_id=1, uint64_value=10**9)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(space.SerializeToString())


@pytest.mark.parametrize(
    ("planes", "share"),
    [
        # 50 of 200 microseconds in each step; later operations go forward or are of the optimizer.
        (
            {
                "/host:CPU": [
                    ("gradient_tape/a/MatMul:MatMul", 20, 130),
                    ("while/body/gradient_tape/b:Sum", 130, 150),
                    ("SGD/Mul:Mul", 400, 500),
                    ("gradient_tape/a/MatMul:MatMul", 1020, 1150),
                    ("a/MatMul:MatMul", 1150, 1500),
                ]
            },
            "25%",
        ),
        # The host launches, the device computes: until 350 in the first step, 1090 in the second.
        (
            {
                "/host:CPU": [
                    ("gradient_tape/a:MatMul", 20, 30),
                    ("gradient_tape/a:MatMul", 1020, 1030),
                ],
                "/device:GPU:0": [
                    ("gradient_tape/a:MatMul", 60, 350),
                    ("gradient_tape/a:MatMul", 1060, 1090),
                ],
            },
            "38%",
        ),
        ({"/host:CPU": [("gradient_tape/a:MatMul", 20, 30)]}, "not known"),
        ({}, "not known"),
    ],
)
def test_hidden_is_what_lies_before_the_backward_pass_ends(planes, share, tool, tmp_path):
    path = two_steps().write(tmp_path)
    folder = tmp_path / "tensorboard" / "plugins" / "profile" / path.stem
    profile(folder / "host.xplane.pb", planes)
    timeline = tool.read(path)
    gradients = [use for use in timeline.uses if use.is_gradient]
    assert tool.hidden(gradients, tool.backward_ends(timeline, folder)) == share
    assert re.search(rf"^hidden +{share}$", "\n".join(tool.report(tmp_path, path)), re.M)


def test_what_cannot_be_read_is_refused_in_one_sentence(tool, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["timeline.py", str(tmp_path)])

    def refusal():
        assert tool.main() == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "--timeline=FIRST:LAST" in refusal()
    path = two_steps().write(tmp_path)
    path.write_text(path.read_text()[:-40])
    assert "no whole timeline" in refusal() and str(path)
    path.write_text("")
    assert "no whole timeline" in refusal()
    Recorded().write(tmp_path)
    assert "no whole step" in refusal()
