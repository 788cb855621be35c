"""A transport that damages what it delivers, on purpose and countably."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from squinchcomm.transport.base import Backend, Frame, Listener, Transport

Damage = Callable[[Frame], list[Frame]]


class LooseFrame(Frame):
    """A frame of any content; releasing it releases the real frame it was made from, if that has not happened yet."""

    __slots__ = ("_origin",)

    def __init__(self, origin: Frame | None, peer: int, header: bytes, payload: bytes) -> None:
        self._origin = origin
        self.peer = peer
        self.header = header
        self.payload = memoryview(payload)

    def release(self) -> None:
        if self._origin is not None:
            self._origin.release()
            self._origin = None


class FaultyTransport(Transport):
    """Passes everything on, and each received frame through `damage`, which returns what arrives instead."""

    def __init__(self, inner: Transport, damage: Damage) -> None:
        self._inner = inner
        self._damage = damage
        self._due: deque[Frame] = deque()
        self.name = inner.name
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.hosts = inner.hosts
        self.encrypted = inner.encrypted
        self.max_payload_bytes = inner.max_payload_bytes
        self.window = inner.window

    def recv(self, timeout_s: float) -> Frame | None:
        if not self._due:
            frame = self._inner.recv(timeout_s)
            if frame is None:
                return None
            self._due.extend(self._damage(frame))
        return self._due.popleft() if self._due else None

    def can_send(self, peer: int) -> bool:
        return self._inner.can_send(peer)

    def send(self, peer: int, header: bytes, payload: Any = b"", *, borrow: bool = False, urgent: bool = False) -> None:
        self._inner.send(peer, header, payload, borrow=borrow, urgent=urgent)

    def flush(self, timeout_s: float) -> bool:
        return self._inner.flush(timeout_s)

    @property
    def lost(self) -> Mapping[int, str]:
        return self._inner.lost

    @property
    def sent_bytes(self) -> Sequence[int]:
        return self._inner.sent_bytes

    @property
    def received_bytes(self) -> Sequence[int]:
        return self._inner.received_bytes

    @property
    def rejected_peers(self) -> int:
        return self._inner.rejected_peers

    def wake(self) -> None:
        self._inner.wake()

    def close(self, linger_s: float = 1.0) -> None:
        self._inner.close(linger_s)


class _FaultyListener(Listener):
    def __init__(self, inner: Listener, damage: Damage) -> None:
        self._inner = inner
        self._damage = damage
        self.address = inner.address

    def connect(self, rank: int, addresses: Sequence[bytes], timeout_s: float) -> Transport:
        return FaultyTransport(self._inner.connect(rank, addresses, timeout_s), self._damage)

    def close(self) -> None:
        self._inner.close()


class FaultyBackend(Backend):
    """Wraps a backend so that this rank receives through `damage`."""

    name = "faulty"

    def __init__(self, inner: Backend, damage: Damage) -> None:
        self._inner = inner
        self._damage = damage

    def listen(self) -> Listener:
        return _FaultyListener(self._inner.listen(), self._damage)
