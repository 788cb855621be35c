"""Point-to-point messages: announced first, sent when the receiver has asked, so that nothing unexpected is ever stored.

1. The sender announces (tag, dtype, count) with a number; a message of up to `INLINE_BYTES` travels in the announcement.
2. The receiver matches announcements with its posted receives, in order for each (source, tag), and answers "clear"
   (send it) or "refuse" (dtype or count differ: both sides raise MismatchError).
3. The sender sends the data in chunks, numbered like the announcement; the receiver, when it has all, answers "clear" again:
   the send is over, and its memory is the caller's.

A thread of its own makes progress while calls are pending, independent of the collectives. A message that fails leaves the others
alone. What damages the whole lane (a corrupt frame, an abort) ends all messages, and the peers, once told, end theirs with the same error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from squinchcomm.collectives import wire
from squinchcomm.collectives.failure import pack_failure, told_failure
from squinchcomm.collectives.plan import MAX_CHUNK_BYTES
from squinchcomm.collectives.wire import Signature
from squinchcomm.errors import (
    CollectiveTimeout,
    CommunicatorAborted,
    MismatchError,
    PeerLost,
    SquinchError,
    WireFormatError,
)
from squinchcomm.kernels.dtypes import dtype_name
from squinchcomm.stats import Stats
from squinchcomm.transport.base import Frame, Transport
from squinchcomm.work import Work

INLINE_BYTES = 4 << 10
MAX_ANNOUNCED = 1 << 14  # messages that wait for a receive, from all peers: 64 MiB at most
_GIVEN_UP = "gave up sending after its timeout"
_SLICE_S = 0.25


class Announcement(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """First frame of a message; `data` holds small messages whole."""

    number: int
    tag: int
    dtype: int
    count: int
    data: Annotated[bytes, msgspec.Meta(max_length=INLINE_BYTES)] | None


class Answer(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Receiver's answer: go on, or, with a reason, do not."""

    number: int
    refusal: Annotated[str, msgspec.Meta(max_length=1000)] | None


@dataclass(slots=True)
class Message:
    """One send or receive in progress."""

    work: Work
    data: np.ndarray  # uint8
    dtype: np.dtype
    count: int
    tag: int
    peer: int | None  # None: any source
    deadline: float
    timeout_s: float
    number: int = -1
    moved: int = 0  # bytes sent or received
    ready: bool = False  # the other side is
    outgoing: bool = False
    arrived: Callable[[], None] | None = None


