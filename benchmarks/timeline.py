"""What a run communicated in the steps that --timeline=FIRST:LAST recorded, in tables.

    python benchmarks/timeline.py RUN_DIR

Times are rank 0's; it coordinates the others. Of each step, gradients apart from all else (totals,
batch norm, what actions exchange):

  tensors         collectives that the step asks for
  messages        what carried them: Horovod fuses tensors that are ready together; one with tensors
                  of both kinds counts where its first one does
  bytes           of the results, as they travel (--compression); Horovod does not tell them of an
                  alltoall, which --compression=bf16 makes of each gradient
  negotiation     time in which some rank was ready for a tensor, and another one was not yet
  communication   time in which rank 0 copied or exchanged: Horovod's MEMCPY_*, and MPI_*, GLOO_*
                  or NCCL_*; not its waits for data. Tensors of one message count once.
  hidden          share of the gradients' communication that lies before the end of rank 0's own
                  backward pass: of the step's last operation of a gradient (in TensorFlow's profile
                  "gradient_tape/" stands in its name) on the device, or on the CPU without one. The
                  rest is what rank 0 waits for after it has computed.

A wait is from a tensor's first rank ready to its last, in cycles of Horovod: ranks that come in
the same cycle are equally late. The last rank is known where Horovod's response cache is off.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "template"))

Span = tuple[float, float]  # microseconds since 1970

_GRADIENT = re.compile(r"grad_\d|virtual\.gradients|HorovodAllgather_gradient")
_TRAVELS = re.compile(r"(MPI|GLOO|NCCL|CCL)_")
_COMMUNICATES = re.compile(r"(MPI|GLOO|NCCL|CCL|MEMCPY)_")
_ONCE_A_STEP = "step.totals"
_START = "HorovodAllreduce"  # what the ranks exchange to begin together
_BACKWARD = "gradient_tape/"
_MOST_WAITS = 8


@dataclasses.dataclass
class Use:
    """One collective of a tensor, from the first rank that was ready to its end."""

    tensor: str
    step: int = 0  # of those recorded, from 0
    asked: float = 0.0  # the first rank is ready; 0 where that was not recorded
    agreed: float = 0.0  # the last one is
    last: list[int] = dataclasses.field(default_factory=list)  # ranks that came last
    is_message: bool = False  # the first tensor of a message stands for it
    communicates: list[Span] = dataclasses.field(default_factory=list)
    end: float = 0.0
    bytes: int | None = None  # None where Horovod does not tell: of alltoall

    @property
    def is_gradient(self) -> bool:
        return bool(_GRADIENT.match(self.tensor))

    @property
    def waited(self) -> float:
        return self.agreed - self.asked if self.asked else 0.0


@dataclasses.dataclass
class Timeline:
    uses: list[Use]  # in order of their ends
    steps: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN_DIR", type=Path)
    run = parser.parse_args().run
    try:
        lines = [line for path in recordings(run) for line in report(run, path)]
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def recordings(run: Path) -> list[Path]:
    found = sorted((run / "timeline").glob("step-*.json"))
    if not found:
        raise ValueError(f"{run} has no timeline: train with --timeline=FIRST:LAST")
    return found


def report(run: Path, path: Path) -> Iterator[str]:
    """Lines of a recording's tables."""
    timeline = read(path)
    first = int(path.stem.removeprefix("step-"))
    ends = backward_ends(timeline, run / "tensorboard" / "plugins" / "profile" / path.stem)
    uses, steps = timeline.uses, timeline.steps
    yield f"{path}: steps {first} to {first + steps - 1}"
    rows = [("a step", "gradients", "others")]
    parts = [[use for use in uses if use.is_gradient is kind] for kind in (True, False)]
    rows += [
        ("tensors", *(f"{len(part) / steps:,.1f}" for part in parts)),
        ("messages", *(f"{sum(use.is_message for use in part) / steps:,.1f}" for part in parts)),
        ("bytes", *(_bytes_a_step(part, steps) for part in parts)),
        ("negotiation, ms", *(_ms(negotiation(part), steps) for part in parts)),
        ("communication, ms", *(_ms(communication(part), steps) for part in parts)),
        ("hidden", hidden(parts[0], ends), ""),
    ]
    yield from _table(rows)
    yield from _table(longest_waits(uses, first))
    yield from _table(waits_by_rank(uses, steps))


