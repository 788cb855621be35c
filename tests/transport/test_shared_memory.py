"""Memory that ranks of one host share: how it is given, read, taken back, and what strangers can do to it."""

from __future__ import annotations

import functools
import gc
import mmap
import os
import resource
import socket
import struct
import threading
import time

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from squinchcomm.errors import ConfigError, PeerLost, WireFormatError
from squinchcomm.transport.shared_memory import Arena, Doorway
from tests.conformance import transport_checks as checks
from tests.transport.test_zmq_security import PREFIX, insider
from tests.worlds import run_world

BIG = 100_000
connect = functools.partial(checks.connect_group, "zmq")


def shared_array(transport, peers=(1,), nbytes=BIG, fill=None) -> np.ndarray:
    array = np.asarray(transport.allocate(nbytes, peers))
    array[:] = np.random.default_rng(fill).integers(0, 256, nbytes, np.uint8)
    return array


# --- the memory


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700_000)), max_size=60))
def test_allocations_never_overlap_and_all_come_back(steps):
    arena = Arena(8 << 20)
    held: list[tuple[np.ndarray, int]] = []
    for number, (keep, size) in enumerate(steps):
        if keep or not held:
            slot = arena.allocate(size)
            if slot is None:
                continue
            array = np.asarray(slot)
            assert array.size == size
            array[:] = number % 251
            held.append((array, number % 251))
        else:
            array, value = held.pop(size % len(held))
            assert (array == value).all()
        del array
    for array, value in held:
        assert (array == value).all()
    slot = array = None
    held.clear()
    whole = arena.allocate(8 << 20)
    assert whole is not None, "something was not given back, or the free parts were not joined"


def test_memory_is_reused_from_the_bottom():
    arena = Arena(64 << 20)
    for _ in range(200):
        np.asarray(arena.allocate(1 << 20))[:] = 1
    assert os.fstat(arena.fd).st_blocks * 512 <= 4 << 20


def test_full_memory_is_not_fatal():
    arena = Arena(1 << 20)
    first = arena.allocate(1 << 20)
    assert arena.allocate(1) is None
    del first
    assert arena.allocate(1 << 20) is not None


def test_system_that_gives_no_memory_is_counted_and_said(caplog):
    """The limit on file sizes makes the memory fail when it is asked for."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        ranks = connect(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    a, b = ranks
    assert a.allocate(BIG, (1,)) is None
    assert a.unshared_payloads == 1
    a.send(1, b"", bytes(BIG))
    assert not checks.receive(b)[0].in_place
    assert "no shared memory" in caplog.text
    for transport in ranks:
        transport.close(0.0)


def test_readers_cannot_write_and_nobody_can_shrink():
    arena = Arena(1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 4096)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, 1 << 20)


# --- the doorway


def test_doorways_exchange_memory():
    arenas = [Arena((rank + 1) << 20) for rank in range(4)]
    doors = [Doorway(rank + 50, arenas[rank]) for rank in range(4)]
    found: dict[int, dict[int, memoryview]] = {}

    def meet(rank: int) -> None:
        peers = {peer: (doors[peer].name, peer + 50) for peer in range(4) if peer != rank}
        found[rank] = doors[rank].exchange(rank, peers, 5.0)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, memory in found.items():
        assert {peer: len(view) for peer, view in memory.items()} == {
            peer: (peer + 1) << 20 for peer in range(4) if peer != rank
        }
        assert all(view.readonly for view in memory.values())
    slot = np.asarray(arenas[2].allocate(100))
    slot[:] = 77
    assert bytes(found[0][2][:100]) == bytes([77]) * 100
    for door in doors:
        door.close()


def test_missing_peer_is_named_in_time():
    door = Doorway(1, Arena(1 << 20))
    start = time.monotonic()
    with pytest.raises(PeerLost, match="rank 3") as caught:
        door.exchange(0, {3: ("squinchcomm-" + "0" * 32, 9)}, 0.3)
    assert caught.value.peer == 3
    assert time.monotonic() - start < 2.0
    door.close()


def test_what_strangers_hand_in_is_refused_and_leaves_nothing():
    arena = Arena(1 << 20)
    door = Doorway(7, arena)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 20)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    stranger.connect("\0" + door.name)
    letter = struct.Struct("<IIQ")
    read, write = os.pipe()
    cases = [
        (b"", []),
        (letter.pack(7, 1, 1 << 20), []),
        (letter.pack(8, 1, 1 << 20), [arena.fd]),
        (letter.pack(7, 1, 1 << 20), [unsealed]),
        (letter.pack(7, 1, 2 << 20), [arena.fd]),
        (letter.pack(7, 1, 0), [arena.fd]),
        (letter.pack(7, 1, 1 << 20), [read]),
        (letter.pack(7, 1, 1 << 20), [arena.fd, arena.fd]),
        (letter.pack(7, 1, 1 << 20) + b"x", [arena.fd]),
        (letter.pack(7, 9, 1 << 20), [arena.fd]),
    ]
    before = len(os.listdir("/proc/self/fd"))
    for body, fds in cases:
        socket.send_fds(stranger, [body], fds)
        with pytest.raises(PeerLost):
            door.exchange(0, {1: ("squinchcomm-" + "0" * 32, 7)}, 0.0)
    assert door.rejected == len(cases)
    assert len(os.listdir("/proc/self/fd")) == before
    for fd in (unsealed, read, write):
        os.close(fd)
    stranger.close()
    door.close()


class Endless:
    """A socket at which a stranger's letters never end."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)

    def recvmsg(self, *_):
        return b"rubbish", [], 0, None