class PointToPoint:
    """All sends and receives of one communicator. Calls may come from any thread."""

    def __init__(self, transport: Transport, epoch: int, stats: Stats) -> None:
        self._transport = transport
        self._stats = stats
        self._heads = {kind: Signature("send", kind=kind).pack(epoch, 0) for kind in range(5)}
        self._lock = threading.Condition()
        self._posted: list[Message] = []
        self._sending: dict[tuple[int, int], Message] = {}
        self._receiving: dict[tuple[int, int], Message] = {}
        self._wanted: list[Message] = []
        self._announced: list[tuple[int, Announcement]] = []
        # Messages that this side gave up while the other may still answer or send.
        self._abandoned_sends: set[tuple[int, int]] = set()
        self._abandoned_receives: set[tuple[int, int]] = set()
        self._control: dict[int, deque[tuple[int, bytes]]] = {}
        self._next_number = 0
        self._indices = {"out": [0] * transport.world_size, "in": [0] * transport.world_size}
        self._thread: threading.Thread | None = None
        self._stop: SquinchError | None = None
        self._tell_peers = False

    def post(self, message: Message) -> None:
        """Starts a message; its Work finishes when its array may be used again."""
        with self._lock:
            if self._stop is not None:
                raise CommunicatorAborted(f"{message.work.op} not started: {self._stop}", rank=self._transport.rank)
            self._posted.append(message)
            self._need_thread()
            self._lock.notify_all()
        self._transport.wake()

    def _need_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="squinchcomm-p2p", daemon=True)
            self._thread.start()

    def stop(self, reason: SquinchError, *, tell_peers: bool) -> bool:
        """Ends everything pending with `reason`; False if that does not end. Any thread; idempotent.

        With `tell_peers` those who wait for this rank raise the same; else they learn of it when the transport is closed.
        """
        with self._lock:
            if self._stop is None:
                self._stop, self._tell_peers = reason, tell_peers
                if tell_peers and self._transport.world_size > 1:
                    self._need_thread()
            self._lock.notify_all()
        self._transport.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
            return not self._thread.is_alive()
        return True

    def _pending(self) -> list[Message]:
        return [*self._sending.values(), *self._receiving.values(), *self._wanted]

    def _loop(self) -> None:
        stop = None
        while stop is None:
            with self._lock:
                self._lock.wait_for(lambda: self._posted or self._stop or self._control or self._pending())
                posted, self._posted = self._posted, []
                stop = self._stop
            try:
                while posted:
                    self._start(posted[0])
                    del posted[0]
                if stop is None:
                    self._progress()
                else:
                    self._send_some()  # answers already given: their senders must not lose what was received
            except Exception as error:  # also a fault of ours must not leave callers waiting
                if not isinstance(error, SquinchError):
                    error = CommunicatorAborted(f"point-to-point failed: {error!r}", rank=self._transport.rank)
                with self._lock:
                    self._posted = posted + self._posted
                    if self._stop is None:
                        self._stop, self._tell_peers = error, True
                    stop = self._stop
        try:
            if self._tell_peers:
                self._send_failure(stop)
        finally:
            self._end_all(stop)

    def _send_failure(self, error: SquinchError) -> None:
        payload = pack_failure(error)
        for peer in range(self._transport.world_size):
            if peer != self._transport.rank and peer not in self._transport.lost:
                self._send(peer, wire.ERROR, 0, payload, len(payload), urgent=True)

    def _start(self, message: Message) -> None:
        if not message.outgoing:
            self._want(message)
            return
        assert message.peer is not None
        message.number = self._next_number
        self._next_number += 1
        inline = message.data.tobytes() if message.data.size <= INLINE_BYTES else None
        note = Announcement(message.number, message.tag, wire.DTYPE_CODES[message.dtype], message.count, inline)
        self._tell(message.peer, wire.ANNOUNCE, note)
        self._sending[message.peer, message.number] = message

    def _progress(self) -> None:
        sent = self._send_some()
        lost = dict(self._transport.lost)  # before the wait: what they sent is here, and comes first
        frame = self._transport.recv(0 if sent else self._patience())
        while frame is not None:
            self._take(frame)
            frame = self._transport.recv(0)
        self._check_peers_and_deadlines(lost)

    def _patience(self) -> float:
        nearest = min((message.deadline - time.monotonic() for message in self._pending()), default=_SLICE_S)
        return max(0.0, min(_SLICE_S, nearest))

    def _tell(self, peer: int, kind: int, note: Announcement | Answer) -> None:
        self._control.setdefault(peer, deque()).append((kind, msgspec.msgpack.encode(note)))

    def _send_some(self) -> bool:
        sent = False
        for peer, queue in list(self._control.items()):
            while queue and self._transport.can_send(peer):
                kind, payload = queue.popleft()
                self._send(peer, kind, 0, payload, len(payload))
                sent = True
            if not queue:
                del self._control[peer]
        for (peer, number), message in list(self._sending.items()):
            if message.ready and message.moved < message.data.size and self._transport.can_send(peer):
                chunk = message.data[message.moved : message.moved + MAX_CHUNK_BYTES]
                self._send(peer, wire.DATA, number, chunk, chunk.size)
                message.moved += chunk.size
                sent = True
        return sent

    def _send(
        self, peer: int, kind: int, number: int, payload: bytes | np.ndarray, nbytes: int, *, urgent: bool = False
    ) -> None:
        out = self._indices["out"]
        crc = wire.payload_crc(payload)
        header = wire.frame_header(self._heads[kind], out[peer], 0, number % wire.MAX_CHUNK, nbytes, crc)
        self._transport.send(peer, header, payload, urgent=urgent)
        out[peer] += 1
        self._stats.messages.sent_bytes += nbytes + wire.HEADER_BYTES

    def _take(self, frame: Frame) -> None:
        peer = frame.peer
        payload = np.frombuffer(frame.payload, np.uint8)
        fault = wire.check_frame(frame.header, payload, self._indices["in"][peer])
        kind = next((kind for kind, head in self._heads.items() if frame.header.startswith(head)), None)
        if fault or kind is None:
            self._stats.frames_corrupt += 1
            raise self._error(WireFormatError, f"a frame from rank {peer} is damaged: {fault or 'unknown kind or epoch'}", peer)
        self._indices["in"][peer] += 1
        self._stats.messages.received_bytes += payload.size + wire.HEADER_BYTES
        try:
            if kind == wire.ERROR:
                raise told_failure(payload, self._transport.rank, peer)
            if kind == wire.DATA:
                self._take_data(peer, wire.frame_part(frame.header)[1], payload)
            elif kind == wire.ANNOUNCE:
                self._take_announcement(peer, msgspec.msgpack.decode(payload.tobytes(), type=Announcement))
            else:
                self._take_answer(peer, msgspec.msgpack.decode(payload.tobytes(), type=Answer))
        except msgspec.MsgspecError as error:
            raise self._error(WireFormatError, f"rank {peer} sent an unreadable message: {error}", peer) from None
        finally:
            frame.release()

    def _take_data(self, peer: int, number: int, payload: np.ndarray) -> None:
        if (peer, number) in self._abandoned_receives:
            return
        message = self._receiving.get((peer, number))
        if message is None or message.moved + payload.size > message.data.size:
            raise self._error(WireFormatError, f"rank {peer} sent data that was not asked for", peer)
        message.data[message.moved : message.moved + payload.size] = payload
        message.moved += payload.size
        if message.moved == message.data.size:
            self._tell(peer, wire.CLEAR, Answer(message.number, None))
            self._finish(self._receiving, (peer, number), source=peer)

    def _take_answer(self, peer: int, answer: Answer) -> None:
        key = (peer, answer.number)
        if key in self._abandoned_sends:
            if answer.refusal is None:
                self._tell(peer, wire.REFUSE, Answer(answer.number, _GIVEN_UP))
            return
        if answer.refusal == _GIVEN_UP:
            self._sender_gave_up(peer, answer.number)
            return
        message = self._sending.get(key)
        if message is None:
            raise self._error(WireFormatError, f"rank {peer} answered a message that was not sent", peer)
        if answer.refusal is not None:
            self._finish(self._sending, key, self._error(MismatchError, answer.refusal, peer, message))
        elif message.ready or message.data.size <= INLINE_BYTES:
            self._finish(self._sending, key)
        else:
            message.ready = True

    def _sender_gave_up(self, peer: int, number: int) -> None:
        key = (peer, number % wire.MAX_CHUNK)
        message = self._receiving.get(key)
        if message is not None:
            self._finish(self._receiving, key, self._error(CollectiveTimeout, f"rank {peer} {_GIVEN_UP}", peer, message))

    def _take_announcement(self, peer: int, note: Announcement) -> None:
        """Gives an announcement to the oldest receive that wants it, or keeps it."""
        wanted = next((m for m in self._wanted if m.peer in (None, peer) and m.tag == note.tag), None)
        if wanted is not None:
            self._wanted.remove(wanted)
            self._accept(peer, note, wanted)
            return
        if len(self._announced) >= MAX_ANNOUNCED:
            raise self._error(WireFormatError, f"{MAX_ANNOUNCED} messages wait here and nobody receives them", peer)
        self._announced.append((peer, note))

    def _want(self, message: Message) -> None:
        """Gives a receive the oldest announcement that fits, or keeps it."""
        for index, (peer, note) in enumerate(self._announced):
            if message.peer in (None, peer) and message.tag == note.tag:
                del self._announced[index]
                self._accept(peer, note, message)
                return
        self._wanted.append(message)

    def _accept(self, peer: int, note: Announcement, message: Message) -> None:
        key = (peer, note.number % wire.MAX_CHUNK)
        if key in self._receiving:
            raise self._error(WireFormatError, f"rank {peer} announced message {note.number} twice", peer)
        self._receiving[key] = message
        message.peer = peer
        message.number = note.number
        sent = wire.DTYPES[note.dtype] if 0 <= note.dtype < len(wire.DTYPES) else None
        if sent != message.dtype or note.count != message.count:
            refusal = (
                f"rank {peer} sends {note.count} elements of {'?' if sent is None else dtype_name(sent)} with tag {note.tag}; "
                f"rank {self._transport.rank} receives {message.count} of {dtype_name(message.dtype)}"
            )
            self._tell(peer, wire.REFUSE, Answer(note.number, refusal))
            self._finish(self._receiving, key, self._error(MismatchError, refusal, peer, message))
            return
        self._tell(peer, wire.CLEAR, Answer(note.number, None))
        if note.data is not None:
            if len(note.data) != message.data.size:
                raise self._error(
                    WireFormatError, f"rank {peer} announced {note.count} elements and sent {len(note.data)} bytes", peer
                )
            message.data[:] = np.frombuffer(note.data, np.uint8)
            self._finish(self._receiving, key, source=peer)

    def _check_peers_and_deadlines(self, lost: dict[int, str]) -> None:
        now = time.monotonic()
        if not lost and not any(message.deadline <= now for message in self._pending()):
            return
        for table, abandoned in (
            (self._sending, self._abandoned_sends),
            (self._receiving, self._abandoned_receives),
        ):
            for key, message in list(table.items()):
                if key[0] in lost:
                    self._finish(table, key, self._lost(key[0], message))
                elif message.deadline <= now:
                    if message.outgoing and message.ready:
                        raise self._timed_out(message)  # its memory is on the way: only an end of everything frees it
                    abandoned.add(key)
                    self._finish(table, key, self._timed_out(message))
        for message in list(self._wanted):
            gone = self._nobody_left(message, lost)
            if gone is not None or message.deadline <= now:
                self._wanted.remove(message)
                self._end(message, self._timed_out(message) if gone is None else self._lost(gone, message))

    def _nobody_left(self, message: Message, lost: dict[int, str]) -> int | None:
        """A lost rank that this receive waits for in vain; for any source, only when all others are lost."""
        if message.peer is not None:
            return message.peer if message.peer in lost else None
        return next(iter(lost)) if len(lost) == self._transport.world_size - 1 else None

    def _lost(self, peer: int | None, message: Message) -> SquinchError:
        assert peer is not None
        return self._error(PeerLost, f"rank {peer} was lost: {self._transport.lost[peer]}", peer, message)

    def _timed_out(self, message: Message) -> SquinchError:
        who = "any rank" if message.peer is None else f"rank {message.peer}"
        what = "receive" if message.outgoing else "send"
        return self._error(
            CollectiveTimeout,
            f"no end after {message.timeout_s:g} s: {who} made no matching {what} with tag {message.tag}",
            message.peer,
            message,
        )

    def _finish(
        self,
        table: dict[tuple[int, int], Message],
        key: tuple[int, int],
        error: Exception | None = None,
        source: int | None = None,
    ) -> None:
        message = table.pop(key)
        if error is None and message.arrived is not None:
            try:
                message.arrived()
            except Exception as caught:
                error = caught
        self._end(message, error, source)

    def _end(self, message: Message, error: Exception | None, source: int | None = None) -> None:
        if error is not None:
            self._stats.count_failure("send", error)
        else:
            self._stats.messages.calls += 1
            self._stats.messages.raw_bytes += message.data.size if message.outgoing else 0
        message.work.finish(error, source)

    def _end_all(self, reason: SquinchError) -> None:
        with self._lock:
            posted, self._posted = self._posted, []
        for message in (*self._pending(), *posted):
            self._end(message, reason)
        self._sending.clear()
        self._receiving.clear()
        self._wanted.clear()

    def _error(self, kind: type[SquinchError], text: str, peer: int | None, message: Message | None = None) -> SquinchError:
        name = message.work.op if message else "send/recv"
        return kind(f"{name} on rank {self._transport.rank}: {text}", rank=self._transport.rank, peer=peer, op=name)