# ---- What Horovod recorded ---------------------------------------------------------------------


def read(path: Path) -> Timeline:
    """Raises ValueError: it is no timeline, or has no whole step."""
    try:
        events = json.loads(path.read_text())
        began = events[0]["args"]["start_time_since_epoch_in_micros"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(
            f"{path} is no whole timeline: the run was killed, or its disk was full"
        ) from None
    uses = _uses(events, began)
    while uses and uses[0].tensor == _START:
        del uses[0]
    seen: collections.Counter[str] = collections.Counter()
    for use in uses:
        use.step = seen[use.tensor]
        seen[use.tensor] += 1
    steps = seen[_ONCE_A_STEP]
    if not steps:
        raise ValueError(f"{path} holds no whole step")
    return Timeline(uses, steps)


def _uses(events: list[dict], began: float) -> list[Use]:
    names: dict[int, str] = {}
    current: dict[int, Use] = {}
    open_spans: dict[int, list[tuple[str, float]]] = collections.defaultdict(list)
    ended, travelling, cycle = [], 0, 0
    ready: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)  # cycle, rank
    for event in events:
        phase, pid, name = event["ph"], event.get("pid"), event.get("name", "")
        at = began + event.get("ts", 0)
        if phase == "M" and name == "process_name":
            names[pid] = event["args"].get("name", "")
        elif name == "CYCLE_START":
            cycle += 1
        elif phase == "X" and name.isdigit():
            ready[pid].append((cycle, int(name)))
        elif phase == "B":
            use = current.setdefault(pid, Use(names[pid]))
            if name.startswith("NEGOTIATE_"):
                use.asked = at
            if _TRAVELS.match(name):
                # Tensors of one message all begin before one of them ends.
                use.is_message |= travelling == 0
                travelling += 1
            open_spans[pid].append((name, at))
        elif phase == "E" and not open_spans[pid]:
            ready.pop(pid, None)  # what began before the recording did
        elif phase == "E":
            name, start = open_spans[pid].pop()
            use = current[pid]
            travelling -= bool(_TRAVELS.match(name))
            if name.startswith("NEGOTIATE_"):
                use.agreed, came = at, ready.pop(pid, [])
                if came and came[0][0] != came[-1][0]:
                    use.last = [rank for when, rank in came if when == came[-1][0]]
            elif _COMMUNICATES.match(name):
                use.communicates.append((start, at))
            elif not open_spans[pid]:
                use.end, use.bytes = at, _bytes(event.get("args", {}))
                ended.append(current.pop(pid))
    return ended


def _bytes(args: dict) -> int | None:
    if not args:
        return None
    shape = [int(size) for size in re.findall(r"\d+", args["shape"])]
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(args["dtype"]).itemsize


# ---- What TensorFlow recorded ------------------------------------------------------------------


def backward_ends(timeline: Timeline, folder: Path) -> list[float]:
    """When rank 0's backward pass of each step ended; empty where its profile does not tell."""
    spans = backward_spans(folder)
    ends, before = [], 0.0
    for step in range(timeline.steps):
        # Of the next step nothing goes backward before this step's gradients are there, all of
        # them: what begins until then is of this step.
        there = max((u.end for u in timeline.uses if u.is_gradient and u.step == step), default=0)
        own = [end for start, end in spans if before <= start < there]
        if not own:
            return []
        ends.append(max(own))
        before = there
    return ends


