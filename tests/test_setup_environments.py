"""An environment for each stamp, and a link that is switched when one is whole: what runs, here or
on another node of a shared disk, keeps what it runs in. Whole set-ups, with small packages."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkouts import append, complaint, copy_checkout, environment, run, setup, small
from hosts import require

SETUP = ("docker/install-horovod.sh", "--venv", ".venv")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path / "checkout")


def environments(checkout: Path) -> list[Path]:
    return sorted((checkout / ".venvs").glob("*"))


def whole(checkout: Path) -> list[Path]:
    return [path for path in environments(checkout) if (path / ".setup").exists()]


def set_up(checkout: Path, **env: object) -> str:
    """What a set-up that ends well says."""
    result = setup(checkout, **env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def begin(checkout: Path, env: dict[str, object], *before: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*before, *SETUP], cwd=checkout, env=environment(**env), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def wait_for(ready, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_each_stamp_has_its_own_and_the_link_goes_back_and_forth(checkout):
    small_ones = small(checkout)
    said = set_up(checkout, **small_ones)
    [first] = environments(checkout)
    assert os.readlink(checkout / ".venv") == f".venvs/{first.name}"
    assert f".venv leads to {first} (cpu)" in said and "no longer" not in said
    assert set_up(checkout, **small_ones) == ""

    append(checkout / "requirements.txt", "# another stamp")
    said = set_up(checkout, **small_ones)
    second = (checkout / ".venv").resolve()
    assert whole(checkout) == [first, second] and f"rm -r {first}" in said

    append(checkout / "requirements.txt", "# a third")
    (checkout / "requirements.txt").write_text(
        (checkout / "requirements.txt").read_text().split("# another")[0]
    )
    start = time.monotonic()
    said = set_up(checkout, **small_ones)
    assert (checkout / ".venv").resolve() == first and f"rm -r {second}" in said
    assert "..." not in said, "something was built"
    assert time.monotonic() - start < 10  # 0.6 when the machine has nothing else to do
    assert whole(checkout) == [first, second]


def test_a_run_keeps_the_environment_that_it_was_started_in(checkout):
    small_ones = small(checkout)
    set_up(checkout, **small_ones)
    first = (checkout / ".venv").resolve()
    code = "import sys; print(flush=True); sys.stdin.read(); import small; print(small.__file__)"
    process = subprocess.Popen(
        [checkout / ".venv/bin/python", "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.readline()
    append(checkout / "requirements.txt", "# another stamp")
    set_up(checkout, **small_ones)
    assert (checkout / ".venv").resolve() != first
    output, _ = process.communicate("")
    assert Path(output.strip()).is_relative_to(first)


def test_python_takes_its_words_along(checkout, tmp_path):
    """What keep_environment starts again is what was started."""
    set_up(checkout, **small(checkout))
    python, own = checkout / ".venv/bin/python", (checkout / ".venv").resolve()
    (tmp_path / "script.py").write_text(
        "import sys; print(sys.prefix, sys.argv[1:], sys.flags.utf8_mode)"
    )
    said = run(python, "-X", "utf8", tmp_path / "script.py", "two words", "-c").stdout
    assert said.strip() == f"{own} ['two words', '-c'] 1"
    assert (
        run(python, "-c", "import sys; print(sys.executable)").stdout.strip() == f"{own}/bin/python"
    )
    piped = subprocess.run(
        [python, "-", "x"], input="import sys; print(sys.argv)", text=True, capture_output=True
    )
    assert piped.stdout == "['-', 'x']\n"


def test_two_at_once_on_a_host_build_one(checkout):
    small_ones = small(checkout)
    two = [begin(checkout, small_ones) for _ in range(2)]
    outputs = [process.communicate(timeout=200)[0] for process in two]
    assert [process.returncode for process in two] == [0, 0], outputs
    [one] = environments(checkout)
    assert (checkout / ".venv").resolve() == one
    assert sorted("waiting for another setup" in output for output in outputs) == [False, True]


def test_two_hosts_at_once_do_not_harm_each_other(checkout):
    """As on a shared disk: neither can see the other's processes."""
    require("unshare")
    small_ones = small(checkout)
    apart = ("unshare", "--pid", "--fork", "--mount-proc")
    two = [begin(checkout, small_ones, *apart) for _ in range(2)]
    seen = []
    while any(process.poll() is None for process in two):
        link = checkout / ".venv"
        if os.path.lexists(link):  # from then on it leads somewhere whole, always
            seen.append((link / ".setup").exists() and (link / "bin/horovodrun").exists())
        time.sleep(0.01)
    outputs = [process.communicate(timeout=200)[0] for process in two]
    assert [process.returncode for process in two] == [0, 0], outputs
    assert not any("waiting" in output for output in outputs)
    assert all(seen)
    # Both, if they ended in the same moment; else the later one took the earlier one's.
    assert environments(checkout) == whole(checkout) and len(whole(checkout)) in (1, 2)
    assert set_up(checkout, **small_ones) == ""


