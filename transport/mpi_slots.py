"""Where the first messages of frames are received, from any peer."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod

from .mpi_world import MPI, MpiWorld

_LEAST_SLOTS, _MOST_SLOTS = 8, 64


class Slots(ABC):
    """Takes the messages of one tag one by one, in the order in which MPI matches them."""

    @abstractmethod
    def arrived(self, status: MPI.Status) -> bytearray | None:
        """The memory that holds the next message, described by `status`; call `next` when it has been read."""

    @abstractmethod
    def next(self) -> None:
        """Gives the memory just read back."""

    @abstractmethod
    def close(self) -> None:
        """Receives nothing more."""


class PostedSlots(Slots):
    """Receives that are always posted, so that MPI has somewhere to put what comes.

    MPI matches messages in the order in which receives were posted, so the oldest is always the next to complete: one
    test finds out whether anything has come, however many peers there are. What finds no posted receive waits in MPI.
    """

    def __init__(self, world: MpiWorld, tag: int, nbytes: int, peers: int) -> None:
        self._world = world
        self._tag = tag
        self._buffers = [bytearray(nbytes) for _ in range(min(max(_LEAST_SLOTS, 2 * peers), _MOST_SLOTS))]
        self._requests = [self._post(buffer) for buffer in self._buffers]
        self._oldest = 0

    def arrived(self, status: MPI.Status) -> bytearray | None:
        return self._buffers[self._oldest] if self._requests[self._oldest].Test(status) else None

    def next(self) -> None:
        self._requests[self._oldest] = self._post(self._buffers[self._oldest])
        self._oldest = (self._oldest + 1) % len(self._buffers)

    def close(self) -> None:
        for request in self._requests:
            request.Cancel()
        self._world.leave_behind(list(zip(self._requests, self._buffers, strict=True)))

    def _post(self, buffer: bytearray) -> MPI.Request:
        return self._world.comm.Irecv(buffer, MPI.ANY_SOURCE, self._tag)


class ProbedSlots(Slots):
    """Receives each message when it is there, for libraries that lose posted receives (see `loses_receives`)."""

    def __init__(self, world: MpiWorld, tag: int, nbytes: int) -> None:
        self._world = world
        self._tag = tag
        self._buffer = bytearray(nbytes)
        self._request: MPI.Request | None = None

    def arrived(self, status: MPI.Status) -> bytearray | None:
        if self._request is None:
            message = self._world.comm.Improbe(MPI.ANY_SOURCE, self._tag)
            if message is None:
                return None
            self._request = message.Irecv([self._buffer, MPI.BYTE])
        return self._buffer if self._request.Test(status) else None

    def next(self) -> None:
        self._request = None

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