def backward_spans(folder: Path) -> list[Span]:
    """When operations of gradients ran on rank 0: on its GPU if there is one, else on its CPU."""
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    found: dict[bool, list[Span]] = {True: [], False: []}
    for path in sorted(folder.glob("*.xplane.pb")):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        stats = [(p.stat_metadata, s) for p in space.planes for s in p.stats]
        began = [s.uint64_value for names, s in stats if _name(names, s) == "profile_start_time"]
        for plane in space.planes:
            backward = {k for k, m in plane.event_metadata.items() if _BACKWARD in m.name}
            for line in plane.lines:
                start = (sum(began) + line.timestamp_ns) / 1e3
                for event in line.events:
                    if event.metadata_id in backward or _of_backward(plane, event):
                        at = start + event.offset_ps / 1e6
                        on_device = plane.name.startswith("/device:")
                        found[on_device].append((at, at + event.duration_ps / 1e6))
    return found[True] or found[False]


def _of_backward(plane, event) -> bool:
    """A kernel's own name is CUDA's; the operation that it is of stands beside it."""
    names = plane.stat_metadata
    own = [s for s in event.stats if _name(names, s) == "tf_op"]
    return any(_BACKWARD in (s.str_value or names[s.ref_value].name) for s in own)


def _name(names, stat) -> str:
    return names[stat.metadata_id].name


# ---- Figures -----------------------------------------------------------------------------------


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not overlap."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def total(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def negotiation(uses: list[Use]) -> float:
    return total(union((use.asked, use.agreed) for use in uses if use.asked))


def communication(uses: list[Use]) -> float:
    return total(union(span for use in uses for span in use.communicates))


def hidden(gradients: list[Use], backward_ends: list[float]) -> str:
    """Share of the communication before the end of its step's backward pass; see above."""
    whole = before = 0.0
    for step, limit in enumerate(backward_ends):
        spans = union(span for u in gradients if u.step == step for span in u.communicates)
        whole += total(spans)
        before += total((start, min(end, limit)) for start, end in spans if start < limit)
    return f"{before / whole:.0%}" if whole else "not known"


def longest_waits(uses: list[Use], first: int) -> list[tuple[str, ...]]:
    """The longest wait of each tensor, the longest of them first."""
    longest: dict[str, Use] = {}
    for use in sorted(uses, key=lambda use: -use.waited):
        longest.setdefault(use.tensor, use)
    rows = [
        (use.tensor, str(first + use.step), f"{use.waited / 1e3:.1f}", _ranks(use.last))
        for use in list(longest.values())[:_MOST_WAITS]
    ]
    return [("longest waits", "step", "ms", "last rank"), *rows]


def waits_by_rank(uses: list[Use], steps: int) -> list[tuple[str, ...]]:
    """Time a step in which a rank was what others waited for, at least for one tensor."""
    spans: dict[int, list[Span]] = collections.defaultdict(list)
    for use in uses:
        for rank in use.last:
            spans[rank].append((use.asked, use.agreed))
    waits = {rank: total(union(own)) for rank, own in spans.items()}
    order = sorted(waits, key=lambda rank: -waits[rank])[:_MOST_WAITS]
    rows = [(str(rank), _ms(waits[rank], steps), f"{len(spans[rank])}") for rank in order]
    return [("waits for rank", "ms a step", "tensors"), *rows]


def _bytes_a_step(uses: list[Use], steps: int) -> str:
    known = [use.bytes for use in uses if use.bytes is not None]
    least = "at least " if len(known) < len(uses) else ""
    return f"{least}{sum(known) / steps:,.0f}"


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) or "not known"


def _ms(microseconds: float, steps: int) -> str:
    return f"{microseconds / 1e3 / steps:,.1f}"


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    yield ""
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        yield "  ".join([row[0].ljust(widths[0]), *cells]).rstrip()


if __name__ == "__main__":
    sys.exit(main())
