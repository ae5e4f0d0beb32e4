"""Flagfiles and paths mean the same from any working folder; what is written reads back."""

import dataclasses
import os

import pytest
from hypothesis import HealthCheck, given, strategies
from hypothesis import settings as hypothesis_settings

from hvdkit import settings as settings_lib
from hvdkit.settings import project as project_lib

FIELDS = {field.name: field for field in dataclasses.fields(settings_lib.Settings)}
PATHS = [name for name, field in FIELDS.items() if field.metadata["path"]]


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path.resolve() / "project"
    (folder / "configs").mkdir(parents=True)
    (folder.parent / "elsewhere").mkdir()
    monkeypatch.setattr(project_lib, "folder", lambda: folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def elsewhere(project, monkeypatch):
    monkeypatch.chdir(project.parent / "elsewhere")
    return project.parent / "elsewhere"


def parse(*flags):
    return settings_lib.parse(["train.py", *flags])


def refused(*flags):
    with pytest.raises(ValueError) as error:
        parse(*flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_default_cfg_is_read_where_no_flagfile_is_named(project):
    (project / "configs" / "default.cfg").write_text("--flagfile=configs/a.cfg\n--seed=5\n")
    (project / "configs" / "a.cfg").write_text("--num_steps=7\n")
    config = parse("--keep=2", "--run_dir", "flagfile")
    assert (config.seed, config.num_steps, config.keep) == (5, 7, 2)
    config = parse("--flagfile=configs/a.cfg")
    assert (config.seed, config.num_steps) == (settings_lib.Settings().seed, 7)


def test_later_flags_win_over_the_flagfile(project):
    (project / "a.cfg").write_text("# a comment\r\n // another\n\n --seed=5 \r\n--num_steps=7\n")
    config = parse("--num_steps=8", "--flagfile=a.cfg", "--seed=6")
    assert (config.seed, config.num_steps) == (6, 7)


def test_in_the_project_paths_stay_as_typed(project):
    (project / "a.cfg").write_text("--data_dir=datasets/a\n")
    config = parse("--flagfile", "a.cfg", "--run_dir=../x", "--resume=runs/x")
    paths = (config.data_dir, config.run_dir, config.resume, config.init_from)
    assert paths == ("datasets/a", "../x", "runs/x", "")


def test_elsewhere_paths_are_the_projects_but_those_typed(project, elsewhere):
    (project / "configs" / "default.cfg").write_text("--flagfile=configs/a.cfg\n--resume=runs/a\n")
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
    assert (config.seed, config.num_steps) == (5, 7)  # b.cfg lies beside the file that names it
    (project / "b.cfg").write_text("--num_steps=8\n")
    (elsewhere / "b.cfg").write_text("--num_steps=9\n")
    assert parse("--flagfile=configs/a.cfg").num_steps == 8
    assert parse("--flagfile=b.cfg").num_steps == 9
    message = refused("--flagfile=c.cfg")
    assert str(project) in message and str(elsewhere) in message and "no such file" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--seed=1\nnum_steps=5\n", ["a.cfg, line 2", "'num_steps=5' is no flag"]),
        ("--num_steps 5\n", ["a.cfg, line 1", "is no flag"]),
        ("\n--num_steps=x\n", ["a.cfg, line 2", "num_steps=x"]),
        ("--learning_rate=1\n", ["a.cfg, line 1", "--base_lr"]),
        ("--num_steps\n", ["a.cfg, line 1", "needs a value"]),
        ("--flagfile=none.cfg\n", ["a.cfg, line 1", "none.cfg", "no such file"]),
        ("--flagfile=\n", ["a.cfg, line 1", "names no file"]),
        ("--flagfile=b.cfg\n", ["b.cfg, line 2", "leads back to a.cfg"]),
        ("--flagfile=configs\n", ["a.cfg, line 1", "configs", "directory"]),
    ],
)
def test_a_mistake_in_a_flagfile_is_told_with_its_line(project, text, words):
    (project / "a.cfg").write_text(text)
    (project / "b.cfg").write_text("# back\n--flagfile=a.cfg\n")
    message = refused("--flagfile=a.cfg")
    assert all(word in message for word in words), message


def test_a_pipe_is_refused_since_it_can_be_read_only_once(project):
    """Read a second time it is empty, and the run would be one of defaults."""
    heard, told = os.pipe()
    os.write(told, b"--num_steps=5\n")
    os.close(told)
    assert "is a pipe" in refused(f"--flagfile=/dev/fd/{heard}")
    os.close(heard)


def test_a_text_that_a_flagfile_cannot_hold_is_not_written(project):
    config = dataclasses.replace(settings_lib.Settings(), run_dir="a\nb")
    with pytest.raises(ValueError, match="run_dir"):
        settings_lib.write(config, project / "config.cfg")
    assert not (project / "config.cfg").exists()


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
    "ü",
    "\udce9",
]
_LETTERS = strategies.characters(codec="utf-8", exclude_characters="\n\r\0")
_TEXTS = strategies.sampled_from(_HARD) | strategies.text(_LETTERS, min_size=1).filter(
    lambda text: text == text.strip()
)


