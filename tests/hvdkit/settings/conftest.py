"""A project without settings of its own."""

import pytest

from hvdkit.launcher import LAUNCHERS
from hvdkit.settings import project as project_lib


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Its folder, which is the working folder too; and beside it another folder, elsewhere."""
    folder = tmp_path.resolve() / "project"
    for path in (folder / "configs", folder / "tasks", folder.parent / "elsewhere"):
        path.mkdir(parents=True)
    (folder / "train.py").write_text("")
    monkeypatch.setattr(project_lib, "folder", lambda: folder)
    monkeypatch.chdir(folder)
    for launcher in LAUNCHERS:
        monkeypatch.delenv(launcher.rank, raising=False)
    return folder
