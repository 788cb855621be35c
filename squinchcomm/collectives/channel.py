"""Checked frames over a transport: order, checksums, signatures, deadlines, and failures told to all peers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from squinchcomm.collectives import wire
from squinchcomm.collectives.failure import pack_failure, told_failure
from squinchcomm.collectives.wire import Signature
from squinchcomm.errors import CollectiveTimeout, CommunicatorAborted, MismatchError, PeerLost, SquinchError, WireFormatError
from squinchcomm.stats import Meter, Stats
from squinchcomm.transport.base import Frame, Transport

log = logging.getLogger("squinchcomm")

_WAIT_SLICE_S = 0.25
_FLUSH_SLICE_S = 0.4  # a peer that got everything and left is lost, too: its memory comes back sooner than this
_ERROR_SIGNATURE = Signature("barrier", kind=wire.ERROR)


class Parcel(NamedTuple):
    """One frame to send. `payload` is an uint8 array or bytes; `borrow` as in `Transport.send`; no `crc` for shared memory.

    `raw_bytes` is what the payload would have been without a codec.
    """

    phase: int
    chunk: int
    payload: Any
    nbytes: int
    crc: int | None
    borrow: bool
    raw_bytes: int


def make_parcel(
    phase: int, chunk: int, payload: Any, *, borrow: bool = False, shared: bool = False, raw_bytes: int | None = None
) -> Parcel:
    """A parcel with its payload's size and checksum, for one peer or many; `shared` if `Transport.allocate` gave the payload.

    An encoded payload says in `raw_bytes` what it would have been without a codec.
    """
    nbytes = len(payload)
    crc = None if shared else wire.payload_crc(payload)
    return Parcel(phase, chunk, payload, nbytes, crc, borrow, nbytes if raw_bytes is None else raw_bytes)


class ChunkEvent(NamedTuple):
    """Something that happened to one chunk of a recorded call.

    `what` is "encode" or "decode", with the seconds it took, or "sent" or "received", with the bytes of the payload.
    """

    what: str
    peer: int
    phase: int
    chunk: int
    at: float  # time.monotonic()
    amount: float


class Piece:
    """One checked frame of the collective in progress. Call `release` when `payload` has been used."""

    __slots__ = ("chunk", "payload", "peer", "phase", "release")

    def __init__(self, frame: Frame, payload: np.ndarray) -> None:
        self.peer = frame.peer
        self.phase, self.chunk = wire.frame_part(frame.header)
        self.payload = payload
        self.release = frame.release


class Ticket:
    """Identity and deadline of one call, and what it costs.

    Attributes:
        op: Name for messages.
        sequence: Number of the call in its communicator.
        head: Bytes 0..39 of all its frames.
        deadline: `time.monotonic()` at which it fails.
        timeout_s: What the deadline was made from.
        started: `time.monotonic()` from which the deadline counts.
        meter: What the call has cost so far.
        heard: Peers of which a frame of this call has come.
        waits: If the call is recorded, seconds spent waiting by peer: for its frame, or, in waits that brought none, in
            equal parts for all that are due.
        chunks: If its chunks are recorded, what has happened to them.
    """

    __slots__ = ("chunks", "deadline", "head", "heard", "meter", "op", "sequence", "started", "timeout_s", "waits")

    def __init__(self, signature: Signature, epoch: int, sequence: int, timeout_s: float) -> None:
        self.op = signature.op
        self.sequence = sequence
        self.head = signature.pack(epoch, sequence)
        self.timeout_s = timeout_s
        self.started = time.monotonic()
        self.deadline = self.started + timeout_s
        self.meter = Meter()
        self.heard: set[int] = set()
        self.waits: dict[int, float] | None = None
        self.chunks: list[ChunkEvent] | None = None


class Channel:
    """The frames of one communicator's collectives, in call order.

    Used by one thread at a time, except `abort`. A failure breaks the channel: ranks no longer agree on what comes next.
    """

    def __init__(self, transport: Transport, epoch: int, stats: Stats) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.epoch = epoch
        self.stats = stats
        self.abort_reason: str | None = None
        self.failure: SquinchError | None = None
        self._sent = [0] * self.world_size
        self._received = [0] * self.world_size
        # By peer, its failure in a call that this rank has not reached yet: those before, which owe it nothing, can still end well.
        self._told: dict[int, SquinchError] = {}
        # Frames of calls that this rank has not reached yet, held unreleased: the window bounds them.
        self._early: dict[int, deque[tuple[Frame, np.ndarray]]] = {}

    def send(self, ticket: Ticket, peer: int, parcel: Parcel, *, urgent: bool = False) -> None:
        """Queues one frame; the caller has seen that `transport.can_send(peer)`, or it is an urgent one."""
        phase, chunk, payload, nbytes, crc, borrow, raw_bytes = parcel
        if crc is None:
            crc = 0 if peer in self.transport.sharing else wire.payload_crc(payload)
        header = wire.frame_header(ticket.head, self._sent[peer], phase, chunk, nbytes, crc)
        self.transport.send(peer, header, payload, borrow=borrow, urgent=urgent)
        self._sent[peer] += 1
        meter = ticket.meter
        meter.sent_bytes += nbytes + wire.HEADER_BYTES
        meter.raw_bytes += raw_bytes
        if ticket.chunks is not None:
            ticket.chunks.append(ChunkEvent("sent", peer, phase, chunk, time.monotonic(), nbytes))

    def receive(self, ticket: Ticket, waiting: dict[int, int], unsent: Collection[int] = (), *, block: bool) -> Piece | None:
        """The next frame of this call from any peer.

        Args:
            ticket: The call in progress.
            waiting: Frames still due, by peer.
            unsent: Peers whose window is full. Peers of both kinds are named after a timeout, and their loss is an error.
            block: Wait for it; returns None when the transport wants its caller to look again, and at once if not blocking.

        Raises:
            SquinchError: of the kind that fits; the caller passes it to `fail`.
        """
        self.check_end(ticket, waiting or unsent, waiting)
        for peer in self._early:
            if waiting.get(peer):
                return self._judge(ticket, waiting, *self._pop_early(peer))
        for peer, error in self._told.items():
            if (error.sequence or 0) <= ticket.sequence or peer in waiting or peer in unsent:
                raise error
        if block:
            lost = dict(self.transport.lost)  # before the wait: what they sent is here, and comes first
            started = time.monotonic()
            frame = self.transport.recv(max(0.0, min(_WAIT_SLICE_S, ticket.deadline - started)))
            waited_s = time.monotonic() - started
            ticket.meter.wait_s += waited_s
            if ticket.waits is not None:
                _charge(ticket.waits, {*waiting, *unsent} if frame is None else (frame.peer,), waited_s)
            if frame is None:
                self._check_wait(ticket, {*waiting, *unsent}, lost, waiting)
                return None
        else:
            frame = self.transport.recv(0)
            if frame is None:
                return None
        payload = self._admit(ticket, frame)
        if frame.header[wire.KIND_BYTE] == wire.ERROR:  # also from a peer that this call does not wait for
            self._told[frame.peer] = told_failure(payload, self.rank, frame.peer)
            frame.release()
            return None
        if frame.peer in self._early:
            self._early[frame.peer].append((frame, payload))
            return None
        return self._judge(ticket, waiting, frame, payload)

    def flush(self, ticket: Ticket, peers: Collection[int]) -> None:
        """Waits until all borrowed payloads are the caller's again."""
        while not self.transport.flush(_FLUSH_SLICE_S):
            lost = dict(self.transport.lost)
            frame = self.transport.recv(0)
            if frame is not None:
                payload = self._admit(ticket, frame)
                if frame.header[wire.KIND_BYTE] == wire.ERROR:
                    raise told_failure(payload, self.rank, frame.peer)
                self._early.setdefault(frame.peer, deque()).append((frame, payload))
            self._check_wait(ticket, peers, lost)

    def _pop_early(self, peer: int) -> tuple[Frame, np.ndarray]:
        early = self._early[peer]
        first = early.popleft()
        if not early:
            del self._early[peer]
        return first

    def _admit(self, ticket: Ticket, frame: Frame) -> np.ndarray:
        peer = frame.peer
        payload = np.frombuffer(frame.payload, np.uint8)
        fault = wire.check_frame(frame.header, payload, self._received[peer], in_place=frame.in_place)
        if fault is not None:
            self.stats.frames_corrupt += 1
            raise self._error(WireFormatError, f"a frame from rank {peer} is damaged: {fault}", ticket, peer)
        self._received[peer] += 1
        return payload

    def _judge(self, ticket: Ticket, waiting: dict[int, int], frame: Frame, payload: np.ndarray) -> Piece | None:
        head = frame.header[: wire.SIGNATURE_BYTES]
        if head == ticket.head:
            ticket.meter.received_bytes += payload.size + wire.HEADER_BYTES
            ticket.heard.add(frame.peer)
            return Piece(frame, payload)
        peer = frame.peer
        theirs = wire.read_header(head)
        if theirs.magic != wire.MAGIC or theirs.version != wire.WIRE_VERSION:
            what = f"wire version {theirs.version}" if theirs.magic == wire.MAGIC else f"magic {theirs.magic!r}"
            raise self._error(MismatchError, f"rank {peer} sent {what}; this is version {wire.WIRE_VERSION}", ticket, peer)
        if theirs.epoch != self.epoch:
            self.stats.frames_corrupt += 1
            raise self._error(
                WireFormatError, f"rank {peer} sent a frame of epoch {theirs.epoch:08x}, not {self.epoch:08x}", ticket, peer
            )
        if theirs.sequence > ticket.sequence and not waiting.get(peer):
            self._early.setdefault(peer, deque()).appendleft((frame, payload))
            return None
        mine = wire.read_header(ticket.head)
        raise self._error(
            MismatchError,
            f"ranks made different calls: rank {self.rank} {mine.describe(codec_name)}; rank {peer} {theirs.describe(codec_name)}",
            ticket,
            peer,
        )

    def _check_wait(self, ticket: Ticket, peers: Collection[int], lost: Mapping[int, str], due: Collection[int] = ()) -> None:
        for peer in lost:
            if peer in peers:
                raise self._error(PeerLost, f"rank {peer} was lost: {lost[peer]}", ticket, peer)
        self.check_end(ticket, peers, due)

    def check_end(self, ticket: Ticket, peers: Collection[int], due: Collection[int] = ()) -> None:
        """Raises if the call was aborted or its deadline has passed.

        Args:
            ticket: The call in progress.
            peers: Those that it waits for.
            due: Of them, those whose frames it waits for.
        """
        if self.abort_reason is not None:
            raise self._error(CommunicatorAborted, f"aborted: {self.abort_reason}", ticket)
        if time.monotonic() >= ticket.deadline:
            silent = sorted({*due} - ticket.heard)
            others = sorted({*peers} - {*silent})
            blamed = silent or others
            waiting = f"{_named(silent)}, of which nothing has come, and for {_named(others)}"
            raise self._error(
                CollectiveTimeout,
                f"no end after {ticket.timeout_s:g} s; still waiting for {waiting if silent and others else _named(blamed)}: look at "
                f"what {_named(blamed)} {'are' if len(blamed) > 1 else 'is'} doing (was this call made there?), or raise timeout_s; "
                "with SQUINCH_RECORDER_DIR set, `squinchcomm trace` tells who is behind",
                ticket,
                min(blamed, default=None),
            )

    def check_usable(self, ticket: Ticket) -> None:
        """Raises what an earlier failure, abort or loss means for a new call."""
        if self.failure is not None:
            raise self._error(
                CommunicatorAborted,
                f"not started: the communicator failed before ({type(self.failure).__name__}: {self.failure}); make a new one",
                ticket,
                self.failure.peer,
            )
        if self.abort_reason is not None:
            raise self._error(CommunicatorAborted, f"not started: aborted: {self.abort_reason}", ticket)

    def fail(self, error: SquinchError) -> None:
        """Marks the channel broken and tells all peers that can still hear it."""
        if self.failure is not None:
            return
        self.failure = error
        parcel = make_parcel(0, 0, pack_failure(error))
        ticket = Ticket(_ERROR_SIGNATURE, self.epoch, error.sequence or 0, 0.0)
        for peer in range(self.world_size):
            if peer != self.rank and peer not in self.transport.lost:
                self.send(ticket, peer, parcel, urgent=True)
        self._early.clear()
        log.log(
            logging.INFO if isinstance(error, CommunicatorAborted) else logging.WARNING,
            "rank %d: %s: %s",
            self.rank,
            type(error).__name__,
            error,
        )

    def abort(self, reason: str) -> None:
        """Makes the call in progress, and all later ones, raise CommunicatorAborted. Any thread; idempotent."""
        if self.abort_reason is None:
            self.stats.aborts += self.failure is None
            self.abort_reason = reason
        self.transport.wake()

    def _error(self, kind: type[SquinchError], message: str, ticket: Ticket, peer: int | None = None) -> SquinchError:
        return kind(
            f"{ticket.op} #{ticket.sequence} on rank {self.rank}: {message}",
            rank=self.rank,
            peer=peer,
            op=ticket.op,
            sequence=ticket.sequence,
        )


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _charge(waits: dict[int, float], peers: Collection[int], waited_s: float) -> None:
    for peer in peers:
        waits[peer] = waits.get(peer, 0.0) + waited_s / len(peers)


def codec_name(wire_id: int) -> str:
    """The codec's name for messages, also if nobody here knows it."""
    from squinchcomm.kernels import codec_by_wire_id

    try:
        return codec_by_wire_id(wire_id).name
    except WireFormatError:
        return f"number {wire_id}"