def values(field):
    """Texts of a flag that are within the field's limits."""
    meta = field.metadata
    if meta["choices"]:
        return strategies.sampled_from(meta["choices"])
    if field.name == "lr_boundaries":
        return strategies.sampled_from(["0.5", "0.1,0.25,0.75", "1e-3, 0.999999999999"])
    if field.name == "class_weights":
        return strategies.just("")
    if field.name == "eval_scales":
        return strategies.sampled_from(["1", "0.5,0.75, 1", "1.75"])
    if field.name == "scale_range":
        return strategies.sampled_from(["", "0.5,2", "1,1"])
    if field.type == "str":
        return _TEXTS
    if field.type == "bool":
        return strategies.booleans()
    if field.type == "int":
        return strategies.integers(int(meta["low"]), int(meta["below"]) - 1)
    low, below = max(meta["low"], meta["above"]), meta["below"]
    ends = {"exclude_min": meta["above"] == low, "exclude_max": below < float("inf")}
    return strategies.floats(low, min(below, 1e300), **ends)


@strategies.composite
def valid_flags(draw):
    """Some of the flags, in any combination that is not refused."""
    flags = draw(
        strategies.fixed_dictionaries({}, optional={n: values(f) for n, f in FIELDS.items()})
    )
    micro = flags.get("accumulation_steps", 1) % 50 + 1
    batch = draw(strategies.sampled_from(["global_batch_size", "batch_per_rank"]))
    flags = {n: v for n, v in flags.items() if n not in ("global_batch_size", "batch_per_rank")}
    flags |= {"accumulation_steps": micro, batch: micro * draw(strategies.integers(1, 10**6))}
    if flags.get("compression") == "bf16" or flags.get("deterministic"):
        flags |= {"pack_bytes": 0, "gradient_groups": 0}
    if flags.get("virtual_ranks"):
        flags.pop("batch_per_rank", None)
        flags |= {"virtual_ranks": 3, "global_batch_size": micro * draw(strategies.integers(3, 9))}
        flags |= {"compression": "none", "bn_sync": "mean", "lr_scaling": "none"}
        flags |= {"pack_bytes": 0, "gradient_groups": 0}
    if flags.get("pack_bytes"):
        flags |= {"gradient_groups": 0}
    if flags.get("jit") and flags.get("bn_sync") == "full":
        flags |= {"jit": False}
    if not flags.get("eval_every", 1):
        flags |= {"early_stop_evals": 0}
    if not flags.get("init_from"):
        flags |= {"init_ema": False, "init_skip_mismatched": False}
    if flags.get("end_lr", 0) > flags.get("base_lr", 0.01):
        flags |= {"end_lr": 0.0}
    if flags.get("eval_window"):
        flags |= {"eval_crop": 0}
    if flags.get("benchmark"):
        flags |= {"dry_run": False, "find_lr": False}
    if flags.get("dry_run"):
        flags |= {"find_lr": False}
    if "trackers" in flags:
        flags["trackers"] = draw(strategies.sampled_from(["", "my.own:Kind, tensorboard"]))
    if flags.get("bn_sync") == "full":
        flags |= {"jit": False}
    if flags.get("init_from") or not flags.get("backbone_weights"):
        flags |= {"backbone_weights": "", "backbone_preprocessing": ""}
    else:
        flags |= {"backbone_preprocessing": "torch"}
    for split in ("train_split", "val_split"):
        if not flags.get(split, "train"):
            flags.pop(split)
    return [f"--{name}={value}" for name, value in flags.items()]


def whole_paths(config, project):
    """The settings with paths that mean the same anywhere; a slash at their ends says nothing."""
    paths = {name: getattr(config, name) for name in PATHS}
    no_paths = {name: ("", *FIELDS[name].metadata["words"]) for name in PATHS}
    whole = {n: os.path.join(project, p) for n, p in paths.items() if p not in no_paths[n]}
    whole = {name: path.rstrip("/") for name, path in whole.items()}
    return dataclasses.replace(config, **whole)


@pytest.mark.parametrize("text", _HARD)
def test_hard_texts_read_back_the_same(project, text):
    names = ("task", "model", "data_dir", "run_dir", "resume", "init_from")
    config = parse(*(f"--{name}={text}" for name in names))
    settings_lib.write(config, project / "config.cfg")
    assert parse("--flagfile=config.cfg") == config
    assert config.task == text


def test_settings_made_in_code_are_written_as_they_are_meant(elsewhere):
    """A relative path in them is used in the working folder, not in the project."""
    settings_lib.write(settings_lib.Settings(), elsewhere / "config.cfg")
    assert parse("--flagfile=config.cfg").run_dir == str(elsewhere / "runs/default")


# Each example goes to the folders anew, so that one fixture may serve them all.
@hypothesis_settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(valid_flags(), strategies.integers(0, 3), strategies.integers(0, 3))
def test_what_is_written_reads_back_the_same_from_anywhere(project, flags, first, second):
    folders = [project, project / "configs", project.parent / "elsewhere", project.parent]
    written = project / "config.cfg"
    os.chdir(folders[first])
    typed = parse(*flags)
    for config in (typed, typed.for_ranks(3)):
        os.chdir(folders[first])
        settings_lib.write(config, written)
        again = parse(f"--flagfile={written}")
        assert whole_paths(again, os.getcwd()) == whole_paths(config, os.getcwd())
        os.chdir(folders[second])
        again = parse(f"--flagfile={written}")
        assert whole_paths(again, project) == whole_paths(config, project)
