#!/usr/bin/env python3
"""For hosts.sh, before it starts mpirun: which hosts are others, and whether each can take part.

    reach.py INTERFACE "HOST ..." "SSH OPTION ..." COMMAND...

It starts daemon.sh on each other host as mpirun will, and has it connect back to this host. So it
proves that ssh answers, that the login shell runs what it is given, that this folder is there, and
that Open MPI's daemon will reach mpirun. Prints, a line each: the other hosts; the networks over
which ssh reached them, empty if not known; the settings of networks that files of Open MPI have;
--start_limit_s of the training command.

Exit code 76: a host cannot take part; each is named, with the reason. Exit code 2: the network has
to be named.
"""

import concurrent.futures
import contextlib
import dataclasses
import ipaddress
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

try:
    import psutil
    from preflight import facts
except ImportError as missing:
    print(
        f"error: {sys.executable}: {missing}: activate the environment", file=sys.stderr
    )
    sys.exit(2)

_START_LIMIT = 600  # the default of --start_limit_s, for programs that do not have it
_ANSWER = 60  # seconds that a login shell may take
_SHOWN = 8  # hosts that are named
_WRONG_USE = 2
_NOT_NOW = 76
# The ports that mpirun may take, such as 10000-10100,11000.
_PORTS = "OMPI_MCA_oob_tcp_dynamic_ipv4_ports"


@dataclasses.dataclass
class Answer:
    """What daemon.sh said on another host."""

    runs: bool = False
    origin: str = ""  # this host's address, as ssh came from it
    network: str = ""  # the other host's address with its network, 10.0.0.7/24; or lo
    refused: dict[str, str] = dataclasses.field(default_factory=dict)  # why, by address
    # Addresses of the launching host that this one has reached.
    reached: list[str] = dataclasses.field(default_factory=list)
    missing: str = ""  # a file or folder of the command that is not there


class Door:
    """A port of this host that answers a word to whoever connects, while hosts are asked."""

    def __init__(self) -> None:
        self.word = secrets.token_hex(8)
        self._server = _listen()
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            link, _ = self._server.accept()
            with link, contextlib.suppress(OSError):
                link.sendall(f"{self.word}\n".encode())


