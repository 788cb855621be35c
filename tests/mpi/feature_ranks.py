"""Program: what users of MPI do besides; three ranks; prints one line for each thing that holds."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import squinchcomm
from squinchcomm.config import Config
from squinchcomm.errors import CommunicatorAborted, ConfigError, PeerLost, WireFormatError
from squinchcomm.joining import join
from squinchcomm.transport import mpi_caretaker
from squinchcomm.transport.mpi_backend import MpiBackend
from squinchcomm.transport.mpi_link import CREDIT, PREFIX, SPLIT, Room
from squinchcomm.transport.mpi_pieces import UNLIMITED, piece_bytes
from squinchcomm.transport.mpi_slots import UNUSED, Slots
from squinchcomm.transport.mpi_transport import MpiTransport
from squinchcomm.transport.mpi_world import MpiWorld, join_world, over, wait_until
from squinchcomm.transport.options import TransportOptions

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


def total(comm: squinchcomm.Communicator, count: int = 100_000) -> float:
    array = np.full(count, comm.rank + 1.0)
    comm.allreduce(array)
    assert np.all(array == array[0])
    return float(array[0])


def opened(world: MpiWorld, **options: Any) -> MpiTransport:
    """A transport of all ranks."""
    listener = MpiBackend(TransportOptions(**options), world).listen()
    transport = listener.connect(RANK, world.exchange(listener.address, 20.0), 20.0)
    assert isinstance(transport, MpiTransport)
    return transport


def check_ranks_are_those_of_the_communicator() -> None:
    turned = WORLD.Split(0, key=-RANK)
    with squinchcomm.init(comm=turned) as comm:
        assert (comm.rank, comm.world_size) == (SIZE - 1 - RANK, SIZE)
        assert total(comm) == SIZE * (SIZE + 1) / 2
    turned.Free()


def check_without_arguments_the_launcher_decides() -> None:
    with squinchcomm.init() as comm:  # the transport comes from the environment of this program
        assert (comm.rank, comm.world_size) == (RANK, SIZE)
        assert "mpi" in repr(comm)


def check_messages_of_the_user_stay_apart() -> None:
    box = bytearray(1 << 20)
    greedy = WORLD.Irecv(box, MPI.ANY_SOURCE, MPI.ANY_TAG)
    with squinchcomm.init(comm=WORLD) as comm:
        for _ in range(3):
            total(comm, 500_000)
        assert not greedy.Test()
        comm.barrier()
        WORLD.Send(b"mine", (RANK + 1) % SIZE, 2048)  # the first tag that a transport would take
        greedy.Wait()
        assert box[:4] == b"mine"
        assert total(comm) == SIZE * (SIZE + 1) / 2


class Recorder:
    """A communicator that notes the largest message it is handed."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.largest = self.messages = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def Isend(self, message: bytes | memoryview, *where: int) -> MPI.Request:  # noqa: N802
        self.largest = max(self.largest, len(message))
        self.messages += 1
        return self.comm.Isend(message, *where)


class Failing(Recorder):
    """As MPI that cannot reach a rank any more, and says so at once or, with `later`, when it is asked."""

    later = False

    def Isend(self, message: bytes | memoryview, *where: int) -> MPI.Request:  # noqa: N802
        if self.later:
            return FailedRequest()
        raise MPI.Exception(MPI.ERR_OTHER)


class FailedRequest(MPI.Request):
    """A request that is seen to have failed at the second look."""

    looks = 0

    def Test(self, status: MPI.Status | None = None) -> bool:  # noqa: N802
        self.looks += 1
        if self.looks == 1:
            return False
        raise MPI.Exception(MPI.ERR_OTHER)


