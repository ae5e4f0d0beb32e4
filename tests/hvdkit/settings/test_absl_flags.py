"""A fork's own settings and flags beside the engine's; absl's FLAGS hold what was resolved."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from refusals import refused

import hvdkit
from hvdkit import settings as settings_lib
from hvdkit.settings import absl_flags
from hvdkit.settings.absl_flags import help_text

pytestmark = pytest.mark.usefixtures("project")
FLAGS = flags.FLAGS


class Settings(hvdkit.Settings):
    """Settings of a fork"""

    my_share: float = hvdkit.setting(0.1, "what it is", low=0, below=1)
    my_switch: bool = hvdkit.setting(False, "whether it is on")
    my_file: str = hvdkit.setting("a.txt", "where it is", path=True)
    num_steps: int = hvdkit.setting(70, "another default", low=1)

    def check(self) -> None:
        super().check()
        if self.my_switch and self.optimizer == "sgd":
            raise ValueError("--my_switch is for Adam: use --optimizer=adam")


# A task with flags of its own.
TASK = """
from absl import flags
flags.DEFINE_string("colour", "red", "of it")
flags.DEFINE_multi_integer("side", [1], "of each")
flags.DEFINE_bool("fast", False, "or not")
flags.register_validator("colour", lambda c: c != "grey", "grey is none")
"""


def parse(*words):
    return settings_lib.parse(["train.py", *words], Settings)


def test_a_field_of_a_fork_is_a_flag_like_all_others(project):
    (project / "a.cfg").write_text("--my_share=0.5\n--my_switch\n--optimizer=adam\n")
    config = parse("--flagfile=a.cfg", "--batch_per_rank=4")
    assert (config.my_share, config.my_switch, config.num_steps) == (0.5, True, 70)
    whole = config.for_ranks(3)
    assert isinstance(whole, Settings) and whole.global_batch_size == 12
    settings_lib.write(whole, project / "saved.cfg")
    assert parse("--flagfile=saved.cfg") == whole
    text = " ".join(help_text("train.py", Settings).split())
    assert (
        "Settings of a fork: --my_share what it is (at least 0, less than 1; default"
        in text
    )
    assert "--[no]my_switch" in text and "Most people set these first: --task" in text


def test_a_mistake_in_it_is_reported_like_one_in_any_other(project):
    (project / "a.cfg").write_text("--my_share=1\n")
    for flag, words in (
        (
            "--flagfile=a.cfg",
            "a.cfg, line 1: --my_share=1: must be a number, at least 0",
        ),
        ("--my_shar=0", "did you mean --my_share?"),
        ("--my_switch", "use --optimizer=adam"),
        ("--accumulation_steps=5", "micro-batches"),
    ):
        refused(lambda flag=flag: parse(flag), words)
    assert not hasattr(settings_lib.parse(["train.py"]), "my_share")


def setting(default, **limits):
    return hvdkit.setting(default, "help", **limits)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"a": (int, 3)},
            'write a: int = setting(DEFAULT, "help"), without @dataclass',
        ),
        ({"a": (list, setting([1]))}, "its type is bool, int, float or str"),
        ({"a": (int, setting(0, low=1))}, "--a=0: must be a whole number, at least 1"),
        ({"a": (int, setting([1]))}, "write a: int = setting(DEFAULT"),
        ({"a": (str, setting("x", low=1))}, "only numbers have limits"),
        ({"v": (int, setting(0))}, "v is already a flag of absl.logging"),
        (
            {"class_weight_list": (str, setting(""))},
            "class_weight_list has another meaning",
        ),
        (
            {"num_steps": (float, setting(1.0))},
            "write num_steps: int = setting(DEFAULT",
        ),
        ({"num_steps": (int, setting(10**8, low=1))}, "less than 100000000"),
        ({"num_steps": (None, 5)}, 'write num_steps: int = setting(DEFAULT, "help")'),
        ({"a": (None, setting(5))}, "'a' is a field but has no type annotation"),
        (
            {n: (bool, setting(True)) for n in ("sync", "nosync")},
            "--nosync turns sync off",
        ),
    ],
)
def test_a_field_that_can_be_no_setting_ends_a_program_in_one_sentence(
    fields, words, capsys
):
    types = {name: kind for name, (kind, _) in fields.items() if kind}
    body = {name: default for name, (_, default) in fields.items()}
    with pytest.raises(SystemExit) as end:
        kind = type("Settings", (hvdkit.Settings,), body | {"__annotations__": types})
        settings_lib.check(["train.py"], kind)
    shown = capsys.readouterr().err
    assert (
        end.value.code == 2 and shown.startswith("error: ") and shown.count("\n") == 1
    ), shown
    assert words in shown


def test_absl_holds_what_was_resolved_also_a_second_time():
    for steps in (5, 6):
        words = [
            "train.py",
            f"--num_steps={steps}",
            "--virtual_ranks=2",
            "--my_share=0.25",
        ]
        config = settings_lib.load(words, Settings)
        assert (FLAGS.num_steps, FLAGS.my_share, FLAGS.base_lr) == (
            steps,
            0.25,
            config.base_lr,
        )
        assert FLAGS.deterministic and FLAGS.cpu_threads == 1  # --virtual_ranks sets it
    assert FLAGS.find_module_defining_flag("base_lr") == "hvdkit.settings.train"
    assert FLAGS.find_module_defining_flag("my_share") == Settings.__module__
    settings_lib.load(["train.py"], settings_lib.Settings)
    assert "my_share" not in FLAGS and FLAGS.num_steps == 1000


def test_what_is_not_counted_yet_cannot_be_read_from_absl():
    words = ["train.py", "--epochs=2", "--eval_every=1epoch", "--batch_per_rank=4"]
    config = settings_lib.load(words, Settings)
    for name in ("num_steps", "eval_every"):
        words = (
            f"FLAGS.{name} is read before its data are counted: read it in build_model"
        )
        refused(lambda name=name: getattr(FLAGS, name), words)
    ranks = "FLAGS.global_batch_size is read before its ranks are counted"
    refused(lambda: FLAGS.global_batch_size, ranks)
    config = config.for_ranks(2)
    absl_flags.resolve(config)
    assert (FLAGS.global_batch_size, FLAGS.batch_per_rank) == (8, 0)
    refused(lambda: FLAGS.num_steps, "FLAGS.num_steps is read before")
    absl_flags.resolve(config.for_samples(100))
    assert (FLAGS.num_steps, FLAGS.eval_every) == (25, 13)
    settings_lib.load(["train.py", "--epochs=2"], Settings)
    refused(lambda: FLAGS.num_steps, "FLAGS.num_steps is read before")
    settings_lib.load(["train.py"], Settings)
    assert FLAGS.num_steps == 70


@pytest.mark.parametrize(
    ("name", "words"), [("base_lr", ["--other=0.1"]), ("jit", []), ("task", [])]
)
def test_an_alias_of_a_setting_is_refused(name, words):
    """absl would change its own copy of the setting alone."""
    settings_lib.load(["train.py"], Settings)
    flags.DEFINE_alias("other", name)
    try:
        for _ in range(2):  # The second time it is an alias of the flag of before.
            refused(
                lambda: settings_lib.load(["train.py", *words], Settings),
                "--other is an alias of a setting",
            )
    finally:
        delattr(FLAGS, "other")


def test_a_field_of_another_dataclass_is_refused_by_name(capsys):
    @dataclasses.dataclass(frozen=True)
    class Mixin:
        alpha: float = 0.5

    for bases in ((Mixin, hvdkit.Settings), (hvdkit.Settings, Mixin)):
        with pytest.raises(SystemExit, match="2"):
            type("Settings", bases, {})
        shown = capsys.readouterr().err
        assert "alpha is a field of another dataclass: write it in Settings" in shown
        assert shown.count("\n") == 1


def test_commands_ignore_flags_of_an_old_run_that_no_longer_exist(project, capsys):
    from hvdkit.run import load_run

    (project / "config.cfg").write_text("--seed=5\n--max_failed_saves=3\n--nodrift\n")
    assert load_run.settings(project, ["--keep=2"]).seed == 5
    shown = capsys.readouterr().out
    assert (
        "no longer exist, which are ignored: --max_failed_saves, --nodrift\n" in shown
    )
    with pytest.raises(SystemExit):
        load_run.settings(project, ["--nodrift"])
    words = "config.cfg, line 2: there is no flag --max_failed_saves"
    refused(lambda: parse("--flagfile=config.cfg"), words)


SCRIPT = """
import enum
from absl import flags
from hvdkit import settings
from hvdkit.ranks import encoding
flags.DEFINE_integer("own", 3, "of train.py")
flags.DEFINE_enum_class("mode", None, enum.Enum("Mode", "slow fast"), "of a class")
settings.check(sys.argv, settings.Settings)
assert "tasks.mine" not in sys.modules
found = settings.from_command_line(sys.argv, settings.Settings)
values = flags.FLAGS.flag_values_dict()
encoding.pack(settings.absl_flags.values_of_the_fork(), "as ranks compare them")
print(values["own"], values.get("colour"), values.get("side"), values.get("fast"))
settings.write(found, pathlib.Path("saved.cfg"))
"""


def python(project: Path, code: str, *words: str) -> subprocess.CompletedProcess:
    """Runs `code` in the project, as a train.py that has only this in it."""
    (project / "tasks" / "mine.py").write_text(TASK)
    package = str(Path(hvdkit.__file__).parents[1])
    (project / "train.py").write_text(
        f"import pathlib, sys; sys.path.insert(0, {package!r})\n{code}"
    )
    command = [sys.executable, "train.py", *words]
    return subprocess.run(
        command, cwd=project, env={}, capture_output=True, text=True, timeout=60
    )


def test_flags_that_a_fork_defines_stand_beside_the_settings(project):
    (project / "a.cfg").write_text("--colour=blue\n--side=2\n--side=3\n")
    words = "--task=mine --flagfile=a.cfg --own 4 --fast --num_steps=5"
    ended = python(project, SCRIPT, *words.split())
    assert (ended.returncode, ended.stdout) == (0, "4 blue [2, 3] True\n"), ended.stderr
    # The file holds the fork's flags too.
    ended = python(project, SCRIPT, "--flagfile=saved.cfg")
    assert (ended.returncode, ended.stdout) == (0, "4 blue [2, 3] True\n"), ended.stderr
    # Spaces are kept.
    ended = python(project, SCRIPT, "--task=mine", "--colour= ")
    assert ended.stdout == "3   [1] False\n", ended.stderr
    assert python(project, SCRIPT, "--flagfile=saved.cfg").stdout == ended.stdout
    # Another task is not imported.
    assert python(project, SCRIPT).stdout == "3 None None None\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task=mine --side=x", "--side=x: "),
        ("--task=mine --colour=grey", "grey is none"),
        ("--task=mine --color=red", "did you mean --colour?"),
        ("--colour=red", "--colour is a flag of code that --task=segmentation lacks"),
        ("--task=mine --colour=a\\nb", "--colour='a\\nb': must be one line of text"),
        ("--alsologtostderr", "there is no flag --alsologtostderr"),
    ],
)
def test_a_wrong_flag_of_a_fork_ends_in_one_sentence(project, words, message):
    words = [word.replace("\\n", "\n") for word in words.split()]
    ended = python(project, SCRIPT, *words)
    assert ended.returncode == 2 and message in ended.stderr, ended.stderr
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1, (
        ended.stderr
    )


def test_helpfull_has_the_flags_of_all_by_module(project):
    ended = python(project, SCRIPT, "--task=mine", "--helpfull")
    assert ended.returncode == 0 and not ended.stderr
    for name in (
        "hvdkit.settings.train:",
        "tasks.mine:",
        "--base_lr",
        "--colour",
        "--own",
    ):
        assert name in ended.stdout
    assert "learning rate after warm-up (greater than 0; default 0.01)" in ended.stdout
