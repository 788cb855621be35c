"""The account that two ranks of a host keep of payloads in each other's memory (see shared_memory)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from typing import Any, ClassVar

from .base import Transport
from .shared_memory import Arena, Doorway, Slot, supported

log = logging.getLogger("squinchcomm.transport")

_ARENA_BYTES = 256 << 20  # address space; memory is used as payloads need it
_MASK = 0xFFFFFFFF
JOIN_BELOW = 32 << 10  # bytes; smaller payloads travel in one message with their header


class Reading:
    """A payload in the peer's memory that this rank has not finished reading."""

    __slots__ = ("finished", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.finished = False


class SharedPayloads:
    """What this rank lent one peer, and what it reads of the peer's.

    Each tells the other how many payloads it has finished, counted from the oldest on without a gap and modulo 2**32: that number
    can travel in any message and be told again.

    Attributes:
        memory: The peer's memory, read-only.
        finished: Payloads of the peer that this rank has finished.
    """

    __slots__ = ("_lent", "_reading", "_returned", "finished", "memory")

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.finished = 0
        self._lent: deque[Any] = deque()
        self._returned = 0
        self._reading: deque[Reading] = deque()

    def lend(self, payload: Any) -> None:
        """Keeps a payload that is on its way until the peer has finished it."""
        self._lent.append(payload)

    def take_back(self, returned: int) -> bool:
        """Forgets what the peer has finished; False if it says more than it was lent."""
        count = returned - self._returned & _MASK
        if count > len(self._lent):
            return False
        for _ in range(count):
            self._lent.popleft()
        self._returned = returned
        return True

    def read(self, offset: int, nbytes: int) -> Reading | None:
        """Starts reading a payload; None if it lies outside the peer's memory."""
        if offset + nbytes > len(self.memory):
            return None
        reading = Reading(self.memory[offset : offset + nbytes])
        self._reading.append(reading)
        return reading

    def finish(self, reading: Reading) -> None:
        """Notes that a payload is not needed any more."""
        reading.finished = True
        while self._reading and self._reading[0].finished:
            self._reading.popleft()
            self.finished = self.finished + 1 & _MASK


class SharingTransport(Transport):
    """A transport whose ranks of one host read payloads in each other's memory."""

    _arena: Arena | None  # this rank's memory
    _near: frozenset[int]  # peers on this host, whether or not they share memory
    _least_shared_bytes: ClassVar[int] = JOIN_BELOW

    def allocate(self, nbytes: int, peers: Collection[int]) -> Slot | None:
        if nbytes < self._least_shared_bytes or self._near.isdisjoint(peers):
            return None
        slot = None if self._arena is None or self.sharing.isdisjoint(peers) else self._arena.allocate(nbytes)
        if slot is None:
            self.unshared_payloads += 1
        return slot


def open_doorway(session: int) -> Doorway | None:
    """A doorway with memory behind it; None, with a warning, if the system has none to share."""
    try:
        if supported:
            return Doorway(session, Arena(_ARENA_BYTES))
        reason = "this system has no memfd_create"
    except OSError as error:
        reason = str(error)
    log.warning("no shared memory (%s): payloads to ranks of this host are copied", reason)
    return None