def check_a_send_that_fails_loses_its_peer() -> None:
    """Whatever the size, with what came of it before, and without a word from anybody."""
    world = join_world(WORLD, 20.0)
    for nbytes, later in ((10, False), (200_000, False), (10, True), (200_000, True)):
        transport = opened(world, shared_memory=False)
        if RANK == 1:
            transport.send(0, b"before", b"x" * 100_000)
        WORLD.Barrier()
        if RANK == 0:
            transport._comm, real = Failing(world.comm), transport._comm
            transport._comm.later = later
            transport.send(1, b"", np.ones(nbytes, np.uint8))
            transport._comm = real
            frame = transport.recv(5.0)
            assert frame is not None and frame.header == b"before"
            frame.release()
            deadline = time.monotonic() + 5.0
            while 1 not in transport.lost and time.monotonic() < deadline:
                assert transport.recv(0.1) is None
            assert transport.lost == {1: MPI.Exception(MPI.ERR_OTHER).Get_error_string()}
        WORLD.Barrier()
        transport.close(0.2)


def check_no_message_exceeds_the_limit() -> None:
    """With the real limits no message can have more than 1 GiB; with lower ones none has more than they say."""
    limit = 64 << 10
    world = join_world(WORLD, 20.0)
    options = TransportOptions(max_payload_bytes=limit, shared_memory=False)
    config = Config(chunk_bytes=limit)
    comm = join(MpiBackend(options, world), RANK, lambda blob: world.exchange(blob, 20.0), config)
    recorder = comm._transports[0]._comm = Recorder(world.comm)
    array = np.full(1 << 20, RANK + 1, np.float32)
    comm.allreduce(array)
    assert np.all(array == SIZE * (SIZE + 1) / 2)
    comm.broadcast(array, 1)
    assert recorder.largest <= limit + 100 and recorder.messages > 2 * 2 * array.nbytes * (SIZE - 1) / SIZE / limit
    comm.close()
    with pytest.raises(ConfigError, match="max_payload_bytes"):
        TransportOptions(max_payload_bytes=1 << 31)


def check_payloads_to_another_host_go_in_pieces() -> None:
    """Where MPI would ask before it sends a large message to another host, it gets none; on one host payloads stay whole."""
    most = piece_bytes()
    fabric = any(Path("/sys/class", name).exists() for name in ("infiniband", "cxi"))
    assert most == (63 << 10 if "Open MPI" in MPI.Get_library_version() and not fabric else UNLIMITED)
    world = join_world(WORLD, 20.0)
    payload = np.random.default_rng(1).integers(0, 256, 1_000_001, np.uint8)
    for host, largest in (
        (f"host{min(RANK, 1)}", min(most, payload.nbytes) if RANK == 0 else payload.nbytes),
        ("one", payload.nbytes),
    ):
        transport = opened(world, host=host, shared_memory=False)
        recorder = transport._comm = Recorder(world.comm)
        others = [peer for peer in range(SIZE) if peer != RANK]
        for peer in others:
            transport.send(peer, b"whole", payload, borrow=True)
        for _ in others:
            frame = transport.recv(5.0)
            assert frame is not None and frame.header == b"whole" and np.array_equal(frame.payload, payload)
            frame.release()
        assert transport.flush(5.0)
        assert recorder.largest == largest, (recorder.largest, largest)
        WORLD.Barrier()
        transport.close()


def check_payloads_after_one_that_does_not_fit_write_to_memory_that_is_kept() -> None:
    """MPI may still write what it was asked to receive when a peer is given up: memory is not somebody else's until it has."""
    world, nbytes = join_world(WORLD, 20.0), 1 << 20
    transport = opened(world, host=f"host{RANK}", shared_memory=False)
    most = min(piece_bytes(), nbytes)
    pieces = [(b"y" * nbytes)[start : start + most] for start in range(most, nbytes, most)]
    WORLD.Barrier()
    if RANK == 1:
        link = transport._links[0]
        world.comm.Send([PREFIX.pack(link.session, 1, 0, 0, nbytes, 0, SPLIT), MPI.BYTE], link.dest, link.tag)
        world.comm.Send([b"x" * (most + 1), MPI.BYTE], link.dest, link.tag + 1 + RANK)
    elif RANK == 0:
        deadline = time.monotonic() + 5.0
        while 1 not in transport.lost and time.monotonic() < deadline:
            assert transport.recv(0.1) is None
        assert "truncated" in transport.lost[1].lower()
    WORLD.Barrier()
    if RANK == 1:
        for piece in pieces:
            world.comm.Send([piece, MPI.BYTE], link.dest, link.tag + 1 + RANK)
    elif RANK == 0:
        kept = [(request, memory) for request, memory in world.orphans if isinstance(memory, Room)]
        assert len(kept) == bool(pieces)
        for request, memory in kept:
            assert wait_until(lambda request=request: over(request), 5.0)
            assert memory.payload[most:nbytes] == b"".join(pieces)
    WORLD.Barrier()
    transport.close(0.2)


