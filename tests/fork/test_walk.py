"""The commands of README and docs/first-hour.md, as written, in a fresh clone that is set up."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from projects import ROOT, repository, shell

PAGES = "\n".join(
    (ROOT / name).read_text() for name in ("README.md", "docs/first-hour.md")
)


def block(section: str, language: str = "sh") -> str:
    text = PAGES.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.search(rf"^```{language}\n(.*?)^```", text, re.M | re.S)[1]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    folder = repository(tmp_path_factory.mktemp("walk") / "clone")
    (folder / ".venv").symlink_to(os.path.realpath(ROOT / ".venv"))
    return folder


def own_pictures(folder: Path, count: int = 12) -> None:
    """Makes those of docs/first-hour.md: bright squares are class 1, dark 2, the edge is
    ignored."""
    for part in ("images", "labels", "splits"):
        (folder / part).mkdir(parents=True)
    draws = np.random.default_rng(3)
    names = [f"street{number}" for number in range(count)]
    for name in names:
        image = draws.integers(90, 160, (150, 200, 3)).astype(np.uint8)
        label = np.zeros((150, 200), np.uint8)
        for kind, colour in ((1, 250), (2, 5)):
            top = draws.integers(10, 80)
            left = draws.integers(10, 120)
            image[top : top + 50, left : left + 50] = colour
            label[top : top + 50, left : left + 50] = kind
        label[:2] = 255
        Image.fromarray(image).save(folder / "images" / f"{name}.jpg", quality=95)
        Image.fromarray(label).save(folder / "labels" / f"{name}.png")
    (folder / "splits" / "train.txt").write_text("\n".join(names[3:]) + "\n")
    (folder / "splits" / "val.txt").write_text("\n".join(names[:3]) + "\n")


@pytest.mark.slow
@pytest.mark.timeout(2400)  # five minutes where nothing else runs
def test_train_look_predict_export_serve_own_pictures_and_fork(clone, tmp_path):
    first = block("Two commands").splitlines()[0]
    assert first.startswith("make train ")
    printed = shell(first, clone, timeout=1200)
    assert "report: runs/demo/report.html" in printed, printed[-3000:]
    assert float(re.findall(r"miou ([\d.]+)", printed)[-1]) > 0.8
    project = clone / "template"
    report = (project / "runs/demo/report.html").read_text()
    assert "IoU of each class" in report
    # Names of XML's namespaces are no addresses that a browser opens.
    assert not re.search(r"""(src|href)=["']?https?:|url\(["']?https?:""", report)

    own = block("Your own data")
    own_pictures(project / "mine")
    printed = shell(f"cd {clone}\n{own}", clone, timeout=600)
    assert (
        "segmentation: 9 pictures to train on" in printed
        and "dry run: it works" in printed
    )
    assert "try --base_lr=" in printed
    assert (project / "runs/mine-sheet.png").exists()
    assert "report: runs/mine/report.html" in printed.splitlines()[-1]

    (project / "folder_of_photos").mkdir()
    photo = Image.fromarray(
        np.random.default_rng(1).integers(0, 255, (90, 130, 3), np.uint8)
    )
    photo.save(project / "photo.jpg")
    photo.save(project / "folder_of_photos" / "one.webp")
    (project / "runs" / "other").symlink_to(project / "runs" / "mine")
    for line in block("After training").splitlines():
        command = line.split("  #")[0]
        serves = command.startswith("hvdkit serve")
        if serves:  # it runs until Ctrl-C
            command = "timeout --preserve-status -s INT 60 " + command
        if command.startswith("hvdkit compare"):
            command += " || [ $? -le 2 ]"
        printed = shell(f"PATH={clone}/.venv/bin:$PATH\n" + command, project)
        assert not serves or "http://127.0.0.1:" in printed, printed
    assert (project / "predicted/overlays/photo.jpg.png").exists()
    assert (project / "predicted/overlays/one.webp.png").exists()
    assert (project / "compared.html").exists()
    assert list(project.glob("runs/demo/evaluation/*/*.csv"))

    served = block("After training", "python").replace(
        "exported/", f"{project}/exported/"
    )
    (tmp_path / "serve.py").write_text(
        served.replace("photo.jpg", f"{project}/photo.jpg")
    )
    printed = shell(f"{clone}/.venv/bin/python -I serve.py", tmp_path)
    assert "(1, 90, 130)" in printed

    shell(block("Fork it").strip() + " ARGS=--defaults", clone)
    assert (clone / "../my-model/train.py").exists()
