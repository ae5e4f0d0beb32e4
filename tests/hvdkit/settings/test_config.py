"""Flags: every field is one, limits are checked, and what contradicts itself is refused."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit import logs
from hvdkit import settings as settings_lib
from hvdkit.settings import Settings, fields
from hvdkit.settings import project as project_lib
from hvdkit.stop import RANK_VARIABLES

PACKAGE = Path(settings_lib.__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """An empty project, which is the working folder too."""
    folder = tmp_path.resolve()
    monkeypatch.setattr(project_lib, "folder", lambda: folder)
    monkeypatch.chdir(folder)
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return folder


def parse(*flags):
    return settings_lib.parse(["train.py", *flags])


def refused(*flags):
    with pytest.raises(ValueError) as error:
        parse(*flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defaults_are_the_fields_defaults():
    assert parse() == Settings()


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--base_lr=-0.1", ["base_lr", "-0.1", "greater than 0"]),
        ("--base_lr=nan", ["base_lr", "nan"]),
        ("--num_steps=ten", ["num_steps=ten", "whole number", "at least 1"]),
        ("--num_steps=0", ["num_steps", "at least 1"]),
        ("--num_steps=100000000", ["num_steps", "less than 100000000"]),
        ("--num_steps=", ["num_steps=", "whole number"]),
        ("--num_steps", ["--num_steps needs a value"]),
        ("--seed=2147483648", ["seed", "less than 2147483648"]),
        ("--seed=4294967297", ["--seed=4294967297", "less than 2147483648"]),
        ("--lr_policy=polly", ["lr_policy", "polly", "poly"]),
        ("--benchmark=maybe", ["benchmark=maybe", "true or false"]),
        ("--nobenchmark=true", ["--nobenchmark takes no value"]),
        ("--run_dir=a\nb", [r"run_dir=a\nb", "one line"]),
        ("--run_dir= a", ["run_dir= a", "spaces"]),
        ("--run_dir=", ["--run_dir= is empty"]),
        ("--resume=", ["--resume= is empty", "never"]),
        ("--accumulation_steps=5", ["global_batch_size=32", "accumulation_steps=5"]),
        ("--end_lr=1", ["end_lr=1", "base_lr=0.01"]),
        ("--label_smoothing=1", ["label_smoothing", "less than 1"]),
        ("--momentum=1", ["momentum", "less than 1"]),
        ("--ema_decay=1", ["ema_decay", "less than 1"]),
        ("--init_skip_mismatched", ["--init_from"]),
        ("--init_ema", ["--init_ema", "--init_from"]),
        ("--class_weights=1,two", ["class_weights='1,two'", "1,2.5,1"]),
        ("--class_weights=1,-1", ["class_weights", "from 0 up"]),
        ("--class_weights=1,2", ["class_weights", "2 weights", "num_classes=11"]),
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
        ("lr", "--base_lr?"),
        ("batch_size", "--global_batch_size or --batch_per_rank?"),
        ("epochs", "--num_steps?"),
        ("output_dir", "--run_dir?"),
        ("model_dir", "--run_dir?"),
        ("logdir", "--run_dir?"),
        ("data", "--data_dir?"),
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
    there_are = {field.name for field in dataclasses.fields(Settings)} | {"flagfile"}
    for meant, names in fields._ELSEWHERE.items():
        assert {name.removeprefix("--") for name in meant.split(" or ")} <= there_are
        assert not set(names.split()) & there_are


def test_a_value_may_be_the_next_word():
    config = parse("--num_steps", "5", "-keep", "2", "--benchmark", "--seed=2")
    assert (config.num_steps, config.benchmark, config.seed) == (5, True, 2)
    assert "needs a value" in refused("--run_dir", "--benchmark")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--deterministic", "--pack_bytes=9"], ["--deterministic", "--pack_bytes"]),
        (["--pack_bytes=9", "--gradient_groups=2"], ["--pack_bytes", "--gradient_groups"]),
        (["--compression=bf16", "--gradient_groups=2"], ["bf16", "grouping"]),
        (["--early_stop_evals=2", "--eval_every=0"], ["early_stop_evals=2", "eval_every=0"]),
    ],
)
def test_settings_that_contradict_each_other(flags, words):
    message = refused(*flags)
    assert all(word in message for word in words), message


def test_step_policy_boundaries():
    assert "0.9,0.5" in refused("--lr_policy=step", "--lr_boundaries=0.9,0.5")
    config = dataclasses.replace(Settings(), num_steps=100, lr_boundaries="0.3,0.6")
    assert config.boundary_steps == [30, 60]


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
    assert "leave one out" in refused("--batch_per_rank=3", "--global_batch_size=10")
    assert "both.cfg, line 2" in refused("--flagfile=both.cfg")


def test_a_warm_up_longer_than_the_run_is_a_note():
    (note,) = parse("--warmup_steps=50", "--num_steps=20").notes()
    assert "--warmup_steps=50" in note and "--num_steps=20" in note
    assert parse("--warmup_steps=20", "--num_steps=20").notes() == []


@pytest.mark.parametrize("value", ["0.5", "2,0.5", "0.05,1", "1,11", "a,b", "0.5,1,2", "nan,1"])
def test_a_range_of_scales_that_is_none_is_refused(value):
    assert f"--scale_range='{value}'" in refused(f"--scale_range={value}")
    assert parse("--scale_range=0.5,2").scale_limits == (0.5, 2.0)


def test_settings_without_effect_are_a_note():
    flags = ["--optimizer=adam", "--momentum=0.5", "--lr_policy=step", "--end_lr=0.1"]
    (note,) = parse(*flags, "--bn_sync=full", "--bn_sync_every=3").notes()
    for said in ("momentum=0.5 (--optimizer=adam)", "end_lr=0.1", "bn_sync_every=3"):
        assert said in note
    assert "power" not in note
    assert Settings().notes() == []


@pytest.mark.parametrize(
    ("with_effect", "without", "flag"),
    [
        ("--optimizer=sgd", "--optimizer=adam", "--momentum=0.5"),
        ("--lr_policy=poly", "--lr_policy=cosine", "--power=2"),
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
def test_what_leaves_a_setting_without_effect(with_effect, without, flag):
    name = flag.split("=")[0]
    assert not any(name in note for note in parse(*flag.split(), with_effect).notes())
    (note,) = parse(*flag.split(), without).notes()
    assert note.startswith("without effect here: ") and name in note


def test_help_has_every_flag_under_its_heading(capsys):
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    places = [shown.index(f"{field.name} ") for field in dataclasses.fields(Settings)]
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
    for rank, said in (("0", "error: --seed=x: must be"), ("1", "error: rank 1 on ")):
        monkeypatch.setenv("HOROVOD_RANK", rank)
        with pytest.raises(SystemExit) as end:
            settings_lib.from_command_line(["train.py", "--seed=x"], Settings)
        assert end.value.code == 2 and len(waited) == int(rank)
        shown = capsys.readouterr()
        assert not shown.out and shown.err.startswith(said) and shown.err.count("\n") == 1


def python(command, code):
    """Runs bash's `command`, in which $PYTHON runs `code` with the project's modules."""
    program = f"import sys; sys.path.insert(0, {str(PACKAGE)!r}); import hvdkit; {code}"
    return subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_wrong_flag_is_told_before_tensorflow_is_imported():
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


def test_what_a_run_does_where_nothing_is_said():
    """What README and docs promise of every run; other defaults may change freely."""
    plain = Settings()
    assert plain.bn_sync == "mean" and plain.lr_policy == "poly" and plain.power == 0.9
    assert plain.optimizer == "sgd" and plain.precision == "float32"
    assert plain.resume == "auto" and plain.max_bad_steps == 3
    assert plain.lr_scaling == "none" and plain.accumulation_steps == 1
    off = ("weight_decay", "clip_norm", "ema_decay", "label_smoothing", "dropout", "end_lr")
    assert not any(getattr(plain, name) for name in off)