def test_a_flood_of_letters_does_not_outlast_the_deadline():
    door = Doorway(1, Arena(1 << 20))
    door._socket = Endless(door._socket)
    start = time.monotonic()
    with pytest.raises(PeerLost, match="rank 3"):
        door.exchange(0, {3: ("squinchcomm-" + "0" * 32, 9)}, 0.3)
    assert time.monotonic() - start < 2.0
    assert door.rejected > 0
    door.close()


def test_memory_that_cannot_be_mapped_is_an_error_with_advice():
    doors = [Doorway(rank + 50, Arena(512 << 20)) for rank in range(2)]
    assert not doors[0]._hand_in(0, "squinchcomm-" + "0" * 32, 0)
    assert doors[1]._hand_in(1, doors[0].name, 50)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"512 MiB that rank 1 shares.*ulimit -v.*SQUINCH_SHARED_MEMORY=0"):
            doors[0].exchange(0, {1: (doors[1].name, 51)}, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    for door in doors:
        door.close()


# --- frames


def test_payload_is_read_where_it_was_written():
    with checks.group(connect, 3) as (a, b, c):
        assert a.sharing == {1, 2}
        array = shared_array(a, (1, 2))
        want = array.tobytes()
        a.send(1, b"one", array)
        a.send(2, b"two", array)
        del array
        (at_b,), (at_c,) = checks.receive(b), checks.receive(c)
        assert at_b.in_place and at_c.in_place
        assert (at_b.header, at_c.header) == (b"one", b"two")
        assert bytes(at_b.payload) == bytes(at_c.payload) == want
        at_b.release()
        b.send(0, b"done")
        checks.receive_and_release(a)
        again = shared_array(a, (1,), fill=1)  # the first is still with c
        assert bytes(at_c.payload) == want
        at_c.release()
        del again


def test_memory_comes_back_when_all_have_released_in_any_order():
    rounds, held = 300, []
    with checks.group(connect, 2, window=8) as (a, b):
        for number in range(rounds):
            if a.can_send(1):
                a.send(1, struct.pack("<I", number), shared_array(a, nbytes=1 << 20, fill=number))
                held += checks.receive(b)
            frame = held.pop(number % len(held) if len(held) > 3 else -1)
            (sent,) = struct.unpack("<I", frame.header)
            assert bytes(frame.payload) == np.random.default_rng(sent).integers(0, 256, 1 << 20, np.uint8).tobytes()
            frame.release()
            a.recv(0)
        assert os.fstat(a._arena.fd).st_blocks * 512 <= 16 << 20
        assert a.unshared_payloads == 0


def test_small_payloads_and_other_hosts_get_no_shared_memory():
    with checks.group(connect, 2) as (a, _):
        assert a.allocate(100, (1,)) is None
        assert a.allocate(BIG, ()) is None
    for options in ({"scheme": "tcp"}, {"shared_memory": False}, {"link_rate": 1e9}):
        with checks.group(connect, 2, **options) as (a, b):
            assert a.sharing == b.sharing == frozenset()
            assert a.allocate(BIG, (1,)) is None


def test_held_frame_outlives_its_sender():
    a, b = connect(2)
    array = shared_array(a)
    want = array.tobytes()
    a.send(1, b"", array)
    del array
    (frame,) = checks.receive(b)
    a.close(0.2)
    del a
    gc.collect()
    assert bytes(frame.payload) == want
    b.close(0.0)


def test_nothing_of_it_is_left():
    transports = connect(3)
    for transport in transports:
        transport.send((transport.rank + 1) % 3, b"", shared_array(transport, ((transport.rank + 1) % 3,)))
    for transport in transports:
        transport.close(0.1)
    del transports, transport
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert "memfd:squinchcomm" not in maps.read()
    assert not [name for name in os.listdir("/dev/shm") if "squinch" in name]


SPANS = {
    "past the end": lambda memory: (len(memory) - 10, BIG),
    "far away": lambda memory: (1 << 63, BIG),
    "larger than a payload may be": lambda memory: (0, (4 << 20) + 1),
    "overflowing": lambda memory: ((1 << 64) - 1, BIG),
}


@pytest.mark.parametrize("case", SPANS)
def test_span_outside_the_memory_is_an_error(case):
    with checks.group(connect, 2, job_token="right") as (a, b):
        endpoint = b._links[0].socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        with insider(a, endpoint) as push:
            span = struct.pack("<QQ", *SPANS[case](a._links[1].shared.memory))
            push.send(PREFIX.pack(a._session, 1, 0, 0, 0, 2) + span)
            with pytest.raises(WireFormatError, match="memory") as caught:
                checks.receive(a)
        assert caught.value.peer == 1


# --- collectives


@pytest.mark.parametrize("codec", ["none", "squinch6"])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_collectives_give_the_bits_they_give_elsewhere(world_size, codec):
    def body(comm):
        values = np.random.default_rng(comm.rank).standard_normal(1_000_003).astype(np.float32)
        comm.allreduce(values, "avg", codec=codec)
        parts = np.zeros((world_size, 100_001), np.float32)
        comm.all_gather(parts, values[: parts.shape[1]] + comm.rank)
        comm.broadcast(values, 1)
        swapped = np.empty_like(parts)
        comm.all_to_all(swapped, parts)
        return values.tobytes(), parts.tobytes(), swapped.tobytes()

    def through_memory(comm):
        result = body(comm)
        assert comm._channel.transport.sharing == set(range(world_size)) - {comm.rank}
        assert comm._channel.transport._arena._grown > 0
        return result

    assert run_world(world_size, body) == run_world(world_size, through_memory, transport="zmq")


def test_full_memory_changes_no_result(monkeypatch):
    """Every third payload finds no memory and travels."""
    real = Arena.allocate
    count = 0

    def sometimes(self, nbytes):
        nonlocal count
        count += 1
        return None if count % 3 == 0 else real(self, nbytes)

    def body(comm):
        values = np.random.default_rng(comm.rank).standard_normal(1_000_003).astype(np.float32)
        comm.allreduce(values, codec="none")
        return values.tobytes(), comm._channel.transport.unshared_payloads

    want = run_world(3, body)[0][0]
    monkeypatch.setattr(Arena, "allocate", sometimes)
    found = run_world(3, body, transport="zmq")
    assert {bits for bits, _ in found} == {want}
    assert sum(refused for _, refused in found) > 0
