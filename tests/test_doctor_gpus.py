"""GPUs in the preflight: what nvidia-smi says, by a stand-in that writes in its formats."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from doctor_facts import fact
from hosts import ROOT, run

sys.path.insert(0, str(ROOT / "launch"))
from preflight import gpus, verdict_gpus

DOCTOR = str(ROOT / "launch" / "doctor.py")


def one_gpu(old: bool = False, **changed: str) -> str:
    """A <gpu> of `nvidia-smi -q -x`: the elements that are read, where drivers put them."""
    say = {"uncorrected": "0", "failure": "No", "pending": "No", "retire": "N/A", "reset": "No"}
    say |= {"hw": "Not Active", "sw": "Active", "state": "Completed", "action": "None"} | changed
    kind = "throttle" if old else "event"
    counts = (
        f"<double_bit><device_memory>0</device_memory><total>{say['uncorrected']}</total>"
        "</double_bit>"
        if old
        else "<sram_correctable>9</sram_correctable>"
        "<sram_uncorrectable_parity>0</sram_uncorrectable_parity>"
        "<sram_uncorrectable_secded>N/A</sram_uncorrectable_secded>"
        f"<dram_uncorrectable>{say['uncorrected']}</dram_uncorrectable>"
    )
    return f"""<gpu id="00000000:3B:00.0">
      <gpu_reset_status><reset_required>{say["reset"]}</reset_required></gpu_reset_status>
      <gpu_recovery_action>{say["action"]}</gpu_recovery_action>
      <clocks_{kind}_reasons>
        <clocks_{kind}_reason_gpu_idle>Active</clocks_{kind}_reason_gpu_idle>
        <clocks_{kind}_reason_hw_thermal_slowdown>{say["hw"]}</clocks_{kind}_reason_hw_thermal_slowdown>
        <clocks_{kind}_reason_sw_power_cap>{say["sw"]}</clocks_{kind}_reason_sw_power_cap>
      </clocks_{kind}_reasons>
      <ecc_errors><volatile>{counts}</volatile>
        <aggregate><dram_uncorrectable>7</dram_uncorrectable></aggregate></ecc_errors>
      <retired_pages><pending_retirement>{say["retire"]}</pending_retirement></retired_pages>
      <remapped_rows>
        <remapped_row_pending>{say["pending"]}</remapped_row_pending>
        <remapped_row_failure>{say["failure"]}</remapped_row_failure>
      </remapped_rows>
      <fabric><state>{say["state"]}</state><status>Success</status></fabric>
    </gpu>"""


def report(*every: str) -> str:
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
    return (
        f"{head}<nvidia_smi_log><attached_gpus>8</attached_gpus>{''.join(every)}</nvidia_smi_log>"
    )


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "changed, mark",
    [
        ({"uncorrected": "2"}, "has 2 uncorrected memory error(s) since its driver was loaded"),
        ({"failure": "Yes"}, "could not replace a bad row of its memory"),
        ({"pending": "Yes"}, "has a bad row of memory to replace"),
        ({"retire": "Yes"}, "has bad pages of memory to retire"),
        ({"reset": "Yes"}, "asks to be reset"),
        ({"action": "Drain P2P"}, "asks for recovery: Drain P2P"),
        ({"hw": "Active"}, "is held to a lower clock (hw_thermal_slowdown)"),
        ({"state": "In Progress"}, "has not joined the NVSwitch fabric (In Progress)"),
    ],
)
def test_marks_of_broken_hardware(old: bool, changed: dict[str, str], mark: str):
    sound, broken = gpus.marks(report(one_gpu(old), one_gpu(old, **changed)))
    assert sound == []
    [found] = broken
    assert found.startswith(mark)


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML", report()])
def test_no_report_is_no_mark(text: str):
    assert gpus.marks(text) == []


def test_a_gpu_that_says_little_has_no_mark():
    """A consumer's card: no ECC, no fabric."""
    little = report('<gpu id="0"><ecc_errors><volatile><dram_uncorrectable>N/A')
    little = little.replace(
        "</nvidia", "</dram_uncorrectable></volatile></ecc_errors></gpu></nvidia"
    )
    assert gpus.marks(little) == [[]]


