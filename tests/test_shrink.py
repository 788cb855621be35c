"""Ranks that are left after a failure go on as a smaller group."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from squinchcomm.collectives import wire
from squinchcomm.errors import CollectiveTimeout, CommunicatorAborted, PeerLost, SquinchError
from tests.conformance import collective_checks as checks
from tests.worlds import outcomes, run_world


def reduce_until_it_fails(comm: Any) -> None:
    with pytest.raises(SquinchError):
        comm.allreduce(np.ones(50_000, np.float32), timeout_s=10.0)


def fail_and_shrink(comm: Any, dies: set[int], at: threading.Barrier) -> Any:
    """All-reduces until some ranks leave, then shrinks; the sum over the ranks that are left."""
    values = checks.random_array(comm.rank, 50_000)
    comm.allreduce(values.copy())
    at.wait(10.0)
    if comm.rank in dies:
        return None
    reduce_until_it_fails(comm)
    with comm.shrink() as smaller:
        result = values.copy()
        smaller.allreduce(result)
        message = np.array([smaller.rank], np.int64)
        smaller.broadcast(message, smaller.world_size - 1)
        return smaller.rank, smaller.world_size, result, int(message[0])


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
@pytest.mark.parametrize(("size", "dies"), [(2, {0}), (3, {1}), (5, {0, 4}), (8, {2, 3, 7})])
def test_survivors_go_on(transport: str, size: int, dies: set[int]) -> None:
    at = threading.Barrier(size)
    found = run_world(size, lambda comm: fail_and_shrink(comm, dies, at), transport=transport)
    left = [rank for rank in range(size) if rank not in dies]
    exact = np.sum([checks.random_array(rank, 50_000).astype(np.float64) for rank in left], axis=0)
    for place, rank in enumerate(left):
        new_rank, new_size, result, last = found[rank]
        assert (new_rank, new_size, last) == (place, len(left), len(left) - 1)
        np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-5)
    checks.same_bits([found[rank][2] for rank in left])


def test_again_and_again() -> None:
    """Four ranks, one fewer each time; the last is alone."""

    def body(comm: Any) -> list[int]:
        sizes = []
        group = comm
        while True:
            total = np.ones(70_000, np.float32)
            group.allreduce(total)
            sizes.append(int(total[0]))
            if group.rank == group.world_size - 1:
                if group is not comm:
                    group.close()
                return sizes
            reduce_until_it_fails(group)
            smaller = group.shrink()
            if group is not comm:
                group.close()
            group = smaller

    found = run_world(4, body, transport="zmq")
    assert found == [[4, 3, 2, 1], [4, 3, 2], [4, 3], [4]]


def test_without_a_failure_it_is_a_fresh_group_and_pending_calls_end() -> None:
    at = threading.Barrier(3)

    def body(comm: Any) -> tuple[int, type]:
        at.wait(10.0)
        pending = comm.allreduce(np.ones(1 << 20, np.float32), async_op=True) if comm.rank == 0 else None
        with comm.shrink() as fresh:
            total = np.ones(3)
            fresh.allreduce(total)
            outcome = type(pending.exception()) if pending is not None else CommunicatorAborted
            return int(total[0]), outcome

    assert run_world(3, body) == [(3, CommunicatorAborted)] * 3


def test_a_rank_that_does_not_call_it_is_named() -> None:
    at = threading.Barrier(3)

    def body(comm: Any) -> None:
        at.wait(10.0)
        if comm.rank == 2:
            time.sleep(1.5)
            return
        start = time.monotonic()
        with pytest.raises(CollectiveTimeout, match="rank 2 did not take part"):
            comm.shrink(timeout_s=0.5)
        assert 0.4 < time.monotonic() - start < 1.4

    run_world(3, body)


def test_a_rank_that_others_take_for_lost_is_told() -> None:
    at = threading.Barrier(3)

    def body(comm: Any) -> str:
        at.wait(10.0)
        if comm.rank == 0:
            transport = comm._transports[0]
            transport.lost  # noqa: B018
            lost = {1: "pretended"}
            type(transport).lost = property(lambda self: lost if self is transport else self._mailbox.lost)
        try:
            with comm.shrink(timeout_s=5.0) as smaller:
                return str(smaller.world_size)
        except PeerLost as error:
            return str(error)

    from squinchcomm.transport.inproc import InprocTransport

    real = InprocTransport.lost
    try:
        found = run_world(3, body)
    finally:
        InprocTransport.lost = real  # type: ignore[method-assign]
    assert found[0] == found[2] == "2"
    assert "takes this rank for lost" in found[1]


def test_frames_that_are_no_ballots_change_nothing() -> None:
    """What was under way when the group broke, damaged frames and nonsense are dropped."""

    at = threading.Barrier(3)

    def body(comm: Any) -> int:
        at.wait(10.0)
        transport, peer = comm._transports[0], (comm.rank + 1) % 3
        good = wire.Signature("barrier", kind=wire.BALLOT)
        for signature, payload in (
            (wire.Signature("barrier"), b"x"),
            (good, b"not a ballot"),
            (good, msgspec.msgpack.encode((77, [], b""))),
        ):
            header = wire.frame_header(signature.pack(comm._channel.epoch, 1), 9, 0, 0, len(payload), wire.payload_crc(payload))
            transport.send(peer, header, payload)
            transport.send(peer, header[:-1] + b"!", payload)
        transport.send(peer, b"short", b"")
        with comm.shrink(timeout_s=5.0) as fresh:
            total = np.ones(3)
            fresh.allreduce(total)
            return int(total[0])

    assert run_world(3, body) == [3, 3, 3]


def test_a_closed_communicator_cannot_shrink() -> None:
    def body(comm: Any) -> None:
        comm.close()
        with pytest.raises(CommunicatorAborted, match="closed"):
            comm.shrink()

    assert outcomes(2, body) == [None, None]
