"""What goes wrong between ranks ends in the documented error on every rank, in time, and nothing wrong is delivered."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from squinchcomm.arrays import Flat
from squinchcomm.collectives import wire
from squinchcomm.collectives.channel import codec_name
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
        "parts with checksum",
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
            with comm:
                raise ZeroDivisionError("mine")
        comm.barrier()

    for transport in ("inproc", "zmq"):
        results = outcomes(3, body, transport=transport)
        assert isinstance(results[0], ZeroDivisionError)
        for result in results[1:]:
            assert isinstance(result, CommunicatorAborted)
            assert "ZeroDivisionError: mine" in str(result)


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
def test_abort_of_an_idle_rank_reaches_those_who_wait_for_it(transport: str) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            time.sleep(0.3)
            comm.abort("no more")
            time.sleep(0.8)
        else:
            started = time.monotonic()
            with pytest.raises(CommunicatorAborted, match="no more"):
                comm.allreduce(ones(1000), timeout_s=5.0)
            assert time.monotonic() - started < 1.0

    run_world(3, body, transport=transport)


def test_abort_and_deadline_are_noticed_while_frames_keep_coming() -> None:
    def body(comm: Communicator) -> None:
        array = ones(16 << 20, np.uint8)
        started = time.monotonic()
        timer = threading.Timer(0.5, comm.abort)
        if comm.rank == 1:
            timer.start()
        with pytest.raises(CommunicatorAborted):  # noqa: PT012
            while time.monotonic() - started < 5.0:
                comm.broadcast(array)
        timer.cancel()
        assert time.monotonic() - started < 2.0

    run_world(2, body, transport="zmq")


def test_a_failure_is_told_to_a_peer_whose_window_is_full() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 2:
            time.sleep(2.0)
            return
        started = time.monotonic()
        with pytest.raises(CollectiveTimeout, match="on rank 0"):
            comm.allreduce(ones(8 << 20), timeout_s=0.7 if comm.rank == 0 else 8.0)
        assert time.monotonic() - started < 2.0
        time.sleep(max(0.0, started + 2.0 - time.monotonic()))

    run_world(3, body, transport="zmq", chunk_bytes=64 << 10)


def test_a_synchronous_call_behind_others_keeps_its_deadline() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(1.5)
            return
        pending = comm.allreduce(ones(10), async_op=True, timeout_s=30.0)
        started = time.monotonic()
        with pytest.raises(CollectiveTimeout):
            comm.barrier(timeout_s=0.5)
        assert time.monotonic() - started < 1.0
        with pytest.raises(CommunicatorAborted):
            pending.wait(2.0)

    run_world(2, body)


def test_close_lets_pending_calls_finish_and_ends_those_that_cannot() -> None:
    def body(comm: Communicator) -> None:
        works = [comm.allreduce(ones(300_000), async_op=True) for _ in range(20)]
        comm.close()
        for work in works:
            work.wait(0.0)

    run_world(3, body, transport="zmq")

    def stuck(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(2.5)
            return
        work = comm.allreduce(ones(300_000), async_op=True, timeout_s=60.0)
        started = time.monotonic()
        comm.close()
        assert time.monotonic() - started < 2.0
        with pytest.raises(CommunicatorAborted):
            work.wait(0.0)

    run_world(2, stuck, transport="zmq", timeout_s=1.0)


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
    "overlap of all_gather": (lambda c: (lambda a: c.all_gather(a, a[1:3]))(ones(4)), ValueError, "overlap"),
    "overlap of reduce_scatter": (lambda c: (lambda a: c.reduce_scatter(a[1:3], a))(ones(4)), ValueError, "overlap"),
    "gather": (lambda c: c.gather(ones(2), root=c.rank), ValueError, "must be given on the root"),
    "self": (lambda c: c.send(ones(2), c.rank), ValueError, "cannot message itself"),
    "tag": (lambda c: c.send(ones(2), 1 - c.rank, -1), ValueError, "tag"),
    "masked": (lambda c: c.allreduce(np.ma.masked_array(ones(3), [0, 1, 0])), TypeError, "masked array"),
    "repeated": (
        lambda c: c.allreduce(np.lib.stride_tricks.as_strided(ones(3), (4, 3), (0, 4))),
        ValueError,
        "repeats one element",
    ),
    "fractions": (lambda c: c.all_gather(ones(4), ones(2), counts=[2.0, 2.0]), TypeError, "float"),
    "key": (lambda c: c.split(0, 2**70), ValueError, "key"),
    "color type": (lambda c: c.split(True), ValueError, "color"),
    "overlap of scatter": (lambda c: (lambda a: c.scatter(a[1:3], a, root=c.rank))(ones(4)), ValueError, "overlap"),
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


class AlwaysTwoDimensional(np.ndarray):
    """As np.matrix, which warns."""

    def reshape(self, *shape: Any, **options: Any) -> np.ndarray:
        return np.asarray(self).reshape(1, -1).view(type(self))


def test_subclasses_of_arrays_are_taken_as_plain_memory() -> None:
    def body(comm: Communicator) -> None:
        matrix = ones(60_000).reshape(200, 300).view(AlwaysTwoDimensional)
        comm.allreduce(matrix, codec="squinch6")
        comm.allreduce(matrix)
        np.testing.assert_allclose(np.asarray(matrix), 4, rtol=0.1)

    run_world(2, body, min_compress_bytes=0)


def test_calls_after_close_are_refused_at_once() -> None:
    def body(comm: Communicator) -> None:
        lane = comm._lane
        comm.close()
        for async_op in (False, True):
            with pytest.raises(CommunicatorAborted):
                lane.submit(wire.Signature("barrier"), lambda call: None, 0, async_op, 1.0)

    run_world(2, body)


def test_closing_while_another_thread_is_in_a_call() -> None:
    def body(comm: Communicator) -> None:
        ended: list[BaseException | None] = []

        def work() -> None:
            try:
                while True:
                    comm.allreduce(ones(100_000), timeout_s=5.0)
            except (CommunicatorAborted, PeerLost) as error:
                ended.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.05 + 0.02 * comm.rank)
        comm.close()
        thread.join(10.0)
        assert ended

    for _ in range(6):
        run_world(3, body, transport="zmq", timeout_s=5.0)


def test_a_receiver_that_cannot_store_its_message_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Flat.write_back

    def refuse(flat: Flat) -> None:
        if flat.data.size == 21:
            raise ValueError("no place")
        store(flat)

    monkeypatch.setattr(Flat, "write_back", refuse)

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(ones(21), 1, 1)
            comm.send(ones(20), 1, 2)
            return
        time.sleep(0.2)  # the announcement is here before the receive
        with pytest.raises(ValueError, match="no place"):
            comm.recv(ones(21), 0, 1)
        comm.recv(ones(20), 0, 2)

    run_world(2, body)


def test_interrupts_leave_the_communicator_usable_or_broken_but_never_stuck() -> None:
    script = Path(__file__).parent / "interrupted.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "interrupts" in done.stdout


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


def test_a_timeout_of_one_message_leaves_the_others_alone() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            late = comm.recv(ones(3), 1, 7, async_op=True)
            with pytest.raises(CollectiveTimeout, match="tag 5"):
                comm.send(ones(90_000), 1, 5, timeout_s=0.3)
            comm.barrier()
            late.wait(5.0)
            comm.send(ones(2), 1, 8)
        else:
            comm.barrier()
            with pytest.raises(CollectiveTimeout, match="gave up sending"):
                comm.recv(ones(90_000), 0, 5, timeout_s=5.0)
            comm.send(ones(3), 0, 7)
            comm.recv(ones(2), 0, 8)

    run_world(2, body)


def test_any_source_waits_for_those_who_are_left() -> None:
    def body(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 0:
            box = ones(2)
            assert comm.recv(box, None, 1) == 1
            assert box[0] == 5.0
        elif comm.rank == 1:
            time.sleep(0.6)
            comm.send(5 * ones(2), 0, 1)

    run_world(3, body, transport="zmq")


def test_chunks_never_outgrow_a_frame() -> None:
    def body(comm: Communicator) -> None:
        for dtype in (np.uint8, np.float64, np.complex128):
            array = ones(1_500_000, dtype)
            comm.allreduce(array)
            comm.broadcast(array)
            assert np.all(array == 2)

    run_world(2, body, transport="zmq", chunk_bytes=64 << 20)


def test_signatures_of_large_worlds_and_unknown_codecs_can_be_told() -> None:
    parts = wire.Signature("all_gather", "", np.dtype(np.int64), 1000, parts=tuple(range(1000)))
    assert "parts with checksum" in wire.read_header(parts.pack(1, 2)).describe()
    other = wire.Signature("allreduce", "sum", np.dtype(np.int64), 10, (10,), codec_id=200)
    assert "codec number 200" in wire.read_header(other.pack(1, 2)).describe(codec_name)


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
