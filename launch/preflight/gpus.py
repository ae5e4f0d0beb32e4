"""What the driver tells of this host's GPUs, and what TensorFlow sees of them.

The formats are nvidia-smi's: CSV of a query, XML of `-q -x` (one report that holds all, in which
drivers leave out what they do not know; a CSV query fails as a whole then), and the lists of
`nvlink --status`. Nothing here raises.
"""

from __future__ import annotations

import os
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from typing import Any

# Of hardware, not of a program that ran on it: NVIDIA's catalogue of Xid errors.
_HARDWARE_XIDS = {48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 140, 143, 149, 154}


def gpus() -> dict[str, Any]:
    """GPUs that the driver shows: all of them, and those that this process may use."""
    query = "--query-gpu=index,uuid,name,driver_version"
    try:
        text = _run("nvidia-smi", query, "--format=csv,noheader")
    except FileNotFoundError:
        return {"count": 0, "visible": [], "names": [], "driver": "none"}
    except (OSError, subprocess.SubprocessError) as error:
        return {"count": 0, "visible": [], "names": [], "driver": "none", "error": _why(error)}
    rows = [line.split(", ") for line in text.splitlines() if line.count(", ") == 3]
    return {
        "count": len(rows),
        "visible": _visible(rows, os.environ.get("CUDA_VISIBLE_DEVICES")),
        "names": sorted({row[2] for row in rows}),
        "driver": rows[0][3] if rows else "none",
    }


def _visible(rows: list[list[str]], chosen: str | None) -> list[str]:
    """UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves; CUDA reads it up to its first error."""
    if chosen is None:
        return [uuid for _, uuid, *_ in rows]
    found = []
    for one in (word.strip() for word in chosen.split(",")):
        its = [uuid for index, uuid, *_ in rows if one == index or (one and uuid.startswith(one))]
        if one.startswith("MIG-"):
            its = [one]
        if not its:
            break
        found.append(its[0])
    return found


def tensorflow() -> dict[str, Any]:
    """What TensorFlow sees; nothing is laid out on a GPU by that. After `facts.import_errors`."""
    import tensorflow as tf

    return {
        "gpus": len(tf.config.list_physical_devices("GPU")),
        "cuda": bool(tf.test.is_built_with_cuda()),
    }


def health() -> dict[str, Any] | None:
    """Marks of broken hardware; None where there is no nvidia-smi."""
    try:
        report = _run("nvidia-smi", "-q", "-x")
    except FileNotFoundError:
        return None
    except (OSError, subprocess.SubprocessError):
        report = ""  # `gpus` reports it
    return {
        "gpus": marks(report),
        "nvlinks": nvlinks(_tried("nvidia-smi", "nvlink", "--status")),
        "xids": xids(_tried("dmesg")),  # without the right to read it: none
    }


def marks(report: str) -> list[list[str]]:
    """Of each GPU in `nvidia-smi -q -x`'s report, what it says is wrong."""
    try:
        tree = ElementTree.fromstring(report)
    except ElementTree.ParseError:
        return []
    return [_marks_of_one(gpu) for gpu in tree.iter("gpu")]


def _marks_of_one(gpu: ElementTree.Element) -> list[str]:
    found = []
    uncorrected = sum(_uncorrected(gpu))
    if uncorrected:
        found.append(f"has {uncorrected} uncorrected memory error(s) since its driver was loaded")
    words = {
        "remapped_rows/remapped_row_failure": "could not replace a bad row of its memory",
        "remapped_rows/remapped_row_pending": "has a bad row of memory to replace",
        "retired_pages/pending_retirement": "has bad pages of memory to retire",
        "retired_pages/pending_blacklist": "has bad pages of memory to retire",
        "gpu_reset_status/reset_required": "asks to be reset",
    }
    found += [text for path, text in words.items() if gpu.findtext(path, "").strip() == "Yes"]
    action = gpu.findtext("gpu_recovery_action", "None").strip()
    if action not in ("None", "N/A"):
        found.append(f"asks for recovery: {action}")
    state = gpu.findtext("fabric/state", "N/A").strip()
    if state not in ("N/A", "Completed"):
        found.append(f"has not joined the NVSwitch fabric ({state}): look at nvidia-fabricmanager")
    # Drivers from 535 on say event where older ones say throttle.
    for kind in ("event", "throttle"):
        for reason in gpu.findall(f"clocks_{kind}_reasons/*"):
            name = reason.tag.removeprefix(f"clocks_{kind}_reason_")
            if name.startswith("hw_") and (reason.text or "").strip() == "Active":
                found.append(f"is held to a lower clock ({name})")
    return list(dict.fromkeys(found))


def _uncorrected(gpu: ElementTree.Element) -> list[int]:
    """Counts since the driver was loaded; before Ampere by double_bit/total, else by memory."""
    volatile = gpu.find("ecc_errors/volatile")
    if volatile is None:
        return []
    old = volatile.findtext("double_bit/total")
    texts = [old] if old else [e.text or "" for e in volatile if "uncorrectable" in e.tag]
    return [int(text) for text in texts if text.strip().isdecimal()]


def nvlinks(report: str) -> list[list[int]]:
    """Of each GPU in `nvidia-smi nvlink --status`' report, [active links, all links]."""
    found: list[list[int]] = []
    for line in report.splitlines():
        if line.startswith("GPU "):
            found.append([0, 0])
        elif found and re.match(r"\s*Link \d+: ", line):
            found[-1][0] += line.rstrip().endswith("GB/s")
            found[-1][1] += 1
    return found


def xids(log: str) -> list[str]:
    """Hardware errors in the kernel's log, each kind once: `79 (PCI:0000:3b:00)`."""
    seen = re.findall(r"NVRM: Xid \((PCI:[0-9a-fA-F:.]+)[^)]*\): (\d+)", log)
    return list(dict.fromkeys(f"{n} ({pci})" for pci, n in seen if int(n) in _HARDWARE_XIDS))


def _run(*words: str) -> str:
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, errors="replace")
    if ended.returncode:
        said = (ended.stdout + ended.stderr).strip().splitlines()
        raise subprocess.SubprocessError(f"exit code {ended.returncode}: {' '.join(said[-1:])}")
    return ended.stdout


def _tried(*words: str) -> str:
    try:
        return _run(*words)
    except (OSError, subprocess.SubprocessError):
        return ""


def _why(error: Exception) -> str:
    return f"no answer in {error.timeout:.0f} s" if hasattr(error, "timeout") else str(error)
