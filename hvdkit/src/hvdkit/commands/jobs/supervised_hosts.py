"""The hosts that `hvdkit supervise` starts on: which are listed, which answer, which failed."""

import os
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

# mpirun, a rank and hosts.sh name the host that a run has failed on so.
_FAILED = re.compile(
    r"mpirun noticed that process rank \d+ with PID \d+ on node (\S+) exited"
    r"|error: the run ends: rank \d+ on (\S+) |error: lost (\S+),"
    r"|error: cannot (?:reach|start on) ([^\s,:]+)"
    r"|error: .* \(rank \d+ on (\S+)\)$"
)
_HOST = re.compile(
    r"([A-Za-z0-9_][A-Za-z0-9._-]*)(?::([1-9]\d*)|\s+slots\s*=\s*([1-9]\d*))?"
)
# It prints a line a host: its name, yes and what it calls itself, or no and ssh's last words.
_ASK = """printf '%s\\n' "$@" | xargs -P 64 -I {} sh -c 'said=$(timeout 30 ssh -o ConnectTimeout=5 \
-o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ControlPath=none '"$SSH_OPTIONS"' {} \
uname -n 2>&1) && answer=yes || answer=no
words=$(printf "%s\\n" "${said:-no words}" | tail -n 1 | tr -dc "[:print:]")
printf "%s\\n" "{} $answer $words"'"""
_TIMED_OUT = 124  # exit code of `timeout` at a timeout


class Hosts:
    """Those that a command prints, node1:8 or `node1 slots=8` a line, as hosts.sh reads them.

    `most`: ranks in all, or 0; hosts beyond them are spares. `command`: what is supervised; port
    and key that it gives hosts.sh are ssh's here too.
    """

    def __init__(self, hosts_from: str, most: int, command: Sequence[str]) -> None:
        self._from = hosts_from
        self._most = most
        self._ssh = shlex.join(_ssh_options(command))
        # How often a run failed on a host, by the name that was said.
        self._failures: Counter[str] = Counter()
        # What hosts call themselves, where they are listed by an address or another name.
        self._own_names: dict[str, str] = {}
        self.silent: dict[str, str] = {}

    def hear(self, line: str) -> None:
        """Reads a line of the run's log, which may name a host that it failed on."""
        match = _FAILED.search(line)
        if match and match.lastindex:
            self._failures[match[match.lastindex]] += 1

    def listed(self) -> tuple[dict[str, int], str]:
        """Ranks by host, and why there is none; ValueError for a line that is no host."""
        # `timeout` ends what the command started, too.
        code, lines = _output(["timeout", "30", "bash", "-c", self._from])
        if code == _TIMED_OUT:
            return {}, f"no host from '{self._from}' within 30 s"
        hosts: Counter[str] = Counter()
        for line in lines:
            line = line.partition("#")[0].strip()
            if not line:
                continue
            # The name becomes a word of ssh's command line.
            match = _HOST.fullmatch(re.sub(r"\s*max[-_]slots=\d+", "", line))
            if not match:
                raise ValueError(
                    f"'{line}' of '{self._from}' is no host: a host is letters, digits, . _ and "
                    "-, not - first; node1:8 has 8 ranks"
                )
            hosts[match[1]] += int(match[2] or match[3] or 1)
        if hosts and not code:
            return dict(hosts), ""
        return {}, f"no host from '{self._from}', which ended with exit code {code}"

    def answering(self, hosts: dict[str, int]) -> dict[str, int]:
        """Those that ssh reaches; last, to be left out first, those that a run has failed on.

        `silent` has ssh's last words about the others, by name.
        """
        _, lines = _output(["sh", "-c", _ASK, "", *hosts], SSH_OPTIONS=self._ssh)
        answers = []
        self.silent = {}
        for line in lines:
            name, _, rest = line.partition(" ")
            answer, _, words = rest.partition(" ")
            if answer == "yes":
                answers.append(name)
                self._own_names[name] = words.strip()
            else:
                self.silent[name] = words.strip()
        there = [name for name in hosts if name in answers]
        failed = self._failed(list(hosts))
        there.sort(key=lambda name: failed[name])
        return {name: hosts[name] for name in there}

    def _failed(self, hosts: Sequence[str]) -> dict[str, int]:
        """How often a run failed on each host, by its listed name or its own.

        mpirun says the first part of a name alone. Where it is that of several hosts, it counts
        for those alone that are called so.
        """
        hosts_of: dict[str, set[str]] = {}
        for host in hosts:
            for name in (host, self._own_names.get(host, host)):
                hosts_of.setdefault(_short(name), set()).add(host)
        failed = dict.fromkeys(hosts, 0)
        for said, count in self._failures.items():
            meant = hosts_of.get(_short(said), set())
            if len(meant) > 1:
                meant = {
                    host
                    for host in meant
                    if said in (host, self._own_names.get(host, host))
                }
            for host in meant:
                failed[host] += count
        return failed

    def capped(self, hosts: dict[str, int]) -> dict[str, int]:
        """The first hosts, with `most` ranks in all."""
        left = self._most or sum(hosts.values())
        used = {}
        for name, count in hosts.items():
            if left:
                used[name] = min(count, left)
                left -= used[name]
        return used


def _output(command: Sequence[str], **variables: str) -> tuple[int, list[str]]:
    """Exit code and lines of a command, which has these variables too."""
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
        env=os.environ | variables,
    )
    return ended.returncode, ended.stdout.splitlines()


def _short(name: str) -> str:
    """The first part of node1.cluster, as mpirun says it too; an address as it is."""
    is_address = not name.strip("0123456789.")
    return name if is_address else name.partition(".")[0]


def _ssh_options(command: Sequence[str]) -> list[str]:
    """Port and key, -p and -i, that hosts.sh is given before the program that it runs."""
    options: list[str] = []
    if Path(command[0]).name != "hosts.sh":
        return options
    for before, flag, value in zip(command, command[1:], command[2:]):
        if not (before.startswith("-") or flag.startswith("-")):
            break  # the program: neither a flag nor a flag's value
        if flag in ("-p", "-i"):
            options += [flag, value]
    return options
