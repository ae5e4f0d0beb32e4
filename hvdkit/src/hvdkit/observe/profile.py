"""--profile=FROM:TO: what TensorFlow's profiler records of some steps.

RUN_DIR/profile/rank-N has TensorFlow's own record, for TensorBoard, and trace.json.gz, for
ui.perfetto.dev. RUN_DIR/profile/operations.json has the operations of rank 0 that cost most.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from hvdkit import whole_files
from hvdkit.logs import say
from hvdkit.ranks.messages import heartbeat

_MOST_OPERATIONS = 100  # entries of operations.json
# A host's events of this form are operations: NAME:TYPE.
_OPERATION = re.compile(r"[^:]+:_?\w+")
# Their time is that of other operations, which are counted by themselves.
_CONTAINERS = (
    "PartitionedCall",
    "StatefulPartitionedCall",
    "While",
    "StatelessWhile",
    "If",
)


class Recorder:
    """The profiler of this process; leaving its `with` ends what is recorded still.

    `folder`: where this rank's record goes, None where it records nothing; `table`: the file with
    the costliest operations, or None; `steps`: the first and the last. What it cannot record or
    write is a note: no run ends.
    """

    def __init__(
        self, folder: Path | None, table: Path | None, *, steps: tuple[int, int]
    ) -> None:
        self._folder = folder
        self._table = table
        self.first, self.last = steps
        self._is_on = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_on:
            tf.profiler.experimental.stop(save=False)
            say(
                f"note: no profile: the run ended before step {self.last}, the last of --profile"
            )

    def start(self) -> None:
        if not self._folder:
            return
        try:
            tf.profiler.experimental.start(str(self._folder))
            self._is_on = True
        except tf.errors.OpError as error:
            say(f"note: --profile records nothing: {error.message}")

    def stop(self) -> None:
        """Writes what was recorded."""
        if not (self._is_on and self._folder):
            return
        self._is_on = False
        try:
            tf.profiler.experimental.stop()
            folder = self._write(self._folder)
            say(f"profile of steps {self.first} to {self.last}: {folder}")
        # A record that is cut or too large raises protobuf's own errors.
        except Exception as error:
            say(f"note: the profile is not written: {error}")

    def _write(self, folder: Path) -> Path:
        """The trace and the table, beside TensorFlow's record in it; returns their folder."""
        records = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
        if not records:
            raise FileNotFoundError(f"TensorFlow left no record in {folder}")
        events = [*_events(xplane_pb2.XSpace.FromString(records[-1].read_bytes()))]
        with gzip.open(records[-1].with_name("trace.json.gz"), "wt") as file:
            json.dump({"traceEvents": trace(events)}, file)
        if self._table:
            costs = operations(events)
            rows = []
            for name, picoseconds in costs.most_common(_MOST_OPERATIONS):
                row = {
                    "operation": name,
                    "ms_a_step": picoseconds / 1e9 / (self.last - self.first + 1),
                    "share": picoseconds / costs.total(),
                }
                rows.append(row)
            whole_files.write_json(self._table, rows)
        return records[-1].parent


class _Event(NamedTuple):
    place: str  # of the host or device
    line: str  # the thread or stream
    name: str
    operation: str  # that started it, as NAME:TYPE; "" where it is not known
    start_ps: int
    duration_ps: int


def _events(space: Any) -> Iterator[_Event]:
    for plane in space.planes:
        names = {number: entry.name for number, entry in plane.stat_metadata.items()}
        for line in plane.lines:
            heartbeat.beat()  # A long record is none that hangs.
            for event in line.events:
                metadata = plane.event_metadata[event.metadata_id]
                operation = ""
                for figure in (*metadata.stats, *event.stats):
                    if names[figure.metadata_id] == "tf_op":
                        operation = figure.str_value or names[figure.ref_value]
                if not operation and _OPERATION.fullmatch(metadata.name):
                    operation = metadata.name
                yield _Event(
                    place=plane.name,
                    line=line.display_name or line.name,
                    name=metadata.display_name or metadata.name,
                    operation=operation,
                    start_ps=line.timestamp_ns * 1000 + event.offset_ps,
                    duration_ps=event.duration_ps,
                )


def operations(events: Sequence[_Event]) -> Counter[str]:
    """Picoseconds of each operation: on devices where there are some, else on the host.

    A device's work counts for the operation that started it, or by its own name.
    """
    costs: Counter[str] = Counter()
    costs_on_devices: Counter[str] = Counter()
    for event in events:
        if event.place.startswith("/device:"):
            costs_on_devices[event.operation or event.name] += event.duration_ps
        elif event.operation and event.operation.rpartition(":")[2] not in _CONTAINERS:
            costs[event.operation] += event.duration_ps
    return costs_on_devices or costs


def trace(events: Sequence[_Event]) -> list[dict[str, Any]]:
    """Events of Chrome's format for traces: times in microseconds."""
    lines = []
    for event in events:
        line = {
            "ph": "X",
            "pid": event.place,
            "tid": event.line,
            "name": event.name,
            "ts": event.start_ps / 1e6,
            "dur": event.duration_ps / 1e6,
        }
        lines.append(line)
    return lines
