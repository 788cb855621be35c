"""What goes wrong between ranks ends in the documented error on every rank, in time, and nothing wrong is delivered."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from squinchcomm.collectives import wire
from squinchcomm.communicator import Communicator
from squinchcomm.errors import (
    CollectiveTimeout,
    CommunicatorAborted,
    ConfigError,
    MismatchError,
    PeerLost,
    SquinchError,
    WireFormatError,
)
from squinchcomm.transport.base import Frame
from tests.conformance.collective_checks import random_array
from tests.conformance.faulty import LooseFrame
from tests.worlds import outcomes, run_world

Call = Callable[[Communicator], Any]


def ones(count: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(count, dtype)


MISMATCHES: dict[str, tuple[Call, Call, str]] = {
    "op": (lambda c: c.allreduce(ones(10)), lambda c: c.all_gather(ones(30), ones(10)), "all_gather"),
    "reduction": (lambda c: c.allreduce(ones(10)), lambda c: c.allreduce(ones(10), "max"), "max"),
    "count": (lambda c: c.allreduce(ones(90_000)), lambda c: c.allreduce(ones(90_001)), "90001 elements"),
    "shape": (lambda c: c.allreduce(ones(12).reshape(3, 4)), lambda c: c.allreduce(ones(12).reshape(4, 3)), "shape"),
    "dtype": (lambda c: c.allreduce(ones(10)), lambda c: c.allreduce(ones(10, np.int32)), "int32"),
    "codec": (lambda c: c.allreduce(ones(90_000)), lambda c: c.allreduce(ones(90_000), codec="squinch6"), "squinch6"),
    "root": (lambda c: c.broadcast(ones(10), 0), lambda c: c.broadcast(ones(10), 1), "root 1"),
    "parts": (
        lambda c: c.reduce_scatter(ones(4), ones(12)),
        lambda c: c.reduce_scatter(ones(2), ones(12), counts=[5, 2, 5]),
        "shape",
    ),
    "order": (
        lambda c: [c.allreduce(ones(10)), c.barrier()],
        lambda c: [c.barrier(), c.allreduce(ones(10))],
        "barrier",
    ),
}


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
@pytest.mark.parametrize("kind", list(MISMATCHES))
def test_ranks_that_disagree_all_learn_it(kind: str, transport: str) -> None:
    usual, other, word = MISMATCHES[kind]
    started = time.monotonic()

    def body(comm: Communicator) -> None:
        (other if comm.rank == 1 else usual)(comm)
        comm.barrier()  # a root that only sends learns of it in its next call at the latest

    results = outcomes(3, body, transport=transport, timeout_s=10.0)
    assert time.monotonic() - started < 5.0
    for result in results:
        assert isinstance(result, MismatchError), results
        assert isinstance(result, ValueError)
    told = " ".join(map(str, results))
    assert "rank 1" in told and word in told


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
def test_a_rank_that_does_not_call_is_named_after_the_timeout(transport: str) -> None:
    def body(comm: Communicator) -> float:
        started = time.monotonic()
        if comm.rank == 1:
            time.sleep(1.5)
            with pytest.raises((CollectiveTimeout, PeerLost)):  # noqa: PT012
                comm.allreduce(ones(5))  # the others' contributions came in time, so this may still succeed
                comm.barrier()
        else:
            with pytest.raises(CollectiveTimeout, match="rank 1") as caught:
                comm.allreduce(ones(5), timeout_s=0.5)
            assert caught.value.op == "allreduce" and caught.value.sequence == 1
        took = time.monotonic() - started
        with pytest.raises(CommunicatorAborted, match="CollectiveTimeout"):
            comm.barrier()
        time.sleep(max(0.0, started + 2.0 - time.monotonic()))
        return took

    took = run_world(3, body, transport=transport)
    assert took[0] < 1.5 and took[2] < 1.5


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
def test_abort_frees_a_waiting_rank_and_its_peers(transport: str) -> None:
    freed: dict[int, float] = {}

    def body(comm: Communicator) -> None:
        if comm.rank == 0:

            def end() -> None:
                freed[-1] = time.monotonic()
                comm.abort("enough")
                comm.abort("again")

            threading.Timer(0.3, end).start()
        if comm.rank == 2:
            time.sleep(1.0)
        with pytest.raises(CommunicatorAborted, match="enough"):
            comm.allreduce(ones(100_000))
        freed[comm.rank] = time.monotonic()

    run_world(3, body, transport=transport)
    assert freed[0] - freed[-1] < 0.5
    assert freed[1] - freed[-1] < 0.5


def test_abort_ends_pending_async_calls_and_messages() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(0.8)
            return
        works = [comm.allreduce(ones(10), async_op=True) for _ in range(5)]
        box = comm.recv(ones(3), 1, async_op=True)
        threading.Timer(0.2, comm.abort).start()
        started = time.monotonic()
        for work in [*works, box]:
            with pytest.raises(CommunicatorAborted):
                work.wait(2.0)
            assert isinstance(work.exception(), CommunicatorAborted)
        assert time.monotonic() - started < 0.8

    run_world(2, body)


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
def test_a_rank_that_closes_is_lost_to_those_who_wait(transport: str) -> None:
    def body(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 2:
            return
        with pytest.raises(PeerLost, match=r"rank 2.*closed its communicator") as caught:
            comm.allreduce(ones(50_000))
        assert caught.value.peer == 2

    run_world(3, body, transport=transport)


def test_a_rank_that_is_done_may_close_while_others_finish() -> None:
    def body(comm: Communicator) -> None:
        for index in range(20):
            comm.allreduce(random_array(comm.rank, 40_000 + index))

    for _ in range(5):
        run_world(3, body, transport="zmq")


def test_an_exception_in_a_with_block_tells_the_others_why() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(ZeroDivisionError), comm:
                raise ZeroDivisionError("mine")
        else:
            with pytest.raises((CommunicatorAborted, PeerLost)):
                comm.barrier()

    run_world(3, body)


BAD_INPUT: dict[str, tuple[Call, type[Exception], str]] = {
    "list": (lambda c: c.allreduce([1.0]), TypeError, "NumPy array or a torch tensor"),
    "object": (lambda c: c.allreduce(np.array([None])), TypeError, "dtype object"),
    "text": (lambda c: c.allreduce(np.array(["a"])), TypeError, "dtype"),
    "byte order": (lambda c: c.allreduce(np.ones(3, ">f4")), TypeError, "dtype"),
    "read-only": (lambda c: c.allreduce(np.broadcast_to(np.float32(1), 5)), ValueError, "read-only"),
    "op": (lambda c: c.allreduce(ones(3), "median"), ValueError, "op must be one of"),
    "avg of ints": (lambda c: c.allreduce(ones(3, np.int64), "avg"), ValueError, "not defined"),
    "max of complex": (lambda c: c.allreduce(ones(3, np.complex64), "max"), ValueError, "not defined"),
    "codec": (lambda c: c.allreduce(ones(3), codec="zip"), ConfigError, "unknown codec 'zip'"),
    "codec of ints": (lambda c: c.allreduce(ones(90_000, np.int32), codec="squinch6"), ConfigError, "cannot serve int32"),
    "codec of max": (lambda c: c.allreduce(ones(90_000), "max", codec="squinch6"), ConfigError, "cannot serve the reduction"),
    "root": (lambda c: c.broadcast(ones(3), 7), ValueError, "root must be a rank from 0 to 1"),
    "timeout": (lambda c: c.allreduce(ones(3), timeout_s=-1), ValueError, "timeout_s"),
    "parts": (lambda c: c.reduce_scatter(ones(1), ones(3)), ValueError, "cannot share equally"),
    "counts": (lambda c: c.all_gather(ones(4), ones(2), counts=[1, 2]), ValueError, "add up"),
    "output": (lambda c: c.reduce_scatter(ones(3), ones(4)), ValueError, "output has 3 elements"),
    "dtypes": (lambda c: c.all_gather(ones(4), ones(2, np.float64)), TypeError, "differ in dtype"),
    "overlap": (lambda c: (lambda a: c.all_to_all(a, a))(ones(4)), ValueError, "overlap"),
    "gather": (lambda c: c.gather(ones(2), root=c.rank), ValueError, "must be given on the root"),
    "self": (lambda c: c.send(ones(2), c.rank), ValueError, "cannot message itself"),
    "tag": (lambda c: c.send(ones(2), 1 - c.rank, -1), ValueError, "tag"),
    "color": (lambda c: c.split(-1), ValueError, "color"),
}


@pytest.mark.parametrize("kind", list(BAD_INPUT))
def test_bad_input_is_refused_and_nothing_is_lost(kind: str) -> None:
    call, error, words = BAD_INPUT[kind]

    def body(comm: Communicator) -> None:
        with pytest.raises(error, match=words):
            call(comm)
        array = ones(1000)
        comm.allreduce(array)
        assert np.all(array == 2)

    run_world(2, body)


def test_a_forked_child_is_told_to_make_its_own() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            child = os.fork()
            if child == 0:
                try:
                    comm.barrier()
                except CommunicatorAborted as error:
                    os._exit(7 if "forked child" in str(error) else 1)
                os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        comm.barrier()

    run_world(2, body)


def test_messages_that_do_not_fit_fail_on_both_sides_and_the_rest_goes_on() -> None:
    def body(comm: Communicator) -> None:
        for sent, taken in ((ones(5), ones(6)), (ones(50_000), ones(50_000, np.int32))):
            with pytest.raises(MismatchError, match=r"rank 0 sends .* rank 1 receives"):
                comm.send(sent, 1) if comm.rank == 0 else comm.recv(taken, 0)
        array = ones(20_000)
        comm.send(array, 1) if comm.rank == 0 else comm.recv(array, 0)

    run_world(2, body)


def test_a_rank_that_took_its_message_may_leave_at_once() -> None:
    def body(comm: Communicator) -> None:
        for count in (1, 300_000):
            array = np.zeros(count)
            if comm.rank == 0:
                comm.send(array, 1)
                comm.recv(array, 1)
            else:
                comm.recv(array, 0)
                comm.send(array, 0)

    for _ in range(8):
        run_world(2, body, transport="zmq")


def test_a_message_nobody_receives_times_out() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout, match="rank 1 made no matching receive with tag 5"):
                comm.send(ones(9), 1, 5, timeout_s=0.4)
        comm.barrier()

    run_world(2, body)


class Damager:
    """Damages one frame, the `at`-th; `kind` says how. `fired` proves that it did."""

    def __init__(self, kind: str, at: int, seed: int) -> None:
        self.kind = kind
        self.at = at
        self.random = random.Random(seed)
        self.fired = 0
        self.seen = 0
        self.kept: Frame | None = None
        self.history: list[tuple[int, bytes, bytes]] = []

    def __call__(self, frame: Frame) -> list[Frame]:
        header, payload = bytes(frame.header), bytes(frame.payload)
        self.history.append((frame.peer, header, payload))
        self.seen += 1
        if self.kept is not None and frame.peer == self.kept.peer:
            kept, self.kept = self.kept, None
            self.fired += 1
            return [frame, kept]
        if self.seen != self.at:
            return [frame]
        if self.kind == "reorder":
            self.kept = frame
            return []
        self.fired += 1
        if self.kind == "flip header":
            header = self._flip(header)
        elif self.kind == "flip payload":
            payload = self._flip(payload)
        elif self.kind == "truncate":
            payload = payload[: self.random.randrange(len(payload))]
        elif self.kind == "extend":
            payload += b"\0" * 8
        elif self.kind == "repeat":
            return [frame, LooseFrame(None, frame.peer, header, payload)]
        elif self.kind == "stale":
            _, header, payload = next(old for old in self.history if old[0] == frame.peer)
        elif self.kind == "lose":
            return []
        return [LooseFrame(frame, frame.peer, header, payload)]

    def _flip(self, data: bytes) -> bytes:
        bits = bytearray(data)
        position = self.random.randrange(len(bits) * 8)
        bits[position // 8] ^= 1 << position % 8
        return bytes(bits)


@pytest.mark.parametrize("codec", ["none", "squinch6"])
@pytest.mark.parametrize("kind", ["flip header", "flip payload", "truncate", "extend", "repeat", "stale", "reorder", "lose"])
def test_damaged_frames_are_never_delivered_as_data(kind: str, codec: str) -> None:
    fired = 0
    for trial in range(12):
        damager = Damager(kind, 8 + trial, trial)
        finished: list[tuple[int, int, bytes]] = []

        def body(comm: Communicator, finished: list[tuple[int, int, bytes]] = finished) -> None:
            for index in range(6):
                array = random_array(comm.rank * 10 + index, 60_000)
                comm.allreduce(array, codec=codec, timeout_s=1.0)
                finished.append((comm.rank, index, array.tobytes()))

        results = outcomes(3, body, damage={1: damager}, min_compress_bytes=0, chunk_bytes=16 << 10)
        fired += damager.fired
        for result in results:
            assert result is None or isinstance(result, SquinchError), result
        if damager.fired and kind != "lose":
            assert isinstance(results[1], WireFormatError | MismatchError), results
        for index in range(6):
            assert len({bits for _, number, bits in finished if number == index}) <= 1
        reference: dict[int, bytes] = _reference(codec)
        for _, index, bits in finished:
            assert bits == reference[index]
    assert fired >= 8


_references: dict[str, dict[int, bytes]] = {}


def _reference(codec: str) -> dict[int, bytes]:
    if codec not in _references:

        def body(comm: Communicator) -> list[bytes]:
            arrays = [random_array(comm.rank * 10 + index, 60_000) for index in range(6)]
            for array in arrays:
                comm.allreduce(array, codec=codec)
            return [array.tobytes() for array in arrays]

        _references[codec] = dict(enumerate(run_world(3, body, min_compress_bytes=0, chunk_bytes=16 << 10)[0]))
    return _references[codec]


def test_no_damage_in_100_000_passes_the_frame_check() -> None:
    rng = random.Random(7)
    signature = wire.Signature("allreduce", "sum", np.dtype(np.float32), 1000, (1000,)).pack(99, 12)
    for index in range(100_000):
        payload = rng.randbytes(rng.randrange(1, 200))
        header = wire.frame_header(signature, index, 1, 3, len(payload), wire.payload_crc(payload))
        assert wire.check_frame(header, np.frombuffer(payload, np.uint8), index) is None
        bad_header, bad_payload, expected = bytearray(header), bytearray(payload), index
        fault = index % 5
        if fault == 0:
            bad_header[rng.randrange(len(header))] ^= rng.randrange(1, 256)
        elif fault == 1:
            bad_payload[rng.randrange(len(payload))] ^= rng.randrange(1, 256)
        elif fault == 2:
            del bad_payload[rng.randrange(len(payload)) :]
        elif fault == 3:
            expected += rng.choice((-1, 1, 1000))
        else:
            del bad_header[rng.randrange(len(header)) :]
        assert wire.check_frame(bytes(bad_header), np.frombuffer(bytes(bad_payload), np.uint8), expected) is not None
