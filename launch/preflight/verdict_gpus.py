"""What is wrong with the hosts' GPUs. No rank is asked here."""

from __future__ import annotations

import collections
import statistics

from .findings import Facts, Finding, leaders, note, place, wrong


def judge(facts: list[Facts | None], present: list[int], device: str) -> list[Finding]:
    """`device`: as training has it; on CPUs, GPUs are nobody's business."""
    if device == "cpu":
        return []
    found = counts(facts, present) + seen_by_tensorflow(facts, present, device)
    return found + horovods(facts, present) + health(facts) + nvlinks(facts)


def counts(facts, present) -> list[Finding]:
    """GPUs for every rank; a rank may see its own only, or all of its host's."""
    found = []
    somewhere = any(facts[rank]["gpus"]["visible"] for rank in present)
    for host, rank in leaders(facts).items():
        seen = facts[rank]["gpus"]
        its = [r for r in present if facts[r]["host"] == host]
        visible = {gpu for r in its for gpu in facts[r]["gpus"]["visible"]}
        if seen.get("error"):
            found.append(
                wrong(
                    place(facts, [rank]),
                    f"nvidia-smi fails: {seen['error']}",
                    "look at the driver on that host (dmesg, nvidia-smi)",
                )
            )
        elif not somewhere:
            continue
        elif not visible:
            found.append(
                wrong(
                    place(facts, its),
                    "no GPU is visible there, other hosts have some",
                    "look at CUDA_VISIBLE_DEVICES and at what the scheduler granted",
                )
            )
        elif len(its) > len(visible):
            found.append(
                wrong(
                    place(facts, its),
                    f"{len(its)} ranks but {len(visible)} visible GPU(s)",
                    f"start at most {len(visible)} ranks there, or see CUDA_VISIBLE_DEVICES",
                )
            )
    return found


def seen_by_tensorflow(facts, present, device: str) -> list[Finding]:
    """Ranks that would train on CPUs while GPUs stand idle."""
    odd = collections.defaultdict(list)
    for rank in present:
        shown, sees = len(facts[rank]["gpus"]["visible"]), facts[rank].get("tensorflow")
        wanted = max(shown, 1) if device == "gpu" else shown
        if sees and sees["gpus"] < wanted:
            odd[shown, sees["gpus"], sees["cuda"]].append(rank)
    found = []
    for (shown, sees, cuda), ranks in odd.items():
        what = f"nvidia-smi shows {shown} GPU(s), TensorFlow sees {sees or 'none'}"
        if not cuda:
            what += ": it is the CPU build"
            todo = "install the GPU build there (make setup DEVICE=gpu)"
        elif shown:
            what += ", though it is built for CUDA"
            todo = "there, read what TensorFlow says it cannot load: python -c 'import tensorflow "
            todo += 'as tf; print(tf.config.list_physical_devices("GPU"))\''
        else:
            todo = "look at the driver, at CUDA_VISIBLE_DEVICES and at what the scheduler granted"
        todo += "; to train on CPUs: --device=cpu"
        found.append(wrong(place(facts, ranks), what, todo))
    return found


def horovods(facts, present) -> list[Finding]:
    slow = [
        rank
        for rank in present
        if facts[rank].get("tensorflow", {"gpus": 0})["gpus"]
        and facts[rank].get("libraries", {}).get("NCCL (Horovod)") == "none"
    ]
    if not slow:
        return []
    what = "Horovod is built without NCCL: gradients would go through the hosts' memory"
    return [wrong(place(facts, slow), what, "build it for GPUs: make setup DEVICE=gpu")]


def health(facts: list[Facts | None]) -> list[Finding]:
    found = []
    for rank in leaders(facts).values():
        seen, where = facts[rank]["health"], place(facts, [rank])
        if not seen:
            continue
        for number, marks in enumerate(seen["gpus"]):
            if marks:
                what = f"GPU {number} {'; it '.join(marks)}"
                todo = f"reset it (nvidia-smi --gpu-reset -i {number}) or drain the host; if it "
                found.append(wrong(where, what, todo + "comes back, have the GPU replaced"))
        if seen["xids"]:
            # Since the host was started: the GPU may have been reset or replaced after it.
            what = f"the kernel's log has Xid {', '.join(seen['xids'][:4])}"
            todo = "look them up in NVIDIA's list of Xid errors; reset the GPU, or drain the host"
            found.append(note(where, what, todo))
    return found


def nvlinks(facts: list[Facts | None]) -> list[Finding]:
    """GPUs with fewer active links than others of their host, hosts with fewer than most.

    Links that no GPU of a kind of machine uses are not faults, nor are GPUs without any where that
    is so for half of them: only some are bridged.
    """
    found, best = [], {}
    for rank in leaders(facts).values():
        links = (facts[rank]["health"] or {"nvlinks": []})["nvlinks"]
        if not links:
            continue
        best[rank] = max(active for active, _ in links)
        by_design = 2 * sum(active == 0 for active, _ in links) >= len(links)
        for number, (active, every) in enumerate(links):
            if active < best[rank] and (active or not by_design):
                what = f"GPU {number} has {active} of {every} NVLinks active, others there have "
                what += str(best[rank])
                found.append(wrong(place(facts, [rank]), what, _LOOK_AT_NVLINK))
    most = statistics.median_high(best.values()) if best else 0
    for rank, active in best.items():
        if active < most:
            what = f"its GPUs have {active} NVLinks active, those of other hosts {most}"
            found.append(wrong(place(facts, [rank]), what, _LOOK_AT_NVLINK))
    return found


_LOOK_AT_NVLINK = (
    "look at nvidia-smi nvlink --status, nvidia-fabricmanager and Xid 74; reset the GPU"
)
