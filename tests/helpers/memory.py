"""The largest memory that this process has had since a moment."""

import re
from pathlib import Path


def start() -> int:
    """Forgets the peak so far, and returns what the process has now, in bytes."""
    # The kernel's own way; getrusage's peak is that of the whole process, and never falls.
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.M)[1])
