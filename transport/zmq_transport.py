"""Frames over zmq: the hot path, the windows, and the end of peers."""

from __future__ import annotations

import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import zmq

from squinchcomm.errors import CommunicatorAborted, WireFormatError

from .address import Address
from .base import Frame
from .options import TransportOptions
from .pacer import Pacer, acquire_pacer, release_pacer
from .shared_memory import Arena
from .shared_payloads import JOIN_BELOW, Reading, SharedPayloads, SharingTransport
from .zmq_context import ForkAware, watch_fork
from .zmq_link import PeerLink

if TYPE_CHECKING:
    from .zmq_backend import Inbox

# Every message starts with: receiver's session, sender's rank, frames of yours that I released, those in your memory that I
# finished without a gap, header bytes, kind.
_PREFIX = struct.Struct("<IIQIHBx")
_PREFIX_BYTES = _PREFIX.size
_WHOLE, _SPLIT, _IN_PLACE, _CREDIT, _GOODBYE, _HELLO = range(6)
_SPAN = struct.Struct("<QQ")  # where in its sender's memory the payload of an _IN_PLACE message lies, and its size

_SLICE_S = 0.05  # how long a wait sleeps before it looks after lost peers
_LAST_FRAME_S = 0.1  # for what the pacer has just released to leave
_BROKE = "broke the transport protocol"
_GRACE_S = 0.1  # what a peer sent before its connection broke may still be on its way to us


class ZmqFrame(Frame):
    """A frame in zmq's memory."""

    __slots__ = ("_link", "_transport")

    def __init__(self, transport: ZmqTransport, link: PeerLink, header: bytes, payload: memoryview) -> None:
        self._transport = transport
        self._link = link
        self.peer = link.rank
        self.header = header
        self.payload = payload

    def release(self) -> None:
        link = self._link
        link.released += 1
        if link.released - link.reported >= self._transport.credit_due:
            self._transport.report(link)


class InPlaceFrame(ZmqFrame):
    """A frame whose payload lies in its sender's memory."""

    __slots__ = ("_reading", "_shared")
    in_place = True

    def __init__(
        self, transport: ZmqTransport, link: PeerLink, header: bytes, shared: SharedPayloads, reading: Reading
    ) -> None:
        super().__init__(transport, link, header, reading.view)
        self._shared = shared
        self._reading = reading

    def release(self) -> None:
        self._shared.finish(self._reading)
        super().release()


