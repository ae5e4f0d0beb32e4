"""Files and folders that are put in the place of others: whole, or as before, also after a kill."""

import errno
import re
from pathlib import Path

import pytest
from kills import killed_at_each
from refusals import refused

from hvdkit import whole_files
from hvdkit.checkpoint import lease
from hvdkit.settings.project import ENGINE

RECORD = ".written-by-hvdkit.json"
NAMES = ("model", "card", "onnx")  # the last file is not written again


def made_anew(folder: Path, text: str, *names: str) -> None:
    with whole_files.replaced(folder, NAMES) as made:
        if "model" in names:
            (made / "model").mkdir()
            (made / "model" / "weights").write_text(text)
        for name in {"card", "onnx"} & {*names}:
            (made / name).write_text(text)


@pytest.fixture(autouse=True)
def no_flush(monkeypatch):
    """Nobody pulls the plug, and a disk takes its time."""
    monkeypatch.setattr(whole_files.os, "fsync", lambda file: None)


def test_a_folder_that_cannot_be_flushed_is_no_fault(tmp_path, monkeypatch):
    """As on vboxsf, and on CIFS of old kernels."""

    def fsync(_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(whole_files.os, "fsync", fsync)
    whole_files.flush(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Invalid argument"):
        whole_files.flush(tmp_path / "file")


def content(folder: Path) -> dict[str, str]:
    """Of all files but the record of what was put there."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [path for path in files if path.name != RECORD]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def old(folder: Path) -> None:
    made_anew(folder, "old", *NAMES)
    (folder / "mine").write_text("a person's own")


OLD = {"card": "old", "mine": "a person's own", "model/weights": "old", "onnx": "old"}
NEW = {"card": "new", "mine": "a person's own", "model/weights": "new"}


@pytest.mark.parametrize("swaps", [True, False])
def test_all_of_one_call_takes_the_place_of_all_of_another(
    swaps, tmp_path, monkeypatch
):
    """Also where the file system cannot swap two names at once, as NFS."""
    if not swaps:
        monkeypatch.setattr(whole_files, "_exchanged", lambda one, other: False)
    old(tmp_path / "out")
    assert content(tmp_path / "out") == OLD
    made_anew(tmp_path / "out", "new", "model", "card")
    assert content(tmp_path / "out") == NEW


def test_what_fails_leaves_all_as_it_was(tmp_path):
    with (
        pytest.raises(OSError, match="no space"),
        whole_files.replaced(tmp_path / "out", NAMES),
    ):
        raise OSError("no space")
    assert not (tmp_path / "out").exists()
    old(tmp_path / "out")
    with (
        pytest.raises(OSError, match="no space"),
        whole_files.replaced(tmp_path / "out", NAMES) as made,
    ):
        (made / "card").write_text("half")
        raise OSError("no space")
    assert content(tmp_path / "out") == OLD


@pytest.mark.parametrize("swaps", [True, False])
def test_a_kill_leaves_each_old_or_new_and_the_next_call_clears_up(
    swaps, tmp_path, monkeypatch
):
    if not swaps:
        monkeypatch.setattr(whole_files, "_exchanged", lambda one, other: False)

    def work(folder: Path) -> None:
        made_anew(folder, "new", "model", "card")

    ends = set()
    for folder in killed_at_each(tmp_path, old, work):
        there = {
            n: text for n, text in content(folder).items() if not n.startswith(".")
        }
        for name, text in there.items():
            assert text in (OLD[name], NEW.get(name)), folder
        if swaps:
            assert there.keys() >= NEW.keys()
        ends.add(tuple(there.items()))
        with (
            pytest.raises(OSError, match="no space"),
            whole_files.replaced(folder, NAMES),
        ):
            raise OSError("no space")
        assert content(folder).keys() >= NEW.keys()
        assert [path.name for path in folder.glob(".*")] == [RECORD]
    assert tuple(OLD.items()) in ends and tuple(NEW.items()) in ends


def test_two_at_once_are_refused(tmp_path):
    with whole_files.replaced(tmp_path, NAMES) as made:
        refused(
            lambda: made_anew(tmp_path, "new", "card"),
            "is being written by another process",
        )
        (made / "card").write_text("first")
    assert content(tmp_path) == {"card": "first"}


def a_file_in_our_folder(folder: Path) -> None:
    (folder / "model" / "notes").write_text("a person's own")


def a_file_of_our_name(folder: Path) -> None:
    (folder / "onnx").unlink()
    (folder / "onnx").write_text("a person's own")


def a_changed_file(folder: Path) -> None:
    (folder / "card").write_text("old, and a person's own")


def a_link(folder: Path) -> None:
    (folder / "card").unlink()
    (folder / "card").symlink_to("mine")


@pytest.mark.parametrize(
    "change", [a_file_in_our_folder, a_file_of_our_name, a_changed_file, a_link]
)
def test_what_a_person_put_there_stays_and_is_refused_before_the_work(change, tmp_path):
    old(tmp_path)
    change(tmp_path)
    before = content(tmp_path)
    with (
        pytest.raises(
            ValueError, match="put there or changed by somebody else"
        ) as error,
        whole_files.replaced(tmp_path, NAMES),
    ):
        pytest.fail("the work began")
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    assert content(tmp_path) == before


def test_what_a_person_puts_there_during_the_work_stays(tmp_path):
    old(tmp_path)
    with (
        pytest.raises(ValueError, match="model/notes was put there"),
        whole_files.replaced(tmp_path, NAMES) as made,
    ):
        (made / "card").write_text("new")
        a_file_in_our_folder(tmp_path)
    assert content(tmp_path) == OLD | {"model/notes": "a person's own"}


def test_commands_of_other_names_share_a_folder_and_each_replaces_its_own(tmp_path):
    for _ in range(2):
        old(tmp_path)
        with whole_files.replaced(tmp_path, ["labels"]) as made:
            (made / "labels").mkdir()
            (made / "labels" / "a.png").write_text("label")
    assert content(tmp_path) == OLD | {"labels/a.png": "label"}


def test_an_input_is_no_output(tmp_path):
    old(tmp_path)
    for name in ("card", "model", "model/weights"):
        with (
            pytest.raises(ValueError, match="is read, and "),
            whole_files.replaced(tmp_path, NAMES, inputs=[tmp_path / name]),
        ):
            pytest.fail("the work began")
    with whole_files.replaced(tmp_path, NAMES, inputs=[tmp_path / "mine", tmp_path]):
        pass


def test_a_file_is_replaced_where_it_has_the_sign_of_its_command(tmp_path):
    file = tmp_path / "page.html"
    whole_files.refuse_other(file, "by us")
    for text in ("", "written by us"):
        file.write_text(text)
        whole_files.refuse_other(file, "by us")
    file.write_text("a person's own")
    refused(
        lambda: whole_files.refuse_other(file, "by us"),
        "page.html is a file that this command",
    )


def test_a_record_nested_without_end_is_none(tmp_path):
    nested = 100_000 * "["
    (tmp_path / whole_files._RECORD).write_text(nested)
    with whole_files.replaced(tmp_path, ["a"]) as made:
        (made / "a").write_text("new")
    assert (tmp_path / "a").read_text() == "new"
    (tmp_path / ".lease").write_text(nested)
    assert lease._read(tmp_path) == {}


# What these read, a process of this run has written, and nobody else can.
OF_OURS = {
    "commands/export.py",
    "commands/start/measurements.py",
    "data/card.py",
    "launcher.py",  # a variable of its environment, which whoever started it has set
    "ranks/encoding.py",
    "ranks/questions.py",
    "testing.py",
}


def test_foreign_json_is_read_in_one_place():
    for text in ("[" * 100_000, '{"a": ', b"\xff", "9" * 5000):
        refused(
            lambda text=text: whole_files.from_json(text, "a.json"),
            "a.json is no JSON that",
        )
    files_with_it = set()
    for file in ENGINE.rglob("*.py"):
        if re.search(r"\bjson\.loads?\(", file.read_text()):
            files_with_it.add(str(file.relative_to(ENGINE)))
    assert files_with_it == OF_OURS | {"whole_files.py"}
