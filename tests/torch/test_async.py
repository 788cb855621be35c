"""Calls in flight: many of them, their futures, callbacks that wait for other calls, threads, timeouts."""

from __future__ import annotations

import atexit
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from squinchcomm.errors import CollectiveTimeout, CommunicatorAborted
from tests.torch.ranks import run_ranks

torch = pytest.importorskip("torch")
dist = torch.distributed


def thousand_in_flight(rank: int) -> None:
    tensors = [torch.full((1 + index * 7 % 3000,), float(rank + index)) for index in range(1000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    synchronous = torch.ones(3)
    dist.all_reduce(synchronous)
    assert synchronous[0] == 2
    for index, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        assert work.is_completed() and work.is_success() and work.exception() is None
        work.wait()
        assert work.result()[0] is tensor
        assert torch.all(tensor == 2 * index + 1)


def futures(rank: int) -> None:
    tensor = torch.full((5,), 1.0)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert torch.all(doubled.wait() == 4.0)
    outputs = [torch.empty(2), torch.empty(2)]
    work = dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True)
    assert len(work.get_future().wait()) == 2
    assert outputs[1][0] == 1.0
    assert work.get_future().done()
    pending = dist.barrier(async_op=True)
    pending.get_future().wait()
    assert dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)], async_op=True).wait()[1][0] == 2


def callbacks_that_wait(rank: int) -> None:
    """As PowerSGD's hook does: a callback starts the next call and waits for it, with several buckets at once.

    The calls of callbacks have a group of their own: their order among those of the main thread is chance.
    """
    group = dist.new_group()

    def follow_up(done: Any) -> Any:
        second = done.value()[0] / 2
        return dist.all_reduce(second, group=group, async_op=True).get_future().then(lambda done: done.value()[0]).wait()

    first = [dist.all_reduce(torch.full((1000,), float(index)), async_op=True).get_future() for index in range(8)]
    last = [future.then(follow_up) for future in first]
    assert [tensor[0].item() for tensor in torch.futures.wait_all(last)] == [2.0 * index for index in range(8)]


def from_several_threads(rank: int) -> None:
    """Each thread has a group of its own, as libraries have; calls of one group keep their order."""
    groups = [dist.new_group() for _ in range(4)]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for turn in range(20):
                tensor = torch.full((500,), float(turn + index))
                dist.all_reduce(tensor, group=groups[index])
                assert torch.all(tensor == 2.0 * (turn + index))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def timeouts(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.4))
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r" Timed out .*allreduce #.*waiting for rank 1"):
            dist.all_reduce(torch.ones(3), group=group)
        assert 0.3 < time.monotonic() - started < 1.4
        with pytest.raises(CommunicatorAborted):
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    group = dist.new_group()
    if rank == 0:
        with pytest.raises(CollectiveTimeout):
            dist.barrier(group=group, async_op=True).wait(timedelta(seconds=0.2))
    group = dist.new_group()
    if rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=0.3)
        with pytest.raises(dist.DistBackendError, match="Timed out"):
            group.allreduce([torch.ones(1)], options).wait()
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if rank == 0:
        future = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
        with pytest.raises(CollectiveTimeout):
            future.wait()
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if rank == 0:
        with pytest.raises(RuntimeError, match="made no matching send with tag 5"):
            dist.recv(torch.ones(3), 1, group=group, tag=5)
    dist.barrier()


def monitored(rank: int) -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.monitored_barrier(wait_all_ranks=True)
    group = dist.new_group()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"Ranks 1, 3 failed to pass monitoredBarrier in 500 ms"):
            dist.monitored_barrier(group, timedelta(seconds=0.5), wait_all_ranks=True)
    elif rank == 2:
        with pytest.raises(RuntimeError, match=r"Rank 2 successfully reached .*rank 1, 3 failed to pass it"):
            dist.monitored_barrier(group, timedelta(seconds=2))
    dist.barrier()
    dist.all_reduce(torch.ones(3), group=group)  # no harm done to the group
    gloo = dist.new_group(backend="gloo")
    dist.monitored_barrier(gloo, timedelta(seconds=20))


def the_end_of_a_process_with_a_callback_that_waits(rank: int) -> None:
    """The process ends soon, not when the call's deadline has passed."""
    store, comm = dist.group.WORLD.get_group_store(), dist.group.WORLD.communicator
    before = comm.sequence
    work = dist.all_reduce(torch.ones(3), async_op=True)
    if rank == 0:
        errors: list[Exception] = []

        def ask_again(_: Any) -> None:
            try:
                dist.all_reduce(torch.ones(7))  # rank 1 does not
            except Exception as error:
                errors.append(error)

        work.get_future().then(ask_again)
        while comm.sequence < before + 2:
            time.sleep(0.01)
        started = time.monotonic()
        atexit._run_exitfuncs()
        assert time.monotonic() - started < 2
        assert isinstance(errors[0], CommunicatorAborted) and "without destroy_process_group" in str(errors[0])
        assert not [
            thread for thread in threading.enumerate() if thread.name.startswith("squinchcomm-future") and thread.is_alive()
        ]
        store.set("rank 0 is done", "")
    else:
        store.wait(["rank 0 is done"], timedelta(seconds=20))


def every_two_rank_check(rank: int) -> None:
    for check in (thousand_in_flight, futures, callbacks_that_wait, from_several_threads, timeouts):
        try:
            check(rank)
        except BaseException as error:
            error.add_note(f"in {check.__name__}")
            raise


def test_calls_in_flight() -> None:
    run_ranks(2, every_two_rank_check, compress="off")


def test_monitored_barrier_names_the_missing() -> None:
    run_ranks(4, monitored)


def test_callbacks_do_not_keep_a_process_alive() -> None:
    run_ranks(2, the_end_of_a_process_with_a_callback_that_waits)
