"""Transports of other processes, driven by rank 0 as if they were its own, so that the checks for threads run over processes.

Each process serves one transport. Requests and answers travel by MPI_COMM_WORLD, beside the transports' own traffic.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from mpi4py import MPI

from squinchcomm import errors
from squinchcomm.transport.base import Frame, Transport
from squinchcomm.transport.mpi_backend import MpiBackend
from squinchcomm.transport.mpi_world import join_world
from squinchcomm.transport.options import TransportOptions

WORLD = MPI.COMM_WORLD
_REQUEST_TAG = 1
_POLL_S = 0.0005
_ATTRIBUTES = (
    "rank world_size hosts encrypted max_payload_bytes window sharing unshared_payloads lost sent_bytes received_bytes rejected_peers"
).split()
_numbers = itertools.count(2)
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, BlockingIOError, RuntimeError, AssertionError, errors.CommunicatorAborted, errors.PeerLost)
}


def listen(options: dict[str, Any]) -> Any:
    return MpiBackend(TransportOptions(**options), join_world(None, 10.0)).listen()


def connect(world_size: int, **options: Any) -> list[Transport]:
    """A group whose rank r is MPI's rank r; rank 0's transport is a real one, the others stand for those of other processes."""
    listener = listen(options)
    addresses = [listener.address, *(_ask(peer, "listen", options) for peer in range(1, world_size))]
    threads = [threading.Thread(target=_ask, args=(peer, "connect", addresses)) for peer in range(1, world_size)]
    for thread in threads:
        thread.start()
    own = listener.connect(0, addresses, 10.0)
    for thread in threads:
        thread.join()
    return [own, *(RemoteTransport(peer) for peer in range(1, world_size))]


class RemoteTransport:
    """Looks like a transport."""

    name = "mpi"

    def __init__(self, peer: int) -> None:
        self._peer = peer

    def __getattr__(self, name: str) -> Any:
        if name not in _ATTRIBUTES:
            raise AttributeError(name)
        value = _ask(self._peer, "attribute", name)
        return frozenset(value) if name == "sharing" else value

    def send(self, peer: int, header: bytes, payload: Any = b"", **keywords: Any) -> None:
        _ask(self._peer, "send", peer, header, memoryview(payload).tobytes(), keywords)

    def recv(self, timeout_s: float) -> RemoteFrame | None:
        found = _ask(self._peer, "recv", timeout_s)
        return None if found is None else RemoteFrame(self._peer, *found)

    def can_send(self, peer: int) -> bool:
        return bool(_ask(self._peer, "can_send", peer))

    def flush(self, timeout_s: float) -> bool:
        return bool(_ask(self._peer, "flush", timeout_s))

    def wake(self) -> None:
        _ask(self._peer, "wake")

    def close(self, linger_s: float = 1.0) -> None:
        _ask(self._peer, "close", linger_s)


class RemoteFrame:
    """A frame that another process holds."""

    def __init__(self, holder: int, number: int, peer: int, header: bytes, payload: bytes, in_place: bool) -> None:
        self._holder, self._number = holder, number
        self.peer, self.header, self.payload, self.in_place = peer, header, memoryview(payload), in_place

    def release(self) -> None:
        _ask(self._holder, "release", self._number)


def _ask(peer: int, what: str, *arguments: Any) -> Any:
    number = next(_numbers)
    WORLD.Send([msgspec.msgpack.encode((number, what, arguments)), MPI.BYTE], peer, _REQUEST_TAG)
    message = _await_message(peer, number)
    error, result = msgspec.msgpack.decode(message)
    if error is not None:
        raise _KINDS.get(error[0], RuntimeError)(error[1])
    return {int(key): value for key, value in result.items()} if what == "attribute" and isinstance(result, dict) else result


def _await_message(source: int, tag: int) -> bytes:
    status = MPI.Status()
    while (message := WORLD.Improbe(source, tag, status)) is None:
        time.sleep(_POLL_S)
    buffer = bytearray(status.Get_count(MPI.BYTE))
    message.Recv([buffer, MPI.BYTE])
    return bytes(buffer)


def dismiss() -> None:
    """Ends the servers."""
    for peer in range(1, WORLD.size):
        _ask(peer, "dismiss")


class Server:
    """Answers rank 0's requests, each in a thread: a `wake` must get through while a `recv` waits."""

    def __init__(self) -> None:
        self._listener: Any = None
        self._transport: Any = None
        self._frames: dict[int, Frame] = {}
        self._held = itertools.count()

    def serve(self) -> None:
        threads: list[threading.Thread] = []
        while True:
            number, what, arguments = msgspec.msgpack.decode(_await_message(0, _REQUEST_TAG))
            threads = [thread for thread in threads if thread.is_alive()]
            if what == "dismiss":
                for thread in threads:
                    thread.join()
                self._answer(number, lambda: None, ())
                return
            threads.append(threading.Thread(target=self._answer, args=(number, getattr(self, f"do_{what}"), arguments)))
            threads[-1].start()

    def _answer(self, number: int, call: Callable[..., Any], arguments: Any) -> None:
        try:
            answer: Any = (None, call(*arguments))
        except Exception as error:
            answer = ((type(error).__name__, str(error)), None)
        WORLD.Send([msgspec.msgpack.encode(answer), MPI.BYTE], 0, number)

    def do_listen(self, options: dict[str, Any]) -> bytes:
        self._listener = listen(options)
        self._frames.clear()
        return bytes(self._listener.address)

    def do_connect(self, addresses: list[bytes]) -> None:
        self._transport = self._listener.connect(WORLD.rank, addresses, 10.0)

    def do_attribute(self, name: str) -> Any:
        value = getattr(self._transport, name)
        return dict(value) if name == "lost" else list(value) if name == "sharing" else value

    def do_send(self, peer: int, header: bytes, payload: bytes, keywords: dict[str, bool]) -> None:
        self._transport.send(peer, header, payload, **keywords)

    def do_recv(self, timeout_s: float) -> Any:
        frame = self._transport.recv(timeout_s)
        if frame is None:
            return None
        payload = frame.payload
        assert payload.readonly and payload.format == "B" and payload.ndim == 1 and payload.c_contiguous
        assert type(frame.header) is bytes
        number = next(self._held)
        self._frames[number] = frame
        return number, frame.peer, frame.header, payload.tobytes(), frame.in_place

    def do_release(self, number: int) -> None:
        self._frames.pop(number).release()

    def do_can_send(self, peer: int) -> bool:
        return bool(self._transport.can_send(peer))

    def do_flush(self, timeout_s: float) -> bool:
        return bool(self._transport.flush(timeout_s))

    def do_wake(self) -> None:
        self._transport.wake()

    def do_close(self, linger_s: float) -> None:
        self._transport.close(linger_s)