def check_room_of_payloads_is_used_again_up_to_a_limit() -> None:
    transport = opened(join_world(WORLD, 20.0), shared_memory=False)
    inbox = transport._inbox
    rooms = [inbox.borrow(20 << 20) for _ in range(3)]
    assert [room.capacity for room in rooms] == [32 << 20] * 3
    for room in rooms:
        inbox.give_back(room)
    again = [inbox.borrow(32 << 20) for _ in range(3)]
    assert [room in rooms for room in again] == [True, True, False]
    assert all(len(room.writable) == len(room.payload) == 32 << 20 for room in again)
    huge = inbox.borrow(128 << 20)
    inbox.give_back(huge)
    assert inbox.borrow(128 << 20) is not huge
    WORLD.Barrier()
    transport.close()


def check_payloads_from_1_kib_on_stay_in_shared_memory() -> None:
    transport = opened(join_world(WORLD, 20.0))
    others = [peer for peer in range(SIZE) if peer != RANK]
    assert transport.allocate(1023, others) is None
    for nbytes in (1 << 10, 1025, 50_000):
        slot = transport.allocate(nbytes, others)
        assert slot is not None
        array = np.asarray(slot)
        array[:] = RANK
        for peer in others:
            transport.send(peer, b"", array)
            transport.send(peer, b"", bytes([RANK]) * 1023)
        del slot, array
        for _ in range(2 * len(others)):
            frame = transport.recv(5.0)
            assert frame is not None
            assert bytes(frame.payload) == bytes([frame.peer]) * len(frame.payload)
            assert frame.in_place == (len(frame.payload) == nbytes)
            frame.release()
        WORLD.Barrier()
    transport.close()


def check_nothing_is_left_behind() -> None:
    def open_and_close() -> None:
        part = WORLD.Split(0)
        with squinchcomm.init(comm=part) as comm:
            total(comm)
            child = comm.split(0)
            assert child is not None and total(child) == SIZE * (SIZE + 1) / 2
            child.close()
        part.Free()

    open_and_close()
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(15):
        open_and_close()
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert not any(thread.name == "squinchcomm-mpi" for thread in threading.enumerate())


def check_a_forked_child_is_refused() -> None:
    with squinchcomm.init(comm=WORLD) as comm:
        child = os.fork()
        if child == 0:
            refused = 1
            try:
                comm.barrier()
            except CommunicatorAborted:
                try:
                    comm._transports[0].recv(0.0)
                except CommunicatorAborted as error:
                    refused = 0 if "forked" in str(error) else 2
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert total(comm) == SIZE * (SIZE + 1) / 2


def check_waiting_is_cheap_and_wakes() -> None:
    with squinchcomm.init(comm=WORLD) as comm:
        comm.barrier()
        if RANK == 0:
            before = time.process_time()
            transport = comm._transports[1]
            timer = threading.Timer(0.5, transport.wake)
            timer.start()
            started = time.monotonic()
            assert transport.recv(5.0) is None
            assert 0.4 < time.monotonic() - started < 0.7
            assert time.process_time() - before < 0.15
            timer.join()
        time.sleep(0.6 if RANK else 0.0)
        comm.barrier()


