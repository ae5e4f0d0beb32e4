"""config.cfg that something damaged: taken as settings, or refused by one sentence."""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter

import pytest

from hvdkit import settings as settings_lib
from hvdkit.settings import Settings


@pytest.fixture
def whole(tmp_path):
    """A run's own config.cfg."""
    file = tmp_path / "run" / "config.cfg"
    file.parent.mkdir()
    config = dataclasses.replace(Settings(), run_dir=str(file.parent), class_weights="1,2,3")
    settings_lib.write(dataclasses.replace(config, num_classes=3), file, config)
    return file


def flip_a_bit(content: bytearray, draw: random.Random) -> None:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def cut_off(content: bytearray, draw: random.Random) -> None:
    del content[draw.randrange(len(content)) :]


def overwrite_a_part(content: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(content))
    content[at : at + 8] = draw.randbytes(8)


def zero_a_part(content: bytearray, draw: random.Random) -> None:
    """As a file system leaves a file whose data never came to the disk."""
    at = draw.randrange(len(content))
    size = min(draw.choice([8, 512]), len(content) - at)
    content[at : at + size] = bytes(size)


def change_a_value(content: bytearray, draw: random.Random) -> None:
    lines = bytes(content).splitlines(keepends=True)
    at = draw.choice([i for i, line in enumerate(lines) if line.startswith(b"--")])
    value = draw.choice(["", "-1", "1e999", "nan", "x" * 5000, "0x10", "None", "\u0661", "=", " 3"])
    lines[at] = lines[at].split(b"=")[0].strip() + f"={value}\n".encode()
    content[:] = b"".join(lines)


def mix_lines(content: bytearray, draw: random.Random) -> None:
    lines = bytes(content).splitlines(keepends=True)
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[at] = draw.choice([lines[other], lines[at].rstrip() + lines[other], b"", b"\xff\xfe"])
    content[:] = b"".join(lines)


def name_itself(content: bytearray, draw: random.Random) -> None:
    flag = draw.choice(["--flagfile=config.cfg", "--flagfile=no.cfg", "--flagfile", "--flagfile=."])
    content += f"{flag}\n".encode()


MUTATIONS = [flip_a_bit, cut_off, overwrite_a_part, zero_a_part, change_a_value, mix_lines]
MUTATIONS += [name_itself]


def test_200_random_mutations_are_settings_or_refused_by_name(whole, monkeypatch):
    monkeypatch.chdir(whole.parent)
    sound, draw, counts = whole.read_bytes(), random.Random(4), Counter()
    words = ["train.py", f"--flagfile={whole}"]
    before = dataclasses.asdict(settings_lib.parse(words))
    for number in range(200):
        mutate, content = draw.choice(MUTATIONS), bytearray(sound)
        mutate(content, draw)
        whole.write_bytes(content)
        try:
            found = dataclasses.asdict(settings_lib.parse(words))
        except ValueError as refused:
            said = str(refused)
            assert "\n" not in said and len(said) < 1000, (number, mutate.__name__, said)
            # What a setting means in itself, or with another one, is told by the flags' names.
            named = whole.name in said or re.search(r"--[a-z]", said)
            assert named, (number, mutate.__name__, said)
            counts["refused"] += 1
            continue
        different = [name for name, value in found.items() if value != before[name]]
        kept = {type(found[n]) is type(before[n]) for n in different}
        assert kept <= {True}, (number, mutate.__name__, different)
        counts["other settings" if different else "as they were"] += 1
    assert counts["refused"] > 60 and counts["other settings"] > 9, counts
