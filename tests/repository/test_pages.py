"""Code in the pages is the code of the files that they name."""

import re
import textwrap
from collections.abc import Iterator

import pytest
from projects import ROOT


def hunks() -> Iterator[tuple[str, str]]:
    """Of the diffs of docs/change-it.md: a file, and the lines that a change finds in it."""
    page = (ROOT / "docs/change-it.md").read_text()
    for block in re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S):
        files = re.findall(r"^\+\+\+ (\S+)\n(.*?)(?=^--- |\Z)", block, re.M | re.S)
        for file, changes in files:
            for change in re.split(r"^@@.*\n", changes, flags=re.M)[1:]:
                found = [line[1:] for line in change.splitlines() if line[:1] != "+"]
                if found:
                    yield file, "\n".join(found)


HUNKS = [*hunks()]
assert HUNKS, "docs/change-it.md has no diff"


@pytest.mark.parametrize(("file", "found"), HUNKS)
def test_each_diff_of_a_page_fits_its_file(file: str, found: str):
    assert f"\n{found}\n" in (ROOT / "template" / file).read_text()


def test_the_step_of_the_readme_is_that_of_train_py():
    section = (ROOT / "README.md").read_text().split("\n## The step\n")[1]
    step = re.search(r"^```python\n(.*?)^```", section, re.M | re.S)[1]
    assert textwrap.indent(step, "    ") in (ROOT / "template/train.py").read_text()
