"""Command lines and flagfiles: what they mean, what is refused, what is written."""

import dataclasses
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, strategies
from hypothesis import settings as hypothesis_settings

from hvdkit import logs
from hvdkit import settings as settings_lib
from hvdkit.settings import Settings, fields
from hvdkit.settings import project as project_lib
from hvdkit.stop import RANK_VARIABLES

PACKAGE = Path(settings_lib.__file__).resolve().parents[2]
FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
PATHS = [name for name, field in FIELDS.items() if field.metadata["path"]]


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A project without settings of its own, which is the working folder too."""
    folder = tmp_path.resolve() / "project"
    (folder / "configs").mkdir(parents=True)
    (folder.parent / "elsewhere").mkdir()
    monkeypatch.setattr(project_lib, "folder", lambda: folder)
    monkeypatch.chdir(folder)
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def elsewhere(project, monkeypatch):
    """Another working folder."""
    monkeypatch.chdir(project.parent / "elsewhere")
    return project.parent / "elsewhere"


def parse(*flags):
    return settings_lib.parse(["train.py", *flags])


def refused(*flags):
    with pytest.raises(ValueError) as error:
        parse(*flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_readme_and_docs_promise_of_every_run():
    """Other defaults may change freely."""
    plain = parse()
    assert plain == Settings()
    assert plain.bn_sync == "mean" and plain.lr_policy == "poly" and plain.power == 0.9
    assert plain.optimizer == "sgd" and plain.precision == "float32"
    assert plain.resume == "auto" and plain.max_bad_steps == 3
    assert plain.lr_scaling == "none" and plain.accumulation_steps == 1
    off = ("weight_decay", "clip_norm", "ema_decay", "label_smoothing", "dropout", "end_lr")
    assert not any(getattr(plain, name) for name in off)


# ---- one flag ----------------------------------------------------------------------------------


# Limits of each field and contradictions: test_flags.py.
@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--base_lr=-0.1", ["base_lr=-0.1", "a number, greater than 0"]),
        ("--num_steps=ten", ["num_steps=ten", "a whole number, at least 1, less than 100000000"]),
        ("--seed=4294967297", ["--seed=4294967297", "less than 2147483648"]),
        ("--num_steps", ["--num_steps needs a value"]),
        ("--lr_policy=polly", ["lr_policy=polly", "one of poly, cosine"]),
        ("--benchmark=maybe", ["benchmark=maybe", "true or false"]),
        ("--nobenchmark=true", ["--nobenchmark takes no value"]),
        ("--run_dir=a\nb", [r"run_dir=a\nb", "one line"]),
        ("--run_dir= a", ["run_dir= a", "spaces"]),
        ("train", ["'train'", "--name=value"]),
        ("--", ["'--'", "--name=value"]),
        ("--undefok=seeds", ["--undefok", "--help"]),
    ],
)
def test_a_bad_flag_is_named_with_its_value_and_limits(flag, words):
    message = refused(flag)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("learning_rate", "--base_lr?"),
        ("batch_size", "--global_batch_size or --batch_per_rank?"),
        ("base-lr", "--base_lr?"),
        ("momentun", "--momentum?"),
        ("nobenchmrk", "--nobenchmark"),
        ("flagfiles", "--flagfile?"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_nearest(typed, meant):
    message = refused(f"--{typed}=1")
    assert f"--{typed}" in message and meant in message and "--help" in message, message


def test_every_name_of_elsewhere_leads_to_a_flag():
    there_are = {*FIELDS, "flagfile"}
    for meant, names in fields._ELSEWHERE.items():
        assert {name.removeprefix("--") for name in meant.split(" or ")} <= there_are
        assert not set(names.split()) & there_are


def test_a_value_may_be_the_next_word():
    config = parse("--num_steps", "5", "-keep", "2", "--benchmark", "--seed=2")
    assert (config.num_steps, config.benchmark, config.seed) == (5, True, 2)
    assert "needs a value" in refused("--run_dir", "--benchmark")


# ---- several flags -----------------------------------------------------------------------------


def test_step_policy_boundaries():
    config = Settings(num_steps=100, lr_boundaries="0.3,0.6")
    assert config.boundary_steps == [30, 60]


@pytest.mark.parametrize("value", ["0.5", "0.05,1", "1,11", "a,b", "0.5,1,2", "nan,1"])
def test_a_range_of_scales_that_is_none_is_refused(value):
    assert f"--scale_range='{value}'" in refused(f"--scale_range={value}")
    assert parse("--scale_range=0.5,2").scale_limits == (0.5, 2.0)


def test_batch_per_rank_becomes_the_global_batch_size(project):
    given = parse("--batch_per_rank=6", "--accumulation_steps=3")
    config = given.for_ranks(4)
    assert (config.global_batch_size, config.batch_per_rank) == (24, 0)
    assert config.for_ranks(7) == config  # on other ranks it stays the same run
    settings_lib.write(config, project / "config.cfg", given)
    assert parse("--flagfile=config.cfg") == config
    comment = "# --global_batch_size=24 was given as --batch_per_rank=6 on 4 rank(s)\n"
    assert comment in (project / "config.cfg").read_text()
    settings_lib.write(given, project / "given.cfg")
    assert parse("--flagfile=given.cfg") == given
    assert "batch_per_rank=6" in refused("--batch_per_rank=6", "--accumulation_steps=4")
    with pytest.raises(ValueError, match="global_batch_size=4000000000: must be"):
        parse("--batch_per_rank=2000000000").for_ranks(2)


def test_of_the_two_batch_sizes_the_later_counts(project):
    (project / "global.cfg").write_text("--global_batch_size=10\n")
    (project / "each.cfg").write_text("--flagfile=global.cfg\n--batch_per_rank=3\n")
    (project / "both.cfg").write_text("--batch_per_rank=3\n--global_batch_size=10\n")

    def sizes(*flags):
        config = parse(*flags)
        return config.global_batch_size, config.batch_per_rank

    assert sizes("--flagfile=global.cfg") == (10, 0)
    assert sizes("--flagfile=each.cfg") == (0, 3)
    assert sizes("--flagfile=global.cfg", "--batch_per_rank=5") == (0, 5)
    assert sizes("--flagfile=each.cfg", "--global_batch_size=8") == (8, 0)
    assert sizes("--flagfile=each.cfg", "--batch_per_rank=0") == (10, 0)
    assert sizes("--batch_per_rank=5", "--flagfile=global.cfg") == (10, 0)
    assert "both.cfg, line 2" in refused("--flagfile=both.cfg")


def test_a_warm_up_longer_than_the_run_is_a_note():
    (note,) = parse("--warmup_steps=50", "--num_steps=20").notes()
    assert "--warmup_steps=50" in note and "--num_steps=20" in note
    assert parse("--warmup_steps=20", "--num_steps=20").notes() == []


@pytest.mark.parametrize(
    ("with_effect", "without", "flag"),
    [
        ("--optimizer=sgd", "--optimizer=adam", "--momentum=0.5"),
        ("--lr_policy=poly", "--lr_policy=cosine", "--power=2.0"),
        ("--lr_policy=cosine", "--lr_policy=step", "--end_lr=0.001"),
        ("--lr_policy=step", "--lr_policy=poly", "--lr_gamma=0.5"),
        ("--lr_policy=step", "--lr_policy=poly", "--lr_boundaries=0.4"),
        ("--pack_bytes=9", "--pack_bytes=0", "--pack_count=3"),
        ("--bn_sync=moments", "--bn_sync=none", "--bn_sync_every=3"),
        ("--nodeterministic", "--deterministic", "--bn_sync_every=3"),
        ("--resume=never", "--resume=other", "--init_from=run"),
        (
            "--resume=auto",
            "--resume=other",
            "--backbone_weights=a.h5 --backbone_preprocessing=tf",
        ),
        ("--nosynthetic_data", "--synthetic_data", "--val_split=other"),
    ],
)
def test_settings_without_effect_are_a_note(with_effect, without, flag):
    name = flag.split()[0]
    assert not any(name in note for note in parse(*flag.split(), with_effect).notes())
    (note,) = parse(*flag.split(), without).notes()
    assert note.startswith("without effect here: ") and f"{name} ({without})" in note, note


# ---- what a program prints ---------------------------------------------------------------------


def test_help_has_every_flag_under_its_heading(capsys):
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    places = [shown.index(f"{name} ") for name in FIELDS]
    assert len(places) == len(set(places))
    text = " ".join(shown.split())
    assert "--[no]jit compile forward" in text
    assert "schedule (one of poly, cosine, step, constant; default poly)" in text
    assert "learning rate after warm-up (greater than 0; default 0.01)" in text
    assert text.index("set these first: --task") < text.index("Task, model and loss: --dropout")


def test_rank_0_says_what_is_wrong_and_another_only_where_it_still_lives(capsys, monkeypatch):
    assert settings_lib.from_command_line(["train.py", "--seed=3"], Settings).seed == 3
    waited = []
    monkeypatch.setattr(logs.time, "sleep", waited.append)
    for rank, start in (("0", "error: --seed=x: must be"), ("1", "error: rank 1 on ")):
        monkeypatch.setenv("HOROVOD_RANK", rank)
        with pytest.raises(SystemExit) as end:
            settings_lib.from_command_line(["train.py", "--seed=x"], Settings)
        assert end.value.code == 2 and len(waited) == int(rank)
        shown = capsys.readouterr()
        assert not shown.out and shown.err.startswith(start) and shown.err.count("\n") == 1


def python(command, code):
    """Runs bash's `command`, in which "$@" runs `code` with the package."""
    program = f"import sys; sys.path.insert(0, {str(PACKAGE)!r}); import hvdkit; {code}"
    return subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_wrong_flag_is_refused_before_tensorflow_is_imported():
    code = (
        "import hvdkit.settings; slow = {'tensorflow', 'keras', 'numpy', 'horovod'};"
        "print(sorted(slow & set(sys.modules))); hvdkit.check_flags(hvdkit.Settings)"
    )
    ended = python('"$@" --lr=1', code)
    assert ended.returncode == 2 and ended.stdout == "[]\n"
    assert (
        ended.stderr == "error: there is no flag --lr: did you mean --base_lr? (--help lists all)\n"
    )