def _listen() -> socket.socket:
    """Listens on a port that mpirun may take, since a firewall may leave only some open."""
    for part in os.environ.get(_PORTS, "").split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal()):
            continue
        for port in range(int(first), int(last) + 1):
            with contextlib.suppress(OSError):  # in use
                return socket.create_server(("", port), backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def is_here(name: str) -> bool:
    """Whether a host is this one: its ranks are started without ssh."""
    local = {"::1", "localhost", os.uname().nodename}
    local.update(address for _, address in facts.ways())
    addresses, _ = facts.resolve(name)
    addresses.append(name)
    return any(address in local or address.startswith("127.") for address in addresses)


def needed(command: list[str]) -> list[str]:
    """The paths that each host needs: the program and its script."""
    return [os.path.abspath(word) for word in command[:2] if os.path.exists(word)]


def ask(
    name: str, ssh: list[str], door: Door, *, limit: int, paths: list[str]
) -> tuple[Answer | None, str]:
    """What daemon.sh says on that host; or why it says nothing, as an error's text."""
    script = Path(__file__).resolve().with_name("daemon.sh")
    addresses = [address for _, address in facts.ways() if ":" not in address]
    words = [
        "bash",
        shlex.quote(str(script)),
        "prove",
        door.word,
        str(door.port),
        *addresses,
    ]
    words += ["--", *(shlex.quote(path) for path in paths)]
    seconds = min(_ANSWER, limit or _ANSWER)
    try:
        ended = subprocess.run(
            [*ssh, name, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, _unreached(name, ssh, f"no answer in {seconds} s")
    output = ended.stdout.decode(errors="replace")
    answer = _read(output, door.word)
    lines = output.strip().splitlines()
    last_line = lines[-1] if lines else "nothing"
    if answer.missing:
        return (
            None,
            f"cannot start on {name}: no {answer.missing} there: is its disk mounted?",
        )
    if answer.runs:
        return answer, ""
    if ended.returncode == 255:
        return None, _unreached(name, ssh, last_line)
    return None, (
        f"cannot start on {name}: ssh answers, but its login shell did not run {script}: it ended "
        f"with exit code {ended.returncode} and said '{last_line}'. Is this folder there? Does "
        "~/.bashrc start another shell, or authorized_keys have a command=?"
    )


def _unreached(name: str, ssh: list[str], why: str) -> str:
    """An error's text, with the port that ssh takes for this host."""
    options = subprocess.run(
        [*ssh, "-G", name], capture_output=True, text=True, check=False
    )
    port = "unknown"
    for line in options.stdout.splitlines():
        if line.startswith("port "):
            port = line.removeprefix("port ")
    if "Permission denied" in why:
        why += " (it needs a key: a connection that ControlMaster shares is not used)"
    return f"cannot reach {name}, port {port}, by ssh: {why}"


def _read(output: str, word: str) -> Answer:
    """Reads the lines that begin with `word`: a login shell may print text of its own."""
    answer = Answer()
    for line in output.splitlines():
        mark, _, rest = line.partition(" ")
        if mark != word:
            continue
        name, _, value = rest.partition(" ")
        answer.runs = True
        if name == "from":
            answer.origin = value
        if name == "network":
            answer.network = value
        if name == "missing":
            answer.missing = value
        if name == "back":
            address, _, why = value.partition(" ")
            # A bash that was built without /dev/tcp cannot tell.
            if why == word or why == "No such file or directory":
                answer.reached.append(address)
            else:
                answer.refused[address] = why or "no answer in 8 s"
    return answer


def networks_of(answers: list[Answer]) -> str:
    """Networks at both ends of each connection, 10.0.0.0/24,10.1.0.0/24; "" if one is unknown.

    A cloud may give each address a network of its own, 10.0.0.7/32, by which Open MPI would take
    every address: here one network that holds them stands for all of these.
    """
    local = {}
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            local[entry.address] = f"{entry.address}/{entry.netmask}"
    ends = [local.get(answer.origin, "") for answer in answers]
    ends += [answer.network for answer in answers]
    try:
        networks = {ipaddress.IPv4Network(end, strict=False) for end in ends}
    except ValueError:  # one is unknown
        return ""
    single_addresses = [network for network in networks if network.prefixlen == 32]
    if single_addresses:
        networks = networks.difference(single_addresses) | {_around(single_addresses)}
    return ",".join(sorted(str(network) for network in networks))


def on_loopback(answers: dict[str, Answer]) -> str:
    """An error's text where ssh reaches a host at an address of a loopback interface; else "".

    Hosts that announce their address by BGP have it there.
    """
    on_lo = {entry.address for entry in psutil.net_if_addrs().get("lo", [])}
    for name, answer in answers.items():
        if answer.network == "lo" or answer.origin in on_lo:
            return (
                f"{name} and this host reach each other at addresses of their loopback interfaces, "
                "which Open MPI does not take: name a network card that all hosts have "
                "(--interface eth0)"
            )
    return ""


def _around(networks: list[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """The smallest network that holds all of these, and is larger than the first."""
    around = networks[0].supernet()
    while not all(network.subnet_of(around) for network in networks):
        around = around.supernet()
    return around


def closed_ways(answers: dict[str, Answer], network: str, door: Door) -> list[str]:
    """An error's text for each host from which no address that mpirun names is reached.

    `network`: interfaces and networks that MPI takes; empty: all.
    """
    wanted = {address for _, address in facts.ways()}
    if network:
        wanted = set(facts.addresses_in(network))
    errors = []
    for name, answer in answers.items():
        tried = {
            address: why for address, why in answer.refused.items() if address in wanted
        }
        if not tried or wanted.intersection(answer.reached):
            continue
        reasons = "; ".join(
            f"{address}: {why}" for address, why in sorted(tried.items())
        )
        if ":" in answer.origin:
            errors.append(
                f"cannot start on {name}: ssh reaches it over IPv6, and Open MPI needs IPv4, "
                f"by which it does not reach this host (TCP port {door.port} of {reasons}): "
                "give both an IPv4 address in one network"
            )
        else:
            errors.append(
                f"cannot start on {name}: it does not reach this host, as Open MPI's daemon must "
                f"(TCP port {door.port} of {reasons}): open the ports above 1023 between the "
                "hosts, or name another network (--interface)"
            )
    return errors


def start_limit(command: list[str]) -> int:
    """--start_limit_s of a training command, or its default."""
    # Its project's own code may print or fail; the ranks will report that.
    with contextlib.suppress(Exception), contextlib.redirect_stdout(sys.stderr):
        from hvdkit.settings import of_command

        settings = of_command(command)
        if settings:
            return settings.start_limit_s
    return _START_LIMIT


def settings_in_files() -> dict[str, str]:
    """What files of Open MPI say of networks, by setting: it is the cluster's choice."""
    found = {}
    with contextlib.suppress(ImportError):
        from hvdkit.ranks.start import of_mpi_files

        for layer in ("btl", "oob"):
            for kind in ("include", "exclude"):
                setting = f"{layer}_tcp_if_{kind}"
                if value := of_mpi_files(setting):
                    found[setting] = value
    return found


def own_network(in_files: dict[str, str]) -> str:
    """The networks of mpirun that a user or the cluster has chosen, where they are understood."""
    name = "oob_tcp_if_include"
    chosen = os.environ.get(f"OMPI_MCA_{name}", "") or in_files.get(name, "")
    chosen = chosen.replace(" ", "")
    try:
        return chosen if facts.addresses_in(chosen) else ""
    except ValueError:  # Open MPI has short forms of its own
        return ""


def main(interface: str, names: list[str], ssh: list[str], command: list[str]) -> int:
    limit = start_limit(command)
    door = Door()
    answers = {}
    errors = []
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        here = list(pool.map(is_here, names))
        others = [name for name, is_this_host in zip(names, here) if not is_this_host]
        paths = needed(command)
        futures = [
            pool.submit(ask, name, ssh, door, limit=limit, paths=paths)
            for name in others
        ]
        for name, future in zip(others, futures):
            answer, error = future.result()
            if answer:
                answers[name] = answer
            else:
                errors.append(error)
    if not interface:
        error = on_loopback(answers)
        if error:
            print(f"error: {error}", file=sys.stderr)
            return _WRONG_USE
    networks = networks_of(list(answers.values()))
    in_files = settings_in_files()
    errors += closed_ways(answers, interface or own_network(in_files) or networks, door)
    for error in errors[:_SHOWN]:
        print(f"error: {error}", file=sys.stderr)
    if len(errors) > _SHOWN:
        print(f"and {len(errors) - _SHOWN} more hosts", file=sys.stderr)
    print(" ".join(others), networks, " ".join(in_files), limit, sep="\n")
    return _NOT_NOW if errors else 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(sys.argv[1], sys.argv[2].split(), sys.argv[3].split(), sys.argv[4:]))
