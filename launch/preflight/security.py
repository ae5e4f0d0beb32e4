"""What of SECURITY.md holds on this host: launch/doctor.py --security prints it."""

import os
import re
import shutil
import subprocess
from pathlib import Path


def lines(run_dir: str) -> list[str]:
    """A line for each protection: "holds", or "no" and what to do."""
    status = dict(
        re.findall(r"^(\w+):\t(.*)$", _read("/proc/self/status"), re.MULTILINE)
    )
    folder = Path(run_dir or ".").absolute()
    while not folder.exists():
        folder = folder.parent
    ssh = shutil.which("ssh") or "true"
    ended = subprocess.run(
        [ssh, "-G", "host"], capture_output=True, text=True, check=False
    )
    accepts_strangers = re.search("stricthostkeychecking (false|no)", ended.stdout)

    protections = [
        ("no root", os.geteuid() > 0, "start it as an ordinary user"),
        ("no new privileges", status["NoNewPrivs"] == "1", "as in docker/compose.yaml"),
        ("no capabilities", not int(status["CapEff"], 16), "as in docker/compose.yaml"),
        (
            "system calls filtered",
            status["Seccomp"] == "2",
            "seccompProfile: RuntimeDefault",
        ),
        (
            "commands hidden",
            "hidepid=" in _read("/proc/self/mounts"),
            "mount /proc, hidepid=2",
        ),
        ("ssh knows hosts", not accepts_strangers, "ssh_config"),
    ]
    for name in (
        "fs/protected_symlinks",
        "fs/protected_hardlinks",
        "kernel/yama/ptrace_scope",
    ):
        value = _read(f"/proc/sys/{name}").strip()
        protections.append(
            (name, value not in ("", "0"), f"sysctl {name.replace('/', '.')}=1")
        )
    status_of_folder = folder.stat()
    is_private = (
        status_of_folder.st_uid == os.geteuid() and not status_of_folder.st_mode & 0o022
    )
    protections.append(
        (f"{folder} is this user's alone to write", is_private, "chmod go-w")
    )

    shown = []
    for name, holds, todo in protections:
        shown.append(f"holds: {name}" if holds else f"no: {name}; {todo}")
    return shown


def _read(file: str) -> str:
    return Path(file).read_text() if os.path.exists(file) else ""
