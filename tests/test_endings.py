"""Every wait ends: deadlines, aborts, closed communicators, exceptions, interrupts and forks, told to those who wait."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from squinchcomm.collectives import wire
from squinchcomm.communicator import Communicator
from squinchcomm.errors import CollectiveTimeout, CommunicatorAborted, PeerLost
from tests.conformance.collective_checks import random_array
from tests.worlds import ones, outcomes, run_world


@pytest.mark.parametrize("codec", ["none", "squinch6"])
def test_a_rank_that_has_sent_nothing_is_told_from_those_that_wait_themselves(codec: str) -> None:
    over = threading.Barrier(4, timeout=20.0)

    def body(comm: Communicator) -> None:
        comm.allreduce(ones(1 << 18), codec=codec)
        try:
            if comm.rank != 2:
                comm.allreduce(ones(1 << 18), codec=codec, timeout_s=2.0)
        finally:
            over.wait()

    found = outcomes(4, body)
    waited = [error for error in found if isinstance(error, CollectiveTimeout)]
    assert len(waited) == 3, found
    assert {error.peer for error in waited} == {2}
    assert all("look at what rank 2 is doing" in str(error) for error in waited)


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
def test_a_failure_in_a_later_call_leaves_this_one_alone(transport: str) -> None:
    """Rank 1 has left the barrier and failed in the next call, while rank 2 still waits for rank 0 in the barrier."""

    def body(comm: Communicator) -> None:
        send = comm._channel.send

        def slow(ticket: Any, peer: int, parcel: Any, **more: bool) -> None:
            time.sleep(0.5 if peer == 2 else 0.0)
            send(ticket, peer, parcel, **more)

        if comm.rank == 0:
            comm._channel.send = slow  # type: ignore[method-assign]
        comm.barrier()
        if comm.rank == 0:
            time.sleep(0.3)
        if comm.rank == 0:
            with suppress(CollectiveTimeout):  # it may have everybody's contribution
                comm.allreduce(ones(5), timeout_s=30.0)
            return
        with pytest.raises(CollectiveTimeout, match="allreduce #2 on rank 1"):
            comm.allreduce(ones(5), timeout_s=0.1 if comm.rank == 1 else 30.0)

    run_world(3, body, transport=transport)


def test_a_flush_that_does_not_end_blames_nobody_who_owes_nothing() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm._channel.transport.flush = lambda timeout_s: bool(time.sleep(timeout_s))  # type: ignore[method-assign]
            with pytest.raises(CollectiveTimeout, match="still waiting for ranks 1, 2: look at") as caught:
                comm.allreduce(ones(1 << 20), timeout_s=0.5)
            assert "nothing has come" not in str(caught.value)
        else:
            comm.allreduce(ones(1 << 20), timeout_s=5.0)
            time.sleep(1.5)

    run_world(3, body)


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


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
@pytest.mark.parametrize("calls_again", [False, True])
def test_others_hear_of_an_abort_that_came_as_a_call_was_ending(transport: str, calls_again: bool) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.barrier()
            comm._channel.abort(
                "enough"
            )  # as `abort` does while the last frame of a call has been handled but the call goes on
            if calls_again:
                with pytest.raises(CommunicatorAborted, match="enough"):
                    comm.barrier()
            comm.close()
        else:
            with pytest.raises(CommunicatorAborted, match="enough"):  # noqa: PT012 - it may come in the first
                comm.barrier()
                comm.barrier(timeout_s=5.0)

    run_world(3, body, transport=transport)


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
