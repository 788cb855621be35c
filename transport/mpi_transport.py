"""Frames over MPI: the hot path, the windows, and the end of peers."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from squinchcomm.errors import CommunicatorAborted, SquinchError, WireFormatError

from .backoff import Backoff
from .base import Frame
from .mpi_caretaker import adopt, dismiss
from .mpi_link import (
    CREDIT,
    DIED,
    FAREWELL,
    GOODBYE,
    HELLO,
    IN_PLACE,
    OFFSET,
    PREFIX,
    PREFIX_BYTES,
    SPLIT,
    VANISHED,
    WHOLE,
    Inbox,
    InPlaceFrame,
    MpiFrame,
    MpiLink,
    Room,
    shape_fault,
    told_bytes,
)
from .mpi_slots import UNUSED
from .mpi_world import MPI, describe, is_process_failure
from .options import TransportOptions
from .shared_payloads import JOIN_BELOW, SharingTransport

_REASONS = {GOODBYE: "closed its communicator", VANISHED: "connection closed"}
_BROKE = "broke the transport protocol"
_FORGET_EVERY_S = 0.05


class MpiTransport(SharingTransport):
    """One endpoint of an MPI process: its tags of the world's communicator, and a link to each peer."""

    name = "mpi"
    encrypted = False
    rejected_peers = 0
    # Open MPI sends up to 4 KiB at once, header included; above, both ranks have to look at MPI several times.
    _least_shared_bytes = 1 << 10

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        inbox: Inbox,
        links: Sequence[MpiLink],
        session: int,
        options: TransportOptions,
    ) -> None:
        world = inbox.world
        self.rank = rank
        self.world_size = len(hosts)
        self.hosts = tuple(hosts)
        self.max_payload_bytes = options.max_payload_bytes
        self.window = options.window
        self.lock = world.lock()
        self.busy = False  # looked at since the caretaker came by
        self._credit_due = max(1, options.window // 2)
        self._backoff = Backoff(hosts.count(hosts[rank]))
        self._session = session
        self._world = world
        self._comm = world.comm
        self._inbox = inbox
        self._links: list[MpiLink | None] = [None] * self.world_size
        self._given_up: set[int] = set()
        for link in links:
            self._links[link.rank] = link
            link.given_up = self._given_up
        self._peers = tuple(links)
        self._arena = inbox.arena
        self._near = frozenset(link.rank for link in links if link.near)
        self.unshared_payloads = 0
        self.sharing = frozenset(link.rank for link in links if link.shared is not None)
        self._arriving: list[MpiLink] = []
        self._ready: deque[MpiFrame] = deque()
        self._sent_bytes = [0] * self.world_size
        self._received_bytes = [0] * self.world_size
        self._lost: dict[int, str] = {}
        self._news = self._woken = False
        self._closed: str | None = None
        self._fault: SquinchError | None = None
        self._free = weakref.finalize(self, _abandon, self.lock, rank, self._peers, inbox)
        self._free.atexit = False
        with self.lock:
            for link in links:
                self._send_bare(link, HELLO)
        adopt(self, world)

    def greeted_by_all(self) -> bool:
        """Whether the hello of every peer has come."""
        with self.lock:
            self._progress()
        return not self.not_greeted()

    def not_greeted(self) -> list[int]:
        """Peers that have not said hello."""
        return [link.rank for link in self._peers if not link.greeted]

    # --- sending

    def can_send(self, peer: int) -> bool:
        link = self._links[peer]
        if link is None or self._closed is not None:
            self._refuse(peer)
        return link.sent - link.acked < self.window or link.lost is not None

    def send(self, peer: int, header: bytes, payload: Any = b"", *, borrow: bool = False, urgent: bool = False) -> None:
        link = self._links[peer]
        if link is None or self._closed is not None:
            self._refuse(peer)
        view = memoryview(payload)
        size = view.nbytes
        header_bytes = len(header)
        if header_bytes > self.MAX_HEADER_BYTES or size > self.max_payload_bytes:
            raise ValueError(f"header of {header_bytes} bytes or payload of {size} bytes is too large")
        if link.lost is not None:
            return
        if link.sent - link.acked >= self.window + urgent:
            raise BlockingIOError(f"the window of rank {peer} is full: {self.window} frames are not released yet")
        with self.lock:
            link.sent += 1
            self._sent_bytes[peer] += PREFIX_BYTES + header_bytes + size
            # Not at each call: a test of what has not left yet makes the library look for work, and yield its core.
            if len(link.outgoing) + len(link.loans) >= self.window:
                link.forget_sent()
            if link.shared is not None and (offset := self._shared_offset(payload, size)) is not None:
                link.shared.lend(payload)
                link.put(self._comm, link.prefix(self.rank, IN_PLACE, header_bytes, size) + header + OFFSET.pack(offset))
            elif size < JOIN_BELOW:
                prefix = link.prefix(self.rank, WHOLE, header_bytes, size)
                link.put(self._comm, b"".join((prefix, header, view)))
            else:
                link.put(self._comm, link.prefix(self.rank, SPLIT, header_bytes, size) + header)
                link.put_payload(self._comm, self.rank, view.cast("B"), borrow)

    def _shared_offset(self, payload: Any, size: int) -> int | None:
        """Where in this rank's memory a payload lies, if it does."""
        return None if self._arena is None or size < self._least_shared_bytes else self._arena.offset(payload)

    def flush(self, timeout_s: float) -> bool:
        started = time.monotonic()
        while True:
            with self.lock:
                self._progress()
                if all(self._returned(link) for link in self._peers):
                    return True
            waited_s = time.monotonic() - started
            if waited_s >= timeout_s:
                return False
            self._backoff.pause(waited_s)

    def _returned(self, link: MpiLink) -> bool:
        """Whether nothing that this peer will take is borrowed. What it did not take before it was lost, it never will."""
        if link.lost is not None and link.loans:
            self._world.leave_behind(list(link.loans))
            link.loans.clear()
        link.forget_sent()
        return not link.loans

    def _send_bare(self, link: MpiLink, kind: int) -> None:
        self._sent_bytes[link.rank] += PREFIX_BYTES
        link.put(self._comm, link.prefix(self.rank, kind))

    # --- receiving

    def recv(self, timeout_s: float) -> Frame | None:
        frame = self._look()
        if frame is not None or timeout_s <= 0:
            return frame
        started = time.monotonic()
        forget_s = _FORGET_EVERY_S
        while True:
            if self._woken or self._news:
                self._woken = self._news = False
                return None
            waited_s = time.monotonic() - started
            if waited_s >= timeout_s:
                return None
            if waited_s >= forget_s:
                forget_s = waited_s + _FORGET_EVERY_S
                self._forget_sent()
            self._backoff.pause(waited_s)
            frame = self._look()
            if frame is not None:
                return frame

    def release(self, frame: MpiFrame) -> None:
        """Takes a frame's memory back and tells its sender, if that has not heard from us for half a window."""
        # Without the lock: this thread alone gives memory back and counts, and others add to and take from containers in one step.
        link, memory = frame.link, frame.memory
        if isinstance(memory, Room):
            self._inbox.give_back(memory)
        elif memory is not None and link.shared is not None:
            link.shared.finish(memory)
        link.released += 1
        if link.released - link.reported >= self._credit_due and link.lost is None and self._closed is None:
            with self.lock:
                self._send_bare(link, CREDIT)

    def _look(self) -> MpiFrame | None:
        with self.lock:
            if self._closed is not None:
                raise CommunicatorAborted(self._closed, rank=self.rank)
            self.busy = True
            if not self._ready:
                self._progress(one=True)
            if self._ready:
                return self._ready.popleft()
            if self._fault is not None:
                fault, self._fault = self._fault, None
                raise fault
        return None

    def tend(self) -> bool:
        """Takes what has come while nobody looked, and lets go of what has left; True if something has come.

        Called by the caretaker, holding `lock`.
        """
        before = len(self._ready) + len(self._arriving)
        try:
            if self._closed is None:
                self._forget_sent()
                self._progress()
        except CommunicatorAborted as error:
            self._fault = self._fault or error
        return len(self._ready) + len(self._arriving) != before

    def _forget_sent(self) -> None:
        """Lets go of what has left, and learns of what has failed to."""
        with self.lock:
            for link in self._peers:
                link.forget_sent()

    def _progress(self, *, one: bool = False) -> None:
        """Takes what has come; with `one`, until a frame is ready: a library that copies when asked makes the next ones wait."""
        slots, status = self._inbox.slots, self._inbox.status
        try:
            while not (one and self._ready) and (slot := slots.take(status)) is not None:
                self._accept(slot, status)
        except MPI.Exception as error:
            if not is_process_failure(error):
                raise CommunicatorAborted(f"MPI failed: {describe(error)}", rank=self.rank) from error
            self._world.acknowledge_failures()
        if self._arriving:
            self._arriving = [link for link in self._arriving if not self._completed(link)]
        if one and self._ready:
            return
        failed = self._world.failed()
        if failed or self._given_up:
            self._part(failed)

    def _accept(self, slot: bytearray, status: MPI.Status) -> None:
        """Takes the message in `slot`: a frame, or one between transports."""
        session, peer, released, finished, payload_bytes, header_bytes, kind = PREFIX.unpack_from(slot)
        size = status.count
        link = self._links[peer] if peer < self.world_size else None
        if status.source == MPI.ANY_SOURCE:
            if slot.startswith(UNUSED) or link is None:
                return None
            size, status.source = PREFIX_BYTES + told_bytes(kind, header_bytes, payload_bytes), link.dest
        if size < PREFIX_BYTES or link is None or session != self._session or status.source != link.dest:
            return self._violation(None, f"{size} bytes as rank {peer}, for session {session:#x}: not of this group")
        if link.lost == _BROKE:
            return None
        window_was_full = link.sent - link.acked >= self.window
        fault = link.note(released, finished) or shape_fault(kind, header_bytes, payload_bytes, size, self.max_payload_bytes)
        if fault is None and kind <= IN_PLACE and link.received - link.released > self.window:  # one may be urgent
            fault = f"more than the {self.window} frames of its window"
        if fault is not None:
            return self._violation(link, fault)
        self._received_bytes[peer] += size
        if window_was_full and link.sent - link.acked < self.window:
            self._news = True  # who waits to send has to know, and a frame may not be complete for a while
        if kind > IN_PLACE:
            return self._accept_bare(link, kind)
        link.received += 1
        end = PREFIX_BYTES + header_bytes
        header = bytes(slot[PREFIX_BYTES:end])
        if kind == SPLIT:
            self._received_bytes[peer] += payload_bytes
            room = self._inbox.borrow(payload_bytes)
            self._arrive(link, MpiFrame(self, link, header, room.payload, room, self._inbox.receive(link, room)))
        elif kind == WHOLE:
            self._arrive(link, MpiFrame(self, link, header, memoryview(bytes(slot[end:size]))))
        else:
            self._read_in_place(link, header, OFFSET.unpack_from(slot, end)[0], payload_bytes)
        return None

    def _read_in_place(self, link: MpiLink, header: bytes, offset: int, nbytes: int) -> None:
        reading = link.shared.read(offset, nbytes) if link.shared is not None else None
        if reading is None:
            self._violation(link, f"a payload of {nbytes} bytes at {offset}, which is not in memory that it shares")
            return
        self._received_bytes[link.rank] += nbytes
        self._arrive(link, InPlaceFrame(self, link, header, reading.view, reading))

    def _arrive(self, link: MpiLink, frame: MpiFrame) -> None:
        """Hands a frame on, in its turn."""
        if link.arriving:
            link.arriving.append(frame)
        elif frame.request is None:
            self._ready.append(frame)
        else:
            link.arriving.append(frame)
            # A peer that leaves is lost when all that it sent has been taken, and more may be in the slots.
            if link.leaving is not None or not self._completed(link):
                self._arriving.append(link)

    def _completed(self, link: MpiLink) -> bool:
        """Hands on the complete frames of a peer; whether that were all."""
        arriving, status = link.arriving, self._inbox.status
        while arriving:
            frame = arriving[0]
            if frame.request is not None:
                try:
                    if not frame.request.Test(status):
                        return False
                except MPI.Exception as error:
                    link.fail(error)
                    self._drop_arriving(link)
                    break
                if status.count != len(frame.payload):
                    self._violation(link, f"a payload of {status.count} bytes instead of {len(frame.payload)}")
                    self._drop_arriving(link)
                    break
            self._ready.append(arriving.popleft())
        if link.leaving is not None:
            self._lose(link)
        return True

    def _drop_arriving(self, link: MpiLink) -> None:
        """Forgets the incomplete frames of a peer, but for memory that MPI may still write to."""
        self._world.leave_behind(link.unreceived())
        link.arriving.clear()

    def _accept_bare(self, link: MpiLink, kind: int) -> None:
        if kind == HELLO:
            link.greeted = True
        elif kind != CREDIT:
            link.silent = True
            if kind != FAREWELL and link.leaving is None:
                link.leaving = _REASONS[kind]
                if self._closed is None:
                    self._send_bare(link, FAREWELL)
                if not link.arriving:
                    self._lose(link)

    def _violation(self, link: MpiLink | None, what: str) -> None:
        """Notes bytes that no honest peer sends, for the next `recv` to raise, and gives their sender up."""
        if link is None:
            fault = WireFormatError(f"a process of this job sent {what}", rank=self.rank)
        else:
            fault = WireFormatError(f"rank {link.rank} broke the transport protocol: {what}", rank=self.rank, peer=link.rank)
            link.leaving = _BROKE
            self._lose(link)
        self._fault = self._fault or fault

    # --- the end of peers, and ours

    def _part(self, failed: frozenset[int]) -> None:
        for link in self._peers:
            if link.dest in failed and link.leaving is None:
                link.leaving, link.silent = DIED, True
            if link.leaving is not None and link.lost is None and not link.arriving:
                self._lose(link)

    def _lose(self, link: MpiLink) -> None:
        if link.lost is None:
            assert link.leaving is not None
            self._news = True
            self._given_up.discard(link.rank)
            link.lost = self._lost[link.rank] = link.leaving

    @property
    def lost(self) -> Mapping[int, str]:
        return MappingProxyType(self._lost)

    @property
    def sent_bytes(self) -> Sequence[int]:
        return self._sent_bytes

    @property
    def received_bytes(self) -> Sequence[int]:
        return self._received_bytes

    def wake(self) -> None:
        self._woken = True

    def close(self, linger_s: float = 1.0) -> None:
        self._leave("this communicator is closed", GOODBYE, linger_s)

    def vanish(self, linger_s: float) -> None:
        """Closes at the end of the process."""
        self._leave("this process is ending", VANISHED, linger_s)

    def disown(self) -> None:
        """Makes a forked child's copy refuse everything."""
        if self._free.detach() is not None:
            self._closed = "this communicator belongs to the process that forked this one; make a new one there"

    def _leave(self, reason: str, kind: int, linger_s: float) -> None:
        if self._free.detach() is None:
            return
        with self.lock:
            self._closed = reason
            for link in self._peers:
                if link.lost is None:
                    self._send_bare(link, kind)
        started = time.monotonic()
        while not self._drained() and (waited_s := time.monotonic() - started) < linger_s:
            self._backoff.pause(waited_s)
        with self.lock:
            self._world.leave_behind([request for link in self._peers for request in link.unfinished()])
            self._inbox.close()
        dismiss(self, [link.dest for link in self._peers if not link.silent])

    def _drained(self) -> bool:
        """Takes and drops what still comes; whether everybody has gone or said that nothing more will, and has what we sent."""
        with self.lock:
            self._progress()
            for frame in self._ready:
                frame.link.released += 1  # a peer that is still sending must not overrun its window
            self._ready.clear()
            self._forget_sent()
            return all(link.silent and (link.lost or not link.unfinished()) for link in self._peers)

    def _refuse(self, peer: int) -> NoReturn:
        if self._closed is not None:
            raise CommunicatorAborted(self._closed, rank=self.rank)
        raise ValueError(f"rank {peer} cannot send to itself")


def _abandon(lock: Any, rank: int, links: Sequence[MpiLink], inbox: Inbox) -> None:
    """What is left to do for a transport that was forgotten."""
    if MPI.Is_finalized():
        return
    with lock:
        for link in links:
            if link.lost is None:
                message = link.prefix(rank, VANISHED)
                link.outgoing.append((inbox.world.comm.Isend(message, link.dest, link.tag), message))
        inbox.world.leave_behind([request for link in links for request in link.unfinished()])
        inbox.close()
