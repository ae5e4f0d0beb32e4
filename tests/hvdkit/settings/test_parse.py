"""Command lines: what they mean, what is refused, what a program prints."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import refused

from hvdkit import logs
from hvdkit import settings as settings_lib
from hvdkit.settings import Settings, fields

pytestmark = pytest.mark.usefixtures("project")
PACKAGE = Path(settings_lib.__file__).resolve().parents[2]
FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def parse(*flags):
    return settings_lib.parse(["train.py", *flags])


def test_what_readme_and_docs_promise_of_every_run():
    """Other defaults may change freely."""
    plain = parse()
    assert plain == Settings()
    assert plain.bn_sync == "mean" and plain.lr_policy == "poly" and plain.power == 0.9
    assert plain.optimizer == "sgd" and plain.precision == "float32"
    assert plain.resume == "auto" and plain.max_bad_steps == 3
    assert plain.lr_scaling == "none" and plain.accumulation_steps == 1
    off = (
        "weight_decay",
        "clip_norm",
        "ema_decay",
        "label_smoothing",
        "dropout",
        "end_lr",
    )
    assert not any(getattr(plain, name) for name in off)


# Limits of each field and contradictions: test_fields.py.
@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--base_lr=-0.1", ["base_lr=-0.1", "a number, greater than 0"]),
        (
            "--num_steps=ten",
            ["num_steps=ten", "a whole number, at least 1, less than 100000000"],
        ),
        ("--num_steps=0epochs", ["num_steps=0epochs", "or epochs such as 2epochs"]),
        ("--epochs=", ["--epochs=: give a number of epochs, as --epochs=30 or 0.5"]),
        ("--epochs=-1", ["epochs=-1", "as --epochs=30 or 0.5"]),
        ("--epochs=2epochs", ["epochs=2epochs", "as --epochs=30 or 0.5"]),
        ("--seed=1epoch", ["--seed=1epoch", "less than 2147483648"]),
        ("--num_steps", ["--num_steps needs a value"]),
        ("--lr_policy=polly", ["lr_policy=polly", "one of poly, cosine"]),
        ("--nobenchmark=true", ["--nobenchmark takes no value"]),
        ("--run_dir= a", ["run_dir= a", "spaces"]),
        ("train", ["'train'", "--name=value"]),
        ("--", ["'--'", "--name=value"]),
        # The nearest name is offered.
        ("--undefok=seeds", ["--undefok", "--help"]),
        ("--learning_rate=1", ["no flag --learning_rate", "--base_lr?"]),
        ("--batchsize=1", ["--global_batch_size or --batch_per_rank?"]),
        ("--momentun=1", ["--momentum?"]),
        ("--nobenchmrk=1", ["--nobenchmark"]),
        *(
            (f"--scale_range={v}", [f"'{v}'"])
            for v in ("0.5", "0.05,1", "1,11", "nan,1")
        ),
        *(
            (f"--lr_policy=step --lr_boundaries={v}", [f"'{v}'"])
            for v in ("", "0.5,0.5", "0,1")
        ),
    ],
)
def test_a_bad_flag_is_named_with_its_value_and_limits(flag, words):
    refused(lambda: parse(*([flag] if flag.count("--") == 1 else flag.split())), *words)


def test_a_value_may_be_the_next_word():
    config = parse("--num_steps", "5", "-keep", "2", "--benchmark", "--seed=2")
    assert (config.num_steps, config.benchmark, config.seed) == (5, True, 2)
    refused(lambda: parse("--run_dir", "--benchmark"), "needs a value")


def test_epochs_become_steps():
    """Of two that say how long a run is, the later counts."""
    flags = "--num_steps=9 --epochs 2.5 --eval_every=1epoch --log_every=.01epochs"
    config = parse(*flags.split())
    assert int(config.num_steps) > 10**7 and str(config.eval_every) == "1epochs"
    steps = config.for_samples(100)  # a step takes 32
    assert (steps.num_steps, steps.eval_every, steps.log_every) == (8, 3, 1)
    assert (
        type(steps.num_steps) is int
        and parse("--epochs=2", "--num_steps=9").num_steps == 9
    )


@pytest.mark.parametrize("epochs", [0.1, 0.3, 1, 2.5, 7])
@pytest.mark.parametrize(
    ("samples", "batch"), [(60, 12), (100, 32), (48, 32), (7, 3), (1000, 1)]
)
def test_epochs_end_where_they_would_however_often_a_run_was_begun(
    epochs, samples, batch
):
    num_steps = fields.Epochs(epochs)
    steps = num_steps.steps(samples, batch)
    for step in range(steps + 9):
        assert num_steps.steps(samples, batch, step=step, used=step * batch) == steps


def test_epochs_count_samples_where_the_batch_changed():
    """20 steps of 8 of 64 samples, then of 16: 4 epochs take 6 more, the second was over at 16."""
    config = parse("--epochs=4", "--warmup_steps=2epochs", "--eval_every=1epoch")
    config = dataclasses.replace(config, global_batch_size=16)
    steps = config.for_samples(64, step=20, used=160)
    assert (steps.num_steps, steps.warmup_steps, steps.eval_every) == (26, 16, 4)


def test_batch_per_rank_becomes_the_global_batch_size(project):
    per_rank = parse("--batch_per_rank=6", "--accumulation_steps=3")
    config = per_rank.for_ranks(4)
    assert (config.global_batch_size, config.batch_per_rank) == (24, 0)
    assert config.for_ranks(7) == config  # the run stays the same on other ranks
    assert per_rank.for_ranks(4).implied().grows_with_ranks
    assert not Settings(global_batch_size=8).changed(seed=2).grows_with_ranks
    full = Settings(bn_sync="full", virtual_ranks=4)
    refused(lambda: full.for_ranks(1), "start 4 ranks")
    assert full.untrained().for_ranks(1).virtual_ranks == 4
    for settings in (config, per_rank):
        settings_lib.write(settings, project / "saved.cfg")
        assert parse("--flagfile=saved.cfg") == settings
    refused(
        lambda: parse("--batch_per_rank=6", "--accumulation_steps=4"),
        "batch_per_rank=6",
    )
    config = parse("--batch_per_rank=2000000000")
    refused(lambda: config.for_ranks(2), "global_batch_size=4000000000: must be")


def test_of_the_two_batch_sizes_the_later_counts(project):
    (project / "global.cfg").write_text("--global_batch_size=10\n")
    (project / "each.cfg").write_text("--flagfile=global.cfg\n--batch_per_rank=3\n")
    (project / "both.cfg").write_text("--batch_per_rank=3\n--global_batch_size=10\n")

    def sizes(*flags):
        config = parse(*flags)
        return config.global_batch_size, config.batch_per_rank

    assert sizes("--flagfile=each.cfg") == (0, 3)
    assert sizes("--flagfile=global.cfg", "--batch_per_rank=5") == (0, 5)
    assert sizes("--flagfile=each.cfg", "--global_batch_size=8") == (8, 0)
    assert sizes("--flagfile=each.cfg", "--batch_per_rank=0") == (10, 0)
    assert sizes("--batch_per_rank=5", "--flagfile=global.cfg") == (10, 0)
    refused(lambda: parse("--flagfile=both.cfg"), "both.cfg, line 2")


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
        ("--nosynthetic_data", "--synthetic_data", "--val_split=other"),
    ],
)
def test_settings_without_effect_are_a_note(with_effect, without, flag):
    name = flag.split()[0]
    assert not any(name in note for note in parse(*flag.split(), with_effect).notes())
    (note,) = parse(*flag.split(), without).notes()
    assert note.startswith("without effect here: ") and f"{name} ({without})" in note, (
        note
    )


def test_help_has_every_flag_under_its_heading(capsys):
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert all(len(line) <= 100 for line in printed.splitlines())
    places = [printed.index(f"{name} ") for name in FIELDS]
    assert len(places) == len(set(places))
    text = " ".join(printed.split())
    assert "--[no]jit compile a step" in text
    assert (
        "schedule (one of poly, cosine, step, constant, plateau; default poly)" in text
    )
    assert "learning rate after warm-up (greater than 0; default 0.01)" in text
    assert text.index("set these first: --task") < text.index(
        "Task, model and loss: --dropout"
    )


def test_rank_0_says_what_is_wrong_and_another_only_where_it_still_lives(
    capsys, monkeypatch
):
    assert settings_lib.from_command_line(["train.py", "--seed=3"], Settings).seed == 3
    waited = []
    # The sleeps of this module alone count.
    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=waited.append))
    for rank, start in (("0", "error: --seed=x: must be"), ("1", "error: rank 1 on ")):
        monkeypatch.setenv("HOROVOD_RANK", rank)
        with pytest.raises(SystemExit) as end:
            settings_lib.from_command_line(["train.py", "--seed=x"], Settings)
        assert end.value.code == 2 and len(waited) == int(rank)
        shown = capsys.readouterr()
        assert (
            not shown.out and shown.err.startswith(start) and shown.err.count("\n") == 1
        )


def test_a_wrong_flag_is_refused_before_tensorflow_is_imported():
    code = f"import sys; sys.path.insert(0, {str(PACKAGE)!r}); import hvdkit, hvdkit.settings;"
    code += "slow = {'tensorflow', 'keras', 'numpy', 'horovod'}; assert not slow & {*sys.modules};"
    code += "hvdkit.check_flags(hvdkit.Settings)"

    def errors(words: list[str]) -> str:
        return subprocess.run(
            words, stderr=subprocess.PIPE, text=True, timeout=60
        ).stderr

    command = [sys.executable, "-c", code]
    error = errors([*command, "--lr=1"])
    assert error.startswith("error: there is no flag --lr: did you mean --base_lr?")
    assert error.count("\n") == 1
    # No trace of a pipe that nobody reads.
    assert errors(["bash", "-c", '"$@" --help | true', "bash", *command]) == ""
