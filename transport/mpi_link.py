"""What goes between two ranks over MPI: the prefix of every message, one peer's counters, and the receives posted for all."""

from __future__ import annotations

import mmap
import struct
from collections import deque
from typing import Annotated, Any, NamedTuple

import msgspec

from .base import Transport
from .mpi_pieces import Pieces
from .mpi_slots import open_slots
from .mpi_world import MPI, MpiWorld, Testable, describe, is_process_failure, over
from .shared_memory import Arena
from .shared_payloads import JOIN_BELOW, Reading, SharedPayloads

# Every message starts with: receiver's session, sender's rank, frames of yours that I released, payloads in your memory that I
# finished, payload bytes, header bytes, kind.
PREFIX = struct.Struct("<IIQIIHBx")
PREFIX_BYTES = PREFIX.size
WHOLE, SPLIT, IN_PLACE, CREDIT, HELLO, GOODBYE, VANISHED, FAREWELL = range(8)
OFFSET = struct.Struct("<Q")  # behind the header of an IN_PLACE frame: where in its sender's memory the payload lies

MAX_HEADER_BYTES = Transport.MAX_HEADER_BYTES
SLOT_BYTES = PREFIX_BYTES + MAX_HEADER_BYTES + JOIN_BELOW
DIED = "its process died"
_SPARE_BYTES = 64 << 20


class Message(NamedTuple):
    """The prefix of a message, read."""

    session: int
    peer: int
    released: int
    finished: int
    payload_bytes: int
    header_bytes: int
    kind: int

    def fault(self, size: int, max_payload_bytes: int) -> str | None:
        """What is wrong with a message of `size` bytes that begins like this, in words."""
        if self.kind > FAREWELL or (self.kind > IN_PLACE and size != PREFIX_BYTES):
            return f"a message of unknown kind {self.kind}, or a bare message of {size} bytes"
        if self.kind > IN_PLACE:
            return None
        tail = (self.payload_bytes, 0, OFFSET.size)[self.kind]
        if self.header_bytes > MAX_HEADER_BYTES or size != PREFIX_BYTES + self.header_bytes + tail:
            return f"a frame of {size} bytes with a header of {self.header_bytes}"
        if self.payload_bytes > max_payload_bytes:
            return f"a payload of {self.payload_bytes} bytes, which is too large"
        return None


