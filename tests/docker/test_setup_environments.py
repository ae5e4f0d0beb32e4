"""An environment for each stamp, and a link that is switched when one is whole: what runs, here or
on another node of a shared disk, keeps what it runs in. Whole set-ups, with small packages."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkouts import (
    OUTSIDE,
    append,
    complaint,
    copy_checkout,
    environment,
    executable,
    run,
    setup,
    small,
)
from hosts import require

pytestmark = pytest.mark.slow  # some twenty whole set-ups

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


def test_each_stamp_has_its_own_and_what_runs_keeps_it(checkout, tmp_path):
    small_ones = small(checkout)
    elsewhere = tmp_path / "elsewhere"
    run(sys.executable, "-m", "venv", "--without-pip", elsewhere)
    (checkout / ".venv").symlink_to(elsewhere)
    said = set_up(checkout, **small_ones)
    [first] = environments(checkout)
    assert os.readlink(checkout / ".venv") == f".venvs/{first.name}"
    assert f".venv leads to {first} (cpu)" in said and "no longer" not in said
    assert (elsewhere / "pyvenv.cfg").exists(), "what is not ours was touched"
    assert set_up(checkout, **small_ones) == ""
    python_takes_its_words_along(checkout / ".venv/bin/python", first, tmp_path)

    code = "import sys; print(flush=True); sys.stdin.read(); import small; print(small.__file__)"
    running = subprocess.Popen(
        [checkout / ".venv/bin/python", "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    running.stdout.readline()
    requirements = (checkout / "requirements.txt").read_text()
    append(checkout / "requirements.txt", "# another stamp")
    said = set_up(checkout, **small_ones)
    second = (checkout / ".venv").resolve()
    assert whole(checkout) == [first, second] and f"rm -r {first}" in said
    output, _ = running.communicate("")
    assert Path(output.strip()).is_relative_to(first)

    (checkout / "requirements.txt").write_text(requirements)
    start = time.monotonic()
    said = set_up(checkout, **small_ones)
    assert (checkout / ".venv").resolve() == first and f"rm -r {second}" in said
    assert "..." not in said, "something was built"
    assert time.monotonic() - start < 10  # 0.6 when the machine has nothing else to do
    assert whole(checkout) == [first, second]


def python_takes_its_words_along(python: Path, own: Path, folder: Path) -> None:
    """What keep_environment starts again is what was started."""
    script = folder / "script.py"
    script.write_text("import sys; print(sys.executable, sys.argv[1:], sys.flags.utf8_mode)")
    said = run(python, "-X", "utf8", script, "two words", "-c").stdout
    assert said.strip() == f"{own}/bin/python ['two words', '-c'] 1"
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
    left = [elsewhere]
    if os.geteuid() == 0:  # another user's, whose processes this user may not see
        left.append(shutil.copytree(half, checkout / ".venvs/20200101-000000-node7-13"))
        os.chown(left[1] / ".building", 4321, 4321)

    said = set_up(checkout, **small_ones)
    assert not half.exists()
    assert all(folder.exists() and str(folder) in said.split("rm -r ")[1] for folder in left)
    assert (checkout / ".venv").resolve() not in (half, *left)


def test_a_set_up_that_fails_leaves_the_link_and_keeps_no_wheel(checkout, tmp_path):
    small_ones = small(checkout, total=4.0)  # a Horovod that does not add up
    run(sys.executable, "-m", "venv", "--without-pip", checkout / ".venvs/one")
    (checkout / ".venv").symlink_to(".venvs/one")
    said = setup(checkout, **small_ones)
    assert said.returncode != 0 and "a sum of 4.0" in said.stderr
    assert os.readlink(checkout / ".venv") == ".venvs/one" and not whole(checkout)
    assert not small_ones["HOROVOD_WHEELS"].exists()


def pretend(folder: Path, checkout: Path) -> None:
    """A whole environment, as far as set-up looks."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    executable(folder / "bin/horovodrun", "exit 1")
    stamp = run(checkout / "docker/install-horovod.sh", "--stamp", checkout / ".venv").stdout
    (folder / ".setup").write_text(f"{stamp}in {folder}\n")


def accepted(checkout: Path) -> bool:
    """Whether set-up takes what is there; else it ends where the host's name has no address."""
    executable(checkout / "bin/uname", '[ "$1" = -n ] && echo no.invalid || exec /bin/uname "$@"')
    result = setup(checkout, PATH=f"{checkout}/bin:{OUTSIDE}")
    assert result.returncode == 0 or "no.invalid" in complaint(result)
    return result.returncode == 0


def test_a_copy_of_an_environment_is_not_trusted(checkout):
    """Its scripts name the place where it was built."""
    pretend(checkout / ".venvs/one", checkout)
    assert accepted(checkout) and os.readlink(checkout / ".venv") == ".venvs/one"
    (checkout / ".venvs/one").rename(checkout / ".venvs/two")
    assert not accepted(checkout)
    (checkout / ".venvs/one").symlink_to("two")  # the same folder by its old name
    assert accepted(checkout)


def test_an_environment_of_another_checkout_is_used_while_it_fits(checkout, tmp_path):
    """As in a git worktree whose .venv is a link to the main one's."""
    pretend(tmp_path / "other/.venvs/one", checkout)
    (tmp_path / "other/.venv").symlink_to(".venvs/one")
    (checkout / ".venv").symlink_to(tmp_path / "other/.venv")
    assert accepted(checkout)
    assert os.readlink(checkout / ".venv") == str(tmp_path / "other/.venv")
    append(checkout / "requirements.txt", "# its own")
    assert not accepted(checkout)


def test_an_older_set_ups_folder_is_left_until_its_owner_moves_it(checkout):
    """Set-up cannot see what runs in it on another node."""
    small_ones = small(checkout)
    old = checkout / ".venv"
    run(sys.executable, "-m", "venv", "--without-pip", old)
    (old / ".setup").write_text("Python 3.11.7\n/usr/bin/python3, /x/.venv, device cpu\n")
    said = complaint(setup(checkout, **small_ones))
    assert "made by an older set-up: when no job on any node runs in it, mkdir" in said
    assert (old / "pyvenv.cfg").exists() and not (checkout / ".venvs").exists()

    assert run("sh", "-c", said.partition("runs in it, ")[2]).returncode == 0
    said = set_up(checkout, **small_ones)
    assert old.is_symlink() and f"rm -r {checkout}/.venvs/old" in said
