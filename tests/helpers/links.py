"""Lists broken links in the project's pages: files, headings in them, named files and modules.

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
# `hvdkit.train.across.gather(x)`: a module, and what is in it.
_DOTTED = re.compile(r"`(hvdkit(?:\.\w+)+)")
_PAST = ROOT / "hvdkit/CHANGELOG.md"  # It names what is gone.
_CODE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings; the second of one name gets -1."""
    names: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", _CODE.sub("", page), re.M):
        text = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        names.add(f"{text}-1" if text in names else text)
    return names


def is_there(path: Path) -> bool:
    """Also as a file that copier fills in."""
    return path.exists() or path.with_name(f"{path.name}.jinja").exists()


def is_in_engine(dotted: str) -> bool:
    """Whether there is such a module, or the file of the module has that name in it."""
    place = ROOT / "hvdkit/src"
    for part in dotted.split("."):
        if (place / part).is_dir():
            place /= part
        elif (place / f"{part}.py").exists():
            place /= f"{part}.py"
        else:
            file = place / "__init__.py" if place.is_dir() else place
            return part in re.findall(r"\w+", file.read_text())
    return True


def broken(file: Path) -> Iterator[str]:
    page = _CODE.sub("", file.read_text())
    for name in _DOTTED.findall(page) if file != _PAST else ():
        if not is_in_engine(name):
            yield f"{file}: {name}: the engine has no such name"
    for name in _NAMED.findall(page):
        if not any(is_there(ROOT / root / name) for root in _ROOTS):
            yield f"{file}: {name}: there is no such file"
    for link in _LINK.findall(page):
        if re.match(r"[a-z]+:", link):  # https: and the like
            continue
        name, _, anchor = link.partition("#")
        target = file.parent / name if name else file
        if not is_there(target):
            yield f"{file}: {link}: there is no {target}"
        elif anchor and anchor not in anchors(target.read_text()):
            yield f"{file}: {link}: {target} has no such heading"


def pages() -> list[Path]:
    words = ["git", "ls-files", "-z", "*.md", "*.md.jinja"]
    listed = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [
        ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()
    ]


def main() -> int:
    code = 0
    for page in pages():
        for fault in broken(page):
            print(fault, file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
