"""A run's config.cfg, after mv, after cp -r, through links: its folder is its run, or it is
asked for."""

import os
import shutil

import pytest
from refusals import refused

from hvdkit import settings as settings_lib
from hvdkit.observe import records
from hvdkit.settings import Settings


@pytest.fixture
def run(project):
    """The folder of a run with settings of its own."""
    folder = project / "runs/a"
    (folder / "checkpoints").mkdir(parents=True)
    settings_lib.write(
        Settings(run_dir="runs/a", data_dir="datasets/x"), folder / "config.cfg"
    )
    return folder


def parse(*flags):
    return settings_lib.parse(["train.py", *flags])


def test_a_run_that_stays_has_the_folder_that_is_written(project, run):
    assert parse("--flagfile=runs/a/config.cfg").run_dir == "runs/a"
    (project / "latest").symlink_to("runs/a")
    assert parse("--flagfile=latest/config.cfg").run_dir == "runs/a"


@pytest.mark.parametrize("put", [shutil.move, shutil.copytree])
def test_a_moved_or_copied_run_is_where_its_config_lies(
    project, run, put, monkeypatch, tmp_path
):
    put(run, project / "runs/b")
    # Another run is there by now.
    (project / "runs/a/checkpoints").mkdir(parents=True, exist_ok=True)
    config = parse("--flagfile=runs/b/config.cfg")
    assert (config.run_dir, config.data_dir) == ("runs/b", "datasets/x")
    (project / "latest").symlink_to("runs/b")
    assert parse("--flagfile=latest/config.cfg").run_dir == "runs/b"
    (project / "configs/again.cfg").write_text(
        "--flagfile=runs/b/config.cfg\n--num_steps=7\n"
    )
    assert parse("--flagfile=configs/again.cfg").run_dir == "runs/b"
    (project / "configs/link.cfg").symlink_to("../runs/b/config.cfg")
    assert parse("--flagfile=configs/link.cfg").run_dir == "runs/b"
    assert parse("--flagfile=runs/b/config.cfg", "--run_dir=runs/c").run_dir == "runs/c"
    assert records.read(project / "runs/b").settings["run_dir"] == "runs/b"
    monkeypatch.chdir(project / "runs/b")
    config = parse("--flagfile=config.cfg")
    assert config.run_dir == str(project / "runs/b")
    assert config.data_dir == str(project / "datasets/x")
    shutil.move(project / "runs/b", tmp_path / "outside")
    assert parse(f"--flagfile={tmp_path}/outside/config.cfg").run_dir == str(
        tmp_path / "outside"
    )


def test_without_the_line_of_its_folder_it_is_the_folder_too(project, run):
    lines = (run / "config.cfg").read_text().splitlines()
    kept = [line for line in lines if not line.startswith("--run_dir")]
    (run / "config.cfg").write_text("\n".join(kept))
    assert parse("--flagfile=runs/a/config.cfg").run_dir == "runs/a"


def test_what_cannot_be_known_is_asked_for(project, run):
    (project / "new").mkdir()
    shutil.copy(run / "config.cfg", project / "new")
    refused(
        lambda: parse("--flagfile=new/config.cfg"),
        f"--run_dir={project}/new",
        "--run_dir=runs/a",
    )
    assert parse("--flagfile=new/config.cfg", "--run_dir=new").run_dir == "new"
    (project / "runs/b/checkpoints").mkdir(parents=True)
    (project / "runs/b/config.cfg").symlink_to("../a/config.cfg")
    refused(
        lambda: parse("--flagfile=runs/b/config.cfg"),
        f"--run_dir={project}/runs/a",
        f"--run_dir={project}/runs/b",
    )


def test_a_config_cfg_that_no_run_wrote_is_a_flagfile_like_others(project):
    (project / "configs/config.cfg").write_text("--run_dir=runs/x\n")
    assert parse("--flagfile=configs/config.cfg").run_dir == "runs/x"


def test_settings_that_only_came_with_a_file_are_known(project, run):
    (project / "configs/default.cfg").write_text(
        "--task=one\n--dropout=0.5\n--seed=3\n"
    )
    file = "configs/default.cfg"
    config = parse("--task=other", "--seed=3")
    assert config.came_with_file == {"dropout": file}
    assert config.for_ranks(1).came_with_file == {"dropout": file}
    assert not parse("--task=one").came_with_file
    assert not parse("--seed=3").came_with_file
    assert not parse("--task=other", f"--flagfile={file}").came_with_file
    config = parse("--flagfile=runs/a/config.cfg", "--dropout=0.1")
    assert config.came_with_file["num_classes"] == "config.cfg"
    assert "dropout" not in config.came_with_file
    assert os.path.exists(run)


def test_another_task_than_that_of_default_cfg_has_a_folder_of_its_own(project):
    """Else it would go on with the weights of that task's run."""
    default = project / "configs/default.cfg"
    default.write_text("--task=one\n--run_dir=runs/demo\n")
    assert parse().run_dir.endswith("runs/demo")
    assert parse("--task=one").run_dir.endswith("runs/demo")
    assert parse("--task=two").run_dir.endswith("runs/two")
    assert parse("--task=two", "--run_dir=runs/mine").run_dir.endswith("runs/mine")


def test_a_run_that_began_from_another_goes_on_from_its_own_checkpoints(project, run):
    other = str(project / "runs/first")
    settings = Settings(run_dir="runs/a", resume=other)
    settings_lib.write(settings, run / "config.cfg")
    # Killed before its first checkpoint it begins from there again.
    assert parse("--flagfile=runs/a/config.cfg").resume == other
    (run / "checkpoints/step-00000005").mkdir()
    assert parse("--flagfile=runs/a/config.cfg").resume == "auto"
    assert parse("--flagfile=runs/a/config.cfg", "--run_dir=runs/a").resume == "auto"
    assert parse("--flagfile=runs/a/config.cfg", "--resume=never").resume == "never"
    assert parse("--flagfile=runs/a/config.cfg", "--run_dir=runs/c").resume == other