def test_help_into_a_closed_pipe_leaves_no_trace():
    ended = python(
        '"$@" --help | true; exit ${PIPESTATUS[0]}', "hvdkit.check_flags(hvdkit.Settings)"
    )
    assert (ended.returncode, ended.stderr) == (0, "")


# ---- flagfiles ---------------------------------------------------------------------------------


def test_default_cfg_is_read_where_no_flagfile_is_named(project):
    (project / "configs" / "default.cfg").write_text("--flagfile=configs/a.cfg\n--seed=5\n")
    (project / "configs" / "a.cfg").write_text("--num_steps=7\n")
    config = parse("--keep=2", "--run_dir", "flagfile")
    assert (config.seed, config.num_steps, config.keep) == (5, 7, 2)
    config = parse("--flagfile=configs/a.cfg")
    assert (config.seed, config.num_steps) == (Settings().seed, 7)


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
def test_a_mistake_in_a_flagfile_is_reported_with_its_line(project, text, words):
    (project / "a.cfg").write_text(text)
    (project / "b.cfg").write_text("# back\n--flagfile=a.cfg\n")
    message = refused("--flagfile=a.cfg")
    assert all(word in message for word in words), message


def test_a_pipe_is_refused_since_it_can_be_read_only_once():
    """Read a second time it is empty, and the run would be one of defaults."""
    reader, writer = os.pipe()
    os.write(writer, b"--num_steps=5\n")
    os.close(writer)
    assert "is a pipe" in refused(f"--flagfile=/dev/fd/{reader}")
    os.close(reader)


