"""Values as people type them: quotes, comments, ~ and variables, in flagfiles and on command
lines."""

import argparse
import os
from pathlib import Path

import pytest
from refusals import refused

from hvdkit import settings as settings_lib
from hvdkit.settings import Settings, fields, typed

pytestmark = pytest.mark.usefixtures("project", "variables")
PATHS = [name for name, field in fields.of(Settings).items() if field.metadata["path"]]


@pytest.fixture
def variables(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("SCRATCH", "/scratch/my disk")
    monkeypatch.setenv("NONE", "")
    monkeypatch.delenv("UNSET", raising=False)


def parse(*flags):
    return settings_lib.parse(["train.py", *flags])


def of_file(project, *lines):
    (project / "a.cfg").write_text("\n".join(lines))
    return parse("--flagfile=a.cfg")


IN_A_FILE = {
    '"runs/my run"': "runs/my run",
    "'runs/my run'": "runs/my run",
    "runs/my run": "runs/my run",
    "runs/x  # note": "runs/x",
    "runs/x // note": "runs/x",
    '"runs/x # 1"  # note': "runs/x # 1",
    '"a ""b"" c"': 'a "b" c',
    "'it''s'": "it's",
    "runs/x#1": "runs/x#1",
    "it's": "it's",
}
ANYWHERE = {
    "~/runs": "/home/ada/runs",
    "~": "/home/ada",
    "$SCRATCH/run": "/scratch/my disk/run",
    "${SCRATCH}_2": "/scratch/my disk_2",
    '"$SCRATCH/my run"': "/scratch/my disk/my run",
    "'~/my runs'": "/home/ada/my runs",
    "a$$b": "a$b",
    "./~x": "./~x",
    "a\\b": "a\\b",
}
REFUSED = {
    "$UNSET/run": "the variable UNSET is not set",
    "${UNSET}": "the variable UNSET is not set",
    "$NONE/run": "the variable NONE is empty",
    "$(date)": "$ must be followed by a variable's name",
    "${SCRATCH:-x}": "$ must be followed by a variable's name",
    "runs/a$": "$ must be followed by a variable's name",
    'runs/"my run"': "quotes go around the whole path",
    "\u201cruns/x\u201d": "quotes go around the whole path",
    "runs/my\\ run": "nothing needs a backslash",
    "\\$HOME": "nothing needs a backslash",
    "runs/bs \\": "nothing needs a backslash",
    "runs/`date`": "nothing needs a backslash",
    "~nobody_of_this_name/x": "there is no user nobody_of_this_name",
}


@pytest.mark.parametrize("name", PATHS)
def test_each_path_flag_understands_what_is_typed(project, name):
    companion = []
    if name == "backbone_weights":
        companion.append("--backbone_preprocessing=caffe")
    for text, meant in (IN_A_FILE | ANYWHERE).items():
        if name == "label_map":
            (project / "map").write_text("255:1")
            text = text.replace("runs/my run", "map")
            meant = meant.replace("runs/my run", "map")
            if meant != "map":
                continue
        assert (
            getattr(of_file(project, f"--{name}={text}", *companion), name) == meant
        ), text
    for text, meant in ANYWHERE.items():
        if name != "label_map":
            assert getattr(parse(f"--{name}={text}", *companion), name) == meant, text
            assert getattr(parse(f"--{name}", text, *companion), name) == meant, text


@pytest.mark.parametrize("name", PATHS)
def test_each_path_flag_refuses_what_a_shell_would_read_in_another_way(project, name):
    for text, words in REFUSED.items():
        if name == "label_map" and ":" in text:  # text with a colon is pairs
            continue
        refused(lambda text=text: parse(f"--{name}={text}"), f"--{name}=", words)
        refused(
            lambda text=text: of_file(project, f"--{name}={text}"),
            "a.cfg, line 1",
            words,
        )


@pytest.mark.parametrize(
    "name", [n for n in PATHS if n not in ("data_dir", "label_map")]
)
def test_a_url_is_no_path(project, name):
    """It would become a folder gs:."""
    words = (f"--{name}=gs://bucket/a: this is a URL", "name a path on a disk")
    refused(lambda: parse(f"--{name}=gs://bucket/a"), *words)
    refused(
        lambda: of_file(project, f"--{name}=gs://bucket/a"), "a.cfg, line 1", *words
    )
    settings = Settings(**{name: "gs://bucket/a"})
    refused(lambda: settings_lib.write(settings, project / "saved.cfg"), *words)
    assert parse("--data_dir=gs://bucket/a").data_dir == "gs://bucket/a"


def test_a_url_is_no_path_of_a_command():
    with pytest.raises(argparse.ArgumentTypeError, match="s3://a/b: this is a URL"):
        typed.path_argument("s3://a/b")


def test_a_flagfile_is_named_as_any_path(project, monkeypatch):
    monkeypatch.setenv("CFG", str(project))
    (project / "my file.cfg").write_text("--seed=5")
    assert parse("--flagfile=$CFG/my file.cfg").seed == 5
    assert of_file(project, '--flagfile="$CFG/my file.cfg"  # note').seed == 5
    refused(lambda: parse("--flagfile=$UNSET/a.cfg"), "the variable UNSET is not set")


def test_every_other_flag_has_quotes_and_comments_too(project):
    lines = (
        "--optimizer=adam # note",
        "--num_steps='100'  # short",
        '--task="my task"',
    )
    lines += (
        "--jit  # faster",
        "--cache_dir=  # none",
        "\t--seed=7",
        "--epochs=2 # passes",
    )
    (project / "a.cfg").write_bytes(
        "\r\n".join(("\ufeff--keep=2", *lines, "  \t")).encode()
    )
    config = parse("--flagfile=a.cfg")
    assert (config.optimizer, config.task, config.jit) == ("adam", "my task", True)
    assert (config.cache_dir, config.seed, config.keep) == ("", 7, 2)
    assert str(config.num_steps) == "2epochs"
    # A shell has read it, and it is no path.
    assert parse("--task=$x # y").task == "$x # y"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('--run_dir="runs/x', "its quotes are not closed"),
        ('--run_dir="runs"/x', "something follows the quotes"),
        ("--num_steps='1' 2", "something follows the quotes"),
        ("--run_dir=x --seed=1", "no other flag"),
        ("--num_steps 100", "is not a flag: write --name=value"),
        ("export RUN=1", "is not a flag"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(project, line, words):
    refused(lambda: of_file(project, "", line), "a.cfg, line 2", words)


HARD = [
    "a #b",
    "a //b",
    "$HOME",
    "a$b",
    "$$",
    "~",
    "~x",
    '"a"',
    "'a'",
    '"',
    'a "b" c',
    "a\\ b",
]
HARD += ["\\$x", "it's", "a b", "#a", "\u201ca\u201d", "${x}", "a=b", '"a" # b', "a'b'"]


@pytest.mark.parametrize("name", HARD)
def test_a_real_name_survives_flagfiles_and_command_lines(project, monkeypatch, name):
    for folder in (project, project.parent / "elsewhere"):
        monkeypatch.chdir(folder)
        whole = str(project / name)
        kept = Settings(data_dir=whole, run_dir=whole, train_split=name)
        settings_lib.write(kept, project / "saved.cfg")
        config = parse(f"--flagfile={project}/saved.cfg")
        assert (config.data_dir, config.run_dir, config.train_split) == (
            whole,
            whole,
            name,
        )
        assert parse(f"--run_dir={typed.written(whole, is_path=True)}").run_dir == whole
        assert typed.path_argument(typed.written(whole, is_path=True)) == Path(whole)
    monkeypatch.chdir(project)
    settings_lib.write(Settings(run_dir=name), project / "saved.cfg")
    run_dir = parse("--flagfile=saved.cfg").run_dir
    meant = "/home/ada" if name == "~" else name  # code made these settings
    assert os.path.normpath(run_dir) == os.path.normpath(meant)
