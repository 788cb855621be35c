"""Ranks as threads of one process: the whole contract, no sockets, nothing left to chance."""

from __future__ import annotations

import secrets
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from squinchcomm.errors import CommunicatorAborted, ConfigError, PeerLost

from .base import Backend, Frame, Listener, Transport
from .options import TransportOptions

HOST = "inproc"

_mailboxes: weakref.WeakValueDictionary[bytes, Mailbox] = weakref.WeakValueDictionary()


class Mailbox:
    """What has arrived for one rank, and how many unreleased frames each peer has here."""

    def __init__(self, host: str = HOST) -> None:
        self.host = host
        self.changed = threading.Condition()
        self.frames: deque[InprocFrame] = deque()
        self.held: dict[int, int] = {}
        self.lost: dict[int, str] = {}
        self.woken = False
        self.closed = False

    def deliver(self, frame: InprocFrame) -> None:
        with self.changed:
            if not self.closed:
                self.held[frame.peer] = self.held.get(frame.peer, 0) + 1
                self.frames.append(frame)
                self.changed.notify_all()

    def lose(self, peer: int, reason: str) -> None:
        with self.changed:
            if peer not in self.lost:
                self.lost[peer] = reason
                self.woken = True
                self.changed.notify_all()


class InprocFrame(Frame):
    """A frame whose payload is the sender's own memory."""

    __slots__ = ("_mailbox", "_sender")

    def __init__(self, mailbox: Mailbox, sender: Mailbox, peer: int, header: bytes, payload: memoryview) -> None:
        self._mailbox = mailbox
        self._sender = sender
        self.peer = peer
        self.header = header
        self.payload = payload

    def release(self) -> None:
        with self._mailbox.changed:
            self._mailbox.held[self.peer] -= 1
        with self._sender.changed:
            self._sender.woken = True
            self._sender.changed.notify_all()


class InprocTransport(Transport):
    """Frames between threads."""

    name = "inproc"
    encrypted = False
    rejected_peers = 0

    def __init__(self, rank: int, mailbox: Mailbox, peers: dict[int, Mailbox], options: TransportOptions) -> None:
        self.rank = rank
        self.world_size = len(peers) + 1
        self.hosts = tuple((mailbox if each == rank else peers[each]).host for each in range(self.world_size))
        self.max_payload_bytes = options.max_payload_bytes
        self.window = options.window
        self._mailbox = mailbox
        self._peers = peers
        self._sent = [0] * self.world_size
        self._received = [0] * self.world_size
        self._vanish = weakref.finalize(self, _leave, rank, mailbox, peers, "connection closed")
        self._vanish.atexit = False

    def can_send(self, peer: int) -> bool:
        if not self._vanish.alive:
            raise CommunicatorAborted("this communicator is closed", rank=self.rank)
        if peer == self.rank:
            raise ValueError(f"rank {peer} cannot send to itself")
        return peer in self._mailbox.lost or self._peers[peer].held.get(self.rank, 0) < self.window

    def send(self, peer: int, header: bytes, payload: Any = b"", *, borrow: bool = False, urgent: bool = False) -> None:
        if not urgent and not self.can_send(peer):
            raise BlockingIOError(f"the window of rank {peer} is full: {self.window} frames are not released yet")
        view = memoryview(payload).cast("B").toreadonly()
        if len(header) > self.MAX_HEADER_BYTES or len(view) > self.max_payload_bytes:
            raise ValueError(f"header of {len(header)} bytes or payload of {len(view)} bytes is too large")
        if peer in self._mailbox.lost:
            return
        if borrow:
            view = memoryview(bytes(view))
        self._sent[peer] += len(header) + len(view)
        self._peers[peer].deliver(InprocFrame(self._peers[peer], self._mailbox, self.rank, bytes(header), view))

    def recv(self, timeout_s: float) -> Frame | None:
        box = self._mailbox
        if not self._vanish.alive:
            raise CommunicatorAborted("this communicator is closed", rank=self.rank)
        with box.changed:
            if timeout_s > 0:
                box.changed.wait_for(lambda: box.frames or box.woken, timeout_s)
            if not box.frames:
                box.woken = False
                return None
            frame = box.frames.popleft()
        self._received[frame.peer] += len(frame.header) + len(frame.payload)
        return frame

    def flush(self, timeout_s: float) -> bool:
        return True

    @property
    def lost(self) -> Mapping[int, str]:
        return self._mailbox.lost

    @property
    def sent_bytes(self) -> Sequence[int]:
        return self._sent

    @property
    def received_bytes(self) -> Sequence[int]:
        return self._received

    def wake(self) -> None:
        with self._mailbox.changed:
            self._mailbox.woken = True
            self._mailbox.changed.notify_all()

    def close(self, linger_s: float = 1.0) -> None:
        if self._vanish.detach() is not None:
            _leave(self.rank, self._mailbox, self._peers, "closed its communicator")


