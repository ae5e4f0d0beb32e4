"""SHA-256 of each file of a split, in ROOT/SPLIT.sha256, which `sha256sum -c` checks too.

`hvdkit check --hash` writes it. A run notes its own SHA-256 in the data card, so that a resume sees
that files have other contents since, though their names and sizes are the same.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hvdkit import logs, whole_files
from hvdkit.data import shared_listing
from hvdkit.data.source import Listed, Source, is_listed

_THREADS = 16
_AT_ONCE = 1_000  # files are hashed between two reports of progress
_MOST_BYTES = 2**32
_SIGN = "# hvdkit check --hash"  # the first line, which sha256sum takes for a comment


def known(root: Path, split: str) -> str:
    """SHA-256 of ROOT/SPLIT.sha256 as rank 0 sees it; "" where there is none. Raises OSError."""

    def find() -> str:
        try:
            return whole_files.sha256(_file(root, split), links=False)
        except FileNotFoundError:
            return ""

    return shared_listing.found(("contents", str(root), split), find)


def why_not(source: Source, split: str) -> str:
    """Why `write` cannot work, known before anything is read; "": it can.

    Raises ValueError: a file of somebody else has the name.
    """
    if not is_listed(source):
        return (
            "--hash is for files that are listed (class folders, pairs); records and CIFAR have "
            "checksums in their fingerprint, a reader of your own needs `files` and `root`"
        )
    file = _file(source.root, split)
    whole_files.refuse_other(file, _SIGN)
    if not os.access(file.parent, os.W_OK):
        return f"--hash writes into {file.parent}, which is read-only for you"
    return ""


def write(source: Listed, split: str) -> str:
    """Hashes the source's files; returns what changed since it was last done, in words.

    Raises OSError for a file that cannot be read or written.
    """
    file = _file(source.root, split)
    names = list(source.files())
    before: set[bytes] = set()
    if file.exists():
        before = set(whole_files.read(file, _MOST_BYTES).splitlines()) - {
            _SIGN.encode()
        }

    lines: list[bytes] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for first in range(0, len(names), _AT_ONCE):
            part = names[first : first + _AT_ONCE]
            paths = [source.root / os.fsdecode(name) for name in part]
            for name, sha in zip(part, pool.map(whole_files.sha256, paths)):
                lines.append(_line(name, sha))
                logs.progress("files", len(lines), len(names))
    with whole_files.written(file) as partial:
        partial.write_bytes(b"".join(line + b"\n" for line in [_SIGN.encode(), *lines]))
    new = [os.fsdecode(line.split(b"  ", 1)[1]) for line in lines if line not in before]
    if before and new:
        return (
            f"{len(new):,} of {len(lines):,} files are new, or changed since the last --hash: "
            f"{logs.join(new, 3)}"
        )
    report = f"the contents of {len(lines):,} files are in {file}"
    if before == set(lines):
        report += ", as before"
    elif before:
        report += f" ({len(before):,} before)"
    return report


def _line(name: bytes, sha: str) -> bytes:
    """As sha256sum writes it: a name with a line break is escaped, and the line begins with \\."""
    escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
    line = sha.encode() + b"  " + escaped
    return line if escaped == name else b"\\" + line


def _file(root: Path, split: str) -> Path:
    # Path removes the slash of train/.
    return root / f"{Path(split)}.sha256"
