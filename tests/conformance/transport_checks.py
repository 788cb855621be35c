"""What every transport must do: one function a behaviour, each given a `Group` factory. Runs ranks as threads of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from squinchcomm.errors import CommunicatorAborted
from squinchcomm.transport.base import Frame, Transport
from squinchcomm.transport.options import TransportOptions
from squinchcomm.transport.registry import get_backend

Connect = Callable[..., list[Transport]]


def connect_group(
    name: str, world_size: int, rewrite: Callable[[int, bytes], bytes] | None = None, **options: Any
) -> list[Transport]:
    """A group whose ranks all live in this process. `rewrite(rank, address)` may change what others are told of a rank."""
    listeners = [get_backend(name, TransportOptions(**options)).listen() for _ in range(world_size)]
    told = [listener.address for listener in listeners]
    if rewrite is not None:
        told = [rewrite(rank, address) for rank, address in enumerate(told)]
    results: list[Any] = [None] * world_size

    def join(rank: int) -> None:
        addresses = [*told[:rank], listeners[rank].address, *told[rank + 1 :]]
        try:
            results[rank] = listeners[rank].connect(rank, addresses, 10.0)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            for other in results:
                if isinstance(other, Transport):
                    other.close(0)
            raise result
    return results


@contextmanager
def group(connect: Connect, world_size: int, **options: Any) -> Iterator[list[Transport]]:
    transports = connect(world_size, **options)
    try:
        yield transports
    finally:
        for transport in transports:
            transport.close(0.2)


def receive(transport: Transport, count: int = 1, timeout_s: float = 5.0) -> list[Frame]:
    """The next `count` frames, not released."""
    frames: list[Frame] = []
    deadline = time.monotonic() + timeout_s
    while len(frames) < count:
        left_s = deadline - time.monotonic()
        assert left_s > 0, f"{len(frames)} of {count} frames came; lost: {dict(transport.lost)}"
        frame = transport.recv(left_s)
        if frame is not None:
            frames.append(frame)
    return frames


def receive_and_release(transport: Transport) -> None:
    for frame in receive(transport):
        frame.release()


def await_loss(transport: Transport, peer: int, timeout_s: float) -> float:
    """Seconds until `peer` is lost, receiving meanwhile."""
    start = time.monotonic()
    while peer not in transport.lost:
        assert time.monotonic() - start < timeout_s, f"rank {peer} is not lost after {timeout_s} s"
        transport.recv(timeout_s)
    return time.monotonic() - start


def check_allocated_payload_arrives(connect: Connect) -> None:
    with group(connect, 3) as ranks:
        a = ranks[0]
        for number in range(3 * a.window):
            memory = a.allocate(70_000, (1, 2))
            payload = np.empty(70_000, np.uint8) if memory is None else np.asarray(memory)
            payload[:] = np.random.default_rng(number).integers(0, 256, payload.size, np.uint8)
            want = payload.tobytes()
            for peer in (1, 2):
                a.send(peer, b"", payload)
            del payload, memory
            for peer in (1, 2):
                (frame,) = receive(ranks[peer])
                assert frame.in_place == (0 in ranks[peer].sharing)
                assert bytes(frame.payload) == want
                frame.release()
            while not (a.can_send(1) and a.can_send(2)):
                a.recv(1.0)


def check_describes_itself(connect: Connect) -> None:
    with group(connect, 3) as ranks:
        for rank, transport in enumerate(ranks):
            assert (transport.rank, transport.world_size) == (rank, 3)
            assert len(transport.hosts) == 3
            assert len(set(transport.hosts)) == 1
            assert transport.window == TransportOptions().window
            assert transport.max_payload_bytes == TransportOptions().max_payload_bytes
            assert not transport.lost
            assert transport.rejected_peers == 0


def check_frames_arrive_whole_and_in_order(connect: Connect) -> None:
    sizes = [0, 1, 255, 4096, (32 << 10) - 1, 32 << 10, 65535, 65536, 300_001, 4 << 20]
    rng = np.random.default_rng(1)
    payloads = [rng.bytes(size) for size in sizes]
    with group(connect, 2) as (a, b):
        for number, payload in enumerate(payloads):
            a.send(1, b"header %d" % number, payload)
        for number, frame in enumerate(receive(b, len(sizes))):
            assert frame.peer == 0
            assert type(frame.header) is bytes
            assert frame.header == b"header %d" % number
            assert frame.payload == payloads[number]
            frame.release()


def check_payload_is_read_only_bytes(connect: Connect) -> None:
    with group(connect, 2) as (a, b):
        for size in (7, 100_000):
            a.send(1, b"", bytes(size))
            (frame,) = receive(b)
            assert frame.payload.readonly
            assert frame.payload.format == "B"
            assert frame.payload.ndim == 1
            assert frame.payload.c_contiguous
            assert frame.payload.nbytes == size
            frame.release()


def check_any_contiguous_buffer_can_be_sent(connect: Connect) -> None:
    small, large = np.arange(12, dtype=np.float32).reshape(3, 4), np.arange(30_000, dtype=np.int64).reshape(100, 300)
    with group(connect, 2) as (a, b):
        for buffer in (small, large, memoryview(large), bytearray(small.tobytes()), np.empty(0, np.float32), large[7]):
            for borrow in (False, True):
                a.send(1, b"x", buffer, borrow=borrow)
                (frame,) = receive(b)
                assert frame.payload == memoryview(buffer).tobytes()
                frame.release()
        assert a.flush(5.0)


def check_borrowed_buffer_is_free_after_flush(connect: Connect) -> None:
    buffer = bytearray(1 << 20)
    with group(connect, 2) as (a, b):
        for fill in range(1, 9):
            buffer[:] = bytes([fill]) * len(buffer)
            a.send(1, b"", buffer, borrow=True)
            assert a.flush(5.0)
        for fill, frame in enumerate(receive(b, 8), start=1):
            assert frame.payload == bytes([fill]) * len(buffer)
            frame.release()


def check_sizes_are_limited(connect: Connect) -> None:
    with group(connect, 2, max_payload_bytes=64 << 10) as (a, b):
        with pytest.raises(ValueError, match="too large"):
            a.send(1, b"x" * 4097)
        with pytest.raises(ValueError, match="too large"):
            a.send(1, b"", bytes((64 << 10) + 1))
        a.send(1, b"x" * 4096, bytes(64 << 10))
        assert len(receive(b)[0].header) == 4096


def check_no_rank_sends_to_itself(connect: Connect) -> None:
    with group(connect, 2) as (a, _), pytest.raises(ValueError, match="itself"):
        a.send(0, b"")


def check_window_limits_the_sender(connect: Connect) -> None:
    with group(connect, 3, window=4) as (a, b, c):
        for _ in range(4):
            assert a.can_send(1)
            a.send(1, b"")
        assert not a.can_send(1)
        with pytest.raises(BlockingIOError, match="window"):
            a.send(1, b"")
        assert a.can_send(2), "windows of peers are independent"
        c.send(0, b"")
        assert len(receive(a)) == 1
        frames = receive(b, 4)
        assert a.recv(0.05) is None
        assert not a.can_send(1), "received is not released"
        for frame in frames:
            frame.release()
        a.recv(0.3)
        assert a.can_send(1)


def check_opened_window_ends_a_wait(connect: Connect) -> None:
    with group(connect, 2, window=2) as (a, b):
        a.send(1, b"")
        a.send(1, b"")
        assert not a.can_send(1)
        frames = receive(b, 2)
        timer = threading.Timer(0.2, lambda: [frame.release() for frame in frames])
        timer.start()
        start = time.monotonic()
        while not a.can_send(1):
            assert a.recv(5.0) is None
        assert time.monotonic() - start < 0.4
        timer.join()


def check_one_way_traffic_flows(connect: Connect) -> None:
    """Nobody answers, so nothing but the transport itself can carry the news of released frames back."""
    with group(connect, 2, window=5) as (a, b):
        sent = received = 0
        deadline = time.monotonic() + 10
        while received < 500 and time.monotonic() < deadline:
            while sent < 500 and a.can_send(1):
                a.send(1, sent.to_bytes(4, "little"))
                sent += 1
            frame = b.recv(0.5)
            while frame is not None:
                assert frame.header == received.to_bytes(4, "little")
                received += 1
                frame.release()
                frame = b.recv(0)
            a.recv(0.0 if a.can_send(1) else 0.5)
        assert received == 500


def check_everybody_talks_to_everybody(connect: Connect) -> None:
    frames, world_size = 150, 4
    with group(connect, world_size, window=8) as ranks:
        failures: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                _talk(ranks[rank], frames)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        for rank, transport in enumerate(ranks):
            for peer in range(world_size):
                assert transport.sent_bytes[peer] == ranks[peer].received_bytes[rank] or peer == rank


def _talk(transport: Transport, frames: int) -> None:
    rng = np.random.default_rng(transport.rank)
    peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
    sent, seen = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0)
    deadline = time.monotonic() + 30
    while min(*sent.values(), *seen.values()) < frames:
        assert time.monotonic() < deadline, (sent, seen, dict(transport.lost))
        for peer in peers:
            if sent[peer] < frames and transport.can_send(peer):
                size = int(rng.choice([0, 100, 40_000, 200_000]))
                transport.send(peer, sent[peer].to_bytes(4, "little"), bytes([sent[peer] % 251]) * size)
                sent[peer] += 1
        frame = transport.recv(0.05)
        if frame is not None:
            assert int.from_bytes(frame.header, "little") == seen[frame.peer]
            assert frame.payload == bytes([seen[frame.peer] % 251]) * len(frame.payload)
            seen[frame.peer] += 1
            frame.release()
    # The last releases are told to peers here, so that the byte counts of both ends can be compared.
    until = time.monotonic() + 0.4
    while time.monotonic() < until:
        assert transport.recv(0.1) is None


def check_recv_returns_in_time(connect: Connect) -> None:
    with group(connect, 2) as (a, _):
        for timeout_s in (0.0, 0.01, 0.2):
            start = time.monotonic()
            assert a.recv(timeout_s) is None
            assert timeout_s * 0.9 <= time.monotonic() - start < timeout_s + 0.1


def check_wake_ends_a_wait(connect: Connect) -> None:
    with group(connect, 2) as (a, b):
        threading.Timer(0.2, a.wake).start()
        start = time.monotonic()
        assert a.recv(5.0) is None
        assert 0.15 < time.monotonic() - start < 0.7
        a.wake()
        a.wake()
        b.send(0, b"still works")
        assert receive(a)[0].header == b"still works"


def check_a_frame_ends_a_wait_at_once(connect: Connect) -> None:
    with group(connect, 2) as (a, b):
        timer = threading.Timer(0.2, b.send, (0, b""))
        timer.start()
        start = time.monotonic()
        assert a.recv(5.0) is not None
        assert time.monotonic() - start < 0.7
        timer.join()


def check_goodbye_comes_after_all_frames(connect: Connect) -> None:
    with group(connect, 3) as (a, b, c):
        for number in range(10):
            a.send(1, bytes([number]), bytes(100_000))
        a.close(2.0)
        assert [frame.header[0] for frame in receive(b, 10)] == list(range(10))
        assert await_loss(b, 0, 1.0) < 0.5
        assert b.lost[0] == "closed its communicator"
        assert await_loss(c, 0, 1.0) < 0.5
        assert 2 not in b.lost
        b.send(2, b"the others go on")
        assert receive(c)[0].header == b"the others go on"


def check_frames_to_a_lost_peer_are_dropped(connect: Connect) -> None:
    with group(connect, 2, window=3) as (a, b):
        a.close()
        await_loss(b, 0, 1.0)
        for _ in range(10):
            assert b.can_send(0)
            b.send(0, b"", bytes(50_000), borrow=True)
        assert b.flush(1.0)
        assert b.recv(0.1) is None


def check_loss_ends_a_wait(connect: Connect) -> None:
    with group(connect, 2) as (a, b):
        timer = threading.Timer(0.2, a.close)
        timer.start()
        start = time.monotonic()
        assert b.recv(5.0) is None
        assert time.monotonic() - start < 0.2 + 0.3
        timer.join()
        assert 0 in b.lost


def check_bytes_are_counted(connect: Connect) -> None:
    with group(connect, 3) as (a, b, _):
        for size in (10, 100_000):
            a.send(1, b"12345678", bytes(size))
            receive(b)[0].release()
        assert 100_026 <= a.sent_bytes[1] < 100_200
        assert b.received_bytes[0] == a.sent_bytes[1]
        assert a.sent_bytes[0] == 0
        assert a.sent_bytes[2] < 100


def check_close_is_idempotent_and_final(connect: Connect) -> None:
    with group(connect, 2) as (a, _):
        a.close()
        a.close()
        a.wake()
        assert a.rejected_peers == 0
        assert len(a.sent_bytes) == 2
        for call in (lambda: a.send(1, b""), lambda: a.can_send(1), lambda: a.recv(0.1)):
            with pytest.raises(CommunicatorAborted, match="closed"):
                call()


def check_world_of_one(connect: Connect) -> None:
    with group(connect, 1) as (a,):
        assert a.recv(0.05) is None
        assert a.flush(0.0)
        assert a.hosts


def check_listener_can_be_given_up(connect: Connect, name: str) -> None:
    listener = get_backend(name).listen()
    listener.close()
    listener.close()
    with pytest.raises(RuntimeError):
        listener.connect(0, [listener.address], 1.0)


def check_moves_between_threads(connect: Connect) -> None:
    """Calls may come from one thread after another."""
    with group(connect, 2) as (a, b):
        for number in range(20):
            for target, arguments in ((a.send, (1, bytes([number]), bytes(40_000))), (receive_and_release, (b,))):
                thread = threading.Thread(target=target, args=arguments)
                thread.start()
                thread.join()
        assert b.received_bytes[0] > 20 * 40_000


CHECKS = [
    check for name, check in sorted(globals().items()) if name.startswith("check_") and name != "check_listener_can_be_given_up"
]
