"""Horovod's allreduce, timed and checked: of all ranks, and of two hosts at a time."""

import random
import time
from typing import Any

_MOST_HOSTS, _ROUNDS = 32, 6  # of more hosts not every pair is timed; a slow host shows in six


def rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """Every pair once, or of many hosts some, drawn alike by all; no host is twice in a round."""
    seats: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    table = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]))
        table.append([(min(p), max(p)) for p in pairs if None not in p])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return table if hosts <= _MOST_HOSTS else random.Random(hosts).sample(table, _ROUNDS)


def allreduce(hvd: Any, tf: Any, megabytes: int, those: Any) -> dict[str, Any]:
    """One allreduce of float32 by the process set `those`, in which this rank is.

    Returns:
      "rank"; "ranks" (empty: all); "right", the sum; "seconds", the mean of three; "rate", the bus
      bandwidth in bytes a second as nccl-tests define it: bytes / seconds x 2 (n - 1) / n.
    """
    size, numbers = those.size(), tf.ones([megabytes << 18])
    name = f"doctor.{'-'.join(map(str, those.ranks or ['all']))}"

    def once(tensor: Any) -> Any:
        return hvd.allreduce(tensor, op=hvd.Sum, name=name, process_set=those)

    right = bool(tf.reduce_all(once(numbers) == size))  # also makes the connections
    once(tf.zeros([1]))  # all start together
    start = time.perf_counter()
    for _ in range(3):
        total = once(numbers)
    total[:1].numpy()  # a GPU has finished
    seconds = (time.perf_counter() - start) / 3
    rate = (megabytes << 20) / seconds * 2 * (size - 1) / size
    ranks = [] if those is hvd.global_process_set else those.ranks
    return {"rank": hvd.rank(), "ranks": ranks, "seconds": seconds, "right": right, "rate": rate}


def of_two(hvd: Any, tf: Any, megabytes: int, pairs: list[list[int]]) -> list[dict[str, Any]]:
    """`allreduce` in each of these pairs of ranks at the same time: of this rank's, if it has one.

    Every rank calls it: all make and remove a process set (HOROVOD_DYNAMIC_PROCESS_SETS=1).
    """
    sets = [hvd.add_process_set(pair) for pair in pairs]
    seen = [allreduce(hvd, tf, megabytes, one) for one in sets if one.included()]
    for one in sets:
        hvd.remove_process_set(one)
    return seen