# ---- config.cfg --------------------------------------------------------------------------------


def test_a_text_that_a_flagfile_cannot_hold_is_not_written(project):
    with pytest.raises(ValueError, match="run_dir"):
        settings_lib.write(Settings(run_dir="a\nb"), project / "config.cfg")
    assert not (project / "config.cfg").exists()


def test_settings_made_in_code_are_written_as_they_are_meant(elsewhere):
    """A relative path in them is used in the working folder, not in the project."""
    settings_lib.write(Settings(), elsewhere / "config.cfg")
    assert parse("--flagfile=config.cfg").run_dir == str(elsewhere / "runs/default")


# Texts that are hard on a flagfile; the last is a byte of a folder's name that is no UTF-8.
_HARD = ["-x", "--seed=3", "#a", "a #b", "//a", "a, b", "a=b", '"a b"', "'", "\\n", "auto", "~"]
_HARD += ["ü", "\udce9"]


@pytest.mark.parametrize("text", _HARD)
def test_hard_texts_read_back_the_same(project, text):
    names = ("task", "model", "data_dir", "run_dir", "resume", "init_from")
    config = parse(*(f"--{name}={text}" for name in names))
    settings_lib.write(config, project / "config.cfg")
    assert parse("--flagfile=config.cfg") == config
    assert config.task == text


_LETTERS = strategies.characters(codec="utf-8", exclude_characters="\n\r\0")
_TEXTS = strategies.sampled_from(_HARD) | strategies.text(_LETTERS, min_size=1).filter(
    lambda text: text == text.strip()
)
_LISTS = {
    "lr_boundaries": ["0.5", "0.1,0.25,0.75", "1e-3, 0.999999999999"],
    "class_weights": [""],
    "eval_scales": ["1", "0.5,0.75, 1", "1.75"],
    "scale_range": ["", "0.5,2", "1,1"],
    "trackers": ["", "my.own:Kind, tensorboard"],
}


