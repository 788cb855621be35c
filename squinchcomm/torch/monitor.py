"""monitored_barrier: a barrier after which rank 0 can say who did not come. Works beside collectives that hang.

Every rank reports to rank 0 by a message; rank 0 tells those that came who did not.
"""

from __future__ import annotations

import time

import numpy as np

from squinchcomm.communicator import Communicator
from squinchcomm.errors import CollectiveTimeout, PeerLost, SquinchError
from squinchcomm.torch.errors import GroupTimeout, translated

# torch's tags are below 2**31.
_REPORT_TAG, _ANSWER_TAG = 2**32 - 1, 2**32 - 2
_ANSWER_S = 1.0  # for the others to take the answer after a failure


def monitored_barrier(comm: Communicator, timeout_s: float, wait_all_ranks: bool) -> None:
    """Returns when all ranks have called it.

    Args:
        comm: The group.
        timeout_s: Seconds until those that have not come count as failed.
        wait_all_ranks: Rank 0 names all ranks that failed, not just the first.

    Raises:
        GroupTimeout: a rank did not come in time; on rank 0 and on those that came.
    """
    if timeout_s <= 0:
        raise GroupTimeout(f"Rank {comm.rank} timed out in monitoredBarrier: it was given 0 ms", rank=comm.rank)
    if comm.rank:
        _report(comm, timeout_s)
        return
    absent = _collect(comm, timeout_s, wait_all_ranks)
    flags = np.zeros(comm.world_size, np.int8)
    flags[absent] = 1
    answers = [
        comm.send(flags, peer, _ANSWER_TAG, async_op=True, timeout_s=_ANSWER_S if absent else timeout_s)
        for peer in range(1, comm.world_size)
        if peer not in absent
    ]
    for work in answers:
        try:
            work.wait()  # type: ignore[union-attr]
        except SquinchError as error:
            if not absent:
                raise translated(error) from error
    if absent:
        who = f"Ranks {', '.join(map(str, absent))}" if wait_all_ranks else f"Rank {absent[0]}"
        raise GroupTimeout(
            f"[Rank 0]: {who} failed to pass monitoredBarrier in {round(timeout_s * 1000)} ms", rank=0, peer=absent[0]
        )


def _collect(comm: Communicator, timeout_s: float, wait_all_ranks: bool) -> list[int]:
    """Ranks that did not report, or the first of them."""
    deadline = time.monotonic() + timeout_s
    boxes = [np.zeros(1, np.int8) for _ in range(comm.world_size)]
    works = {
        peer: comm.recv(boxes[peer], peer, _REPORT_TAG, async_op=True, timeout_s=timeout_s)
        for peer in range(1, comm.world_size)
    }
    absent = []
    for peer, work in works.items():
        try:
            work.wait(max(deadline - time.monotonic(), 0.0) + 0.5)  # type: ignore[union-attr]
        except (CollectiveTimeout, PeerLost):
            absent.append(peer)
    return absent if wait_all_ranks else absent[:1]


def _report(comm: Communicator, timeout_s: float) -> None:
    rank = comm.rank
    flags = np.zeros(comm.world_size, np.int8)
    try:
        comm.send(np.zeros(1, np.int8), 0, _REPORT_TAG, timeout_s=timeout_s)
    except (CollectiveTimeout, PeerLost) as error:
        raise GroupTimeout(
            f"Rank {rank} timed out in monitoredBarrier after {round(timeout_s * 1000)} ms: rank 0 did not come ({error})",
            rank=rank,
            peer=0,
        ) from error
    # As gloo puts it: there is code that looks for these words.
    reached = f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
    try:
        comm.recv(flags, 0, _ANSWER_TAG, timeout_s=timeout_s + _ANSWER_S)
    except (CollectiveTimeout, PeerLost) as error:
        raise GroupTimeout(f"{reached}: {error}", rank=rank, peer=0) from error
    absent = np.flatnonzero(flags).tolist()
    if absent:
        names = ", ".join(map(str, absent))
        raise GroupTimeout(
            f"{reached}: rank {names} failed to pass it in {round(timeout_s * 1000)} ms", rank=rank, peer=absent[0]
        )
