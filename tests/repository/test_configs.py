"""The flagfiles of published models say how they are run and what to expect."""

import re

import pytest
from hosts import ROOT


@pytest.mark.parametrize("name", ["voc", "cityscapes", "cifar10", "imagenet"])
def test_configs_say_how_to_run_them_and_what_to_expect(name: str):
    lines = (ROOT / "template" / "configs" / f"{name}.cfg").read_text().splitlines(True)
    head = "".join(line for line in lines if line.startswith("#"))
    assert f"train.py --flagfile=configs/{name}.cfg" in head
    assert re.search(r"arXiv:\d{4}\.\d{5}", head) and "not run here" in head and "GPU" in head


@pytest.mark.parametrize("name", ["demo", "digits", "blank"])
def test_configs_that_were_run_here_say_what_was_seen(name: str):
    text = (ROOT / "template" / "configs" / f"{name}.cfg").read_text()
    assert f"horovodrun -np 2 python train.py --flagfile=configs/{name}.cfg" in text
    assert re.search(r"Seen on two CPU cores, two ranks: validation (mIoU|accuracy) [\d.]+", text)