def test_what_a_killed_set_up_leaves_is_never_used(checkout):
    """Removed where it died on this host, since nothing can run in it; else left and told."""
    small_ones = small(checkout)
    process = begin(checkout, small_ones)
    wait_for(lambda: list(checkout.glob(".venvs/*/lib/*/site-packages/keras.py")))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    [half] = environments(checkout)
    elsewhere = checkout / ".venvs/20200101-000000-node7-12"
    elsewhere.mkdir()
    (elsewhere / ".building").write_text("another-boot pid:[1] 12 34\n")

    said = set_up(checkout, **small_ones)
    assert not half.exists() and elsewhere.exists() and f"rm -r {elsewhere}" in said
    assert (checkout / ".venv").resolve() not in (half, elsewhere)


def test_a_set_up_that_fails_leaves_the_link_as_it_was(checkout):
    small_ones = small(checkout)
    set_up(checkout, **small_ones)
    first = (checkout / ".venv").resolve()
    small(checkout, total=4.0)  # a Horovod that does not add up
    said = setup(checkout, **small_ones | {"HOROVOD_WHEELS": checkout / "none kept"})
    assert said.returncode != 0 and "add up" in said.stderr
    assert (checkout / ".venv").resolve() == first and whole(checkout) == [first]


def test_a_copy_of_an_environment_is_not_trusted(checkout):
    """Its scripts name the place where it was built."""
    small_ones = small(checkout)
    set_up(checkout, **small_ones)
    first = (checkout / ".venv").resolve()
    first.rename(first.with_name("moved"))
    set_up(checkout, **small_ones)
    now = (checkout / ".venv").resolve()
    assert now.name not in ("moved", first.name) and first.with_name("moved").exists()


def test_an_environment_of_another_checkout_is_used_while_it_fits(checkout, tmp_path):
    """As in a git worktree whose .venv is a link to the main one's."""
    small_ones = small(checkout)
    set_up(checkout, **small_ones)
    its = (checkout / ".venv").resolve()
    tree = tmp_path / "tree"
    subprocess.run(["cp", "-r", checkout, tree], check=True)
    subprocess.run(["rm", "-r", tree / ".venvs", tree / ".venv"], check=True)
    (tree / ".venv").symlink_to(checkout / ".venv")
    assert set_up(tree, **small_ones) == ""
    assert os.readlink(tree / ".venv") == str(checkout / ".venv")

    append(tree / "requirements.txt", "# its own")
    set_up(tree, **small_ones)
    assert (tree / ".venv").resolve().parent == tree / ".venvs"
    assert (checkout / ".venv").resolve() == its and whole(checkout) == [its]


def test_an_older_set_ups_folder_is_moved_aside_unless_something_runs_in_it(checkout):
    small_ones = small(checkout)
    old = checkout / ".venv"
    run(sys.executable, "-m", "venv", "--without-pip", old)
    (old / ".setup").write_text(
        "Python 3.11.7\n/usr/bin/python3, /x/.venv, device cpu, mpi wheel\n"
    )
    (old / "library.so").write_bytes(b"x" * 5000)
    code = "import mmap, sys; m = mmap.mmap(open(sys.argv[1], 'r+b').fileno(), 0); "
    code += "print(flush=True); sys.stdin.read()"
    user = subprocess.Popen(
        [sys.executable, "-c", code, old / "library.so"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    user.stdout.readline()
    said = complaint(setup(checkout, **small_ones))
    assert f"process {user.pid} runs in it" in said and not (checkout / ".venvs").exists()
    user.communicate()

    said = set_up(checkout, **small_ones)
    assert old.is_symlink() and "of an older set-up is now" in said
    aside = Path(re.search(r"is now (\S+)", said)[1])
    assert (aside / "library.so").exists()
