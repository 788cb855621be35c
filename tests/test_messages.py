"""Point-to-point messages that do not come to their end: each side is told, and the other messages go on."""

from __future__ import annotations

import time

import numpy as np
import pytest

from squinchcomm.arrays import Flat
from squinchcomm.collectives import wire
from squinchcomm.communicator import Communicator
from squinchcomm.errors import CollectiveTimeout, CommunicatorAborted, MismatchError, WireFormatError
from squinchcomm.transport.base import Frame
from tests.conformance.faulty import LooseFrame
from tests.worlds import ones, outcomes, run_world


def test_messages_that_do_not_fit_fail_on_both_sides_and_the_rest_goes_on() -> None:
    def body(comm: Communicator) -> None:
        for sent, taken in ((ones(5), ones(6)), (ones(50_000), ones(50_000, np.int32))):
            with pytest.raises(MismatchError, match=r"rank 0 sends .* rank 1 receives"):
                comm.send(sent, 1) if comm.rank == 0 else comm.recv(taken, 0)
        array = ones(20_000)
        comm.send(array, 1) if comm.rank == 0 else comm.recv(array, 0)

    run_world(2, body)


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


class FlippedMessage:
    """Flips a bit of the payload of the first frame of a message from rank `peer`; `fired` proves it."""

    def __init__(self, peer: int, kind: int) -> None:
        self.peer = peer
        self.kind = kind
        self.fired = 0

    def __call__(self, frame: Frame) -> list[Frame]:
        header = bytes(frame.header)
        is_message = wire.read_header(header).op == wire.OP_CODES["send"]
        if self.fired or not is_message or frame.peer != self.peer or header[wire.KIND_BYTE] != self.kind:
            return [frame]
        self.fired += 1
        payload = bytearray(frame.payload)
        payload[-1] ^= 1
        return [LooseFrame(frame, frame.peer, header, bytes(payload))]


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
@pytest.mark.parametrize("kind", [wire.ANNOUNCE, wire.DATA])
def test_a_damaged_message_is_the_same_error_for_all_who_wait(kind: int, transport: str) -> None:
    damage = FlippedMessage(0, kind)
    started = time.monotonic()

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(ones(300_000), 1)
        elif comm.rank == 1:
            comm.recv(ones(300_000), 0)
        else:
            comm.recv(ones(3), 1)  # which will not come

    results = outcomes(3, body, transport=transport, damage={1: damage}, timeout_s=20.0)
    assert damage.fired == 1
    assert time.monotonic() - started < 5.0
    for result in results:
        assert isinstance(result, WireFormatError), results
        assert "a frame from rank 0 is damaged" in str(result)
        assert "on rank 1" in str(result)


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
def test_an_abort_reaches_those_who_wait_for_a_message(transport: str) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            time.sleep(0.3)
            comm.abort("no more")
            time.sleep(0.5)
            return
        started = time.monotonic()
        with pytest.raises(CommunicatorAborted, match="no more") as caught:
            comm.recv(ones(3), 0, timeout_s=10.0)
        assert time.monotonic() - started < 1.0
        assert caught.value.peer == 0
        with pytest.raises(CommunicatorAborted, match="not started"):
            comm.send(ones(3), 0)

    run_world(3, body, transport=transport)
