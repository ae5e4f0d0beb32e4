"""Flagfiles: where they are found, mistakes in them, and config.cfg, which is written as one."""

import dataclasses
import os

import pytest
from refusals import refused

from hvdkit import settings as settings_lib
from hvdkit.settings import Settings

pytestmark = pytest.mark.usefixtures("project")
FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
PATHS = [name for name, field in FIELDS.items() if field.metadata["path"]]


@pytest.fixture
def elsewhere(project, monkeypatch):
    monkeypatch.chdir(project.parent / "elsewhere")
    return project.parent / "elsewhere"


def parse(*flags):
    return settings_lib.parse(["train.py", *flags])


def test_default_cfg_is_read_where_no_flagfile_is_named(project):
    (project / "configs" / "default.cfg").write_text(
        "--flagfile=configs/a.cfg\n--seed=5\n"
    )
    (project / "configs" / "a.cfg").write_text("--num_steps=7\n")
    config = parse("--keep=2", "--run_dir", "flagfile")
    assert (config.seed, config.num_steps, config.keep) == (5, 7, 2)
    config = parse("--flagfile=configs/a.cfg")
    assert (config.seed, config.num_steps) == (Settings().seed, 7)


def test_later_flags_win_over_the_flagfile(project):
    (project / "a.cfg").write_text(
        "# a comment\r\n // another\n\n --seed=5 \r\n--num_steps=7\n"
    )
    config = parse("--num_steps=8", "--flagfile=a.cfg", "--seed=6")
    assert (config.seed, config.num_steps) == (6, 7)


def test_in_the_project_paths_stay_as_typed(project):
    (project / "a.cfg").write_text("--data_dir=datasets/a\n")
    config = parse("--flagfile", "a.cfg", "--run_dir=../x", "--resume=runs/x")
    paths = (config.data_dir, config.run_dir, config.resume, config.init_from)
    assert paths == ("datasets/a", "../x", "runs/x", "")


def test_elsewhere_paths_are_the_projects_but_those_typed(project, elsewhere):
    (project / "configs" / "default.cfg").write_text(
        "--flagfile=configs/a.cfg\n--resume=runs/a\n"
    )
    (project / "configs" / "a.cfg").write_text("--data_dir=datasets/a\n")
    config = parse("--init_from=b")
    assert config.data_dir == str(project / "datasets/a")
    assert config.run_dir == str(project / "runs/default")
    assert config.resume == str(project / "runs/a")
    assert config.init_from == str(elsewhere / "b")
    config = parse("--resume=never", "--data_dir=/data", "--run_dir=~/runs")
    paths = (config.resume, config.data_dir, config.run_dir)
    assert paths == ("never", "/data", os.path.expanduser("~/runs"))


def test_a_flagfile_is_looked_for_here_then_in_the_project(project, elsewhere):
    (project / "configs" / "a.cfg").write_text("--seed=5\n--flagfile=b.cfg\n")
    (project / "configs" / "b.cfg").write_text("--num_steps=7\n")
    config = parse("--flagfile=configs/a.cfg")
    # b.cfg lies beside the file that names it.
    assert (config.seed, config.num_steps) == (5, 7)
    (project / "b.cfg").write_text("--num_steps=8\n")
    (elsewhere / "b.cfg").write_text("--num_steps=9\n")
    assert parse("--flagfile=configs/a.cfg").num_steps == 8
    assert parse("--flagfile=b.cfg").num_steps == 9
    refused(lambda: parse("--flagfile=c.cfg"), project, elsewhere, "no such file")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--seed=1\nnum_steps=5\n", ["a.cfg, line 2", "'num_steps=5' is not a flag"]),
        ("--run_dir=a --num_steps=5\n", ["a.cfg, line 1", "no other flag"]),
        ("\n--num_steps=x\n", ["a.cfg, line 2", "num_steps=x"]),
        ("--learning_rate=1\n", ["a.cfg, line 1", "--base_lr"]),
        ("--num_steps\n", ["a.cfg, line 1", "needs a value"]),
        ("--flagfile=none.cfg\n", ["a.cfg, line 1", "none.cfg", "no such file"]),
        ("--flagfile=\n", ["a.cfg, line 1", "names no file"]),
        ("--flagfile=b.cfg\n", ["b.cfg, line 2", "one file too many: 100 are read"]),
        ("--flagfile=pipe\n", ["a.cfg, line 1", "it is no regular file"]),
        ("--flagfile=twice0.cfg\n", ["twice", "one file too many: 100 are read"]),
        (
            "--flagfile=chain0.cfg\n",
            ["chain98.cfg, line 1", "one file too many: 100 are read"],
        ),
    ],
)
def test_a_mistake_in_a_flagfile_is_reported_with_its_line(project, text, words):
    (project / "a.cfg").write_text(text)
    (project / "b.cfg").write_text("# back\n--flagfile=a.cfg\n")
    for number in range(101):
        (project / f"chain{number}.cfg").write_text(
            f"--flagfile=chain{number + 1}.cfg\n"
        )
        (project / f"twice{number}.cfg").write_text(
            f"--flagfile=twice{number + 1}.cfg\n" * 2
        )
    (project / "twice12.cfg").write_text("")
    os.mkfifo(project / "pipe")  # a second rank would find it empty, and use defaults
    refused(lambda: parse("--flagfile=a.cfg"), *words)


def test_a_text_that_a_flagfile_cannot_hold_is_not_written(project):
    with pytest.raises(ValueError, match="run_dir"):
        settings_lib.write(Settings(run_dir="a\nb"), project / "config.cfg")
    assert not (project / "config.cfg").exists()


def test_settings_made_in_code_are_written_as_they_are_meant(elsewhere):
    """A relative path in them is used in the working folder, not in the project."""
    settings_lib.write(Settings(), elsewhere / "saved.cfg")
    assert parse("--flagfile=saved.cfg").run_dir == str(elsewhere / "runs/default")


# Texts that are hard on a flagfile; the last is a byte of a folder's name that is no UTF-8.
_HARD = [
    "-x",
    "--seed=3",
    "#a",
    "a #b",
    "//a",
    "a, b",
    "a=b",
    '"a b"',
    "'",
    "\\n",
    "auto",
    "~",
]
_HARD += ["~/a", "../a/", "/a", "a\tb", "a\u2028b", "\U0001f600", "ü", "\udce9"]


@pytest.mark.parametrize("text", _HARD)
def test_what_is_written_reads_back_the_same_from_anywhere(project, text):
    def whole(config):
        """With paths that mean the same anywhere; a slash at their ends says nothing."""
        paths = {name: getattr(config, name) for name in PATHS}
        paths = {
            n: p
            for n, p in paths.items()
            if p not in ("", *FIELDS[n].metadata["words"])
        }
        whole = {
            name: os.path.join(project, path).rstrip("/")
            for name, path in paths.items()
        }
        return dataclasses.replace(config, **whole)

    names = ("task", "model", "data_dir", "run_dir", "resume", "init_from")
    folders = [
        project,
        project / "configs",
        project.parent / "elsewhere",
        project.parent,
    ]
    for first, second in zip(folders, reversed(folders)):
        os.chdir(first)
        config = parse(*(f"--{name}={text}" for name in names))
        assert config.task == text
        settings_lib.write(config, project / "saved.cfg")
        os.chdir(second)
        assert whole(parse(f"--flagfile={project}/saved.cfg")) == whole(config)