def links(*active: int, every: int = 3) -> str:
    lines = []
    for number, count in enumerate(active):
        lines.append(f"GPU {number}: NVIDIA H100 80GB HBM3 (UUID: GPU-{number})")
        for link in range(every):
            lines.append(f"\t Link {link}: {'26.562 GB/s' if link < count else '<inactive>'}")
    return "\n".join(lines)


def test_nvlinks_are_counted():
    assert gpus.nvlinks(links(3, 2, 0)) == [[3, 3], [2, 3], [0, 3]]
    assert gpus.nvlinks("") == []
    assert gpus.nvlinks("GPU 0: NVIDIA L4 (UUID: GPU-0)") == [[0, 0]]


def test_xids_of_hardware_are_found_once():
    log = (
        "[ 12.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus.\n"
        "[ 12.2] NVRM: Xid (PCI:0000:3b:00): 79, pid=2, name=python, GPU has fallen off the bus.\n"
        "[ 13.0] NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7, Contained: CE User Channel\n"
        "[ 14.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=3, name=python, Ch 00000008, a program's own\n"
    )
    assert gpus.xids(log) == ["79 (PCI:0000:3b:00)", "94 (PCI:0000:01:00)"]


ROWS = [[str(n), f"GPU-{n}aaa", "H100", "550"] for n in range(4)]


@pytest.mark.parametrize(
    "chosen, visible",
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("GPU-3a", [3]),
        ("0,7,1", [0]),  # CUDA stops at what it does not know
    ],
)
def test_what_cuda_visible_devices_leaves(chosen: str | None, visible: list[int]):
    assert gpus._visible(ROWS, chosen) == [ROWS[n][1] for n in visible]


def test_a_part_of_a_gpu():
    assert gpus._visible(ROWS, "MIG-1234") == ["MIG-1234"]


@pytest.fixture
def hosts_facts() -> list[dict]:
    """Two ranks on each of three hosts."""
    return [fact(f"node{n}", n) | {"local_rank": r} for n in (1, 2, 3) for r in range(2)]


def texts(facts: list[dict], device: str = "auto") -> list[str]:
    found = verdict_gpus.judge(facts, list(range(len(facts))), device)
    return [f"{f.level} {f.where}: {f.what}" for f in found]


@pytest.mark.parametrize(
    "changed, text",
    [
        (
            {"gpus": {"visible": []}},
            "wrong node2 (rank 2, 3): no GPU is visible there, other hosts",
        ),
        ({"gpus": {"visible": ["a"]}}, "wrong node2 (rank 2, 3): 2 ranks but 1 visible GPU(s)"),
        (
            {"tensorflow": {"gpus": 0, "cuda": False}},
            "wrong node2 (rank 2, 3): nvidia-smi shows 2 GPU(s), TensorFlow sees none: it is the "
            "CPU build",
        ),
        (
            {"tensorflow": {"gpus": 1}},
            "wrong node2 (rank 2, 3): nvidia-smi shows 2 GPU(s), TensorFlow sees 1, though it is",
        ),
        (
            {"libraries": {"NCCL (Horovod)": "none"}},
            "wrong node2 (rank 2, 3): Horovod is built without NCCL",
        ),
        (
            {"health": {"gpus": [[], ["asks to be reset"]]}},
            "wrong node2 (rank 2): GPU 1 asks to be",
        ),
        (
            {"health": {"nvlinks": [[18, 18], [17, 18]]}},
            "wrong node2 (rank 2): GPU 1 has 17 of 18 NVLinks active, others there have 18",
        ),
        (
            {"health": {"nvlinks": [[12, 18], [12, 18]]}},
            "wrong node2 (rank 2): its GPUs have 12 NVLinks active, those of other hosts 18",
        ),
        ({"health": {"xids": ["79 (PCI:1)"]}}, "note node2 (rank 2): the kernel's log has Xid 79"),
    ],
)
def test_one_odd_host(hosts_facts, changed: dict, text: str):
    assert texts(hosts_facts) == []
    for rank in (2, 3):
        for name, values in changed.items():
            hosts_facts[rank][name] = hosts_facts[rank][name] | values
    [found] = texts(hosts_facts)
    assert found.startswith(text)
    assert texts(hosts_facts, "cpu") == []


