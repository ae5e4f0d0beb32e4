"""A rank of a run that lasts until the file argv[1] is there."""

import os
import socket
import sys
import time
from pathlib import Path

import hvdkit.ranks.quiet  # noqa: F401

# isort: split

from hvdkit.ranks import peers as peers_lib
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.peers import Peers
from hvdkit.ranks.questions import sign
from hvdkit.settings import Settings


def ask(peers: Peers, question: bytes = b"") -> tuple[bytes, bytes]:
    """A question, signed where none is given, and this rank's answer."""
    with socket.create_connection(peers._places[world.rank].doors[0]) as link:
        nonces = link.recv(16) + bytes(16)
        question = question or bytes(16) + sign(peers._key, world.rank, nonces)
        link.sendall(question)
        return question, link.recv(999)


peers_lib._SILENT = 5.0
world = world_lib.set_up(world_lib.connect(), Settings())
with Peers(world, 600) as peers:
    files = len(os.listdir("/proc/self/fd"))
    print("ready", flush=True)
    while not world.broadcast_object(Path(sys.argv[1]).exists(), "the end"):
        time.sleep(0.2)
        assert len(os.listdir("/proc/self/fd")) < files + 100, (
            "connections take open files"
        )
    answers = peers._ask_all()
    assert len(answers) == world.size - 1
    assert all(answer.how == "" for answer in answers.values())
    question, answer = ask(peers)
    _, second_answer = ask(peers, question)
    assert answer and not second_answer, "a recorded question is answered again"
    world.barrier_max("asked")
print("ended well", flush=True)
world_lib.finish(world)
