"""What goes between two ranks over MPI: the prefix of every message, one peer's counters, and the receives posted for all."""

from __future__ import annotations

import mmap
import struct
from collections import defaultdict, deque
from typing import Annotated, Any, Protocol

import msgspec

from .base import Frame, Transport
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
_SPARE_BYTES = 64 << 20  # kept of each size


def shape_fault(kind: int, header_bytes: int, payload_bytes: int, size: int, max_payload_bytes: int) -> str | None:
    """What is wrong with a message of `size` bytes that begins like this, in words."""
    if kind > FAREWELL or (kind > IN_PLACE and size != PREFIX_BYTES):
        return f"a message of unknown kind {kind}, or a bare message of {size} bytes"
    if kind > IN_PLACE:
        return None
    if header_bytes > MAX_HEADER_BYTES or size != PREFIX_BYTES + told_bytes(kind, header_bytes, payload_bytes):
        return f"a frame of {size} bytes with a header of {header_bytes}"
    if payload_bytes > max_payload_bytes:
        return f"a payload of {payload_bytes} bytes, which is too large"
    return None


def told_bytes(kind: int, header_bytes: int, payload_bytes: int) -> int:
    """Bytes behind the prefix of a message that begins like this."""
    if kind > IN_PLACE:
        return 0
    return header_bytes + (payload_bytes if kind == WHOLE else 0 if kind == SPLIT else OFFSET.size)


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


class Room:
    """Memory for one payload at a time.

    Attributes:
        capacity: Its bytes, a power of two.
        nbytes: Of the payload.
        writable: The payload, for MPI.
        payload: The payload, for its reader.
    """

    __slots__ = ("_memory", "capacity", "nbytes", "payload", "writable")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._memory = memoryview(mmap.mmap(-1, capacity))
        self.fit(capacity)

    def fit(self, nbytes: int) -> None:
        """Makes the payload one of `nbytes`."""
        self.nbytes = nbytes
        self.writable = self._memory[:nbytes]
        self.payload = self.writable.toreadonly()


class MpiFrame(Frame):
    """A frame whose first message is here.

    Attributes:
        link: Who sent it.
        memory: What to give back when it is released, if its payload did not come in that message.
        request: The receive of its payload, if that was sent by itself.
    """

    __slots__ = ("_transport", "link", "memory", "request")

    def __init__(
        self,
        transport: Releasing,
        link: MpiLink,
        header: bytes,
        payload: memoryview,
        memory: Room | Reading | None = None,
        request: Testable | None = None,
    ) -> None:
        self._transport = transport
        self.link = link
        self.peer = link.rank
        self.header = header
        self.payload = payload
        self.memory = memory
        self.request = request

    def release(self) -> None:
        self._transport.release(self)


class InPlaceFrame(MpiFrame):
    """A frame whose payload lies in its sender's memory."""

    __slots__ = ()
    in_place = True


class Releasing(Protocol):
    """A transport, to its frames."""

    def release(self, frame: MpiFrame) -> None:
        """Takes a frame's memory back."""


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
        given_up: The transport's set of ranks that it has to give up, since an operation with them failed.
        lost: Why it is lost.
    """

    __slots__ = (
        "acked", "arriving", "dest", "doorway", "given_up", "greeted", "leaving", "loans", "lost", "near", "outgoing", "piece_bytes",
        "rank", "received", "released", "reported", "sent", "session", "shared", "silent", "tag",
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
        self.arriving: deque[MpiFrame] = deque()
        self.outgoing: deque[tuple[Testable, Any]] = deque()
        self.loans: deque[tuple[Testable, Any]] = deque()
        self.greeted = self.silent = False
        self.leaving: str | None = None
        self.lost: str | None = None
        self.given_up: set[int] = set()

    def prefix(self, own_rank: int, kind: int, header_bytes: int = 0, payload_bytes: int = 0) -> bytes:
        """The first bytes of the next message to this peer, which tell it what we have released."""
        self.reported = self.released
        finished = self.shared.finished if self.shared is not None else 0
        return PREFIX.pack(self.session, own_rank, self.released, finished, payload_bytes, header_bytes, kind)

    def note(self, released: int, finished: int) -> str | None:
        """Takes what a message of this peer says of ours; what is wrong with it, in words."""
        if not self.acked <= released <= self.sent:
            return f"it says it released {released} frames of {self.sent}, after {self.acked}"
        if self.shared is not None and not self.shared.take_back(finished):
            return "it says it finished reading more payloads than it was lent"
        self.acked = released
        return None

    def put(self, comm: MPI.Intracomm, message: bytes) -> None:
        """Sends a first message, or a bare one."""
        try:
            request = comm.Isend(message, self.dest, self.tag)
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
                kept.append((comm.Isend(payload, self.dest, tag), payload))
            else:
                pieces = Pieces()
                kept.append((pieces, payload))
                pieces.start(lambda part: comm.Isend(part, self.dest, tag), payload, self.piece_bytes)
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
        self.given_up.add(self.rank)
        if self.leaving is None:
            self.leaving = DIED if is_process_failure(error) else describe(error)

    def unreceived(self) -> list[tuple[Testable, Any]]:
        """Receives of payloads, to whose memory MPI may still write."""
        return [(frame.request, frame.memory) for frame in self.arriving if frame.request is not None]

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
        self._spare: defaultdict[int, list[Room]] = defaultdict(list)

    def receive(self, link: MpiLink, room: Room) -> Testable:
        """Posts receives for the payload of a peer's frame."""
        tag = self.tag + 1 + link.rank
        if room.nbytes <= link.piece_bytes:
            return self._comm.Irecv(room.writable, link.dest, tag)
        pieces = Pieces()
        pieces.start(lambda part: self._comm.Irecv(part, link.dest, tag), room.writable, link.piece_bytes)
        return pieces

    def borrow(self, nbytes: int) -> Room:
        """Room for a payload of `nbytes`."""
        capacity = 1 << (nbytes - 1).bit_length()
        spare = self._spare[capacity]
        room = spare.pop() if spare else Room(capacity)
        if room.nbytes != nbytes:  # payloads mostly have the size of the last one
            room.fit(nbytes)
        return room

    def give_back(self, room: Room) -> None:
        """Keeps the room of a payload for the next payload of its size: fresh memory costs a fault every page."""
        spare = self._spare[room.capacity]
        if (len(spare) + 1) * room.capacity <= _SPARE_BYTES:
            spare.append(room)

    def close(self) -> None:
        """Takes the receives back, and the memory that peers read."""
        if self.arena is not None:
            self.arena.close()
        self._spare.clear()
        self.slots.close()
