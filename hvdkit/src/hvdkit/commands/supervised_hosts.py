"""The hosts that `hvdkit supervise` starts on: which are listed, which answer, which failed."""

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

# How mpirun, a rank and hosts.sh name the host that a run has failed on.
_FAILED = re.compile(
    r"mpirun noticed that process rank \d+ with PID \d+ on node (\S+) exited"
    r"|error: the run ends: rank \d+ on (\S+) |error: lost (\S+),"
    r"|error: cannot (?:reach|start on) ([^\s,:]+)"
    r"|error: .* \(rank \d+ on (\S+)\)$"
)
_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*)(?::([1-9]\d*)|\s+slots\s*=\s*([1-9]\d*))?")
# A line a host: its name, and ssh's last words where it does not answer.
_ASK = """printf '%s\\n' "$@" | xargs -P 64 -I {} sh -c 'said=$(timeout 30 ssh -o ConnectTimeout=5 \
-o BatchMode=yes -o StrictHostKeyChecking=accept-new '"$SSH_OPTIONS"' {} true 2>&1 >/dev/null) \
&& echo {} || echo "{} $(echo "${said:-no words}" | tail -n 1)"'"""
_READ = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True, "check": False}


class Hosts:
    """Those that a command prints, node1:8 or `node1 slots=8` a line, as hosts.sh reads them.

    `most`: ranks in all, or 0; hosts beyond them are spares. `command`: what is supervised; port
    and key that it gives hosts.sh are ssh's here too.
    """

    def __init__(self, hosts_from: str, most: int, command: Sequence[str]) -> None:
        self._from, self._most, self._ssh = hosts_from, most, shlex.join(_of_ssh(command))
        self._failed: dict[str, int] = {}  # how often, by the first part of a host's name
        self.silent: dict[str, str] = {}

    def hear(self, line: str) -> None:
        """A line of the run's log, which may name a host that it failed on."""
        if failed := _FAILED.search(line):
            host = _short(next(filter(None, failed.groups())))
            self._failed[host] = self._failed.get(host, 0) + 1

    def listed(self) -> tuple[dict[str, int], str]:
        """Ranks by host, and why there is none; ValueError for a line that is no host."""
        found: dict[str, int] = {}
        # `timeout` ends what the command started, too.
        asked = subprocess.run(["timeout", "30", "bash", "-c", self._from], **_READ)
        if asked.returncode == 124:
            return {}, f"no host from '{self._from}' within 30 s"
        lines = (line.partition("#")[0].strip() for line in asked.stdout.splitlines())
        for line in filter(None, lines):
            # It becomes a word of ssh's command line.
            if not (host := _HOST.fullmatch(re.sub(r"\s*max[-_]slots=\d+", "", line))):
                rule = "a host is letters, digits, . _ and -, not - first; node1:8 has 8 ranks"
                raise ValueError(f"'{line}' of '{self._from}' is no host: {rule}")
            found[host[1]] = found.get(host[1], 0) + int(host[2] or host[3] or 1)
        if found and not asked.returncode:
            return found, ""
        return {}, f"no host from '{self._from}', which ended with exit code {asked.returncode}"

    def answering(self, hosts: dict[str, int]) -> dict[str, int]:
        """Those that ssh reaches; last, to be left out first, those that a run has failed on.

        `silent` has ssh's last words about the others, by name.
        """
        env = os.environ | {"SSH_OPTIONS": self._ssh}
        asked = subprocess.run(["sh", "-c", _ASK, "", *hosts], env=env, errors="replace", **_READ)
        words = dict(line.partition(" ")[::2] for line in asked.stdout.splitlines())
        self.silent = {name: said.strip() for name, said in words.items() if said}
        there = [name for name in hosts if name in words and not words[name]]
        there.sort(key=lambda name: self._failed.get(_short(name), 0))
        return {name: hosts[name] for name in there}

    def capped(self, hosts: dict[str, int]) -> dict[str, int]:
        """The first hosts, with `most` ranks in all."""
        left, found = self._most or sum(hosts.values()), {}
        for name, count in hosts.items():
            found[name] = min(count, left)
            left -= found[name]
        return {name: count for name, count in found.items() if count}


def _short(name: str) -> str:
    """Of node1.cluster, as mpirun says it too; of addresses, a part that many share."""
    return name.partition(".")[0]


def _of_ssh(command: Sequence[str]) -> list[str]:
    """Port and key, -p and -i, that hosts.sh is given before the program that it runs."""
    found: list[str] = []
    if Path(command[0]).name != "hosts.sh":
        return found
    for before, flag, value in zip(command, command[1:], command[2:]):
        if not (before.startswith("-") or flag.startswith("-")):
            break  # the program: neither a flag nor a flag's value
        if flag in ("-p", "-i"):
            found += [flag, value]
    return found
