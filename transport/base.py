"""The transport contract: frames of bytes between the ranks of one group, in order, bounded, with an end to every wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar


class Frame(ABC):
    """One received frame. Its memory is valid until `release`, which also lets the sender send one more."""

    __slots__ = ("header", "payload", "peer")

    peer: int
    header: bytes
    payload: memoryview  # C-contiguous, format "B", read only; empty if the sender gave none
    in_place: ClassVar[bool] = False  # the payload lies where its sender wrote it: it never left this machine's memory

    @abstractmethod
    def release(self) -> None:
        """Gives the frame's place in the window back to the sender. Call exactly once, from the receiving thread."""


class Transport(ABC):
    """Frames between the ranks of one group.

    A frame is a small header (at most `MAX_HEADER_BYTES`) and a payload (at most `max_payload_bytes`). Frames from one peer arrive in the
    order sent, each once or, if the peer is lost, not at all. A peer may have at most `window` frames sent but not
    released; `can_send` says whether one more fits. All calls come from one thread at a time, except `wake`.
    """

    MAX_HEADER_BYTES: ClassVar[int] = 4096
    holds_sent: ClassVar[bool] = False  # what `send` has taken may be lost if the process ends without `close`

    name: str  # "zmq", "inproc"
    rank: int
    world_size: int
    hosts: tuple[str, ...]  # host identity of each rank: equal strings share a machine
    encrypted: bool
    max_payload_bytes: int
    window: int
    sharing: frozenset[int] = frozenset()  # peers that read what `allocate` gives in place
    unshared_payloads: int = 0  # payloads to peers on this host that went through sockets for want of memory

    def allocate(self, nbytes: int, peers: Collection[int]) -> Any | None:
        """Memory for one payload if that saves copies on the way to some of these peers, else None.

        It has NumPy's array interface: write to an array over it, send that, to several peers if need be, and forget it. It is
        free again when nothing refers to it and all have released it. Any thread.
        """
        return None

    @abstractmethod
    def can_send(self, peer: int) -> bool:
        """True if `send(peer, ...)` would be taken now. Always True for a lost peer, whose frames are dropped."""

    @abstractmethod
    def send(self, peer: int, header: bytes, payload: Any = b"", *, borrow: bool = False, urgent: bool = False) -> None:
        """Queues one frame; never blocks.

        The payload is any C-contiguous buffer. It may go out without a copy, so it must not change while on its way: a
        buffer that the caller gives away (nobody writes to it again) needs nothing more; with `borrow=True` the caller
        gets it back when `flush` returns True. One `urgent` frame goes out although the window is full: a last word.

        Raises:
            BlockingIOError: the peer's window is full.
            ValueError: header or payload too large.
        """

    @abstractmethod
    def recv(self, timeout_s: float) -> Frame | None:
        """The next frame from any peer, or None: after `timeout_s` seconds, `wake`, a window that opened, or soon (0.3 s) after a loss.

        With 0 it only looks. Frames that arrived before their sender was lost are still delivered.
        """

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Waits until every borrowed payload may be written to again; False if that took too long."""

    @property
    @abstractmethod
    def lost(self) -> Mapping[int, str]:
        """Lost peers, each with the reason in words ("connection closed", "no sign of life for 5.0 s", "closed its communicator")."""

    @property
    @abstractmethod
    def sent_bytes(self) -> Sequence[int]:
        """Bytes sent to each peer, headers included."""

    @property
    @abstractmethod
    def received_bytes(self) -> Sequence[int]:
        """Bytes received from each peer, headers included."""

    @property
    @abstractmethod
    def rejected_peers(self) -> int:
        """Connections refused before any frame of theirs was read (failed handshake or authentication)."""

    @abstractmethod
    def wake(self) -> None:
        """Makes a `recv` that is waiting in another thread return None within 0.1 s. Any thread; idempotent; safe after close."""

    @abstractmethod
    def close(self, linger_s: float = 1.0) -> None:
        """Delivers what was sent, for at most `linger_s`, tells peers goodbye, frees sockets, threads and files. Idempotent."""


class Listener(ABC):
    """A place where peers can reach this process, before it is known who they are."""

    address: bytes  # opaque; exchanged between all ranks by a rendezvous

    @abstractmethod
    def connect(self, rank: int, addresses: Sequence[bytes], timeout_s: float) -> Transport:
        """Joins the group whose rank i listens at `addresses[i]`; called once, by all ranks. Takes over this listener.

        Raises:
            PeerLost: a peer could not be reached or refused us within `timeout_s`; names it.
            ConfigError: addresses that no group can have (no common scheme, different security).
        """

    @abstractmethod
    def close(self) -> None:
        """Gives up without connecting. Idempotent."""


class Backend(ABC):
    """A kind of transport, with its options."""

    name: ClassVar[str]

    @abstractmethod
    def listen(self) -> Listener:
        """Opens a listener. Raises ConfigError if the interface or port cannot be had, saying which and what to do."""
