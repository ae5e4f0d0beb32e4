"""Flags: every field is one, limits are checked, and a written config reads back the same."""

import dataclasses

import pytest

import config as config_lib


@pytest.fixture(autouse=True)
def no_default_cfg(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_defaults_are_the_fields_defaults():
    assert config_lib.parse(["train.py"]) == config_lib.Config()


def test_default_cfg_is_read_where_no_flagfile_is_named(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "default.cfg").write_text("--flagfile=configs/a.cfg\n--seed=5\n")
    (tmp_path / "configs" / "a.cfg").write_text("--num_steps=7\n")
    config = config_lib.parse(["train.py", "--keep=2"])
    assert (config.seed, config.num_steps, config.keep) == (5, 7, 2)
    config = config_lib.parse(["train.py", "--flagfile=configs/a.cfg"])
    assert (config.seed, config.num_steps) == (config_lib.Config().seed, 7)


def test_a_written_config_reads_back_the_same(tmp_path):
    flags = ["--task=segmentation", "--base_lr=0.1", "--deterministic", "--lr_boundaries=0.1,0.9"]
    config = config_lib.parse(["train.py", *flags, "--run_dir=a folder, with commas"])
    config_lib.write(config, tmp_path / "config.cfg")
    assert config_lib.parse(["train.py", f"--flagfile={tmp_path / 'config.cfg'}"]) == config


def test_later_flags_win_over_the_flagfile(tmp_path):
    (tmp_path / "a.cfg").write_text("# a comment\n--seed=5\n--num_steps=7\n")
    config = config_lib.parse(["train.py", f"--flagfile={tmp_path / 'a.cfg'}", "--seed=6"])
    assert (config.seed, config.num_steps) == (6, 7)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--base_lr=-0.1", ["base_lr", "-0.1", "greater than 0"]),
        ("--base_lr=nan", ["base_lr", "nan"]),
        ("--num_steps=ten", ["num_steps", "ten"]),
        ("--num_steps=0", ["num_steps", "at least 1"]),
        ("--lr_policy=polly", ["lr_policy", "polly", "poly"]),
        ("--learning_rate=1", ["learning_rate", "--help"]),
        ("--warmup_steps=2000", ["warmup_steps=2000", "num_steps=1000"]),
        ("--accumulation_steps=5", ["global_batch_size=32", "accumulation_steps=5"]),
        ("--end_lr=1", ["end_lr=1", "base_lr=0.01"]),
        ("--label_smoothing=1", ["label_smoothing", "less than 1"]),
        ("--ema_decay=1", ["ema_decay", "less than 1"]),
        ("--init_skip_mismatched", ["--init_from"]),
        ("--class_weights=1,two", ["class_weights='1,two'", "1,2.5,1"]),
        ("--class_weights=1,-1", ["class_weights", "from 0 up"]),
        ("--class_weights=1,2", ["class_weights", "2 weights", "num_classes=11"]),
        ("train", ["'train'", "--name=value"]),
    ],
)
def test_a_bad_flag_is_named_with_its_value_and_limits(flag, words):
    with pytest.raises(ValueError) as error:
        config_lib.parse(["train.py", flag])
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_step_policy_boundaries():
    with pytest.raises(ValueError, match=r"0\.9,0\.5"):
        config_lib.parse(["train.py", "--lr_policy=step", "--lr_boundaries=0.9,0.5"])
    config = dataclasses.replace(config_lib.Config(), num_steps=100, lr_boundaries="0.3,0.6")
    assert config_lib.boundaries(config) == [30, 60]