class MpiAddress(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Where an mpi transport is reached: a rank and a tag of a duplicated communicator."""

    version: int
    world: bytes
    dest: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    tag: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    session: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    window: Annotated[int, msgspec.Meta(ge=2, le=4096)]
    max_payload_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    host: Annotated[str, msgspec.Meta(max_length=256)]
    uid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    doorway: Annotated[str, msgspec.Meta(pattern="^squinchcomm-[0-9a-f]{32}$")] | None  # see shared_memory.Doorway
    piece_bytes: Annotated[int, msgspec.Meta(ge=1 << 10, le=1 << 30)]


class Arrival(NamedTuple):
    """A frame whose first message is here.

    Attributes:
        memory: What to give back when it is released, if its payload did not come in that message.
        request: The receive of its payload, if that is on its way, or several as one.
    """

    header: bytes
    payload: memoryview
    memory: mmap.mmap | Reading | None = None
    request: Testable | None = None


class MpiLink:
    """One peer. The counters count frames since the start, ours to it (`sent`, `acked`) and its to us (`received`, `released`).

    Attributes:
        rank: Its rank in the group.
        dest: Its rank in the MPI communicator.
        tag: Where it receives the first message of each frame; a payload of rank r goes to `tag + 1 + r`.
        session: What it wants to read in the prefix.
        near: It is on this host, and payloads should be shared.
        doorway: Where it takes our memory.
        shared: Account of payloads in shared memory, if that could be had.
        arriving: Its frames that are not complete, and those behind them.
        outgoing: Requests of messages to it that are ours, with their memory.
        loans: Requests of borrowed payloads to it, with their memory.
        greeted: Its hello has come.
        silent: It has said that it sends nothing more, or is dead.
        leaving: Why it will be lost when all that it sent has been taken.
        lost: Why it is lost.
    """

    __slots__ = (
        "acked", "arriving", "dest", "doorway", "greeted", "leaving", "loans", "lost", "near", "outgoing", "piece_bytes", "rank",
        "received", "released", "reported", "sent", "session", "shared", "silent", "tag",
    )  # fmt: skip

    def __init__(self, rank: int, address: MpiAddress, near: bool, piece_bytes: int) -> None:
        self.rank = rank
        self.dest = address.dest
        self.tag = address.tag
        self.session = address.session
        self.doorway = address.doorway
        self.near = near
        self.piece_bytes = piece_bytes
        self.shared: SharedPayloads | None = None
        self.sent = self.acked = self.received = self.released = self.reported = 0
        self.arriving: deque[Arrival] = deque()
        self.outgoing: deque[tuple[Testable, Any]] = deque()
        self.loans: deque[tuple[Testable, Any]] = deque()
        self.greeted = self.silent = False
        self.leaving: str | None = None
        self.lost: str | None = None

    def prefix(self, own_rank: int, kind: int, header_bytes: int = 0, payload_bytes: int = 0) -> bytes:
        """The first bytes of the next message to this peer, which tell it what we have released."""
        self.reported = self.released
        finished = self.shared.finished if self.shared is not None else 0
        return PREFIX.pack(self.session, own_rank, self.released, finished, payload_bytes, header_bytes, kind)

    def note(self, message: Message) -> str | None:
        """Takes what a message of this peer says of ours; what is wrong with it, in words."""
        if not self.acked <= message.released <= self.sent:
            return f"it says it released {message.released} frames of {self.sent}, after {self.acked}"
        if self.shared is not None and not self.shared.take_back(message.finished):
            return "it says it finished reading more payloads than it was lent"
        self.acked = message.released
        return None

    def put(self, comm: MPI.Intracomm, message: bytes) -> None:
        """Sends a first message, or a bare one."""
        try:
            request = comm.Isend([message, MPI.BYTE], self.dest, self.tag)
            if not request.Test():
                self.outgoing.append((request, message))
        except MPI.Exception as error:
            self.fail(error)

    def put_payload(self, comm: MPI.Intracomm, own_rank: int, payload: memoryview, borrow: bool) -> None:
        """Sends a payload whose first message is on its way."""
        kept = self.loans if borrow else self.outgoing
        tag = self.tag + 1 + own_rank
        try:
            if len(payload) <= self.piece_bytes:
                kept.append((comm.Isend([payload, MPI.BYTE], self.dest, tag), payload))
            else:
                pieces = Pieces()
                kept.append((pieces, payload))
                pieces.start(lambda part: comm.Isend([part, MPI.BYTE], self.dest, tag), payload, self.piece_bytes)
        except MPI.Exception as error:
            self.fail(error)

    def forget_sent(self) -> None:
        """Lets go of memory that has left."""
        for queue in (self.outgoing, self.loans):
            try:
                while queue and queue[0][0].Test():
                    queue.popleft()
            except MPI.Exception as error:
                self.fail(error)
                if over(queue[0][0]):
                    queue.popleft()

    def fail(self, error: MPI.Exception) -> None:
        """An operation with this peer failed: it is lost once what it sent before is taken."""
        self.silent = True
        if self.leaving is None:
            self.leaving = DIED if is_process_failure(error) else describe(error)

    def unreceived(self) -> list[tuple[Testable, Any]]:
        """Receives of payloads, to whose memory MPI may still write."""
        return [(arrival.request, arrival.memory) for arrival in self.arriving if arrival.request is not None]

    def unfinished(self) -> list[tuple[Testable, Any]]:
        """Requests whose memory MPI may still touch."""
        return [*self.outgoing, *self.loans, *self.unreceived()]


class Inbox:
    """What comes from all peers, and the memory that it comes to.

    Attributes:
        world: Where messages come from.
        tag: On which they come.
        slots: The first messages.
        arena: Memory of ours that peers read in place.
        status: Of the last message that came.
    """

    def __init__(self, world: MpiWorld, tag: int, peers: int, arena: Arena | None) -> None:
        self.world = world
        self.arena = arena
        self.status = MPI.Status()
        self._comm = world.comm
        self.tag = tag
        self.slots = open_slots(world, tag, SLOT_BYTES, peers)
        self._spare: dict[int, list[mmap.mmap]] = {}
        self._spare_bytes = 0

    def receive(self, link: MpiLink, header: bytes, nbytes: int) -> Arrival:
        """Posts receives for the payload of a peer's frame."""
        memory = self._borrow(nbytes)
        payload = memoryview(memory)[:nbytes]
        tag = self.tag + 1 + link.rank
        if nbytes <= link.piece_bytes:
            request: Testable = self._comm.Irecv([payload, MPI.BYTE], link.dest, tag)
        else:
            request = pieces = Pieces()
            pieces.start(lambda part: self._comm.Irecv([part, MPI.BYTE], link.dest, tag), payload, link.piece_bytes)
        return Arrival(header, payload.toreadonly(), memory, request)

    def _borrow(self, nbytes: int) -> mmap.mmap:
        """Memory for a payload of `nbytes`, or more: the next power of two."""
        size = 1 << (nbytes - 1).bit_length()
        spare = self._spare.get(size)
        if spare:
            self._spare_bytes -= size
            return spare.pop()
        return mmap.mmap(-1, size)

    def give_back(self, buffer: mmap.mmap) -> None:
        """Keeps memory of a payload for the next payload of its size: fresh memory costs a fault every page."""
        if self._spare_bytes + len(buffer) <= _SPARE_BYTES:
            self._spare_bytes += len(buffer)
            self._spare.setdefault(len(buffer), []).append(buffer)

    def close(self) -> None:
        """Takes the receives back, and the memory that peers read."""
        if self.arena is not None:
            self.arena.close()
        self._spare.clear()
        self.slots.close()
