"""Who is a rank: each one proves to all others that it holds the launch's secret.

launch/hosts.sh and launch/slurm.sbatch make 32 random bytes at each start and pass them on by
name, as LAUNCH_SECRET in the ranks' environment, which only their own user can read.
"""

import hmac
import os

import numpy as np

from hvdkit.logs import complain, join
from hvdkit.ranks import messages
from hvdkit.stop import BUG

OPEN = (
    "note: horovodrun over Gloo shows the environment in ps, and any user of this host can join "
    "the run as a rank: on a shared host use launch/hosts.sh -np N instead"
)


def prove(carrier: messages.Carrier, rank: int, size: int, *, secret: bytes) -> bytes:
    """The key of this run: 32 bytes that all ranks know. Two exchanges of at most 40 bytes a rank.

    Each rank draws a nonce, and signs its number (HMAC-SHA256, RFC 2104) with a key that is made
    of the secret and all nonces. So what an earlier run sent proves nothing. Without a secret
    anybody can be a rank. Where a rank does not hold that of the others, the lowest of these names
    it, and all exit with BUG at once: nothing that waits for all ranks would end.
    """
    nonce = np.frombuffer(os.urandom(16), np.uint8)
    nonces = carrier.gather(nonce, size) if size > 1 else [nonce]
    key = hmac.digest(secret, b"".join(nonce.tobytes() for nonce in nonces), "sha256")
    signature = np.frombuffer(sign(key, rank), np.uint8)
    signatures = carrier.gather(signature, size) if size > 1 else [signature]
    strangers = []
    for other, signature in enumerate(signatures):
        if not hmac.compare_digest(signature.tobytes(), sign(key, other)):
            strangers.append(other)
    if strangers:
        if rank == min(set(range(size)) - set(strangers)):
            complain(
                f"rank {join(strangers)} does not hold this launch's secret (LAUNCH_SECRET): "
                "another launch or another user may have started it"
            )
        os._exit(BUG)
    return key


def sign(key: bytes, rank: int) -> bytes:
    """The proof of one rank, 32 bytes."""
    return hmac.digest(key, b"rank %d" % rank, "sha256")
