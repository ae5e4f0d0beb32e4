"""Links between the project's pages, and words that are misspelt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import links
from hosts import ROOT


def test_every_link_leads_somewhere():
    assert len(links.pages()) > 10
    assert [fault for page in links.pages() for fault in links.broken(page)] == []


def test_what_leads_nowhere_is_named(tmp_path: Path):
    (tmp_path / "other.md").write_text("# Some title: `--flag`, twice\n## A\n## A\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](none.md) [b](other.md#nothing) [c](#here) [d](other.md#some-title---flag-twice)\n"
        "[e](other.md#a-1) [f](https://example.org/none) `[g]`\n"
        "`hvdkit/stop.py` `hvdkit/none.py`\n## Here\n```\n[h](code.md)\n```\n"
    )
    found = [fault.split(": ")[1] for fault in links.broken(page)]
    assert found == ["hvdkit/none.py", "none.md", "other.md#nothing"]
    ended = subprocess.run([sys.executable, links.__file__, page], capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 3


def test_words_are_spelt_right():
    words = "git ls-files | grep -v '\\.lock$\\|\\.png$' | xargs codespell"
    ended = subprocess.run(words, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