class ZmqTransport(SharingTransport, ForkAware):
    """One bound PULL socket that all peers send to, one PUSH socket to each peer."""

    name = "zmq"
    holds_sent = True

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        inbox: Inbox,
        links: Sequence[PeerLink],
        own: Address,
        options: TransportOptions,
        arena: Arena | None,
    ) -> None:
        self.rank = rank
        self.world_size = len(hosts)
        self.hosts = tuple(hosts)
        self.encrypted = own.security == "curve"
        self.max_payload_bytes = options.max_payload_bytes
        self.window = options.window
        self.credit_due = max(1, options.window // 2)
        self._session = own.session
        self._peer_timeout_s = options.peer_timeout_s
        self._links: list[PeerLink | None] = [None] * self.world_size
        for link in links:
            self._links[link.rank] = link
        self._arena = arena
        self._near = frozenset(link.rank for link in links if link.near)
        self.sharing = frozenset(link.rank for link in links if link.shared is not None)
        self.unshared_payloads = 0
        self._inbox = inbox
        self._peer: Callable[[int], PeerLink] = self._link
        self._recv_part: Callable[..., Any] = inbox.socket.recv
        self._recv_timeout_s = _SLICE_S
        inbox.socket.set(zmq.RCVTIMEO, round(_SLICE_S * 1000))
        self._sent_bytes = [0] * self.world_size
        self._received_bytes = [0] * self.world_size
        self._lost: dict[int, str] = {}
        self._news = False
        self._looked_at = 0.0
        self._borrowed: list[zmq.MessageTracker | PacedLoan] = []
        self._pacer: Pacer | None = None
        self._put: Callable[..., zmq.MessageTracker | PacedLoan | None] = put
        if options.link_rate is not None:
            self._pacer = acquire_pacer(options.link_rate)
            self._put = partial(_put_paced, self._pacer)
        self._free = weakref.finalize(self, _free, inbox, list(links), self._pacer, arena, 0)
        self._free.atexit = False
        watch_fork(self)
        for link in links:
            self._send_bare(link, _HELLO, b"")

    # --- sending

    def can_send(self, peer: int) -> bool:
        link = self._peer(peer)
        return link.sent - link.acked < self.window or link.lost is not None

    def send(self, peer: int, header: bytes, payload: Any = b"", *, borrow: bool = False, urgent: bool = False) -> None:
        link = self._peer(peer)
        size = len(payload) if type(payload) is bytes else memoryview(payload).nbytes
        header_bytes = len(header)
        if header_bytes > self.MAX_HEADER_BYTES or size > self.max_payload_bytes:
            raise ValueError(f"header of {header_bytes} bytes or payload of {size} bytes is too large")
        if link.lost is not None:
            return
        if link.sent - link.acked >= self.window + urgent:
            raise BlockingIOError(f"the window of rank {peer} is full: {self.window} frames are not released yet")
        link.sent += 1
        link.reported = link.released
        self._sent_bytes[peer] += _PREFIX_BYTES + header_bytes + size
        if size < JOIN_BELOW:
            self._put(link, b"".join((self._prefix(link, header_bytes, _WHOLE), header, payload)))
        elif link.shared is not None and self._arena is not None and (offset := self._arena.offset(payload)) is not None:
            link.shared.lend(payload)
            self._put(link, b"".join((self._prefix(link, header_bytes, _IN_PLACE), header, _SPAN.pack(offset, size))))
        else:
            prefix = self._prefix(link, header_bytes, _SPLIT)
            loan = self._put(link, prefix + header, payload, borrow)
            if loan is not None:
                self._borrowed.append(loan)

    def _prefix(self, link: PeerLink, header_bytes: int, kind: int) -> bytes:
        finished = 0 if link.shared is None else link.shared.finished
        return _PREFIX.pack(link.session, self.rank, link.released, finished, header_bytes, kind)

    def report(self, link: PeerLink) -> None:
        """Tells a peer that has not heard from us how many of its frames are released."""
        self._send_bare(link, _CREDIT)

    def flush(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._borrowed:
            try:
                self._borrowed[-1].wait(max(0.0, deadline - time.monotonic()))
            except zmq.NotDone:
                return False
            self._borrowed.pop()
        return True

    def _send_bare(self, link: PeerLink, kind: int, more: bytes | None = None) -> None:
        if link.lost is None:
            link.reported = link.released
            self._sent_bytes[link.rank] += _PREFIX_BYTES
            self._put(link, self._prefix(link, 0, kind), more)

    # --- receiving

    def recv(self, timeout_s: float) -> Frame | None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if timeout_s < self._recv_timeout_s:
                    part = self._recv_part(zmq.NOBLOCK)
                else:
                    part = self._recv_part()
            except zmq.Again:
                part = self._wait(deadline)
                if part is None:
                    return None
            if part == self._inbox.alarm:
                self._inbox.woken = False
                return None
            frame = self._accept(part)
            if frame is not None:
                return frame
            if self._news:
                self._news = False
                return None
            timeout_s = deadline - time.monotonic()

    def _wait(self, deadline: float) -> bytes | None:
        """Blocks in slices for the next message; None when recv has to return without one."""
        while True:
            now = time.monotonic()
            left_s = deadline - now
            if (left_s > 0 or now - self._looked_at > _SLICE_S) and self._look_around(now):
                return None
            if left_s <= 0:
                return None
            self._set_recv_timeout(min(left_s, _SLICE_S))
            try:
                part: bytes = self._recv_part()
            except zmq.Again:
                continue
            return part

    def _set_recv_timeout(self, timeout_s: float) -> None:
        if timeout_s != self._recv_timeout_s:
            self._recv_timeout_s = timeout_s
            self._inbox.socket.set(zmq.RCVTIMEO, max(1, round(timeout_s * 1000)))

    def _accept(self, part: bytes) -> Frame | None:
        """The frame that starts with this part; None for a message between transports."""
        if len(part) < _PREFIX_BYTES:
            raise self._violation(None, f"a message of {len(part)} bytes, shorter than its prefix")
        session, peer, released, returned, header_bytes, kind = _PREFIX.unpack_from(part)
        link = self._links[peer] if peer < self.world_size else None
        if link is None or session != self._session:
            raise self._violation(None, f"a message from rank {peer} for session {session:#x}, which is not of this group")
        if not link.acked <= released <= link.sent:
            raise self._violation(link, f"it says it released {released} frames of {link.sent}, after {link.acked}")
        link.acked = released
        if returned if link.shared is None else not link.shared.take_back(returned):
            raise self._violation(link, "it says it finished reading more payloads in our memory than it was lent")
        reading: Reading | None = None
        end = _PREFIX_BYTES + header_bytes
        if kind == _WHOLE:
            # Not worth asking whether more parts follow: they would be read, and judged, as messages of their own.
            if end > len(part) or header_bytes > self.MAX_HEADER_BYTES:
                raise self._violation(link, f"a frame of {len(part)} bytes with a header of {header_bytes}")
            payload = memoryview(part)[end:]
            size = len(part)
        elif kind == _IN_PLACE:
            reading = self._read_in_place(link, part, header_bytes)
            size = end + len(reading.view)
        elif kind == _SPLIT:
            if end != len(part) or header_bytes > self.MAX_HEADER_BYTES or not self._inbox.socket.get(zmq.RCVMORE):
                raise self._violation(link, f"the first part of a frame has {len(part)} bytes instead of {end}, or is alone")
            tail = self._inbox.socket.recv(zmq.NOBLOCK, copy=False)
            payload = tail.buffer.toreadonly()
            size = end + len(payload)
            if tail.more or len(payload) > self.max_payload_bytes:
                raise self._violation(link, f"a payload of {len(payload)} bytes is too large or has extra parts")
        else:
            self._accept_bare(link, part, kind)
            return None
        link.received += 1
        if link.received - link.released > self.window + 1:  # one may be urgent
            raise self._violation(link, f"it sent more than the {self.window} frames of its window")
        self._received_bytes[peer] += size
        if link.lost is not None and link.lost == _BROKE:
            return None
        if reading is not None and link.shared is not None:
            return InPlaceFrame(self, link, part[_PREFIX_BYTES:end], link.shared, reading)
        return ZmqFrame(self, link, part[_PREFIX_BYTES:end], payload)

    def _read_in_place(self, link: PeerLink, part: bytes, header_bytes: int) -> Reading:
        end = _PREFIX_BYTES + header_bytes
        if link.shared is None or end + _SPAN.size != len(part) or header_bytes > self.MAX_HEADER_BYTES:
            raise self._violation(
                link, f"a frame of {len(part)} bytes with a payload in memory, and a header of {header_bytes}"
            )
        offset, size = _SPAN.unpack_from(part, end)
        reading = link.shared.read(offset, size) if size <= self.max_payload_bytes else None
        if reading is None:
            raise self._violation(link, f"a payload of {size} bytes at {offset} of its memory of {len(link.shared.memory)}")
        return reading

    def _accept_bare(self, link: PeerLink, part: bytes, kind: int) -> None:
        more = bool(self._inbox.socket.get(zmq.RCVMORE))
        if len(part) != _PREFIX_BYTES or kind not in (_CREDIT, _GOODBYE, _HELLO) or more != (kind == _HELLO):
            raise self._violation(link, f"a message of unknown kind {kind}, or a bare message that is not bare")
        self._received_bytes[link.rank] += _PREFIX_BYTES
        if kind == _GOODBYE:
            self._lose(link, "closed its communicator")
        elif kind == _HELLO:
            # Only parts received without a copy know their connection, which is what the second part is for.
            empty = self._inbox.socket.recv(zmq.NOBLOCK, copy=False)
            if empty.more or len(empty):
                raise self._violation(link, "a hello with something behind it")
            self._inbox.greet(int(empty.get(zmq.SRCFD)), link.rank)
        else:
            self._news = True  # the window is open again: who waits to send has to know

    def _violation(self, link: PeerLink | None, what: str) -> WireFormatError:
        """The error for bytes that no honest peer sends; what is left of their message is thrown away, their sender given up."""
        while self._inbox.socket.get(zmq.RCVMORE):
            self._inbox.socket.recv(zmq.NOBLOCK, copy=False)
        if link is None:
            return WireFormatError(f"an authenticated peer sent {what}", rank=self.rank)
        self._lose(link, _BROKE)
        return WireFormatError(f"rank {link.rank} broke the transport protocol: {what}", rank=self.rank, peer=link.rank)

    # --- the end of peers, and ours

    def _look_around(self, now: float) -> bool:
        """Reads the monitors; True if recv should return because somebody is lost."""
        self._looked_at = now
        hung_up = self._inbox.hung_up()
        for link in self._links:
            if link is None or link.lost is not None:
                continue
            link.watch(link.rank in hung_up)
            if link.suspect is not None and now - link.suspect >= _GRACE_S:
                self._lose(link, link.why_broken(self._peer_timeout_s))
        returning = self._news
        self._news = False
        return returning

    def _lose(self, link: PeerLink, reason: str) -> None:
        if link.lost is None:
            self._news = True
            with self._pacer.lock if self._pacer is not None else nullcontext():
                link.lost = self._lost[link.rank] = reason
                link.close(0)

    @property
    def lost(self) -> Mapping[int, str]:
        return MappingProxyType(self._lost)

    @property
    def sent_bytes(self) -> Sequence[int]:
        return self._sent_bytes

    @property
    def received_bytes(self) -> Sequence[int]:
        return self._received_bytes

    @property
    def rejected_peers(self) -> int:
        return self._inbox.rejected

    def wake(self) -> None:
        self._inbox.wake()

    def close(self, linger_s: float = 1.0) -> None:
        if self._free.detach() is None:
            return
        links = [link for link in self._links if link is not None]
        for link in links:
            self._send_bare(link, _GOODBYE)
        deadline = time.monotonic() + linger_s
        if self._pacer is not None:
            self._pacer.drain(linger_s)
            deadline += _LAST_FRAME_S
        self._retire("this communicator is closed")
        _free(self._inbox, links, self._pacer, self._arena, max(0, round((deadline - time.monotonic()) * 1000)))

    def disown(self) -> None:
        if self._free.detach() is not None:
            self._retire("this communicator belongs to the process that forked this one; make a new one here")

    def _retire(self, reason: str) -> None:
        """Makes every later call fail with this reason."""

        def refuse(*_: Any, **__: Any) -> Any:
            raise CommunicatorAborted(reason, rank=self.rank)

        self._peer = self._recv_part = refuse

    def _link(self, peer: int) -> PeerLink:
        link = self._links[peer]
        if link is None:
            raise ValueError(f"rank {peer} cannot send to itself")
        return link


def max_message_bytes(options: TransportOptions) -> int:
    """The largest message part that an honest peer sends, CURVE's wrapping of 33 bytes included."""
    return max(options.max_payload_bytes, JOIN_BELOW + 4096 + _PREFIX_BYTES) + 64


def put(link: PeerLink, first: bytes, payload: Any = None, borrow: bool = False) -> zmq.MessageTracker | None:
    """Hands a message to zmq. If the connection is gone it is dropped; the monitor will tell."""
    if link.lost is not None:
        return None
    try:
        if payload is None:
            link.send_part(first, zmq.NOBLOCK)
            return None
        link.send_part(first, zmq.NOBLOCK | zmq.SNDMORE)
        tracker: zmq.MessageTracker = link.send_part(payload, zmq.NOBLOCK, copy=False, track=borrow)
        return tracker if borrow else None
    except zmq.Again:
        return None


def _put_paced(pacer: Pacer, link: PeerLink, first: bytes, payload: Any = None, borrow: bool = False) -> PacedLoan | None:
    """`put`, when the emulated link has room for it."""
    loan = PacedLoan() if borrow else None

    def release() -> None:
        tracker = put(link, first, payload, borrow)
        if loan is not None:
            loan.start(tracker)

    pacer.submit(len(first) + (0 if payload is None else memoryview(payload).nbytes), release)
    return loan


class PacedLoan:
    """A borrowed payload that the pacer may not have handed to zmq yet."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._tracker: zmq.MessageTracker | None = None

    def start(self, tracker: zmq.MessageTracker | None) -> None:
        self._tracker = tracker
        self._started.set()

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if not self._started.wait(timeout_s):
            raise zmq.NotDone
        if self._tracker is not None:
            self._tracker.wait(max(0.0, deadline - time.monotonic()))


def _free(inbox: Inbox, links: Sequence[PeerLink], pacer: Pacer | None, arena: Arena | None, linger_ms: int) -> None:
    with pacer.lock if pacer is not None else nullcontext():
        for link in links:
            link.close(linger_ms if link.lost is None else 0)
            link.lost = link.lost or "closed here"  # a frame that still waits for the pacer is dropped
            link.shared = None
    if pacer is not None:
        release_pacer(pacer)
    if arena is not None:
        arena.close()
    inbox.close()