def check_a_rank_that_computes_takes_what_is_sent_to_it() -> None:
    with squinchcomm.init(comm=WORLD, shared_memory=False) as comm:
        transport = comm._transports[1]
        if RANK == 0:
            transport.send(1, b"", np.ones(1 << 20, np.uint8), borrow=True)
            started = time.monotonic()
            assert transport.flush(2.0)
            assert time.monotonic() - started < 0.5
        else:
            time.sleep(1.0)
        if RANK == 1:
            frame = transport.recv(0.0)
            assert frame is not None and frame.payload.nbytes == 1 << 20
            frame.release()


def check_payloads_that_have_left_are_let_go_between_calls() -> None:
    transport = opened(join_world(WORLD, 20.0), shared_memory=False)
    if RANK == 0:
        payloads = [np.ones(1 << 20, np.uint8) for _ in range(3)]
        left = [weakref.ref(payload) for payload in payloads]
        while payloads:
            transport.send(1, b"", payloads.pop())
        assert any(each() is not None for each in left)  # on their way
        WORLD.Barrier()
        assert wait_until(lambda: not any(each() is not None for each in left), 2.0)
    else:
        WORLD.Barrier()
        for _ in range(3 * (RANK == 1)):
            frame = transport.recv(5.0)
            assert frame is not None
            frame.release()
    WORLD.Barrier()
    transport.close()


def check_a_forgotten_transport_is_a_lost_peer() -> None:
    world = join_world(WORLD, 20.0)
    transport = opened(world)
    if RANK == 2:
        del transport
        gc.collect()
    else:
        deadline = time.monotonic() + 2.0
        while 2 not in transport.lost and time.monotonic() < deadline:
            transport.recv(0.1)
        assert transport.lost[2] == "connection closed"
        transport.close()


def check_payloads_that_are_shorter_than_they_said_are_not_handed_on() -> None:
    world = join_world(WORLD, 20.0)
    transport = opened(world, shared_memory=False)
    if RANK == 1:
        link = transport._links[0]
        assert link is not None
        world.comm.Send([PREFIX.pack(link.session, 1, 0, 0, 40_000, 0, SPLIT), MPI.BYTE], link.dest, link.tag)
        world.comm.Send([b"x" * 10, MPI.BYTE], link.dest, link.tag + 1 + RANK)
    elif RANK == 0:
        with pytest.raises(WireFormatError, match="a payload of 10 bytes instead of 40000"):
            assert [transport.recv(1.0) for _ in range(5)] == [None] * 5
        assert transport.recv(0.2) is None
        assert 1 in transport.lost
    WORLD.Barrier()
    transport.close(0.2)