def test_ranks_that_see_one_gpu_each_of_their_own(hosts_facts):
    """As Slurm's --gpus-per-task grants them."""
    for rank, one in enumerate(hosts_facts):
        one["gpus"] = one["gpus"] | {"visible": ["ab"[rank % 2]]}
        one["tensorflow"] = {"gpus": 1, "cuda": True}
    assert texts(hosts_facts) == []


def test_hosts_without_gpus_may_train_on_cpus_unless_gpus_are_demanded(hosts_facts):
    for one in hosts_facts:
        one |= {"tensorflow": {"gpus": 0, "cuda": False}, "health": None}
        one["gpus"] = one["gpus"] | {"visible": []}
    assert texts(hosts_facts) == []
    [found] = texts(hosts_facts, "gpu")
    assert "nvidia-smi shows 0 GPU(s), TensorFlow sees none: it is the CPU build" in found


@pytest.mark.parametrize("active, faults", [([18, 18, 0, 0], 0), ([18, 18, 18, 0], 1)])
def test_gpus_without_links_may_be_by_design(active: list[int], faults: int):
    one = fact("node1", 1)
    one["health"]["nvlinks"] = [[count, 18] for count in active]
    assert len(texts([one])) == faults


@pytest.fixture
def smi(tmp_path: Path):
    """A driver with 8 GPUs, of which the last has marks; returns the folder of its program."""
    every = [one_gpu()] * 7 + [one_gpu(uncorrected="4")]
    rows = "\n".join(f"{n}, GPU-{n}, NVIDIA H100 80GB HBM3, 550.54.15" for n in range(8))
    for name, text in (("q", report(*every)), ("gpus", rows), ("nvlink", links(*[3] * 7, 2))):
        (tmp_path / name).write_text(text + "\n")
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\ncase $1 in -q) cat {tmp_path}/q ;; nvlink) cat {tmp_path}/nvlink ;;\n"
        f"--query-gpu=*) cat {tmp_path}/gpus ;; *) exit 2 ;; esac\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program.parent)


@pytest.mark.parametrize("device, marks", [("auto", 3), ("cpu", 0)])
def test_eight_gpus_and_the_cpu_build(smi: str, device: str, marks: int):
    """Real processes: the CPU build of TensorFlow that is installed here."""
    words = [sys.executable, DOCTOR, "--json=-", "--no_collectives", f"--device={device}"]
    ended = run(words, timeout=100, env={"PATH": f"{smi}:{os.environ['PATH']}"})
    record = json.loads(ended.output)
    wrong = [f["what"] for f in record["findings"] if f["level"] == "wrong"]
    assert ended.code == (1 if marks else 0), ended.output
    assert len(wrong) == marks
    if marks:
        assert wrong[0] == ("nvidia-smi shows 8 GPU(s), TensorFlow sees none: it is the CPU build")
        assert wrong[1].startswith("GPU 7 has 4 uncorrected memory error(s)")
        assert wrong[2] == "GPU 7 has 2 of 3 NVLinks active, others there have 3"
        assert "make setup DEVICE=gpu" in record["findings"][0]["todo"]
        assert "--device=cpu" in record["findings"][0]["todo"]


def test_a_driver_that_fails_is_named(tmp_path: Path):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not talk'\nexit 9\n"
    )
    program.chmod(0o755)
    words = [sys.executable, DOCTOR, "--json=-", "--no_collectives"]
    ended = run(words, timeout=100, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    [found] = json.loads(ended.output)["findings"]
    assert found["what"] == (
        "nvidia-smi fails: exit code 9: NVIDIA-SMI has failed because it could not talk"
    )
