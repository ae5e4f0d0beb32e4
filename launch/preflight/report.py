"""The preflight's result, for a person."""

from __future__ import annotations

import collections
from typing import Any

from .findings import Finding, leaders

GB = 1 << 30


def table(rows: list[list[str]]) -> str:
    """Columns as wide as their widest cell; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)


def hosts(facts: list[Any], differences: list[float] | None) -> str:
    rows = [["host", "ranks", "address", "GPUs", "Python", "TensorFlow", "Horovod"]]
    rows[0] += ["run folder", "/dev/shm", "data", "clock"]
    for host, rank in leaders(facts).items():
        fact = facts[rank]
        its = [r for r, f in enumerate(facts) if f and f["host"] == host]
        versions, seen = fact["versions"], fact["data"]
        tensorflow = versions.get("tensorflow") or versions.get("tensorflow-cpu", "none")
        rows.append(
            [
                host,
                f"{its[0]}-{its[-1]}" if len(its) > 1 else str(rank),
                fact["address"],
                str(len(fact["gpus"]["visible"])),
                versions["python"],
                tensorflow,
                versions.get("horovod", "none"),
                _free(fact["disks"].get("the run folder")),
                _free(fact["disks"]["/dev/shm"]),
                f"{seen['files']:,} files" if seen else "-",
                f"{differences[rank]:+.3f} s" if differences else "-",
            ]
        )
    return table(rows)


def _free(disk: dict[str, Any] | None) -> str:
    return f"{disk['free'] / GB:.1f} GB" if disk else "-"


def links(facts: list[Any], pairs: list[dict[str, Any]], hosts: list[int]) -> str:
    """Megabytes a second over one TCP connection: the row sends, the column receives."""
    names = [facts[rank]["host"] for rank in hosts]
    rates = {}
    for pair in pairs:
        if "error" not in pair:
            first, second = pair["pair"]
            rates[first, second], rates[second, first] = pair["there"], pair["back"]
    rows = [["MB/s from \\ to", *names]]
    for i, name in enumerate(names):
        cells = [f"{rates[i, j] / 1e6:.0f}" if (i, j) in rates else "-" for j in range(len(names))]
        rows.append([name, *cells])
    return table(rows)


def speeds(rows: list[dict[str, Any]]) -> str:
    cells = [["collective", "bytes", "time", "algbw", "busbw"]]
    for row in rows:
        cells.append(
            [
                row["op"],
                f"{row['bytes']:,}",
                f"{row['seconds'] * 1e3:.2f} ms",
                f"{row['algbw'] / 1e9:.3f} GB/s",
                f"{row['busbw'] / 1e9:.3f} GB/s",
            ]
        )
    return table(cells)


def networks(taken: list[dict[str, str] | None]) -> str:
    """Which network NCCL took, and on how many ranks."""
    count = collections.Counter(its["network"] or "not known" for its in taken if its)
    return "NCCL took " + ", ".join(f"{name} ({n} ranks)" for name, n in count.items())


def findings(found: list[Finding]) -> str:
    lines = []
    for level in ("wrong", "note"):
        for one in (f for f in found if f.level == level):
            lines.append(f"{level.upper()}  {one.where}: {one.what}.\n       {one.todo}")
    return "\n".join(lines)