class Forgetful:
    """Slots whose messages have lost their status, as Open MPI's may have where a process dies."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.taken = 0

    def take(self, status: MPI.Status) -> bytearray | None:
        slot = self.slots.take(status)
        if slot is not None:
            status.count, status.source = 0, MPI.ANY_SOURCE
            self.taken += 1
        return slot

    def close(self) -> None:
        self.slots.close()


def check_messages_without_a_status_are_taken_if_they_are_there() -> None:
    transport = opened(join_world(WORLD, 20.0), shared_memory=False)
    forgetful = transport._inbox.slots = Forgetful(transport._inbox.slots)
    WORLD.Barrier()
    others = [peer for peer in range(SIZE) if peer != RANK]
    sizes = [0, 1000, 20_000, 40_000, 200_000]
    for size in sizes:
        for peer in others:
            transport.send(peer, b"%d" % size, np.full(size, RANK, np.uint8))
    came: dict[int, list[int]] = {peer: [] for peer in others}
    while sum(map(len, came.values())) < len(sizes) * len(others):
        frame = transport.recv(5.0)
        if frame is not None:
            assert frame.payload == bytes([frame.peer]) * int(frame.header)
            came[frame.peer].append(int(frame.header))
            frame.release()
    assert all(got == sizes for got in came.values())
    assert forgetful.taken >= len(sizes) * len(others)
    transport._accept(bytearray(UNUSED) + bytearray(1000), MPI.Status())  # no message is there
    assert transport.recv(0) is None
    assert not transport.lost
    WORLD.Barrier()
    transport.close()


def check_an_error_that_nobody_was_there_to_see_is_told_later() -> None:
    """MPI fails while the thread looks that looks after idle transports: the next call says so, and the thread goes on."""
    transport = opened(join_world(WORLD, 20.0), shared_memory=False)
    real, failed = transport._progress, threading.Event()

    def fail_once(**how: bool) -> None:
        if threading.current_thread() is threading.main_thread() or failed.is_set():
            return real(**how)
        failed.set()
        raise CommunicatorAborted("MPI failed: as told to", rank=RANK)

    transport._progress = fail_once  # type: ignore[method-assign]
    assert failed.wait(5.0)
    with pytest.raises(CommunicatorAborted, match="as told to"):
        transport.recv(5.0)
    assert mpi_caretaker._caretaker is not None and mpi_caretaker._caretaker.is_alive()
    WORLD.Barrier()
    transport.close()


def check_nonsense_gives_its_sender_up() -> None:
    world = join_world(WORLD, 20.0)
    transport = opened(world)
    link = transport._links[0] if RANK else None
    if RANK == 1:
        nonsense = PREFIX.pack(link.session, 1, 7, 0, 0, 0, CREDIT)  # it released 7 frames that nobody sent
        world.comm.Send([nonsense, MPI.BYTE], link.dest, link.tag)
    elif RANK == 2:
        transport.send(0, b"sense")
    else:
        frames, faults = [], []
        deadline = time.monotonic() + 5.0
        while not (frames and faults) and time.monotonic() < deadline:
            try:
                frame = transport.recv(1.0)
                frames += [frame.header] if frame is not None else []
            except WireFormatError as error:
                faults.append(error)
        assert frames == [b"sense"] and faults[0].peer == 1 and "released 7 frames" in str(faults[0])
        assert transport.lost == {1: "broke the transport protocol"}
    WORLD.Barrier()
    transport.close(0.2)


def check_what_cannot_be_is_said() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"comm": 3}, "Intracomm"),
        ({"comm": MPI.COMM_NULL}, "COMM_NULL"),
        ({"comm": WORLD, "rank": 7, "world_size": 9}, "leave them out"),
        ({"comm": WORLD, "link_rate": "1Gbit"}, "rate"),
        ({"comm": WORLD, "security": "curve"}, "does not encrypt"),
    ]
    for arguments, words in wrong:
        with pytest.raises(ConfigError, match=words):
            squinchcomm.init(**arguments)


def check_other_transports_can_meet_through_mpi() -> None:
    for security in ("auto", "curve"):  # whose key is made even though all ranks share this host
        with squinchcomm.init(comm=WORLD, transport="zmq", security=security) as comm:
            assert "zmq" in repr(comm)
            assert comm._transports[0].encrypted == (security == "curve")
            assert total(comm) == SIZE * (SIZE + 1) / 2


def check_a_missing_rank_is_named() -> None:
    for comm, words in ((WORLD, "rank 2 did not come"), (WORLD.Dup(), "every rank of the MPI communicator has to")):
        if RANK != 2:
            started = time.monotonic()
            with pytest.raises(PeerLost, match=words):
                squinchcomm.init(comm=comm, connect_timeout_s=1.0)
            assert 0.9 < time.monotonic() - started < 3.5


def main() -> None:
    checks: list[tuple[str, Callable[[], None]]] = [
        (name, check) for name, check in globals().items() if name.startswith("check_")
    ]
    for name, check in checks:
        check()
        WORLD.Barrier()
        if RANK == 0:
            print(f"passed {name}", flush=True)


if __name__ == "__main__":
    main()
