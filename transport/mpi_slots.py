"""Where the first messages of frames are received, from any peer."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod

from .mpi_world import MPI, MpiWorld

_LEAST_SLOTS, _MOST_SLOTS = 8, 64
UNUSED = bytes(4)  # how memory begins that no message has come to


class Slots(ABC):
    """Takes the messages of one tag one by one, in the order in which MPI matches them."""

    @abstractmethod
    def take(self, status: MPI.Status) -> bytearray | None:
        """The memory that holds the next message, described by `status`, until the next call; None if none has come.

        The status has the source MPI_ANY_SOURCE if it is lost; the memory may be `UNUSED` then.
        """

    @abstractmethod
    def close(self) -> None:
        """Receives nothing more."""


class PostedSlots(Slots):
    """Receives that are always posted, so that MPI has somewhere to put what comes.

    When a process dies, ULFM lets the test of a receive from any source fail, also of one whose message came at that moment: in Open MPI 5
    the message is in its memory then, but the receive is over without a status. So memory is marked before it is posted, to tell later.

    MPI matches messages in the order in which receives were posted, so the oldest is always the next to complete: one
    test finds out whether anything has come, however many peers there are. What finds no posted receive waits in MPI.
    """

    def __init__(self, world: MpiWorld, tag: int, nbytes: int, peers: int) -> None:
        self._world = world
        self._buffers = [bytearray(nbytes) for _ in range(min(max(_LEAST_SLOTS, 2 * peers), _MOST_SLOTS))]
        self._requests = [world.comm.Recv_init(buffer, MPI.ANY_SOURCE, tag) for buffer in self._buffers]
        MPI.Prequest.Startall(self._requests)
        self._oldest = 0
        self._taken = False

    def take(self, status: MPI.Status) -> bytearray | None:
        if self._taken:
            self._buffers[self._oldest][: len(UNUSED)] = UNUSED
            self._requests[self._oldest].Start()
            self._taken = False
            self._oldest = (self._oldest + 1) % len(self._buffers)
        if not self._requests[self._oldest].Test(status):
            return None
        self._taken = True
        return self._buffers[self._oldest]

    def close(self) -> None:
        if self._taken:
            self._requests.pop(self._oldest).Free()
        for request in self._requests:
            request.Cancel()
        self._world.leave_behind([(request, self._buffers) for request in self._requests])


class ProbedSlots(Slots):
    """Receives each message when it is there, for libraries that lose posted receives (see `loses_receives`)."""

    def __init__(self, world: MpiWorld, tag: int, nbytes: int) -> None:
        self._world = world
        self._tag = tag
        self._buffer = bytearray(nbytes)
        self._request: MPI.Request | None = None

    def take(self, status: MPI.Status) -> bytearray | None:
        if self._request is None:
            message = self._world.comm.Improbe(MPI.ANY_SOURCE, self._tag)
            if message is None:
                return None
            self._request = message.Irecv([self._buffer, MPI.BYTE])
        if not self._request.Test(status):
            return None
        self._request = None
        return self._buffer

    def close(self) -> None:
        if self._request is not None:
            self._world.leave_behind([(self._request, self._buffer)])


def loses_receives() -> bool:
    """Whether this is MPICH over UCX.

    A receive from any source that finds its message already there never completes in MPICH 5.0.2 with ch4:ucx, between hosts; it does with
    ch4:ofi.
    """
    device = re.search(r"MPICH Device:\s+ch4:(\w+)", MPI.Get_library_version())
    return device is not None and os.environ.get("MPIR_CVAR_CH4_NETMOD", device[1]) == "ucx"


def open_slots(world: MpiWorld, tag: int, nbytes: int, peers: int) -> Slots:
    """Slots for messages of at most `nbytes` from any of `peers` ranks."""
    return ProbedSlots(world, tag, nbytes) if loses_receives() else PostedSlots(world, tag, nbytes, peers)