def values(field):
    """Texts of a flag that are within the field's limits."""
    meta = field.metadata
    if known := _LISTS.get(field.name) or meta["choices"]:
        return strategies.sampled_from(known)
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
    if flags.get("virtual_ranks"):
        flags.pop("batch_per_rank", None)
        flags |= {"virtual_ranks": 3, "global_batch_size": micro * draw(strategies.integers(3, 9))}
        flags |= {"compression": "none", "bn_sync": "mean", "lr_scaling": "none"}
        flags |= {"deterministic": True}
    if flags.get("compression") == "bf16" or flags.get("deterministic"):
        flags |= {"pack_bytes": 0, "gradient_groups": 0}
    if flags.get("pack_bytes"):
        flags |= {"gradient_groups": 0}
    if flags.get("bn_sync") == "full":
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
    if flags.get("init_from") or not flags.get("backbone_weights"):
        flags |= {"backbone_weights": "", "backbone_preprocessing": ""}
    else:
        flags |= {"backbone_preprocessing": "torch"}
    return [f"--{name}={value}" for name, value in flags.items()]


def whole_paths(config, project):
    """The settings with paths that mean the same anywhere; a slash at their ends says nothing."""
    paths = {name: getattr(config, name) for name in PATHS}
    no_paths = {name: ("", *FIELDS[name].metadata["words"]) for name in PATHS}
    whole = {n: os.path.join(project, p) for n, p in paths.items() if p not in no_paths[n]}
    whole = {name: path.rstrip("/") for name, path in whole.items()}
    return dataclasses.replace(config, **whole)


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


def flip_a_bit(content: bytearray, draw: random.Random) -> None:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def cut_off(content: bytearray, draw: random.Random) -> None:
    del content[draw.randrange(len(content)) :]


def overwrite_a_part(content: bytearray, draw: random.Random) -> None:
    """With zeros: as a file system leaves a file whose data never came to the disk."""
    at = draw.randrange(len(content))
    size = min(draw.choice([8, 512]), len(content) - at)
    content[at : at + size] = draw.choice([bytes, draw.randbytes])(size)


def change_a_line(content: bytearray, draw: random.Random) -> None:
    lines = bytes(content).splitlines(keepends=True)
    at = draw.choice([i for i, line in enumerate(lines) if line.startswith(b"--")])
    value = draw.choice(["", "-1", "1e999", "nan", "x" * 5000, "0x10", "None", "\u0661", "=", " 3"])
    other = lines[at].split(b"=")[0].strip() + f"={value}\n".encode()
    joined = lines[at].rstrip() + draw.choice(lines)
    lines[at] = draw.choice([other, other, joined, draw.choice(lines), b"", b"\xff\xfe"])
    content[:] = b"".join(lines)


def name_a_flagfile(content: bytearray, draw: random.Random) -> None:
    flag = draw.choice(["--flagfile=config.cfg", "--flagfile=no.cfg", "--flagfile", "--flagfile=."])
    content += f"{flag}\n".encode()


def test_a_damaged_config_cfg_is_settings_or_refused_by_name(project):
    whole = project / "config.cfg"
    settings_lib.write(Settings(class_weights="1,2,3", num_classes=3), whole)
    mutations = [flip_a_bit, cut_off, overwrite_a_part, change_a_line, name_a_flagfile]
    sound, draw, counts = whole.read_bytes(), random.Random(4), Counter()
    before = dataclasses.asdict(parse("--flagfile=config.cfg"))
    for number in range(200):
        mutate, content = draw.choice(mutations), bytearray(sound)
        mutate(content, draw)
        whole.write_bytes(content)
        try:
            found = dataclasses.asdict(parse("--flagfile=config.cfg"))
        except ValueError as error:
            message = str(error)
            assert "\n" not in message and len(message) < 1000, (number, mutate.__name__, message)
            # A setting that contradicts another one is named by its flag.
            named = whole.name in message or re.search(r"--[a-z]", message)
            assert named, (number, mutate.__name__, message)
            counts["refused"] += 1
            continue
        different = [name for name, value in found.items() if value != before[name]]
        assert all(type(found[n]) is type(before[n]) for n in different), (number, different)
        counts["other settings" if different else "as they were"] += 1
    assert counts["refused"] > 60 and counts["other settings"] > 5, counts