class InprocListener(Listener):
    """A mailbox that other threads can find by its address."""

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        self._mailbox: Mailbox | None = Mailbox(options.host if options.host is not None else HOST)
        self.address = secrets.token_bytes(16)
        _mailboxes[self.address] = self._mailbox

    def connect(self, rank: int, addresses: Sequence[bytes], timeout_s: float) -> Transport:
        if self._mailbox is None:
            raise RuntimeError("this listener is closed or already connected")
        if addresses[rank] != self.address:
            raise ConfigError(f"rank {rank} listens elsewhere than at addresses[{rank}]")
        mailbox, self._mailbox = self._mailbox, None
        peers: dict[int, Mailbox] = {}
        for peer, address in enumerate(addresses):
            if peer == rank:
                continue
            found = _mailboxes.get(bytes(address))
            if found is None or found.closed:
                raise PeerLost(f"rank {peer} has no listener in this process any more", rank=rank, peer=peer)
            peers[peer] = found
        return InprocTransport(rank, mailbox, peers, self._options)

    def close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.closed = True
            self._mailbox = None


class InprocBackend(Backend):
    """Threads of one process."""

    name = "inproc"

    def __init__(self, options: TransportOptions) -> None:
        if options.link_rate is not None:
            raise ConfigError("the inproc transport has no link whose rate could be limited")
        self._options = options

    def listen(self) -> Listener:
        return InprocListener(self._options)


class InprocRendezvous:
    """Threads meet here, each with a blob, and leave with everybody's. Round after round, like a barrier."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.guests = 0
        self._changed = threading.Condition()
        self._blobs: dict[int, bytes] = {}
        self._round = 0
        self._result: list[bytes] = []
        self._missing: list[int] = []

    def exchange(self, rank: int, blob: bytes, timeout_s: float) -> list[bytes]:
        """The blobs of all ranks, in rank order.

        Raises:
            ConfigError: the rank is out of range or somebody else has it.
            PeerLost: names the ranks that did not come in time.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is not in a world of {self.world_size}")
        with self._changed:
            if rank in self._blobs:
                raise ConfigError(f"two callers say they are rank {rank}")
            self._blobs[rank] = blob
            mine = self._round
            if len(self._blobs) == self.world_size:
                self._end_round([self._blobs[each] for each in range(self.world_size)], [])
            elif not self._changed.wait_for(lambda: self._round > mine, timeout_s):
                self._end_round([], [each for each in range(self.world_size) if each not in self._blobs])
            if self._missing:
                reason = f"{named(self._missing)} did not come within {timeout_s:g} s"
                raise PeerLost(f"no group was formed: {reason}", rank=rank, peer=self._missing[0])
            return list(self._result)

    def _end_round(self, result: list[bytes], missing: list[int]) -> None:
        self._result, self._missing, self._blobs = result, missing, {}
        self._round += 1
        self._changed.notify_all()


def named(ranks: list[int]) -> str:
    """Ranks in words, the first 16 of them."""
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:16]))}{more}"


_meetings: dict[tuple[str, str], InprocRendezvous] = {}
_meetings_lock = threading.Lock()


def meet_in_process(key: tuple[str, str], rank: int, world_size: int, blob: bytes, timeout_s: float) -> list[bytes]:
    """A rendezvous of threads by address and group; see `rendezvous.exchange`."""
    with _meetings_lock:
        meeting = _meetings.setdefault(key, InprocRendezvous(world_size))
        if meeting.world_size != world_size:
            raise ConfigError(f"rank {rank} expects {world_size} ranks at {key[0]}, others expect {meeting.world_size}")
        meeting.guests += 1
    try:
        return meeting.exchange(rank, blob, timeout_s)
    finally:
        with _meetings_lock:
            meeting.guests -= 1
            if meeting.guests == 0:
                del _meetings[key]


def _leave(rank: int, mailbox: Mailbox, peers: dict[int, Mailbox], reason: str) -> None:
    with mailbox.changed:
        mailbox.closed = True
        mailbox.frames.clear()
    for peer in peers.values():
        peer.lose(rank, reason)
