"""Lists broken links in the project's pages: files, headings in them, named files.

python tests/helpers/links.py         no network; make lint
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
# `hvdkit/run/loop.py`: from the root, or from one of these.
_NAMED = re.compile(r"`(\w[\w./-]*/[\w.-]+\.(?:py|md|sh|cfg|yaml|sbatch))`")
_ROOTS = ("", "template", "hvdkit/src")
_CODE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)


def anchors(page: str) -> set[str]:
    """Those of a page's headings; the second of one name gets -1."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", _CODE.sub("", page), re.M):
        text = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        found.add(f"{text}-1" if text in found else text)
    return found


def broken(file: Path) -> Iterator[str]:
    page = _CODE.sub("", file.read_text())
    for name in _NAMED.findall(page):
        places = [ROOT / root / name for root in _ROOTS]
        if not any(p.exists() or p.with_name(f"{p.name}.jinja").exists() for p in places):
            yield f"{file}: {name}: there is no such file"
    for link in _LINK.findall(page):
        if re.match(r"[a-z]+:", link):  # https: and the like
            continue
        name, _, anchor = link.partition("#")
        target = file.parent / name if name else file
        if not (target.exists() or target.with_name(f"{target.name}.jinja").exists()):
            yield f"{file}: {link}: there is no {target}"
        elif anchor and anchor not in anchors(target.read_text()):
            yield f"{file}: {link}: {target} has no such heading"


def pages() -> list[Path]:
    words = ["git", "ls-files", "-z", "*.md", "*.md.jinja"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def main() -> int:
    found = [fault for page in pages() for fault in broken(page)]
    print("".join(f"{fault}\n" for fault in found), end="", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
